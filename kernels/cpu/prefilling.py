"""Attention of chunks: blocks of queries over tiles of context, with a running softmax.

A tile of K and V is widened to fp32 once for all queries that share it, and multiplied in registers. Tiles
begin at fixed positions, so that a token's numbers do not depend on how its prompt was cut. Source: Dao et
al., "FlashAttention" (2022). Knows pointers, sizes and the arena's layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .compiling import compiled, inlined
from .elements import Pointer, exp, narrow, pointer, tanh, widen
from .layout import CHUNK_VECTORS
from .tiles import COLUMNS, ROWS, multiply_tile

TILE, STRIP = 64, 16
"""Positions of a tile; query vectors whose scores are made, softened and used before the next ones'."""

_LOWEST = np.float32(-1e30)


@inlined
def _multiply(left: Any, right: Any, into: Any, depth: int) -> None:
    """``into += left @ right`` over rows that both ``left`` and ``into`` have; multiples of the tile's."""
    for column in range(0, into.shape[1], COLUMNS):
        for row in range(0, min(left.shape[0], into.shape[0]), ROWS):
            multiply_tile(left, row, right, column, into, depth)


@inlined
def _load_tile(arena: Pointer, tables: Pointer, table_at: int, low: int, high: int, first: int, head_at: int,
               shape: Any, keys: Any, values: Any) -> None:  # fmt: skip
    """Positions ``[low, high)`` of the tile at ``first``, the others zero.

    Keys stand in the columns of ``keys`` ``[dim, TILE]``, values in the rows of ``values`` ``[TILE, padded]``.
    """
    _, kv_heads, dim, slots, block_size = shape
    side = kv_heads * slots * dim
    if high - low < TILE:
        keys[:] = np.float32(0)
        values[:] = np.float32(0)
    for position in range(low, high):
        at = tables[table_at + position // slots] * block_size + head_at + position % slots * dim
        line, column = values[position - first], position - first
        for i in range(dim):
            line[i] = widen(arena[at + side + i])
        for i in range(dim):
            keys[i, column] = widen(arena[at + i])


@inlined
def _soften(scores: Any, low: int, high: int, soft_cap: float, state: Any, sums: Any) -> None:
    """One query's scores of a tile become shares, zero outside of ``[low, high)``.

    ``state``: the maximum and the sum of shares so far. ``sums``: the weighted values so far.
    """
    seen = scores[low:high]  # counted from 0, so that the compiler need not think of negative indices
    if soft_cap > 0:
        cap = np.float32(soft_cap)
        for i in range(seen.size):
            seen[i] = cap * tanh(seen[i] / cap)
    most, total = state[0], np.float32(0)
    for i in range(seen.size):
        most = max(most, seen[i])
    for i in range(seen.size):
        seen[i] = exp(seen[i] - most)
    for i in range(seen.size):
        total += seen[i]
    scores[:low] = np.float32(0)
    scores[high:] = np.float32(0)
    if most != state[0]:
        factor = exp(state[0] - most)
        state[0] = most
        state[1] = state[1] * factor
        for i in range(sums.size):
            sums[i] *= factor
    state[1] += total


@inlined
def _attend_strip(begin: int, end: int, vectors: int, first: int, tile: int, low: int, high: int, share: int,
                  window: int, soft_cap: float, work: Any) -> None:  # fmt: skip
    """The query vectors ``[begin, end)`` over the positions ``[low, high)`` of the tile at ``tile``."""
    queries, keys, values, scores, sums, state = work
    scores[:] = np.float32(0)
    _multiply(queries[begin:end], keys, scores, queries.shape[1])
    for row in range(end - begin):
        position = first + (begin + row) // share
        oldest = max(low, position - window + 1 if window else 0) - tile
        newest = min(high, position + 1) - tile
        if newest > oldest and begin + row < vectors:
            _soften(scores[row], oldest, newest, soft_cap, state[begin + row], sums[begin + row])
        else:
            scores[row] = np.float32(0)
    _multiply(scores, values, sums[begin:end], TILE)


@inlined
def _attend_block(first: int, count: int, arena: Pointer, tables: Pointer, table_at: int, head_at: int,
                  shape: Any, window: int, soft_cap: float, work: Any) -> None:  # fmt: skip
    """``count`` tokens from position ``first`` on, of one KV head, over all they see."""
    share, keys, values = shape[0], work[1], work[2]
    vectors = count * share
    rows = (vectors + ROWS - 1) // ROWS * ROWS
    begin = max(0, first - window + 1) if window else 0
    for tile in range(begin // TILE * TILE, first + count, TILE):
        low, high = max(tile, begin), min(tile + TILE, first + count)
        _load_tile(arena, tables, table_at, low, high, tile, head_at, shape, keys, values)
        oldest = max(0, (low - first) * share) // STRIP * STRIP  # those before it see nothing of the tile
        newest = min(rows, (high + window - 1 - first) * share) if window else rows
        for strip in range(oldest, newest, STRIP):
            _attend_strip(strip, min(strip + STRIP, rows), vectors, first, tile, low, high, share, window,
                          soft_cap, work)  # fmt: skip


@inlined
def _workspace(dim: int) -> Any:
    """Queries, keys, values, scores, sums, state: fp32, values and sums padded to whole vectors."""
    padded = (dim + COLUMNS - 1) // COLUMNS * COLUMNS
    rows = CHUNK_VECTORS + ROWS
    return (
        np.zeros((rows, dim), np.float32),
        np.zeros((dim, TILE), np.float32),
        np.zeros((TILE, padded), np.float32),
        np.zeros((STRIP, TILE), np.float32),
        np.zeros((rows, padded), np.float32),
        np.zeros((rows, 2), np.float32),
    )


@inlined
def _blocks(part: int, parts: int, chunks: Any, blocks: int, tokens: int, query: Pointer, out: Pointer,
            arena: Pointer, starts: Pointer, contexts: Pointer, tables: Pointer, widest: int, layer_at: int,
            shape: Any, scale: float, window: int, soft_cap: float, tag: Any) -> None:  # fmt: skip
    """Every ``parts``-th piece, the longest first: (block of ``tokens`` queries from the end, chunk, head)."""
    share, kv_heads, dim, slots, _ = shape
    work = _workspace(dim)
    queries, sums, state = work[0], work[4], work[5]
    for piece in range(part, blocks * chunks.size * kv_heads, parts):
        head, row = piece % kv_heads, chunks[piece // kv_heads % chunks.size]
        total = starts[row + 1] - starts[row]
        begin = (blocks - 1 - piece // (kv_heads * chunks.size)) * tokens
        count = min(tokens, total - begin)
        if count <= 0:
            continue
        first = contexts[row] - total + begin
        for vector in range(count * share):
            token = starts[row] + begin + vector // share
            line = ((token * kv_heads + head) * share + vector % share) * dim
            for i in range(dim):
                queries[vector, i] = widen(query[line + i]) * np.float32(scale)
            state[vector, 0], state[vector, 1] = _LOWEST, np.float32(0)
        sums[:] = np.float32(0)
        head_at = layer_at + head * slots * dim
        _attend_block(first, count, arena, tables, row * widest, head_at, shape, window, soft_cap, work)
        for vector in range(count * share):
            token = starts[row] + begin + vector // share
            line = ((token * kv_heads + head) * share + vector % share) * dim
            factor = np.float32(1) / state[vector, 1]
            for i in range(dim):
                out[line + i] = narrow(sums[vector, i] * factor, tag)


def _attend_chunks(
    parts: int, chunks: Any, most: int, query_at: int, out_at: int, arena_at: int, starts_at: int,
    contexts_at: int, tables_at: int, widest: int, layer_at: int, shape: Any, scale: float, window: int,
    soft_cap: float, tag: Any,
) -> None:  # fmt: skip
    """Arguments as of `decoding.attend_singles`; ``most``: tokens of the longest of ``chunks``."""
    query, out, arena = pointer(query_at, tag), pointer(out_at, tag), pointer(arena_at, tag)
    word = types.int64(0)
    starts, contexts, tables = pointer(starts_at, word), pointer(contexts_at, word), pointer(tables_at, word)
    tokens = max(1, CHUNK_VECTORS // shape[0])
    blocks = (most + tokens - 1) // tokens
    if parts == 1:
        _blocks(
            0, 1, chunks, blocks, tokens, query, out, arena, starts, contexts, tables, widest, layer_at,
            shape, scale, window, soft_cap, tag,
        )  # fmt: skip
    else:
        for part in prange(parts):
            _blocks(
                part, parts, chunks, blocks, tokens, query, out, arena, starts, contexts, tables, widest,
                layer_at, shape, scale, window, soft_cap, tag,
            )  # fmt: skip


attend_chunks = compiled(_attend_chunks, parallel=True)
