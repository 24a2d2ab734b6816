"""Weights in panels that a processor multiplies as they are: quantised ones of ggml's types and of other
checkpoints, and plain ones.

A matrix ``[rows, width]`` is cut into **panels** of 16 rows, a panel into the blocks of its type (32 or 256
numbers of each row), a block into **words** of 4 numbers. Each number is a **code** (an unsigned integer of 2
to 8 bits) or an entry of a table that the code chooses, times a scale, plus an offset. A block of a panel lies
together in memory: scales first, codes behind them, each with the 16 rows side by side::

    scale           float16 or float32 [16]
    offset          float16 or float32 [16]           types with offsets
    scales          uint8 or int8 [256 / group, 16]    blocks of 256: each group's scale, times ``scale``
    offsets         uint8 [256 / group, 16]            each group's offset, times ``offset``
    for each 32 numbers:
        nibbles     [4, 16, 4]             low half: words 0 to 3, high half: 4 to 7
        pairs       [2, 16, 4]             two bits each of words 4 h to 4 h + 3
        bits        [16, 4]                one bit of each of the 8 words
        bytes       [8, 16, 4]

Plain numbers have no head; a block is ``[32, 16]`` of them, in bfloat16 ``[16, 16, 2]``. The types are in
`packed_types`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .packed_types import PANEL, PLAIN, RUN, PackedType

LEAST = 1e-36
"""A run of activations that are all smaller counts as 0: 127 divided by them would be infinite."""
AT_ONCE = 1 << 19
"""Numbers that are repacked at a time: the arrays stay in the processor's cache."""

Numbers: TypeAlias = NDArray[Any]
"""Arrays of any type: numpy's stubs lose uint8 in every operation."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Some rows of quantised weights, each number by itself. ``codes``: ``[rows, width]``. ``scale``,
    ``offset``: as stored, ``[rows, blocks]``: float16, float32, or the exponent. ``scales``, ``offsets``:
    ``[rows, blocks, groups]``. None: the type has none."""

    codes: Numbers
    scale: Numbers
    offset: Numbers | None = None
    scales: Numbers | None = None
    offsets: Numbers | None = None


