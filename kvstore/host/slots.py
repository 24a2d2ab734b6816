"""The host tier's memory: one memfd with a header, a directory and slots, which outlives the engine's process.

::

    header       magic, layout version, size of an entry, record space, block bytes, slots
    directory    per slot: key, tokens, state, xxh3 of the payload, stamp of the last use, tenant
    slots        each the bytes of one block, at ``stride`` bytes from each other

              reserve              filled                 read
        FREE ─────────▶ FILLING ─────────▶ READY ◀────────────────▶ READING(n)
          ▲                │                 │      the last reader
          └────────────────┴─────────────────┘      is done
               abandoned         dropped

One process writes the directory; each process that maps the memory may read it. Knows bytes and states, not
which record is worth keeping. No torch.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ..errors import KVStoreError, SlotMisused
from ..keys import KEY_BYTES
from ..tier import Record

MAGIC = b"holdfast"
LAYOUT_VERSION = 2
PAGE = 4096
HEADER = struct.Struct("<8sII16sQQ")
ENTRY_BYTES = 64
_ENTRY = np.dtype(
    {
        "names": ["key", "tokens", "state", "digest", "stamp", "tenant"],
        "formats": [f"V{KEY_BYTES}", "<u4", "<u4", "<u8", "<u8", "<u8"],
        "itemsize": ENTRY_BYTES,
    }
)


class SlotState(IntEnum):
    """The state of a slot. FREE: it holds nothing. FILLING: a record is being written to it. READY: its
    record can be read, or evicted. READING: its record is being read. The numbers are written in the memory:
    a new memfd is all FREE."""

    FREE = 0
    FILLING = 1
    READY = 2
    READING = 3


_MAY_MOVE = np.zeros((len(SlotState), len(SlotState)), dtype=np.bool_)
"""``[from, to]``: the changes of a slot's state that are allowed."""
_MAY_MOVE[SlotState.FREE, SlotState.FILLING] = True
_MAY_MOVE[SlotState.FILLING, [SlotState.READY, SlotState.FREE]] = True
_MAY_MOVE[SlotState.READY, [SlotState.READING, SlotState.FREE]] = True
_MAY_MOVE[SlotState.READING, [SlotState.READING, SlotState.READY]] = True


def make_memory(size: int) -> int:
    """Make a memfd of ``size`` bytes, all zero, and return its file descriptor; pages are taken as they are
    touched."""
    fd = os.memfd_create("holdfast-host", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


class SlotMemory:
    """The memfd ``fd`` (None: there is no memory, and no slot), mapped: a directory, and slots for blocks of
    ``block_bytes`` bytes of the record space ``space`` (`BlockHasher.space`).

    ``slots``: how many; 0 where the memory is too small for one. ``stride``: bytes from slot to slot.
    ``adopted``: whether the memory had this layout already; otherwise it is formatted, and all slots are
    free. Opens a descriptor of its own.

    Raises:
        KVStoreError: ``made`` says that another process has formatted it so, and its header says otherwise.
    """

    def __init__(self, fd: int | None, space: bytes, block_bytes: int, *, made: bool = False) -> None:
        size = 0 if fd is None else os.fstat(fd).st_size
        self.space = space
        self.block_bytes = block_bytes
        # Whole pages where a block is one: so that a range of slots can be registered with the device.
        unit = PAGE if block_bytes >= PAGE else 64
        self.stride = -(-block_bytes // unit) * unit
        self.slots = max(0, (size - 2 * PAGE) // (self.stride + ENTRY_BYTES))
        self.first = PAGE + -(-self.slots * ENTRY_BYTES // PAGE) * PAGE  # where slot 0 begins
        self.map = mmap.mmap(-1 if fd is None else fd, max(size, PAGE))
        self._bytes = memoryview(self.map)
        self.directory: NDArray[np.void] = np.frombuffer(self.map, _ENTRY, self.slots, PAGE)
        """The entries of all slots as one structured array, not copied."""
        self._states, self._stamps = self.directory["state"], self.directory["stamp"]
        header = HEADER.pack(MAGIC, LAYOUT_VERSION, ENTRY_BYTES, space, block_bytes, self.slots)
        self.adopted = self.map[: HEADER.size] == header
        if made and not self.adopted:
            raise KVStoreError("the host tier's memory is described otherwise")
        if not self.adopted:
            self.map[: HEADER.size] = bytes(HEADER.size)  # a death here leaves nothing half formatted
            self.directory["state"] = SlotState.FREE
            self.map[: HEADER.size] = header

    def record(self, slot: int) -> Record:
        """The record in ``slot``, as the directory says."""
        key, tokens, _, digest, _, tenant = self.directory[self._checked(slot)].item()
        return Record(key, tokens, digest, tenant)

    def state(self, slot: int) -> SlotState:
        """The state of ``slot``."""
        return SlotState(self._states[self._checked(slot)])

    def payload(self, slot: int) -> memoryview:
        """The bytes of ``slot``, ``[block_bytes]``, writable."""
        start = self.offset_of(slot)
        return self._bytes[start : start + self.block_bytes]

    def touch(self, slot: int) -> None:
        """Write a zero into each page of a FREE slot, so that filling it later does not wait for the pages."""
        np.frombuffer(self.payload(slot), np.uint8)[::PAGE] = 0

    def offset_of(self, slot: int) -> int:
        """Where the bytes of ``slot`` begin, counted from the beginning of the memory."""
        return self.first + self._checked(slot) * self.stride

    def offsets_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the bytes of each of ``slots`` begin, counted from the beginning of the memory."""
        assert not len(slots) or (slots.min() >= 0 and slots.max() < self.slots), f"slots of {self.slots}"
        return self.first + slots * self.stride

    def move(self, slot: int, wanted: SlotState) -> None:
        """Bring ``slot`` into the state ``wanted``.

        READING to READING: one more reader. READING to READY: no reader is left. Raises `SlotMisused`: its
        state does not allow it.
        """
        state = self._states[self._checked(slot)]
        if not _MAY_MOVE[state, wanted]:
            raise SlotMisused(slot, self.state(slot).name, wanted.name)
        self._states[slot] = wanted

    def move_each(self, slots: Sequence[int], wanted: SlotState) -> None:
        """Bring many slots into the state ``wanted``. Raises `SlotMisused` if a slot's state does not allow it:
        none has moved then."""
        indexes = np.asarray(slots, dtype=np.intp)
        refused = indexes[~_MAY_MOVE[self._states[indexes], wanted]]
        if len(refused):
            raise SlotMisused(int(refused[0]), self.state(refused[0]).name, wanted.name)
        self._states[indexes] = wanted

    def describe(self, slot: int, key: bytes, tokens: int, tenant: int = 0) -> None:
        """Write the key, the number of tokens and the tenant of a slot's record into the directory; its digest
        becomes 0."""
        entry = self.directory[slot]
        entry["key"], entry["tokens"], entry["tenant"] = key, tokens, tenant
        entry["digest"] = 0

    def set_digest(self, slot: int, digest: int) -> None:
        """Write the xxh3 of the slot's payload into the directory."""
        self.directory["digest"][slot] = digest

    def set_stamps(self, slots: Sequence[int], first: int) -> None:
        """Write the stamps of last use into the directory: ``first`` for the first slot, one more for each
        that follows."""
        self._stamps[list(slots)] = np.arange(first, first + len(slots))

    def _checked(self, slot: int) -> int:
        assert 0 <= slot < self.slots, f"slot {slot} of {self.slots}"
        return slot
