"""Copies whole blocks between the device arena and the host tier's slots.

On a CPU one call copies all blocks of a move, and is done on return. On a GPU saves and loads run on streams of
their own, beside the steps and each other. Work waits for the copies of its own blocks and for no others: the
mover keeps the event behind each copy that is under way. Saved slots are hashed by a thread of its own. Knows
one arena, slots and streams. Imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from ..kernels.device import Device, Event, device_of
from ..kernels.reference.backend import copy_pieces
from .arena import DeviceArena
from .host.registration import Registration
from .host.slots import SlotMemory
from .system_limits import roam
from .tier import Reach

Copy: TypeAlias = Callable[[Tensor, Tensor, NDArray[np.int64], int], None]
"""A function that copies pieces of host memory: (source, target, offsets, size). ``offsets``: int64 ``[count,
2]``, where each piece is in source and target; ``size``: bytes of each piece."""

Blocks: TypeAlias = NDArray[np.integer]
Save: TypeAlias = tuple[int, int, int]
"""A block, its slot, and how many of its tokens are saved."""


class BlockMover:
    """Copies blocks between ``arena`` and the slots of ``memory``.

    ``copy``: copies where both lie in this machine's memory. ``device``: makes the streams on which a GPU
    copies; None: the one of the arena. ``hasher``: hashes what a GPU has saved; None: a thread of the mover's
    own.
    """

    def __init__(
        self,
        arena: DeviceArena,
        memory: SlotMemory,
        copy: Copy = copy_pieces,
        device: Device | None = None,
        hasher: Executor | None = None,
    ) -> None:
        self._group, self._size = arena.group, arena.group.block_bytes
        assert memory.block_bytes == self._size, "slots of another size"
        self._cells = arena.kv.view(torch.uint8).view(-1)
        self._memory = memory
        self._bytes = torch.frombuffer(memory.map, dtype=torch.uint8)
        self._device = device or device_of(arena.kv.device)
        self._copy = copy
        self._beside = self._device.overlaps
        self._down, self._up = self._device.stream(), self._device.stream()
        self._saves, self._loads, self._copies = _UnderWay(), _UnderWay(), _UnderWay()
        self._hasher = hasher or ThreadPoolExecutor(1, "hash-saved-kv", roam)
        self.registration = Registration(self._device, memory, self._bytes.data_ptr())

    @property
    def reach(self) -> Reach:
        """None if the arena lies in a GPU's memory."""
        if self._beside:
            return None
        flat, size = self._cells.numpy().data, self._size
        return lambda block: flat[block * size : (block + 1) * size]

    def move(self, saves: Sequence[Save], loads: Sequence[tuple[int, int]]) -> Moving | None:
        """Copy ``saves`` (block, slot, tokens) down to their slots, with zeros behind the tokens, then
        ``loads`` (slot, block) up.

        On a CPU all is done on return. On a GPU the copies run beside all else; returns what tells when they
        are done and the slots hashed, or None if there are none. A save comes behind the loads and copies to
        its block of earlier calls, a load behind the saves of its block. No work under way on the current
        stream may read or write a block that is loaded.
        """
        if not self._beside:
            self._copy_all([(slot, block) for block, slot, _ in saves], up=False)
            self._zero_behind(saves)
            self._copy_all(loads, up=True)
            return None
        events = []
        if saves:
            blocks = np.array([block for block, _, _ in saves])
            for event in chain(self._loads.behind(blocks), self._copies.behind(blocks)):
                self._down.follow(event)
            pieces = self._pieces((block, slot) for block, slot, _ in saves)
            self._down.copy((host, cells) for cells, host in pieces)
            events.append(self._down.record())
            self._saves.add(events[-1], blocks)
        if loads:
            blocks = np.array([block for _, block in loads])
            for event in self._saves.behind(blocks):
                self._up.follow(event)
            self._up.copy(self._pieces((block, slot) for slot, block in loads))
            events.append(self._up.record())
            self._loads.add(events[-1], blocks)
        return Moving(self, saves, events) if events else None

    @property
    def busy(self) -> bool:
        """Whether copies may be under way, so that work has to be let `follow` them."""
        return bool(self._saves) or self.loading

    @property
    def loading(self) -> bool:
        """Whether loads may be under way, so that work that reads blocks has to `follow` them, too."""
        return bool(self._loads)

    def follow(self, read: Blocks, written: Blocks) -> None:
        """Let the current stream's work from now on, which reads and writes these blocks (int ``[blocks]``),
        wait for their loads, and for the saves of those that it writes."""
        current = self._device.current()
        for event in chain(self._loads.behind(read, written), self._saves.behind(written)):
            current.follow(event)

    def copied(self, targets: Collection[int]) -> None:
        """Note that copies from block to block were enqueued on the current stream: saves of ``targets`` wait
        for them."""
        if self._beside:
            self._copies.add(self._device.current().record(), np.array([*targets]))

    def seal(self, saves: Sequence[Save]) -> Future[None]:
        """Begin to zero what is behind each record's tokens in its slot, and to write the slot's hash into
        the directory. The bytes must be in the slots."""
        return self._hasher.submit(self._seal, saves)

    def close(self) -> None:
        """Unregister the slots' memory, once all copies are done."""
        self._hasher.shutdown()
        self.registration.close()

    def _seal(self, saves: Sequence[Save]) -> None:
        self._zero_behind(saves)
        for _, slot, _ in saves:
            self._memory.set_digest(slot, xxh3_64_intdigest(self._memory.payload(slot)))

    def _pieces(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the device's and the host's bytes of each pair (block, slot), as few pieces as there can be:
        blocks that follow each other on both sides are one."""
        ordered = sorted(pairs, key=lambda pair: pair[0])  # two loads to one block stay in order
        joins, size = self._memory.stride == self._size, self._size
        at = 0
        while at < len(ordered):
            (block, slot), end = ordered[at], at + 1
            while joins and end < len(ordered) and ordered[end] == (block + end - at, slot + end - at):
                end += 1
            first, much = self._memory.offset_of(slot), (end - at) * size
            yield self._cells[block * size : block * size + much], self._bytes[first : first + much]
            at = end

    def _copy_all(self, pairs: Sequence[tuple[int, int]], *, up: bool) -> None:
        """Copy the bytes of each pair (slot, block), and return when that is done, as on a CPU: with ``up``
        from the host slot to the block, else from the block to the slot."""
        if not pairs:
            return
        offsets = np.array(pairs, dtype=np.int64)
        offsets[:, 0] = self._memory.offsets_of(offsets[:, 0])
        pieces = offsets * (1, self._size)
        if up:
            self._copy(self._bytes, self._cells, pieces, self._size)
        else:
            self._copy(self._cells, self._bytes, pieces[:, ::-1], self._size)

    def _zero_behind(self, saves: Sequence[Save]) -> None:
        """Zero what is in the slots behind the tokens that were saved."""
        for _, slot, tokens in saves:
            if tokens < self._group.block_tokens:
                self._group.zero_behind(self._memory.payload(slot), tokens)


class _UnderWay:
    """Copies under way in one stream: of each plan the event behind them, and their blocks."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Event, Blocks]] = deque()  # in order, so the first is done first

    def __bool__(self) -> bool:
        self._forget()
        return bool(self._copies)

    def add(self, event: Event, blocks: Blocks) -> None:
        """Add copies of ``blocks``, with ``event`` behind them. Those that are done are forgotten."""
        self._forget()
        self._copies.append((event, blocks))

    def behind(self, *blocks: Blocks) -> Iterator[Event]:
        """Yield the events behind which the copies of these blocks are done."""
        for event, copied in self._copies if self else ():
            if any(np.isin(copied, some).any() for some in blocks):
                yield event

    def _forget(self) -> None:
        """Forget the first copies, as far as they are done."""
        while self._copies and self._copies[0][0].done:
            self._copies.popleft()


@dataclass(eq=False, slots=True)
class Moving:
    """Saves and loads of one plan on a GPU's streams. ``events``: behind them."""

    _mover: BlockMover
    _saves: Sequence[Save]
    _events: list[Event]
    _sealing: Future[None] | None = None

    def done(self, *, wait: bool = False) -> bool:
        """Whether all bytes are where they go, and what was saved is hashed. With ``wait`` it is."""
        for event in self._events:
            if wait:
                event.wait()
            elif not event.done:
                return False
        self._events.clear()
        if self._saves and self._sealing is None:
            self._sealing = self._mover.seal(self._saves)
        if self._sealing is None or not (wait or self._sealing.done()):
            return self._sealing is None
        self._sealing.result()
        return True
