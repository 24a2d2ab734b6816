"""Copies whole blocks between the device arena and the host tier's slots.

On a CPU one call copies all blocks of a move, and is done on return. On a GPU saves run on a stream of their
own beside the step, and loads on the step's stream, before its rows; the slots' memory is registered with the
device ahead of the copies (`registration`). Knows arenas, slots and streams. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.device import Device, Event, Stream, device_of
from ..kernels.reference.backend import copy_pieces
from .arena import DeviceArena
from .host.registration import Registration
from .host.slots import SlotMemory

Copy: TypeAlias = Callable[[Tensor, Tensor, NDArray[np.int64], int], None]
"""A function that copies pieces of host memory: (source, target, offsets, size). ``offsets``: int64 ``[count,
2]``, where each piece is in source and target; ``size``: bytes of each piece."""


class BlockMover:
    """Copies blocks between ``arenas``, one per KV group, and the slots of ``memory``.

    A slot holds the block's bytes of each arena, one after the other. ``copy``: copies where both lie in this
    machine's memory. ``device``: makes the streams on which a GPU copies; None: the one of the arenas.
    """

    def __init__(
        self,
        arenas: Sequence[DeviceArena],
        memory: SlotMemory,
        copy: Copy = copy_pieces,
        device: Device | None = None,
    ) -> None:
        sizes = [arena.group.block_bytes for arena in arenas]
        assert memory.block_bytes == sum(sizes), "slots of another size"
        self._sizes = tuple(sizes)
        self._arenas = tuple(zip(arenas, accumulate(sizes, initial=0), strict=False))
        self._memory = memory
        self._bytes = torch.frombuffer(memory.map, dtype=torch.uint8)
        self._device = device or device_of(arenas[0].device)
        self._copy = copy
        self._block_tokens = max(arena.group.block_tokens for arena in arenas)
        overlaps = self._device.overlaps
        self._flat = () if overlaps else tuple(_flat(arena) for arena in arenas)
        self._stream = self._device.stream() if overlaps else None
        self._saved: Saving | None = None  # by the last move
        self._written: Event | None = None  # behind the last load or copy
        self.registration = Registration(self._device, memory, self._bytes.data_ptr())

    @property
    def reach(self) -> Callable[[int], Sequence[memoryview]] | None:
        """A function that gives, for a block id, the block's bytes in each arena as writable memory. None if
        the arenas lie in a GPU's memory."""
        return None if self._stream is not None else self._of_block

    def move(
        self,
        saves: Sequence[tuple[int, int, int]],
        loads: Sequence[tuple[int, int]],
        overwritten: Collection[int] = (),
    ) -> Saving | None:
        """Copy ``saves`` (block, slot, tokens) down to their slots, with zeros behind the tokens, then
        ``loads`` (slot, block) up.

        On a CPU all is done on return. On a GPU the copies run on streams; returns what to wait for before
        the slots of ``saves`` are used, or None if there are no saves. ``overwritten``: blocks that the
        loads, or later work on the current stream, write before the next call: that work waits for the saves
        of these blocks. Work after the next call waits for all saves.
        """
        if self._stream is None:
            self._copy_all([(slot, block) for block, slot, _ in saves], up=False)
            for _, slot, tokens in saves:
                if tokens < self._block_tokens:
                    self.zero_behind(slot, tokens)
            self._copy_all(loads, up=True)
            return None
        current = self._device.current()
        if self._saved is not None:
            current.follow(self._saved.done)
        self._saved = self._save(self._stream, saves) if saves else None
        if self._saved is not None and not {block for block, _, _ in saves}.isdisjoint(overwritten):
            current.follow(self._saved.done)
        if loads:
            current.copy(
                (arena.bytes_of(block), part) for slot, block in loads for arena, part in self._parts(slot)
            )
            self._written = current.record()
        return self._saved

    def copied(self) -> None:
        """Note that copies from block to block were enqueued on the current stream: later saves wait for
        them."""
        if self._stream is not None:
            self._written = self._device.current().record()

    def _save(self, stream: Stream, saves: Sequence[tuple[int, int, int]]) -> Saving:
        """Start to copy blocks to slots (``saves``: block, slot, tokens), on the stream for saves. The tokens
        to save were computed by finished steps, but a load or a copy of a step in flight may be writing them
        to these blocks: wait for it. Returns what to wait for."""
        if self._written is not None:
            stream.follow(self._written)
        stream.copy(
            (part, arena.bytes_of(block)) for block, slot, _ in saves for arena, part in self._parts(slot)
        )
        return Saving(self, saves, stream.record())

    def _copy_all(self, pairs: Sequence[tuple[int, int]], *, up: bool) -> None:
        """Copy the bytes of each pair (slot, block), and return when that is done, as on a CPU: with ``up``
        from the host slot to the block, else from the block to the slot."""
        if not pairs:
            return
        places = np.array(pairs, dtype=np.int64)
        places[:, 0] = self._memory.offsets_of(places[:, 0])
        for arena, start in self._arenas:
            size, cells = arena.group.block_bytes, arena.kv.view(torch.uint8).view(-1)
            pieces = places * (1, size) + (start, 0)
            if up:
                self._copy(self._bytes, cells, pieces, size)
            else:
                self._copy(cells, self._bytes, pieces[:, ::-1], size)

    def _of_block(self, block: int) -> list[memoryview]:
        """The bytes of a block, one writable memory per arena; for arenas in this machine's memory."""
        if len(self._flat) == 1:  # the usual case, on the path of each block that is read
            (flat,), (size,) = self._flat, self._sizes
            return [flat[block * size : (block + 1) * size]]
        sized = zip(self._flat, self._sizes, strict=True)
        return [flat[block * size : (block + 1) * size] for flat, size in sized]

    def zero_behind(self, slot: int, tokens: int) -> None:
        """Zero the K and V in a slot behind its first ``tokens`` tokens."""
        for arena, part in self._parts(slot):
            if tokens < arena.group.block_tokens:
                part.view(arena.dtype).view(arena.group.block_shape)[:, :, :, tokens:] = 0

    def _parts(self, slot: int) -> Iterator[tuple[DeviceArena, Tensor]]:
        """Yield each arena with the part of the slot's bytes that belongs to it."""
        held = self._slot(slot)
        for arena, start in self._arenas:
            yield arena, held[start : start + arena.group.block_bytes]

    def _slot(self, slot: int) -> Tensor:
        start = self._memory.offset_of(slot)
        if self._stream is not None:
            self.registration.use(slot)
        return self._bytes[start : start + self._memory.block_bytes]


@dataclass(frozen=True, slots=True)
class Saving:
    """Copies of blocks to slots that run on a GPU stream of their own; the event ``done`` comes behind the
    last."""

    _mover: BlockMover
    _saves: Sequence[tuple[int, int, int]]
    done: Event

    def wait(self) -> None:
        """Wait until all bytes are in their slots, and zero what is behind each record's tokens."""
        self.done.wait()
        for _, slot, tokens in self._saves:
            self._mover.zero_behind(slot, tokens)


def _flat(arena: DeviceArena) -> memoryview:
    """All bytes of an arena in this machine's memory, as writable memory; no copy."""
    return arena.kv.view(torch.uint8).view(-1).numpy().data
