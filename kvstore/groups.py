"""KV groups: the layers that share one window, and the layout of their blocks.

Only a group and its layout know what a block's bytes are; arena, mover and tiers have bytes, and ask. All
groups of a model have blocks of one size, so that any block of the one arena can be any group's, and none can
starve another. That is why layers with the same window may be several groups: each has as many layers as the
others. Knows no tensor and no model: dtypes are names, as torch spells them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TypeAlias

LAYOUT_VERSION = 1
"""Part of each group's digest. Increased when the meaning of a block's bytes changes: then no old record is
found."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""KV element types and their size in bytes."""


# The last two axes of each layout are the token's slot in the block, and numbers of that token. The names of
# the fields are part of digests.


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """K and V of ``kv_heads`` heads, ``head_dim`` numbers each. ``key_scale``, ``value_scale``: what stored
    numbers are multiplied by to be K and V."""

    kv_heads: int
    head_dim: int
    key_scale: float = 1.0
    value_scale: float = 1.0

    def block_shape(self, layers: int, tokens: int) -> tuple[int, ...]:
        """``[layer, k|v, head, slot, dim]``."""
        return layers, 2, self.kv_heads, tokens, self.head_dim


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One vector for all heads, of which K and V are made: ``rank`` numbers, and ``rotary_dim`` that are
    rotated, as in DeepSeek-V2's multi-head latent attention. No kernel computes with it yet."""

    rank: int
    rotary_dim: int

    def block_shape(self, layers: int, tokens: int) -> tuple[int, ...]:
        """``[layer, slot, rank + rotary_dim]``."""
        return layers, tokens, self.rank + self.rotary_dim


Layout: TypeAlias = HeadLayout | LatentLayout
"""What one layer keeps of a token, and where that stands in a block."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Of each KV group its window, in tokens; None: its layers see all. ``block_tokens``: tokens in a block."""

    of: tuple[int | None, ...] = (None,)
    block_tokens: int = 16

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.of)

    @property
    def whole(self) -> list[int]:
        """The groups without a window."""
        return [group for group, window in enumerate(self.of) if window is None]

    @property
    def narrow(self) -> list[int]:
        """The groups with one."""
        return [group for group, window in enumerate(self.of) if window is not None]

    def first(self, group: int, position: int) -> int:
        """The number of the first block that a token at ``position`` sees in a group."""
        window = self.of[group]
        return 0 if window is None else max(0, position + 1 - window) // self.block_tokens

    def blocks(self, tokens: int, start: int | None = None) -> int:
        """How many blocks the KV of ``tokens`` tokens takes up, in all groups together. Of a group with a
        window those count that tokens from the position ``start`` on see; None: those that the next token
        sees."""
        end, start = -(-tokens // self.block_tokens), tokens if start is None else min(start, tokens)
        start -= start % self.block_tokens
        return sum(end - self.first(group, start) for group in range(len(self)))

    def within(self, blocks: int, tokens: int) -> int:
        """How many blocks of each group, from the first on, ``blocks`` blocks in all groups together cover, of
        a sequence of ``tokens`` tokens."""
        whole = blocks >= self.blocks(tokens)
        return -(-tokens // self.block_tokens) if whole else blocks // len(self)


WASTED_SHARE = 8
"""At most one layer in so many is spare room in blocks: with some, there are fewer groups."""


def split_layers(windows: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The layers of each KV group of a model with layers of these ``windows``: all of a group have one window,
    and no group has many more than another."""
    alike: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        alike.setdefault(window, []).append(layer)

    def room(size: int) -> int:
        return size * sum(-(-len(layers) // size) for layers in alike.values())

    sizes = range(1, len(windows) + 1)
    size = max(one for one in sizes if room(one) * WASTED_SHARE <= len(windows) * (WASTED_SHARE + 1))
    return tuple(
        tuple(layers[first : first + size])
        for layers in alike.values()
        for first in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of a model with KV of one layout and type. They share blocks.

    ``id``: the group's number. ``layers``: the model's numbers of its layers. ``dtype``: of stored numbers, a
    name in `DTYPE_BYTES`. ``block_tokens``: tokens in one block. ``window``: how many tokens a query sees, with
    its own, None for all. ``spare_layers``: for so many more there is room in a block, so that it is as large
    as those of the model's other groups.
    """

    id: int
    layers: tuple[int, ...]
    layout: Layout
    dtype: str
    block_tokens: int = 16
    window: int | None = None
    spare_layers: int = 0

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block, as its layout gives it; it is contiguous on every tier."""
        return self.layout.block_shape(len(self.layers) + self.spare_layers, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def zero_behind(self, block: memoryview, tokens: int) -> None:
        """Zero what lies behind the first ``tokens`` tokens in a block's bytes, ``[block_bytes]``."""
        token_bytes = self.block_shape[-1] * DTYPE_BYTES[self.dtype]
        zeros = bytes((self.block_tokens - tokens) * token_bytes)
        for run in range(tokens * token_bytes, self.block_bytes, self.block_tokens * token_bytes):
            block[run : run + len(zeros)] = zeros

    def spec_digest(self) -> bytes:
        """A hash of all fields and the layout version, 16 bytes: groups with blocks of another layout have
        another one."""
        fields = asdict(self)
        fields |= fields["layout"]
        if not self.spare_layers:
            del fields["spare_layers"]
        if fields.get("key_scale") == fields.get("value_scale") == 1.0:
            del fields["key_scale"], fields["value_scale"]  # digests of before there were scales stay valid
        spec = json.dumps({**fields, "layout": LAYOUT_VERSION}, sort_keys=True)
        return hashlib.blake2b(spec.encode(), digest_size=16, person=b"holdfast.group").digest()
