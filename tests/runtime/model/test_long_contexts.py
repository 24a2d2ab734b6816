"""Beyond the trained context: each kind of rotary settings against transformers, whole and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from holdfast.benchmarks.toys import make_toy
from holdfast.runtime.model.load import load_model
from holdfast.tests.runtime.model.feeding import Fed, prompts, transformers_model

TRAINED = 40
ORIGINAL = {"original_max_position_embeddings": TRAINED}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.75,
}
LONG_WHOLE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0],
    "factor": 6.0,
    **ORIGINAL,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": YARN}),
    ("mistral", {"rope_parameters": LINEAR, "sliding_window": 24}),
    ("phi3", {"rope_parameters": LONG, "max_position_embeddings": 4 * TRAINED, **ORIGINAL}),
    (
        "phi3",
        {"rope_parameters": {**LONG, "attention_factor": 1.3}, "max_position_embeddings": 120, **ORIGINAL},
    ),
    ("llama", {"rope_parameters": LONG_WHOLE, "max_position_embeddings": 4 * TRAINED}),
    ("gemma2", {}),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
    ),
    ("olmo2", {"rope_parameters": LINEAR}),
    ("granite", {"rope_parameters": YARN}),
]


def toy(folder: Path, family: str, **changes: Any) -> Path:
    return make_toy("tiny", folder, family=family, **{"max_position_embeddings": TRAINED, **changes})


@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda value: str(value)[:70])
def test_beyond_the_trained_context(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = toy(tmp_path, family, **changes)
    fed = Fed(load_model(folder, "cpu", "float32"), prompts(3 * TRAINED, TRAINED + 1, TRAINED + 17))
    fed.in_a_mix().check(transformers_model(folder))


def test_longrope_within_the_trained_context_is_short_where_no_more_is_served(tmp_path: Path) -> None:
    """Keys that are kept cannot change their turn: one set of divisors for all, by what is served."""
    folder = toy(tmp_path, "phi3", rope_parameters=LONG, **{"max_position_embeddings": 160, **ORIGINAL})
    short, long = (load_model(folder, "cpu", "float32", max_context=most) for most in (TRAINED, TRAINED + 1))
    assert (short.config.max_context, long.config.max_context) == (TRAINED, TRAINED + 1)
    fed = Fed(short, prompts(TRAINED, 11)).in_a_mix()
    fed.check(transformers_model(folder))
    other = Fed(long, prompts(TRAINED, 11)).in_a_mix()
    assert (other.logits() - fed.logits()).abs().max() > 1e-3
    assert short.namespace() != long.namespace()


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}}


def test_dynamic_within_the_trained_context(tmp_path: Path) -> None:
    folder = toy(tmp_path, "llama", **DYNAMIC)
    model = load_model(folder, "cpu", "float32")
    assert model.config.max_context == 3 * TRAINED
    Fed(model, prompts(TRAINED, 30, 7)).in_a_mix().check(transformers_model(folder))


@pytest.mark.parametrize("chunk", [1, 7, 16, 120])
def test_dynamic_beyond_is_their_cached_generation_token_by_token(chunk: int, tmp_path: Path) -> None:
    folder, (prompt,) = toy(tmp_path, "llama", **DYNAMIC), prompts(3 * TRAINED)
    reference, cache = transformers_model(folder), DynamicCache()
    with torch.inference_mode():
        pieces = [prompt[:TRAINED], *prompt[TRAINED:].split(1)]
        expected = [reference(piece[None], past_key_values=cache).logits[0] for piece in pieces]
    ours = Fed(load_model(folder, "cpu", "float32"), [prompt]).in_chunks(chunk).logits()
    torch.testing.assert_close(ours, torch.cat(expected), rtol=0, atol=1e-4)
