"""The model families we compute, as data: what sets each apart, and its configuration's defaults.

A family is a row in a table; nothing branches on its name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as ``config.json`` names it.

    ``qk_norm``: queries and keys are normed per head before the rotation.
    ``defaults``: values of fields that its ``config.json`` may leave out, those of its transformers class.
    """

    architecture: str
    model_type: str
    qk_norm: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm=True,
        defaults={
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "rope_theta": 10000.0,
        },
    ),
)
