"""Decode attention: rows of one token each. A row's context is cut into spans of `SPAN` positions; each (row,
KV head, span) is computed on its own, and a row's spans are merged afterwards.

Spans begin at fixed positions, so a row's numbers depend neither on the batch nor on the threads; they have the
bits that `prefill` gives the same token in a chunk. `lanes` describes how the numbers lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiling import in_order, inlined
from .elements import Pointer, address_of, memory, narrow, offset, pointer
from .lanes import (
    LOWEST,
    SPAN,
    TILE,
    UNSEEN,
    aligned,
    merge,
    per_word,
    product,
    shrinks,
    soften_one,
    turn_lines,
    weigh_tile,
)
from .tiles import cap, fetch_rows, line_of, locate, pack, sizes
from .vectors import LANES, has_wide_registers

ENOUGH = 4
"""From this many spans per thread on, a thread takes all KV heads of a span; with fewer, one, so that the
threads have about equal work."""

WIDE = 4 if has_wide_registers() else 2
"""Columns of a tile of sums."""
COLUMN = LANES * LANES
"""Numbers of scores or sums from one column of lanes to the next."""

_LOWEST, _UNSEEN, _LOG2_E = np.float32(LOWEST), np.float32(UNSEEN), np.float32(1.4426950408889634)
_score1, _score2, _score3, _score4 = (
    product(rows, WIDE, run=1, apart=1, fresh=True) for rows in (1, 2, 3, 4)
)
_weigh1, _weigh2, _weigh3, _weigh4 = (weigh_tile(rows, WIDE) for rows in (1, 2, 3, 4))
_weigh1_narrow, _weigh2_narrow, _weigh3_narrow, _weigh4_narrow = (
    weigh_tile(rows, 1) for rows in (1, 2, 3, 4)
)


@inlined
def _workspace(dim: int, tag: Any) -> Any:
    """Allocate one thread's scratch memory, the tuple ``work`` that the other functions here take, for up to
    `LANES` queries. ``dim``: head_dim; ``tag``: a number of the element type.

    Returns: arrays that own the memory, the second for lines of elements, ``[3 + 2 * TILE, …]``; pointers to
    packed (keys, queries), queries ``[dim words, LANES]``; to (scores, shares, sums, softmax state); and the
    addresses of a tile's keys, of the next tile's, and of the lines of keys and values that are read, int64
    ``[4, TILE]``.
    """
    words, dims, _ = sizes(dim, tag)
    queries = words * TILE
    scores = queries + words * LANES
    shares = scores + TILE * LANES
    sums = shares + TILE * LANES
    state = sums + dims * LANES
    room = np.zeros(state + 3 * LANES, np.float32)
    base = aligned(memory(room))
    packed = (base, offset(base, queries))
    numbers = (offset(base, scores), offset(base, shares), offset(base, sums), offset(base, state))
    lines = np.zeros((3 + 2 * TILE, max(dims, words, 2 * LANES)), np.float32)
    return (room, lines), packed, numbers, np.zeros((4, TILE), np.int64)


@inlined
def _load_tile(dim: int, side: int, work: Any, tag: Any) -> None:
    """Pack the keys of a tile, and find its values, from the key addresses in ``work`` (see `_workspace`). A
    position without an address gets values of zero, and another position's keys. ``side``: how many numbers a
    value lies behind its key in the arena."""
    (_, lines), (keys, _), _, (addresses, _, used, values) = work
    words, _, _ = sizes(dim, tag)
    some, blank = np.int64(0), address_of(line_of(lines, 0, tag))
    for at in range(TILE):
        some = addresses[at] if some == 0 else some
    for at in range(TILE):
        used[at] = addresses[at] if addresses[at] else some
        values[at] = address_of(offset(pointer(addresses[at], tag), side)) if addresses[at] else blank
    if dim % (LANES * per_word(tag)):  # vectors are read whole, so lines are copied to where zeros follow
        for at in range(TILE):
            for each, line in ((used, 3 + at), (values, 3 + TILE + at)):
                given, into = pointer(each[at], tag), line_of(lines, line, tag)
                for i in range(dim):
                    into[i] = given[i]
                each[at] = address_of(into)
    for group in range(TILE // LANES):
        turn_lines(tag, offset(memory(used), group * LANES), words, offset(keys, group * words * LANES))


@inlined
def _score(share: int, words: int, work: Any, tag: Any) -> None:
    """Score ``share`` queries against the packed tile; writes the scores into ``work`` (see `_workspace`)."""
    _, (keys, queries), (scores, _, _, _), _ = work
    line = words * LANES
    for column in range(0, TILE // LANES, WIDE):
        right = offset(keys, column * line)
        for row in range(0, share, 4):
            left, into = offset(queries, row), offset(scores, column * COLUMN + row * LANES)
            if share - row >= 4:
                _score4(tag, left, LANES, right, line, words, into, COLUMN)
            elif share - row == 3:
                _score3(tag, left, LANES, right, line, words, into, COLUMN)
            elif share - row == 2:
                _score2(tag, left, LANES, right, line, words, into, COLUMN)
            else:
                _score1(tag, left, LANES, right, line, words, into, COLUMN)


@inlined
def _weigh(share: int, dims: int, steps: int, work: Any, tag: Any) -> None:
    """Add the tile's values, weighted by the shares, to the sums of ``share`` queries; all are in ``work`` (see
    `_workspace`)."""
    _, _, (_, shares, sums, _), (_, _, _, values) = work
    addresses, column, columns = memory(values), 0, dims // LANES
    while column < columns:
        wide, at = column + WIDE <= columns, column * LANES
        for row in range(0, share, 4):
            left, into = offset(shares, row * TILE), offset(sums, column * COLUMN + row * LANES)
            if share - row >= 4:
                if wide:
                    _weigh4(tag, addresses, at, steps, left, into)
                else:
                    _weigh4_narrow(tag, addresses, at, steps, left, into)
            elif share - row == 3:
                if wide:
                    _weigh3(tag, addresses, at, steps, left, into)
                else:
                    _weigh3_narrow(tag, addresses, at, steps, left, into)
            elif share - row == 2:
                if wide:
                    _weigh2(tag, addresses, at, steps, left, into)
                else:
                    _weigh2_narrow(tag, addresses, at, steps, left, into)
            elif wide:
                _weigh1(tag, addresses, at, steps, left, into)
            else:
                _weigh1_narrow(tag, addresses, at, steps, left, into)
        column += WIDE if wide else 1


@in_order
def _soften(share: int, low: int, high: int, factor: Any, dims: int, work: Any, tag: Any) -> None:
    """Turn the scores of ``share`` queries with a tile into shares, and update their running softmax and sums
    in ``work`` (see `_workspace`). The queries see the positions ``[low, high)`` of the tile. ``factor``: the
    scale times log2 e."""
    _, _, (scores, shares, sums, state), _ = work
    for query in range(share):
        mine = offset(scores, query * LANES)
        for at in range(low):
            mine[at // LANES * COLUMN + at % LANES] = _UNSEEN
        for at in range(high, TILE):
            mine[at // LANES * COLUMN + at % LANES] = _UNSEEN
        own, into = offset(state, query), offset(shares, query * TILE)
        soften_one(tag, mine, factor, own, into, offset(sums, query * LANES), dims // LANES)


@inlined
def _attend_span(share: int, query: Pointer, arena: Pointer, span: Any, following: Any, shape: Any,
                 scale: float, soft_cap: float, work: Any, found: Any, tag: Any) -> None:  # fmt: skip
    """Attend to one span of a row's context for ``share`` query heads, at most `LANES`, of one KV head. For
    each of these heads it writes to ``found`` ``[share, dims + 2]``: the weighted sum of values, the greatest
    score times log2 e, and the sum of the weights.

    ``span``: (first position, position behind the last, pointer to the row's block table, offset of layer and
    head in a block). ``following``: the span that is computed next, likewise: its first tile is prefetched.
    ``shape``: (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block).
    """
    (_, lines), (_, queries), (scores, _, sums, state), (addresses, ahead, _, _) = work
    _, kv_heads, dim, slots, _ = shape
    words, dims, steps = sizes(dim, tag)
    side, (low, high, table, head_at) = kv_heads * slots * dim, span
    line, rest = memory(lines[2]), line_of(lines, 1, tag)
    for at in range(share):
        pack(offset(query, at * dim), dim, rest, line, LANES)
        for i in range(words):
            queries[i * LANES + at] = line[i]
    for i in range(dims * LANES):
        sums[i] = np.float32(0)
    for i in range(LANES):
        state[i], state[LANES + i] = _LOWEST, np.float32(0)
    first = low // TILE * TILE
    locate(low, min(first + TILE, high), arena, table, head_at, shape, addresses)
    for tile in range(first, high, TILE):
        _load_tile(dim, side, work, tag)
        if tile + TILE < high:
            locate(tile + TILE, min(tile + 2 * TILE, high), arena, table, head_at, shape, ahead)
        else:
            begin, end, other, other_at = following
            edge = begin // TILE * TILE + TILE
            locate(begin, min(edge, end), arena, other, other_at, shape, ahead)
        fetch_rows(0, TILE, dim, 0, ahead, tag)
        _score(share, words, work, tag)
        fetch_rows(0, TILE, dim, side, ahead, tag)
        factor = np.float32(scale) * _LOG2_E
        if soft_cap > 0:
            cap(scores, TILE * LANES, scale, soft_cap)
            factor = _LOG2_E
        _soften(share, max(0, low - tile), min(TILE, high - tile), factor, dims, work, tag)
        _weigh(share, dims, steps, work, tag)
        addresses[:] = ahead
    for at in range(share):
        for i in range(dims):
            found[at, i] = sums[i // LANES * COLUMN + at * LANES + i % LANES]
        found[at, dims], found[at, dims + 1] = state[at], state[LANES + at]


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
def _span(piece: Any, singles: Pointer, rows: int, contexts: Pointer, tables: Pointer, widest: int,
          layer_at: int, shape: Any, window: int) -> Any:  # fmt: skip
    """Where a work unit's K and V are. ``piece``: the unit, (index in ``singles``, KV head, span number).
    Returns its first position, the position behind its last one (no work if that is not greater), a pointer
    to the row's block table, and the offset of layer and head in a block.

    ``singles``: the indices of the ``rows`` rows of one token. ``contexts``: each row's context length.
    ``tables``: block tables, ``[rows, widest]``. ``layer_at``: the layer's offset in a block. ``shape``:
    (query heads per KV head, kv_heads, head_dim, block_tokens, numbers of a block). ``window``: tokens that a
    query sees, 0 for all."""
    _, _, dim, slots, _ = shape
    at, head, span = piece
    if at >= rows:
        return 0, 0, tables, layer_at
    row = singles[at]
    low = max(span * SPAN, contexts[row] - window if window else 0)
    high = min((span + 1) * SPAN, contexts[row])
    return low, high, offset(tables, row * widest), layer_at + head * slots * dim


@inlined
def attend_singles(
    part: int, parts: int, singles: Pointer, rows: int, spans: int, query: Pointer, arena: Pointer,
    starts: Pointer, contexts: Pointer, tables: Pointer, widest: int, layer_at: int, shape: Any, scale: float,
    window: int, soft_cap: float, found: Any, tag: Any,
) -> None:  # fmt: skip
    """Decode attention: compute all work units, (row, KV head, span), of thread number ``part`` of ``parts``,
    and write their partial results to ``found`` ``[rows, kv_heads, spans, share, dims + 2]``: for each query
    head the weighted sum of values, the greatest score and the sum of the weights. A span that the row does not
    see gets weights of 0. `merge_singles` does the rest.

    ``singles``: the indices of the ``rows`` rows with one token, int64. ``spans``: those of the longest of
    their contexts. ``query``: ``[tokens, q_heads, head_dim]``. ``starts``, ``contexts``, ``tables`` ``[…,
    widest]``: the batch's ``row_starts``, ``context_lengths`` and ``tables``. ``layer_at``: the offset of the
    layer in a block, in numbers. ``shape``: (query heads per KV head, kv_heads, head_dim, block_tokens, numbers
    of a block). ``scale``: the factor on scores. ``window``, ``soft_cap``: 0 for none. ``tag``: a number of the
    element type (`elements.TAGS`).
    """
    share, kv_heads, dim, _, _ = shape
    _, dims, _ = sizes(dim, tag)
    piece = piece_of(0, part, parts, rows, spans, kv_heads)
    if piece[0] >= rows:
        return
    work, number = _workspace(dim, tag), 0
    own = _span(piece, singles, rows, contexts, tables, widest, layer_at, shape, window)
    while piece[0] < rows:
        at, head, span = piece
        number += 1
        piece = piece_of(number, part, parts, rows, spans, kv_heads)
        following = _span(piece, singles, rows, contexts, tables, widest, layer_at, shape, window)
        into = found[at, head, span]
        if own[0] < own[1]:
            first = (starts[singles[at]] * kv_heads + head) * share
            for begin in range(0, share, LANES):
                queries, count = offset(query, (first + begin) * dim), min(LANES, share - begin)
                _attend_span(
                    count, queries, arena, own, following, shape, scale, soft_cap, work, into[begin:], tag
                )  # fmt: skip
        else:
            into[:, :dims], into[:, dims], into[:, dims + 1] = np.float32(0), _LOWEST, np.float32(0)
        own = following


@in_order
def _merge(found: Any, spans: int, dim: int, factors: Any, out: Pointer, to: int, tag: Any) -> None:
    """Merge the partial results of one query head over its spans, as `prefill` does it, and write the ``dim``
    numbers of its attention to ``out[to:]`` in the type of ``tag``. ``found`` ``[spans, dims + 2]``: the
    weighted sum of values, the greatest score and the sum of the weights of each span; the first span's are
    overwritten. ``factors``: scratch, ``[4 * LANES]``."""
    dims = found.shape[1] - 2
    most, other, both = memory(factors), offset(memory(factors), LANES), offset(memory(factors), 2 * LANES)
    whole, second = memory(found[0]), offset(both, LANES)
    for span in range(1, spans):
        mine = memory(found[span])
        most[0], other[0] = whole[dims], mine[dims]
        shrinks(most, other, both)
        whole[dims] = most[0]
        for i in range(0, dims, LANES):
            merge(offset(whole, i), both[0], offset(mine, i), second[0])
        most[0], other[0] = whole[dims + 1], mine[dims + 1]
        merge(most, both[0], other, second[0])
        whole[dims + 1] = most[0]
    factor = np.float32(1) / whole[dims + 1]
    for i in range(dim):
        out[to + i] = narrow(whole[i] * factor, tag)


@inlined
def merge_singles(part: int, parts: int, singles: Pointer, rows: int, spans: int, starts: Pointer, shape: Any,
                  found: Any, out: Pointer, tag: Any) -> None:  # fmt: skip
    """Merge the partial results of `attend_singles` that belong to thread number ``part`` of ``parts``, and
    write them to ``out``, ``[tokens, q_heads, head_dim]``. The arguments are its own."""
    share, kv_heads, dim, _, _ = shape
    factors = np.zeros(4 * LANES, np.float32)
    for unit in range(part, rows * kv_heads, parts):
        at, head = unit // kv_heads, unit % kv_heads
        for j in range(share):
            to = ((starts[singles[at]] * kv_heads + head) * share + j) * dim
            _merge(found[at, head, :, j], spans, dim, factors, out, to, tag)
