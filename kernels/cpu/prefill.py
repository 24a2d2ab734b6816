"""Prefill attention: rows of several tokens (chunks), by blocks of queries over tiles of context, with a
running softmax.

A tile of K and V is packed once for all queries that share it, as `lanes` describes. Tiles begin at fixed
positions, so a token's numbers do not depend on how its prompt was cut. While one tile is used the next is
prefetched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .batch import CHUNK_VECTORS
from .compiling import in_order, inlined
from .elements import Pointer, memory, narrow, offset, pointer
from .lanes import (
    HEIGHTS,
    LOWEST,
    SPAN,
    TILE,
    aligned,
    hide,
    merge,
    pack_lines,
    per_word,
    product,
    shrinks,
    soften,
)
from .tiles import cap, fetch_rows, line_of, locate, pack, sizes
from .vectors import LANES

COLUMNS = CHUNK_VECTORS // LANES
"""The most columns (of `LANES` query vectors each) that are computed with one packed tile of K and V."""
GROUP = max(HEIGHTS)
"""How many columns (of `LANES` query vectors each) are scored, exponentiated and multiplied with V together."""

_LOWEST, _LOG2_E = np.float32(LOWEST), np.float32(1.4426950408889634)
_HEIGHT1, _HEIGHT2 = HEIGHTS[1], HEIGHTS[2]
_score1, _score2 = (
    product(rows, columns, run=LANES, apart=LANES, fresh=True) for columns, rows in HEIGHTS.items()
)
_weigh1, _weigh2 = (product(rows, columns, run=1, apart=1, fresh=False) for columns, rows in HEIGHTS.items())


@inlined
def _workspace(dim: int, tag: Any) -> Any:
    """Allocate one thread's scratch memory, the tuple ``work`` that the other functions here take. ``dim``:
    head_dim; ``tag``: a number of the element type.

    Returns: the array that owns the memory; pointers to a tile's packed (keys, values); to all columns'
    (queries, sums, softmax state, and both of the spans before, merged); to the (scores, shares) of a group of
    columns; the first and last position that each query sees, int32 ``[COLUMNS, 2, LANES]``; the addresses of a
    tile's keys, int64 ``[TILE]``; and scratch for lines of elements, ``[4, …]``.
    """
    words, dims, steps = sizes(dim, tag)
    values = words * TILE
    queries = values + steps * dims
    scores = queries + COLUMNS * words * LANES
    shares = scores + GROUP * TILE * LANES
    sums = shares + GROUP * steps * LANES
    state = sums + COLUMNS * dims * LANES
    merged = state + COLUMNS * 2 * LANES
    room = np.zeros(merged + COLUMNS * (dims + 2) * LANES + LANES, np.float32)
    keys = aligned(memory(room))
    tile = (keys, offset(keys, values))
    per_query = (offset(keys, queries), offset(keys, sums), offset(keys, state), offset(keys, merged))
    limits = np.zeros((COLUMNS, 2, LANES), np.int32)
    addresses = np.zeros(TILE, np.int64)
    lines = np.zeros((4, max(dims, words, 2 * LANES)), np.float32)
    return room, tile, per_query, (offset(keys, scores), offset(keys, shares)), limits, addresses, lines


@inlined
def _mix(first: Pointer, second: Pointer, dim: int, rest: Pointer, other: Pointer, into: Pointer) -> None:
    """Pack the values of two neighbouring positions, ``dim`` elements each at ``first`` and ``second``, into
    words of 32 bits at ``into``: one number of each per word, or the first alone if a word holds one number.
    ``rest``, ``other``: scratch for the elements that fill no whole vector."""
    whole = dim // LANES * LANES
    for i in range(0, whole, LANES):
        pack_lines(offset(first, i), offset(second, i), offset(into, i))
    if whole < dim:
        for i in range(dim - whole):
            rest[i], other[i] = first[whole + i], second[whole + i]
        pack_lines(rest, other, offset(into, whole))


@inlined
def _load_tile(dim: int, side: int, work: Any, tag: Any) -> None:
    """Pack the keys and values of one tile into ``work`` (see `_workspace`), from the key addresses in it. A
    position without an address gets values of zero, and keeps the keys of an earlier tile. ``side``: how many
    numbers a value lies behind its key in the arena."""
    _, (keys, values), _, _, _, addresses, lines = work
    _, dims, steps = sizes(dim, tag)
    blank, rest, other = line_of(lines, 0, tag), line_of(lines, 1, tag), line_of(lines, 2, tag)
    for row in range(TILE):
        if addresses[row]:
            pack(pointer(addresses[row], tag), dim, rest, offset(keys, row * LANES), TILE * LANES)
    pair = per_word(tag)
    for step in range(steps):
        one, two = addresses[step * pair], addresses[step * pair + pair - 1]
        first = offset(pointer(one, tag), side) if one else blank
        second = offset(pointer(two, tag), side) if two else blank
        _mix(first, second, dim, rest, other, offset(values, step * dims))


@inlined
def _score(columns: int, column: int, ahead: bool, dim: int, side: int, work: Any, tag: Any) -> None:
    """Score ``columns`` (1 or 2) columns of queries, from number ``column`` on, against all keys of the
    packed tile; writes the scores into ``work`` (see `_workspace`).

    A column is `LANES` query vectors. ``ahead``: prefetch the next tile's keys meanwhile.
    """
    _, (keys, _), (queries, _, _, _), (scores, _), _, addresses, _ = work
    words, _, _ = sizes(dim, tag)
    right, apart, line = offset(queries, column * words * LANES), words * LANES, TILE * LANES
    height = _HEIGHT1 if columns == 1 else _HEIGHT2
    for row in range(0, TILE, height):
        if ahead:
            fetch_rows(row, height, dim, 0, addresses, tag)
        left, into = offset(keys, row * LANES), offset(scores, row * LANES)
        if columns == 1:
            _score1(tag, left, line, right, apart, words, into, line)
        else:
            _score2(tag, left, line, right, apart, words, into, line)


@inlined
def _weigh(columns: int, column: int, ahead: bool, dim: int, side: int, work: Any, tag: Any) -> None:
    """Add the packed tile's values, weighted by the shares (exponentials of the scores), to the sums of
    ``columns`` (1 or 2) columns of queries from number ``column`` on; all are in ``work`` (see `_workspace`).
    ``ahead``: prefetch the next tile's values meanwhile, which lie ``side`` numbers behind their keys."""
    _, (_, values), (_, sums, _, _), (_, shares), _, addresses, _ = work
    _, dims, steps = sizes(dim, tag)
    height = _HEIGHT1 if columns == 1 else _HEIGHT2
    each = (TILE * height + dims - 1) // dims
    for row in range(0, dims, height):
        if ahead:
            at = row // height * each
            fetch_rows(at, min(each, TILE - at), dim, side, addresses, tag)
        left, into = offset(values, row), offset(sums, (column * dims + row) * LANES)
        if columns == 1:
            _weigh1(tag, left, dims, shares, steps * LANES, steps, into, dims * LANES)
        else:
            _weigh2(tag, left, dims, shares, steps * LANES, steps, into, dims * LANES)


