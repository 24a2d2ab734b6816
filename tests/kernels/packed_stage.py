"""Random blocks of every type of packed weights."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from holdfast.kernels.linear import Linear, Matrix
from holdfast.kernels.packed import Packed, packed
from holdfast.kernels.packed_types import TYPES

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
"""Where a block has its float16 numbers; other types: at its begin."""


def blocks(name: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """The bytes of a matrix in a file, ``[rows, bytes of a row]``, of numbers around 1."""
    kind, rng = TYPES[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, width // kind.block, kind.bytes), dtype=np.uint8)
    for at in SCALES.get(name, (0, 2) if kind.offset else (0,)):
        raw[..., at : at + 2] = rng.normal(0, 0.01, (*raw.shape[:2], 1)).astype("<f2").view(np.uint8)
    if kind.exponent:
        raw[..., 0] = rng.integers(120, 127, raw.shape[:2])
    return raw.reshape(rows, -1)


def matrix(name: str, rows: int, width: int, seed: int = 0) -> Packed:
    """`blocks`, packed in their order."""
    return packed(TYPES[name], [blocks(name, rows, width, seed)], width, [np.arange(rows)])


def numbers_of(matrix: Matrix | Linear) -> torch.Tensor:
    """All numbers of a matrix, or of a map that has one: as they are in a tensor, float32 of packed ones."""
    if isinstance(matrix, Linear):
        (matrix,) = matrix.matrices
    return matrix.numbers() if isinstance(matrix, Packed) else matrix


def dequantised(name: str, raw: np.ndarray) -> np.ndarray:
    """The numbers of `blocks` by the gguf package, float32 ``[rows, width]``."""
    found: np.ndarray = dequantize(raw, GGMLQuantizationType[name])
    return found
