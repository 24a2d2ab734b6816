"""The order of turns: by age, also after preemptions in between."""

from __future__ import annotations

import pytest

from holdfast.runtime.order.queues import HEAD_START, Queues
from holdfast.runtime.sequence import GrantedLease, Sequence, Status
from holdfast.runtime.tokens import TokenList


def opened(queues: Queues, number: int) -> Sequence:
    sequence = Sequence(number, b"", TokenList())
    queues.touch(sequence, 0.0)
    return sequence


def test_a_move_that_there_is_not_names_both_ends() -> None:
    queues = Queues()
    sequence = opened(queues, 1)
    with pytest.raises(AssertionError, match="sequence 1 is idle; it cannot be running next"):
        queues.admit(sequence)
    assert sequence.status is Status.IDLE and not queues.running and not queues.waiting


def test_of_two_turns_that_stand_alike_the_older_one_is_first_after_preemption_too() -> None:
    queues = Queues()
    for number in range(1, HEAD_START + 2):
        sequence = opened(queues, number)
        if number > HEAD_START:
            sequence.lease = GrantedLease(priority=1, returns=1.0, blocks=0, records=0)
        queues.move(sequence, Status.RESTORING)
        queues.enqueue(sequence)
    order = [sequence.id for sequence in queues.waiting]
    assert order == [1, HEAD_START + 1, *range(2, HEAD_START + 1)]
    for _ in range(3):
        queues.admit(queues.waiting.heads[0])
    for _ in range(3):
        queues.move(next(reversed(queues.running.values())), Status.WAITING)
    assert [sequence.id for sequence in queues.waiting] == order


def test_running_turns_stand_in_order_whenever_they_are_admitted() -> None:
    queues = Queues()
    for number in range(1, 5):
        sequence = opened(queues, number)
        if number == 4:
            sequence.lease = GrantedLease(priority=1, returns=1.0, blocks=0, records=0)
        queues.move(sequence, Status.RESTORING)
        queues.enqueue(sequence)
        queues.admit(queues.waiting.heads[0])
    assert list(queues.running) == [1, 4, 2, 3]
