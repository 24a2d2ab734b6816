"""Pauses of sessions as they were told and as they were: one by one, and in sums."""

from __future__ import annotations

from holdfast.sessions.waits import Wait, Waits


def test_a_pause_is_kept_with_what_was_expected_of_it() -> None:
    now = [0.0]
    waits = Waits(keep=2, clock=lambda: now[0])
    for session, expected, real in (("a", 1.0, 3.0), ("b", 5.0, 2.0), ("c", 4.0, 4.5)):
        waits.leaves(session, 100, expected)
        assert waits.statistics()["waiting"] == 1
        now[0] += real
        waits.returns(session)
    assert list(waits.records) == [Wait("b", 100, 5.0, 2.0), Wait("c", 100, 4.0, 4.5)]
    assert waits.statistics() == {
        "waits_ended": 3,
        "waits_early": 1,
        "waits_expected_seconds": 10.0,
        "waits_real_seconds": 9.5,
        "waiting": 0,
    }


def test_the_last_word_counts_and_who_ends_does_not_return() -> None:
    now = [0.0]
    waits = Waits(clock=lambda: now[0])
    waits.leaves("a", 10, 60.0)
    now[0] = 5.0
    waits.leaves("a", 10, 1.0)
    now[0] = 7.0
    waits.returns("a")
    waits.returns("a")
    waits.returns("nobody")
    assert list(waits.records) == [Wait("a", 10, 1.0, 2.0)]
    waits.leaves("b", 10, 1.0)
    waits.ends("b")
    waits.returns("b")
    assert waits.statistics()["waits_ended"] == 1 and waits.statistics()["waiting"] == 0
