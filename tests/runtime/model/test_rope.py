"""Rotary angles against transformers' own, for each kind that is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from holdfast.runtime.model.config import read_config
from holdfast.runtime.model.rope import make_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn, ramp": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn, gain": {**YARN, "attention_factor": 1.5},
    "yarn, short": {**YARN, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_those_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = Qwen3Config(
        num_hidden_layers=1, head_dim=64, max_position_embeddings=512, rope_parameters=dict(KINDS[kind])
    )
    theirs.architectures = ["Qwen3ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert (
        ours.rope.kind == json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"]
    )
    positions = torch.tensor([0, 1, 17, 511, 2047])
    cos, sin = make_rope(ours.rope, ours.head_dim, torch.device("cpu")).angles(positions, dtype)
    expected = Qwen3RotaryEmbedding(theirs)(torch.zeros(1, dtype=dtype), positions[None])
    torch.testing.assert_close((cos, sin), (expected[0][0], expected[1][0]), rtol=0, atol=0)
