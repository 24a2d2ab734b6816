"""Where a step's tokens are, read on the device from the tables that stay there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 128


@triton.jit(do_not_specialize=["tokens", "width"])
def look_up_tokens(
    tables: tl.tensor, last: tl.tensor, lines: tl.tensor, positions: tl.tensor, given: tl.tensor,
    ids: tl.tensor, slots: tl.tensor, tokens: tl.tensor, width: tl.tensor,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of `look_up`: ``TOKENS`` tokens a program. Pointers are ``tables`` to ``slots``."""
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = at < tokens
    line, position = tl.load(lines + at, there, other=-1), tl.load(positions + at, there, other=0)
    held = there & (line >= 0)
    block = tl.load(tables + line * width + position // BLOCK, held, other=0).to(tl.int64)
    slot = tl.where(line < 0, -1, block * BLOCK + position % BLOCK)
    own = tl.load(given + at, there, other=0)
    drawn = tl.load(last + line, held & (own < 0), other=0)
    tl.store(ids + at, tl.where(own < 0, drawn, own), there)
    tl.store(slots + at, slot, there)


def look_up(
    tables: Tensor, last: Tensor, lines: Tensor, positions: Tensor, given: Tensor, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """The id of each token of a step, and its slot in the arena, as `reference.backend.look_up` has them."""
    tokens = positions.shape[0]
    ids, slots = torch.empty_like(given), torch.empty_like(positions)
    if tokens:
        look_up_tokens[(triton.cdiv(tokens, TOKENS),)](
            tables, last, lines, positions, given, ids, slots, tokens, tables.stride(0),
            BLOCK=block_tokens, TOKENS=TOKENS, num_warps=4,
        )  # fmt: skip
    return ids, slots
