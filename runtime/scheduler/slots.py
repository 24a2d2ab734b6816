"""The runner's batch as the scheduler knows it: which sequence has which slot, and what the batch has of it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ..columns import NO_GRAMMAR, NO_STOP, Columns
from ..plan import NO_BLOCKS, NO_PAST, Changes, Ints, Slot
from ..sequence import Sequence


class Slots:
    """``count`` slots, at least as many as all steps in flight may have rows. A sequence keeps its slot until
    it is closed, or another one that has a row needs it: then the one that had no row for longest loses its
    own. So none in flight does, and what a step draws for it stays in its slot until the next one has read
    it."""

    def __init__(self, count: int) -> None:
        self.columns = Columns(count)
        self._free = list(reversed(range(count)))
        self._held: OrderedDict[int, Sequence] = OrderedDict()  # by slot; the longest without a row first
        self._sent: dict[int, int] = {}  # by slot: the epoch at which it was sent whole
        self._number = 0
        # Of the plan that is being made, as in `Changes`.
        self._whole: list[Slot] = []
        self._blocks: list[tuple[int, int, int, int]] = []
        self._past: list[NDArray[np.int32]] = []

    def forget(self) -> None:
        """Note that a step has failed: the next plan begins the batch anew."""
        self._number = 0
        self._sent.clear()
        for sequence in self._held.values():
            sequence.touched()

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that is closed, if it has one."""
        if sequence.slot is not None:
            self._free.append(self._leave(sequence.slot))

    def enter(self, sequence: Sequence, end: int, step: int) -> int:
        """Give a sequence its slot for a row of ``step`` up to position ``end``, and note what the batch lacks
        of it. Returns the slot."""
        slot = self._slot_for(sequence, step)
        columns, turn = self.columns, sequence.turn
        draws = turn is not None and end == sequence.total
        reads = draws and turn is not None and turn.sampling.reads_past
        changed = sequence.table.take_changes()
        if self._sent.get(slot) != sequence.epoch:
            self._sent[slot], columns.heard[slot] = sequence.epoch, end - 1 if reads else 0
            self._whole.append(
                Slot(
                    slot,
                    sequence.id,
                    sequence.epoch,
                    sequence.table.view.T.copy(),
                    None if turn is None else turn.sampling,
                    sequence.tokens.view(end - 1).copy() if reads else None,
                    0 if turn is None else turn.output_from,
                )
            )
            return slot
        self._blocks += ((group, slot, index, block) for group, index, block in changed)
        if reads and columns.heard[slot] < end - 1:
            tokens = sequence.tokens.view(end - 1)[columns.heard[slot] :]
            self._past.append(_joined(slot, tokens))
            columns.heard[slot] = end - 1
        return slot

    def enter_plain(self, slots: Ints) -> None:
        """The same for rows that merely decode, before they are planned."""
        columns = self.columns
        for slot in slots[columns.rewired[slots]].tolist():
            changed = self._held[slot].table.take_changes()
            self._blocks += ((group, slot, index, block) for group, index, block in changed)
        columns.rewired[slots] = False
        if len(reading := slots[columns.reads[slots]]):
            ends, fed = columns.planned[reading], columns.pending_samples[reading] > 0
            late = columns.heard[reading] < ends  # by one token: by more, it was touched
            tokens = np.where(fed, columns.last[reading], columns.before[reading])
            self._past.append(_joined(reading[late], tokens[late]))
            columns.heard[reading] = ends

    def qualify(self, sequence: Sequence) -> None:
        """Let the sequence be plain from now on, if each next row of it merely decodes."""
        turn, slot, columns = sequence.turn, sequence.slot, self.columns
        if turn is None or slot is None or sequence.isolated or sequence.needs_lookup or sequence.shared_tail:
            return
        how, limits, total = turn.sampling, turn.limits, sequence.total
        asks = how.logprobs is not None or how.prompt_logprobs is not None
        asks = asks or (how.grammar is not None and turn.grammar is None)
        again = sequence.from_tiers.compute_until is not None or sequence.high_water > sequence.planned
        early = turn.generated_from + total - turn.prompt < limits.min_tokens
        if asks or again or early or total - sequence.planned != 1 or sequence.length < 2:
            return
        if len(limits.stop_ids) > columns.stops.shape[1]:
            more = len(limits.stop_ids) - columns.stops.shape[1]
            columns.stops = np.pad(columns.stops, ((0, 0), (0, more)), constant_values=NO_STOP)
        columns.epochs[slot], columns.lengths[slot] = sequence.epoch, sequence.length
        columns.prompts[slot], columns.ends[slot] = turn.prompt, turn.prompt + turn.allowed
        before, last = sequence.tokens.view(sequence.length)[-2:].tolist()
        columns.before[slot], columns.last[slot] = before, last
        columns.gather[slot], columns.reads[slot] = limits.gather, how.reads_past
        columns.grammars[slot] = NO_GRAMMAR if turn.grammar is None else turn.grammar
        columns.stops[slot] = NO_STOP
        columns.stops[slot, : len(limits.stop_ids)] = limits.stop_ids
        columns.plain[slot] = columns.rewired[slot] = True
        columns.version += 1

    def emit(self) -> Changes:
        """The changes for the plan that goes out now."""
        blocks = np.array(self._blocks, dtype=np.int32) if self._blocks else NO_BLOCKS
        past = np.concatenate(self._past) if self._past else NO_PAST
        changes = Changes(self._number, tuple(self._whole), blocks, past)
        self._number += 1
        self._whole, self._blocks, self._past = [], [], []
        return changes

    def _slot_for(self, sequence: Sequence, step: int) -> int:
        slot = sequence.slot
        if slot is None:
            slot = self._free.pop() if self._free else self._taken(step)
            self._held[slot] = sequence
            sequence.take_slot(self.columns, slot)
        else:
            self._held.move_to_end(slot)
        return slot

    def _taken(self, step: int) -> int:
        """A slot that is taken from the sequence that had no row for longest, and has none in flight nor in the
        plan of ``step``, which is being made: its row stays there, even if it was preempted since."""
        held = self._held.items()
        return self._leave(next(slot for slot, one in held if not one.in_flight and one.last_step != step))

    def _leave(self, slot: int) -> int:
        self._held.pop(slot).leave_slot()
        self._sent.pop(slot, None)
        return slot


def _joined(*columns: object) -> NDArray[np.int32]:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int32)  # type: ignore[arg-type]
