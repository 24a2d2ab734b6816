"""The engine on the Triton kernels, interpreted: its tokens and log probabilities against the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.benchmarks.gpu.engine import generate
from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.backends import Needs, choose
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.runtime.verbs import Sampling

PROMPTS = [[(7 * seed + 13 * at) % 200 for at in range(3 + 7 * seed)] for seed in range(3)]
WARM = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=5, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: that a kernel reads and writes its own layer of an arena is its own test's affair."""
    return make_toy(
        "tiny",
        tmp_path_factory.mktemp("tiny"),
        num_hidden_layers=1,
        head_dim=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


def computing_by(
    folder: Path, backend: str, dtype: str = "float32", quantization: str | None = None
) -> LoadedModel:
    model = load_model(folder, "cpu", dtype, keeping="quantised", quantization=quantization)
    chosen = choose(backend, torch.device("cpu"), Needs(model.decoder.dtype, [(64, 16)]))
    return replace(model, decoder=model.decoder.computing_by(chosen.kernels))


@pytest.mark.parametrize("backend", ["triton", "triton-invariant"])
def test_the_engine_generates_as_on_the_reference(folder: Path, backend: str) -> None:
    expected, _ = generate(computing_by(folder, "reference"), PROMPTS, 4)
    assert generate(computing_by(folder, backend), PROMPTS, 4)[0] == expected


@pytest.mark.parametrize(("backend", "quantization"), [("triton", "int4"), ("triton-invariant", "int8")])
def test_quantised_weights_give_the_tokens_of_the_reference(
    folder: Path, backend: str, quantization: str
) -> None:
    models = [computing_by(folder, name, quantization=quantization) for name in ("reference", backend)]
    assert all(one.quantisation for one in models)
    expected, found = (generate(one, PROMPTS, 3)[0] for one in models)
    assert found == expected


def test_invariant_replies_have_the_same_probabilities_however_a_prompt_is_cut(folder: Path) -> None:
    """To the last bit: in fp16, alone and in company, in chunks of 5 tokens and whole."""
    model = computing_by(folder, "triton-invariant", "float16")
    prompts = PROMPTS[::2]  # one that fits a chunk, and one that does not
    whole = generate(model, prompts, 2, sampling=WARM, scored=True)[0]
    assert generate(model, prompts, 2, 5, sampling=WARM, scored=True)[0] == whole
    assert generate(model, prompts[1:], 2, sampling=WARM, scored=True)[0] == whole[1:]
