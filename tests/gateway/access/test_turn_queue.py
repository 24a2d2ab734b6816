"""Admission by the predicted wait: what is predicted, refusals before any work, an engine beyond its load."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from pathlib import Path

import pytest

from holdfast.gateway.access.turn_queue import RECENT, SAMPLES, TurnQueue
from holdfast.gateway.errors import QueueTooLong, http_answer
from holdfast.tests.gateway.keyed_service import keyed, said

pytestmark = pytest.mark.anyio
ACME, ZENITH, FREE = b"acme", b"zenith", b"free"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def queued(clock: Clock, turns: int, *, shared: bool = True, most: float | None = None) -> TurnQueue:
    """A queue of ACME's turns from which one has started every two seconds."""
    queue = TurnQueue(most, shared=shared, clock=clock)
    for _ in range(SAMPLES + turns):
        queue.enter(ACME)
    for _ in range(SAMPLES):
        clock.now += 2.0
        queue.start(ACME)
    assert len(queue) == turns and queue.seconds_per_start == 2.0
    return queue


def test_a_turn_waits_for_those_before_it() -> None:
    queue = queued(Clock(), 10)
    assert queue.predicted(ACME) == 20.0
    queue.leave(ACME)
    assert queue.predicted(ACME) == 18.0


def test_a_tenant_does_not_wait_for_anothers_queue_where_the_engine_is_shared() -> None:
    clock = Clock()
    queue = queued(clock, 10, most=15.0)
    assert queue.predicted(ZENITH) == 0.0
    queue.check(ZENITH)
    with pytest.raises(QueueTooLong) as refused:
        queue.check(ACME)
    assert refused.value.retry_after == 20.0
    queue.enter(ZENITH)
    assert queue.predicted(ZENITH) == 4.0, "two tenants alternate"
    assert queue.predicted(ACME) == 40.0
    alone = queued(clock, 10, shared=False, most=15.0)
    with pytest.raises(QueueTooLong):
        alone.check(ZENITH)


def test_without_a_queue_no_turn_is_refused_however_slow_the_engine_was() -> None:
    clock = Clock()
    queue = queued(clock, 1, most=0.5)
    with pytest.raises(QueueTooLong):
        queue.check(ACME)
    queue.start(ACME)
    queue.check(ACME)


def test_a_long_prompt_alone_does_not_count() -> None:
    clock = Clock()
    queue = TurnQueue(1.0, clock=clock)
    for _ in range(10):
        queue.enter(ACME)
        clock.now += 100.0
        queue.start(ACME)
    assert queue.seconds_per_start == 0.0 and queue.predicted(ACME) == 0.0


def test_an_engine_that_becomes_slower_or_stops_is_noticed_before_all_samples_are_its_own() -> None:
    clock = Clock()
    queue = queued(clock, 200)
    for _ in range(RECENT):
        clock.now += 10.0
        queue.start(ACME)
    assert 9.0 < queue.seconds_per_start < 10.0
    clock.now += 1000.0
    assert queue.seconds_per_start > 20.0
    for _ in range(SAMPLES - RECENT):
        queue.enter(ACME)
        clock.now += 1.0
        queue.start(ACME)
    assert queue.seconds_per_start < 10.0, "faster again"


def test_an_end_without_output_says_nothing_of_the_engine() -> None:
    queue = queued(Clock(), 10)
    for _ in range(5):
        queue.leave(ACME)
    assert queue.seconds_per_start == 2.0 and len(queue) == 5


def test_a_refusal_says_the_predicted_wait() -> None:
    body, status, headers = http_answer(QueueTooLong("The engine has too much to do", 41.3))
    assert (status, headers) == (503, {"Retry-After": "42"}) and body["error"]["code"] == "engine_overloaded"


@pytest.mark.parametrize("load", [0.8, 1.0, 3.0, 10.0])
def test_an_engine_beyond_its_load_stays_busy_and_no_turn_waits_much_too_long(load: float) -> None:
    """An engine with 8 places, in which each turn stays 4 s: two turns start in a second."""
    clock, most = Clock(), 10.0
    queue = TurnQueue(most, clock=clock)
    waiting, ends = deque[float](), list[float]()
    waits, told, free = list[float](), list[float](), 8
    step, arrivals, served = 0.01, 0.0, 0
    for _ in range(60_000):
        clock.now += step
        while ends and ends[0] <= clock.now:
            heapq.heappop(ends)
            free += 1
        arrivals += 2.0 * load * step
        if arrivals >= 1.0:
            arrivals -= 1.0
            try:
                queue.check(ACME)
            except QueueTooLong as error:
                told.append(error.retry_after)
            else:
                waiting.append(clock.now)
                queue.enter(ACME)
        while free and waiting:
            served += 1
            arrived = waiting.popleft()
            if arrived > 60.0:  # before the first starts nothing is known
                waits.append(clock.now - arrived)
            queue.start(ACME)
            free -= 1
            heapq.heappush(ends, clock.now + 4.0)
    assert served / clock.now >= 0.95 * min(2.0, 2.0 * load), "goodput"
    assert max(waits) <= 1.25 * most
    assert bool(told) is (load > 1.0)
    assert all(most < seconds < 2 * most for seconds in told[-100:])


async def test_a_turn_that_would_wait_too_long_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[tenants.acme]\nkeys = ["alpha"]\n[tenants.zenith]\nkeys = ["gamma"]\n'
    async with keyed(tmp_path, text, max_queue_seconds=0.0) as served:
        queue = served.service.turns.queue
        monkeypatch.setattr(TurnQueue, "seconds_per_start", 7.0)
        served.link.flowing = False
        async with (
            served.wire("alpha") as wire,
            served.wire("alpha") as second,
            served.wire("gamma") as other,
        ):
            await wire.send("response.create", items=[said("begin")])
            await wire.until("response.created")
            begun = served.begun
            (live,) = (one for one in served.service.sessions() if one.running)
            refused = await second.say()
            assert (refused["code"], refused["type"]) == ("engine_overloaded", "rate_limit_error")
            assert refused["retry_after"] == 7.0
            assert served.begun == begun
            assert served.service.turns.metrics.refused == {("acme", "realtime", "engine_overloaded"): 1}
            snapshot = await served.service.snapshot()
            assert snapshot.gateway["turns_waiting"] == 1
            assert snapshot.gateway["turns_seconds_per_start"] == 7.0
            await other.send("response.create", items=[said("begin")])
            await other.until("response.created")
            served.link.flow()
            for one in (wire, other):
                assert (await one.until("response.done"))[-1]["response"]["status"] == "completed"
            assert live.at_rest and len(queue) == 0
            assert (await second.say())["status"] == "completed"


async def test_turns_that_end_without_output_leave_the_queue(tmp_path: Path) -> None:
    async with keyed(tmp_path, '[tenants.acme]\nkeys = ["alpha"]\n') as served:
        async with served.wire("alpha") as wire:
            served.link.flowing = False
            await wire.send("response.create", items=[said("begin")])
            await wire.until("response.created")
            assert len(served.service.turns.queue) == 1
            await wire.send("response.cancel")
            await wire.until("response.done")
            for _ in range(10):  # its task ends behind its last event
                await asyncio.sleep(0)
            assert len(served.service.turns.queue) == 0
            await wire.send("response.create", items=[said("begin")])
            await wire.until("response.created")
        await served.service.close()
        assert len(served.service.turns.queue) == 0, "a session that was closed"
