"""Moves of whole blocks between the device arena and the host tier's slots, as bytes.

On a CPU all of a move's blocks are copied by one call, which is done on return. On CUDA the slots' memory is
registered with the device piece by piece as it comes into use; saves run on a stream of their own beside the
step, loads on the step's own, before its rows. Knows arenas, slots and streams; not why anything moves.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.reference import copy_pieces
from .arena import DeviceArena
from .slots import SlotMemory

PIECE_BYTES = 64 << 20  # of slots registered at once


Copy: TypeAlias = Callable[[Tensor, Tensor, NDArray[np.int64], int], None]
"""As `kernels.interface.Kernels.copy_pieces`."""


class BlockMover:
    """Copies between ``arenas``, one per KV group, and ``memory``.

    A slot holds what one block id names: its bytes in each arena, one after the other. ``copy``: how they are
    copied where both lie in this machine's memory.
    """

    def __init__(self, arenas: Sequence[DeviceArena], memory: SlotMemory, copy: Copy = copy_pieces) -> None:
        sizes = [arena.group.block_bytes for arena in arenas]
        assert memory.block_bytes == sum(sizes), "slots of another size"
        self._sizes = tuple(sizes)
        self._arenas = tuple(zip(arenas, accumulate(sizes, initial=0), strict=False))
        self._memory = memory
        self._bytes = torch.frombuffer(memory.map, dtype=torch.uint8)
        self._cuda = arenas[0].device.type == "cuda"
        self._copy = copy
        self._block_tokens = max(arena.group.block_tokens for arena in arenas)
        self._flat = () if self._cuda else tuple(_flat(arena) for arena in arenas)
        self._stream = _stream(arenas[0].device) if self._cuda else None
        self._saved: Saving | None = None  # of the move before
        self._loaded: torch.cuda.Event | None = None
        self._pieces: set[int] = set()
        self._slots_per_piece = max(1, PIECE_BYTES // memory.stride)

    @property
    def reach(self) -> Callable[[int], Sequence[memoryview]] | None:
        """Gives a block's bytes in each arena, one after the other; None where they lie in other memory."""
        return None if self._cuda else self._of_block

    def move(
        self,
        saves: Sequence[tuple[int, int, int]],
        loads: Sequence[tuple[int, int]],
        overwritten: Collection[int] = (),
    ) -> Saving | None:
        """Copy (block, slot, tokens) down, zeros behind the tokens, then (slot, block) up.

        ``overwritten``: blocks that the loads, or work that follows on the current stream, will write before
        the next call: all of it comes after the saves of these. Work behind the next call comes after all.
        None where everything is done on return.
        """
        if self._stream is None:
            self._copy_all([(slot, block) for block, slot, _ in saves], up=False)
            for _, slot, tokens in saves:
                if tokens < self._block_tokens:
                    self.zero_behind(slot, tokens)
            self._copy_all(loads, up=True)
            return None
        current = torch.cuda.current_stream()
        if self._saved is not None:
            current.wait_event(self._saved.done)
        self._saved = self._save(self._stream, saves) if saves else None
        if self._saved is not None and not {block for block, _, _ in saves}.isdisjoint(overwritten):
            current.wait_event(self._saved.done)
        if loads:
            self._up(loads)
            self._loaded = _event(current)
        return self._saved

    def _save(self, stream: torch.cuda.Stream, saves: Sequence[tuple[int, int, int]]) -> Saving:
        """What is saved was computed by steps that are done, but may have been loaded by one in flight."""
        if self._loaded is not None:
            stream.wait_event(self._loaded)
        with torch.cuda.stream(stream):
            for block, slot, _ in saves:
                self._down(block, slot)
        return Saving(self, saves, _event(stream))

    def _up(self, loads: Iterable[tuple[int, int]]) -> None:
        for slot, block in loads:
            for arena, part in self._parts(slot):
                arena.bytes_of(block).copy_(part, non_blocking=True)

    def _down(self, block: int, slot: int) -> None:
        for arena, part in self._parts(slot):
            part.copy_(arena.bytes_of(block), non_blocking=True)

    def _copy_all(self, pairs: Sequence[tuple[int, int]], *, up: bool) -> None:
        """Of each (slot, block) the slot's bytes to the block's; not ``up``: the other way."""
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
        """The bytes of a block in each arena of this machine's memory."""
        if len(self._flat) == 1:  # as almost always, and asked for each block that comes up
            (flat,), (size,) = self._flat, self._sizes
            return [flat[block * size : (block + 1) * size]]
        sized = zip(self._flat, self._sizes, strict=True)
        return [flat[block * size : (block + 1) * size] for flat, size in sized]

    def zero_behind(self, slot: int, tokens: int) -> None:
        """Zero the slot's bytes behind the first ``tokens`` tokens."""
        for arena, part in self._parts(slot):
            if tokens < arena.group.block_tokens:
                part.view(arena.dtype).view(arena.group.block_shape)[:, :, :, tokens:] = 0

    def _parts(self, slot: int) -> Iterator[tuple[DeviceArena, Tensor]]:
        """Each arena, and its bytes in the slot."""
        held = self._slot(slot)
        for arena, start in self._arenas:
            yield arena, held[start : start + arena.group.block_bytes]

    def _slot(self, slot: int) -> Tensor:
        start = self._memory.offset_of(slot)
        if self._cuda:
            self._register(slot // self._slots_per_piece)
        return self._bytes[start : start + self._memory.block_bytes]

    def _register(self, piece: int) -> None:
        """Pin a piece's pages, so that copies run beside the host; without it they are right, but wait."""
        if piece in self._pieces:
            return
        self._pieces.add(piece)
        memory = self._memory
        first = piece * self._slots_per_piece
        count = min(self._slots_per_piece, memory.slots - first)
        address = self._bytes.data_ptr() + memory.offset_of(first)
        torch.cuda.cudart().cudaHostRegister(address, count * memory.stride, 0)  # type: ignore[no-untyped-call]


class Saving:
    """Copies down that run on the stream for saves until ``done``."""

    def __init__(
        self, mover: BlockMover, saves: Sequence[tuple[int, int, int]], done: torch.cuda.Event
    ) -> None:
        self.done = done
        self._mover = mover
        self._saves = saves

    def wait(self) -> None:
        """Wait until all bytes are in their slots."""
        self.done.synchronize()
        for _, slot, tokens in self._saves:
            self._mover.zero_behind(slot, tokens)


def _flat(arena: DeviceArena) -> memoryview:
    """All bytes of an arena in this machine's memory."""
    return arena.kv.view(torch.uint8).view(-1).numpy().data


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
