"""The device arena: the bytes of blocks, in the one layout every tier shares. Each may be any KV group's.

A block is one contiguous run of bytes. Knows bytes and offsets; what they mean is the group's. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .groups import KVGroup


class DeviceArena:
    """The memory of ``blocks`` blocks on ``device``, all zero at first. ``group``: a KV group of the model; the
    blocks of all its groups have one shape.

    Attributes:
        group: the layout and type of the blocks.
        kv: ``[block, *group.block_shape]``. Byte offsets pass 2^31: kernels must count them in int64.
    """

    def __init__(self, group: KVGroup, blocks: int, device: torch.device | str = "cpu") -> None:
        self.group = group
        dtype = getattr(torch, group.dtype)
        self.kv: Tensor = torch.zeros((blocks, *group.block_shape), dtype=dtype, device=device)

    def bytes_of(self, block: int) -> Tensor:
        """A block's bytes, uint8 ``[block_bytes]``: contiguous, a view and no copy."""
        assert 0 <= block < len(self.kv), f"block {block} of {len(self.kv)}"
        return self.kv[block].view(torch.uint8).view(-1)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with NaN, so that a read before the first write is noticed; for tests and debug."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.kv.device)
        if self.kv.itemsize > 1:
            self.kv.index_fill_(0, ids, float("nan"))
            return
        bits = torch.tensor(float("nan")).to(self.kv.dtype).view(torch.uint8)  # torch fills no 8-bit floats
        self.kv.view(torch.uint8).index_fill_(0, ids, int(bits))
