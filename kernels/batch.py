"""One step as the attention kernels see it: which token stands where, and which blocks hold its context.

Made once per step on the host and uploaded in one copy; every layer reads it. Knows nothing of sequences,
plans or models: rows are (first position, count, block table).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that the reference attends to together: single tokens of similar context, or one chunk.

    ``tokens``: where its queries stand in the batch. ``count``: tokens per row (1, or the chunk's).
    ``tiles``: int64 ``[2 * rows * kv_heads * width]``: its (block, k|v, head) tiles in layer 0, as gathered.
    ``blank``: int64: which of the gathered ``[2, rows, kv_heads, span]`` cells hold no token; ``span`` is
    ``width * block_tokens``. ``mask``: added to scores, 0 or -inf: ``[rows, 1, 1, span]`` for single tokens,
    ``[count, span]`` for a chunk.
    """

    tokens: slice | Tensor
    rows: int
    count: int
    tiles: Tensor
    blank: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A ragged mix of chunks and single tokens over a paged cache: int64 tensors on the arena's device.

    ``positions``, ``slots``: ``[tokens]``; K and V of a token go to slot ``block * block_tokens + offset``.
    ``row_starts``: ``[rows + 1]``, row r owns tokens ``[row_starts[r], row_starts[r + 1])``.
    ``context_lengths``: ``[rows]``, tokens a row's last token sees, itself included.
    ``tables``: ``[rows, widest]`` block ids, padded with 0. ``groups``: the same rows, cut for the reference.
    """

    positions: Tensor
    slots: Tensor
    row_starts: Tensor
    context_lengths: Tensor
    tables: Tensor
    groups: tuple[RowGroup, ...]


def upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Bring int64 arrays to ``device`` in one copy, asynchronous and from pinned memory on CUDA."""
    packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = torch.split(packed, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def lay_out(
    arena: Tensor, firsts: Sequence[int], counts: Sequence[int], tables: Sequence[NDArray[np.int32]]
) -> PagedBatch:
    """Lay out rows over ``arena`` ``[block, layer, k|v, head, slot, dim]``.

    Row r computes ``counts[r]`` tokens from position ``firsts[r]`` on; ``tables[r]`` holds its block ids, at
    least ``ceil((first + count) / block_tokens)`` of them. Keeps no reference to the tables.
    """
    slots_per_block = arena.shape[4]
    first, count = np.asarray(firsts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    context = first + count
    widths = -(-context // slots_per_block)
    starts = np.concatenate(([0], np.cumsum(count)))
    padded = np.zeros((len(count), int(widths.max(initial=1))), dtype=np.int64)
    for row, (table, width) in enumerate(zip(tables, widths, strict=True)):
        padded[row, :width] = table[:width]
    row_of = np.repeat(np.arange(len(count)), count)
    positions = np.arange(starts[-1]) - (starts[:-1] - first)[row_of]
    block, offset = np.divmod(positions, slots_per_block)
    slots = padded[row_of, block] * slots_per_block + offset

    drafts = [_draft(arena, rows, starts, count, context, padded) for rows in _grouped(count, widths)]
    flat = [positions, slots, starts, context, padded]
    flat += [array for draft in drafts for array in (draft.tokens, draft.tiles, draft.blank)]
    at, to, row_starts, lengths, blocks, *parts = upload(flat, arena.device)
    triples = zip(parts[0::3], parts[1::3], parts[2::3], strict=True)
    groups = (_finish(arena, draft, at, *three) for draft, three in zip(drafts, triples, strict=True))
    return PagedBatch(at, to, row_starts, lengths, blocks, tuple(groups))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row group still on the host."""

    rows: int
    count: int
    tokens: Ints
    tiles: Ints
    blank: Ints
    contexts: Ints
    span: int


def _grouped(count: Ints, widths: Ints) -> Iterator[Ints]:
    """Rows to attend to together: each chunk alone; single tokens by the bit length of their block count.

    Padding a group to its widest row then costs less than the group itself.
    """
    single = np.flatnonzero(count == 1)
    scale = np.frexp(widths[single])[1]
    yield from (single[scale == size] for size in np.unique(scale))
    yield from np.flatnonzero(count > 1)[:, None]


def _draft(arena: Tensor, rows: Ints, starts: Ints, count: Ints, context: Ints, padded: Ints) -> _Draft:
    _, layers, _, heads, slots_per_block, _ = arena.shape
    contexts, per_row = context[rows], int(count[rows[0]])
    width = -(-int(contexts.max()) // slots_per_block)
    span = width * slots_per_block
    side, head = np.arange(2).reshape(2, 1, 1, 1), np.arange(heads).reshape(1, 1, heads, 1)
    tiles = (padded[rows, :width].reshape(1, len(rows), 1, width) * layers * 2 + side) * heads + head
    hollow = np.broadcast_to(
        (np.arange(span) >= contexts[:, None]).reshape(1, len(rows), 1, span), (2, len(rows), heads, span)
    )
    tokens = (starts[rows][:, None] + np.arange(per_row)).reshape(-1)
    return _Draft(len(rows), per_row, tokens, tiles.reshape(-1), np.flatnonzero(hollow), contexts, span)


def _finish(
    arena: Tensor, draft: _Draft, positions: Tensor, tokens: Tensor, tiles: Tensor, blank: Tensor
) -> RowGroup:
    first, last = int(draft.tokens[0]), int(draft.tokens[-1])
    together = last - first + 1 == draft.tokens.size
    where = slice(first, last + 1) if together else tokens
    seen = torch.arange(draft.span, device=arena.device) <= positions[where][:, None]
    if draft.count == 1:
        seen = seen.view(draft.rows, 1, 1, draft.span)
    mask = torch.zeros(seen.shape, dtype=arena.dtype, device=arena.device).masked_fill_(~seen, float("-inf"))
    return RowGroup(where, draft.rows, draft.count, tiles, blank, mask)