@in_order
def _soften(
    column: int, at: int, tile: int, dim: int, scale: float, soft_cap: float, work: Any, tag: Any
) -> None:
    """Turn one column's scores (of `LANES` queries) with the tile at position ``tile`` into shares
    (exponentials), masked by what each query sees, and update the column's running softmax and sums in
    ``work`` (see `_workspace`). ``column``: its number among all; ``at``: its index in the group of columns
    that is scored together. ``soft_cap``: 0 for none."""
    _, _, (_, sums, state, _), (scores, shares), limits, _, _ = work
    _, dims, steps = sizes(dim, tag)
    mine, factor = offset(scores, at * TILE * LANES), np.float32(scale) * _LOG2_E
    if soft_cap > 0:
        cap(mine, TILE * LANES, scale, soft_cap)
        factor = _LOG2_E
    oldest, newest = limits[column, 0], limits[column, 1]
    if tile < oldest[LANES - 1] or tile + TILE - 1 > newest[0]:
        hide(mine, tile, memory(oldest), memory(newest))
    own, into = offset(state, column * 2 * LANES), offset(shares, at * steps * LANES)
    soften(tag, mine, factor, own, into, offset(sums, column * dims * LANES), dims)


@inlined
def _attend_block(first: int, count: int, arena: Pointer, table: Pointer, head_at: int, shape: Any,
                  scale: float, window: int, soft_cap: float, work: Any, tag: Any) -> None:  # fmt: skip
    """Attend for ``count`` tokens from position ``first`` on, with the query heads of one KV head, to all
    positions that they see. The queries are in ``work`` before (`_take`), the results after (`_give` writes
    them out).

    ``table``: the row's block table. ``head_at``: the offset of layer and KV head in a block. ``shape``:
    (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block). ``window``, ``soft_cap``:
    0 for none.
    """
    share, kv_heads, dim, slots, _ = shape
    side, end, addresses = kv_heads * slots * dim, first + count, work[5]
    columns = (count * share + LANES - 1) // LANES
    begin = max(0, first - window + 1) if window else 0
    start = begin // TILE * TILE
    locate(begin, min(start + TILE, end), arena, table, head_at, shape, addresses)
    _begin(columns, dim, work, tag)
    for tile in range(start, end, TILE):
        if tile % SPAN == 0 and tile > start:
            _merge(columns, tile // SPAN - start // SPAN == 1, dim, work, tag)
            _begin(columns, dim, work, tag)
        _load_tile(dim, side, work, tag)
        locate(tile + TILE, min(tile + 2 * TILE, end), arena, table, head_at, shape, addresses)
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
    if (end - 1) // SPAN > start // SPAN:
        _merge(columns, False, dim, work, tag)
        _finish(columns, dim, work, tag)


@inlined
def _begin(columns: int, dim: int, work: Any, tag: Any) -> None:
    """Reset the sums and softmax state of ``columns`` columns in ``work`` (see `_workspace`): a span begins."""
    _, sums, state, _ = work[2]
    _, dims, _ = sizes(dim, tag)
    for i in range(columns * dims * LANES):
        sums[i] = np.float32(0)
    for i in range(columns * 2 * LANES):
        state[i] = np.float32(0) if i & LANES else _LOWEST


@in_order
def _merge(columns: int, first: bool, dim: int, work: Any, tag: Any) -> None:
    """Merge the span that ends into the result of those before it, for ``columns`` columns in ``work`` (see
    `_workspace`). ``first``: there is none before it."""
    _, sums, state, merged = work[2]
    _, dims, _ = sizes(dim, tag)
    factors, line = work[3][1], dims * LANES  # the shares are not needed any more
    for column in range(columns):
        into, own = offset(merged, column * (line + 2 * LANES)), offset(state, column * 2 * LANES)
        whole, mine = offset(into, 2 * LANES), offset(sums, column * line)
        if first:
            for i in range(2 * LANES):
                into[i] = own[i]
            for i in range(line):
                whole[i] = mine[i]
            continue
        second = offset(factors, LANES)
        shrinks(into, own, factors)
        merge(offset(into, LANES), factors, offset(own, LANES), second)
        for i in range(0, line, LANES):
            merge(offset(whole, i), factors, offset(mine, i), second)


@inlined
def _finish(columns: int, dim: int, work: Any, tag: Any) -> None:
    """Take the merged results of all spans as the sums and softmax state of ``columns`` columns."""
    _, sums, state, merged = work[2]
    _, dims, _ = sizes(dim, tag)
    line = dims * LANES
    for column in range(columns):
        into = offset(merged, column * (line + 2 * LANES))
        for i in range(2 * LANES):
            state[column * 2 * LANES + i] = into[i]
        for i in range(line):
            sums[column * line + i] = into[2 * LANES + i]


@inlined
def _take(
    vectors: int, first: int, line: int, query: Pointer, shape: Any, window: int, work: Any, tag: Any
) -> None:
    """Pack ``vectors`` query vectors into ``work`` (see `_workspace`), as columns of ``LANES`` vectors, with
    the positions that each sees. The free lanes of the last column get copies of the last vector.

    The vectors are those of some tokens, with the query heads of one KV head each. ``line``: the index of the
    first vector in ``query``; ``first``: the position of its token. ``window``: the tokens that a query sees;
    0: all.
    """
    share, kv_heads, dim, _, _ = shape
    _, _, (queries, _, _, _), _, limits, _, lines = work
    words, _, _ = sizes(dim, tag)
    packed, rest = memory(lines[3]), line_of(lines, 1, tag)
    columns = (vectors + LANES - 1) // LANES
    for lane in range(columns * LANES):
        vector = min(lane, vectors - 1)
        token, column = vector // share, lane // LANES
        line_at = offset(query, (line + token * kv_heads * share + vector % share) * dim)
        pack(line_at, dim, rest, packed, LANES)
        own = offset(queries, column * words * LANES + lane % LANES)
        for i in range(words):
            own[i * LANES] = packed[i]
        limits[column, 0, lane % LANES] = max(0, first + token - window + 1) if window else 0
        limits[column, 1, lane % LANES] = first + token


@inlined
def _give(vectors: int, line: int, out: Pointer, shape: Any, work: Any, tag: Any) -> None:
    """Write the attention of ``vectors`` query vectors from ``work`` (see `_workspace`) to ``out``: their
    weighted sums divided by the sums of weights. ``line``: the index of the first vector in ``out``."""
    share, kv_heads, dim, _, _ = shape
    _, sums, state, _ = work[2]
    _, dims, _ = sizes(dim, tag)
    for vector in range(vectors):
        column, lane = vector // LANES, vector % LANES
        to = (line + vector // share * kv_heads * share + vector % share) * dim
        factor = np.float32(1) / state[(column * 2 + 1) * LANES + lane]
        for i in range(dim):
            out[to + i] = narrow(sums[(column * dims + i) * LANES + lane] * factor, tag)


@inlined
def block_tokens(most: int, share: int, alike: int, parts: int) -> int:
    """How many tokens of a chunk are one work unit and share packed tiles of K and V, so that all ``parts``
    threads have about the same work. ``most``: the tokens of the longest chunk. ``share``: query heads per KV
    head. ``alike``: the number of chunks times KV heads. Packing tiles costs about as much as one column of
    queries."""
    column, widest = max(1, LANES // share), max(1, CHUNK_VECTORS // share)
    best, least = widest, 0
    for blocks in range((most + widest - 1) // widest, (most + column - 1) // column + 1):
        tokens = (most + blocks - 1) // blocks
        tokens = min(widest, (tokens + column - 1) // column * column)
        cost = (blocks * alike + parts - 1) // parts * (column + tokens)
        if least == 0 or cost < least:
            best, least = tokens, cost
    return best


@inlined
def attend_chunks(
    part: int, parts: int, chunks: Pointer, rows: int, most: int, query: Pointer, out: Pointer, arena: Pointer,
    starts: Pointer, contexts: Pointer, tables: Pointer, widest: int, layer_at: int, shape: Any, scale: float,
    window: int, soft_cap: float, tag: Any,
) -> None:  # fmt: skip
    """Prefill attention: compute the work units of thread ``part`` of ``parts``, and write their results to
    ``out``. A unit is (a block of tokens, chunk, KV head); units are numbered with the last blocks first, as
    they see most, and the thread takes every ``parts``-th.

    ``chunks``: the indices of the ``rows`` rows with several tokens, int64; ``most``: tokens of the longest of
    them. The other arguments are those of `decode.attend_singles`.
    """
    share, kv_heads, dim, slots, _ = shape
    tokens = block_tokens(most, share, rows * kv_heads, parts)
    blocks = (most + tokens - 1) // tokens
    work = _workspace(dim, tag)
    for piece in range(part, blocks * rows * kv_heads, parts):
        head, row = piece % kv_heads, chunks[piece // kv_heads % rows]
        total = starts[row + 1] - starts[row]
        begin = (blocks - 1 - piece // (kv_heads * rows)) * tokens
        count = min(tokens, total - begin)
        if count <= 0:
            continue
        first = contexts[row] - total + begin
        line = ((starts[row] + begin) * kv_heads + head) * share
        head_at, table = layer_at + head * slots * dim, offset(tables, row * widest)
        _take(count * share, first, line, query, shape, window, work, tag)
        _attend_block(first, count, arena, table, head_at, shape, scale, window, soft_cap, work, tag)
        _give(count * share, line, out, shape, work, tag)
