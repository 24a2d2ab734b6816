"""Registers the host tier's memory with the device (pins it), a piece of 16 MiB at a time and ahead of the
copies.

Registering a piece takes milliseconds and blocks all else, so it is never done within a step. The first
pieces are registered when the tier is set up, the others by a thread, ahead of the slots in use. Where the
device refuses a piece, copies go on without it, slower. Knows slots and addresses.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from .slots import PAGE, SlotMemory

if TYPE_CHECKING:  # torch comes with it, and this room's books do without
    from ...kernels.device import Device

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
AHEAD = 16
"""How many pieces are registered in advance: the one in use, and those that follow it."""


class Registration:
    """Registers (pins) the slots of ``memory`` with ``device`` in pieces: the first ones when it is made, the
    others in a thread, ahead of the slots in use. ``address``: where the memory begins in this process.
    ``close`` unregisters all."""

    def __init__(self, device: Device, memory: SlotMemory, address: int) -> None:
        whole_pages = memory.stride % PAGE == 0  # else two pieces would share a page
        self._slots_each = max(1, PIECE_BYTES // memory.stride) if whole_pages else max(1, memory.slots)
        self._device = device
        self._memory = memory
        self._address = address
        self._registered: dict[int, int] = {}  # piece: its address
        self._refused = False
        self._closed = False
        self._wanted: set[int] = set()
        self._lock = threading.Lock()
        self._begun = False
        self._thread: threading.Thread | None = None  # while anything is wanted
        # If this is dropped without `close`: no other memory may be mapped there while it is registered.
        end = weakref.finalize(self, _unregister, device, memory, self._registered)
        end.atexit = False  # the process's end undoes it

    @property
    def pieces(self) -> int:
        """The number of pieces, of about `PIECE_BYTES`, that the memory is cut into."""
        return -(-self._memory.slots // self._slots_each)

    @property
    def registered(self) -> int:
        """The bytes of memory that are registered now."""
        return sum(self._extent(piece)[1] for piece in tuple(self._registered))

    def begin(self) -> None:
        """Register the first pieces now, and let a thread register those that come into use later. Does
        nothing for a device that needs no pinned memory."""
        if self._device.overlaps:
            self.use(0)
            self.advance()
            self._begun = True

    def use(self, slot: int) -> None:
        """Note that a step copies this slot: the thread will register (pin) its piece and the `AHEAD` - 1
        pieces behind it. Does not wait; until then, copies of these pieces are slower."""
        first = slot // self._slots_each
        if self._refused or (first in self._registered and self._last(first) in self._registered):
            return
        missing = set(range(first, self._last(first) + 1)) - self._registered.keys()
        if missing <= self._wanted:
            return
        with self._lock:
            self._wanted |= missing - self._registered.keys()
            if self._begun and self._thread is None:
                self._thread = threading.Thread(target=self.advance, name="register-host-memory", daemon=True)
                self._thread.start()

    def advance(self) -> None:
        """Register all pieces that are wanted, one after the other. If the device refuses one, log that and
        register no more."""
        while (piece := self._next()) is not None:
            address, size = self._extent(piece)
            refusal = self._device.register(address, size)
            if refusal:
                self._refused = True
                log.warning(
                    "host memory is not registered with the device, copies of KV are slower: %s (%d MiB are)",
                    refusal,
                    self.registered >> 20,
                )
                continue
            with self._lock:
                self._registered[piece] = address
                self._wanted.remove(piece)

    def close(self) -> None:
        """Unregister everything, once the copies from and to the memory are done."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()
        _unregister(self._device, self._memory, self._registered)

    def _last(self, piece: int) -> int:
        return min(piece + AHEAD, self.pieces) - 1

    def _next(self) -> int | None:
        with self._lock:
            if self._refused or self._closed or not self._wanted:
                self._thread = None
                return None
            return min(self._wanted)

    def _extent(self, piece: int) -> tuple[int, int]:
        """The address and the number of bytes of a piece."""
        first = piece * self._slots_each
        count = min(self._slots_each, self._memory.slots - first)
        return self._address + self._memory.offset_of(first), count * self._memory.stride


def _unregister(device: Device, memory: SlotMemory, registered: dict[int, int]) -> None:
    """Unregister all pieces. Takes ``memory`` so that it stays mapped until then."""
    device.unregister(registered.values())
    registered.clear()
