"""One step as the attention kernels see it: each token's position and slot, and each row's block table.

It is made once per step and KV group on the host and uploaded in one copy; every layer of the group reads it. A
row is the part of a sequence that the step computes: (first position, token count, block table).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .device import Device, Ints, device_of

Numbers: TypeAlias = Sequence[int] | Ints
Tables: TypeAlias = Sequence[NDArray[np.int32]] | Ints


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step that the reference backend attends to in one call: either rows of one token each, with
    contexts of similar length, or one row of several tokens (a chunk).

    ``tokens``: the indices in the batch of the group's tokens, row by row; a slice, or int64 on the device.
    ``count``: tokens per row (1, or the chunk's). On the host, int64: ``firsts`` ``[rows]``, the position of
    each row's first token; ``blocks`` ``[rows, width]``, the block ids of each row's context, padded with 0
    to the longest.
    """

    tokens: slice | Tensor
    count: int
    firsts: Ints
    blocks: Ints

    @property
    def rows(self) -> int:
        """The number of rows in the group."""
        return len(self.firsts)


@dataclass(frozen=True, slots=True)
class Gather:
    """What the reference reads from one arena to attend for a row group, with one sliding window (or none).

    A tile is K or V of one head in one block, ``[block_tokens, head_dim]``; the arena is a list of tiles.
    ``tiles``: int64 ``[2 * rows * kv_heads * width]``, the indices in that list of the tiles to read, for
    layer 0 and in the order (k|v, row, head, block). Together they hold ``[2, rows, kv_heads, span]`` slots,
    ``span = width * block_tokens``. ``blank``: int64, the flat indices of those slots that hold no token of
    the row. ``mask``: added to scores, 0 or -inf: ``[rows, 1, 1, span]`` for rows of one token, ``[count,
    span]`` for a chunk.
    """

    tiles: Tensor
    blank: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step's layout: a ragged mix of chunks and single tokens over a paged cache. Its tensors are int64 on
    the arena's device, if not said otherwise.

    ``positions``: ``[tokens]``, each token's position in its sequence. ``slots``: ``[tokens]``, where its K and
    V go: ``block * block_tokens + offset``; the GPU backends do not store a token with slot -1. ``row_starts``:
    ``[rows + 1]``, row r has the tokens ``[row_starts[r], row_starts[r + 1])``. ``context_lengths``:
    ``[rows]``, how many tokens a row's last token sees, with itself. ``tables``: int32 ``[lines, width]``, a
    row's block ids in a line, and anything behind them, and before the window of layers that have one.
    ``lines``: int32 ``[rows]``, which line of ``tables`` is the row's. The CPU and reference backends do not
    read it: they attend only to batches of their own `lay_out`, in which line r is row r's (and the CPU's
    tables are int64). ``groups``: the same rows as the reference backend groups them; empty for the CPU
    backend. ``device``: uploads what `gathers_of` lays out later; None: the arena's. ``gathers``: results of
    `gathers_of` in this step, by (number of the arena's layers, window). ``adapters``: ``[tokens]``, the slot
    of each token's adapter (`kernels.low_rank`), -1 for none; None: no token has one. ``splits``: what the GPU
    kernels computed from row starts and context lengths (see `gpu.parts`); once these change, another batch is
    needed.
    """

    positions: Tensor
    slots: Tensor
    row_starts: Tensor
    context_lengths: Tensor
    tables: Tensor
    lines: Tensor
    groups: tuple[RowGroup, ...]
    device: Device | None = None
    adapters: Tensor | None = None
    gathers: dict[tuple[int, int | None], tuple[Gather, ...]] = field(default_factory=dict, repr=False)
    splits: dict[tuple[int, int, int, bool], Tensor] = field(default_factory=dict, init=False, repr=False)


def lay_out(
    arena: Tensor,
    firsts: Numbers,
    counts: Numbers,
    tables: Tables,
    device: Device | None = None,
) -> PagedBatch:
    """Lay out a step's rows for attention. Row r computes ``counts[r]`` tokens from position ``firsts[r]``
    on.

    ``arena`` ``[block, layer, k|v, head, slot, dim]`` gives the block size, and the device if that is None:
    the result holds for all arenas of its block size. ``tables[r]`` has the row's block ids, at least
    ``ceil((first + count) / block_tokens)`` of them; as one int64 array it is ``[rows, most blocks of a row]``,
    0 behind a row's own.
    """
    slots_per_block = arena.shape[4]
    first, count = np.asarray(firsts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    context = first + count
    widths = -(-context // slots_per_block)
    starts = np.concatenate(([0], np.cumsum(count)))
    padded = padded_tables(tables, widths)
    row_of, positions = np.arange(len(count)), first
    if starts[-1] != len(count):
        row_of = np.repeat(row_of, count)
        positions = np.arange(starts[-1]) - (starts[:-1] - first)[row_of]
    block, offset = np.divmod(positions, slots_per_block)
    slots = padded[row_of, block] * slots_per_block + offset

    cut = list(_grouped(count, widths))
    tokens = [(starts[rows][:, None] + np.arange(count[rows[0]])).reshape(-1) for rows in cut]
    device = device or device_of(arena.device)
    narrow = [padded.astype(np.int32), np.arange(len(count), dtype=np.int32)]
    at, to, row_starts, lengths, blocks, lines, *where = device.upload(
        [positions, slots, starts, context, *narrow, *tokens]
    )
    groups = tuple(
        RowGroup(_span(own, up), int(count[rows[0]]), first[rows], padded[rows, : widths[rows].max()])
        for rows, own, up in zip(cut, tokens, where, strict=True)
    )
    return PagedBatch(at, to, row_starts, lengths, blocks, lines, groups, device)


def padded_tables(tables: Tables, widths: Ints) -> Ints:
    """The block ids of all rows, int64 ``[rows, most blocks of a row]``, 0 behind a row's own. ``widths``: the
    blocks of each row's context."""
    if isinstance(tables, np.ndarray):
        return tables
    padded = np.zeros((len(widths), int(widths.max(initial=1))), dtype=np.int64)
    for row, (table, width) in enumerate(zip(tables, widths.tolist(), strict=True)):
        padded[row, :width] = table[:width]
    return padded


def _grouped(count: Ints, widths: Ints) -> Iterator[Ints]:
    """Yield the rows to attend to together, as arrays of row indices: the rows with one token, by the bit
    length of their number of blocks (1, 2 to 3, 4 to 7, …), then each other row alone. ``count``, ``widths``:
    ``[rows]``, the tokens and blocks of each row.

    So padding the rows of a group to its longest less than doubles it.
    """
    single = np.flatnonzero(count == 1)
    scale = np.frexp(widths[single])[1]
    yield from (single[scale == size] for size in sorted(set(scale.tolist())))
    yield from np.flatnonzero(count > 1)[:, None]


def _span(tokens: Ints, uploaded: Tensor) -> slice | Tensor:
    """A row group's token indices for `RowGroup`: a slice, which needs no copy, if they are contiguous, else
    ``uploaded``. ``tokens``: the indices on the host, ``uploaded``: the same on the device."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == tokens.size else uploaded


def gathers_of(
    batch: PagedBatch, arena: Tensor, window: int | None, dtype: torch.dtype
) -> tuple[Gather, ...]:
    """What the reference reads from ``arena`` for each of ``batch.groups``: one `Gather` per group, in their
    order. Computed once per step for each ``window`` and number of layers of an arena, and kept in
    ``batch.gathers``.

    ``window``: how many tokens a query sees, with itself; None: all. Blocks that lie wholly before the window
    of a row's first token are left out. ``dtype``: the type of the mask.
    """
    key = (arena.shape[1], window)
    made = batch.gathers.get(key)
    if made is None:
        drafts = [_draft(group, arena, window) for group in batch.groups]
        flat = [array for draft in drafts for array in (draft.tiles, draft.blank, draft.starts)]
        parts = (batch.device or device_of(arena.device)).upload(flat)
        triples = zip(batch.groups, parts[0::3], parts[1::3], parts[2::3], strict=True)
        made = tuple(
            Gather(
                tiles, blank, _mask(group, batch.positions[group.tokens], starts, draft.span, window, dtype)
            )
            for draft, (group, tiles, blank, starts) in zip(drafts, triples, strict=True)
        )
        batch.gathers[key] = made
    return made


@dataclass(frozen=True, slots=True)
class _HostGather:
    """A `Gather` before its upload, without the mask, as numpy arrays. ``tiles``: the indices of the KV tiles
    (K or V of one head in one block) to read; ``blank``: the flat indices of the slots in them that hold no
    token of the row. ``starts``: ``[rows]``, the position of the first slot that is read for each row; empty
    if all are 0. ``span``: how many slots are read per row."""

    tiles: Ints
    blank: Ints
    starts: Ints
    span: int


def _draft(group: RowGroup, arena: Tensor, window: int | None) -> _HostGather:
    _, layers, _, heads, slots_per_block, _ = arena.shape
    blocks, starts, ends = group.blocks, _FROM_THE_BEGINNING, group.firsts + group.count
    if window is not None:
        blocks, starts = _behind(group, window, slots_per_block)
        ends = ends - starts
    rows, width = blocks.shape
    span = width * slots_per_block
    sides_and_heads = np.arange(2 * heads).reshape(2, 1, heads, 1)
    tiles = (blocks * (layers * 2 * heads)).reshape(1, rows, 1, width) + sides_and_heads
    hollow = np.empty((2, rows, heads, span), dtype=bool)
    hollow[:] = (np.arange(span) >= ends[:, None])[:, None]
    return _HostGather(tiles.reshape(-1), np.flatnonzero(hollow), starts, span)


def _behind(group: RowGroup, window: int, slots_per_block: int) -> tuple[Ints, Ints]:
    """The block ids that a window leaves to read, ``[rows, width]``: for each row those from the window of
    its first token on. And the position of each row's first slot in them, ``[rows]``. Shorter rows repeat
    their last column."""
    skipped = np.maximum(group.firsts + 1 - window, 0) // slots_per_block
    ends = -(-(group.firsts + group.count) // slots_per_block)
    columns = np.minimum(skipped[:, None] + np.arange((ends - skipped).max()), group.blocks.shape[1] - 1)
    return np.take_along_axis(group.blocks, columns, axis=1), skipped * slots_per_block


_FROM_THE_BEGINNING = np.zeros(0, dtype=np.int64)


def _mask(
    group: RowGroup, positions: Tensor, starts: Tensor, span: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    at, keys = positions[:, None], torch.arange(span, device=positions.device)
    if window is None:
        seen = keys <= at
    else:
        keys = keys + starts[:, None]
        seen = (keys <= at) & (keys > at - window)
    if group.count == 1:
        seen = seen.view(group.rows, 1, 1, span)
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~seen, float("-inf"))
