"""What a model's configuration says of quantised weights: one table of methods, each with its reader. No torch.

Which linears are quantised is seen from the tensors that are stored, so lists of exceptions are not read
(``ignore``, ``modules_to_not_convert``, ``ignored_layers``). A setting that changes numbers and is not computed
is refused by its name.

Sources: compressed-tensors (``QuantizationConfig``), AutoGPTQ and GPTQModel (``quantize_config.json``), AutoAWQ
(``quant_config.json``), and transformers' ``FineGrainedFP8Config`` and ``Mxfp4Config``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UnsupportedArchitecture
from .fields import Fields, read_object
from .files import ModelFiles

INSIDE = {
    "quantization_config": "an unnamed method",
    "compression_config": "compressed-tensors",
    "quantization": "mlx",
}
"""Fields of ``config.json`` that describe quantised weights, and the method to name if the field names none."""
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files beside it that do, and the method to name if the file names none."""


MOST_REPEATS = 4
"""Repeats in a pattern of a configuration, at most: more may take longer than anybody waits."""


@dataclass(frozen=True, slots=True)
class LinearRule:
    """How some linears are stored.

    ``layout``: one of `quantised_weights.LAYOUTS`. ``codes``, ``group``, ``zeros``, ``activations``: as in
    `kernels.quantised.Scheme`. ``bits``: of a code. ``tensor``: there is one scale for the whole matrix.
    ``rows``: rows with one scale, 1 or those of a block. ``ordered``: columns may belong to groups in any
    order. ``shift``: what is added to a stored zero. ``targets``: names of linears, or patterns behind
    ``re:``; empty: all.
    """

    layout: str
    codes: str
    bits: int
    group: int = 0
    zeros: bool = False
    activations: str = ""
    tensor: bool = False
    rows: int = 1
    ordered: bool = False
    shift: int = 0
    targets: tuple[str, ...] = ()


def rule_for(linear: str, rules: Sequence[LinearRule]) -> LinearRule | None:
    """The rule for a linear by its name, such as ``model.layers.0.mlp.up_proj``: one that names it before one
    for all; None: there is none."""
    for rule in rules:
        for target in rule.targets:
            name, pattern = target, target.removeprefix("re:")
            if name == linear or (pattern != name and re.match(pattern, linear)):
                return rule
    return next((rule for rule in rules if not rule.targets), None)


def read_quantisation(files: ModelFiles, *holders: Fields) -> tuple[LinearRule, ...]:
    """Read how the weights are quantised: from ``holders``, the objects of ``config.json`` that may say it,
    else from a file beside it; empty: they are not.

    Raises:
        UnsupportedArchitecture: by a method, or with a setting, that is not served.
        ConfigInvalid: a field is missing or wrong.
    """
    for name, usual in INSIDE.items():
        for fields in holders:
            if fields.get(name):
                found = _object(fields, name)
                old = found.get("load_in_4bit") or found.get("load_in_8bit")
                method = "bitsandbytes" if old else found.get("quant_method") or usual
                return _read(str(method), found)
    for file, usual in BESIDE.items():
        beside = read_object(files, file, required=False)
        inner = beside.get("quantization")
        method = beside.get("quant_method") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
        if beside.values:
            return _read(str(method or usual), beside)
    return ()


def _read(method: str, fields: Fields) -> tuple[LinearRule, ...]:
    if (reader := METHODS.get(method)) is None:
        what = fields.inside.removesuffix(".") or "the folder's weights"
        told = f"quantised with {' '.join(method.split())[:60]}, which is not served"
        raise UnsupportedArchitecture(f"{fields.path}: {what}: {told} (served: {', '.join(METHODS)})")
    return reader(fields)


def _refuse(fields: Fields, *names: str) -> None:
    """Raise if one of the fields says something."""
    for name in names:
        if given := fields.get(name):
            raise _not_served(fields, name, given)


def _not_served(fields: Fields, name: str, value: object, served: str = "") -> UnsupportedArchitecture:
    shown = " ".join(str(value).split())[:60]
    return fields.unserved(name, f"{shown} is not served" + (f" (served: {served})" if served else ""))


