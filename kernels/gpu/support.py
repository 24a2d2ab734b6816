"""The limits of the Triton kernels, checked when an engine starts, and of tensors' shapes, checked before a
launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..float8 import E4M3
from .configurations import architecture

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_TOKENS = (16, 32, 64)
OLDEST = (8, 0)
READS_E4M3 = 90
"""The least of the `ARCHITECTURES` with an instruction that converts e4m3."""


class Unsupported(ValueError):
    """The kernels do not support the model, the settings or the GPU."""


def check_supported(
    head_dim: int, dtype: torch.dtype, block_tokens: int, capability: tuple[int, int] | None = None
) -> None:
    """Raise `Unsupported`, naming what is wrong and what is supported, if the Triton kernels cannot compute
    with this head size, type or block size, or on a GPU of this compute ``capability`` (major, minor); None
    without a GPU."""
    known = {
        f"head_dim {head_dim}": (head_dim in HEAD_DIMS, HEAD_DIMS),
        f"dtype {str(dtype).removeprefix('torch.')}": (
            dtype in DTYPES,
            tuple(str(one).removeprefix("torch.") for one in DTYPES),
        ),
        f"block size {block_tokens}": (block_tokens in BLOCK_TOKENS, BLOCK_TOKENS),
    }
    wrong = [
        f"{name} (supported: {', '.join(map(str, some))})" for name, (ok, some) in known.items() if not ok
    ]
    if capability is not None and capability < OLDEST:
        named, oldest = (".".join(map(str, one)) for one in (capability, OLDEST))
        wrong.append(f"compute capability {named} (supported: {oldest} and later)")
    if wrong:
        raise Unsupported("the Triton kernels do not support " + ", ".join(wrong))


def expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError with both shapes unless ``tensor`` has ``shape`` and is dense in its last axis."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: the last axis of {tuple(tensor.shape)} has stride {tensor.stride(-1)}, not 1"
        )


def group_of(query: Tensor, arena: Tensor) -> int:
    """How many query heads share a KV head. Raises ValueError unless ``query`` ``[tokens, q_heads, dim]``
    fits the arena's heads, head size and type."""
    heads, dim = arena.shape[3], arena.shape[5]
    if query.dim() != 3 or query.shape[1] % heads or query.shape[2] != dim:
        raise ValueError(f"query {tuple(query.shape)} does not fit an arena {tuple(arena.shape)}")
    if arena.dtype not in (query.dtype, E4M3):
        raise ValueError(f"query is {query.dtype}, the arena {arena.dtype}")
    return int(query.shape[1]) // heads


def readable(arena: Tensor) -> Tensor:
    """The arena as attention kernels can read it: e4m3 as bytes (uint8) if the GPU has no instruction to
    convert it."""
    if arena.dtype == E4M3 and architecture(arena.device) < READS_E4M3:
        return arena.view(torch.uint8)
    return arena
