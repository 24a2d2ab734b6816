"""Decode attention: rows of one token each. A row's context is cut into spans of `SPAN` positions; each (row,
KV head, span) is computed on its own, and a row's spans are merged afterwards.

Spans begin at fixed positions, so a row's numbers depend neither on the batch nor on the threads. K and V are
read in place, and the next ones are prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .compiling import compiled, inlined
from .elements import Pointer, exp, fetch, memory, narrow, offset, pointer, tanh
from .products import dots, greatest, weigh
from .vectors import LANES

SPAN = 256
"""Positions of the context per span."""

ENOUGH = 4
"""From this many spans per thread on, a thread takes all KV heads of a span; with fewer, one, so that the
threads have about equal work."""

_LOWEST = np.float32(-1e30)


@inlined
def _soften(scores: Any, scale: float, soft_cap: float) -> Any:
    """Turn one query's ``scores`` (fp32 ``[positions]``), in place, into ``exp(score - greatest score)``;
    before that they are multiplied by ``scale`` and capped at ``soft_cap`` (0: no cap). Returns the greatest
    score and the sum of the results."""
    for i in range(scores.size):
        scores[i] *= np.float32(scale)
    if soft_cap > 0:
        cap = np.float32(soft_cap)
        for i in range(scores.size):
            scores[i] = cap * tanh(scores[i] / cap)
    most, total, vectors = _LOWEST, np.float32(0), scores.size // LANES
    if vectors:
        most = max(most, greatest(memory(scores), vectors))
    for i in range(vectors * LANES, scores.size):
        most = max(most, scores[i])
    for i in range(scores.size):
        scores[i] = exp(scores[i] - most)
    for i in range(scores.size):
        total += scores[i]
    return most, total


@inlined
def _attend_span(query: Pointer, arena: Pointer, span: Any, following: Any, shape: Any, scale: float,
                 soft_cap: float, scores: Any, found: Any) -> None:  # fmt: skip
    """Attend to one span of a row's context for the ``share`` query heads of one KV head. For each of these
    heads it writes to ``found`` ``[share, dim + 2]``: the weighted sum of values, the greatest score, and the
    sum of the weights.

    ``span``: (first position, position behind the last, pointer to the row's block table, offset of layer and
    head in a block). ``following``: the span that is computed next, likewise. ``scores``: scratch, ``[share,
    SPAN + 2 blocks]``. ``shape``: (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a
    block). Blocks lie far apart, so that the processor cannot predict the next one: values are prefetched
    while scores are computed, and the keys of the ``following`` span while values are added.
    """
    share, kv_heads, dim, slots, block_size = shape
    low, high, table, head_at = span
    first, last, room = low // slots, (high - 1) // slots, scores.shape[1]
    base, side = first * slots, kv_heads * slots * dim
    for block in range(first, last + 1):  # the first and last whole; scores outside the span are not used
        keys = offset(arena, table[block] * block_size + head_at)
        fetch(offset(keys, side), slots * dim)
        dots(share, query, slots, keys, dim, offset(memory(scores), block * slots - base), room)
    for j in range(share):
        found[j, dim], found[j, dim + 1] = _soften(scores[j, low - base : high - base], scale, soft_cap)
        found[j, :dim] = np.float32(0)
    for block in range(first, last + 1):
        _fetch_keys(arena, following, block - first, shape)
        start, end = max(low, block * slots), min(high, (block + 1) * slots)
        values = offset(arena, table[block] * block_size + head_at + side + start % slots * dim)
        shares = offset(memory(scores), start - base)
        weigh(share, shares, room, end - start, values, dim, memory(found), dim + 2)


@inlined
def _fetch_keys(arena: Pointer, span: Any, at: int, shape: Any) -> None:
    """Prefetch into the processor's cache the keys of one block of a span: block number ``at``, counted from
    the span's first. Does nothing if the span has no such block.

    ``span``: (first position, position behind the last, pointer to the row's block table, offset of layer and
    head in a block). ``shape``: (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a
    block).
    """
    _, _, dim, slots, block_size = shape
    low, high, table, head_at = span
    block = low // slots + at
    if block * slots < high:
        fetch(offset(arena, table[block] * block_size + head_at), slots * dim)


@inlined
def heads_together(rows: int, spans: int, kv_heads: int, parts: int) -> int:
    """How many KV heads of a span one thread attends to in turn, as they are adjacent in memory: all if there
    is enough work for all threads (`ENOUGH` spans each), else one. ``rows``: rows of one token; ``spans``:
    spans of the longest context; ``parts``: threads."""
    return kv_heads if rows * spans >= ENOUGH * parts else 1


@inlined
def piece_of(number: int, part: int, parts: int, rows: int, spans: int, kv_heads: int) -> Any:
    """Which work unit, (row, KV head, span), thread ``part`` of ``parts`` does as its ``number``-th. Returns
    the row's index among the ``rows`` rows of one token (equal to ``rows`` if the thread has no such unit),
    the number of its KV head, and the number of its span, below ``spans``."""
    together = heads_together(rows, spans, kv_heads, parts)
    group, within = part + number // together * parts, number % together
    groups = kv_heads // together
    row = min(rows, group // (spans * groups))
    return row, group // spans % groups * together + within, group % spans


@inlined
def _span(piece: Any, singles: Any, contexts: Pointer, tables: Pointer, widest: int, layer_at: int,
          shape: Any, window: int) -> Any:  # fmt: skip
    """Where a work unit's K and V are. ``piece``: the unit, (index in ``singles``, KV head, span number).
    Returns its first position, the position behind its last one (no work if that is not greater), a pointer
    to the row's block table, and the offset of layer and head in a block.

    ``singles``: the indices of the rows of one token. ``contexts``: each row's context length. ``tables``:
    block tables, ``[rows, widest]``. ``layer_at``: the layer's offset in a block. ``shape``: (query heads per
    KV head, kv_heads, head_dim, block_tokens, numbers of a block). ``window``: tokens that a query sees, 0
    for all.
    """
    _, _, dim, slots, _ = shape
    at, head, span = piece
    if at >= singles.size:
        return 0, 0, tables, layer_at
    row = singles[at]
    low = max(span * SPAN, contexts[row] - window if window else 0)
    high = min((span + 1) * SPAN, contexts[row])
    return low, high, offset(tables, row * widest), layer_at + head * slots * dim


@inlined
def _pieces(part: int, parts: int, singles: Any, spans: int, query: Pointer, arena: Pointer, starts: Pointer,
            contexts: Pointer, tables: Pointer, widest: int, layer_at: int, shape: Any, scale: float,
            window: int, soft_cap: float, found: Any) -> None:  # fmt: skip
    """Compute all work units, (row, KV head, span), of thread number ``part`` of ``parts``, and write their
    partial results to ``found`` ``[single rows, kv_heads, spans, share, dim + 2]``: for each query head the
    weighted sum of values, the greatest score and the sum of the weights. A span that the row does not see
    gets weights of 0. The other arguments: see `attend_singles`."""
    share, kv_heads, dim, slots, _ = shape
    scores = np.empty((share, SPAN + 2 * slots), np.float32)
    number, rows = 0, singles.size
    piece = piece_of(number, part, parts, rows, spans, kv_heads)
    own = _span(piece, singles, contexts, tables, widest, layer_at, shape, window)
    for block in range(SPAN // slots + 2):
        _fetch_keys(arena, own, block, shape)
    while piece[0] < rows:
        at, head, span = piece
        number += 1
        piece = piece_of(number, part, parts, rows, spans, kv_heads)
        following = _span(piece, singles, contexts, tables, widest, layer_at, shape, window)
        into = found[at, head, span]
        if own[0] < own[1]:
            queries = offset(query, (starts[singles[at]] * kv_heads + head) * share * dim)
            _attend_span(queries, arena, own, following, shape, scale, soft_cap, scores, into)
        else:
            into[:, dim], into[:, dim + 1] = _LOWEST, np.float32(0)
        own = following


@inlined
def _merge(found: Any, spans: int, dim: int, out: Pointer, to: int, tag: Any) -> None:
    """Merge the partial results of one query head over its spans, and write the ``dim`` numbers of its
    attention to ``out[to:]`` in the type of ``tag``. ``found`` ``[spans, dim + 2]``: the weighted sum of
    values, the greatest score and the sum of the weights of each span; the first span's sum is
    overwritten."""
    most, total = _LOWEST, np.float32(0)
    for span in range(spans):
        most = max(most, found[span, dim])
    first = found[0]
    for span in range(spans):
        if found[span, dim + 1] == 0:  # the query sees nothing of this span
            if span == 0:
                first[:dim] = np.float32(0)
            continue
        factor = exp(found[span, dim] - most)
        total += found[span, dim + 1] * factor
        for i in range(dim):
            first[i] = (first[i] if span else np.float32(0)) + found[span, i] * factor
    for i in range(dim):
        out[to + i] = narrow(first[i] / total, tag)


@compiled
def attend_singles(
    parts: int, singles: Any, longest: int, query_at: int, out_at: int, arena_at: int, starts_at: int,
    contexts_at: int, tables_at: int, widest: int, layer_at: int, shape: Any, scale: float, window: int,
    soft_cap: float, tag: Any,
) -> None:  # fmt: skip
    """Decode attention: rows with one token each, on ``parts`` threads; writes the result to ``out_at``.
    Compiled numba code.

    Names with ``_at``, but ``layer_at``, are addresses of tensors: ``query`` and ``out`` ``[tokens, q_heads,
    head_dim]``, the arena, and the batch's ``row_starts``, ``context_lengths`` and ``tables``. ``singles``:
    the indices of the rows with one token, int64. ``longest``: the longest of their contexts. ``widest``: the
    second size of ``tables``. ``layer_at``: the offset of the layer in a block, in numbers. ``shape``: (query
    heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block). ``scale``: the factor on scores.
    ``window``, ``soft_cap``: 0 for none. ``tag``: a number of the element type (`elements.TAGS`).
    """
    share, kv_heads, dim = shape[0], shape[1], shape[2]
    query, out, arena = pointer(query_at, tag), pointer(out_at, tag), pointer(arena_at, tag)
    word = types.int64(0)
    starts, contexts, tables = pointer(starts_at, word), pointer(contexts_at, word), pointer(tables_at, word)
    spans = (longest + SPAN - 1) // SPAN
    found = np.empty((singles.size, kv_heads, spans, share, dim + 2), np.float32)
    if parts == 1:
        _pieces(
            0, 1, singles, spans, query, arena, starts, contexts, tables, widest, layer_at, shape, scale,
            window, soft_cap, found,
        )  # fmt: skip
    else:
        for part in prange(parts):
            _pieces(
                part, parts, singles, spans, query, arena, starts, contexts, tables, widest, layer_at, shape,
                scale, window, soft_cap, found,
            )  # fmt: skip
    for at in range(singles.size):
        for head in range(kv_heads):
            for j in range(share):
                to = ((starts[singles[at]] * kv_heads + head) * share + j) * dim
                _merge(found[at, head, :, j], spans, dim, out, to, tag)
