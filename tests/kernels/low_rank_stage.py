"""Adapters in the slots of a linear map, and what they add by definition."""

from __future__ import annotations

import torch

from holdfast.kernels.low_rank import LowRank, Pair

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
MIXES = {
    "one": [1],
    "none": [-1, -1],
    "eight": [3, 0, -1, 2, 1, 4, -1, 2],
    "chunks": [2] * 37 + [-1] * 5 + [0] * 20 + [4],
}
"""The slots of the tokens of some steps."""
RANKS = (16, 4, 1, 33, 8)
"""The rank of the adapter in each slot; the highest is above one tile."""


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(
    width: int, widths: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[LowRank, list[list[Pair | None]]]:
    """Slots with an adapter of each of `RANKS`, and its pairs. The first ones were filled with others before.
    One adapter has no pair for the first part, where there are several."""
    like = torch.empty(0, dtype=dtype, device=device)
    slots = LowRank.empty(len(RANKS), max(RANKS), width, widths, like)
    pairs = []
    for slot, rank in enumerate(RANKS):
        own: list[Pair | None] = [
            Pair(
                numbers(width, rank, dtype=dtype, seed=slot + 10 * part) / width**0.5,
                numbers(rank, outs, dtype=dtype, seed=slot + 10 * part + 1) / rank**0.5,
            )
            for part, outs in enumerate(widths)
        ]
        if slot == 1 and len(widths) > 1:
            own[0] = None
        before = [
            Pair(
                numbers(width, max(RANKS), dtype=dtype, seed=5),
                numbers(max(RANKS), outs, dtype=dtype, seed=6),
            )
            for outs in widths
        ]
        slots.fill(slot, before)
        slots.fill(slot, own)
        pairs.append(own)
    return slots, pairs


def expected(
    out: torch.Tensor,
    x: torch.Tensor,
    pairs: list[list[Pair | None]],
    widths: tuple[int, ...],
    tokens: list[int],
) -> torch.Tensor:
    """``out`` with what is added to it, in fp64."""
    total = out.double()
    for token, slot in enumerate(tokens):
        if slot < 0:
            continue
        first = 0
        for pair, width in zip(pairs[slot], widths, strict=True):
            if pair is not None:
                total[token, first : first + width] += x[token].double() @ pair.a.double() @ pair.b.double()
            first += width
    return total
