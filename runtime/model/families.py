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

    ``before_*``: norms of a sublayer's input; ``after_*``: of what it adds to the residual.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as ``config.json`` names it.

    ``defaults``: fields that ``config.json`` may omit, with the values of the transformers class.
    ``fixed``: fields of `NEUTRAL` that the family does not read, but with another constant.
    ``unserved``: fields that the decoder does not compute; refused unless absent, null or false.
    ``norms``: which norms a layer has. ``norm_offset``: added to all stored norm weights.
    ``qk_norm``: whether queries and keys are normed before the rotation, per head or over the whole token.
    ``qkv_bias``: q, k and v have biases whatever ``attention_bias`` says.
    ``fused``: the checkpoint has q, k, v in one matrix and gate, up in another.
    ``activation``: the field with its name. ``scaled_embedding``: times the square root of the hidden size.
    ``local_rope``: layers with a window have their own rotary settings.
    ``rope_names``: other names for kinds of rotary settings.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()
    norms: Norms = Norms()
    norm_offset: float = 0.0
    qk_norm: Literal["none", "head", "whole"] = "none"
    qkv_bias: bool = False
    fused: bool = False
    activation: str = "hidden_act"
    scaled_embedding: bool = False
    local_rope: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)


NEUTRAL: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": None,
    "max_window_layers": 0,
    "sliding_window_pattern": 0,
    "layer_types": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Fields that only some families read; the others always compute with these values."""

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_QWEN = _COMMON | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = _COMMON | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_SANDWICH = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        defaults=_COMMON | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        defaults=_QWEN,
        qkv_bias=True,
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
        defaults=_COMMON
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        unserved=("layer_types",),
    ),
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults=_COMMON
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
        },
        unserved=("layer_types",),
        fused=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults=_GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
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
        local_rope=True,
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": False},
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="whole",
    ),
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        defaults=_COMMON
        | {
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
)
