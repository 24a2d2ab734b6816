"""Feeds pieces of prompts to a model, and the same to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from holdfast.runtime.model.load import LoadedModel

BLOCKS, BLOCK = 96, 16


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def transformers_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(prompt[None], use_cache=False).logits[0]
    return logits


class Fed:
    """A model that is fed pieces of prompts, over arenas with NaN in unused slots."""

    def __init__(self, model: LoadedModel, prompts: list[torch.Tensor]) -> None:
        self.model, self.prompts = model, prompts
        self.arenas = [
            torch.full((BLOCKS, *group.block_shape), float("nan"), dtype=model.decoder.dtype)
            for group in model.kv_groups(BLOCK)
        ]
        order = np.random.default_rng(0).permutation(BLOCKS)[: 12 * len(prompts)].astype(np.int32)
        self.tables = np.split(order, len(prompts))
        self.done = [0] * len(prompts)
        self.parts: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> None:
        """``counts``: prompt to tokens of it, in the order of the rows."""
        rows, decoder = list(counts), self.model.decoder
        firsts = [self.done[row] for row in rows]
        tables = [self.tables[row] for row in rows]
        batch = decoder.kernels.lay_out(self.arenas[0], firsts, list(counts.values()), tables)
        ids = torch.cat(
            [self.prompts[row][at : at + counts[row]] for row, at in zip(rows, firsts, strict=True)]
        )
        with torch.inference_mode():
            logits = decoder.logits(decoder.hidden(ids, batch, self.arenas))
        for row, part in zip(rows, logits.split(list(counts.values())), strict=True):
            self.parts[row].append(part)
            self.done[row] += len(part)

    def in_chunks(self, chunk: int) -> Fed:
        """All prompts, one after the other, in chunks."""
        for row, prompt in enumerate(self.prompts):
            while (left := len(prompt) - self.done[row]) > 0:
                self.step({row: min(chunk, left)})
        return self

    def in_a_mix(self, seed: int = 1) -> Fed:
        """All prompts side by side: chunks of many sizes and single tokens, some rows resting."""
        generator, lengths = np.random.default_rng(seed), [len(prompt) for prompt in self.prompts]
        while waiting := [row for row, length in enumerate(lengths) if self.done[row] < length]:
            chosen = generator.permutation(waiting)[: 1 + int(generator.integers(len(waiting)))].tolist()
            sizes = generator.choice([1, 1, 7, 16, 30], len(chosen)).tolist()
            counts = zip(chosen, sizes, strict=True)
            self.step({row: min(size, lengths[row] - self.done[row]) for row, size in counts})
        return self

    def logits(self, row: int = 0) -> torch.Tensor:
        """All of a prompt: ``[tokens, vocab]``."""
        return torch.cat(self.parts[row])

    def check(self, reference: Any) -> None:
        """Within 1e-4 of transformers, each prompt in one forward."""
        for row, prompt in enumerate(self.prompts):
            torch.testing.assert_close(self.logits(row), theirs(reference, prompt), rtol=0, atol=1e-4)
