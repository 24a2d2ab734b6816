"""Seeded sampling in four launches that depend on the numbers of rows and tokens alone; log probabilities.

It samples the same tokens as `reference.seeded_sampling`: masses are whole numbers
(`reference.truncation.masses`), so that their sums are exact whichever program makes them. Nothing of a row
is read by one program alone but what is near its limits:

1. `find_peaks` (row, chunk of the vocabulary): the greatest logit.
2. `weigh_chunks` (row, chunk): how many tokens, and how much mass, lie above each of a few levels below the
   row's greatest logit, and how much mass min-p leaves. One sum for a row without top-k and top-p.
3. `list_uncertain` (row, chunk): by the sums of all chunks every token above some level is kept, and none below
   another one. Those between them go to a list, in the order of ids. Only for rows with top-k or top-p.
4. `pick_tokens` (row): finds the limits in the list, then the chunk in which the random mass is reached, then
   the token in that chunk.

Numbers that sort: a *key* is an int32 that sorts as the logit does (`key_of`). A *score* is a logit's
distance to the row's greatest, divided by the temperature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configurations import chosen
from .support import expect

MOST_THINNED = 256
"""The most alternatives for which stretches of the vocabulary select their best first; for more, rows are
sorted whole."""

SENT_UP = (64, MOST_THINNED)
"""How many candidates of a stretch of the vocabulary there is room for: the least of these that is at least
as many as are wanted. Each size is compiled before serving."""

COLDEST = tl.constexpr(1e-6)
NONE = tl.constexpr(1 << 30)
ABSENT = tl.constexpr(-(1 << 31))
"""The key of no token, below all others."""

GREATEST = tl.constexpr(3.4028234663852886e38)
"""The greatest finite logit."""

LEVELS, STEP, BOTTOM = tl.constexpr(8), tl.constexpr(2.0), tl.constexpr(24.625)
"""Level n lies ``(n + 1) * STEP`` below a score of 0; the last but one at ``BOTTOM``, below all tokens that
have mass. In the last entry stands what min-p leaves."""

UNITS, ROUNDING = tl.constexpr(2.0**34), tl.constexpr(2.0**52)
"""The mass of a row's likeliest token. Adding and subtracting ``ROUNDING`` rounds to whole numbers."""

COUNTED, COUNT = tl.constexpr(13), tl.constexpr((1 << 13) - 1)
"""The low bits of a chunk's sum, and their mask: how many tokens; the others are their mass."""

