"""The batch: what the runner keeps of the sequences that steps compute, by slot, as arrays.

Each plan says what changed. Changes are numbered, so that one that is lost or comes twice is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan import Ints, Plan, Slot
from ..verbs import Sampling
from .tally import Tally

_WORD64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is room for: ``slots`` of sequences, of ``blocks`` blocks each; in a step ``tokens`` tokens
    and ``rows`` rows. Where more come, memory is made anew. ``groups``: of KV, each with a table in a slot."""

    slots: int = 8
    blocks: int = 8
    tokens: int = 8
    rows: int = 8
    groups: int = 1


SOME_CAPACITY = Capacity()


class Batch:
    """Slots and what they hold; arrays grow as higher slots and columns come.

    ``tables``: block ids, int32 ``[slots, groups, blocks]``; of a group with a window, any behind which it does
    not look. ``samplings``: of each slot's turn; None: it has none.
    ``output_from``: the position from which on its tokens were generated, int64 ``[slots]``. The columns of
    sampling parameters are ``[slots]``, fp64 or int64. ``edits``: the slot's sampling has a bias or bad words;
    ``penalizes``: it has penalties, for the tokens in ``tally``; ``special``: it has one of these, reports log
    probabilities, or samples typically. ``scores``: how many alternatives it reports, -1 for none."""

    def __init__(self, capacity: Capacity = SOME_CAPACITY) -> None:
        slots, blocks = capacity.slots, capacity.blocks
        self.version = 0
        """Another number whenever a slot is sent whole."""
        self._next = 0  # the number of the next changes, unless they begin anew
        self.tables: NDArray[np.int32] = np.zeros((slots, capacity.groups, blocks), dtype=np.int32)
        self.samplings: list[Sampling | None] = [None] * slots
        self.temperature, self.top_p, self.min_p, self.typical_p = (np.zeros(slots) for _ in range(4))
        self.top_k, self.seed, self.scores, self.output_from = (
            np.zeros(slots, dtype=np.int64) for _ in range(4)
        )
        self.repetition, self.frequency, self.presence = (np.zeros(slots) for _ in range(3))
        self.edits, self.special, self.penalizes, self._known = (
            np.zeros(slots, dtype=bool) for _ in range(4)
        )
        self.tally = Tally()
        self._past: NDArray[np.int32] = np.zeros((slots, 0), dtype=np.int32)
        self._heard = np.zeros(slots, dtype=np.int64)  # of each row of `_past`, how many there are

    def __len__(self) -> int:
        """How many slots there is room for."""
        return len(self.samplings)

    def apply(self, plan: Plan) -> None:
        """Take over what a plan says that changed. Raises ``ValueError`` if these are not the next changes, or
        the plan has a row in a slot of which nothing is known."""
        changes = plan.changes
        if changes is None:
            return
        if changes.number not in (0, self._next):
            raise ValueError(f"changes {changes.number} of the batch came; the next are {self._next}")
        self._next = changes.number + 1
        if not changes.number:
            self._known[:] = False
            self.tally.forget()
        for slot in changes.whole:
            self._take(slot)
        self.version += bool(changes.whole)
        if len(changes.blocks):
            groups, slots, columns, blocks = changes.blocks.T
            self._widen(int(columns.max()) + 1)
            self.tables[slots, groups, columns] = blocks
        if len(changes.past):
            self._hear(changes.past[:, 0].astype(np.int64), changes.past[:, 1])
        if plan.slots.max() >= len(self) or not self._known[plan.slots].all():
            raise ValueError(f"slots {plan.slots.tolist()} have rows, and some of them were never sent")

    def past(self, slot: int, end: int) -> NDArray[np.int32]:
        """The ids of the slot's tokens before position ``end``, int32; a view."""
        assert end <= self._heard[slot], "a row that reads the past comes with it"
        return self._past[slot, :end]

    def read(self, plan: Plan, block_tokens: int) -> NDArray[np.int32]:
        """The ids of the blocks that the plan's copies and rows read, int32 ``[blocks]``. Its changes were
        applied."""
        context = self._span(plan, np.zeros_like(plan.firsts), block_tokens)
        return np.append(context, np.array([copy.source for copy in plan.copies], dtype=np.int32))

    def written(self, plan: Plan, block_tokens: int) -> NDArray[np.int32]:
        """The ids of the blocks that the plan's copies and rows write, int32 ``[blocks]``. Its changes were
        applied."""
        own = self._span(plan, plan.firsts // block_tokens, block_tokens)
        return np.append(own, np.array([copy.target for copy in plan.copies], dtype=np.int32))

    def contexts(self, slots: Ints, widths: Ints) -> NDArray[np.int64]:
        """The block ids of each row's context, ``[groups, rows, most blocks of a row]``, 0 behind its own.
        ``widths``: its blocks."""
        most = int(widths.max(initial=1))
        tables = self.tables[slots, :, :most].swapaxes(0, 1).astype(np.int64, order="C")
        if len(widths) and widths.min() < most:
            tables[:, np.arange(most) >= widths[:, None]] = 0
        return tables

    def _span(self, plan: Plan, firsts: Ints, block_tokens: int) -> NDArray[np.int32]:
        """The block ids in the columns of the rows' tables from ``firsts`` to the last, one after the other."""
        counts = -(-(plan.firsts + plan.counts) // block_tokens) - firsts
        skipped = np.repeat(np.cumsum(counts) - counts - firsts, counts)
        return self.tables[np.repeat(plan.slots, counts), :, np.arange(len(skipped)) - skipped].reshape(-1)

    def _take(self, slot: Slot) -> None:
        at, one = slot.number, slot.sampling
        self._lengthen(at + 1)
        width = slot.table.shape[-1]
        self._widen(width)
        np.maximum(slot.table, 0, out=self.tables[at, :, :width])
        self.output_from[at] = slot.output_from
        self.samplings[at] = one
        self._known[at] = True
        self.tally.leave(at)
        self._heard[at] = 0
        if one is None:
            return
        self.temperature[at], self.top_k[at], self.top_p[at] = one.temperature, one.top_k, one.top_p
        self.min_p[at], self.typical_p[at] = one.min_p, one.typical_p
        seed = one.seed & _WORD64
        self.seed[at] = seed - (seed >> 63 << 64)  # the same bits, signed
        self.scores[at] = -1 if one.logprobs is None else one.logprobs
        self.edits[at], self.penalizes[at] = bool(one.logit_bias or one.bad_words), one.penalizes
        self.repetition[at], self.frequency[at] = one.repetition_penalty, one.frequency_penalty
        self.presence[at] = one.presence_penalty
        self.special[at] = self.edits[at] or one.penalizes or one.logprobs is not None or one.typical_p < 1
        if slot.past is not None:
            self._hear(np.full(len(slot.past), at), slot.past)

    def _hear(self, slots: Ints, tokens: NDArray[np.int32]) -> None:
        """Append each token to what its slot's past holds."""
        order = np.argsort(slots, kind="stable")
        slots = slots[order]
        at = self._heard[slots] + np.arange(len(slots)) - np.searchsorted(slots, slots)
        end = int(at.max(initial=-1)) + 1
        width = self._past.shape[1]
        if end > width:
            self._past = np.pad(self._past, ((0, 0), (0, max(end, 2 * width, 64) - width)))
        self._past[slots, at] = tokens[order]
        self._heard[slots] = at + 1  # of a slot's several the last one stays

    def _widen(self, columns: int) -> None:
        width = self.tables.shape[2]
        if columns > width:
            self.tables = np.pad(self.tables, ((0, 0), (0, 0), (0, max(columns, 2 * width) - width)))

    def _lengthen(self, slots: int) -> None:
        if slots <= len(self):
            return
        more = max(slots, 2 * len(self)) - len(self)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.pad(array, ((0, more), *((0, 0) for _ in array.shape[1:]))))
        self.samplings += [None] * more
