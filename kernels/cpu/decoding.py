"""Attention of single tokens: each (row, KV head, span of context) a piece of work, merged afterwards.

Spans begin at fixed positions, so that a row's numbers depend neither on its company nor on the threads.
Reads K and V where they stand. Knows pointers, sizes and the arena's layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .compiling import compiled, inlined
from .elements import Pointer, exp, narrow, pointer, tanh, widen

SPAN = 256
"""Positions of one piece."""

_LOWEST = np.float32(-1e30)


@inlined
def _dot(query: Any, arena: Pointer, at: int, dim: int) -> Any:
    total = np.float32(0)
    for i in range(dim):
        total += query[i] * widen(arena[at + i])
    return total


@inlined
def _four_dots(query: Any, arena: Pointer, at: int, dim: int) -> Any:
    """With four keys, one behind the other."""
    second, third, fourth = at + dim, at + 2 * dim, at + 3 * dim
    a = b = c = d = np.float32(0)
    for i in range(dim):
        number = query[i]
        a += number * widen(arena[at + i])
        b += number * widen(arena[second + i])
        c += number * widen(arena[third + i])
        d += number * widen(arena[fourth + i])
    return a, b, c, d


@inlined
def _scores(query: Any, arena: Pointer, at: int, count: int, dim: int, scores: Any) -> None:
    """``scores[i] = query . key[i]`` of ``count`` keys from ``at`` on."""
    grouped = count // 4 * 4
    for i in range(0, grouped, 4):
        scores[i], scores[i + 1], scores[i + 2], scores[i + 3] = _four_dots(query, arena, at + i * dim, dim)
    for i in range(grouped, count):
        scores[i] = _dot(query, arena, at + i * dim, dim)


@inlined
def _add_values(shares: Any, arena: Pointer, at: int, count: int, dim: int, into: Any) -> None:
    """``into += shares @ values`` of ``count`` values from ``at`` on."""
    grouped = count // 4 * 4
    for i in range(0, grouped, 4):
        first = at + i * dim
        second, third, fourth = first + dim, first + 2 * dim, first + 3 * dim
        a, b, c, d = shares[i], shares[i + 1], shares[i + 2], shares[i + 3]
        for j in range(dim):
            into[j] += (
                a * widen(arena[first + j])
                + b * widen(arena[second + j])
                + c * widen(arena[third + j])
                + d * widen(arena[fourth + j])
            )
    for i in range(grouped, count):
        first, a = at + i * dim, shares[i]
        for j in range(dim):
            into[j] += a * widen(arena[first + j])


@inlined
def _soften(scores: Any, soft_cap: float) -> Any:
    """Cap the scores, make shares of them: returns their maximum and the sum of the shares."""
    if soft_cap > 0:
        cap = np.float32(soft_cap)
        for i in range(scores.size):
            scores[i] = cap * tanh(scores[i] / cap)
    most, total = _LOWEST, np.float32(0)
    for i in range(scores.size):
        most = max(most, scores[i])
    for i in range(scores.size):
        scores[i] = exp(scores[i] - most)
    for i in range(scores.size):
        total += scores[i]
    return most, total


@inlined
def _attend_span(query: Any, arena: Pointer, tables: Pointer, table_at: int, low: int, high: int, shape: Any,
                 head_at: int, soft_cap: float, scores: Any, found: Any) -> None:  # fmt: skip
    """Positions ``[low, high)`` for the queries of one KV head: into ``found`` ``[share, dim + 2]`` go the
    weighted values, the maximum and the sum."""
    share, kv_heads, dim, slots, block_size = shape
    width = high - low
    for j in range(share):
        at = low
        while at < high:
            count = min(high, (at // slots + 1) * slots) - at
            keys = tables[table_at + at // slots] * block_size + head_at + at % slots * dim
            _scores(query[j], arena, keys, count, dim, scores[j, at - low :])
            at += count
        found[j, dim], found[j, dim + 1] = _soften(scores[j, :width], soft_cap)
        found[j, :dim] = np.float32(0)
    side = kv_heads * slots * dim
    at = low
    while at < high:
        count = min(high, (at // slots + 1) * slots) - at
        values = tables[table_at + at // slots] * block_size + head_at + side + at % slots * dim
        for j in range(share):
            _add_values(scores[j, at - low :], arena, values, count, dim, found[j])
        at += count


@inlined
def _pieces(part: int, parts: int, singles: Any, spans: int, query: Pointer, arena: Pointer, starts: Pointer,
            contexts: Pointer, tables: Pointer, widest: int, layer_at: int, shape: Any, scale: float,
            window: int, soft_cap: float, found: Any) -> None:  # fmt: skip
    share, kv_heads, dim, slots, _ = shape
    queries, scores = np.empty((share, dim), np.float32), np.empty((share, SPAN), np.float32)
    for piece in range(part, singles.size * kv_heads * spans, parts):
        span, head, at = piece % spans, piece // spans % kv_heads, piece // (spans * kv_heads)
        row = singles[at]
        context = contexts[row]
        low = max(span * SPAN, context - window if window else 0)
        high = min((span + 1) * SPAN, context)
        if low >= high:
            found[at, head, span, :, dim] = _LOWEST
            found[at, head, span, :, dim + 1] = np.float32(0)
            continue
        for j in range(share):
            line = ((starts[row] * kv_heads + head) * share + j) * dim
            for i in range(dim):
                queries[j, i] = widen(query[line + i]) * np.float32(scale)
        head_at = layer_at + head * slots * dim
        _attend_span(
            queries, arena, tables, row * widest, low, high, shape, head_at, soft_cap, scores,
            found[at, head, span],
        )  # fmt: skip


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
