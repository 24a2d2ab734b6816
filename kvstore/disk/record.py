"""The header of a record on disk: 80 bytes, little-endian.

Magic, layout version, tokens, namespace, key, payload length, xxh3 of the payload, stamp of the last use,
tenant (0 in records older than tenants).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"hfrecord"
LAYOUT_VERSION = 1
_HEADER = struct.Struct("<8sII16s16sQQQQ")


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record on disk. ``space``: the namespace, 16 bytes. ``tokens``: in the block.
    ``length``: bytes of the payload; ``digest``: its xxh3. ``stamp``: a number that rises with each use of
    any record. ``tenant``: its number, 0 if unknown."""

    space: bytes
    key: bytes
    tokens: int
    length: int
    digest: int
    stamp: int
    tenant: int = 0

    def packed(self) -> bytes:
        """The header as its 80 bytes on disk."""
        return _HEADER.pack(
            MAGIC,
            LAYOUT_VERSION,
            self.tokens,
            self.space,
            self.key,
            self.length,
            self.digest,
            self.stamp,
            self.tenant,
        )


def read_header(data: bytes | memoryview, key: bytes, space: bytes, length: int) -> RecordHeader | None:
    """The header that ``data`` holds; None if it is not of this layout, or not for this ``key``, namespace
    ``space`` and payload ``length``."""
    if len(data) != _HEADER.size:
        return None
    magic, layout, tokens, its_space, its_key, its_length, digest, stamp, tenant = _HEADER.unpack(data)
    if (magic, layout, its_space, its_key, its_length) != (MAGIC, LAYOUT_VERSION, space, key, length):
        return None
    return RecordHeader(space, key, tokens, length, digest, stamp, tenant)
