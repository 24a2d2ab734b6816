"""Nothing that a step or a verb does grows with the tiers, or with how many sequences are open: it is counted
beside a few, and beside twelve times as many of everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache, partial
from random import Random

import pytest

from holdfast.runtime.engine import Engine
from holdfast.runtime.scheduler import pending_moves
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import (
    Close,
    Extend,
    Fork,
    Generate,
    Lease,
    Locate,
    Open,
    Refusal,
    Settle,
    Stage,
    Statistics,
    Stop,
    TokenLimits,
    Truncate,
    VerbReply,
)
from holdfast.tests.operations import lines_of, operations_of
from holdfast.tests.runtime.fakes import GREEDY, FakeDisk, Willing, fake_engine, fake_memory

TIMES = 12


class Disk(FakeDisk):
    """``pace``: seconds for each look at the clock."""

    pace = 0.5

    def clock(self) -> float:
        self.time += self.pace
        return self.time


class Busy:
    """An engine with ``size`` times so many open sequences, and tiers that are full of their KV and that of
    closed ones; some have leases, some said when they are back, some hold nothing. ``near``: records on disk
    are read to the device directly, in steps one by one."""

    def __init__(self, size: int, *, near: bool) -> None:
        settings = SchedulerSettings(
            blocks=48 * size,
            vocab_size=256,
            max_context=64,
            block_tokens=4,
            max_step_tokens=16,
            max_sequences=4,
            max_open=1 << 20,
            depth=1 if near else 2,
        )
        self.disk = Disk(Willing(), near=near)
        engine, device = fake_engine(settings, memory=fake_memory(96 * size, 4), disk=self.disk)
        self.engine = Engine(engine.scheduler, device, clock=self.disk.clock)
        self.requests = self.seqs = 0
        self.known: deque[int] = deque()
        for number in range(70 * size):
            seq = self.talk()
            if number % 7 == 1:
                self.do(Close, seq)
            elif number % 7 == 2:
                self.do(Lease, seq, 0, 1e6, 1e5 + number)
            elif number % 7 == 3:
                self.do(Lease, seq, 0, 0.0, 1e3 + number)
            elif number % 7 == 4:
                self.do(Settle, seq, number % 2 == 0)
            elif number % 7 == 5:
                self.do(Lease, self.open([]), 0, 0.0, 1e5)
            else:
                self.known.append(seq)
            self.run()

    def do(self, verb: type, *fields: object) -> VerbReply | Refusal | None:
        self.requests += 1
        reply = self.engine.apply(verb(self.requests, *fields))
        assert not isinstance(reply, Refusal), reply
        return reply

    def run(self) -> None:
        while self.engine.step() is not None or self._waits():
            continue

    def _waits(self) -> bool:
        return not self.engine.idle or self.engine.scheduler.tiers.busy or self.disk.waiting

    def story(self, length: int = 13) -> list[int]:
        rng = Random(self.seqs)
        return [rng.randrange(200) for _ in range(length)]

    def open(self, tokens: list[int] | None = None) -> int:
        self.seqs += 1
        self.do(Open, self.seqs, b"", self.story() if tokens is None else tokens)
        return self.seqs

    def generate(self, seq: int, tokens: int = 4) -> None:
        self.do(Generate, seq, GREEDY, TokenLimits(tokens))

    def talk(self) -> int:
        seq = self.open()
        self.generate(seq)
        self.run()
        return seq


@cache
def busy(size: int, near: bool) -> Busy:
    return Busy(size, near=near)


def turn(here: Busy) -> None:
    here.talk()


def closed(here: Busy) -> None:
    here.do(Close, here.talk())
    here.run()


def extended(here: Busy) -> None:
    seq = here.open()
    here.do(Extend, seq, [1, 2, 3])
    here.run()


def truncated(here: Busy) -> None:
    seq = here.talk()
    here.do(Truncate, seq, 5, 1)
    here.run()


def stopped(here: Busy) -> None:
    seq = here.open()
    here.generate(seq, 9)
    here.engine.step()
    here.do(Stop, seq)
    here.run()


def forked(here: Busy) -> None:
    seq = here.talk()
    here.seqs += 2
    here.do(Fork, seq, [here.seqs - 1, here.seqs])
    here.run()


def leased(here: Busy) -> None:
    seq = here.talk()
    here.do(Lease, seq, 1, 50.0, 20.0)
    here.generate(seq, 2)
    here.run()
    here.do(Lease, seq, 0, 0.0, None)
    here.run()


def settled(here: Busy) -> None:
    seq = here.talk()
    here.do(Settle, seq, True)
    here.run()
    here.do(Stage, seq)
    here.run()


def located(here: Busy) -> None:
    here.do(Locate, here.talk())


def counted(here: Busy) -> None:
    here.do(Statistics)


def crowded(here: Busy) -> None:
    """More turns than there is place for: some wait."""
    for _ in range(8):
        here.generate(here.open())
    here.run()


def suspected(here: Busy) -> None:
    here.seqs += 1
    here.do(Open, here.seqs, b"", here.story(), True)
    here.generate(here.seqs)
    here.run()


def returned(here: Busy) -> None:
    """A turn in a sequence that was not used for longest: its KV is on disk, unless it is computed again."""
    seq = here.known.popleft()
    here.generate(seq)
    here.run()
    here.known.append(seq)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    "act",
    [
        turn,
        closed,
        extended,
        truncated,
        stopped,
        forked,
        leased,
        settled,
        located,
        counted,
        crowded,
        suspected,
        returned,
    ],
)
def test_nothing_grows_with_the_tiers_or_the_open_sequences(act: Callable[[Busy], None], near: bool) -> None:
    few, many = (operations_of(partial(act, busy(size, near))) for size in (1, TIMES))
    assert many.within(few), f"{few} became {many}"


def test_no_step_grows_with_the_verbs_that_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_moves, "LOOKS", 8)

    def longest(verbs: int) -> int:
        here = Busy(TIMES, near=False)
        seqs = [here.talk() for _ in range(verbs)]
        here.disk.poll = lambda now: []  # type: ignore[method-assign]
        here.disk.pace = 0.01
        for seq in seqs:
            here.do(Settle, seq, True)
        here.engine.step()  # sends the records
        return max(lines_of(here.engine.step) for _ in range(30))

    few, many = longest(8), longest(8 * TIMES)
    assert many <= 1.5 * few, f"{few} became {many}"


def test_no_idle_step_grows_with_them_and_an_audit_is_done_in_some_of_them() -> None:
    """The longest of many, as an audit goes on over some steps."""

    def longest(here: Busy) -> int:
        here.disk.pace = 0.0
        found = max(lines_of(here.engine.step) for _ in range(300))
        here.disk.pace = 0.5
        return found

    few, many = (longest(busy(size, False)) for size in (1, TIMES))
    assert many <= 2 * few, f"{few} became {many}: slices are larger where there is more"
