"""Registers the host tier's memory with the device (pins it), before the engine serves.

Registering takes milliseconds for each piece of 16 MiB and blocks all launches, so nothing is registered later.
Where the device refuses a piece, copies go on without it, slower. Knows slots and addresses.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from .slots import PAGE, SlotMemory

if TYPE_CHECKING:  # torch comes with it, and this room's books do without
    from ...kernels.device import Device

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20


class Registration:
    """Registers (pins) the slots of ``memory`` with ``device``, in pieces. ``address``: where the memory
    begins in this process. ``close`` unregisters all."""

    def __init__(self, device: Device, memory: SlotMemory, address: int) -> None:
        whole_pages = memory.stride % PAGE == 0  # else two pieces would share a page
        self._slots_each = max(1, PIECE_BYTES // memory.stride) if whole_pages else max(1, memory.slots)
        self._device = device
        self._memory = memory
        self._address = address
        self._registered: dict[int, int] = {}  # address: bytes
        # If this is dropped without `close`: no other memory may be mapped there while it is registered.
        end = weakref.finalize(self, _unregister, device, memory, self._registered)
        end.atexit = False  # the process's end undoes it

    @property
    def registered(self) -> int:
        """The bytes of memory that are registered now."""
        return sum(self._registered.values())

    def begin(self, tell: Callable[[float], None] = lambda fraction: None) -> None:
        """Register all memory. Does nothing for a device that needs no pinned memory. If the device refuses a
        piece, log that and register no more. ``tell``: called before each piece with the fraction that is
        done."""
        slots = self._memory.slots
        for first in range(0, slots if self._device.overlaps else 0, self._slots_each):
            tell(first / slots)
            address = self._address + self._memory.offset_of(first)
            size = min(self._slots_each, slots - first) * self._memory.stride
            refusal = self._device.register(address, size)
            if refusal:
                log.warning(
                    "host memory is not registered with the device, copies of KV are slower: %s (%d MiB are)",
                    refusal,
                    self.registered >> 20,
                )
                return
            self._registered[address] = size

    def close(self) -> None:
        """Unregister everything, once the copies from and to the memory are done."""
        _unregister(self._device, self._memory, self._registered)


def _unregister(device: Device, memory: SlotMemory, registered: dict[int, int]) -> None:
    """Unregister all pieces. Takes ``memory`` so that it stays mapped until then."""
    device.unregister(registered)
    registered.clear()
