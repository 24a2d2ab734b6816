"""The decoder against transformers: the same logits, however prompts are cut and wherever blocks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.benchmarks.toys import make_toy
from holdfast.runtime.model.load import LoadedModel, load_model
from holdfast.tests.runtime.model.feeding import Fed, prompts, theirs, transformers_model

VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "all kv heads": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True},
    "wide heads": {"head_dim": 48},
    "yarn": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="module")
def pair(tiny: Path) -> tuple[LoadedModel, Any]:
    return load_model(tiny, "cpu", "float32"), transformers_model(tiny)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 150])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(chunk: int, pair) -> None:
    Fed(pair[0], prompts(150)).in_chunks(chunk).check(pair[1])


def test_logits_in_a_mix_of_chunks_and_single_tokens(pair) -> None:
    Fed(pair[0], prompts(150, 33, 16, 97, 1, 64)).in_a_mix().check(pair[1])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_shape_of_the_family(changes: dict, tmp_path: Path) -> None:
    folder = make_toy("tiny", tmp_path, noise=0.3, **changes)
    fed = Fed(load_model(folder, "cpu", "float32"), prompts(70, 20))
    for counts in ({0: 40}, {1: 19, 0: 1}, {0: 29, 1: 1}):
        fed.step(counts)
    fed.check(transformers_model(folder))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.08), ("float16", 0.01)])
def test_half_types_stay_near_full_precision(dtype: str, tolerance: float, tiny: Path, pair) -> None:
    fed = Fed(load_model(tiny, "cpu", dtype), prompts(100))
    fed.step({0: 60})
    fed.step({0: 40})
    expected = theirs(pair[1], fed.prompts[0])
    distance = (fed.logits() - expected).norm() / expected.norm()
    assert distance < tolerance