def _float16(raw: Numbers) -> Numbers:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _halves(raw: Numbers) -> Numbers:
    """The nibbles of ``[..., n]`` bytes: the low halves, then the high ones, ``[..., 2 n]``."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _bits(raw: Numbers) -> Numbers:
    """The bits of ``[..., n]`` bytes, the lowest first, ``[..., 8 n]``."""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _six_bits(raw: Numbers) -> tuple[Numbers, Numbers]:
    """The 8 scales and 8 offsets of 6 bits in the 12 bytes of a Q4_K or Q5_K block."""
    low, middle, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    return scales, np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1)


def _in_shifts(raw: Numbers, bits: int) -> Numbers:
    """Numbers of ``bits`` bits in ``[..., n]`` bytes: all lowest ones of 32 bytes, then the next, ``[..., n *
    8 / bits]``."""
    runs = raw.reshape(*raw.shape[:-1], -1, 1, RUN)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & ((1 << bits) - 1)).reshape(*raw.shape[:-1], -1)


def unpacked(kind: PackedType, raw: Numbers) -> Unpacked:
    """The numbers in ``raw``, uint8 ``[rows, bytes of a row]`` as a file has them."""
    rows = len(raw)
    blocks = raw.reshape(rows, -1, kind.bytes)
    offset = scales = offsets = None
    match kind.name:
        case "Q4_0" | "IQ4_NL":
            scale, codes = _float16(blocks[..., :2]), _halves(blocks[..., 2:])
        case "Q4_1":
            scale, offset = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
            codes = _halves(blocks[..., 4:])
        case "Q5_0":
            scale, codes = _float16(blocks[..., :2]), _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
        case "Q5_1":
            scale, offset = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
            codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
        case "Q8_0":
            scale, codes = _float16(blocks[..., :2]), blocks[..., 2:] ^ 128
        case "MXFP4":
            scale, codes = blocks[..., 0], _halves(blocks[..., 1:])
        case "Q2_K":
            scale, offset = _float16(blocks[..., 80:82]), -_float16(blocks[..., 82:])
            scales, codes = blocks[..., :16], _in_shifts(blocks[..., 16:80], 2)
        case "Q3_K":
            scale, packed = _float16(blocks[..., 108:]), blocks[..., 96:108]
            low, high = _halves(packed[..., :8]), packed[..., 8:]
            top = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
            scales = (low | top << 4).astype(np.int8) - np.int8(32)
            codes = _in_shifts(blocks[..., 32:96], 2) | _in_shifts(blocks[..., :32], 1) << 2
        case "Q4_K" | "Q5_K":
            scale, offset = _float16(blocks[..., :2]), -_float16(blocks[..., 2:4])
            scales, offsets = _six_bits(blocks[..., 4:16])
            codes = _in_shifts(blocks[..., -128:], 4)
            if kind.name == "Q5_K":
                codes |= _in_shifts(blocks[..., 16:48], 1) << 4
        case "Q6_K":
            scale, scales = _float16(blocks[..., 208:]), blocks[..., 192:208].view(np.int8)
            low = blocks[..., :128].reshape(rows, -1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
            codes = low.reshape(*blocks.shape[:2], 256) | _in_shifts(blocks[..., 128:192], 2) << 4
        case "IQ4_XS":
            scale, high = _float16(blocks[..., :2]), blocks[..., 2:4]
            low = np.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), axis=-1).reshape(rows, -1, 8)
            top = np.concatenate(
                [high[..., at, None] >> shift & 3 for at in (0, 1) for shift in (0, 2, 4, 6)], -1
            )
            scales = (low | top << 4).astype(np.int8) - np.int8(32)
            codes = _halves(blocks[..., 8:].reshape(rows, -1, 8, 16))
        case _:
            raise AssertionError(kind.name)
    return Unpacked(codes.reshape(rows, -1), scale, offset, scales, offsets)


def _side_by_side(numbers: Numbers) -> Numbers:
    """The bytes of ``[panels * 16, blocks, n]`` numbers as panels have them, uint8 ``[panels, blocks, bytes]``:
    for each of the n numbers those of the 16 rows."""
    turned = numbers.reshape(-1, PANEL, *numbers.shape[1:]).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(*turned.shape[:2], -1)


def _plane(words: Numbers, bits: int) -> Numbers:
    """One plane of codes, uint32 ``[..., bits, 16]``, of words, uint32 ``[..., 8, 16]``: each byte of a word is
    a value below ``1 << bits``."""
    per = 8 // bits
    # Nibbles: words 0 to 3 are low halves. Pairs and bits: a byte has the neighbouring words.
    cut = words.reshape(*words.shape[:-2], per, bits, PANEL).swapaxes(-3, -2)
    if bits != 4:
        cut = words.reshape(*words.shape[:-2], bits, per, PANEL)
    found: Numbers = cut[..., 0, :].copy()
    for at in range(1, per):
        found |= cut[..., at, :] << np.uint32(at * bits)
    return found


def _unplaned(plane: Numbers, bits: int) -> Numbers:
    """The values, uint8 ``[..., 8, 16, 4]``, of which `_plane` made ``plane``."""
    if bits == 8:
        return plane
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1, 1, 1)
    cut = plane[..., None, :, :, :] >> shifts & ((1 << bits) - 1)
    if bits != 4:
        cut = cut.swapaxes(-4, -3)
    return cut.reshape(*plane.shape[:-3], 8, PANEL, 4)


def _into_panels(kind: PackedType, some: Unpacked, panels: Numbers) -> None:
    """Pack the rows of ``some`` into ``panels``, uint8 ``[rows / 16, blocks, unit]``."""
    rows, width = some.codes.shape
    singles = [one[..., None] for one in (some.scale, some.offset) if one is not None]
    groups = [one for one in (some.scales, some.offsets) if one is not None]
    panels[..., : kind.head] = np.concatenate([_side_by_side(one) for one in (*singles, *groups)], axis=-1)
    # A word is 4 codes: what shifts move from one into its neighbour is masked.
    words = some.codes.view(np.uint32).reshape(rows // PANEL, PANEL, width // RUN, 8).transpose(0, 2, 3, 1)
    words = np.ascontiguousarray(words).reshape(rows // PANEL, width // kind.block, -1, 8, PANEL)
    runs = panels[..., kind.head :].view(np.uint32).reshape(*words.shape[:3], -1)
    at = begin = 0
    for bits in kind.planes:
        values = words >> np.uint32(at) & np.uint32(0x01010101 * ((1 << bits) - 1))
        end = begin + bits * PANEL
        runs[..., begin:end] = _plane(values, bits).reshape(*words.shape[:3], -1)
        at, begin = at + bits, end


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of a weight matrix, packed. ``data``: uint8 ``[panels, blocks, unit]`` on the CPU; what lies behind
    ``rows`` in the last panel, or behind ``width`` in the last block, is zero. ``width``: numbers of a row."""

    kind: PackedType
    rows: int
    width: int
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, width)``, as a tensor has it."""
        return self.rows, self.width

    def take(self, rows: Tensor) -> Tensor:
        """Rows of the matrix by their indices, int64 ``[n]``: float32 ``[n, width]``."""
        panels, inverse = torch.unique_consecutive(rows, return_inverse=True)
        whole = self._numbers(self.data[panels // PANEL].numpy())
        return whole[torch.arange(len(panels)), panels % PANEL][inverse]

    def numbers(self) -> Tensor:
        """The matrix, float32 ``[rows, width]``."""
        return self._numbers(self.data.numpy()).flatten(0, 1)[: self.rows]

    def _numbers(self, data: Numbers) -> Tensor:
        """The numbers of some panels, uint8 ``[panels, blocks, unit]``: float32 ``[panels, 16, width]``."""
        kind = self.kind
        panels, blocks, _ = data.shape
        if not kind.number:
            stored = (
                torch.from_numpy(data).view(getattr(torch, kind.name)).view(panels, -1, PANEL, _beside(kind))
            )
            return stored.transpose(1, 2).flatten(2)[:, :, : self.width].float()
        at = 0

        def next_of(count: int, of: type[np.generic]) -> Numbers:
            nonlocal at
            size = count * PANEL * np.dtype(of).itemsize
            found = np.ascontiguousarray(data[..., at : at + size]).view(of)
            at += size
            return found.reshape(panels, blocks, count, PANEL).transpose(0, 3, 1, 2)

        widths: dict[int, type[np.generic]] = {1: np.uint8, 2: np.float16, 4: np.float32}
        number = widths[kind.scale_bytes]
        scale = next_of(1, number)
        factor = _power(scale) if kind.exponent else scale.astype(np.float32)
        added = next_of(1, number).astype(np.float32) if kind.offset else None
        if kind.groups:
            scales = next_of(kind.groups, np.int8 if kind.signed else np.uint8)
            if kind.joined:
                offsets, scales = scales >> 4, scales & 15
            elif kind.offset:
                offsets = next_of(kind.groups, np.uint8)
            factor = factor * scales.astype(np.float32)
            if added is not None:
                added = added * offsets.astype(np.float32)
        runs = data[..., at:].reshape(panels, self.width // RUN, -1)
        codes, at, low = np.zeros((panels, self.width // RUN, 8, PANEL, 4), np.uint8), 0, 0
        for bits in kind.planes:
            size = PANEL * RUN * bits // 8
            plane = runs[..., at : at + size].reshape(panels, -1, bits, PANEL, 4)
            codes |= _unplaned(plane, bits) << low
            at, low = at + size, low + bits
        whole = codes.transpose(0, 3, 1, 2, 4).reshape(panels, PANEL, self.width)
        if kind.table is not None:
            integers = np.array(kind.table, np.float32)[whole]
        else:
            integers = whole.astype(np.float32) - np.float32(kind.zero)
        groups = integers.reshape(panels, PANEL, -1, kind.span) * factor.reshape(panels, PANEL, -1, 1)
        if added is not None:
            groups += added.reshape(panels, PANEL, -1, 1)
        return torch.from_numpy(groups.reshape(panels, PANEL, self.width))


def _power(exponent: Numbers) -> Numbers:
    """Half of 2 to the power of (``exponent`` - 127)."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128).astype(np.float32)