WAYS = tl.constexpr(8)
"""Into how many parts one look at a list cuts the range in which a limit is searched."""


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """An int32 for each of the fp32 ``values`` that sorts as they do; never `ABSENT` for a number."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The fp32 number of a ``key`` that `key_of` made: its inverse; NaN for `ABSENT`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """A uniform random number in [0, 1) with 53 random bits, fp64, by Philox of (``seed``, ``position``); the
    same as `philox.uniform` of the reference."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low ^ low, low ^ low)
    return ((first.to(tl.uint64) << 21) | (second >> 11).to(tl.uint64)).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def keys_of_chunk(logits: tl.tensor, vocab: tl.tensor, chunk: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """The keys (int32 that sort as the logits) of chunk number ``chunk`` of a row, a block of ``CHUNK``;
    `ABSENT` behind the end. ``logits``: a pointer to the row, of ``vocab`` tokens."""
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.where(columns < vocab, key_of(tl.load(logits + columns, columns < vocab, other=0.0)), ABSENT)


@triton.jit
def scores_of(keys: tl.tensor, best: tl.tensor, cold: tl.tensor) -> tl.tensor:
    """The scores behind ``keys``, fp64: the distance to the row's greatest logit ``best``, divided by the
    temperature ``cold``; both fp64."""
    return (value_of(keys).to(tl.float64) - best) * (1.0 / cold)


@triton.jit
def masses_of(scores: tl.tensor) -> tl.tensor:
    """Unnormalised probabilities of ``scores``: whole numbers in fp64; 0 for NaN."""
    rounded = (tl.exp(tl.minimum(scores, 0.0)) * UNITS + ROUNDING) - ROUNDING
    return tl.where(scores <= 0.0, rounded, 0.0)


@triton.jit
def level_key(best: tl.tensor, cold: tl.tensor, level: tl.tensor) -> tl.tensor:
    """The key of the lowest logit above ``level``, given the row's greatest logit ``best`` and its
    temperature ``cold``, both fp64."""
    lowest = best - cold * tl.where(level == LEVELS - 2, BOTTOM, STEP * (level + 1))
    return key_of(tl.maximum(lowest, -GREATEST).to(tl.float32))


@triton.jit
def row_asks(
    temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, row: tl.tensor, vocab: tl.tensor
) -> tl.tensor:
    """What a row asks for: its temperature, at least `COLDEST`; how many of its likeliest tokens; which part
    of their mass. A greedy row asks for all. The first three are pointers."""
    heat, k = tl.load(temperature + row).to(tl.float64), tl.load(top_k + row)
    most = tl.where((k > 0) & (k < vocab) & (heat > 0), k, vocab).to(tl.int32)
    return tl.maximum(heat, COLDEST), most, tl.where(heat > 0, tl.load(top_p + row).to(tl.float64), 1.0)


@triton.jit
def least_score(min_p: tl.tensor, row: tl.tensor) -> tl.tensor:
    """The least score that a row's min-p keeps, fp64; ``min_p`` is a pointer."""
    part = tl.load(min_p + row).to(tl.float64)
    return tl.where(part > 0, tl.log(tl.where(part > 0, part, 1.0)), float("-inf"))


@triton.jit
def limit_of(p: tl.tensor, whole: tl.tensor) -> tl.tensor:
    """How much mass a token may have before it to be kept by top-p: less than this whole number, given the
    mass ``whole`` of all tokens that top-k leaves. The likeliest token always is."""
    return tl.maximum(tl.ceil(p * whole), 1.0)


@triton.jit
def bracket(
    sums: tl.tensor, most: tl.tensor, p: tl.tensor, row: tl.tensor, vocab: tl.tensor, chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Between which levels a row's top-k and top-p end: all tokens of the first ``high`` levels are kept, and
    none below level ``low``.

    ``sums``: a pointer to those of `weigh_chunks`, ``[rows, chunks, LEVELS]``. Returns ``low``, ``high``;
    whether top-k is a limit; the mass of all tokens if it is none; and blocks of ``CHUNKS`` with an entry for
    each chunk: how many tokens lie between the two levels, how many above, how much mass above, and how much
    of that min-p leaves.
    """
    levels, last = tl.arange(0, LEVELS), LEVELS - 2
    chunk = tl.arange(0, CHUNKS)[:, None]
    both = tl.load(sums + (row * chunks + chunk) * LEVELS + levels[None, :], chunk < chunks, other=0)
    count, mass = (both & COUNT).to(tl.int32), (both >> COUNTED).to(tl.float64)
    every, whole = tl.sum(count, 0), tl.sum(mass, 0)
    fewer = tl.sum(((levels <= last) & ((every < most) | (most == vocab))).to(tl.int32), 0)
    reach = tl.minimum(fewer, last)
    upper = tl.sum(tl.where(levels == reach, whole, 0.0), 0)
    lower = tl.where(fewer > last, upper, tl.sum(tl.where(levels == fewer - 1, whole, 0.0), 0))
    far = tl.sum(((levels <= last) & (whole < limit_of(p, upper))).to(tl.int32), 0)
    near = tl.sum(((levels <= last) & (whole < limit_of(p, lower))).to(tl.int32), 0)
    low = tl.where((fewer > last) & (p < 1), tl.minimum(far, last), reach)
    high = tl.where(p < 1, tl.minimum(near, last), fewer)
    above = tl.sum(tl.where(levels[None, :] == high - 1, count, 0), 1)
    certain = tl.sum(tl.where(levels[None, :] == high - 1, mass, 0.0), 1)
    between = tl.sum(tl.where(levels[None, :] == low, count, 0), 1) - above
    near_best = tl.sum(tl.where(levels[None, :] == last + 1, mass, 0.0), 1)
    return low, high, fewer <= last, upper, between, above, certain, tl.minimum(certain, near_best)


@triton.jit
def find_peaks(
    logits: tl.tensor, peaks: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor, CHUNK: tl.constexpr
) -> None:
    """Kernel, the first of four: write the greatest key of each chunk of ``CHUNK`` tokens to ``peaks`` ``[rows,
    chunks]``. Programs are (row, chunk). Pointers are ``logits`` and ``peaks``."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = keys_of_chunk(logits + row * stride_row, vocab, chunk, CHUNK)
    tl.store(peaks + row * tl.num_programs(1) + chunk, tl.max(keys, 0))


@triton.jit
def peaks_of(peaks: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """The greatest keys of a row's ``chunks``, a block of ``CHUNKS``, and its greatest logit, fp64, finite
    whatever the logits are. ``peaks``: the pointer to what `find_peaks` wrote."""
    each = tl.arange(0, CHUNKS)
    tops = tl.load(peaks + row * chunks + each, each < chunks, other=ABSENT)
    best = value_of(tl.max(tops, 0)).to(tl.float64)
    return tops, tl.minimum(tl.maximum(best, -GREATEST), GREATEST)


@triton.jit
def weigh_chunks(
    logits: tl.tensor, peaks: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    min_p: tl.tensor, sums: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, the second of four: write the mass of the tokens above each level, with their number in the low
    bits, to ``sums`` ``[rows, chunks, LEVELS]``, and in the last entry the mass that min-p leaves; this in
    all entries for a row without top-k and top-p. Nothing for a greedy row. Programs are (row, chunk of
    ``CHUNK``); ``CHUNKS``: at least as many as there are. Pointers are ``logits`` to ``sums``."""
    tl.static_assert(CHUNK <= COUNT)
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cold, most, p = row_asks(temperature, top_k, top_p, row, vocab)
    if tl.load(temperature + row) > 0:
        _, best = peaks_of(peaks, row, chunks, CHUNKS)
        keys = keys_of_chunk(logits + row * stride_row, vocab, chunk, CHUNK)
        scores = scores_of(keys, best, cold)
        mass = masses_of(scores).to(tl.int64) << COUNTED
        left = tl.sum(tl.where(scores >= least_score(min_p, row), mass, 0), 0)
        at = sums + (row * chunks + chunk) * LEVELS
        if (most < vocab) | (p < 1):
            for level in tl.range(0, LEVELS - 1):
                inside = keys >= level_key(best, cold, level)
                tl.store(at + level, tl.sum(tl.where(inside, mass + 1, 0), 0))
            tl.store(at + LEVELS - 1, left)
        else:
            tl.store(at + tl.arange(0, LEVELS), tl.zeros([LEVELS], tl.int64) + left)


@triton.jit
def list_uncertain(
    logits: tl.tensor, peaks: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    sums: tl.tensor, listed: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, the third of four: write the keys of the tokens between the two levels of `bracket` to
    ``listed`` ``[rows, vocab]``, in the order of ids, for rows with top-k or top-p. Programs are (row, chunk
    of ``CHUNK``); ``CHUNKS``: at least as many as there are. Pointers are ``logits`` to ``listed``."""
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cold, most, p = row_asks(temperature, top_k, top_p, row, vocab)
    if (most < vocab) | (p < 1):
        _, best = peaks_of(peaks, row, chunks, CHUNKS)
        low, high, _, _, between, _, _, _ = bracket(sums, most, p, row, vocab, chunks, CHUNKS)
        keys = keys_of_chunk(logits + row * stride_row, vocab, chunk, CHUNK)
        ceiling = tl.where(high == 0, 0x7FFFFFFF, level_key(best, cold, high - 1))
        inside = (keys >= level_key(best, cold, low)) & (keys < ceiling)
        before = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, between, 0), 0)
        slots = before + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(listed + row * vocab + slots, keys, inside & (slots < vocab))


@triton.jit
def edge_of(
    own: tl.tensor, count: tl.tensor, low: tl.tensor, high: tl.tensor, bound: tl.tensor, best: tl.tensor,
    cold: tl.tensor, WEIGHED: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The least key in [``low``, ``high``] with less than ``bound`` above it, of ``count`` keys at the
    pointer ``own``: tokens, or if ``WEIGHED`` mass. A key is an int32 that sorts as the logit does. ``best``:
    the row's greatest logit, ``cold``: its temperature. Above ``high`` there is nothing."""
    first, last = low.to(tl.int64), high.to(tl.int64)
    while first < last:
        step = (last - first + WAYS - 1) // WAYS
        pivots = first + step * tl.arange(0, WAYS)
        above = tl.zeros([WAYS], tl.float64)
        for at in tl.range(0, count, TILE):
            columns = at + tl.arange(0, TILE)
            keys = tl.load(own + columns, columns < count, other=ABSENT)
            each = tl.full([TILE], 1.0, tl.float64)
            if WEIGHED:
                each = masses_of(scores_of(keys, best, cold))
            above += tl.sum(tl.where(keys[:, None] > pivots[None, :], each[:, None], 0.0), 0)
        passed = tl.sum((above >= bound).to(tl.int32), 0)
        last = tl.where(passed < WAYS, tl.minimum(last, first + step * passed), last)
        first = tl.where(passed > 0, first + step * (passed - 1) + 1, first)
    return first.to(tl.int32)


@triton.jit
def beyond(
    own: tl.tensor, count: tl.tensor, edge: tl.tensor, least: tl.tensor, best: tl.tensor, cold: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of ``count`` keys at the pointer ``own``: how many are greater than ``edge`` and their mass, without
    that of scores below ``least``, and how many are equal to it. A key is an int32 that sorts as the logit
    does. ``best``: the row's greatest logit, ``cold``: its temperature."""
    more, level, mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float64)
    for at in tl.range(0, count, TILE):
        columns = at + tl.arange(0, TILE)
        keys = tl.load(own + columns, columns < count, other=ABSENT)
        scores = scores_of(keys, best, cold)
        more += (keys > edge).to(tl.int32)
        level += ((keys == edge) & (keys > ABSENT)).to(tl.int32)
        mass += tl.where((keys > edge) & (scores >= least), masses_of(scores), 0.0)
    return tl.sum(more, 0), tl.sum(mass, 0), tl.sum(level, 0)


@triton.jit(do_not_specialize=["chunks"])  # triton 3.6 does not compile it for a constant 1
def pick_tokens(
    logits: tl.tensor, peaks: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    min_p: tl.tensor, seeds: tl.tensor, positions: tl.tensor, sums: tl.tensor, listed: tl.tensor,
    out: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor, chunks: tl.tensor, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, the last of four: sample one token for each row into ``out``. One program per row; it reads the
    sums of the row's chunks, the list of the tokens near its limits, ``TILE`` at a time, and the one chunk in
    which its token is. Pointers are ``logits`` to ``out``.

    Kept are the keys above ``edge``, and of those equal to it the first ``room``, if their scores are at
    least ``least``.
    """
    row = tl.program_id(0).to(tl.int64)
    cold, most, p = row_asks(temperature, top_k, top_p, row, vocab)
    each, warm = tl.arange(0, CHUNKS), tl.load(temperature + row) > 0
    tops, best = peaks_of(peaks, row, chunks, CHUNKS)
    top = tl.max(tops, 0)
    least = least_score(min_p, row)
    edge, room, ties = top - 1, top * 0, top * 0  # what a greedy row keeps
    chunk = tl.min(tl.where(tops == top, each, NONE), 0)
    passed, target = best * 0, best * 0
    if warm:
        low, high, few, whole, between, above, certain, left = bracket(
            sums, most, p, row, vocab, chunks, CHUNKS
        )
        own, count = listed + row * vocab, tl.sum(between, 0)
        bottom = level_key(best, cold, low)
        ceiling = tl.where(high == 0, top, level_key(best, cold, high - 1) - 1)
        sure, ahead = tl.sum(certain, 0), tl.sum(above, 0)
        edge = top * 0 + ABSENT
        if few:
            wanted = most - ahead
            edge = edge_of(own, count, bottom, ceiling, wanted, best, cold, False, TILE)
            more, mass, _ = beyond(own, count, edge, float("-inf"), best, cold, TILE)
            room = wanted - more
            whole = sure + mass + room * masses_of(scores_of(edge, best, cold))
        if p < 1:
            bound = limit_of(p, whole) - sure
            second = edge_of(own, count, bottom, ceiling, bound, best, cold, True, TILE)
            _, mass, _ = beyond(own, count, second, float("-inf"), best, cold, TILE)
            one = masses_of(scores_of(second, best, cold))
            fitting = tl.minimum(tl.ceil((bound - mass) / tl.maximum(one, 1.0)), NONE).to(tl.int32)
            room = tl.where(second == edge, tl.minimum(room, fitting), fitting)
            edge = second
        score = scores_of(edge, best, cold)
        one = tl.where(score >= least, masses_of(score), 0.0)
        _, mass, ties = beyond(own, count, edge, least, best, cold, TILE)
        total = tl.sum(left, 0) + mass + tl.minimum(ties, room) * one
        target = tl.minimum(uniform(tl.load(seeds + row), tl.load(positions + row)) * total, total - 1)
        chunk, last = top * 0, top * 0 + chunks - 1
        while chunk < last:
            middle = (chunk + last) // 2
            _, mass, ties = beyond(
                own, tl.sum(tl.where(each <= middle, between, 0), 0), edge, least, best, cold, TILE
            )
            mass += tl.sum(tl.where(each <= middle, left, 0.0), 0) + tl.minimum(ties, room) * one
            chunk = tl.where(mass > target, chunk, middle + 1)
            last = tl.where(mass > target, middle, last)
        _, mass, ties = beyond(
            own, tl.sum(tl.where(each < chunk, between, 0), 0), edge, least, best, cold, TILE
        )
        passed = mass + tl.sum(tl.where(each < chunk, left, 0.0), 0) + tl.minimum(ties, room) * one
    keys = keys_of_chunk(logits + row * stride_row, vocab, chunk, CHUNK)
    scores = scores_of(keys, best, cold)
    level = keys == edge
    kept = (keys > edge) | (level & (ties + tl.cumsum(level.to(tl.int32), 0) <= room))
    mass = tl.where(warm, tl.where(scores >= least, masses_of(scores), 0.0), 1.0)
    reached = passed + tl.cumsum(tl.where(kept, mass, 0.0), 0)
    found = tl.min(tl.where(reached > target, chunk * CHUNK + tl.arange(0, CHUNK), NONE), 0)
    tl.store(out + row, tl.minimum(found, vocab - 1).to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor,
) -> Tensor:
    """Sample one token id per row of ``logits`` fp32 ``[rows, vocab]``: int64 ``[rows]``, the same as the
    reference.

    ``temperature`` (0: greedy), ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all), ``seeds``,
    ``positions`` (of the sampled token): ``[rows]``. Launches and scratch memory depend on ``logits``' shape
    alone, so it can be captured.
    """
    rows, vocab = logits.shape
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, one in {**limits, "seeds": seeds, "positions": positions}.items():
        expect(name, one, (rows,))
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    launch, picking = chosen("draw", logits, vocab), chosen("pick", logits, vocab)
    chunks = triton.cdiv(vocab, launch["CHUNK"])
    peaks = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    sums = torch.empty((rows, chunks, LEVELS.value), dtype=torch.int64, device=logits.device)
    listed = torch.empty((rows, vocab), dtype=torch.int32, device=logits.device)
    grid, row, width = (rows, chunks), (logits, peaks, temperature, top_k, top_p), (vocab, logits.stride(0))
    # All kernels must find the same levels: no fused multiply-add in one that is none in another.
    same = {"CHUNKS": triton.next_power_of_2(chunks), "enable_fp_fusion": False}
    find_peaks[grid](logits, peaks, *width, **launch)
    weigh_chunks[grid](*row, min_p, sums, *width, **same, **launch)
    list_uncertain[grid](*row, sums, listed, *width, **same, **launch)
    pick_tokens[(rows,)](
        *row, min_p, seeds, positions, sums, listed, out, *width, chunks,
        CHUNK=launch["CHUNK"], **same, **picking,
    )  # fmt: skip
    return out


@triton.jit
def sum_exponentials(
    logits: tl.tensor, best: tl.tensor, mass: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for `log_probabilities` alone, not for sampling: for each stretch of a row's vocabulary write its
    greatest logit to ``best``, and its sum of exp(logit - greatest) to ``mass``, both fp64 ``[rows,
    stretches]``. Programs are (row, stretch of ``CHUNK`` tokens). Pointers are ``logits``, ``best`` and
    ``mass``."""
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = stretch * CHUNK + tl.arange(0, CHUNK)
    wide = tl.load(logits + row * stride_row + columns, columns < vocab, other=float("-inf")).to(tl.float64)
    top = tl.max(wide, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = row * tl.num_programs(1) + stretch
    tl.store(best + at, top)
    tl.store(mass + at, tl.sum(tl.exp(wide - safe), 0))


@triton.jit(do_not_specialize=["wanted"])
def send_up(
    logits: tl.tensor, values: tl.tensor, ids: tl.tensor, wanted: tl.tensor, vocab: tl.tensor,
    stride_row: tl.tensor, CHUNK: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, for the log probabilities of a reply: select the ``wanted`` greatest logits of one stretch of a
    row's vocabulary, in the order of ids. Writes them and their ids to ``values`` and ``ids``, ``[rows,
    stretches, MOST]``; unused ids are -1. Pointers are ``logits`` to ``ids``.

    Programs are (row, stretch of ``CHUNK`` tokens). The stretch stays in registers during the bisection.
    """
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = stretch * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * stride_row + columns, columns < vocab, other=0.0)
    keys = tl.where(columns < vocab, key_of(numbers).to(tl.uint32, bitcast=True) ^ 0x80000000, 0)
    edge = tl.zeros([], tl.uint32)
    for turn in tl.range(0, 32):
        bound = edge | (tl.full([], 1, tl.uint32) << (31 - turn))
        edge = tl.where(tl.sum((keys >= bound).to(tl.int32), 0) >= wanted, bound, edge)
    room = wanted - tl.sum((keys > edge).to(tl.int32), 0)
    level = keys == edge
    kept = ((keys > edge) | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))) & (keys > 0)
    slots = tl.cumsum(kept.to(tl.int32), 0) - 1
    start = (row * tl.num_programs(1) + stretch) * MOST
    tl.store(values + start + slots, numbers, kept)
    tl.store(ids + start + slots, columns, kept)
    unused = tl.arange(0, MOST)
    tl.store(ids + start + unused, tl.full([MOST], -1, tl.int32), unused >= tl.sum(kept.to(tl.int32), 0))


def room_for(count: int) -> int:
    """How many candidates a stretch gets room for, if ``count`` are wanted: the least entry of `SENT_UP` that
    is at least ``count``, which is at most `MOST_THINNED`."""
    return next(room for room in SENT_UP if room >= count)


def log_probabilities(logits: Tensor, ids: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log probability of ``ids`` ``[rows]``, fp64 ``[rows]``; and the ids (int64) and log probabilities
    (fp64) of the ``most`` likeliest tokens, ``[rows, most]``, likeliest first. ``logits``: fp32 ``[rows,
    vocab]``.

    Each stretch of the vocabulary selects its own best first.
    """
    rows, vocab = logits.shape
    expect("ids", ids, (rows,))
    chunk = chosen("send_up", logits, vocab)
    stretches = triton.cdiv(vocab, chunk["CHUNK"])
    best = torch.empty((rows, stretches), dtype=torch.float64, device=logits.device)
    mass = torch.empty_like(best)
    if rows:
        sum_exponentials[(rows, stretches)](logits, best, mass, vocab, logits.stride(0), **chunk)
    whole = (best + mass.log()).logsumexp(-1, keepdim=True)
    values, names = _likeliest(logits, most, chunk, stretches)
    chosen_ones = logits.gather(-1, ids[:, None]).double() - whole
    return chosen_ones.squeeze(-1), names, values.double() - whole


def _likeliest(logits: Tensor, most: int, chunk: dict[str, int], stretches: int) -> tuple[Tensor, Tensor]:
    """The ``most`` greatest logits of each row, the greatest first, and their token ids, both ``[rows, most]``,
    for `log_probabilities` alone, not for sampling. ``chunk``: the launch arguments of the kernel that selects
    them; ``stretches``: into how many stretches it cuts the vocabulary."""
    rows, vocab = logits.shape
    if not most or most > MOST_THINNED or not rows:
        best = logits.topk(most, dim=-1)
        return best.values, best.indices
    room = room_for(most)
    values = torch.empty((rows, stretches * room), dtype=torch.float32, device=logits.device)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    send_up[(rows, stretches)](logits, values, ids, most, vocab, logits.stride(0), MOST=room, **chunk)
    best = values.masked_fill(ids < 0, float("-inf")).topk(most, dim=-1)
    return best.values, ids.gather(-1, best.indices).long()
