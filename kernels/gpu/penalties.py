"""Penalties and grammar masks on logits; only the logits that change are read and written.

The numbers are those of `reference.penalties`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.penalties import Said
from .configurations import chosen
from .support import expect

SEEN, ONCE = tl.constexpr(1), tl.constexpr(2)
"""``SEEN``: the bit of a tally cell that says that its token occurs at all. ``ONCE``: what a cell gets for
each occurrence in the output."""


@triton.jit(do_not_specialize=["entries"])
def tally_said(
    tally: tl.tensor, tokens: tl.tensor, owners: tl.tensor, output: tl.tensor,
    entries: tl.tensor, width: tl.tensor, ENTRIES: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: count the earlier tokens into a zeroed ``tally`` ``[n, width]``, n rows by vocabulary: a cell
    gets 1 if its token occurs at all in the row, and 2 more each time it is in the output. ``owners``: the row
    of each token; ``output``: 1 for a token of the output. Programs take ``ENTRIES`` tokens each. Pointers are
    ``tally`` to ``output``."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    there = at < entries
    cells = tl.load(owners + at, there, other=0) * width + tl.load(tokens + at, there, other=0)
    tl.atomic_or(tally + cells, SEEN, there)
    tl.atomic_add(tally + cells, tl.load(output + at, there, other=0).to(tl.int32) * ONCE, there)


@triton.jit(do_not_specialize=["entries"])
def penalize_said(
    logits: tl.tensor, tally: tl.tensor, rows: tl.tensor, tokens: tl.tensor, owners: tl.tensor,
    repetition: tl.tensor, frequency: tl.tensor, presence: tl.tensor,
    entries: tl.tensor, width: tl.tensor, stride_row: tl.tensor, ENTRIES: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: apply the penalties to the logits of the counted tokens, each once: a token may be listed several
    times, and only the program that swaps its count in ``tally`` for 0 edits its logit. Programs take
    ``ENTRIES`` of the listed tokens each. Pointers are ``logits`` to ``presence``."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    there = at < entries
    owner, token = tl.load(owners + at, there, other=0), tl.load(tokens + at, there, other=0)
    taken = tl.atomic_xchg(tally + owner * width + token, tl.zeros([ENTRIES], tl.int32), there)
    mine = there & (taken != 0)
    place = logits + tl.load(rows + owner, mine, other=0) * stride_row + token
    logit = tl.load(place, mine, other=0.0)
    factor = tl.load(repetition + owner, mine, other=1.0).to(tl.float32)
    logit = tl.where(logit < 0, logit * factor, tl.math.div_rn(logit, factor))
    times = taken // ONCE
    logit -= tl.load(frequency + owner, mine, other=0.0).to(tl.float32) * times.to(tl.float32)
    logit -= tl.load(presence + owner, mine, other=0.0).to(tl.float32) * tl.minimum(times, 1).to(tl.float32)
    tl.store(place, logit, mine)


def penalize(logits: Tensor, said: Said, repetition: Tensor, frequency: Tensor, presence: Tensor) -> None:
    """Apply penalties for earlier tokens to ``logits`` ``[rows, vocab]``, in place; only the logits of these
    tokens are touched. The numbers are those of the reference's `penalize`.

    ``said``: the rows to penalize and their earlier tokens. ``repetition`` (1: none) divides a positive logit
    and multiplies a negative one; ``frequency`` is subtracted for each time that the token is in the output,
    ``presence`` once if it is. Each is ``[n]``, one for each of ``said.rows``.
    """
    entries, count, width = said.tokens.numel(), said.rows.numel(), logits.shape[-1]
    for name, one in (("owners", said.owners), ("output", said.output)):
        expect(name, one, (entries,))
    strengths = [one.contiguous() for one in (repetition, frequency, presence)]
    for one in strengths:
        expect("penalties", one, (count,))
    if not entries:
        return
    tally = torch.zeros((count, width), dtype=torch.int32, device=logits.device)
    launch = chosen("penalize", logits, 0)
    grid = (triton.cdiv(entries, launch["ENTRIES"]),)
    tally_said[grid](tally, said.tokens, said.owners, said.output, entries, width, **launch)
    # Products are rounded before they are subtracted, as in torch: no fused multiply-add.
    penalize_said[grid](
        logits, tally, said.rows, said.tokens, said.owners, *strengths, entries, width, logits.stride(0),
        enable_fp_fusion=False, **launch,
    )  # fmt: skip


@triton.jit
def allow_bits(
    logits: tl.tensor, rows: tl.tensor, masks: tl.tensor, vocab: tl.tensor, words: tl.tensor,
    stride_row: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: write -inf to each logit that has a bit of 0 in its row's mask; reads no logit. ``rows``: the row
    of each mask; ``masks``: ``words`` int64 words for each. Programs are (mask, stretch of ``CHUNK`` tokens of
    the vocabulary). Pointers are ``logits`` to ``masks``."""
    one, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(masks + one * words + places // 64, places < vocab, other=-1)
    closed = ((word >> (places % 64).to(tl.int64)) & 1) == 0
    place = logits + tl.load(rows + one) * stride_row + places
    tl.store(place, tl.full([CHUNK], float("-inf"), tl.float32), (places < vocab) & closed)


def allow(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set all logits of ``rows``, int64 ``[n]``, to -inf except those with their bit set, in place; only the
    logits that are not allowed are written. ``masks``: int64 ``[n, ceil(vocab / 64)]``, one bit per token,
    the lowest bit first."""
    vocab, count = logits.shape[-1], rows.numel()
    expect("masks", masks, (count, -(-vocab // 64)))
    chunk = chosen("send_up", logits, vocab)
    if count:
        allow_bits[(count, triton.cdiv(vocab, chunk["CHUNK"]))](
            logits, rows, masks, vocab, masks.stride(0), logits.stride(0), **chunk
        )