def _one_of(fields: Fields, name: str, *served: object) -> Any:
    """The field's value, which must be one of ``served``."""
    value = fields.get(name)
    value = value.lower() if isinstance(value, str) else value
    if not any(value == one and type(value) is type(one) for one in served):
        raise _not_served(fields, name, value, ", ".join(str(one) for one in served if one is not None))
    return value


def _object(fields: Fields, name: str) -> Fields:
    """The object in a field, which must have fields."""
    found = fields.object(name)
    if found is None or not found.values:
        raise fields.wrong(name, "missing")
    return found


def _group_size(fields: Fields, name: str = "group_size") -> int:
    """The columns with one scale; 0: the whole row."""
    return 0 if fields.get(name) == -1 else fields.integer(name)


# --- GPTQ, AWQ, FP8, MXFP4 ------------------------------------------------------------------------------------


def _gptq(fields: Fields) -> tuple[LinearRule, ...]:
    _refuse(fields, "dynamic", "is_marlin_format", "meta_quantizer")
    bits = _one_of(fields, "bits", 4, 8)
    form = _one_of(fields, "checkpoint_format", "gptq", "gptq_v2", None)
    _one_of(fields, "pack_dtype", "int32", None)
    return (
        LinearRule(
            "gptq",
            f"int{bits}",
            bits,
            group=_group_size(fields),
            zeros=not fields.flag("sym") if fields.get("sym") is not None else True,
            ordered=fields.get("desc_act") is True,
            shift=0 if form == "gptq_v2" else 1,
        ),
    )


def _awq(fields: Fields) -> tuple[LinearRule, ...]:
    bits, group, version = (
        name if fields.get(name) is not None else old
        for name, old in (("bits", "w_bit"), ("group_size", "q_group_size"), ("version", "version"))
    )
    _one_of(fields, bits, 4)
    _one_of(fields, version, "gemm", None)
    _one_of(fields, "backend", "autoawq", None)
    _one_of(fields, "zero_point", True)
    return (LinearRule("awq", "int4", 4, group=_group_size(fields, group), zeros=True),)


def _fp8(fields: Fields) -> tuple[LinearRule, ...]:
    _one_of(fields, "fmt", "e4m3", "float8_e4m3fn", None)
    _refuse(fields, "scale_fmt", "kv_cache_scheme")
    scheme = _one_of(fields, "activation_scheme", "dynamic", "static", None)
    block = fields.get("weight_block_size")
    if block is None:
        kind = "fp8 fixed" if scheme == "static" else "fp8"
        return (LinearRule("whole", "fp8", 8, activations=kind, tensor=True),)
    if block != [128, 128]:
        raise _not_served(fields, "weight_block_size", block, "128 by 128")
    if scheme == "static":
        raise _not_served(fields, "activation_scheme", "static, with blocks,", "dynamic")
    return (LinearRule("whole", "fp8", 8, group=128, rows=128, activations="fp8 in groups"),)


# --- compressed-tensors ---------------------------------------------------------------------------------------

FORMATS = {
    "pack-quantized": ("packed", ("int",), (4, 8)),
    "int-quantized": ("whole", ("int", "float"), (8,)),
    "float-quantized": ("whole", ("int", "float"), (8,)),
    "naive-quantized": ("whole", ("int", "float"), (8,)),
    "mxfp4-pack-quantized": ("mxfp4", ("float",), (4,)),
}
"""Of compressed-tensors' formats the layout, and the types and bits that codes may have."""


