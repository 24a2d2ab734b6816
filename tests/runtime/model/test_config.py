"""config.json and generation_config.json: what is read, and what is refused by name."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen3Config

from holdfast.runtime.errors import ConfigInvalid, ModelUnreadable, SettingsInvalid, UnsupportedArchitecture
from holdfast.runtime.model.config import Biases, LayerKind, ModelConfig, Scales, read_config
from holdfast.runtime.model.families import FAMILIES, NEUTRAL, Family
from holdfast.runtime.model.folder import check_folder
from holdfast.runtime.model.load import load_model
from holdfast.runtime.model.rope import Rope, RopeConfig

LLAMA, PHI3, GEMMA3, GRANITE, MISTRAL = (
    {"architectures": [f"{name}ForCausalLM"], "head_dim": ...}
    for name in ("Llama", "Phi3", "Gemma3", "Granite", "Mistral")
)
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
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


(QWEN3,) = (family for family in FAMILIES if family.model_type == "qwen3")
OTHERS = [family for family in FAMILIES if family is not QWEN3]


TEXT_OF_GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
TEXT_OF_GEMMA3 |= {"text_config": PLAIN}


def read_values(folder: Path, **values) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


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
        family=QWEN3,
        vocab_size=128,
        hidden_size=32,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_size=48,
        activation="silu",
        norm_eps=1e-5,
        max_context=32768,
        kinds=(LayerKind(None, RopeConfig("default", 10000.0, 16)),),
        kind_of=(0, 0),
        biases=Biases(qkv=True, output=True, mlp=False),
        scales=Scales(1.0, 0.25, 1.0, 1.0, None, None),
        tied_head=True,
        eos_ids=(2,),
        dtype=None,
    )


def test_fields_left_out_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, head_dim=...), Qwen3Config()
    assert ours.head_dim == theirs.head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tied_head is theirs.tie_word_embeddings
    assert ours.kinds[0].rope.theta == theirs.rope_parameters["rope_theta"]


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
    assert read(tmp_path, **rope).kinds[0].rope == RopeConfig("default", 1e6, 16)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_stretches_the_context(key: str, tmp_path: Path) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = read(tmp_path, rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=1024)
    assert config.kinds[0].rope == RopeConfig("yarn", 5e5, 16, 4.0, 1024, gain=0.1 * math.log(4) + 1)
    assert config.max_context == 4096
    config = read(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert config.kinds[0].rope == RopeConfig("linear", 1e4, 16, 2.0)


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
        ({"rope_theta": 1}, "rope_theta: a finite number above 1"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor: missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, r"rope_scaling\.low_freq_factor: missing"),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}},
            r"rope_scaling\.high_freq_factor: 1 is not above",
        ),
        (
            {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
            r"rope_scaling\.long_factor: a list of 8 finite",
        ),
        ({"rope_scaling": {**LONGROPE, "short_factor": [0] * 8}}, r"rope_scaling\.short_factor: a list of 8"),
        ({"rope_scaling": {**LONGROPE, "long_factor": 8}}, r"rope_scaling\.long_factor: a list of 8"),
        ({"rope_scaling": {"type": "dynamic", "factor": -1}}, r"rope_scaling\.factor: a finite number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim: dynamic"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, r"rope_scaling\.beta_fast: .* at most 1e\+06"),
        ({"rope_scaling": {**YARN, "beta_slow": 1e-320}}, r"rope_scaling\.beta_slow: .* above 1e-06"),
        ({"rope_theta": 10**400}, "rope_theta: a finite number"),
        ({"head_dim": 0}, "head_dim: a whole number"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}, "rope_scaling": YARN},
            "rope_scaling: contradicts rope_parameters",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers: a list of num_"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 2]}, "no_rope_layers: a list of"),
        ({"architectures": ["InternLM3ForCausalLM"], "bias": True, "mlp_bias": False}, "bias: contradicts"),
        ({**LLAMA, "hidden_size": 30}, "head_dim: missing, and 4 heads do not divide hidden_size 30"),
        ({"layer_types": ["full_attention"]}, "layer_types: a list of num_hidden_layers = 2"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: .* sliding_window is not set",
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: a whole number"),
        ({**PHI3, "partial_rotary_factor": 0.4}, "partial_rotary_factor: 0.4 of a head of 8"),
        ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 of a head of 8"),
        ({**GEMMA3, "final_logit_softcapping": 0}, "final_logit_softcapping: a finite number"),
        ({**GEMMA3, "query_pre_attn_scalar": "a"}, "query_pre_attn_scalar: a finite number"),
        ({**GRANITE, "logits_scaling": 0}, "logits_scaling: a finite number"),
        ({**GRANITE, "residual_multiplier": True}, "residual_multiplier: a finite number"),
    ],
)
def test_fields_out_of_bounds(changes: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=rf"config\.json: {words}"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not served .*LlamaForCausalLM"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "Gemma3nForConditionalGeneration is not"),
        ({"architectures": ["Qwen3ForCausalLM", "X"]}, "Qwen3ForCausalLM, X is not served"),
        ({"architectures": ..., "model_type": "bert"}, "bert is not served"),
        ({"architectures": 3}, "3 is not served"),
        ({"architectures": ...}, "None is not served"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"hidden_act": "relu2"}, "hidden_act: relu2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: chunked_attention"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, r"rope_scaling\.rope_type: ntk is not served"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters: .*the same settings",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: .*whole head"),
        ({"num_local_experts": 8}, "num_local_experts: not served with Qwen3ForCausalLM"),
        ({**GEMMA3, "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: .*an object for each"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention: not served"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: not served"),
        ({**GEMMA3, "vision_config": {"hidden_size": 4}}, "vision_config: not served"),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types: not served"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    changes: dict, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=words) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "hqq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"quantization_config": {"bits": 4}}, "an unnamed method"),
        ({**TEXT_OF_GEMMA3, "quantization_config": {"quant_method": "quark"}}, "quark"),
        (
            {**TEXT_OF_GEMMA3, "text_config": {**PLAIN, "quantization_config": {"quant_method": "quark"}}},
            "quark",
        ),
    ],
)
def test_quantised_weights_are_refused_by_the_name_of_their_method(
    given: dict, method: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedArchitecture, match=rf"config\.json: .*: quantised with {method}, which is not"
    ):
        read(tmp_path, **given)
    with pytest.raises(UnsupportedArchitecture):  # with no weights in the folder
        load_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("file", "values", "method"),
    [
        ("quant_config.json", {"quant_method": "hqq"}, "hqq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_quantised_weights_are_refused_by_a_file_beside(
    file: str, values: dict, method: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(UnsupportedArchitecture, match=rf"{file}: .* quantised with {method}, which"):
        read(tmp_path)


def test_a_quantisation_that_is_null_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, quantization_config=None) == read(tmp_path)


def test_an_adapter_beside_a_model_is_said_to_be_not_used_and_alone_it_is_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text("{}")
    (note,) = read(tmp_path).notes
    assert note.startswith(f"{adapter}: an adapter beside the model is not used")
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ModelUnreadable, match="an adapter without its model: serve its model with --lora-modules"
    ):
        check_folder(tmp_path)


def test_auto_map_is_said_to_be_ignored(tmp_path: Path) -> None:
    assert read(tmp_path).notes == ()
    (note,) = read(
        tmp_path, auto_map={"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"}
    ).notes
    assert note == f"{tmp_path / 'config.json'}: auto_map is ignored: code in a checkpoint is not run"


def test_the_text_part_of_a_published_gemma3(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it has it: most fields are left out."""
    config = read_values(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        eos_token_id=[1, 106],
        torch_dtype="bfloat16",
        vision_config={"model_type": "siglip_vision_model"},
        text_config={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    )
    assert (config.architecture, config.family.model_type) == (
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
    )
    assert (config.layers, config.query_heads, config.kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.vocab_size, config.tied_head, config.dtype) == (262208, True, "bfloat16")
    assert config.eos_ids == (1, 106)
    assert [(kind.window, kind.rope.kind, kind.rope.theta) for kind in config.kinds] == [
        (1024, "default", 1e4),
        (None, "linear", 1e6),
    ]
    (note,) = config.notes
    assert (
        note == "Gemma3ForConditionalGeneration: the text part is served; its vision weights are not loaded"
    )


def test_a_text_part_of_another_family_is_refused(tmp_path: Path) -> None:
    mistral3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    with pytest.raises(UnsupportedArchitecture, match=r"text_config\.model_type: mixtral is not served"):
        read_values(tmp_path, **mistral3, text_config={**PLAIN, "model_type": "mixtral"})
    with pytest.raises(ConfigInvalid, match=r"config\.json: text_config\.hidden_size: missing"):
        read_values(tmp_path, **mistral3, text_config={"model_type": "mistral", "vocab_size": 9})
    with pytest.raises(ConfigInvalid, match=r"config\.json: text_config: an object"):
        read_values(tmp_path, **mistral3, text_config=[1])


def test_the_model_type_serves_where_no_architecture_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=..., model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_a_sliding_window_that_no_layer_uses_is_none(tmp_path: Path) -> None:
    config = read(tmp_path, use_sliding_window=True, max_window_layers=2, layer_types=None)
    assert config.layers == 2


def test_the_stored_type_has_two_names(tmp_path: Path) -> None:
    assert read(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read(tmp_path, dtype="auto").dtype is None
    with pytest.raises(ConfigInvalid, match=r"config\.json: torch_dtype: 'float7' is not served"):
        read(tmp_path, torch_dtype="float7")


def test_a_context_beyond_the_models_own_is_refused_with_both_numbers(tmp_path: Path) -> None:
    own = read(tmp_path).max_context
    assert read_config(tmp_path, own).max_context == own
    with pytest.raises(SettingsInvalid, match=rf"--max-context {own + 1} is more than the {own} tokens that"):
        read_config(tmp_path, own + 1)


def test_what_shapes_kv_is_plain_json_and_knows_the_rotation(tmp_path: Path) -> None:
    first, second = read(tmp_path).shaping_kv(), read(tmp_path, rope_theta=1e6).shaping_kv()
    assert json.loads(json.dumps(first)) == first
    assert first != second
    assert first == read(tmp_path, {"eos_token_id": 5}, max_position_embeddings=64).shaping_kv()


@pytest.mark.parametrize("family", OTHERS, ids=lambda family: family.model_type)
def test_a_family_reads_as_transformers_saves_it(family: Family, tmp_path: Path) -> None:
    theirs = CONFIG_MAPPING[family.model_type](
        **{key: value for key, value in PLAIN.items() if key not in ("head_dim", "architectures")},
        architectures=[family.architecture],
        pad_token_id=None,
    )
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert ours.family is family
    assert (ours.layers, ours.query_heads, ours.kv_heads, ours.mlp_size) == (2, 4, 2, 48)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_context == theirs.max_position_embeddings
    assert ours.tied_head is theirs.tie_word_embeddings


@pytest.mark.parametrize("family", OTHERS, ids=lambda family: family.model_type)
def test_fields_left_out_take_each_familys_defaults(family: Family, tmp_path: Path) -> None:
    theirs = CONFIG_MAPPING[family.model_type]()
    left = ("num_key_value_heads", "head_dim")
    ours = read(
        tmp_path,
        architectures=[family.architecture],
        hidden_size=128,
        num_attention_heads=32,
        **dict.fromkeys(left, ...),
    )
    derived = {"layer_types", "sliding_window", "no_rope_layers", "rope_parameters"}
    same = {
        name: value
        for name, value in family.defaults.items()
        if name not in derived and hasattr(theirs, name)
    }
    assert same == {name: getattr(theirs, name) for name in same}
    assert len(same) >= 4
    assert ours.kv_heads == theirs.num_key_value_heads
    window = getattr(theirs, "sliding_window", None)
    assert {kind.window for kind in ours.kinds} <= {None, window}


def test_null_is_not_the_default_where_it_means_none(tmp_path: Path) -> None:
    gemma2 = {"architectures": ["Gemma2ForCausalLM"]}
    scales = read(tmp_path, **gemma2).scales
    assert (scales.attention_cap, scales.logits_cap) == (50.0, 30.0)
    scales = read(tmp_path, **gemma2, attn_logit_softcapping=None, final_logit_softcapping=None).scales
    assert (scales.attention_cap, scales.logits_cap) == (None, None)
    assert read(tmp_path, **MISTRAL, num_key_value_heads=None).kv_heads == 4
    assert read(tmp_path, **MISTRAL).kinds[0].window == 4096
    assert read(tmp_path, **MISTRAL, sliding_window=None).kinds[0].window is None


def test_a_field_that_a_family_does_not_read_changes_nothing(tmp_path: Path) -> None:
    plain = read(tmp_path, **LLAMA)
    strange = {
        "sliding_window": 7,
        "residual_multiplier": 3.0,
        "attn_logit_softcapping": 9.0,
        "layer_types": [1],
    }
    changed = read(tmp_path, **LLAMA, **strange)
    assert replace(changed, notes=()) == plain
    (note,) = changed.notes  # of the one that changes what transformers says
    assert "sliding_window is no setting of LlamaForCausalLM" in note


def test_layers_slide_by_their_pattern(tmp_path: Path) -> None:
    gemma = {"num_hidden_layers": 7, "sliding_window": 8}
    assert read(tmp_path, **GEMMA3, **gemma).kind_of == (0, 0, 0, 0, 0, 1, 0)
    config = read(tmp_path, architectures=["Gemma2ForCausalLM"], sliding_window_pattern=3, **gemma)
    assert config.kind_of == (0, 1, 0, 1, 0, 1, 0)
    assert [kind.window for kind in config.kinds] == [8, None]
    config = read(tmp_path, num_hidden_layers=5, use_sliding_window=True, max_window_layers=3)
    assert config.kind_of == (0, 0, 0, 1, 1)
    assert [kind.window for kind in config.kinds] == [None, 4096]


def test_old_gemma3_files_name_the_local_rotation_beside(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, **GEMMA3, rope_local_base_freq=5e3, rope_scaling=scaling, num_hidden_layers=6)
    assert [(kind.rope.kind, kind.rope.theta) for kind in old.kinds] == [("default", 5e3), ("linear", 1e6)]


def test_phi3_calls_longrope_by_other_names(tmp_path: Path) -> None:
    factors = {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    for name in ("su", "yarn", "longrope"):
        config = read(tmp_path, **PHI3, rope_scaling={"type": name, **factors}, max_position_embeddings=8192)
        assert config.kinds[0].rope.kind == "longrope"
        assert config.kinds[0].rope.divisors == (2.0,) * 4
        assert config.kinds[0].rope.original == 4096


def test_max_context_limits_what_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert read_config(tmp_path, 100).max_context == 100
    assert read_config(tmp_path, 32768).max_context == 32768
    with pytest.raises(SettingsInvalid, match=r"32769 is more than the 32768 tokens"):
        read_config(tmp_path, 32769)


def test_a_stretch_beyond_all_numbers_is_bounded(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"type": "yarn", "factor": 1e308})
    assert config.max_context == 2**31 - 1


STRANGE = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    10**400,
    1e-320,
    1e308,
    float("nan"),
    "",
    "x",
    [],
    [None],
    {},
    {"x": 1},
)
ROPES: tuple[dict, ...] = (
    {"rope_theta": 1e4},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": YARN},
    {"rope_scaling": {**LONGROPE, "factor": 2.0}},
)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_any_field_may_hold_anything(family: Family, tmp_path: Path) -> None:
    """It reads, or is refused in one line that names the file; nothing else is raised, nor by the angles."""
    plain = {**NEUTRAL, **family.defaults, **PLAIN, "architectures": [family.architecture]}
    ropes = itertools.cycle(ROPES)
    changed = [{**plain, **next(ropes), name: strange} for name in plain for strange in STRANGE]
    for scaling in (rope["rope_scaling"] for rope in ROPES if "rope_scaling" in rope):
        for key, strange in itertools.product(scaling, STRANGE):
            changed.append({**plain, "rope_scaling": {**scaling, key: strange}})
    refusals = []
    for values in changed:
        try:
            kinds = read(tmp_path, **values).kinds
        except ModelUnreadable as error:
            refusals.append(error.message)
        else:
            for kind in kinds:
                Rope(kind.rope, torch.device("cpu"))
    assert 200 < len(refusals) < len(changed) - 50
    assert all(str(tmp_path / "config.json: ") in one and "\n" not in one for one in refusals)