def rounded(x: Tensor, run: int = RUN) -> Tensor:
    """The numbers that products with packed weights take for ``x`` ``[rows, width]``, float32: in each ``run``
    of so many, whole numbers from -127 to 127 times a scale. A run with a number that is not finite is all
    NaN."""
    runs = x.float().view(len(x), -1, run)
    most = runs.abs().amax(-1, keepdim=True)
    factor = torch.where((most > LEAST) & most.isfinite(), 127 / most, 0.0)
    whole = torch.where(factor > 0, torch.round(runs * factor), 0.0)
    scale = torch.where(most.isfinite(), most / 127, torch.nan)
    return (whole * scale).flatten(-2)


def packed(
    kind: PackedType,
    raws: Sequence[Numbers],
    width: int,
    orders: Sequence[NDArray[np.int64]],
    told: Callable[[int], None] = lambda count: None,
) -> Packed:
    """Pack the rows of several matrices of ``width`` numbers a row, one behind the other. ``raws``: of each,
    uint8 ``[bytes]`` as a file has them. ``orders``: of each, the numbers of its rows in their new order.
    ``told``: called with the bytes of each packed part, by the thread that packed it; what it raises ends all.

    Raises ``ValueError``: a scale is not finite.
    """
    lines = [raw.reshape(-1, width // kind.block * kind.bytes) for raw in raws]
    origins = np.concatenate(
        [np.stack((np.full(len(each), at), each)) for at, each in enumerate(orders)], axis=1
    )

    def some(begin: int, end: int) -> Unpacked:
        raw = np.zeros((end - begin, lines[0].shape[1]), np.uint8)
        source, row = origins[:, begin:end]
        for at in np.unique(source):
            raw[: len(row)][source == at] = lines[at][row[source == at]]
        found = unpacked(kind, raw)
        if not (np.isfinite(found.scale).all() and (found.offset is None or np.isfinite(found.offset).all())):
            raise ValueError("a scale is not finite")
        return found

    return in_panels(kind, sum(map(len, lines)), width, some, told)


def in_panels(
    kind: PackedType,
    rows: int,
    width: int,
    some: Callable[[int, int], Unpacked],
    told: Callable[[int], None] = lambda count: None,
) -> Packed:
    """Pack a matrix ``[rows, width]``. ``some``: returns the rows from one number to another; those behind the
    matrix' last are zero. ``told``: called with the bytes of each packed part, by a thread of its own."""
    panels, step = -(-rows // PANEL), max(1, AT_ONCE // (PANEL * width))
    data = torch.empty((panels, width // kind.block, kind.unit), dtype=torch.uint8)

    def pack(begin: int) -> None:
        part = data[begin : begin + step]
        _into_panels(kind, some(begin * PANEL, (begin + len(part)) * PANEL), part.numpy())
        told(part.nbytes)

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(pool.map(pack, range(0, panels, step)))
    return Packed(kind, rows, width, data)


def _beside(kind: PackedType) -> int:
    """How many numbers of a row lie side by side in a panel of a plain type."""
    return 2 if kind.name == "bfloat16" else 1


def plain(weight: Tensor) -> Packed:
    """Put a matrix that is not quantised, ``[rows, width]``, into panels."""
    rows, width = weight.shape
    kind = PLAIN[str(weight.dtype).removeprefix("torch.")]
    panels, blocks, beside = -(-rows // PANEL), -(-width // RUN), _beside(kind)
    data = torch.zeros((panels, blocks * RUN // beside, PANEL, beside), dtype=weight.dtype)
    whole = data.view(panels, blocks, -1, PANEL, beside).permute(0, 3, 1, 2, 4)
    step = max(1, AT_ONCE // (PANEL * width))
    for at in range(0, panels, step):
        some = weight[at * PANEL : (at + step) * PANEL]
        if len(some) % PANEL or width % RUN:
            some = F.pad(some, (0, -width % RUN, 0, -len(some) % PANEL))
        whole[at : at + step].copy_(some.view(-1, PANEL, blocks, RUN // beside, beside))
    return Packed(kind, rows, width, data.view(torch.uint8).view(panels, blocks, kind.unit))