def _compressed_tensors(fields: Fields) -> tuple[LinearRule, ...]:
    _refuse(fields, "kv_cache_scheme")
    sparsity, transforms = fields.object("sparsity_config"), fields.object("transform_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise _not_served(sparsity, "format", sparsity.get("format"))
    if transforms is not None:
        _refuse(transforms, "config_groups")
    groups = _object(fields, "config_groups")
    rules = [_group(_object(groups, name), fields) for name in groups.values]
    return tuple(replace(rule, targets=()) if len(rules) == 1 else rule for rule in rules)


def _group(group: Fields, whole: Fields) -> LinearRule:
    """The rule of one group of linears. ``whole``: the configuration around it."""
    holder = group if group.get("format") is not None else whole
    layout, kinds, widths = FORMATS[_one_of(holder, "format", *FORMATS)]
    _refuse(group, "output_activations")
    weights = _object(group, "weights")
    kind, bits = _one_of(weights, "type", *kinds), _one_of(weights, "num_bits", *widths)
    _refuse(weights, "dynamic")
    symmetric = weights.get("symmetric") is not False
    if not symmetric and kind == "float":
        raise _not_served(weights, "symmetric", False)
    codes = "mxfp4" if layout == "mxfp4" else "fp8" if kind == "float" else f"int{bits}"
    order = _one_of(weights, "actorder", "weight", "static", "group", "dynamic", None)
    return LinearRule(
        layout,
        codes,
        bits,
        zeros=not symmetric,
        activations=_activations(group, codes, zeros=not symmetric),
        ordered=order in ("group", "dynamic"),
        targets=_targets(group),
        **_scales(weights, codes),
    )


def _scales(weights: Fields, codes: str) -> dict[str, Any]:
    """The fields of a rule that say what has one scale."""
    if codes == "mxfp4":
        _one_of(weights, "strategy", "group")
        _one_of(weights, "group_size", 32)
        return {"group": 32}
    strategy = _one_of(weights, "strategy", "group", "channel", "tensor", "block", None)
    if strategy == "group" or (strategy is None and weights.get("group_size") is not None):
        return {"group": _group_size(weights)}
    if strategy != "block":
        return {"tensor": strategy != "channel"}
    block = weights.get("block_structure")
    if codes != "fp8" or block not in ([128, 128], "128x128"):
        raise _not_served(weights, "block_structure", f"{block} of {codes}", "128 by 128 of fp8")
    return {"group": 128, "rows": 128}


def _activations(group: Fields, codes: str, *, zeros: bool) -> str:
    """How activations are rounded: see `kernels.quantised.Scheme`."""
    given = group.object("input_activations")
    if given is None:
        return ""
    kind, bits = given.get("type") or "int", given.get("num_bits")
    static, strategy = given.get("dynamic") in (None, False), given.get("strategy")
    if strategy is None:
        strategy = "tensor" if static else "token"
    found = {
        ("int", False, "token"): "int8",
        ("float", False, "token"): "fp8",
        ("float", True, "tensor"): "fp8 fixed",
        ("float", False, "group"): "fp8 in groups" if given.get("group_size") == 128 else None,
    }.get((str(kind), static, str(strategy)))
    plain = bits == 8 and given.get("symmetric") is not False and given.get("dynamic") != "local"
    fits = codes == ("int8" if kind == "int" else "fp8") and not zeros
    if found is None or not plain or not fits:
        told = f"{bits} bits, {kind}, {'static' if static else 'dynamic'}, by {strategy}, for {codes}"
        raise _not_served(group, "input_activations", told)
    return found


def _targets(group: Fields) -> tuple[str, ...]:
    """The linears of a group; empty: all."""
    given = group.get("targets")
    if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
        raise group.wrong("targets", "a list of names is expected")
    for one in given:
        if re.search(r"\)[*+?{]", one) or len(re.findall(r"[*+?{]", one)) > MOST_REPEATS:
            raise _not_served(group, "targets", one, f"patterns with {MOST_REPEATS} repeats, none of a group")
        try:
            re.compile(one.removeprefix("re:"))
        except re.error as error:
            raise group.wrong("targets", f"{one[:60]!r}: {error}") from None
    return () if "Linear" in given else tuple(given)


METHODS: Mapping[str, Callable[[Fields], tuple[LinearRule, ...]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": lambda fields: (LinearRule("mxfp4 blocks", "mxfp4", 4, group=32),),
}
"""The methods that are served, by their names in a configuration."""
