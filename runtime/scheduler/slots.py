"""The runner's batch as the scheduler knows it: which sequence has which slot, and what the batch has of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..plan import NO_BLOCKS, NO_PAST, Changes, Slot
from ..sequence import Sequence


@dataclass(slots=True, eq=False)
class _Known:
    """What the batch has of a slot's sequence: it was sent whole at the epoch ``sent``, None: it was not; and
    how many tokens of its ``past``."""

    sequence: Sequence
    sent: int | None = None
    past: int = 0


@dataclass(slots=True)
class ChangesDraft:
    """The changes of a plan that is being made."""

    whole: list[Slot] = field(default_factory=list)
    blocks: list[NDArray[np.int32]] = field(default_factory=list)
    past: list[NDArray[np.int32]] = field(default_factory=list)


class Slots:
    """``count`` slots, at least as many as all steps in flight may have rows. A sequence keeps its slot until
    it is closed, or another one that has a row needs it: then the one that had no row for longest loses its
    own. So none in flight does, and what a step draws for it stays in its slot until the next one has read
    it."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._known: OrderedDict[int, _Known] = OrderedDict()  # by slot; the longest unused first
        self._number = 0

    def __len__(self) -> int:
        """How many sequences have a slot."""
        return len(self._known)

    def forget(self) -> None:
        """Note that a step has failed: the next plan begins the batch anew."""
        self._number = 0
        for known in self._known.values():
            known.sent = None

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence that is closed, if it has one."""
        if sequence.slot is not None:
            del self._known[sequence.slot]
            self._free.append(sequence.slot)
            sequence.slot = None

    def enter(self, sequence: Sequence, end: int, changes: ChangesDraft) -> int:
        """Give a sequence its slot for a row up to position ``end``, and note in
        ``changes`` what the batch lacks of it. Returns the slot."""
        slot = self._slot_for(sequence)
        known, turn = self._known[slot], sequence.turn
        draws = turn is not None and end == sequence.total
        reads = draws and turn is not None and turn.sampling.reads_past
        first, blocks = sequence.table.take_changes()
        if known.sent != sequence.epoch:
            known.sent, known.past = sequence.epoch, end - 1 if reads else 0
            changes.whole.append(
                Slot(
                    slot,
                    sequence.id,
                    sequence.epoch,
                    sequence.table.view.copy(),
                    None if turn is None else turn.sampling,
                    sequence.tokens.view(end - 1).copy() if reads else None,
                    0 if turn is None else turn.output_from,
                )
            )
            return slot
        if len(blocks):
            columns = np.arange(first, first + len(blocks))
            changes.blocks.append(_joined(0, slot, columns, blocks))
        if reads and known.past < end - 1:
            tokens = sequence.tokens.view(end - 1)[known.past :]
            changes.past.append(_joined(slot, tokens))
            known.past = end - 1
        return slot

    def emit(self, changes: ChangesDraft) -> Changes:
        """The changes for the plan that goes out now."""
        number, self._number = self._number, self._number + 1
        return Changes(
            number,
            tuple(changes.whole),
            np.concatenate(changes.blocks) if changes.blocks else NO_BLOCKS,
            np.concatenate(changes.past) if changes.past else NO_PAST,
        )

    def _slot_for(self, sequence: Sequence) -> int:
        slot = sequence.slot
        if slot is None:
            slot = self._free.pop() if self._free else self._taken()
            self._known[slot] = _Known(sequence)
            sequence.slot = slot
        else:
            self._known.move_to_end(slot)
        return slot

    def _taken(self) -> int:
        """A slot that is taken from the sequence that had no row for longest."""
        slot, known = self._known.popitem(last=False)
        known.sequence.slot = None
        return slot


def _joined(*columns: object) -> NDArray[np.int32]:
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int32)  # type: ignore[arg-type]
