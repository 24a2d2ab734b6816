"""Retention counts the time that servers ran. What the time of day says, loses nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.sessions.journal.clock import LONGEST_SECONDS, ServedClock
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import EventReceived, append
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.settings import DAY

from ..session_stage import run
from .bad_disks import killed
from .journal_stage import MODEL, SMALL, birth, folder

HOUR = 3600.0


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def run(self, store: JournalStore, seconds: float) -> None:
        """A server runs for so long, and looks at its clock as it does."""
        while seconds > 0:
            self.seconds += min(seconds, LONGEST_SECONDS)
            seconds -= LONGEST_SECONDS
            store.watch()


@contextmanager
def served(path: Path, hands: Hands, *, dies: bool = False) -> Iterator[JournalStore]:
    store = open_for(path, MODEL, replace(SMALL, max_age_seconds=HOUR), clock=ServedClock(hands))
    yield store
    killed(store) if dies else store.close()


def stepped(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """The time of day is another one from now on."""
    day, nanoseconds = time.time, time.time_ns
    patch.setattr(time, "time", lambda: day() + seconds)
    patch.setattr(time, "time_ns", lambda: nanoseconds() + int(seconds * 1e9))


async def swept(journal: Journal, times: int = 3) -> int:
    """The number of sessions when retention has run so often."""
    for _ in range(times):
        await journal.read(lambda store: None)
    told = await journal.statistics()
    return int(told["journal_sessions"])


@pytest.mark.parametrize("step", [31 * DAY, 365 * 40 * DAY, -40 * DAY, -365 * 50 * DAY])
@pytest.mark.parametrize("when", ["in service", "at the boot", "at the boot before"])
@run
async def test_no_step_of_the_time_of_day_forgets_a_session(
    step: float, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = replace(SMALL, sweep_seconds=-1.0)
    with folder() as path:
        with pytest.MonkeyPatch.context() as before:
            if when == "at the boot before":
                stepped(before, step)
            journal = await Journal.open(path, MODEL, always)
            journal.put(birth(1))
            await journal.sync()
            await journal.aclose()
        if when == "at the boot":
            stepped(monkeypatch, step)
        journal = await Journal.open(path, MODEL, always)
        journal.put(birth(2))
        await journal.sync()
        if when == "in service":
            stepped(monkeypatch, step)
        journal.put([append(2, 0, EventReceived(event="e"))])
        await journal.sync()
        assert await swept(journal) == 2
        monkeypatch.undo()  # it is right again
        assert await swept(journal) == 2
        await journal.aclose()


def test_a_session_ages_while_servers_run_and_is_forgotten_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    hands = Hands()
    with folder() as path:
        with served(path, hands) as store:
            store.write(birth(1))
            hands.run(store, 0.5 * HOUR)
            store.write(birth(2))
        hands.seconds += 1000 * HOUR  # no server runs
        with served(path, hands) as store:
            assert store.sweep(frozenset()) == 0
            hands.run(store, 0.4 * HOUR)
            assert store.sweep(frozenset()) == 0
            hands.run(store, 0.2 * HOUR)
            assert store.sweep(frozenset({1})) == 0, "it is open"
            assert store.sweep(frozenset()) == 1 and list(store.sessions.states) == [2]
            assert store.statistics()["journal_forgotten_age"] == 1
            assert any("1 sessions are forgotten: they were not used" in line for line in caplog.messages)


@pytest.mark.parametrize("dies", [True, False])
def test_the_time_of_an_idle_server_counts(dies: bool) -> None:
    hands = Hands()
    with folder() as path:
        with served(path, hands) as store:
            store.write(birth(1))
        for _ in range(4):
            with served(path, hands, dies=dies) as store:
                hands.run(store, 0.3 * HOUR)
                store.note()  # as a server does at each run of retention
                hands.run(store, 60.0)
        with served(path, hands) as store:
            assert store.sweep(frozenset()) == 1


@pytest.mark.parametrize("step", [31 * DAY, -31 * DAY])
def test_a_server_that_was_stopped_counts_for_the_time_that_it_ran(step: float) -> None:
    """By SIGSTOP, in a frozen container, or with its whole machine; and a clock that should only go forward."""
    hands = Hands()
    with folder() as path, served(path, hands) as store:
        store.write(birth(1))
        first = store.sessions.states[1].used
        for _ in range(20):
            hands.seconds += step
            store.watch()
            assert store.sweep(frozenset()) == 0
        store.write(birth(2))
        assert 0 <= store.sessions.states[2].used - first <= 21 * LONGEST_SECONDS * 1_000_000


def test_what_is_written_later_is_never_earlier() -> None:
    """Across restarts, kills, and the loss of the store's identity."""
    hands = Hands()
    times = [0]
    with folder() as path:
        for number in range(1, 7):
            with served(path, hands, dies=number % 2 == 0) as store:
                store.write(birth(number))
                times.append(store.sessions.states[number].used)
                hands.run(store, 60.0)
                store.write([append(number, 0, EventReceived(event="e"))])
                times.append(store.sessions.states[number].used)
            hands.seconds -= 500.0  # the next machine's begins anew
            if number % 3 == 0:
                (path / "identity").unlink()
        assert times == sorted(times) and times[-1] >= 6 * 60 * 1_000_000
