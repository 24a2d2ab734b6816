"""config.json and generation_config.json: what is read, what is refused and by which name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from holdfast.runtime.errors import ConfigInvalid, UnsupportedArchitecture
from holdfast.runtime.model.config import ModelConfig, RopeConfig, read_config

PLAIN = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 2,
}


def read(folder: Path, generation: dict | None = None, **changes) -> ModelConfig:
    values = {key: value for key, value in {**PLAIN, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_what_transformers_saves_reads_the_same(tmp_path: Path) -> None:
    theirs = Qwen3Config(**{**PLAIN, "tie_word_embeddings": True, "attention_bias": True}, rms_norm_eps=1e-5)
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert ours == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=128,
        hidden_size=32,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_size=48,
        norm_eps=1e-5,
        max_context=32768,
        rope=RopeConfig("default", 10000.0),
        tied_head=True,
        attention_bias=True,
        qk_norm=True,
        eos_ids=(2,),
        dtype=None,
    )


def test_fields_left_out_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, head_dim=...), Qwen3Config()
    assert ours.head_dim == theirs.head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tied_head is theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
    ids=["old", "new", "mixed", "null"],
)
def test_both_forms_of_rope_settings(rope: dict, tmp_path: Path) -> None:
    assert read(tmp_path, **rope).rope == RopeConfig("default", 1e6)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_stretches_the_context(key: str, tmp_path: Path) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = read(tmp_path, rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=1024)
    assert config.rope == RopeConfig("yarn", 5e5, 4.0, 1024)
    assert config.max_context == 4096
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig("linear", 1e4, 2.0)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [5, 2, 7]}).eos_ids == (2, 5, 7)
    assert read(tmp_path, {"eos_token_id": 9}, eos_token_id=[1, 3]).eos_ids == (1, 3, 9)
    assert read(tmp_path, {"eos_token_id": None}, eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize("value", [128, -1, True, "2", [2, 128], 2.0])
def test_end_tokens_must_be_in_the_vocabulary(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"generation_config\.json: eos_token_id: .* vocab_size 128"):
        read(tmp_path, {"eos_token_id": value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": ...}, "vocab_size: missing"),
        ({"hidden_size": 0}, "hidden_size: a whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: a whole number"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers: a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: true or false"),
        ({"rope_theta": 0}, "rope_theta: a finite number"),
        ({"rope_parameters": [1]}, "rope_parameters: an object"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor: missing"),
    ],
)
def test_fields_out_of_bounds(changes: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=rf"config\.json: {words}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not served"),
        ({"architectures": ["Qwen3ForCausalLM", "X"]}, "Qwen3ForCausalLM, X is not served"),
        ({"architectures": ..., "model_type": "bert"}, "bert is not served"),
        ({"architectures": 3}, "3 is not served"),
        ({"architectures": ...}, "None is not served"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "full_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full_attention"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope_type longrope"),
        ({"partial_rotary_factor": 0.5}, "whole head"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    changes: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=words) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in caught.value.message
    assert "\n" not in caught.value.message


def test_the_model_type_serves_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=..., model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_a_sliding_window_that_no_layer_uses_is_none(tmp_path: Path) -> None:
    config = read(tmp_path, use_sliding_window=True, max_window_layers=2, layer_types=None)
    assert config.layers == 2


def test_the_stored_type_has_two_names(tmp_path: Path) -> None:
    assert read(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(tmp_path, dtype="auto").dtype is None


def test_what_shapes_kv_is_plain_json_and_knows_the_rotation(tmp_path: Path) -> None:
    first, second = read(tmp_path).shaping_kv(), read(tmp_path, rope_theta=1e6).shaping_kv()
    assert json.loads(json.dumps(first)) == first
    assert first != second
    assert first == read(tmp_path, {"eos_token_id": 5}, max_position_embeddings=64).shaping_kv()
