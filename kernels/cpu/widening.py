"""Matrix times many rows: torch's product, in fp32 where it has none for narrower numbers on this processor.

Without AVX-512 its product of bf16 takes five times as long as one of fp32 (torch 2.13, 512 rows), so that
widening the weights a few at a time costs next to nothing beside what it saves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDENED = 1 << 20
"""So many weights are in fp32 at once: 4 MiB, which the caches hold while they are multiplied."""


def _native(name: str) -> bool:
    """Whether torch multiplies such numbers by code made for this processor, as far as it tells."""
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return ask is None or bool(ask())


NATIVE = {torch.float32: True, torch.bfloat16: _native("bf16"), torch.float16: _native("fp16")}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[tokens, k]``, ``[n, k]``, ``[n]``."""
    if NATIVE[x.dtype]:
        return F.linear(x, weight, bias)
    wide, n = x.float(), weight.shape[0]
    out, step = x.new_empty((len(x), n)), max(1, WIDENED // weight.shape[1])
    for at in range(0, n, step):
        part = slice(at, at + step)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
