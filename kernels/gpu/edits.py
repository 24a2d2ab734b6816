"""Penalties, grammars' masks and log probabilities without passes over whole rows that need none.

The same numbers as `reference.penalties` and `reference.scoring`. Knows no sequences: a row is logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.penalties import Said
from .configurations import chosen
from .draw import MOST_THINNED, room_for, send_up
from .support import expect

SEEN, ONCE = tl.constexpr(1), tl.constexpr(2)
"""In a tally: that a token was said at all; and one time of its being said in the output."""


@triton.jit(do_not_specialize=["entries"])
def tally_said(
    tally: tl.tensor, tokens: tl.tensor, owners: tl.tensor, output: tl.tensor,
    entries: tl.tensor, width: tl.tensor, ENTRIES: tl.constexpr,
) -> None:  # fmt: skip
    """Into ``tally`` ``[n, width]``, all 0 before: how often each token was output, times 2, plus 1 if said."""
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
    """Edit each tallied logit once: whoever takes its tally, and leaves 0 there, does it."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    there = at < entries
    whose, token = tl.load(owners + at, there, other=0), tl.load(tokens + at, there, other=0)
    taken = tl.atomic_xchg(tally + whose * width + token, tl.zeros([ENTRIES], tl.int32), there)
    mine = there & (taken != 0)
    place = logits + tl.load(rows + whose, mine, other=0) * stride_row + token
    logit = tl.load(place, mine, other=0.0)
    factor = tl.load(repetition + whose, mine, other=1.0).to(tl.float32)
    logit = tl.where(logit < 0, logit * factor, tl.math.div_rn(logit, factor))
    times = taken // ONCE
    logit -= tl.load(frequency + whose, mine, other=0.0).to(tl.float32) * times.to(tl.float32)
    logit -= tl.load(presence + whose, mine, other=0.0).to(tl.float32) * tl.minimum(times, 1).to(tl.float32)
    tl.store(place, logit, mine)


def penalize(logits: Tensor, said: Said, repetition: Tensor, frequency: Tensor, presence: Tensor) -> None:
    """As `penalties.penalize`, touching only what was said."""
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
    # Products are rounded before they are taken off, as torch does it: no fused multiply-add.
    penalize_said[grid](
        logits, tally, said.rows, said.tokens, said.owners, *strengths, entries, width, logits.stride(0),
        enable_fp_fusion=False, **launch,
    )  # fmt: skip


@triton.jit
def allow_bits(
    logits: tl.tensor, rows: tl.tensor, masks: tl.tensor, vocab: tl.tensor, words: tl.tensor,
    stride_row: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """-inf where a bit is 0; no logit is read. Programs: (row, stretch)."""
    one, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(masks + one * words + places // 64, places < vocab, other=-1)
    closed = ((word >> (places % 64).to(tl.int64)) & 1) == 0
    place = logits + tl.load(rows + one) * stride_row + places
    tl.store(place, tl.full([CHUNK], float("-inf"), tl.float32), (places < vocab) & closed)


def allow(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """As `penalties.allow`, writing only what is not allowed."""
    vocab, count = logits.shape[-1], rows.numel()
    expect("masks", masks, (count, -(-vocab // 64)))
    chunk = chosen("send_up", logits, vocab)
    if count:
        allow_bits[(count, triton.cdiv(vocab, chunk["CHUNK"]))](
            logits, rows, masks, vocab, masks.stride(0), logits.stride(0), **chunk
        )


@triton.jit
def mass_of(
    logits: tl.tensor, best: tl.tensor, mass: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """The greatest logit of a stretch, and the sum of exp(logit - it) in fp64; programs: (row, stretch)."""
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = stretch * CHUNK + tl.arange(0, CHUNK)
    wide = tl.load(logits + row * stride_row + places, places < vocab, other=float("-inf")).to(tl.float64)
    top = tl.max(wide, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = row * tl.num_programs(1) + stretch
    tl.store(best + at, top)
    tl.store(mass + at, tl.sum(tl.exp(wide - safe), 0))


def log_probabilities(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `scoring.log_probabilities`, each stretch of the vocabulary sending up its own best."""
    rows, vocab = logits.shape
    expect("ids", ids, (rows,))
    chunk = chosen("send_up", logits, vocab)
    stretches = triton.cdiv(vocab, chunk["CHUNK"])
    best = torch.empty((rows, stretches), dtype=torch.float64, device=logits.device)
    mass = torch.empty_like(best)
    if rows:
        mass_of[(rows, stretches)](logits, best, mass, vocab, logits.stride(0), **chunk)
    whole = (best + mass.log()).logsumexp(-1, keepdim=True)
    values, names = _likeliest(logits, most, chunk, stretches)
    chosen_ones = logits.gather(-1, ids[:, None]).double() - whole
    return chosen_ones.squeeze(-1), names, values.double() - whole


def _likeliest(logits: Tensor, most: int, chunk: dict[str, int], stretches: int) -> tuple[Tensor, Tensor]:
    """The ``most`` greatest logits of each row, the greatest first, and their ids."""
    rows, vocab = logits.shape
    if not most or most > MOST_THINNED or not rows:
        best = logits.topk(most, dim=-1)
        return best.values, best.indices
    room = room_for(most)
    values = torch.empty((rows, stretches * room), dtype=torch.float32, device=logits.device)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    ones = torch.ones(rows, dtype=torch.float32, device=logits.device)
    wanted = torch.full((rows,), most, dtype=torch.int64, device=logits.device)
    send_up[(rows, stretches)](logits, ones, wanted, values, ids, vocab, logits.stride(0), MOST=room, **chunk)
    best = values.masked_fill(ids < 0, float("-inf")).topk(most, dim=-1)
    return best.values, ids.gather(-1, best.indices).long()
