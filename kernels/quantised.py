"""Quantised weights as checkpoints mean them, for every device: codes, scales, and what becomes of activations.

A number of the matrix is ``(code - zero) * scale``. Codes are

    int4    0 to 15, zero 8 if there are no zeros; in each 16 bytes the codes of 32 columns: byte j has column
            j in its low half and column j + 16 in its high half
    int8    -128 to 127, zero 0 if there are no zeros
    fp8     e4m3
    mxfp4   as int4, each an entry of a table (e2m1); the scale is an exponent: 2 to the power of (it - 127)

Activations stay as they are, or are rounded first, as the scheme says: to int8 or to fp8 (e4m3).

Sources: the formats of compressed-tensors, GPTQ and AWQ mean these numbers; the rounding of activations is that
of vLLM: the greatest number of a token becomes 127 or 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import torch
from torch import Tensor

from .float8 import E4M3, LARGEST, narrowed
from .packed import LEAST, Numbers, Packed, Unpacked, in_panels, rounded
from .packed_types import RUN, TYPES, PackedType

AS_THEY_ARE, INT8, FP8, FP8_FIXED, FP8_GROUPS = "", "int8", "fp8", "fp8 fixed", "fp8 in groups"
"""How activations are rounded: not at all; with a scale for each token; with one scale for all, which the
checkpoint has; with a scale for each `ACTIVATIONS_GROUP` columns of a token."""
ACTIVATIONS_GROUP = 128
_SAID = {
    AS_THEY_ARE: "",
    INT8: ", activations int8 by token",
    FP8: ", activations fp8 by token",
    FP8_FIXED: ", activations fp8 of a fixed scale",
    FP8_GROUPS: f", activations fp8 in groups of {ACTIVATIONS_GROUP}",
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of mxfp4 stand for. Source: Open Compute Project, "Microscaling Formats (MX)" 1.0."""
HALVED = ("int4", "mxfp4")
"""Codes of which a byte has two."""
INTEGER_GROUP = 128
"""The most columns with one scale, where a model is quantised to int4 as it is loaded."""
CHUNK = 1024
"""Rows that are dequantised or quantised at a time."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is quantised. ``codes``: int4, int8, fp8 or mxfp4. ``group``: columns of a row with one
    scale, the last group may have fewer; 0: the whole row. ``zeros``: whether each group has a code of its own
    that stands for 0. ``activations``: `AS_THEY_ARE`, `INT8`, `FP8`, `FP8_FIXED` or `FP8_GROUPS`."""

    codes: str
    group: int = 0
    zeros: bool = False
    activations: str = AS_THEY_ARE

    def __str__(self) -> str:
        scales = f" in groups of {self.group}" if self.group else " by row"
        zeros = " with zeros" if self.zeros else ""
        return f"{self.codes}{scales}{zeros}{_SAID[self.activations]}"

    def groups(self, width: int) -> int:
        """The scales of a row of ``width`` numbers."""
        return -(-width // self.group) if self.group else 1

    def bytes_of(self, rows: int, width: int, scale_bytes: int) -> int:
        """The bytes of a matrix ``[rows, width]`` with scales of ``scale_bytes`` bytes each."""
        codes = -(-width // RUN) * RUN // 2 if self.codes in HALVED else width
        return rows * (codes + self.groups(width) * (scale_bytes + self.zeros))


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised matrix ``[rows, width]``.

    ``codes``: int4 and mxfp4 uint8 ``[rows, ceil(width / 32) * 16]``; int8 ``[rows, width]``; fp8 float8_e4m3fn
    ``[rows, width]``. ``scales``: ``[rows, groups]``, of any float type; mxfp4 uint8. ``zeros``: uint8 or int8
    ``[rows, groups]``; None: none. ``fixed``: the scale of `FP8_FIXED`, float32 ``[1]``.
    """

    scheme: Scheme
    width: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    fixed: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, width)``, as a tensor has it."""
        return self.codes.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def to(self, device: torch.device) -> Quantised:
        """The same on another device."""
        zeros, fixed = (None if one is None else one.to(device) for one in (self.zeros, self.fixed))
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros, fixed=fixed
        )

    def some(self, begin: int, end: int) -> Quantised:
        """The rows ``[begin, end)``, in the same memory."""
        zeros = None if self.zeros is None else self.zeros[begin:end]
        return replace(self, codes=self.codes[begin:end], scales=self.scales[begin:end], zeros=zeros)

    def numbers(self) -> Tensor:
        """The matrix, float32 ``[rows, width]``."""
        codes = self._codes()
        group = self.scheme.group or self.width
        scales = self._scales().repeat_interleave(group, 1)[:, : self.width]
        if self.zeros is not None:
            codes = codes - self.zeros.float().repeat_interleave(group, 1)[:, : self.width]
        return codes * scales

    def into(self, target: Tensor, order: Tensor | None = None) -> None:
        """Write the matrix into ``target`` ``[rows, width]``, in its type, some rows at a time. ``order``:
        which column of ``target`` each column is, int64 ``[width]``; None: they are the same."""
        for begin in range(0, len(target), CHUNK):
            some = self.some(begin, begin + CHUNK).numbers()
            if order is not None:
                some = some[:, order.argsort()]
            target[begin : begin + CHUNK].copy_(some)

    def _codes(self) -> Tensor:
        """The codes as float32 ``[rows, width]``, the zero of a scheme without zeros subtracted."""
        if self.scheme.codes not in HALVED:
            return self.codes.float()
        runs = self.codes.view(len(self.codes), -1, RUN // 2)
        whole = torch.cat((runs & 15, runs >> 4), -1).flatten(1)[:, : self.width]
        if self.scheme.codes == "mxfp4":
            return torch.tensor(E2M1, device=whole.device)[whole.int()]
        return whole.float() if self.scheme.zeros else whole.float() - 8

    def _scales(self) -> Tensor:
        if self.scheme.codes != "mxfp4":
            return self.scales.float()
        exponent = self.scales.int()
        return torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)


def halved(codes: Tensor) -> Tensor:
    """Codes of 4 bits, uint8 ``[rows, width]``, two in a byte as `Quantised` has them."""
    spare = -codes.shape[1] % RUN
    runs = torch.nn.functional.pad(codes, (0, spare)).view(len(codes), -1, 2, RUN // 2)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1)


def joined(parts: Sequence[Quantised]) -> Quantised:
    """Matrices of one scheme and width, one behind the other. Their fixed scales, if any, are equal."""
    first, *others = parts
    if not others:
        return first
    scales = [one.scales for one in parts]
    if len({one.dtype for one in scales}) > 1:
        scales = [one.float() for one in scales]
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([one.zeros for one in parts if one.zeros is not None])
    return replace(
        first, codes=torch.cat([one.codes for one in parts]), scales=torch.cat(scales), zeros=zeros
    )


# --- as a model is loaded -------------------------------------------------------------------------------------


def scheme_at_load(kind: str, width: int) -> Scheme | None:
    """The scheme of a matrix of ``width`` columns if a model is quantised to ``kind``, one of `names.AT_LOAD`;
    None: it stays as it is, since no group of 32 or more fits the width."""
    if width % RUN:
        return None
    if kind == "int4":
        fitting = (group for group in range(INTEGER_GROUP, 0, -RUN) if width % group == 0)
        return Scheme("int4", next(fitting))
    return Scheme(kind, activations=FP8 if kind == "fp8" else AS_THEY_ARE)


def quantised(matrix: Tensor, scheme: Scheme) -> Quantised:
    """``matrix``, ``[rows, width]``, quantised by a scheme of `scheme_at_load`: symmetric, each scale such that
    the greatest number of its group is 7, 127 or 448 times it."""
    width = matrix.shape[1]
    group = scheme.group or width
    most = {"int4": 7.0, "int8": 127.0, "fp8": LARGEST}[scheme.codes]
    parts = []
    for some in torch.split(matrix, CHUNK):
        groups = some.float().view(len(some), -1, group)
        scales = groups.abs().amax(-1) / most
        whole = (groups / scales.clamp(min=LEAST).unsqueeze(-1)).flatten(1)
        if scheme.codes == "fp8":
            codes = narrowed(whole, E4M3)
        else:
            codes = whole.round().to(torch.int8)
            codes = halved((codes + 8).to(torch.uint8)) if scheme.codes == "int4" else codes
        parts.append(Quantised(scheme, width, codes, scales))
    return joined(parts)


# --- products -------------------------------------------------------------------------------------------------


def activated(x: Tensor, weight: Quantised) -> Tensor:
    """The numbers, float32, that a product with ``weight`` takes for the activations ``x`` ``[tokens, width]``.
    A token with a number that is not finite is NaN where its scale is its own."""
    kind, wide = weight.scheme.activations, x.float()
    if kind == AS_THEY_ARE:
        return wide
    if kind == INT8:
        return rounded(wide, weight.width)
    if kind == FP8_FIXED:
        assert weight.fixed is not None, "the checkpoint has it"
        return narrowed(wide / weight.fixed, E4M3).float() * weight.fixed
    spare = -weight.width % ACTIVATIONS_GROUP if kind == FP8_GROUPS else 0
    groups = torch.nn.functional.pad(wide, (0, spare))
    groups = groups.view(len(x), -1, ACTIVATIONS_GROUP if kind == FP8_GROUPS else weight.width)
    most = groups.abs().amax(-1, keepdim=True)
    factor = torch.where((most > LEAST) & most.isfinite(), LARGEST / most, 0.0)
    scale = torch.where(most.isfinite(), most / LARGEST, torch.nan)
    return (narrowed(groups * factor, E4M3).float().nan_to_num() * scale).flatten(1)[:, : weight.width]


# --- in panels for a processor --------------------------------------------------------------------------------


def panel_type(scheme: Scheme, width: int) -> str | None:
    """The name of the type of `packed_types.TYPES` in which a processor multiplies a matrix of this scheme and
    ``width``; None: it has none."""
    if width % RUN or scheme.group % RUN:
        return None
    if scheme.codes == "mxfp4":
        return "MXFP4" if scheme.activations == AS_THEY_ARE else None
    if scheme.codes == "fp8":
        return None
    name = scheme.codes.upper() + ("Z" if scheme.zeros else "")
    if scheme.activations == INT8:
        name = "W8A8" if name == "INT8" else "none"
    block = 4 * RUN if gcd(scheme.group or width, width) % (4 * RUN) == 0 else RUN
    return f"{name}_{block}" if f"{name}_{block}" in TYPES else None


def said_in_panels(scheme: Scheme) -> str:
    """A scheme in words where a processor multiplies it in panels, which rounds activations."""
    return str(scheme) if scheme.activations else f"{scheme}, activations int8 in groups of {RUN}"


def panels(matrix: Quantised) -> Packed:
    """``matrix`` in the type that `panel_type` names."""
    name = panel_type(matrix.scheme, matrix.width)
    assert name is not None, "it was asked for before"
    kind = TYPES[name]
    return in_panels(kind, *matrix.shape, lambda begin, end: _unpacked(kind, matrix, begin, end))


def _unpacked(kind: PackedType, matrix: Quantised, begin: int, end: int) -> Unpacked:
    """Rows of ``matrix``, those behind its last zero."""
    some = matrix.some(begin, end)
    blocks = (matrix.scheme.group or matrix.width) // kind.block

    def filled(numbers: Tensor) -> Numbers:
        given = numbers.numpy()
        return np.concatenate((given, np.zeros((end - begin - len(given), given.shape[1]), given.dtype)))

    if matrix.scheme.codes in HALVED:
        runs = some.codes.view(len(some.codes), -1, RUN // 2)
        codes = filled(torch.cat((runs & 15, runs >> 4), -1).flatten(1))
    else:
        codes = filled(some.codes.view(torch.uint8) ^ 128)
    if kind.exponent:
        return Unpacked(codes, filled(some.scales))
    scales = np.repeat(filled(some.scales.float()), blocks, axis=1)
    if some.zeros is None:
        return Unpacked(codes, scales)
    zeros = some.zeros.float() + (0 if matrix.scheme.codes == "int4" else 128)
    return Unpacked(codes, scales, -np.repeat(filled(zeros), blocks, axis=1) * scales)
