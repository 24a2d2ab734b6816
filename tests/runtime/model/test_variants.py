"""Variants of every family against transformers: equal, refused, or warned of at start; none differs silently.

Each is a tiny random model that transformers made and wrote. A prompt in chunks and greedy tokens over paged KV
are compared with transformers in fp32, past windows, past the trained length and past switch lengths.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from holdfast.benchmarks.toys import FAMILIES, make_toy
from holdfast.runtime.errors import RuntimeFault
from holdfast.runtime.model import families
from holdfast.runtime.model.config import read_config
from holdfast.tests.runtime.model.feeding import Outcome, outcome

Fields = dict[str, Any]

WEIGHTS, METADATA = "model.safetensors", {"format": "pt"}
LENGTH, NEW = 40, 12
TRAINED = 32
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [FULL, SLIDING]
ORIGINAL = {"original_max_position_embeddings": TRAINED}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **ORIGINAL,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0],
    **ORIGINAL,
}
LONG_PHI3 = {
    **LONG,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """``changes``: fields for the transformers class; ``written``: of the file afterwards (``...``: without).

    ``kind``: equal, refused or warned; ``words``: a pattern of the refusal or the note. ``short``: the context
    in which a warned variant is equal. ``weights``: changes the stored tensors.
    """

    name: str
    family: str
    changes: Fields = field(default_factory=dict)
    written: Fields = field(default_factory=dict)
    kind: str = "equal"
    words: str = ""
    short: int | None = None
    length: int = LENGTH
    weights: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None


def equal(name: str, family: str, written: Fields | None = None, **changes: Any) -> Variant:
    return Variant(name, family, changes, written or {})


def refused(name: str, words: str, family: str, written: Fields | None = None, **changes: Any) -> Variant:
    return Variant(name, family, changes, written or {}, "refused", words)


def warned(
    name: str,
    words: str,
    short: int,
    family: str,
    written: Fields | None = None,
    length: int = LENGTH,
    **changes: Any,
) -> Variant:
    return Variant(name, family, changes, written or {}, "warned", words, short, length)


def head(scale: float | None) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Stores a head: the embedding times ``scale``; None: removes it."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if scale is None:
            return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        shifted = tensors["model.embed_tokens.weight"].roll(1, 0) if scale != 1 else None
        copy = tensors["model.embed_tokens.weight"] if shifted is None else shifted * scale
        return {**tensors, "lm_head.weight": copy.clone()}

    return change


def as_types(*dtypes: torch.dtype) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Stores the tensors in these types in turn."""
    return lambda tensors: {
        name: tensor.to(dtypes[number % len(dtypes)]) for number, (name, tensor) in enumerate(tensors.items())
    }


