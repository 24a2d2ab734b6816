"""Rotary angles against transformers' own, for each kind that is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from holdfast.runtime.model.config import read_config
from holdfast.runtime.model.rope import Rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128}
FACTORS = {"short_factor": [1.0] * 32, "long_factor": [1 + number / 8 for number in range(32)]}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    "linear, partial": {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.25},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 128},
    "llama3, stated": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn, partial": {**YARN, "partial_rotary_factor": 0.75},
    "yarn, ramp": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn, gain": {**YARN, "attention_factor": 1.5},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, short": {**YARN, "original_max_position_embeddings": 16},
    "longrope": {**LONG, **FACTORS},
    "longrope, factor": {**LONG, **FACTORS, "factor": 16.0},
    "longrope, gain": {**LONG, **FACTORS, "attention_factor": 1.25},
}
ATOL = {"dynamic": 1e-3, "yarn, mscale": 2e-7}  # another order of the same fp32 sums
POSITIONS = {"dynamic": [0, 1, 17, 510, 511]}  # beyond: see test_long_contexts


class OnOneDevice(TorchDispatchMode):
    """Fails where an operation reads or makes a tensor elsewhere than on ``meta``."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, result)):
            assert not isinstance(one, torch.Tensor) or one.device.type == "meta", func
        return result


@pytest.mark.parametrize("kind", list(KINDS))
def test_angles_are_made_on_the_device_without_a_copy_from_the_host(kind: str, tmp_path: Path) -> None:
    """Such a copy, in each step, would make the host wait for the device."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 256, "vocab_size": 300}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 64, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "rope_parameters": KINDS[kind]}))
    device = torch.device("meta")
    rope = Rope(read_config(tmp_path).kinds[0].rope, device)
    positions = torch.zeros(3, dtype=torch.int64, device=device)
    with OnOneDevice():
        cos, _ = rope.angles(positions, torch.bfloat16)
    assert cos.shape == (3, int(64 * KINDS[kind].get("partial_rotary_factor", 1)))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_are_those_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_size=256,
        max_position_embeddings=512,
        rope_parameters=dict(KINDS[kind]),
    )
    theirs.architectures = ["LlamaForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert (
        ours.kinds[0].rope.kind
        == json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"]
    )
    positions = torch.tensor(POSITIONS.get(kind, [0, 1, 17, 511, 2047]))
    cos, sin = Rope(ours.kinds[0].rope, torch.device("cpu")).angles(positions, dtype)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1, dtype=dtype), positions[None])
    torch.testing.assert_close((cos, sin), (expected[0][0], expected[1][0]), rtol=0, atol=ATOL.get(kind, 0))
