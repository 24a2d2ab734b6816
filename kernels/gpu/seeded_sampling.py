"""Seeded sampling without a sort: limits are found by bisection over the bits of the logits; log probabilities.

It samples the same tokens as `reference.seeded_sampling`. The number of kept tokens and the mass above a
logit are monotone in that logit, so 32 counts find the limit of top-k or top-p. If every limited row has a
top-k, each stretch of the vocabulary first selects its own k best, and the rest is done on those. Masses are
fp64; the uniform number is Philox's of (seed, position).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configurations import chosen
from .support import expect

MOST_THINNED = 256
"""The greatest top-k for which stretches of the vocabulary select their best first; above it rows are read
whole."""

SENT_UP = (64, MOST_THINNED)
"""How many candidates of a stretch of the vocabulary there is room for: the least of these that is at least
the greatest top-k. Each size is compiled before serving."""

COLDEST = tl.constexpr(1e-6)
NONE = tl.constexpr(1 << 30)


@triton.jit
def key_of(values: tl.tensor) -> tl.tensor:
    """A uint32 for each of the fp32 ``values`` that sorts as they do; never 0 for a number, so that 0 can
    stand for none."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0, its equal
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """The fp32 number of a ``key`` that `key_of` made: its inverse."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """A uniform random number in [0, 1) with 53 random bits, fp64, by Philox of (``seed``, ``position``); the
    same as `philox.uniform` of the reference."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low ^ low, low ^ low)
    return ((first.to(tl.uint64) << 21) | (second >> 11).to(tl.uint64)).to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def tile_of(
    values_at: tl.tensor, ids_at: tl.tensor, at: tl.tensor, width: tl.tensor, direct: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns two blocks of values: of ``TILE`` entries of a row from the index ``at`` on, of its ``width``:
    their keys (uint32 that sort as the logits, see `key_of`; 0 behind the end), and their token ids. The row is
    the logits if ``direct``, else the candidates that `send_up` selected, with the token ids ``ids_at``.
    ``values_at``, ``ids_at``: pointers to the row."""
    places = at + tl.arange(0, TILE)
    ids = places
    if not direct:
        ids = tl.load(ids_at + places, places < width, other=-1)
    there = (places < width) & (ids >= 0)
    keys = key_of(tl.load(values_at + places, there, other=0.0))
    return tl.where(there, keys, 0), ids


@triton.jit
def count_from(
    values_at: tl.tensor, ids_at: tl.tensor, width: tl.tensor, direct: tl.tensor, bound: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many entries of a row have a key of at least ``bound``. A key is a uint32 that sorts as the logit
    does (`key_of`). The row has ``width`` entries: the logits if ``direct``, else candidates that were selected
    before, with the values ``values_at`` and the token ids ``ids_at`` (pointers; ``bound`` and the result are
    values)."""
    many = tl.zeros([TILE], tl.int32)
    for at in tl.range(0, width, TILE):
        keys, _ = tile_of(values_at, ids_at, at, width, direct, TILE)
        many += (keys >= bound).to(tl.int32)
    return tl.sum(many, 0)


@triton.jit
def share_of(keys: tl.tensor, best: tl.tensor, cold: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """The unnormalised probability of the logits behind ``keys`` (see `key_of`): ``exp(score - best)`` in
    fp64, where a score is the logit divided by the temperature ``cold`` and ``best`` the row's greatest; 0
    for a score below ``floor``."""
    scores = value_of(keys).to(tl.float64) / cold
    return tl.where(scores >= floor, tl.exp(scores - best), 0.0)


@triton.jit
def mass_above(
    values_at: tl.tensor, ids_at: tl.tensor, width: tl.tensor, direct: tl.tensor, bound: tl.tensor,
    best: tl.tensor, cold: tl.tensor, floor: tl.tensor, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The unnormalised probability (`share_of`) of all tokens of a row with keys greater than ``bound``. A key
    is a uint32 that sorts as the logit does. The row has ``width`` entries: the logits if ``direct``, else
    candidates with the values ``values_at`` and the token ids ``ids_at`` (pointers; all else are values).
    ``best``: the row's greatest score (logit divided by the temperature ``cold``); scores below ``floor`` count
    0."""
    mass = tl.zeros([TILE], tl.float64)
    for at in tl.range(0, width, TILE):
        keys, _ = tile_of(values_at, ids_at, at, width, direct, TILE)
        mass += tl.where(keys > bound, share_of(keys, best, cold, floor), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def send_up(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, values: tl.tensor, ids: tl.tensor,
    vocab: tl.tensor, stride_row: tl.tensor, CHUNK: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel, for sampling and for the log probabilities of a reply: select the ``top_k`` greatest logits (1 if
    greedy) of one stretch of a row's vocabulary, in the order of ids. Writes them and their ids to ``values``
    and ``ids``, ``[rows, stretches, MOST]``; unused ids are -1. Pointers are ``logits`` to ``ids``.

    Programs are (row, stretch of ``CHUNK`` tokens). The stretch stays in registers during the bisection.
    """
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = stretch * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * stride_row + places, places < vocab, other=0.0)
    keys = tl.where(places < vocab, key_of(numbers), 0)
    wanted = tl.where(tl.load(temperature + row) <= 0, 1, tl.load(top_k + row)).to(tl.int32)
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
    tl.store(ids + start + slots, places, kept)
    unused = tl.arange(0, MOST)
    tl.store(ids + start + unused, tl.full([MOST], -1, tl.int32), unused >= tl.sum(kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["thinned"])
def sample_rows(
    logits: tl.tensor, values: tl.tensor, ids: tl.tensor, temperature: tl.tensor, top_k: tl.tensor,
    top_p: tl.tensor, min_p: tl.tensor, seeds: tl.tensor, positions: tl.tensor, out: tl.tensor,
    vocab: tl.tensor, stride_row: tl.tensor, thinned: tl.tensor, TILE: tl.constexpr, THIN: tl.constexpr,
    MIN_P: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel: sample one token for each row into ``out``. It finds the limits (top-k, top-p, min-p) by
    bisection, then the first id with a cumulated mass above the random one. One program per row. Pointers are
    ``logits`` to ``out``.

    With ``THIN`` limited rows read their ``thinned`` candidates in ``values`` and ``ids``, which `send_up`
    selected.
    """
    row = tl.program_id(0).to(tl.int64)
    heat, p = tl.load(temperature + row).to(tl.float64), tl.load(top_p + row).to(tl.float64)
    greedy = heat <= 0
    cold = tl.maximum(heat, COLDEST)
    asked = tl.load(top_k + row).to(tl.int32)
    most = tl.where(greedy, 1, tl.where(asked == 0, vocab, tl.minimum(asked, vocab)))
    p = tl.where(greedy, 1.0, p)
    direct = most == vocab  # an unlimited row among limited ones: it has no candidates
    values_at, ids_at, width = logits + row * stride_row, ids, vocab
    if THIN:
        direct = (asked == 0) & (heat > 0)
        width = tl.where(direct, vocab, thinned)
        values_at = tl.where(direct, values_at, values + row * thinned)
        ids_at = ids + row * thinned
    else:
        direct = row >= 0
    top = tl.zeros([], tl.uint32)
    for at in tl.range(0, width, TILE):
        keys, _ = tile_of(values_at, ids_at, at, width, direct, TILE)
        top = tl.maximum(top, tl.max(keys, 0))
    best = value_of(top).to(tl.float64) / cold
    floor = best * 0 + float("-inf")
    edge, room = top ^ top, top.to(tl.int32) * 0 + NONE
    if most < vocab:
        for turn in tl.range(0, 32):
            bound = edge | ((top | 1) // (top | 1) << (31 - turn))
            edge = tl.where(count_from(values_at, ids_at, width, direct, bound, TILE) >= most, bound, edge)
        room = most - count_from(values_at, ids_at, width, direct, edge + 1, TILE)
    above = mass_above(values_at, ids_at, width, direct, edge, best, cold, floor, TILE)
    if p < 1:
        each = tl.where(edge > 0, share_of(edge, best, cold, floor), 0.0)
        limit = p * (above + tl.where(edge > 0, room * each, 0.0))
        lowest = edge ^ edge
        for turn in tl.range(0, 32):
            bit = (top | 1) // (top | 1) << (31 - turn)
            mass = mass_above(values_at, ids_at, width, direct, lowest | (bit - 1), best, cold, floor, TILE)
            lowest = tl.where((mass < limit) | (mass == 0), lowest, lowest | bit)
        room = tl.where(lowest > edge, NONE, room)
        edge = tl.maximum(lowest, edge)
        above = mass_above(values_at, ids_at, width, direct, edge, best, cold, floor, TILE)
        each = tl.where(edge > 0, share_of(edge, best, cold, floor), 0.0)
        fitting = tl.where(each > 0, tl.ceil((limit - above) / each), NONE)
        room = tl.maximum(tl.minimum(room, tl.minimum(fitting, NONE).to(tl.int32)), 1)
    level = count_from(values_at, ids_at, width, direct, edge, TILE)
    level -= count_from(values_at, ids_at, width, direct, edge + 1, TILE)
    room = tl.minimum(room, level)
    if MIN_P:
        floor = best + tl.log(tl.load(min_p + row).to(tl.float64))
        above = mass_above(values_at, ids_at, width, direct, edge, best, cold, floor, TILE)
    total = above + tl.where(edge > 0, room * share_of(edge, best, cold, floor), 0.0)
    target = uniform(tl.load(seeds + row), tl.load(positions + row)) * total
    drawn = pick(values_at, ids_at, width, direct, edge, room, best, cold, floor, target, TILE)
    tl.store(out + row, drawn.to(tl.int64))


@triton.jit
def pick(
    values_at: tl.tensor, ids_at: tl.tensor, width: tl.tensor, direct: tl.tensor, edge: tl.tensor,
    room: tl.tensor, best: tl.tensor, cold: tl.tensor, floor: tl.tensor, target: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The token to sample from one row: the first kept id with a cumulated probability (not normalised) above
    ``target``; the last kept one if rounding leaves none. Kept are the tokens with a key above ``edge``, and of
    those with that key the first ``room``; a key is a uint32 that sorts as the logit does.

    The row has ``width`` entries: the logits if ``direct``, else candidates with the values ``values_at`` and
    the token ids ``ids_at`` (pointers; all else are values). ``best``: its greatest score (logit divided by the
    temperature ``cold``); scores below ``floor`` count 0.
    """
    passed, before = target * 0, room * 0
    found, last = room * 0 + NONE, room * 0
    for at in tl.range(0, width, TILE):
        keys, names = tile_of(values_at, ids_at, at, width, direct, TILE)
        level = (keys == edge) & (keys > 0)
        rank = before + tl.cumsum(level.to(tl.int32), 0)
        kept = (keys > edge) | (level & (rank <= room))
        shares = tl.where(kept, share_of(keys, best, cold, floor), 0.0)
        reached = passed + tl.cumsum(shares, 0)
        found = tl.minimum(found, tl.min(tl.where((shares > 0) & (reached > target), names, NONE), 0))
        last = tl.maximum(last, tl.max(tl.where(shares > 0, names, 0), 0))
        before += tl.sum(level.to(tl.int32), 0)
        passed += tl.sum(shares, 0)
    return tl.minimum(found, last)


def room_for(count: int) -> int:
    """How many candidates a stretch gets room for, if ``count`` are wanted: the least entry of `SENT_UP` that
    is at least ``count``, which is at most `MOST_THINNED`."""
    return next(room for room in SENT_UP if room >= count)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    min_p: Tensor | None = None,
    candidates: int | None = None,
) -> Tensor:
    """Sample one token id per row of ``logits`` fp32 ``[rows, vocab]``: int64 ``[rows]``, the same as the
    reference.

    ``temperature`` (0: greedy), ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all; None: in no row),
    ``seeds``, ``positions`` (of the sampled token): ``[rows]``. ``candidates``: how many of a row's likeliest
    tokens top-k and top-p can affect; None means vocab, so nothing waits for the device.
    """
    rows, vocab = logits.shape
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, one in {**limits, "seeds": seeds, "positions": positions}.items():
        expect(name, one, (rows,))
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunk = chosen("send_up", logits, vocab)
    thin = candidates is not None and 0 < candidates <= MOST_THINNED
    most = room_for(candidates) if candidates and thin else 1
    stretches = triton.cdiv(vocab, chunk["CHUNK"]) if thin else 0
    values = torch.empty((rows, stretches * most), dtype=torch.float32, device=logits.device)
    ids = torch.empty(values.shape, dtype=torch.int32, device=logits.device)
    if rows and thin:
        send_up[(rows, stretches)](
            logits, temperature, top_k, values, ids, vocab, logits.stride(0), MOST=most, **chunk
        )
    if rows:
        sample_rows[(rows,)](
            logits, values, ids, temperature, top_k, top_p, min_p, seeds, positions, out,
            vocab, logits.stride(0), stretches * most, THIN=thin, MIN_P=min_p is not None,
            **chosen("settle", logits, most * stretches if thin else vocab),
        )  # fmt: skip
    return out


@triton.jit
def mass_of(
    logits: tl.tensor, best: tl.tensor, mass: tl.tensor, vocab: tl.tensor, stride_row: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for `log_probabilities` alone, not for sampling: for each stretch of a row's vocabulary write its
    greatest logit to ``best``, and its sum of exp(logit - greatest) to ``mass``, both fp64 ``[rows,
    stretches]``. Programs are (row, stretch of ``CHUNK`` tokens). Pointers are ``logits``, ``best`` and
    ``mass``."""
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = stretch * CHUNK + tl.arange(0, CHUNK)
    wide = tl.load(logits + row * stride_row + places, places < vocab, other=float("-inf")).to(tl.float64)
    top = tl.max(wide, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    at = row * tl.num_programs(1) + stretch
    tl.store(best + at, top)
    tl.store(mass + at, tl.sum(tl.exp(wide - safe), 0))


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
        mass_of[(rows, stretches)](logits, best, mass, vocab, logits.stride(0), **chunk)
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
    ones = torch.ones(rows, dtype=torch.float32, device=logits.device)
    wanted = torch.full((rows,), most, dtype=torch.int64, device=logits.device)
    send_up[(rows, stretches)](logits, ones, wanted, values, ids, vocab, logits.stride(0), MOST=room, **chunk)
    best = values.masked_fill(ids < 0, float("-inf")).topk(most, dim=-1)
    return best.values, ids.gather(-1, best.indices).long()
