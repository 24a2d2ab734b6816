"""The host tier's memory: how large it is, who makes it, and the tier in it.

Whoever outlives the engine makes the memory and hands it to each that comes, so that the next adopts what the
last one kept. Reads the machine's limits; knows no torch and no device.
"""

from __future__ import annotations

import os

from ..kvstore.host import HostTier
from ..kvstore.keys import BlockHasher
from ..kvstore.slots import SlotMemory, make_memory
from .settings import EngineSettings
from .sizing import machine_bytes

SHARE = 0.125  # of all memory; pages are taken as KV comes
MOST_BYTES = 64 << 30


def host_bytes(settings: EngineSettings) -> int:
    """Bytes for the host tier: what was asked for, or a share of the machine's; 0 is none."""
    if settings.host_bytes is not None:
        return settings.host_bytes
    return min(MOST_BYTES, int(SHARE * machine_bytes()))


def host_memory(settings: EngineSettings) -> int | None:
    """A new memory for the settings' host tier, as a file descriptor; None where they want none."""
    size = host_bytes(settings)
    return make_memory(size) if size else None


def host_tier(fd: int, hasher: BlockHasher, namespace: bytes, block_bytes: int) -> HostTier | None:
    """The tier in memory ``fd``, with what another engine left there under the same names.

    None where the memory holds not one block.
    """
    memory = SlotMemory(fd, hasher.space(namespace), block_bytes)
    return HostTier(memory, owner=os.getpid()) if memory.slots else None
