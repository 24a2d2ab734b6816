"""The served model families, as data: how each differs, and the defaults of its configuration.

A family is one entry of `FAMILIES`; no code branches on its name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms in the checkpoint; None for a norm that the layer does not have.

    ``before_*``: the norm of a sublayer's input. ``after_*``: the norm of a sublayer's output, before it is
    added to the residual.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as ``config.json`` names it.

    ``defaults``: fields that ``config.json`` may omit, with the values of the transformers class.
    ``fixed``: values of fields that the family does not read, where they differ from `NEUTRAL`.
    ``unserved``: fields that the decoder does not compute; refused unless absent, null or false.
    ``norms``: which norms a layer has. ``norm_offset``: added to all stored norm weights.
    ``qk_norm``: whether queries and keys are normed before the rotation, per head or over the whole token.
    ``biases``: the names of the fields that say whether q, k and v, the output, and the MLP have a bias.
    ``fused``: the checkpoint has q, k, v in one matrix and gate, up in another.
    ``activation``: the name of the field with the activation function. ``scaled_embedding``: the embedding is
    multiplied by the square root of the hidden size.
    ``local_rope``: the field with the theta of layers with a window; None: all layers have the same theta.
    ``scaled_queries``: queries grow with their position, by a field of the rotary settings.
    ``unrotated_slide``: if the model has a window, it applies to the layers without rotary positions.
    ``partial_note``: what to tell an operator if only a part of each head is rotated; empty: nothing.
    ``rope_names``, ``activation_names``, ``field_names``: from another name that a checkpoint may use, for a
    kind of rotary settings, an activation or a field, to the usual one.
    ``also_named``: further names in ``architectures`` that stand for this family if ``model_type`` is its own.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()
    norms: Norms = Norms()
    norm_offset: float = 0.0
    qk_norm: Literal["none", "head", "whole"] = "none"
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    fused: bool = False
    activation: str = "hidden_act"
    scaled_embedding: bool = False
    local_rope: str | None = None
    scaled_queries: bool = False
    unrotated_slide: bool = False
    partial_note: str = ""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    activation_names: Mapping[str, str] = field(default_factory=dict)
    field_names: Mapping[str, str] = field(default_factory=dict)
    also_named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A multimodal architecture with a text decoder inside. Only the decoder is served.

    ``text_types``: the model types that its ``text_config`` may have; the first is the default. ``unserved``:
    fields of ``text_config`` that are refused here although the decoder's family has them.
    """

    architecture: str
    model_type: str
    text_types: tuple[str, ...]
    unserved: tuple[str, ...] = ()


NEUTRAL: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_out_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": None,
    "max_window_layers": 0,
    "sliding_window_pattern": 0,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Fields that only some families read, with the values that all other families compute with."""


def _reading(*names: str, **own: Any) -> dict[str, Any]:
    """The defaults of a family that reads the fields ``names`` of `NEUTRAL`: those of all families, the values
    there, and its own."""
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
    return {**common, **{name: NEUTRAL[name] for name in names}, **own}


_QWEN = _reading(
    "layer_types",
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)
_GEMMA = _reading(
    *("attention_bias", "layer_types"),
    hidden_activation="gelu_pytorch_tanh",
    num_key_value_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window=4096,
)
_SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        defaults=_reading(
            "attention_bias", "mlp_bias", max_position_embeddings=2048, partial_rotary_factor=1.0
        ),
        partial_note="transformers' LlamaForCausalLM does not read it and rotates whole heads; as it does:"
        " remove the field",
    ),
    Family(
        architecture="InternLM3ForCausalLM",
        model_type="internlm3",
        defaults=_reading(
            *("attention_bias", "mlp_bias"),
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=32768,
        ),
        biases=("attention_bias", "mlp_bias", "mlp_bias"),
        field_names={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        also_named=("LlamaForCausalLM",),
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        defaults=_reading(
            *("attention_bias", "mlp_bias", "sliding_window", "layer_types", "no_rope_layers"),
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rope_theta=2e6,
            tie_word_embeddings=True,
            use_sliding_window=False,
            no_rope_layer_interval=4,
        ),
        unrotated_slide=True,
    ),
    Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        defaults=_reading(
            *("attention_out_bias", "mlp_bias"),
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=524288,
            attention_bias=True,
        ),
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults=_QWEN,
        fixed={"qkv_bias": True},
        biases=("qkv_bias", "attention_bias", "mlp_bias"),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm="head",
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults=_reading(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
        unserved=("layer_types",),
    ),
    Family(
        architecture="MinistralForCausalLM",
        model_type="ministral",
        defaults=_reading(
            "layer_types", num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096
        ),
    ),
    Family(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        defaults=_reading(
            "sliding_window",
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            max_position_embeddings=262144,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        unserved=("layer_types",),
        scaled_queries=True,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults=_reading(
            "sliding_window",
            rms_norm_eps=1e-5,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            partial_rotary_factor=1.0,
        ),
        unserved=("layer_types",),
        fused=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    Family(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        defaults=_reading(
            "attention_bias",
            hidden_act="gelu_pytorch_tanh",
            num_key_value_heads=16,
            head_dim=256,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        norm_offset=1.0,
        scaled_embedding=True,
        activation_names={"gelu": "gelu_pytorch_tanh"},
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults=_GEMMA
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed={"sliding_window_pattern": 2},
        norms=_SANDWICH,
        norm_offset=1.0,
        activation="hidden_activation",
        scaled_embedding=True,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults=_GEMMA
        | {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        unserved=("attn_logit_softcapping",),
        norms=_SANDWICH,
        norm_offset=1.0,
        qk_norm="head",
        activation="hidden_activation",
        scaled_embedding=True,
        local_rope="rope_local_base_freq",
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        defaults=_reading("attention_bias", rms_norm_eps=1e-5, max_position_embeddings=2048),
        norms=_AFTER,
        qk_norm="whole",
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        defaults=_reading(
            *("attention_bias", "layer_types"),
            rms_norm_eps=1e-5,
            max_position_embeddings=2048,
            rope_theta=500000.0,
            sliding_window=4096,
        ),
        fixed={"sliding_window_pattern": 4, "rope_local_base_freq": 500000.0},
        norms=_AFTER,
        qk_norm="whole",
        local_rope="rope_local_base_freq",
    ),
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        defaults=_reading(
            *("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
            max_position_embeddings=2048,
            attention_multiplier=1.0,
        ),
    ),
)

TEXT_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""From the prefix of a decoder tensor's name in a multimodal checkpoint to its prefix in a checkpoint of the
decoder alone; the first prefix that fits is used."""
PICTURES = tuple(
    f"{at}{part}." for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
"""Prefixes of tensors of the other parts of a multimodal checkpoint."""

MULTIMODAL: tuple[Multimodal, ...] = (
    Multimodal(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        text_types=("gemma3_text",),
        unserved=("final_logit_softcapping",),
    ),
    Multimodal(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        text_types=("mistral", "ministral3"),
    ),
)
"""All may omit ``tie_word_embeddings`` beside ``text_config``: it is true then."""