ROPES = [
    equal("theta", "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    equal("no settings", "llama", {"rope_parameters": ...}),
    equal("theta beside", "llama", {"rope_parameters": ..., "rope_theta": 5e5}),
    equal("null scaling", "qwen2", {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None}),
    equal("linear", "llama", rope_parameters=LINEAR, max_position_embeddings=TRAINED * 4),
    equal(
        "linear, old",
        "llama",
        {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    equal("llama3", "llama", rope_parameters=LLAMA3),
    equal(
        "llama3, stated", "llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": ...}}
    ),
    equal("llama3, old", "llama", {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    equal("yarn", "qwen3", rope_parameters=YARN, max_position_embeddings=TRAINED),
    equal("yarn, gain", "llama", rope_parameters={**YARN, "attention_factor": 1.5}),
    equal("yarn, mscale", "llama", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}),
    equal(
        "yarn, ramp", "llama", rope_parameters={**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False}
    ),
    equal("yarn, original beside", "granite", {"original_max_position_embeddings": 64}, rope_parameters=YARN),
    equal("dynamic, within", "llama", rope_parameters={**DYNAMIC, "factor": 1.0}, max_position_embeddings=64),
    warned(
        *("dynamic, beyond", f"dynamic .* beyond {TRAINED} tokens .* --max-context {TRAINED}$", TRAINED),
        "llama",
        rope_parameters=DYNAMIC,
        max_position_embeddings=TRAINED,
    ),
    equal(
        "longrope, short",
        "llama",
        rope_parameters={**LONG, "original_max_position_embeddings": 64},
        max_position_embeddings=64,
    ),
    warned(
        *(
            "longrope, beyond",
            f"longrope: all .* up to {TRAINED} tokens; .*--max-context {TRAINED}$",
            TRAINED,
        ),
        "llama",
        length=24,
        rope_parameters={**LONG, "factor": 4.0},
        max_position_embeddings=TRAINED * 4,
    ),
    warned(
        *("phi3 longrope", f"longrope: all .* up to {TRAINED} tokens; .*--max-context {TRAINED}$", TRAINED),
        "phi3",
        length=24,
        rope_parameters=LONG_PHI3,
        max_position_embeddings=TRAINED * 4,
        **ORIGINAL,
    ),
    warned(
        *("phi3 su, old", f"longrope: .*--max-context {TRAINED}$", TRAINED),
        "phi3",
        {"rope_parameters": ..., "rope_scaling": {**LONG_PHI3, "rope_type": ..., "type": "su"}},
        length=24,
        rope_parameters=LONG_PHI3,
        max_position_embeddings=TRAINED * 4,
        **ORIGINAL,
    ),
    equal("phi3 whole rotary", "phi3", partial_rotary_factor=1.0, tie_word_embeddings=False),
    equal("gemma3 linear", "gemma3_text", rope_parameters={FULL: LINEAR, SLIDING: {"rope_type": "default"}}),
    equal(
        "gemma3, old",
        "gemma3_text",
        {
            "rope_parameters": ...,
            "rope_local_base_freq": 5e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    warned(
        *("olmo3 longrope below", f"longrope: .*--max-context {TRAINED}$", TRAINED),
        "olmo3",
        length=20,
        rope_parameters={FULL: {"rope_type": "default"}, SLIDING: {**LONG, "factor": 4.0}},
        max_position_embeddings=TRAINED * 4,
    ),
    equal(
        "olmo3-original-beside",
        "olmo3",
        {"original_max_position_embeddings": 64},
        rope_parameters={FULL: YARN, SLIDING: {"rope_type": "default"}},
    ),
    equal("olmo3 yarn", "olmo3", rope_parameters={FULL: YARN, SLIDING: {"rope_type": "default"}}),
    equal("olmo3 yarn, old", "olmo3", {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": YARN}),
    refused(
        "gemma3, older",
        r"rope_scaling\.type: versions",
        "gemma3_text",
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 8.0}},
    ),
    refused(
        "olmo3 ramp",
        r"full_attention\.truncate: false is not served",
        "olmo3",
        rope_parameters={FULL: {**YARN, "truncate": False}, SLIDING: {"rope_type": "default"}},
    ),
    refused(
        "ministral3 dynamic",
        "rope_type: dynamic is not served",
        "ministral3",
        rope_parameters={**DYNAMIC, "llama_4_scaling_beta": 0.1, **ORIGINAL},
    ),
    refused("olmo3 theta, old", "rope_theta: versions", "olmo3", {"rope_parameters": ..., "rope_theta": 1e4}),
    refused("ntk", "rope_type: ntk is not served", "llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}),
    refused("qwen3 partial", "whole head", "qwen3", {"partial_rotary_factor": 0.5}),
    refused("flat for two types", "an object for each type", "gemma3_text", {"rope_parameters": LINEAR}),
]
WINDOWS = [
    equal("mistral window", "mistral"),
    equal("mistral, no window", "mistral", sliding_window=None, tie_word_embeddings=False),
    equal("a window beyond the context", "mistral", sliding_window=64, max_position_embeddings=64),
    equal("qwen2 unused window", "qwen2", sliding_window=8, use_sliding_window=False),
    equal("qwen2 upper layers", "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    equal("qwen3 by layers", "qwen3", use_sliding_window=True, sliding_window=20, layer_types=MIXED),
    equal("gemma2 pattern", "gemma2"),
    equal("gemma2 by layers", "gemma2", layer_types=MIXED * 2),
    equal(
        "gemma3 pattern",
        "gemma3_text",
        {"layer_types": ..., "_sliding_window_pattern": ...},
        sliding_window_pattern=6,
    ),
    equal("gemma3 by layers", "gemma3_text", layer_types=MIXED * 2),
    equal("olmo3 pattern", "olmo3", {"layer_types": ...}),
    equal("olmo3 by layers", "olmo3", layer_types=MIXED * 2),
    equal("ministral by layers", "ministral"),
    equal("ministral, all", "ministral", {"layer_types": ...}, layer_types=None),
    equal("ministral3 window", "ministral3", sliding_window=24),
    equal("smollm3 window", "smollm3", use_sliding_window=True, sliding_window=12),
    equal("phi3 window", "phi3", sliding_window=9),
    refused("a window of one", "sliding_window: a whole number from 2", "mistral", sliding_window=1),
    refused("mistral by layers", "layer_types: not served", "mistral", {"layer_types": MIXED}),
    refused(
        "chunked", "layer_types: chunked_attention", "qwen3", {"layer_types": [FULL, "chunked_attention"]}
    ),
    warned(
        *("llama window", "sliding_window is no setting of LlamaForCausalLM.*--max-context 20$", 20),
        "llama",
        {"sliding_window": 20},
    ),
]
LAYERS = [
    equal("llama biases", "llama", attention_bias=True, mlp_bias=True),
    equal("llama attention bias", "llama", attention_bias=True),
    equal("qwen3 bias", "qwen3", attention_bias=True),
    equal("seed_oss", "seed_oss"),
    equal("seed_oss biases", "seed_oss", attention_out_bias=True, mlp_bias=True),
    equal("seed_oss, none", "seed_oss", attention_bias=False),
    equal("internlm3", "internlm3"),
    equal("internlm3 biases", "internlm3", attention_bias=True, mlp_bias=True),
    equal(
        "internlm3, its own names",
        "internlm3",
        {
            "architectures": ["InternLM3ForCausalLM"],
            "attention_bias": ...,
            "mlp_bias": ...,
            "qkv_bias": True,
            "bias": True,
        },
        attention_bias=True,
        mlp_bias=True,
    ),
    equal("gemma bias", "gemma", attention_bias=True),
    equal("olmo2 bias", "olmo2", attention_bias=True, num_key_value_heads=4),
    equal("granite biases", "granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    equal("smollm3", "smollm3"),
    equal("smollm3 biases", "smollm3", attention_bias=True, mlp_bias=True),
    equal("smollm3 every second", "smollm3", {"no_rope_layers": ...}, no_rope_layer_interval=2),
    equal("smollm3 by layers", "smollm3", no_rope_layers=[0, 1, 1, 0]),
    equal("one kv head", "llama", num_key_value_heads=1),
    equal("no groups", "qwen2", num_key_value_heads=4),
    equal("kv heads left out", "olmo2", {"num_key_value_heads": ...}, num_key_value_heads=4),
    equal("head_dim 24", "llama", head_dim=24),
    equal("head_dim 8", "ministral3", head_dim=8),
    equal("head_dim left out", "mistral", {"head_dim": ...}, head_dim=16),
    equal("gelu", "llama", hidden_act="gelu_pytorch_tanh"),
    equal("gemma, old gelu", "gemma", {"hidden_act": "gelu"}),
    equal("gemma2 caps", "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    equal("gemma2, no caps", "gemma2", attn_logit_softcapping=None, final_logit_softcapping=None),
    equal("gemma3, no cap", "gemma3_text", final_logit_softcapping=None),
    equal("gemma3 scale", "gemma3_text", query_pre_attn_scalar=64, sliding_window_pattern=2),
    equal(
        "granite scales", "granite", attention_multiplier=0.4, embedding_multiplier=2, residual_multiplier=0.3
    ),
    equal("ministral3 queries", "ministral3"),
    equal(
        "ministral3, two originals",
        "ministral3",
        {"original_max_position_embeddings": 64},
        rope_parameters={"rope_type": "default", "llama_4_scaling_beta": 0.1, **ORIGINAL},
    ),
    equal("ministral3, settings left out", "ministral3", {"rope_parameters": ...}),
    equal("epsilon", "olmo2", rms_norm_eps=0.5),
    refused("gelu, exact", "hidden_act: gelu is not served", "llama", hidden_act="gelu"),
    refused(
        "gemma3 cap", "attn_logit_softcapping: not served", "gemma3_text", {"attn_logit_softcapping": 9.0}
    ),
    refused("both ways", "use_bidirectional_attention", "gemma3_text", {"use_bidirectional_attention": True}),
    refused("not causal", "is_causal: false", "llama", {"is_causal": False}),
    refused("layers that differ", "per_layer_config", "llama", {"per_layer_config": {"0": {"head_dim": 8}}}),
    refused("two names", "LlamaForCausalLM with model_type mistral", "llama", {"model_type": "mistral"}),
]
STORED = [
    Variant("tied, stored twice", "llama", weights=head(1)),
    Variant("tied, but not", "llama", weights=head(0.7)),
    Variant("tied, but not; scaled", "gemma2", weights=head(0.7)),
    equal("untied", "qwen3", tie_word_embeddings=False),
    equal("tie left out", "gemma", {"tie_word_embeddings": ...}),
    equal("tie left out, two", "smollm3", {"tie_word_embeddings": ...}),
    Variant(
        *(
            "untied, no head",
            "llama",
            {"tie_word_embeddings": False},
            {},
            "refused",
            "lm_head.weight: missing",
        ),
        weights=head(None),
    ),
    equal("shards", "phi3", shard_size="60KB", sliding_window=20),
    Variant("bf16", "olmo2", weights=as_types(torch.bfloat16)),
    Variant("fp16", "gemma", weights=as_types(torch.float16)),
    Variant("two types", "llama", weights=as_types(torch.bfloat16, torch.float32)),
    refused("hqq", "quantised with hqq", "llama", {"quantization_config": {"quant_method": "hqq"}}),
]
VARIANTS = [*ROPES, *WINDOWS, *LAYERS, *STORED]


def write(variant: Variant, folder: Path) -> None:
    """Write a variant as a model folder."""
    make_toy("tiny", folder, family=variant.family, noise=0.3, **variant.changes)
    rewrite(folder, variant.written)
    if variant.weights is not None:
        tensors = variant.weights(load_file(folder / WEIGHTS))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / WEIGHTS, METADATA)


def rewrite(folder: Path, written: Fields) -> None:
    """Change fields of ``config.json``; ``...`` removes one."""
    path = folder / "config.json"
    path.write_text(json.dumps(without({**json.loads(path.read_text()), **written})))


def without(values: Fields) -> Fields:
    return {
        name: without(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not ...
    }


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_no_variant_differs_silently(variant: Variant, tmp_path: Path) -> None:
    write(variant, tmp_path)
    found = outcome(tmp_path, variant.length, NEW)
    assert found.kind == {"warned": "different"}.get(variant.kind, variant.kind), found
    assert re.search(variant.words, found.said), found
    assert "\n" not in found.said
    if variant.short is not None:
        served = outcome(tmp_path, variant.short - NEW, NEW, max_context=variant.short)
        assert served == Outcome("equal")


def test_the_variants_are_many_and_of_every_family() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) >= 72
    assert {variant.family for variant in VARIANTS} == {family.model_type for family in families.FAMILIES}


def written_inside(
    folder: Path, family: str, text_family: str, names: str = "", tied: bool = True, **changes: Any
) -> Path:
    """Write a multimodal checkpoint around the toy of ``text_family``. ``names``: how those of its decoder
    begin, instead of ``language_model.model.``.
    """
    changes = {"final_logit_softcapping": None, **changes} if family == "gemma3" else changes
    make_toy("tiny", folder, family=text_family, noise=0.3, tie_word_embeddings=tied, **changes)
    alone = AutoModelForCausalLM.from_pretrained(folder)
    vision = {"model_type": "siglip_vision_model" if family == "gemma3" else "pixtral"}
    vision |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        family, text_config=alone.config.to_dict(), vision_config=vision, tie_word_embeddings=tied
    )
    whole = AutoModelForImageTextToText.from_config(config)
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    whole.save_pretrained(folder, max_shard_size="150KB" if names else "5GB")
    for shard in folder.glob("model*.safetensors") if names else ():
        stored = load_file(shard)
        save_file({renamed(name, names): one for name, one in stored.items()}, shard, METADATA)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        placed = json.loads(index.read_text())["weight_map"]
        map_ = {renamed(name, names): shard for name, shard in placed.items()}
        index.write_text(json.dumps({"metadata": {}, "weight_map": map_}))
        (folder / WEIGHTS).unlink(missing_ok=True)
    return folder


def renamed(name: str, names: str) -> str:
    return name.replace("language_model.model.", names).replace("language_model.lm_head", "lm_head")


def test_a_cap_that_transformers_leaves_out_of_a_multimodal_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = written_inside(tmp_path, "gemma3", "gemma3_text", final_logit_softcapping=5.0)
    assert re.search(
        r"text_config\.final_logit_softcapping: not served with Gemma3ForC", outcome(folder).said
    )


def seeing(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("names", ["", "model.language_model."], ids=["old names", "new names in shards"])
@pytest.mark.parametrize(
    ("family", "text"), [("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")]
)
def test_the_text_part_of_a_multimodal_checkpoint(
    family: str, text: str, names: str, tied: bool, tmp_path: Path
) -> None:
    folder = written_inside(tmp_path, family, text, names, tied)
    found = outcome(folder, LENGTH, NEW, reference=seeing)
    assert found.kind == "equal", found
    assert found.said.endswith("the text part is served; its vision weights are not loaded")


def test_a_published_mistral3_does_not_say_that_its_head_is_its_own(tmp_path: Path) -> None:
    folder = written_inside(tmp_path, "mistral3", "mistral", tied=False)
    rewrite(folder, {"tie_word_embeddings": ...})
    found = outcome(folder, LENGTH, NEW, reference=seeing)
    assert (found.kind, "|" in found.said) == ("equal", False)


def test_all_multimodal_architectures_are_tried() -> None:
    assert [each.model_type for each in families.MULTIMODAL] == ["gemma3", "mistral3"]


def test_a_multimodal_checkpoint_without_a_part_of_the_text_is_refused(tmp_path: Path) -> None:
    folder = written_inside(tmp_path, "gemma3", "gemma3_text")
    tensors = load_file(folder / WEIGHTS)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, folder / WEIGHTS, METADATA)
    assert re.search(r"model\.norm\.weight: missing", outcome(folder).said)
    doubled = ("language_model.model.norm.weight", "model.language_model.norm.weight")
    save_file({**tensors, **{name: torch.ones(64) for name in doubled}}, folder / WEIGHTS, METADATA)
    assert re.search(r"norm\.weight: also in .*, as .*norm\.weight", outcome(folder).said)
    save_file(
        {**tensors, doubled[0]: torch.ones(64), "audio.weight": torch.ones(4)}, folder / WEIGHTS, METADATA
    )
    assert re.search(r"audio\.weight: config\.json asks for no such tensor", outcome(folder).said)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_llama_with_partial_rotary(share: float, tmp_path: Path) -> None:
    """The Llama of transformers ignores the field; its Phi-3 is a Llama that reads it."""
    make_toy("tiny", tmp_path, noise=0.3, family="llama")
    rewrite(tmp_path, {"partial_rotary_factor": share})
    found = outcome(tmp_path, LENGTH, NEW, reference=as_phi3)
    assert found.kind == "equal", found
    assert re.search(r"partial_rotary_factor: transformers' LlamaForCausalLM does not read it", found.said)
    assert outcome(tmp_path, LENGTH, NEW).kind == "different"


def as_phi3(folder: Path) -> Any:
    """A Llama's weights and settings as transformers' Phi-3."""
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    theirs = AutoConfig.for_model("phi3", **config, sliding_window=None)
    model = AutoModelForCausalLM.from_config(theirs).eval()
    tensors = load_file(folder / WEIGHTS)
    for layer in range(theirs.num_hidden_layers):
        for whole, parts in (("self_attn.qkv", "self_attn.q k v"), ("mlp.gate_up", "mlp.gate up")):
            at, names = parts.split(".")
            stored = (tensors.pop(f"model.layers.{layer}.{at}.{name}_proj.weight") for name in names.split())
            tensors[f"model.layers.{layer}.{whole}_proj.weight"] = torch.cat(tuple(stored))
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    return model


SEEDS = 40


def test_random_configurations_do_not_differ_silently(tmp_path: Path) -> None:
    """Of all families, with fields drawn at random, read by the family or not, in old and new spelling."""
    kinds = []
    for seed in range(SEEDS):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        family = draw.choice(sorted(FAMILIES))
        changes, written = drawn(draw, family)
        try:
            make_toy("tiny", folder, family=family, noise=0.3, **changes)
        except Exception:
            continue  # transformers makes no such model
        rewrite(folder, written)
        try:
            served = read_config(folder).max_context
        except RuntimeFault:
            served = LENGTH + NEW
        found = outcome(folder, max(1, min(LENGTH, served - NEW)), NEW)
        kinds.append(found.kind)
        assert found.kind != "different" or "; as it does: " in found.said, (seed, found)
    assert kinds.count("equal") > SEEDS / 4
    assert "refused" in kinds


def drawn(draw: random.Random, family: str) -> tuple[Fields, Fields]:
    """Fields for the class of a family, and of its file afterwards."""
    heads, layers = draw.choice([2, 4, 8]), draw.choice([1, 2, 3, 5])
    changes = {
        "num_hidden_layers": layers,
        "hidden_size": draw.choice([32, 48, 64]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([count for count in (1, 2, 4, 8) if heads % count == 0]),
        "head_dim": draw.choice([8, 16, 32]),
        "max_position_embeddings": draw.choice([32, 64, 128, 256]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-6, 1e-3]),
        "seed": draw.randrange(1000),
        "layer_types": None,
        **{name: draw.choice(values) for name, values in ANYWHERE.items() if draw.random() < 0.25},
    }
    if draw.random() < 0.3:
        changes["layer_types"] = [draw.choice(MIXED) for _ in range(layers)]
    if draw.random() < 0.15:
        changes["no_rope_layers"] = [draw.choice([0, 1]) for _ in range(layers)]
    rotated = int(changes["head_dim"] * changes.get("partial_rotary_factor", 1))
    if draw.random() < 0.6:
        one, other = (drawn_rope(draw, rotated, family) for _ in range(2))
        changes["rope_parameters"] = {FULL: one, SLIDING: other} if family in LOCAL else one
    return changes, drawn_file(draw, rotated, family)


def drawn_file(draw: random.Random, rotated: int, family: str) -> Fields:
    """Fields in the file: old spellings, and fields that are left out."""
    written: Fields = {name: ... for name in ANYWHERE if draw.random() < 0.04}
    written |= {name: draw.choice(values) for name, values in ANYWHERE.items() if draw.random() < 0.04}
    if draw.random() < 0.4:
        written |= {"rope_parameters": ..., "rope_theta": draw.choice([1e4, 5e5, 1e6, ...])}
        if draw.random() < 0.6:
            settings = drawn_rope(draw, rotated, family)
            kind = settings.pop("rope_type")
            written["rope_scaling"] = {**settings, draw.choice(["type", "rope_type"]): kind}
    return written


def drawn_rope(draw: random.Random, rotated: int, family: str) -> Fields:
    """Rotary settings of any kind."""
    kind = draw.choice(["default", "default", "linear", "dynamic", "yarn", "llama3", "longrope"])
    settings: Fields = {"rope_type": kind}
    if draw.random() < 0.7:
        settings["rope_theta"] = draw.choice([1e3, 1e4, 5e5, 1e6])
    if kind not in ("default", "longrope") or draw.random() < 0.3:
        settings["factor"] = draw.choice([0.5, 1.0, 2.0, 8.0])
    if draw.random() < 0.8:
        settings["original_max_position_embeddings"] = draw.choice([16, 32, 64, 128])
    if kind == "longrope":
        settings |= {f"{name}_factor": [1 + draw.random() * 3] * (rotated // 2) for name in ("short", "long")}
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if kind == "yarn":
        settings |= {name: draw.choice(values) for name, values in OF_YARN.items() if draw.random() < 0.3}
    if family == "ministral3":
        settings |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": TRAINED}
    return settings


LOCAL = ("gemma3_text", "olmo3")
OF_YARN: dict[str, list[Any]] = {
    "beta_fast": [16, 32.0],
    "beta_slow": [1, 2.0],
    "mscale": [0.7, 1.0],
    "mscale_all_dim": [0.5, 1.0],
    "attention_factor": [1.2],
    "truncate": [True, False],
}
ANYWHERE: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "attention_out_bias": [True, False],
    "sliding_window": [None, 1, 8, 20, 31, 64],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 30],
    "sliding_window_pattern": [1, 2, 3],
    "no_rope_layer_interval": [1, 2, 3],
    "partial_rotary_factor": [0.5, 0.75, 1.0],
    "query_pre_attn_scalar": [8, 256],
    "attn_logit_softcapping": [None, 5.0],
    "final_logit_softcapping": [None, 5.0],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh"],
    "hidden_activation": ["silu", "gelu_pytorch_tanh"],
    "attention_multiplier": [0.25, 1],
    "embedding_multiplier": [0.25, 2],
    "residual_multiplier": [0.25, 1],
    "logits_scaling": [0.25, 2],
    "original_max_position_embeddings": [32, 64],
    "rope_local_base_freq": [5e3],
}
