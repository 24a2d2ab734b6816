"""Random matrices of every type of packed weights, and of every scheme of quantised ones."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from holdfast.kernels.linear import Linear, Matrix, Permuted
from holdfast.kernels.packed import Packed, packed
from holdfast.kernels.packed_types import CODED, GGML, TYPES
from holdfast.kernels.quantised import AS_THEY_ARE, INT8, Quantised, Scheme, halved, panels

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
"""Where a block has its float16 numbers; other types: at its begin."""


def blocks(name: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """The bytes of a matrix in a file, ``[rows, bytes of a row]``, of numbers around 1."""
    kind, rng = GGML[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, width // kind.block, kind.bytes), dtype=np.uint8)
    for at in SCALES.get(name, (0, 2) if kind.offset else (0,)):
        raw[..., at : at + 2] = rng.normal(0, 0.01, (*raw.shape[:2], 1)).astype("<f2").view(np.uint8)
    if kind.exponent:
        raw[..., 0] = rng.integers(120, 127, raw.shape[:2])
    return raw.reshape(rows, -1)


def matrix(name: str, rows: int, width: int, seed: int = 0) -> Packed:
    """`blocks`, packed in their order; of a type of other checkpoints random numbers."""
    if name in CODED:
        kind = CODED[name]
        codes, activations = f"int{kind.planes[0]}", INT8 if kind.token else AS_THEY_ARE
        return panels(coded(Scheme(codes, kind.block, kind.offset, activations), rows, width, seed))
    return packed(TYPES[name], [blocks(name, rows, width, seed)], width, [np.arange(rows)])


def coded(
    scheme: Scheme, rows: int, width: int, seed: int = 0, scale: torch.dtype = torch.float32
) -> Quantised:
    """A matrix of a scheme with random codes, and scales such that its numbers are around 1. ``scale``: the
    type of the scales."""
    draw, groups = torch.Generator().manual_seed(seed), scheme.groups(width)
    some = {"int4": 5.0, "mxfp4": 1.0, "int8": 60.0, "fp8": 100.0}[scheme.codes]
    scales = ((0.5 + torch.rand(rows, groups, generator=draw)) / some).to(scale)
    zeros = None
    if scheme.codes == "fp8":
        codes = (torch.randn(rows, width, generator=draw) * some).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif scheme.codes == "int8":
        codes = torch.randint(-128, 128, (rows, width), generator=draw).to(torch.int8)
        zeros = torch.randint(-60, 60, (rows, groups), generator=draw).to(torch.int8)
    else:
        codes = halved(torch.randint(0, 16, (rows, width), generator=draw).to(torch.uint8))
        zeros = torch.randint(0, 17, (rows, groups), generator=draw).to(torch.uint8)
    if scheme.codes == "mxfp4":
        scales = torch.randint(124, 128, (rows, groups), generator=draw).to(torch.uint8)
    fixed = torch.tensor([0.02]) if scheme.activations == "fp8 fixed" else None
    return Quantised(scheme, width, codes, scales, zeros if scheme.zeros else None, fixed)


def numbers_of(matrix: Matrix | Linear) -> torch.Tensor:
    """All numbers of a matrix, or of a map of one or more: as they are in a tensor, float32 of others."""
    if isinstance(matrix, Linear):
        return torch.cat([numbers_of(one) for one in matrix.matrices])
    if isinstance(matrix, Permuted):
        return numbers_of(matrix.matrix)[:, matrix.order.argsort()]
    return matrix if isinstance(matrix, torch.Tensor) else matrix.numbers()


def dequantised(name: str, raw: np.ndarray) -> np.ndarray:
    """The numbers of `blocks` by the gguf package, float32 ``[rows, width]``."""
    found: np.ndarray = dequantize(raw, GGMLQuantizationType[name])
    return found
