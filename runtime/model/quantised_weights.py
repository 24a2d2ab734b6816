"""Quantised linears in safetensors: one table of layouts, each of which makes `Quantised` of stored tensors.

Tensors of a linear ``[rows, width]`` are named by its module, such as ``model.layers.0.mlp.up_proj``, and a
suffix. A linear is quantised if the tensor is there that holds its layout's codes; groups run along the width::

    layout         codes                                    scales [rows, groups]             beside
    packed         weight_packed  int32 [rows, width / n]   weight_scale                      weight_shape,
                                                                       weight_zero_point, weight_g_idx
    whole          weight  int8 or fp8 [rows, width]        weight_scale, weight_scale_inv    input_scale,
                                                                       weight_zero_point
    mxfp4          weight_packed  uint8 [rows, width / 2]   weight_scale
    mxfp4 blocks   weight_blocks  uint8 [rows, groups, 16]  weight_scales
    gptq           qweight  int32 [width / n, rows]         scales, transposed                qzeros, g_idx
    awq            qweight  int32 [width, rows / 8]         scales, transposed                qzeros

with n codes in an int32, the first in the lowest bits. AWQ has the codes of 8 neighbours in the order of `AWQ`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.quantised import FP8_FIXED, HALVED, Quantised, Scheme, halved
from ..errors import TensorInvalid
from .checkpoint import Checkpoint
from .fields import FLOAT_TYPES, StoredTensor
from .quantisation import LinearRule, rule_for
from .weights import EMBEDDING, Piece

WEIGHT = ".weight"
EXPONENTS = ("U8", "F8_E8M0")
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in an int32 of AWQ the code of each of 8 neighbours is. Source: AutoAWQ, ``packing_utils.py``."""
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E8M0": 1}
"""The bytes of a scale."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A tensor of a linear. ``shapes``: those that it may have; ``types``: as safetensors names them.
    ``needed``: whether it must be there."""

    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    needed: bool = True


