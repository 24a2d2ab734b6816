"""Attention of single tokens: each (row, KV head, span of context) a piece of work, merged afterwards.

Spans begin at fixed positions, so that a row's numbers depend neither on its company nor on the threads.
Reads K and V where they stand, and has what comes next brought near meanwhile. Knows pointers, sizes and the
arena's layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .compiling import compiled, inlined
from .elements import Pointer, exp, fetch, memory, narrow, offset, pointer, tanh
from .products import dots, weigh
from .tiles import greatest
from .vectors import LANES

SPAN = 256
"""Positions of one piece."""

ENOUGH = 4
"""Spans for each part, so that no part has much more to do than another."""

_LOWEST = np.float32(-1e30)


@inlined
def _soften(scores: Any, scale: float, soft_cap: float) -> Any:
    """Scale and cap the scores, make shares of them: returns their maximum and the sum of the shares."""
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
    """A `_span` for the queries of one KV head: into ``found`` ``[share, dim + 2]`` go the weighted values, the
    maximum and the sum. ``scores``: ``[share, SPAN and the rest of two blocks]``.

    Blocks lie far apart, so that no processor guesses the next one: values are brought near while scores are
    made, the keys of the span ``following`` while values are weighed.
    """
    share, kv_heads, dim, slots, block_size = shape
    low, high, table, head_at = span
    first, last, room = low // slots, (high - 1) // slots, scores.shape[1]
    base, side = first * slots, kv_heads * slots * dim
    for block in range(first, last + 1):  # of the outer two all slots; what they have besides is left alone
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
    """Bring near the keys of a span's block number ``at``, if it has so many."""
    _, _, dim, slots, block_size = shape
    low, high, table, head_at = span
    block = low // slots + at
    if block * slots < high:
        fetch(offset(arena, table[block] * block_size + head_at), slots * dim)


@inlined
def heads_together(rows: int, spans: int, kv_heads: int, parts: int) -> int:
    """How many heads of a span one part attends to, one after the other: they stand side by side in memory."""
    return kv_heads if rows * spans >= ENOUGH * parts else 1


@inlined
def piece_of(number: int, part: int, parts: int, rows: int, spans: int, kv_heads: int) -> Any:
    """The part's piece of that number: which of ``rows`` (as many where there is none), its head, its span."""
    together = heads_together(rows, spans, kv_heads, parts)
    group, within = part + number // together * parts, number % together
    groups = kv_heads // together
    row = min(rows, group // (spans * groups))
    return row, group // spans % groups * together + within, group % spans


@inlined
def _span(piece: Any, singles: Any, contexts: Pointer, tables: Pointer, widest: int, layer_at: int,
          shape: Any, window: int) -> Any:  # fmt: skip
    """A piece's positions ``[low, high)``, none where ``low >= high``; block table; where its head begins."""
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
    """The part's pieces: (row, KV head, span)."""
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
    """One query's spans ``[spans, dim + 2]``, in their order, to one result."""
    most, total = _LOWEST, np.float32(0)
    for span in range(spans):
        most = max(most, found[span, dim])
    first = found[0]
    for span in range(spans):
        if found[span, dim + 1] == 0:  # nothing of it is seen
            if span == 0:
                first[:dim] = np.float32(0)
            continue
        factor = exp(found[span, dim] - most)
        total += found[span, dim + 1] * factor
        for i in range(dim):
            first[i] = (first[i] if span else np.float32(0)) + found[span, i] * factor
    for i in range(dim):
        out[to + i] = narrow(first[i] / total, tag)


def _attend_singles(
    parts: int, singles: Any, longest: int, query_at: int, out_at: int, arena_at: int, starts_at: int,
    contexts_at: int, tables_at: int, widest: int, layer_at: int, shape: Any, scale: float, window: int,
    soft_cap: float, tag: Any,
) -> None:  # fmt: skip
    """``shape``: query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block.

    ``window``, ``soft_cap``: 0 for none. ``layer_at``: where the layer begins in a block, in numbers.
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


attend_singles = compiled(_attend_singles, parallel=True)
