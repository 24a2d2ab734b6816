"""The tally against counting anew: over many steps, with tokens that the device alone knows, guesses, and
slots that draw again or become another sequence's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.kernels.device import CpuDevice
from holdfast.kernels.reference import backend
from holdfast.runtime.execution.tally import Tally

VOCAB, SLOTS = 6, 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
KINDS = st.sampled_from(["draw"] * 6 + ["more", "again", "another", "idle", "all"])


def counted(tokens: list[int], output_from: int) -> list[int]:
    cells = [0] * VOCAB
    for at, token in enumerate(tokens):
        cells[token] = (cells[token] | 1) + 2 * (at >= output_from)
    return cells


class Slots:
    """Sequences by slot, with the position from which on tokens are output, as the host knows them one step
    late."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.tokens: dict[int, list[int]] = {}
        self.output_from: dict[int, int] = {}

    def past(self, slot: int, end: int) -> NDArray[np.int32]:
        assert end < len(self.tokens[slot]) + 1
        return np.array(self.tokens[slot][:end], dtype=np.int32)

    def check(self, drawing: dict[int, list[int]]) -> None:
        """Draw in these slots, and behind the guesses of each."""
        rows = [
            (slot, self.tokens[slot] + guesses[:behind])
            for slot, guesses in drawing.items()
            for behind in range(len(guesses) + 1)
        ]
        slots = np.array([slot for slot, _ in rows], dtype=np.int64)
        ends = np.array([len(tokens) for _, tokens in rows], dtype=np.int64)
        outputs = np.array([self.output_from[slot] for slot, _ in rows], dtype=np.int64)
        plan = CpuDevice().upload(self.tally.plan(slots, ends, outputs, self.past))
        last = torch.tensor([tokens[-1] for _, tokens in rows])
        cells = self.tally.count(plan, last, VOCAB, backend)
        expected = [counted(tokens, self.output_from[slot]) for slot, tokens in rows]
        assert cells[plan[0]].tolist() == expected
        assert not cells[0].any()


@settings(max_examples=150)
@given(st.data())
def test_every_draw_finds_the_counts_of_what_stands_before_it(data: st.DataObject) -> None:
    held = Slots()
    for _ in range(data.draw(st.integers(1, 12))):
        drawing = {}
        for slot in data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True)):
            kind = data.draw(KINDS)
            if kind == "all":
                held.tally.forget()
                held.tokens.clear()
            if kind == "another" or slot not in held.tokens:
                held.tally.leave(slot)
                held.tokens[slot] = data.draw(TOKENS)
                held.output_from[slot] = data.draw(st.integers(0, len(held.tokens[slot])))
            elif kind == "again":  # what was drawn behind some position is drawn once more
                kept = data.draw(st.integers(1, len(held.tokens[slot])))
                held.tokens[slot] = held.tokens[slot][:kept]
            else:
                held.tokens[slot] = held.tokens[slot] + data.draw(TOKENS)[: None if kind == "more" else 1]
            drawing[slot] = data.draw(TOKENS) if data.draw(st.integers(0, 4)) == 4 else []
        drawing = {slot: guesses for slot, guesses in drawing.items() if slot in held.tokens}
        if drawing:
            held.check(drawing)


def test_a_step_counts_the_last_token_alone_and_uploads_nothing_of_the_past() -> None:
    held = Slots()
    held.tokens, held.output_from = {0: [1, 2], 3: [4]}, {0: 2, 3: 0}
    held.check({0: [], 3: []})
    held.past = lambda slot, end: 1 / 0  # type: ignore[assignment, method-assign]
    for token in (5, 5, 1):
        for tokens in held.tokens.values():
            tokens.append(token)
        held.check({0: [], 3: []})