@dataclass(frozen=True, slots=True)
class BesideCodes:
    """What a linear has beside its codes, as `Quantised` has it. ``order``: which column of the matrix each
    column of `Quantised` is; None: they are the same."""

    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    fixed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A quantised linear ``[rows, width]`` as it is stored in ``weights``. ``module``: its name. ``parts``: its
    tensors, by their suffixes."""

    weights: Checkpoint
    module: str
    rule: LinearRule
    scheme: Scheme
    rows: int
    width: int
    parts: Mapping[str, StoredTensor]

    def read(self, suffix: str) -> Tensor:
        """Read the tensor with a suffix."""
        return self.weights.read(f"{self.module}.{suffix}")

    @property
    def scales(self) -> str:
        """The suffix of its scales."""
        return next(name for name in SCALES if name in self.parts)

    @property
    def scale_bytes(self) -> int:
        """The bytes of one scale."""
        return 4 if self.rule.codes == "fp8" else BYTES[self.parts[self.scales].dtype]

    @property
    def alone(self) -> bool:
        """Whether it is multiplied by itself, since its inputs differ from those of its neighbours."""
        return self.rule.ordered or self.scheme.activations == FP8_FIXED


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """How linears are stored. ``codes``: the suffix of the tensor of codes. ``parts``: all
    tensors of a linear of ``rows`` and ``width``. ``beside``, ``unpack``: read all but the codes, and the
    codes."""

    codes: str
    parts: Callable[[LinearRule, int, int], dict[str, LinearPart]]
    beside: Callable[[StoredLinear], BesideCodes]
    unpack: Callable[[StoredLinear, Tensor], Tensor]


class QuantisedCheckpoint(Checkpoint):
    """The open safetensors files of a model that may have quantised linears; a context manager. Opening it
    reads only headers. `check` finds the linears: ``linears``, by the names that their weights would have.

    ``rules``: what the configuration says of them, if there are any; the rest is as for `Checkpoint`.
    """

    def __init__(self, folder: Path, rules: Sequence[LinearRule], renamed: Callable[[str], str]) -> None:
        super().__init__(folder, renamed)
        self.linears: dict[str, StoredLinear] = {}
        self._rules = rules
        self._beside: dict[str, BesideCodes] = {}

    def check(self, pieces: Sequence[Piece], ignorable: Callable[[str], bool]) -> None:
        """As `Checkpoint.check`; a quantised linear is checked in place of its weight. Raises
        ``TensorInvalid``."""
        found = [self._linear(piece) for piece in pieces if len(piece.shape) == 2 and piece.name != EMBEDDING]
        self.linears = {one.module + WEIGHT: one for one in found if one is not None}
        theirs = {f"{linear.module}.{suffix}" for linear in self.linears.values() for suffix in linear.parts}
        biases = {f"{one.module}.bias" for one in self.linears.values() if one.rule.layout == "gptq"}

        def known(name: str) -> bool:
            # AutoGPTQ has written biases of 0 for linears without one.
            return name in theirs or ignorable(name) or (name in biases and not self.read(name).any())

        super().check([piece for piece in pieces if piece.name not in self.linears], known)

    def read_scales(self) -> None:
        """Read and check all that linears have beside their codes. Raises ``TensorInvalid``."""
        for name, linear in self.linears.items():
            beside = self._beside[name] = LAYOUTS[linear.rule.layout].beside(linear)
            for suffix, numbers in ((linear.scales, beside.scales), ("input_scale", beside.fixed)):
                if numbers is None:
                    continue
                sound = numbers != 255 if numbers.dtype == torch.uint8 else numbers.isfinite()
                if not sound.all():
                    raise linear.parts[suffix].wrong("a scale is not finite")
            if beside.fixed is not None and not float(beside.fixed) > 0:
                raise linear.parts["input_scale"].wrong(f"{float(beside.fixed):g} is not above 0")

    def quantised(self, name: str) -> tuple[Quantised, Tensor | None]:
        """Read a quantised linear, by the name that its weight would have, to the CPU; and which column of the
        matrix each of its columns is, int64 ``[width]``, None: they are the same. `read_scales` was called
        before. Raises ``TensorInvalid``."""
        linear, beside = self.linears[name], self._beside.pop(name)
        layout = LAYOUTS[linear.rule.layout]
        codes = layout.unpack(linear, linear.read(layout.codes))
        if beside.order is not None:
            codes = codes[:, beside.order]
        if linear.scheme.codes in HALVED:
            codes = halved(codes)
        made = Quantised(linear.scheme, linear.width, codes, beside.scales, beside.zeros, beside.fixed)
        return made, beside.order

    def _linear(self, piece: Piece) -> StoredLinear | None:
        """The quantised linear with the weight ``piece``, checked for types and shapes; None: it is not
        quantised. Raises ``TensorInvalid``."""
        module, tensors = piece.name.removesuffix(WEIGHT), self.tensors
        keys = [f".{layout.codes}" for layout in LAYOUTS.values() if f"{module}.{layout.codes}" in tensors]
        # The configuration has the names of the shards: other ones in a multimodal checkpoint.
        names = [tensors[module + key].name.removesuffix(key) for key in keys]
        rule = rule_for(names[0], self._rules) if names else None
        if rule is None:
            return None
        layout = LAYOUTS[rule.layout]
        codes = tensors.get(f"{module}.{layout.codes}")
        if codes is None or (layout.codes == "weight" and codes.dtype in FLOAT_TYPES):
            return None
        (rows, width), group, many = piece.shape, rule.group, 32 // rule.bits
        if rule.rows == 1 and group and width % group:
            raise codes.wrong(f"groups of {group} do not fit its {width} columns ({piece.fields})")
        if (rule.layout == "gptq" and width % many) or (rule.layout in ("gptq", "awq") and rows % many):
            raise codes.wrong(f"{rows} by {width} codes do not fill int32s")
        parts: dict[str, StoredTensor] = {}
        for suffix, part in layout.parts(rule, rows, width).items():
            if (stored := tensors.get(f"{module}.{suffix}")) is not None:
                stored.check(self.asks, *part.shapes, types=part.types, by=piece.fields)
                parts[suffix] = stored
            elif part.needed:
                raise TensorInvalid(f"{codes.shard}: {module}.{suffix}: missing, {codes.name} needs it")
        scales = [parts[name].name for name in SCALES if name in parts]
        if not scales:
            raise TensorInvalid(f"{codes.shard}: {module}.weight_scale: missing, {codes.name} needs it")
        if len(scales) > 1:
            raise TensorInvalid(f"{codes.shard}: {scales[1]}: {codes.name} has {scales[0]} already")
        scheme = Scheme(rule.codes, 0 if group == width else group, rule.zeros, rule.activations)
        return StoredLinear(self, module, rule, scheme, rows, width, parts)


# --- reading --------------------------------------------------------------------------------------------------


def _codes_in(words: Tensor, bits: int) -> Tensor:
    """The codes in int32 ``[lines, n]``, the lowest bits first: uint8 ``[lines, n * 32 / bits]``."""
    found = words.contiguous().view(torch.uint8)
    return _nibbles(found) if bits == 4 else found


def _nibbles(found: Tensor) -> Tensor:
    """The codes of 4 bits in bytes ``[..., n]``, the low half first: ``[..., 2 n]``."""
    return torch.stack((found & 15, found >> 4), -1).flatten(-2)


def _signed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes as `Quantised` has them: those of 8 bits less 128, int8."""
    return codes if bits == 4 else (codes ^ 128).view(torch.int8)


