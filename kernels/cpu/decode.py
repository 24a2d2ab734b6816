"""Attention of single tokens: each (row, KV head, span of context) is one piece of work; spans are merged
afterwards.

Spans begin at fixed positions, so a row's numbers depend neither on the batch nor on the threads. K and V are
read in place, and the next lines are prefetched.
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
"""Positions per span."""

ENOUGH = 4
"""Spans per part, so that the parts have about equal work."""

_LOWEST = np.float32(-1e30)


@inlined
def _soften(scores: Any, scale: float, soft_cap: float) -> Any:
    """Turn a query's ``scores``, in place, into ``exp(score - greatest score)``, after scaling and capping
    (0: no cap). Returns the greatest score and the sum of the results."""
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
    """Attend to the positions of ``span`` (see `_span`) for the query heads of one KV head. For each of these
    ``share`` heads it writes to ``found`` ``[share, dim + 2]``: the weighted sum of values, the greatest
    score, and the sum of the weights.

    ``scores``: room, ``[share, SPAN and the rest of two blocks]``. ``shape``: as in `attend_singles`. Blocks
    lie far apart, so that the processor cannot predict the next one: values are prefetched while scores are
    computed, and the keys of the span ``following`` while values are added.
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
    """Prefetch into the processor's cache the keys of block number ``at`` of ``span`` (see `_span`). Does
    nothing if the span has no such block."""
    _, _, dim, slots, block_size = shape
    low, high, table, head_at = span
    block = low // slots + at
    if block * slots < high:
        fetch(offset(arena, table[block] * block_size + head_at), slots * dim)


@inlined
def heads_together(rows: int, spans: int, kv_heads: int, parts: int) -> int:
    """How many KV heads of a span one part attends to in turn, as they are adjacent in memory: all if there
    is enough work for all parts, else one."""
    return kv_heads if rows * spans >= ENOUGH * parts else 1


@inlined
def piece_of(number: int, part: int, parts: int, rows: int, spans: int, kv_heads: int) -> Any:
    """A part's piece number ``number``: its index in ``rows`` (equal to ``rows`` if there is no such piece),
    its KV head, its span."""
    together = heads_together(rows, spans, kv_heads, parts)
    group, within = part + number // together * parts, number % together
    groups = kv_heads // together
    row = min(rows, group // (spans * groups))
    return row, group // spans % groups * together + within, group % spans


@inlined
def _span(piece: Any, singles: Any, contexts: Pointer, tables: Pointer, widest: int, layer_at: int,
          shape: Any, window: int) -> Any:  # fmt: skip
    """A piece's positions ``[low, high)``, none if ``low >= high``; its block table; the offset of its head."""
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
    """Attend for every piece (row, KV head, span) of the part with the number ``part``, one thread's share,
    and write the results to ``found``."""
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
    """Merge the results of one query head over its spans, ``found`` ``[spans, dim + 2]``, in their order, and
    write the ``dim`` numbers to ``out[to:]`` in the type of ``tag``."""
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
    """Attention of rows with one token each, on ``parts`` threads; writes the result to ``out_at``. Compiled
    numba code.

    Names with ``_at`` are addresses of tensors, as in `backend.paged_attention`. ``singles``: the indices of
    the rows, int64. ``longest``: the longest of their contexts. ``widest``: the width of the block tables.
    ``layer_at``: the offset of the layer in a block, in numbers. ``shape``: query heads per KV head,
    kv_heads, head_dim, block_tokens, numbers of a block. ``window``, ``soft_cap``: 0 for none. ``tag``: a
    number of the element type (`elements.TAGS`).
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
