"""Parts ``rows`` and ``draw``: kernels that are bound by memory, and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...kernels.gpu import backend, rowwise, store
from ...kernels.interface import HeadNorm
from ...kernels.reference import backend as reference
from .measure import Bench, Figure, figure, median_us, of_copy_rate

COPIES = 4
"""The number of sets of inputs, which together are larger than any L2 cache."""
GOAL = 85.0


def rows(bench: Bench) -> list[Figure]:
    """Time the kernels that are bound by memory (add and norm; gate; norm, rotation and store; block copy),
    each as a share of the copy rate."""
    return [*_norm(bench), *_gate(bench), *_store(bench), *_copy(bench)]


def _random(bench: Bench, *shape: int) -> Tensor:
    dtype = torch.float16 if bench.rehearsal else torch.bfloat16
    return torch.randn(shape, device=bench.device, dtype=dtype)


def _norm(bench: Bench) -> list[Figure]:
    tokens, width = bench.size(8192, 2), bench.size(4096, 100)
    sets = [(_random(bench, tokens, width), _random(bench, tokens, width)) for _ in range(COPIES)]
    weight = _random(bench, width)
    works = [partial(rowwise.add_norm, *one, weight, 1e-6) for one in sets]
    moved = 4 * tokens * width * 2
    return of_copy_rate(bench, f"add and norm {tokens} x {width}", moved, median_us(bench, works), GOAL)


def _gate(bench: Bench) -> list[Figure]:
    tokens, width = bench.size(8192, 2), bench.size(12288, 100)
    sets = [_random(bench, tokens, 2 * width) for _ in range(COPIES)]
    works = [partial(rowwise.gated, one) for one in sets]
    moved = 3 * tokens * width * 2
    return of_copy_rate(bench, f"gate {tokens} x {width}", moved, median_us(bench, works), GOAL)


def _store(bench: Bench) -> list[Figure]:
    tokens, heads, pairs, dim = bench.size(8192, 3), 48, 8, 128
    sets = [_random(bench, tokens, heads, dim) for _ in range(COPIES)]
    arena = _random(bench, tokens // 16 + 1, 2, 2, pairs, 16, dim)
    angle, slots = _random(bench, tokens, dim), torch.randperm(tokens, device=bench.device)
    norm = HeadNorm(_random(bench, heads - pairs, dim), 1e-6)
    works = [partial(store.rotate_and_store, one, norm, (angle, angle), arena, 1, slots) for one in sets]
    moved = 2 * tokens * heads * dim * 2 + 2 * tokens * dim * 2
    return of_copy_rate(bench, f"norm, rotate, store {tokens} tokens", moved, median_us(bench, works), GOAL)


def _copy(bench: Bench) -> list[Figure]:
    layers, blocks = bench.size(36, 1), bench.size(64, 2)
    arena = _random(bench, 2 * blocks, layers, 2, 8, 16, 128)
    pairs = range(blocks), range(blocks, 2 * blocks)
    works = [partial(store.copy_blocks, arena, *pairs)] * COPIES  # the host prepares one during another
    micros = median_us(bench, works)
    return of_copy_rate(bench, f"copy {blocks} blocks", arena.numel() * arena.itemsize, micros, GOAL)


Numbers: TypeAlias = tuple[Tensor, ...]
Drawing: TypeAlias = Callable[[], Tensor]

LIMITS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "no limits": (1.0, 0, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
}
"""Temperature, top-k, top-p and min-p of all rows."""

DRAW_US = 100.0


def draws(bench: Bench) -> list[Figure]:
    """Time the sampler on 64 rows of Qwen3's vocabulary, with all rows alike, with all of these mixed, and with
    penalties for 8k tokens before; and compare it with the torch reference."""
    count, vocab, past = bench.size(64, 6), bench.size(151_936, 500), bench.size(8192, 20)
    device, lines = bench.device, list[Figure]()
    sets = [torch.randn((count, vocab), device=device) * 3 for _ in range(COPIES)]
    whole = torch.arange(count, device=device)
    tally = torch.zeros((count, vocab), dtype=torch.int32, device=device)
    said = torch.randint(vocab, (count * past,), device=device)
    backend.count(tally, whole.repeat_interleave(past), said, said % 2)
    strengths = [torch.full((count,), value, dtype=torch.float64, device=device) for value in (1.1, 0.1, 0.1)]
    alike = {name: (limits,) * count for name, limits in LIMITS.items()}
    mixed = {
        "all mixed": (*LIMITS.values(),) * count,
        "penalties, top-p 0.9": (LIMITS["top-p 0.9"],) * count,
    }
    for name, rows in (alike | mixed).items():
        heat, top_k, top_p, min_p = torch.tensor(
            rows[:count], dtype=torch.float64, device=device
        ).T.contiguous()
        limits = heat, top_k.long(), top_p, whole, whole, min_p
        penalties = (whole, tally, whole, *strengths) if name.startswith("penalties") else ()

        def works(kernels: Any, limits: Numbers = limits, penalties: Numbers = penalties) -> list[Drawing]:
            return [partial(_drawn, kernels, one.clone(), limits, penalties) for one in sets]

        pairs = zip(works(backend), works(reference), strict=True)
        same = sum(int((one() == other()).sum()) for one, other in pairs)
        ours, theirs = works(backend), works(reference)
        lines.append(figure(f"draw {name}, equal to the reference", same, "rows", COPIES * count))
        lines.append(figure(f"draw {count} x {vocab} {name}", median_us(bench, ours), "us", DRAW_US, "lower"))
        lines.append(figure(f"draw {name}, torch reference", median_us(bench, theirs, 3), "us"))
        bench.tell(lines)
    return lines


def _drawn(kernels: Any, logits: Tensor, limits: Numbers, penalties: Numbers) -> Tensor:
    if penalties:
        kernels.penalize(logits, *penalties)
    drawn: Tensor = kernels.sample(logits, *limits[:-1], min_p=limits[-1])
    return drawn
