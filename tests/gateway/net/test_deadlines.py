"""Each connection's stage ends in time, whatever order they come in, by one timer; those without a request can
be cut, the longest waiting first."""

from __future__ import annotations

import random
import socket
from dataclasses import replace
from typing import Any

import pytest

from holdfast.gateway.net.deadlines import (
    FREE,
    LEAST_TAKEN,
    MOST_HELD,
    MOST_UNFINISHED,
    UNREAD,
    Deadline,
    Deadlines,
)
from holdfast.gateway.net.deadlines import ConnectionStage as Stage
from holdfast.gateway.settings import ClientLimits

from .manual_clock import ManualClock

LIMITS = replace(
    ClientLimits(), header_seconds=10, idle_seconds=5, body_seconds=30, stall_seconds=20, close_seconds=3
)
SECONDS = {
    Stage.HEAD: 10,
    Stage.REST: 10,
    Stage.IDLE: 5,
    Stage.MESSAGE: 30,
    Stage.BODY: 30,
    Stage.SERVED: 20,
    Stage.CLOSING: 3,
}


class Transport:
    """``unsent``: bytes. ``closing``: it was closed. ``aborted``: at that time."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.unsent = 0
        self.closing = False
        self.aborted: float | None = None

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = self.aborted if self.aborted is not None else self._clock.now


class Connection:
    """A connection that notes what it is told. ``deaf``: it does nothing then."""

    def __init__(self, deadlines: Deadlines, clock: ManualClock, *, deaf: bool = False) -> None:
        self.transport: Any = Transport(clock)
        self._clock = clock
        self._deaf = deaf
        self.overdues: list[tuple[Stage, float]] = []
        self.deadline: Deadline = deadlines.begin()
        self.deadline.watch(self)

    def overdue(self, stage: Stage) -> None:
        self.overdues.append((stage, self._clock.now))
        if not self._deaf:
            self.transport.abort()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def deadlines(clock: ManualClock) -> Deadlines:
    return Deadlines(LIMITS, clock)


@pytest.mark.parametrize(
    "stage",
    [stage for stage in Stage if stage not in (Stage.SERVED, Stage.CLOSING)],
)
def test_a_stage_ends_in_its_time_and_its_connection_too_whatever_it_makes_of_it(
    clock: ManualClock, deadlines: Deadlines, stage: Stage
) -> None:
    deaf, ends = Connection(deadlines, clock, deaf=True), Connection(deadlines, clock)
    clock.advance(2)
    for one in (deaf, ends):
        one.deadline.enter(stage)
    clock.advance(1000)
    over = 2 + SECONDS[stage]
    assert deaf.overdues == ends.overdues == [(stage, over)]
    assert ends.transport.aborted == over and deaf.transport.aborted == over + SECONDS[Stage.CLOSING]


def test_a_served_connection_is_dropped_when_its_client_takes_too_little(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    idle, reads, trickles = (Connection(deadlines, clock) for _ in range(3))
    for one in (idle, reads, trickles):
        one.deadline.enter(Stage.SERVED)
    clock.advance(10)
    reads.transport.unsent = trickles.transport.unsent = UNREAD + 3 * LEAST_TAKEN
    clock.advance(15)  # looked at: from here on it counts
    for _ in range(3):
        reads.transport.unsent -= LEAST_TAKEN
        trickles.transport.unsent -= LEAST_TAKEN - 1
        clock.advance(SECONDS[Stage.SERVED])
    assert trickles.transport.aborted == 40
    clock.advance(1000)
    assert idle.transport.aborted is None and reads.transport.aborted is None
    assert not (idle.overdues or reads.overdues)


def test_a_closed_connection_has_as_long_as_its_client_reads(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    reads, waits, unheard = (Connection(deadlines, clock) for _ in range(3))
    reads.transport.unsent = 2 * LEAST_TAKEN
    for one in (reads, waits):
        one.transport.closing = True
        one.deadline.enter(Stage.CLOSING)
    unheard.deadline.enter(Stage.SERVED)
    unheard.transport.closing = True  # a library closed it, and told no one
    clock.advance(2)
    reads.transport.unsent -= LEAST_TAKEN
    clock.advance(1000)
    assert waits.transport.aborted == 3
    assert reads.transport.aborted == 6
    assert unheard.transport.aborted == SECONDS[Stage.SERVED] + 3


def test_a_socket_without_a_protocol_is_shut_when_its_time_is_over(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        deadlines.begin(ours)
        clock.advance(9.9)
        assert len(deadlines) == 1
        clock.advance(0.1)
        assert theirs.recv(1) == b"" and len(deadlines) == 0
    gone, other = socket.socketpair()
    deadlines.begin(gone)
    gone.close(), other.close()
    clock.advance(10)
    assert len(deadlines) == 0


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_none_is_late_or_early_and_one_timer_runs(
    clock: ManualClock, deadlines: Deadlines, seed: int
) -> None:
    rng = random.Random(seed)
    alive: dict[Connection, tuple[Stage, float]] = {}
    for _ in range(400):
        match rng.randrange(4):
            case 0:
                alive[Connection(deadlines, clock)] = (Stage.HEAD, clock.now)
            case 1 if alive:
                one, stage = rng.choice(list(alive)), rng.choice(list(Stage))
                one.deadline.enter(stage)
                alive[one] = (stage, clock.now)
            case 2 if alive:
                one = rng.choice(list(alive))
                one.deadline.end()
                del alive[one]
            case _:
                clock.advance(rng.choice((0.0, 0.1, 1.0, 5.0)))
        assert clock.pending <= 1
        for one, (stage, since) in list(alive.items()):
            over = since + SECONDS[stage]
            if stage is Stage.SERVED:
                assert one.transport.aborted is None
                alive[one] = (stage, since if over > clock.now else over)
            elif over <= clock.now:
                assert one.transport.aborted == pytest.approx(over), stage
                one.deadline.end()
                del alive[one]
            else:
                assert one.transport.aborted is None
        assert len(deadlines) == len(alive)


def test_those_that_have_no_request_are_cut_the_longest_waiting_first(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    made: dict[Stage, list[Connection]] = {}
    for stage in Stage:
        made[stage] = [Connection(deadlines, clock) for _ in range(3)]
        for one in made[stage]:
            one.deadline.enter(stage)
            clock.advance(0.01)
    wanted = [one for stage in FREE for one in made[stage]]
    for count in (1, 4, 100):
        cut, wanted = wanted[:count], wanted[count:]
        assert deadlines.shed(count) == len(cut)
        assert all(one.transport.aborted is not None for one in cut)
        assert all(one.transport.aborted is None for one in wanted)
    serving = [one for stage in Stage if stage not in FREE for one in made[stage]]
    assert deadlines.shed(1) == 0 and len(deadlines) == len(serving)
    assert all(one.transport.aborted is None for one in serving)


def test_answers_that_are_not_read_take_no_more_than_so_much_memory(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    size = MOST_HELD // 16
    made: list[Connection] = []
    for _ in range(100):
        made += [Connection(deadlines, clock) for _ in range(3)]
        read, unread, served = made[-3:]
        unread.transport.unsent = served.transport.unsent = size
        for one, stage in (
            (read, Stage.IDLE),
            (unread, Stage.CLOSING),
            (served, Stage.SERVED),
        ):
            one.deadline.enter(stage)
        left = [one for one in made if one.transport.aborted is None]
        waits = [one for one in left if one.deadline.stage is Stage.CLOSING]
        assert sum(one.transport.unsent for one in waits) <= MOST_HELD
        assert waits[-1] is unread, "the last"
        assert all(one in left for one in made if one.deadline.stage is not Stage.CLOSING)
    assert len(deadlines) == len(left) >= 200


def test_heads_that_do_not_end_take_no_more_than_so_much_memory(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    made = [Connection(deadlines, clock) for _ in range(3)]
    first, second, third = made
    first.deadline.hold(MOST_HELD // 2)
    second.deadline.hold(MOST_HELD // 2)
    third.deadline.enter(Stage.SERVED)
    third.deadline.hold(MOST_HELD)
    assert not any(one.transport.aborted == 0 for one in made)
    second.deadline.hold(1)
    assert first.transport.aborted == 0, "the longest waiting"
    assert second.transport.aborted == 0, "and more, until half is free"
    assert third.transport.aborted is None
    clock.advance(9)
    assert len(deadlines) == 1


def test_what_comes_of_a_connection_that_was_cut_counts_for_no_other(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    for _ in range(3):
        cut = Connection(deadlines, clock)
        cut.deadline.enter(Stage.MESSAGE)
        cut.deadline.hold(MOST_UNFINISHED + 1)
        assert cut.transport.aborted is not None
        cut.deadline.hold(MOST_UNFINISHED)
    other = Connection(deadlines, clock)
    other.deadline.enter(Stage.MESSAGE)
    other.deadline.hold(MOST_UNFINISHED // 2)
    assert other.transport.aborted is None


def test_when_the_server_ends_all_have_one_time_whatever_they_do(
    clock: ManualClock, deadlines: Deadlines
) -> None:
    made = [Connection(deadlines, clock) for _ in Stage]
    for one, stage in zip(made, Stage, strict=True):
        one.deadline.enter(stage)
    deadlines.close()
    clock.advance(2)
    for one in made:
        one.deadline.enter(Stage.SERVED)
    clock.advance(1)
    assert [one.transport.aborted for one in made] == [3] * len(made)
