"""Penalties and grammar masks on logits; only the logits that change are read and written.

The numbers are those of `reference.penalties`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configurations import chosen
from .support import expect

SEEN, ONCE = tl.constexpr(1), tl.constexpr(2)
"""``SEEN``: the bit of a tally cell that says that its token occurs at all. ``ONCE``: what a cell gets for
each occurrence in the output."""


@triton.jit(do_not_specialize=["entries"])
def count_tokens(
    tally: tl.tensor, lines: tl.tensor, tokens: tl.tensor, output: tl.tensor, entries: tl.tensor,
    vocab: tl.tensor, ENTRIES: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: count tokens into their ``lines`` of ``tally``, rows of ``vocab`` cells: a cell has 1 if its
    token occurs at all, and gets 2 more each time it is in the output. ``output``: 1 for a token of the
    output. Programs take ``ENTRIES`` tokens each. Pointers are ``tally`` to ``output``."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    there = at < entries
    cells = tally + tl.load(lines + at, there, other=0) * vocab + tl.load(tokens + at, there, other=0)
    tl.atomic_or(cells, SEEN, there)
    tl.atomic_add(cells, tl.load(output + at, there, other=0).to(tl.int32) * ONCE, there)


def count(tally: Tensor, lines: Tensor, tokens: Tensor, output: Tensor) -> None:
    """Count tokens into a tally, int32 ``[lines, vocab]``, in place, as the reference's `count`.

    ``lines``, ``tokens``: int64 ``[n]``, the line and id of each token. ``output``: int64 ``[n]``, 1 for a
    token sampled in this turn, 0 for the prompt.
    """
    entries = tokens.numel()
    for name, one in (("lines", lines), ("output", output)):
        expect(name, one, (entries,))
    launch = chosen("penalize", tally, 0)
    if entries:
        count_tokens[(triton.cdiv(entries, launch["ENTRIES"]),)](
            tally, lines, tokens, output, entries, tally.shape[-1], **launch
        )


@triton.jit
def penalize_counted(
    logits: tl.tensor, rows: tl.tensor, tally: tl.tensor, lines: tl.tensor, repetition: tl.tensor,
    frequency: tl.tensor, presence: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: apply the penalties to the logits of the tokens that are counted. Programs are (entry of ``rows``
    and ``lines``, chunk of ``CHUNK`` tokens of the vocabulary). Pointers are ``logits`` to ``presence``."""
    one, tokens = tl.program_id(0), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    cells = tl.load(tally + tl.load(lines + one) * vocab + tokens, tokens < vocab, other=0)
    cell, counted = logits + tl.load(rows + one) * stride_row + tokens, cells != 0
    logit, times = tl.load(cell, counted, other=0.0), cells // ONCE
    factor = tl.load(repetition + one).to(tl.float32)
    logit = tl.where(logit < 0, logit * factor, tl.math.div_rn(logit, factor))
    logit -= tl.load(frequency + one).to(tl.float32) * times.to(tl.float32)
    logit -= tl.load(presence + one).to(tl.float32) * tl.minimum(times, 1).to(tl.float32)
    tl.store(cell, logit, counted)


def penalize(
    logits: Tensor,
    rows: Tensor,
    tally: Tensor,
    lines: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Apply penalties for earlier tokens to ``rows`` (int64 ``[n]``) of ``logits`` fp32 ``[rows, vocab]``, in
    cell. The numbers are those of the reference's `penalize`.

    ``tally``: of `count`; ``lines``: the line of each row in it, int64 ``[n]``. ``repetition`` (1: none)
    divides a positive logit of a counted token and multiplies a negative one; ``frequency`` is subtracted for
    each time that the token is in the output, ``presence`` once if it is: float ``[n]``.
    """
    entries, vocab = rows.numel(), logits.shape[-1]
    strengths = {"repetition": repetition, "frequency": frequency, "presence": presence}
    for name, one in {"lines": lines, **strengths}.items():
        expect(name, one, (entries,))
    expect("tally", tally, (tally.shape[0], vocab))
    chunk = chosen("send_up", logits, vocab)
    if entries:
        # Products are rounded before they are subtracted, as in torch: no fused multiply-add.
        penalize_counted[(entries, triton.cdiv(vocab, chunk["CHUNK"]))](
            logits, rows, tally, lines, repetition, frequency, presence, vocab, logits.stride(0),
            enable_fp_fusion=False, **chunk,
        )  # fmt: skip


@triton.jit
def allow_bits(
    logits: tl.tensor, rows: tl.tensor, masks: tl.tensor, vocab: tl.tensor, words: tl.tensor,
    stride_row: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: write -inf to each logit that has a bit of 0 in its row's mask; reads no logit. ``rows``: the row
    of each mask; ``masks``: ``words`` int64 words for each. Programs are (mask, stretch of ``CHUNK`` tokens of
    the vocabulary). Pointers are ``logits`` to ``masks``."""
    one, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(masks + one * words + tokens // 64, tokens < vocab, other=-1)
    closed = ((word >> (tokens % 64).to(tl.int64)) & 1) == 0
    cell = logits + tl.load(rows + one) * stride_row + tokens
    tl.store(cell, tl.full([CHUNK], float("-inf"), tl.float32), (tokens < vocab) & closed)


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
