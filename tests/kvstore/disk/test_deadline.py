"""When a disk process that says nothing counts as lost: by the time waited, not by the time slept."""

from __future__ import annotations

from math import inf

from holdfast.kvstore.disk.client import AWAY, OPENING, AnswerDeadline


def test_a_process_that_is_waited_for_is_lost_at_its_deadline() -> None:
    patience = AnswerDeadline()
    patience.heard(0.0)
    looks = [at / 10 for at in range(52)]
    assert [now for now in looks if patience.over(now, 5.0, opening=False)] == [5.1]


def test_an_engine_that_was_away_looks_once_more() -> None:
    patience = AnswerDeadline()
    patience.heard(0.0)
    assert not patience.over(0.0, 5.0, opening=False)
    assert not patience.over(60.0, 5.0, opening=False), "both may have been stopped"
    assert not patience.over(60.0 + AWAY / 2, 5.0, opening=False)
    assert patience.over(60.0 + AWAY * 1.1, 5.0, opening=False), "but no more than once"


def test_steps_of_seconds_keep_a_dead_process_no_longer_than_one_of_them() -> None:
    patience = AnswerDeadline()
    patience.heard(0.0)
    lost = [now for now in range(0, 40, 2) if patience.over(float(now), 5.0, opening=False)]
    assert lost[0] == 8.0


def test_a_new_process_says_something_within_its_time() -> None:
    patience = AnswerDeadline()
    patience.heard(100.0)
    looks = [100.0 + at / 2 for at in range(int(2 * OPENING) + 3)]
    assert [now for now in looks if patience.over(now, inf, opening=True)] == [
        100.5 + OPENING,
        101.0 + OPENING,
    ]
    patience.heard(101.0 + OPENING)
    assert not patience.over(101.5 + OPENING, inf, opening=True), "it has said something"
