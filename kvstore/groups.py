"""KV groups: the layers that share one cache spec, and the byte layout of their blocks.

Today a model has one group. Arena, pool and block table are made per group, and the group's id is in each block
key, so that sliding-window and hybrid models can later free blocks early. Knows no tensor and no model: dtypes
are names, as torch spells them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod

from .errors import GroupInvalid

LAYOUT_VERSION = 1
"""Part of each group's digest. Increased when the meaning of a block's bytes changes: then no old record is
found."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""KV element types and their size in bytes."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A group of a model's layers that have K and V of one shape and type, and so share block ids.

    ``id``: the group's number. ``layers``: the model's numbers of its layers. ``dtype``: of stored K and V, a
    name in `DTYPE_BYTES`. ``block_tokens``: tokens in one block. ``window``: how many tokens a query sees,
    None for all. ``key_scale``, ``value_scale``: what stored numbers are multiplied by to be K and V.

    Raises `GroupInvalid`: a number is out of range, or the dtype unknown.
    """

    id: int
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 16
    window: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "block_tokens": self.block_tokens}
        wrong = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
        if self.id < 0:
            wrong.append(f"id = {self.id}")
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            wrong.append(f"layers = {self.layers}")
        if self.dtype not in DTYPE_BYTES:
            wrong.append(f"dtype = {self.dtype!r} (one of {', '.join(DTYPE_BYTES)})")
        if self.window is not None and self.window < 1:
            wrong.append(f"window = {self.window}")
        if wrong:
            raise GroupInvalid(f"KV group: {'; '.join(wrong)}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of one block, ``[layer, k|v, head, slot, dim]``; it is contiguous on every tier."""
        return len(self.layers), 2, self.kv_heads, self.block_tokens, self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def spec_digest(self) -> bytes:
        """A hash of all fields and the layout version, 16 bytes: groups with blocks of another layout have
        another one."""
        fields = asdict(self)
        if (self.key_scale, self.value_scale) == (1.0, 1.0):  # digests of before there were scales stay valid
            del fields["key_scale"], fields["value_scale"]
        spec = json.dumps({**fields, "layout": LAYOUT_VERSION}, sort_keys=True)
        return hashlib.blake2b(spec.encode(), digest_size=16, person=b"holdfast.group").digest()
