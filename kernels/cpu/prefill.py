"""Attention of chunks: blocks of queries over tiles of context, with a running softmax.

A tile of K and V is packed once for all queries that share it, as `lanes` describes. Tiles begin at fixed
positions, so a token's numbers do not depend on how its prompt was cut. While one tile is used the next is
prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from .batch import CHUNK_VECTORS
from .compiling import compiled, in_order, inlined
from .elements import Pointer, address_of, fetch, memory, narrow, offset, pointer, tanh
from .lanes import HEIGHTS, LOWEST, TILE, aligned, hide, pack_line, pack_lines, per_word, product, soften
from .vectors import LANES

COLUMNS = CHUNK_VECTORS // LANES
"""The most columns of `LANES` queries that share a packed tile."""
GROUP = max(HEIGHTS)
"""Columns that are scored, exponentiated and used together."""

_LOWEST, _LOG2_E = np.float32(LOWEST), np.float32(1.4426950408889634)
_HEIGHT1, _HEIGHT2 = HEIGHTS[1], HEIGHTS[2]
_score1, _score2 = (product(columns, run=LANES, apart=LANES, fresh=True) for columns in (1, 2))
_weigh1, _weigh2 = (product(columns, run=1, apart=1, fresh=False) for columns in (1, 2))


@inlined
def _sizes(dim: int, tag: Any) -> Any:
    """Of a head of ``dim`` numbers in the type of ``tag``: how many words a packed key takes, how many
    numbers a query's sum of values takes, and how many words the positions of a tile take."""
    pair = per_word(tag)
    words = (dim + pair * LANES - 1) // (pair * LANES) * LANES
    return words, (dim + LANES - 1) // LANES * LANES, TILE // pair


@inlined
def _workspace(dim: int, tag: Any) -> Any:
    """Allocate a thread's memory. Returns it, and pointers into it: to the packed keys and values of a tile;
    to queries, sums and softmax state; to a group's scores and shares.

    Also: each query's oldest and newest position that it sees, the addresses of a tile's keys, and room for
    lines of elements. The other functions get all of this as ``work``.
    """
    words, dims, steps = _sizes(dim, tag)
    values = words * TILE
    queries = values + steps * dims
    scores = queries + COLUMNS * words * LANES
    shares = scores + GROUP * TILE * LANES
    sums = shares + GROUP * steps * LANES
    state = sums + COLUMNS * dims * LANES
    room = np.zeros(state + COLUMNS * 2 * LANES + LANES, np.float32)
    keys = aligned(memory(room))
    tile = (keys, offset(keys, values))
    per_query = (offset(keys, queries), offset(keys, sums), offset(keys, state))
    limits = np.zeros((COLUMNS, 2, LANES), np.int32)
    places = np.zeros(TILE, np.int64)
    lines = np.zeros((4, max(dims, words, 2 * LANES)), np.float32)
    return room, tile, per_query, (offset(keys, scores), offset(keys, shares)), limits, places, lines