def _exponents(linear: StoredLinear) -> BesideCodes:
    return BesideCodes(linear.read(linear.scales).view(torch.uint8))


def _order(linear: StoredLinear, suffix: str) -> Tensor | None:
    """The columns sorted by their groups; None: they are. Raises ``TensorInvalid``: groups are not full."""
    if suffix not in linear.parts:
        if linear.rule.ordered and linear.scheme.group:
            raise TensorInvalid(f"{linear.module}.{suffix}: missing, the configuration says it is there")
        return None
    group, given = linear.scheme.group or linear.width, linear.read(suffix).long()
    usual = torch.arange(linear.width) // group
    if torch.equal(given, usual):
        return None
    if not linear.rule.ordered:
        raise linear.parts[suffix].wrong("columns are out of order, and the configuration does not say so")
    if not torch.equal(given.sort().values, usual):
        raise linear.parts[suffix].wrong(f"not {group} columns of each group from 0 to {int(usual[-1])}")
    return given.argsort(stable=True)


# packed: compressed-tensors, pack-quantized


def _scale_shapes(rule: LinearRule, rows: int, width: int) -> tuple[tuple[int, ...], ...]:
    if rule.rows > 1:
        return ((-(-rows // rule.rows), -(-width // rule.group)),)
    if rule.group:
        return ((rows, width // rule.group),)
    return ((), (1,), (1, 1)) if rule.tensor else ((rows, 1), (rows,))


def _packed_parts(rule: LinearRule, rows: int, width: int) -> dict[str, LinearPart]:
    many = 32 // rule.bits
    groups = width // rule.group if rule.group else 1
    found = {
        "weight_packed": LinearPart(((rows, -(-width // many)),), ("I32",)),
        "weight_scale": LinearPart(_scale_shapes(rule, rows, width), FLOAT_TYPES),
        "weight_shape": LinearPart(((2,),), ("I64", "I32")),
    }
    if rule.zeros:
        found["weight_zero_point"] = LinearPart(((-(-rows // many), groups),), ("I32",))
    if rule.ordered:
        found["weight_g_idx"] = LinearPart(((width,),), ("I32", "I64"))
    return found


def _packed_beside(linear: StoredLinear) -> BesideCodes:
    said = linear.read("weight_shape").tolist()
    if said != [linear.rows, linear.width]:
        raise linear.parts["weight_shape"].wrong(
            f"says {said}, config.json asks for {[linear.rows, linear.width]}"
        )
    zeros, bits = None, linear.rule.bits
    if linear.rule.zeros:
        lines = _codes_in(linear.read("weight_zero_point").T, bits)
        zeros = _signed(lines[:, : linear.rows].T.contiguous(), bits)
    return BesideCodes(_rows(linear, "weight_scale"), zeros, _order(linear, "weight_g_idx"))


def _packed_codes(linear: StoredLinear, words: Tensor) -> Tensor:
    return _signed(_codes_in(words, linear.rule.bits)[:, : linear.width], linear.rule.bits).contiguous()


def _rows(linear: StoredLinear, suffix: str) -> Tensor:
    """Scales or zeros by row: ``[rows, groups]``, of fp8 in float32. Those of blocks and of a whole matrix are
    repeated."""
    scales = linear.read(suffix)
    scales = scales.float() if linear.rule.codes == "fp8" else scales
    if linear.rule.tensor:
        return scales.reshape(1, 1).expand(linear.rows, 1).contiguous()
    if linear.rule.rows > 1:
        return scales.repeat_interleave(linear.rule.rows, 0)[: linear.rows].contiguous()
    return scales.view(linear.rows, -1)


# whole: compressed-tensors, int-quantized and float-quantized; FP8


def _whole_parts(rule: LinearRule, rows: int, width: int) -> dict[str, LinearPart]:
    shapes = _scale_shapes(rule, rows, width)
    found = {
        "weight": LinearPart(((rows, width),), ("I8",) if rule.codes == "int8" else ("F8_E4M3",)),
        "weight_scale": LinearPart(shapes, FLOAT_TYPES, needed=False),
        "weight_scale_inv": LinearPart(shapes, FLOAT_TYPES, needed=False),
    }
    if rule.zeros:
        found["weight_zero_point"] = LinearPart(shapes, ("I8",))
    if rule.activations == FP8_FIXED:
        found["input_scale"] = LinearPart(((), (1,), (1, 1)), FLOAT_TYPES)
    return found


def _whole_beside(linear: StoredLinear) -> BesideCodes:
    zeros = _rows(linear, "weight_zero_point") if linear.rule.zeros else None
    fixed = None
    if linear.rule.activations == FP8_FIXED:
        fixed = linear.read("input_scale").float().reshape(1)
    return BesideCodes(_rows(linear, linear.scales), zeros, None, fixed)


# mxfp4: compressed-tensors; mxfp4 blocks: as gpt-oss has its experts


def _mxfp4_parts(rule: LinearRule, rows: int, width: int) -> dict[str, LinearPart]:
    scales = LinearPart(((rows, width // 32),), EXPONENTS)
    if rule.layout == "mxfp4":
        return {"weight_packed": LinearPart(((rows, width // 2),), ("U8",)), "weight_scale": scales}
    return {"weight_blocks": LinearPart(((rows, width // 32, 16),), ("U8",)), "weight_scales": scales}


def _mxfp4_codes(linear: StoredLinear, codes: Tensor) -> Tensor:
    return _nibbles(codes).flatten(1)


# gptq, awq


def _gptq_parts(rule: LinearRule, rows: int, width: int) -> dict[str, LinearPart]:
    many, awq = 32 // rule.bits, rule.layout == "awq"
    groups = width // rule.group if rule.group else 1
    found = {
        "qweight": LinearPart(((width, rows // many) if awq else (width // many, rows),), ("I32",)),
        "qzeros": LinearPart(((groups, rows // many),), ("I32",)),
        "scales": LinearPart(((groups, rows),), FLOAT_TYPES),
    }
    if not awq:
        found["g_idx"] = LinearPart(((width,),), ("I32", "I64"), needed=False)
    return found


def _gptq_beside(linear: StoredLinear) -> BesideCodes:
    bits, shift = linear.rule.bits, linear.rule.shift
    found, half = _codes_in(linear.read("qzeros"), bits).T.int() + shift, 1 << bits - 1
    if not linear.rule.zeros and (found != half).any():
        raise linear.parts["qzeros"].wrong(f"not {half - shift} everywhere, but the configuration says sym")
    if linear.rule.zeros and int(found.max()) > (1 << bits) - (bits == 8):
        raise linear.parts["qzeros"].wrong(f"a zero of {int(found.max())}")
    zeros = (found.to(torch.uint8) if bits == 4 else (found - half).to(torch.int8)).contiguous()
    scales = linear.read("scales").T.contiguous()
    return BesideCodes(scales, zeros if linear.rule.zeros else None, _order(linear, "g_idx"))


def _gptq_codes(linear: StoredLinear, words: Tensor) -> Tensor:
    return _signed(_codes_in(words.T, linear.rule.bits), linear.rule.bits)


def _awq_beside(linear: StoredLinear) -> BesideCodes:
    return BesideCodes(linear.read("scales").T.contiguous(), _awq_codes(linear, linear.read("qzeros")))


def _awq_codes(linear: StoredLinear, words: Tensor) -> Tensor:
    found = _codes_in(words, 4).view(len(words), -1, 8)
    return found[..., list(AWQ)].flatten(1).T.contiguous()


SCALES = ("weight_scale", "weight_scale_inv", "scales", "weight_scales")
"""The suffixes of scales."""
LAYOUTS = {
    "packed": LinearLayout("weight_packed", _packed_parts, _packed_beside, _packed_codes),
    "whole": LinearLayout("weight", _whole_parts, _whole_beside, lambda linear, codes: codes),
    "mxfp4": LinearLayout("weight_packed", _mxfp4_parts, _exponents, _mxfp4_codes),
    "mxfp4 blocks": LinearLayout("weight_blocks", _mxfp4_parts, _exponents, _mxfp4_codes),
    "gptq": LinearLayout("qweight", _gptq_parts, _gptq_beside, _gptq_codes),
    "awq": LinearLayout("qweight", _gptq_parts, _awq_beside, _awq_codes),
}
"""The layouts that rules name (`quantisation`)."""
