"""The device arena: the bytes of one KV group's blocks, in the one layout every tier shares.

``kv[block, layer, k|v, head, slot, dim]``: a block is one contiguous run of bytes, and so is each (head,
block) tile in it, for K and for V. Knows bytes and offsets; not what the blocks mean. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import GroupInvalid
from .groups import KVGroup


class DeviceArena:
    """The memory of one KV group's blocks on ``device``: ``blocks`` blocks, all zero at first.

    Attributes:
        group: the layers, shapes and type of the blocks.
        kv: ``[block, layer, 2, kv_heads, block_tokens, head_dim]``; ``[:, :, 0]`` is K, ``[:, :, 1]`` is V,
            the layer counts within the group. Byte offsets pass 2^31: kernels must count them in int64.

    Raises `GroupInvalid`: ``blocks`` is less than 1.
    """

    def __init__(self, group: KVGroup, blocks: int, device: torch.device | str = "cpu") -> None:
        if blocks < 1:
            raise GroupInvalid(f"arena: blocks = {blocks}")
        self.group = group
        dtype = getattr(torch, group.dtype)
        self.kv: Tensor = torch.zeros((blocks, *group.block_shape), dtype=dtype, device=device)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.kv.shape[0]

    @property
    def device(self) -> torch.device:
        """The torch device that holds the bytes."""
        return self.kv.device

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of one number."""
        return self.kv.dtype

    def bytes_of(self, block: int) -> Tensor:
        """A block's bytes, uint8 ``[block_bytes]``: contiguous, a view and no copy."""
        assert 0 <= block < self.blocks, f"block {block} of {self.blocks}"
        return self.kv[block].view(torch.uint8).view(-1)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with NaN, so that a read before the first write is noticed; for tests and debug."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        if self.dtype.itemsize > 1:
            self.kv.index_fill_(0, ids, float("nan"))
            return
        bits = torch.tensor(float("nan")).to(self.dtype).view(torch.uint8)  # torch fills no 8-bit floats
        self.kv.view(torch.uint8).index_fill_(0, ids, int(bits))

    def zero_behind(self, block: int, tokens: int) -> None:
        """Zero the K and V of a block behind its first ``tokens`` tokens, before a partial block leaves the
        device."""
        self.kv[block, :, :, :, tokens:] = 0