@inlined
def _pack(line: Pointer, dim: int, rest: Pointer, into: Pointer, apart: int) -> None:
    """Pack a line of ``dim`` elements into words, `LANES` of them every ``apart`` words, padded with zeros.

    ``rest``: zeroed room for the elements that fill no whole vector.
    """
    unit = LANES * per_word(line[0])
    whole = dim // unit * unit
    for i in range(0, whole, unit):
        pack_line(offset(line, i), offset(into, i // unit * apart))
    if whole < dim:
        for i in range(dim - whole):
            rest[i] = line[whole + i]
        pack_line(rest, offset(into, whole // unit * apart))


@inlined
def _mix(first: Pointer, second: Pointer, dim: int, rest: Pointer, other: Pointer, into: Pointer) -> None:
    """Pack two lines of ``dim`` elements into words of one from each, or the first alone: see `pack_lines`."""
    whole = dim // LANES * LANES
    for i in range(0, whole, LANES):
        pack_lines(offset(first, i), offset(second, i), offset(into, i))
    if whole < dim:
        for i in range(dim - whole):
            rest[i], other[i] = first[whole + i], second[whole + i]
        pack_lines(rest, other, offset(into, whole))


@inlined
def _locate(
    low: int, high: int, arena: Pointer, table: Pointer, head_at: int, shape: Any, places: Any
) -> None:
    """Write to ``places`` the addresses of the keys at the positions ``[low, high)`` of one tile, and 0 for
    the tile's other positions."""
    _, _, dim, slots, block_size = shape
    places[:] = 0
    position = low
    while position < high:
        block = position // slots
        at = table[block] * block_size + head_at - block * slots * dim
        end = min(high, (block + 1) * slots)
        for each in range(position, end):
            places[each % TILE] = address_of(offset(arena, at + each * dim))
        position = end


@inlined
def _load_tile(dim: int, side: int, work: Any, tag: Any) -> None:
    """Pack the keys and values of the tile at ``places`` into the memory ``work``; values without a place
    become zeros. ``side``: how many numbers a value lies behind its key in the arena."""
    _, (keys, values), _, _, _, places, lines = work
    _, dims, steps = _sizes(dim, tag)
    blank, rest, other = _line(lines, 0, tag), _line(lines, 1, tag), _line(lines, 2, tag)
    for row in range(TILE):
        if places[row]:
            _pack(pointer(places[row], tag), dim, rest, offset(keys, row * LANES), TILE * LANES)
    pair = per_word(tag)
    for step in range(steps):
        one, two = places[step * pair], places[step * pair + pair - 1]
        first = offset(pointer(one, tag), side) if one else blank
        second = offset(pointer(two, tag), side) if two else blank
        _mix(first, second, dim, rest, other, offset(values, step * dims))


@inlined
def _line(lines: Any, at: int, tag: Any) -> Pointer:
    return pointer(address_of(memory(lines[at])), tag)


@inlined
def _fetch(row: int, rows: int, dim: int, side: int, places: Any, tag: Any) -> None:
    """Prefetch into the processor's cache the keys at the addresses ``places[row : row + rows]`` or, if
    ``side`` is not 0, their values, which lie ``side`` numbers behind them."""
    for at in range(row, row + rows):
        if places[at]:
            fetch(offset(pointer(places[at], tag), side), dim)


@inlined
def _score(columns: int, column: int, ahead: bool, dim: int, side: int, work: Any, tag: Any) -> None:
    """Score ``columns`` columns of queries, from ``column`` on, against all keys of the tile, into the scores
    of ``work``.

    A column is `LANES` queries. ``ahead``: prefetch the next tile's keys meanwhile.
    """
    _, (keys, _), (queries, _, _), (scores, _), _, places, _ = work
    words, _, _ = _sizes(dim, tag)
    right, apart, line = offset(queries, column * words * LANES), words * LANES, TILE * LANES
    height = _HEIGHT1 if columns == 1 else _HEIGHT2
    for row in range(0, TILE, height):
        if ahead:
            _fetch(row, height, dim, 0, places, tag)
        left, into = offset(keys, row * LANES), offset(scores, row * LANES)
        if columns == 1:
            _score1(tag, left, line, right, apart, words, into, line)
        else:
            _score2(tag, left, line, right, apart, words, into, line)


@inlined
def _weigh(columns: int, column: int, ahead: bool, dim: int, side: int, work: Any, tag: Any) -> None:
    """Add the tile's values, weighted by the shares, to the sums of ``columns`` columns from ``column`` on.
    ``ahead``: prefetch the next tile's values meanwhile."""
    _, (_, values), (_, sums, _), (_, shares), _, places, _ = work
    _, dims, steps = _sizes(dim, tag)
    height = _HEIGHT1 if columns == 1 else _HEIGHT2
    each = (TILE * height + dims - 1) // dims
    for row in range(0, dims, height):
        if ahead:
            at = row // height * each
            _fetch(at, min(each, TILE - at), dim, side, places, tag)
        left, into = offset(values, row), offset(sums, (column * dims + row) * LANES)
        if columns == 1:
            _weigh1(tag, left, dims, shares, steps * LANES, steps, into, dims * LANES)
        else:
            _weigh2(tag, left, dims, shares, steps * LANES, steps, into, dims * LANES)


@in_order
def _soften(
    column: int, at: int, tile: int, dim: int, scale: float, soft_cap: float, work: Any, tag: Any
) -> None:
    """Turn a column's scores with the tile at position ``tile`` into shares (exponentials), and update the
    column's softmax state and sums. ``at``: the column's index in the group that is scored together."""
    _, _, (_, sums, state), (scores, shares), limits, _, _ = work
    _, dims, steps = _sizes(dim, tag)
    mine, factor = offset(scores, at * TILE * LANES), np.float32(scale) * _LOG2_E
    if soft_cap > 0:
        cap, factor = np.float32(soft_cap), _LOG2_E
        for i in range(TILE * LANES):
            mine[i] = cap * tanh(mine[i] * np.float32(scale) / cap)
    oldest, newest = limits[column, 0], limits[column, 1]
    if tile < oldest[LANES - 1] or tile + TILE - 1 > newest[0]:
        hide(mine, tile, memory(oldest), memory(newest))
    own, into = offset(state, column * 2 * LANES), offset(shares, at * steps * LANES)
    soften(tag, mine, factor, own, into, offset(sums, column * dims * LANES), dims)


@inlined
def _attend_block(first: int, count: int, arena: Pointer, table: Pointer, head_at: int, shape: Any,
                  scale: float, window: int, soft_cap: float, work: Any, tag: Any) -> None:  # fmt: skip
    """Attend for ``count`` tokens from position ``first`` on, of one KV head, to all positions that they see.
    Queries and results are in ``work``: see `_take` and `_give`."""
    share, kv_heads, dim, slots, _ = shape
    side, end, places = kv_heads * slots * dim, first + count, work[5]
    columns = (count * share + LANES - 1) // LANES
    begin = max(0, first - window + 1) if window else 0
    start = begin // TILE * TILE
    _locate(begin, min(start + TILE, end), arena, table, head_at, shape, places)
    for tile in range(start, end, TILE):
        _load_tile(dim, side, work, tag)
        _locate(tile + TILE, min(tile + 2 * TILE, end), arena, table, head_at, shape, places)
        oldest = max(0, (tile - first) * share) // LANES  # earlier columns see nothing of the tile
        newest = columns
        if window:
            newest = min(columns, ((tile + TILE + window - 1 - first) * share + LANES - 1) // LANES)
        for column in range(oldest, newest, GROUP):
            together = min(GROUP, newest - column)
            _score(together, column, column == oldest, dim, side, work, tag)
            for at in range(together):
                _soften(column + at, at, tile, dim, scale, soft_cap, work, tag)
            _weigh(together, column, column == oldest, dim, side, work, tag)


@inlined
def _take(
    vectors: int, first: int, line: int, query: Pointer, shape: Any, window: int, work: Any, tag: Any
) -> None:
    """Pack ``vectors`` query vectors into columns of ``LANES`` vectors, and reset their sums and softmax state.

    The free lanes of the last column get copies of the last vector. ``line``: the index in ``query`` of the
    first vector; ``first``: the position of its token. ``window``: the tokens that a query sees; 0: all.
    """
    share, kv_heads, dim, _, _ = shape
    _, _, (queries, sums, state), _, limits, _, lines = work
    words, dims, _ = _sizes(dim, tag)
    packed, rest = memory(lines[3]), _line(lines, 1, tag)
    columns = (vectors + LANES - 1) // LANES
    for lane in range(columns * LANES):
        vector = min(lane, vectors - 1)
        token, column = vector // share, lane // LANES
        place = offset(query, (line + token * kv_heads * share + vector % share) * dim)
        _pack(place, dim, rest, packed, LANES)
        own = offset(queries, column * words * LANES + lane % LANES)
        for i in range(words):
            own[i * LANES] = packed[i]
        limits[column, 0, lane % LANES] = max(0, first + token - window + 1) if window else 0
        limits[column, 1, lane % LANES] = first + token
    for i in range(columns * dims * LANES):
        sums[i] = np.float32(0)
    for i in range(columns * 2 * LANES):
        state[i] = np.float32(0) if i & LANES else _LOWEST


@inlined
def _give(vectors: int, line: int, out: Pointer, shape: Any, work: Any, tag: Any) -> None:
    """Write the results of some query vectors from ``work`` to ``out``; arguments as of `_take`."""
    share, kv_heads, dim, _, _ = shape
    _, sums, state = work[2]
    _, dims, _ = _sizes(dim, tag)
    for vector in range(vectors):
        column, lane = vector // LANES, vector % LANES
        to = (line + vector // share * kv_heads * share + vector % share) * dim
        factor = np.float32(1) / state[(column * 2 + 1) * LANES + lane]
        for i in range(dim):
            out[to + i] = narrow(sums[(column * dims + i) * LANES + lane] * factor, tag)


@inlined
def _blocks(part: int, parts: int, chunks: Any, blocks: int, tokens: int, query: Pointer, out: Pointer,
            arena: Pointer, starts: Pointer, contexts: Pointer, tables: Pointer, widest: int, layer_at: int,
            shape: Any, scale: float, window: int, soft_cap: float, tag: Any) -> None:  # fmt: skip
    """Attend for every ``parts``-th piece, from number ``part`` on, and write its results to ``out``. A piece
    is (a block of ``tokens`` tokens, chunk, KV head); the last blocks come first, as they see most."""
    share, kv_heads, dim, slots, _ = shape
    work = _workspace(dim, tag)
    for piece in range(part, blocks * chunks.size * kv_heads, parts):
        head, row = piece % kv_heads, chunks[piece // kv_heads % chunks.size]
        total = starts[row + 1] - starts[row]
        begin = (blocks - 1 - piece // (kv_heads * chunks.size)) * tokens
        count = min(tokens, total - begin)
        if count <= 0:
            continue
        first = contexts[row] - total + begin
        line = ((starts[row] + begin) * kv_heads + head) * share
        head_at, table = layer_at + head * slots * dim, offset(tables, row * widest)
        _take(count * share, first, line, query, shape, window, work, tag)
        _attend_block(first, count, arena, table, head_at, shape, scale, window, soft_cap, work, tag)
        _give(count * share, line, out, shape, work, tag)


@inlined
def block_tokens(most: int, share: int, alike: int, parts: int) -> int:
    """How many tokens of a chunk are one piece of work, and share packed tiles, so that all parts have about
    the same work. ``most``: the tokens of the longest chunk. ``share``: query heads per KV head. ``alike``:
    the number of chunks times KV heads. Packing tiles costs about as much as one column of queries."""
    column, widest = max(1, LANES // share), max(1, CHUNK_VECTORS // share)
    best, least = widest, 0
    for blocks in range((most + widest - 1) // widest, (most + column - 1) // column + 1):
        tokens = (most + blocks - 1) // blocks
        tokens = min(widest, (tokens + column - 1) // column * column)
        cost = (blocks * alike + parts - 1) // parts * (column + tokens)
        if least == 0 or cost < least:
            best, least = tokens, cost
    return best


@compiled
def attend_chunks(
    parts: int, chunks: Any, most: int, query_at: int, out_at: int, arena_at: int, starts_at: int,
    contexts_at: int, tables_at: int, widest: int, layer_at: int, shape: Any, scale: float, window: int,
    soft_cap: float, tag: Any,
) -> None:  # fmt: skip
    """Attention of rows with several tokens each, on ``parts`` threads; writes the result to ``out_at``.
    Compiled numba code. ``chunks``: the indices of the rows, int64; ``most``: tokens of the longest of them.
    The other arguments are those of `decode.attend_singles`."""
    query, out, arena = pointer(query_at, tag), pointer(out_at, tag), pointer(arena_at, tag)
    word = types.int64(0)
    starts, contexts, tables = pointer(starts_at, word), pointer(contexts_at, word), pointer(tables_at, word)
    tokens = block_tokens(most, shape[0], chunks.size * shape[1], parts)
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
