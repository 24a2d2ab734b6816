"""What a configuration says of quantised weights: as rules, or refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.errors import ConfigInvalid, ModelUnreadable, UnsupportedArchitecture
from holdfast.runtime.model.fields import Fields
from holdfast.runtime.model.files import FolderFiles
from holdfast.runtime.model.quantisation import LinearRule, read_quantisation, rule_for

from .quantised_toys import TOKEN_FP8, TOKEN_INT8, compressed

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
PACKED = compressed("pack-quantized", INT4)


def read(folder: Path, given: object, **beside: Any) -> tuple[LinearRule, ...]:
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    fields = Fields(folder / "config.json", {"quantization_config": given}, {})
    return read_quantisation(FolderFiles(folder), fields)


def rule(folder: Path, given: object, **beside: Any) -> LinearRule:
    (only,) = read(folder, given, **beside)
    return only


def with_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = {**config["config_groups"]["group_0"], **changes}
    return {**config, "config_groups": {"group_0": group}}


def test_each_method_is_a_rule(tmp_path: Path) -> None:
    assert rule(tmp_path, GPTQ) == LinearRule("gptq", "int4", 4, 128, shift=1)
    other = {
        **GPTQ,
        "checkpoint_format": "gptq_v2",
        "desc_act": True,
        "sym": False,
        "group_size": -1,
        "bits": 8,
    }
    assert rule(tmp_path, other) == LinearRule("gptq", "int8", 8, 0, zeros=True, ordered=True)
    assert rule(tmp_path, AWQ) == LinearRule("awq", "int4", 4, 128, zeros=True)
    fp8 = {"quant_method": "fp8"}
    assert rule(tmp_path, fp8) == LinearRule("whole", "fp8", 8, activations="fp8", tensor=True)
    static = {**fp8, "activation_scheme": "static"}
    assert rule(tmp_path, static) == LinearRule("whole", "fp8", 8, activations="fp8 fixed", tensor=True)
    block = LinearRule("whole", "fp8", 8, 128, activations="fp8 in groups", rows=128)
    assert rule(tmp_path, {**fp8, "weight_block_size": [128, 128], "fmt": "e4m3"}) == block
    assert rule(tmp_path, PACKED) == LinearRule("packed", "int4", 4, 128)
    group = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    made = compressed(
        "float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, group
    )
    assert rule(tmp_path, made) == block
    made = compressed("int-quantized", {**INT8, "strategy": "tensor"}, TOKEN_INT8)
    assert rule(tmp_path, made) == LinearRule("whole", "int8", 8, activations="int8", tensor=True)
    assert read(tmp_path, None) == read(tmp_path, {}) == ()


def test_files_beside_are_read_if_the_configuration_says_nothing(tmp_path: Path) -> None:
    old = {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert rule(tmp_path, None, quant_config=old) == LinearRule("awq", "int4", 4, 64, zeros=True)
    beside = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    assert rule(tmp_path, None, quantize_config=beside) == LinearRule("gptq", "int4", 4, 32, shift=1)
    assert rule(tmp_path, AWQ, quantize_config=beside).layout == "awq"


def test_a_rule_that_names_a_linear_goes_before_one_for_all(tmp_path: Path) -> None:
    some = {**PACKED["config_groups"]["group_0"], "targets": ["re:.*down_proj", "model.layers.0.mlp.up_proj"]}
    some["weights"] = {**some["weights"], "group_size": 32}
    config = {**PACKED, "config_groups": {**PACKED["config_groups"], "group_1": some}}
    found = read(tmp_path, config)
    groups = {
        name: (rule_for(f"model.layers.{name}", found) or LinearRule("", "", 0)).group
        for name in ("0.mlp.up_proj", "1.mlp.up_proj", "1.mlp.down_proj")
    }
    assert groups == {"0.mlp.up_proj": 32, "1.mlp.up_proj": 128, "1.mlp.down_proj": 32}
    config["config_groups"] = {"group_1": some, "group_2": {**some, "targets": ["re:.*up_proj"]}}
    assert rule_for("model.layers.0.self_attn.q_proj", read(tmp_path, config)) is None


REFUSED = [
    ({**GPTQ, "bits": 3}, r"quantization_config\.bits: 3 is not served \(served: 4, 8\)"),
    ({**GPTQ, "bits": True}, "bits: True is not served"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: marlin is not served"),
    ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, "dynamic: .* is not served"),
    ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype: int16"),
    ({**AWQ, "version": "gemv"}, "version: gemv is not served"),
    ({**AWQ, "bits": 8}, "bits: 8 is not served"),
    ({**AWQ, "zero_point": False}, "zero_point: False is not served"),
    ({**AWQ, "backend": "llm-awq"}, "backend: llm-awq"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: e5m2"),
    ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt: ue8m0"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\] is not served"),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        "activation_scheme: static, with blocks",
    ),
    ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: "),
    (
        {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config.format: sparse-24-bitmask",
    ),
    ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.config_groups: "),
    ({**PACKED, "format": "nvfp4-pack-quantized"}, "format: nvfp4-pack-quantized is not served"),
    (compressed("pack-quantized", {**INT4, "num_bits": 3}), r"group_0\.weights\.num_bits: 3 is not served"),
    (
        compressed("pack-quantized", {**INT4, "type": "float"}),
        r"weights\.type: float is not served \(served: int\)",
    ),
    (compressed("pack-quantized", {**INT4, "dynamic": True}), r"weights\.dynamic: True"),
    (compressed("pack-quantized", {**INT4, "actorder": "other"}), r"weights\.actorder: other"),
    (
        compressed("pack-quantized", INT4, TOKEN_INT8),
        r"input_activations: 8 bits, int, dynamic, by token, for int4",
    ),
    (
        compressed("int-quantized", INT8, TOKEN_FP8),
        r"input_activations: .*float, dynamic, by token, for int8",
    ),
    (
        compressed("int-quantized", INT8, {**TOKEN_INT8, "dynamic": False, "strategy": "tensor"}),
        r"input_activations: 8 bits, int, static, by tensor",
    ),
    (compressed("int-quantized", INT8, {**TOKEN_INT8, "symmetric": False}), "input_activations: "),
    (compressed("int-quantized", INT8, {**TOKEN_INT8, "type": ["int"]}), "input_activations: "),
    (compressed("float-quantized", {**FLOAT8, "symmetric": False}), r"weights\.symmetric: False"),
    (
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [64, 64]}),
        r"block_structure: \[64, 64\] of fp8 is not served",
    ),
    (with_group(PACKED, output_activations=TOKEN_INT8), "output_activations: "),
    (with_group(PACKED, targets=["re:(a+)+$"]), r"targets: re:\(a\+\)\+\$ is not served"),
    (with_group(PACKED, targets=["re:.*.*.*.*.*x"]), "targets: .* is not served"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=words) as caught:
        read(tmp_path, given)
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: quantization_config.")
    assert "\n" not in caught.value.message


INVALID = [
    ({**GPTQ, "group_size": 0}, "group_size: a whole number from 1"),
    ({**GPTQ, "group_size": "many"}, "group_size: a whole number"),
    ({**GPTQ, "sym": "yes"}, "sym: true or false"),
    ({**PACKED, "config_groups": {}}, "config_groups: missing"),
    ({**PACKED, "config_groups": []}, "config_groups: "),
    ({**PACKED, "config_groups": {"group_0": None}}, "group_0: missing"),
    (with_group(PACKED, weights=None), "weights: missing"),
    (with_group(PACKED, targets=[]), "targets: a list of names"),
    (with_group(PACKED, targets=[3]), "targets: a list of names"),
    (with_group(PACKED, targets=["re:("]), r"targets: 're:\('"),
    (with_group(PACKED, weights=7), "weights: an object is expected"),
]


@pytest.mark.parametrize(("given", "words"), INVALID)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=words) as caught:
        read(tmp_path, given)
    assert caught.value.message.startswith(f"{tmp_path / 'config.json'}: quantization_config.")


@pytest.mark.parametrize(
    "given", ["int\n8", 7, True, {"quant_method": ["x"]}, {"quant_method": {"a": "b\n"}}]
)
def test_any_value_is_refused_in_one_line(given: object, tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match=r"which is not served|an object is expected") as caught:
        read(tmp_path, given)
    assert "\n" not in caught.value.message
