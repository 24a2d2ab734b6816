"""The decoder against transformers: the same logits, however prompts are cut and wherever blocks lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from holdfast.benchmarks.toys import make_toy
from holdfast.kernels.batch import lay_out
from holdfast.runtime.model.load import LoadedModel, load_model

BLOCKS, BLOCK = 96, 16
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


def scattered(count: int, seed: int = 0) -> list[np.ndarray]:
    """``count`` tables of 12 blocks each, mixed up."""
    return np.split(np.random.default_rng(seed).permutation(BLOCKS)[: 12 * count].astype(np.int32), count)


class Fed:
    """A model that is fed pieces of prompts, over an arena whose unused slots are NaN."""

    def __init__(self, model: LoadedModel, prompts: list[torch.Tensor]) -> None:
        self.model, self.prompts = model, prompts
        group = model.kv_group(BLOCK)
        self.arena = torch.full((BLOCKS, *group.block_shape), float("nan"), dtype=model.decoder.dtype)
        self.tables = scattered(len(prompts))
        self.done = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> None:
        """``counts``: prompt to tokens of it, in the order of the rows."""
        rows = list(counts)
        firsts = [self.done[row] for row in rows]
        batch = lay_out(self.arena, firsts, list(counts.values()), [self.tables[row] for row in rows])
        ids = torch.cat(
            [self.prompts[row][at : at + counts[row]] for row, at in zip(rows, firsts, strict=True)]
        )
        with torch.inference_mode():
            logits = self.model.decoder.logits(self.model.decoder.hidden(ids, batch, self.arena))
        for row, part in zip(rows, logits.split(list(counts.values())), strict=True):
            self.logits[row].append(part)
            self.done[row] += len(part)


@pytest.fixture(scope="module")
def pair(tiny: Path) -> tuple[LoadedModel, Qwen3ForCausalLM]:
    return load_model(tiny, "cpu", "float32"), Qwen3ForCausalLM.from_pretrained(tiny).eval()


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def theirs(model: Qwen3ForCausalLM, prompt: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(prompt[None]).logits[0]
    return logits


def check(fed: Fed, reference: Qwen3ForCausalLM) -> None:
    for prompt, parts in zip(fed.prompts, fed.logits, strict=True):
        torch.testing.assert_close(torch.cat(parts), theirs(reference, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 150])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(chunk: int, pair) -> None:
    fed = Fed(pair[0], prompts(150))
    while fed.done[0] < 150:
        fed.step({0: min(chunk, 150 - fed.done[0])})
    check(fed, pair[1])


def test_logits_in_a_mix_of_chunks_and_single_tokens(pair) -> None:
    lengths = (150, 33, 16, 97, 1, 64)
    fed = Fed(pair[0], prompts(*lengths))
    generator = np.random.default_rng(1)
    while any(done < length for done, length in zip(fed.done, lengths, strict=True)):
        waiting = [
            row for row in generator.permutation(len(lengths)).tolist() if fed.done[row] < lengths[row]
        ]
        chosen = waiting[: 1 + int(generator.integers(len(waiting)))]
        fed.step(
            {
                row: min(int(generator.choice([1, 1, 7, 16, 30])), lengths[row] - fed.done[row])
                for row in chosen
            }
        )
    check(fed, pair[1])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_shape_of_the_family(changes: dict, tmp_path: Path, randomised_biases: Callable) -> None:
    folder = make_toy("tiny", tmp_path, **changes)
    reference = randomised_biases(folder)
    fed = Fed(load_model(folder, "cpu", "float32"), prompts(70, 20))
    for counts in ({0: 40}, {1: 19, 0: 1}, {0: 29, 1: 1}):
        fed.step(counts)
    check(fed, reference)


@pytest.fixture
def randomised_biases() -> Callable[[Path], Qwen3ForCausalLM]:
    """Transformers begins with zero biases, unit norms: make them tell, on disk too."""

    def apply(folder: Path) -> Qwen3ForCausalLM:
        model = Qwen3ForCausalLM.from_pretrained(folder).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    noise = torch.randn(parameter.shape, generator=generator) * 0.3
                    parameter.copy_(noise if name.endswith("bias") else 1 + noise)
        model.save_pretrained(folder)
        return model

    return apply


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.08), ("float16", 0.01)])
def test_half_types_stay_near_full_precision(dtype: str, tolerance: float, tiny: Path, pair) -> None:
    fed = Fed(load_model(tiny, "cpu", dtype), prompts(100))
    fed.step({0: 60})
    fed.step({0: 40})
    expected = theirs(pair[1], fed.prompts[0])
    distance = (torch.cat(fed.logits[0]) - expected).norm() / expected.norm()
    assert distance < tolerance
