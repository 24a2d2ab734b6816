"""The tally: how often each token stands before a slot's next one, counted on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.device import Ints
from ...kernels.interface import Kernels

Past: TypeAlias = Callable[[int, int], NDArray[np.int32]]
"""Gives the ids of a slot's tokens before a position."""

_NONE = np.empty((3, 0), dtype=np.int64)


class Tally:
    """A line of `Kernels.count` for each slot that draws with penalties, from its first such draw until the
    slot is sent whole. What is counted stays counted: each step adds the tokens that came since, and the last
    one, of which the device alone may know. Line 0 belongs to no slot; it is always zero.
    """

    def __init__(self) -> None:
        self._cells: Tensor | None = None
        self._line = np.zeros(8, dtype=np.int64)  # of each slot; 0: none
        self._counted = np.zeros(8, dtype=np.int64)  # how many of its tokens
        self._free: list[int] = []
        self._lines = 1

    def leave(self, slot: int) -> None:
        """Take the slot's line, if it has one: the slot is another sequence's, or its tokens are others."""
        if slot < len(self._line) and self._line[slot]:
            self._free.append(int(self._line[slot]))
            self._line[slot] = 0

    def forget(self) -> None:
        """Take all lines."""
        self._line[:], self._free, self._lines = 0, [], 1

    def plan(self, slots: Ints, ends: Ints, outputs: Ints, past: Past) -> list[Ints]:
        """What `count` is to do before draws in ``slots`` at the positions ``ends``, arrays to upload.
        ``outputs``: from which position on a slot's tokens are output. All are ``[draws]``. Several draws in
        one slot stand beside each other: all but the first are behind guesses.

        The arrays: the line of each draw; lines to zero; of tokens that the host knows their line, id, and
        whether they are output; of draws before which the row's last token is counted their line, number, and
        the same; then lines to copy for draws behind guesses, and where to; and of the guesses to count there
        their line, draw, and the same.
        """
        if slots.max() >= len(self._line):
            more = int(slots.max()) + 1
            self._line, self._counted = (np.pad(one, (0, more)) for one in (self._line, self._counted))
        first = np.ones(len(slots), dtype=bool)
        first[1:] = slots[1:] != slots[:-1]
        heads = np.flatnonzero(first)
        own, upto, outputs = slots[heads], ends[heads], outputs[heads]
        # A slot of which more was counted than stands there now draws again what a step before has drawn.
        stale = own[(self._line[own] == 0) | (self._counted[own] > upto)]
        for slot in stale.tolist():
            self._line[slot], self._counted[slot] = self._line[slot] or self._give(), 0
        lines, counted = self._line[own], self._counted[own]
        late = [
            _entries(lines[at], past(int(own[at]), end - 1)[begin:], np.arange(begin, end - 1) >= outputs[at])
            for at in np.flatnonzero(counted < upto - 1).tolist()
            for begin, end in [(int(counted[at]), int(upto[at]))]
        ]
        new = counted < upto
        last = _entries(lines[new], heads[new], upto[new] > outputs[new])
        self._counted[own] = upto
        of = np.cumsum(first) - 1
        each = lines[of]
        copies, guesses = np.empty((2, 0), dtype=np.int64), list[Ints]()
        if len(behind := np.flatnonzero(~first)):
            copies = np.array([each[behind], [self._give() for _ in behind]])
            each[behind] = copies[1]
            self._free += copies[1].tolist()  # what later steps do with them comes behind this one
            guesses = [
                _entries(each[at], np.arange(heads[of[at]] + 1, at + 1), True) for at in behind.tolist()
            ]
        known, guessed = (np.concatenate([_NONE, *some], axis=1) for some in (late, guesses))
        return [each, self._line[stale], *known, *last, *copies, *guessed]

    def count(self, plan: Sequence[Tensor], last: Tensor, vocab: int, kernels: Kernels) -> Tensor:
        """Count as `plan` says. ``plan``: its arrays, on the device; ``last``: of each draw the token before
        it, int64 ``[draws]``. Returns the counts, int32 ``[lines, vocab]``, valid until the next call."""
        _, fresh, *late = plan[:5]
        lines, draws, output, source, target, *guesses = plan[5:]
        if self._cells is None or len(self._cells) < self._lines:
            cells = torch.zeros((2 * self._lines, vocab), dtype=torch.int32, device=last.device)
            if self._cells is not None:
                cells[: len(self._cells)] = self._cells
            self._cells = cells
        if len(fresh):
            self._cells.index_fill_(0, fresh, 0)
        tokens = last[draws]
        if len(late[0]):
            lines, tokens, output = (
                torch.cat(pair) for pair in zip(late, (lines, tokens, output), strict=True)
            )
        kernels.count(self._cells, lines, tokens, output)
        if len(source):
            self._cells[target] = self._cells[source]
            kernels.count(self._cells, guesses[0], last[guesses[1]], guesses[2])
        return self._cells

    def _give(self) -> int:
        if self._free:
            return self._free.pop()
        self._lines += 1
        return self._lines - 1


def _entries(lines: object, tokens: object, output: object) -> Ints:
    return np.stack(np.broadcast_arrays(lines, tokens, output)).astype(np.int64)  # type: ignore[arg-type]
