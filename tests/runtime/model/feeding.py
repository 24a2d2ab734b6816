"""Feeds pieces of prompts to a model, and the same to transformers; says where both differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from holdfast.runtime.errors import RuntimeFault
from holdfast.runtime.model.load import LoadedModel, load_model

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
    """A model that is fed pieces of prompts, over an arena with NaN in unused slots. ``slots``: of each
    prompt's adapter."""

    def __init__(
        self, model: LoadedModel, prompts: list[torch.Tensor], slots: list[int] | None = None
    ) -> None:
        self.model, self.prompts, self.slots = model, prompts, slots
        self.groups = model.kv_groups(BLOCK)
        blocks = BLOCKS * len(self.groups)
        self.arena = torch.full(
            (blocks, *self.groups[0].block_shape), float("nan"), dtype=model.decoder.dtype
        )
        order = np.random.default_rng(0).permutation(blocks)[: 12 * len(prompts) * len(self.groups)]
        self.tables = order.astype(np.int32).reshape(len(self.groups), len(prompts), 12)
        self.done = [0] * len(prompts)
        self.parts: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> None:
        """``counts``: prompt to tokens of it, in the order of the rows."""
        rows, decoder = list(counts), self.model.decoder
        firsts = [self.done[row] for row in rows]
        batches = [
            decoder.kernels.lay_out(self.arena, firsts, list(counts.values()), [tables[row] for row in rows])
            for tables in self.tables
        ]
        if self.slots is not None:
            each = torch.tensor([self.slots[row] for row in rows])
            adapters = each.repeat_interleave(torch.tensor(list(counts.values())))
            batches = [replace(batch, adapters=adapters) for batch in batches]
        ids = torch.cat(
            [self.prompts[row][at : at + counts[row]] for row, at in zip(rows, firsts, strict=True)]
        )
        with torch.inference_mode():
            logits = decoder.logits(decoder.hidden(ids, batches, self.arena))
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

    def go_on(self, new: int) -> Fed:
        """Decode ``new`` greedy tokens after the first prompt."""
        for _ in range(new):
            said = self.parts[0][-1][-1].argmax(-1, keepdim=True)
            self.prompts[0] = torch.cat((self.prompts[0], said))
            self.step({0: 1})
        return self


@dataclass(frozen=True, slots=True)
class Outcome:
    """A model beside transformers. ``kind``: equal, different, refused, or broken (transformers fails).

    ``said``: why it is refused, the notes at start, or how far the logits are apart.
    """

    kind: str
    said: str = ""


def outcome(
    folder: Path,
    length: int = 40,
    new: int = 12,
    max_context: int | None = None,
    reference: Callable[[Path], Any] = transformers_model,
) -> Outcome:
    """Serve a prompt in chunks and greedy tokens after it, and compare logits and tokens with transformers:
    with its cached generation, and with one forward of all tokens.
    """
    try:
        ours = load_model(folder, "cpu", "float32", max_context=max_context)
    except RuntimeFault as error:
        return Outcome("refused", error.message)
    (prompt,) = prompts(length)
    prompt %= ours.config.vocab_size
    fed = Fed(ours, [prompt]).in_chunks(17).go_on(new)
    try:
        model = reference(folder)
        whole = theirs(model, fed.prompts[0])
        told = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    except Exception as error:
        return Outcome("broken", " ".join(f"{type(error).__name__}: {error}".split())[:200])
    cached = torch.cat((whole[: length - 1], torch.cat(told.logits)))
    apart = max(float((fed.logits()[: len(one)] - one).abs().max()) for one in (whole, cached))
    notes = " | ".join(ours.config.notes)
    same_tokens = torch.equal(told.sequences[0], fed.prompts[0])
    if apart < 1e-4 + 2e-5 * float(whole.abs().max()) and same_tokens:
        return Outcome("equal", notes)
    return Outcome("different", f"{apart:.2g} apart, tokens {'equal' if same_tokens else 'differ'}; {notes}")
