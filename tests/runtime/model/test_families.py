"""Every family against transformers: equal logits in fp32, alone and in batches, across windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.benchmarks.toys import FAMILIES, make_toy
from holdfast.runtime.model import families
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.tests.runtime.model.feeding import Fed, prompts, theirs, transformers_model

TYPES = [family.model_type for family in families.FAMILIES]
ALTERNATING = ["full_attention", "sliding_attention"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 24}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "layer_types": ALTERNATING}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"head_dim": 32, "tie_word_embeddings": False}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 1.0, "tie_word_embeddings": False}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "attention_bias": True}),
    ("gemma2", {"layer_types": ALTERNATING * 2, "attn_logit_softcapping": None}),
    ("gemma3_text", {"layer_types": ALTERNATING * 2, "final_logit_softcapping": None}),
    ("gemma3_text", {"num_hidden_layers": 3, "sliding_window": 2, "tie_word_embeddings": False}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
]
TELLING: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 40}),
    ("phi3", {"partial_rotary_factor": 1.0}),
    ("gemma2", {"attn_logit_softcapping": 20.0}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma2", {"layer_types": ALTERNATING * 2}),
    ("gemma2", {"hidden_activation": "silu"}),
    ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": None}),
    ("gemma3_text", {"rope_parameters": None, "rope_local_base_freq": 5e3}),
    ("granite", {"attention_multiplier": 0.25}),
    ("granite", {"embedding_multiplier": 2.0}),
    ("granite", {"residual_multiplier": 0.5}),
    ("granite", {"logits_scaling": 2.0}),
]


class Pair:
    """One family's toy, ours and theirs."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = make_toy("tiny", folder, noise=0.3, **changes)
        self.ours: LoadedModel = load_model(self.folder, "cpu", "float32")
        self.theirs = transformers_model(self.folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: Pair(tmp_path_factory.mktemp(kind), family=kind) for kind in FAMILIES}


def test_there_is_a_toy_of_every_family_and_it_varies(made: dict[str, Pair]) -> None:
    assert sorted(made) == sorted(TYPES)
    for pair in made.values():
        said = theirs(pair.theirs, prompts(100)[0]).argmax(-1)
        assert said.unique().numel() > 25


@pytest.mark.parametrize("chunk", [1, 7, 16, 130])
@pytest.mark.parametrize("kind", TYPES)
def test_alone_in_chunks(kind: str, chunk: int, made: dict[str, Pair]) -> None:
    pair = made[kind]
    Fed(pair.ours, prompts(130)).in_chunks(chunk).check(pair.theirs)


@pytest.mark.parametrize("kind", TYPES)
def test_in_a_mix_of_chunks_and_single_tokens(kind: str, made: dict[str, Pair]) -> None:
    pair = made[kind]
    Fed(pair.ours, prompts(110, 33, 16, 70, 1, 64)).in_a_mix().check(pair.theirs)


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda value: str(value)[:60])
def test_every_shape(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pair = Pair(tmp_path, family=kind, **changes)
    Fed(pair.ours, prompts(70, 20, 40)).in_a_mix().check(pair.theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.08), ("float16", 0.02)])
@pytest.mark.parametrize("kind", TYPES)
def test_half_types_stay_near_full_precision(
    kind: str, dtype: str, tolerance: float, made: dict[str, Pair]
) -> None:
    fed = Fed(load_model(made[kind].folder, "cpu", dtype), prompts(90)).in_chunks(50)
    expected = theirs(made[kind].theirs, fed.prompts[0])
    assert (fed.logits() - expected).norm() / expected.norm() < tolerance


def test_fused_weights_in_shards(tmp_path: Path) -> None:
    pair = Pair(tmp_path, family="phi3", shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    Fed(pair.ours, prompts(50)).in_chunks(20).check(pair.theirs)


@pytest.mark.parametrize(("kind", "changes"), TELLING, ids=lambda value: str(value)[:60])
def test_each_difference_between_families_changes_the_output(
    kind: str, changes: dict[str, Any], tmp_path: Path, made: dict[str, Pair]
) -> None:
    """The toys are such that a setting read wrongly would show."""
    for file in made[kind].folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    if "partial_rotary_factor" in changes:
        config["rope_parameters"].update(changes)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    changed, plain = (
        Fed(load_model(folder, "cpu", "float32"), prompts(90)).in_chunks(90).logits()
        for folder in (tmp_path, made[kind].folder)
    )
    assert (changed - plain).abs().max() > 1e-3


def test_layers_with_one_window_are_kv_groups_of_one_size(made: dict[str, Pair]) -> None:
    groups = made["gemma3_text"].ours.kv_groups(16)
    assert [(group.id, group.layers, group.window) for group in groups] == [
        (0, (0,), 24),
        (1, (1,), 24),
        (2, (3,), 24),
        (3, (2,), None),
    ]
    (group,) = made["mistral"].ours.kv_groups(16)
    assert (group.layers, group.window) == ((0, 1), 24)
    names = {pair.ours.namespace() for pair in made.values()}
    assert len(names) == len(made)


def test_a_window_that_no_context_outgrows_is_none(tmp_path: Path) -> None:
    folder = make_toy("tiny", tmp_path, family="mistral", sliding_window=64, max_position_embeddings=64)
    (group,) = load_model(folder, "cpu").kv_groups(16)
    assert group.window is None
    assert load_model(make_toy("tiny", tmp_path, family="mistral"), "cpu").kv_groups(16)[0].window == 24


def test_norm_weights_are_one_more_than_stored_without_loss(made: dict[str, Pair]) -> None:
    stored = made["gemma2"].theirs.model.layers[1].post_feedforward_layernorm.weight
    layer = load_model(made["gemma2"].folder, "cpu", "bfloat16").decoder.weights.layers[1]
    assert layer.after_mlp is not None
    assert torch.equal(layer.after_mlp, (1 + stored).to(torch.bfloat16))
