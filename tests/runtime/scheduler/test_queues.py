"""The order of turns: by place, whoever was preempted in between."""

from __future__ import annotations

from holdfast.runtime.scheduler.queues import HEAD_START, Roster
from holdfast.runtime.sequence import Promise, Sequence
from holdfast.runtime.tokens import TokenList


def test_of_two_turns_that_stand_alike_the_older_one_is_first_after_preemption_too() -> None:
    roster = Roster()
    for number in range(1, HEAD_START + 2):
        sequence = Sequence(number, b"", TokenList())
        roster.sequences[number] = sequence
        if number > HEAD_START:
            sequence.promise = Promise(priority=1, until=1.0, returns=1.0, blocks=0, records=0)
        roster.enqueue(sequence)
    order = [sequence.id for sequence in roster.turns()]
    assert order == [1, HEAD_START + 1, *range(2, HEAD_START + 1)]
    for _ in range(3):
        roster.admit()
    for _ in range(3):
        roster.preempt()
    assert [sequence.id for sequence in roster.turns()] == order
