"""Slots of the runner's batch: what is sent whole, what as changes, and whose slot is taken."""

from __future__ import annotations

import numpy as np

from holdfast.runtime.plan import Changes
from holdfast.runtime.scheduler.slots import Slots
from holdfast.runtime.sequence import Sequence
from holdfast.runtime.tokens import TokenList


def sequence(number: int, tokens: int = 20) -> Sequence:
    made = Sequence(number, b"", TokenList(np.arange(tokens, dtype=np.int32)))
    made.table.extend([number, 100 + number])
    return made


def test_a_row_keeps_its_slot_in_its_step_although_its_sequence_is_preempted_in_it() -> None:
    slots, (first, second, third) = Slots(2), [sequence(number) for number in range(3)]
    for one in (first, second):
        slots.enter(one, 8, step=5)
        one.advance(5 if one is first else 4, 8, draws=False)
        one.recall()
    slots.enter(third, 8, step=5)
    assert first.slot is not None and second.slot is None


def sent(slots: Slots, *rows: Sequence) -> Changes:
    for row in rows:
        slots.enter(row, 8, step=1)
    return slots.emit()


def test_a_sequence_is_sent_whole_once_and_then_what_changed() -> None:
    slots, one = Slots(4), sequence(1)
    first = sent(slots, one)
    (whole,) = first.whole
    assert (first.number, whole.seq, whole.table.tolist()) == (0, 1, [[1, 101]])
    assert not sent(slots, one).whole and not len(sent(slots, one).blocks)
    one.table.extend([7, 8])
    one.table.replace(1, 9)
    changes = sent(slots, one)
    assert changes.number == 3
    assert changes.blocks.tolist() == [[0, 0, 1, 9], [0, 0, 2, 7], [0, 0, 3, 8]]


def test_after_a_step_has_failed_and_in_another_epoch_it_is_sent_whole() -> None:
    slots, one, other = Slots(4), sequence(1), sequence(2)
    sent(slots, one, other)
    slots.forget()
    again = sent(slots, one)
    assert (again.number, [whole.seq for whole in again.whole]) == (0, [1])
    one.halt()
    assert [whole.epoch for whole in sent(slots, one).whole] == [one.epoch]
    assert [whole.seq for whole in sent(slots, one, other).whole] == [2]


def test_the_sequence_without_a_row_for_longest_loses_its_slot() -> None:
    slots, many = Slots(3), [sequence(number) for number in range(5)]
    sent(slots, *many[:3])
    sent(slots, many[0])
    sent(slots, many[3])
    assert [one.slot is not None for one in many] == [True, False, True, True, False]
    assert [whole.seq for whole in sent(slots, many[0], many[4]).whole] == [4]
    assert [one.slot is not None for one in many] == [True, False, False, True, True]
    slots.release(many[3])
    assert [one.slot is not None for one in many] == [True, False, False, False, True]
