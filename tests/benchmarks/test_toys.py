"""Toy models: the same seed gives the same weights, projections are scaled, the rest is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from holdfast.benchmarks.toys import SHAPES, make_toy
from holdfast.runtime.model.config import read_config

SINGLE = "model.safetensors"


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (
        load_file(make_toy("tiny", tmp_path / name, seed=seed) / SINGLE)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_projections_are_scaled(tmp_path: Path) -> None:
    plain = load_file(make_toy("tiny", tmp_path / "plain", projection_scale=1.0) / SINGLE)
    scaled = load_file(make_toy("tiny", tmp_path / "scaled", projection_scale=3.0) / SINGLE)
    factors = {name: 3.0 if "_proj" in name else 1.0 for name in plain}
    assert set(factors.values()) == {1.0, 3.0}
    assert all(torch.equal(plain[name] * factor, scaled[name]) for name, factor in factors.items())


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_those_of_the_target_page(name: str, tmp_path: Path) -> None:
    config = read_config(make_toy(name, tmp_path, dtype="bfloat16"))
    shape = (config.layers, config.hidden_size, config.query_heads, config.kv_heads, config.head_dim)
    known = {"toy-9m": (8, 256, 8, 4, 64), "toy-50m": (12, 512, 8, 4, 64), "tiny": (2, 64, 4, 2, 16)}
    assert shape == known[name]
    assert config.tied_head
    assert config.eos_ids == ()
    assert config.dtype == "bfloat16"


def test_shards_and_changes(tmp_path: Path) -> None:
    folder = make_toy("tiny", tmp_path, shard_size="50KB", num_hidden_layers=1, tie_word_embeddings=False)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    config = read_config(folder)
    assert (config.layers, config.tied_head) == (1, False)
