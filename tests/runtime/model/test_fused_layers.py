"""A decoder's layers in one call of the CPU backend: the bits of its operations one by one, of every family, on
one thread and on two, and the same for a prompt in any cut and company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from holdfast.benchmarks.toys import FAMILIES, make_toy
from holdfast.kernels.cpu import backend, layers
from holdfast.runtime.model.load import LoadedModel, load_model

from .feeding import Fed, prompts
from .gguf_toys import draft

SEPARATE: Any = SimpleNamespace(**{**vars(backend), "fuse_layers": lambda layers, sizes: None})
"""The CPU backend without the call for all layers."""


def refused(*_: object) -> torch.Tensor:
    raise AssertionError("an operation of a layer by itself")


FUSED: Any = SimpleNamespace(**{**vars(backend), "paged_attention": refused, "gated": refused})
"""The CPU backend, which must not compute layers operation by operation."""


def computed_by(model: LoadedModel, kernels: Any) -> LoadedModel:
    return replace(model, decoder=model.decoder.computing_by(kernels))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (backend, layers):
        monkeypatch.setattr(module, "parts_for", lambda work, grain: request.param)
    return int(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"granite", "ministral3"}))
def test_all_layers_in_one_call(family: str, dtype: str, threads: int, tmp_path: Path) -> None:
    model = load_model(make_toy("tiny", tmp_path, family=family), "cpu", dtype, keeping="packed")
    whole, apart = (computed_by(model, kernels) for kernels in (FUSED, SEPARATE))
    fed = Fed(whole, prompts(90, 31, 70)).in_a_mix()
    assert torch.equal(fed.logits(), Fed(apart, prompts(90, 31, 70)).in_a_mix().logits())
    for row, prompt in enumerate(fed.prompts):
        alone = Fed(whole, [prompt]).in_chunks(len(prompt)).logits()
        assert torch.equal(fed.logits(row), alone), f"prompt {row} in a mix"


def test_matrices_of_several_types_in_one_map(threads: int, tmp_path: Path) -> None:
    """Values and gates of another type than queries, keys and ups: each has activations of its own form."""
    folder = make_toy("tiny", tmp_path / "folder", vocab_size=265, hidden_size=64, intermediate_size=96)
    made = draft(folder, "Q4_1")
    for name, (numbers, _) in made.tensors.items():
        if "attn_v" in name or "ffn_gate" in name:
            made.tensors[name] = (numbers, "Q8_0")
    model = load_model(made.write(tmp_path / "toy.gguf"), "cpu", "float32", keeping="packed")
    assert model.packed == ("Q4_1", "Q8_0")
    assert len(model.decoder.weights.layers[0].qkv.matrices) == 2
    whole, apart = (computed_by(model, kernels) for kernels in (FUSED, SEPARATE))
    fed = Fed(whole, prompts(40, 9)).in_a_mix()
    assert torch.equal(fed.logits(), Fed(apart, prompts(40, 9)).in_a_mix().logits())
    assert torch.allclose(fed.logits(), Fed(model, prompts(40, 9)).in_a_mix().logits(), atol=1e-3)
