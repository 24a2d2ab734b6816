"""8-bit floats for a KV arena: conversion from wider types and back, in torch.

Only e4m3 (Micikevicius et al., "FP8 formats for deep learning", 2022): 3 bits of mantissa, at most 448, no
infinity. Greater numbers are stored as 448. The faster kernels must give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the arena's type ``dtype``: clamped to ±448 and rounded if that is e4m3, else ``x`` itself."""
    if dtype != E4M3:
        return x
    return x.float().clamp(-LARGEST, LARGEST).to(E4M3)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory in a type that torch can gather, scatter and fill: e4m3 as uint8."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x
