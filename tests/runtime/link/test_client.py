"""One link over many engines: when it is ready, what it raises otherwise, and which sequences it knows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest

from holdfast.runtime.errors import EngineDied, FrameInvalid, LinkClosed, SequenceUnknown
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.gateway_end import FIRST_HEARTBEAT
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.verbs import BlockMap, KVTier, Locate, Open, SequenceState, TierRun, VerbReply
from holdfast.tests.runtime.link.memory import Bench, extended, settle
from holdfast.tests.runtime.link.scripted import HELLO

pytestmark = pytest.mark.anyio

IDLE = Heartbeat(Phase.IDLE, 2.0)


class Clock:
    """Time passes only when a test sets it ``ahead``."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return 100.0 + self.ahead


def loaded(link: EngineLink, clock: Callable[[], float] = time.monotonic) -> Bench:
    bench = Bench(clock)
    link.attach(bench.end)
    bench.up(IDLE, HELLO)
    link.welcome(HELLO)
    return bench


async def opened(link: EngineLink, bench: Bench) -> int:
    task = asyncio.create_task(link.open([1, 2]))
    await settle()
    (verb,) = bench.sent()
    assert isinstance(verb, Open)
    bench.up(VerbReply(verb.request, SequenceState(verb.seq, 2, 0, 0)))
    return (await task).seq


async def test_ready_follows_the_heartbeats() -> None:
    link, clock = EngineLink(), Clock()
    assert not link.ready and link.phase is Phase.LOADING
    bench = loaded(link, clock)
    assert link.ready and link.phase is Phase.IDLE and link.hello == HELLO
    clock.ahead = 3.0
    assert not link.ready and link.overdue > 0.5
    bench.up(Heartbeat(Phase.STEPPING, 20.0))
    assert link.ready and link.phase is Phase.STEPPING


async def test_a_heartbeat_with_deadline_zero_is_overdue_at_once() -> None:
    link = EngineLink()
    bench = loaded(link)
    bench.up(Heartbeat(Phase.STEPPING, 0.0, "2.0 s without progress"))
    assert not link.ready and link.heartbeat is not None and "without progress" in link.heartbeat.detail


async def test_an_engine_without_a_first_heartbeat_is_overdue() -> None:
    link, clock = EngineLink(), Clock()
    link.attach(Bench(clock).end)
    assert link.overdue == 0.0
    clock.ahead = FIRST_HEARTBEAT + 1
    assert link.overdue > 0.5


async def test_while_it_loads_verbs_raise_and_wait_ready_waits() -> None:
    link = EngineLink()
    with pytest.raises(EngineDied, match="no engine has been ready"):
        _ = link.hello
    bench = Bench()
    link.attach(bench.end)
    with pytest.raises(EngineDied, match="loading"):
        await link.statistics()
    waiting = asyncio.create_task(link.wait_ready())
    await settle()
    assert not waiting.done()
    link.welcome(HELLO)
    assert await waiting == HELLO


async def test_the_next_engine_knows_no_sequence_of_the_last() -> None:
    link = EngineLink()
    first = loaded(link)
    old = await opened(link, first)
    first.end.connection_lost(None)
    with pytest.raises(EngineDied):
        await extended(link, old, [1])
    second = loaded(link)
    assert link.engine_number == 2
    for call in (extended(link, old, [1]), link.stop(old), link.close(old), link.fork(old, 1)):
        with pytest.raises(SequenceUnknown):
            await call
    assert not second.sent()
    assert await opened(link, second) > old


async def test_a_map_of_blocks_is_asked_by_sequence_or_by_tokens() -> None:
    link = EngineLink()
    bench = loaded(link)
    seq = await opened(link, bench)
    blocks = BlockMap(2, 16, [TierRun(KVTier.DEVICE, True, 1)])
    for ask, of in (
        (link.locate(seq), (seq, [], b"")),
        (link.locate(None, [3], b"salt"), (None, [3], b"salt")),
    ):
        asked = asyncio.create_task(ask)
        await settle()
        (verb,) = bench.sent()
        assert isinstance(verb, Locate) and (verb.seq, verb.tokens, verb.salt) == of
        bench.up(VerbReply(verb.request, blocks=blocks))
        assert await asked == blocks
    asked = asyncio.create_task(link.locate(seq))
    await settle()
    (verb,) = bench.sent()
    bench.up(VerbReply(verb.request))
    with pytest.raises(FrameInvalid):
        await asked


async def test_a_dead_engine_that_restarts_is_not_a_hang() -> None:
    link, clock = EngineLink(), Clock()
    bench = loaded(link, clock)
    bench.end.connection_lost(None)
    clock.ahead = 100.0
    assert link.overdue == 0.0 and not link.ready


async def test_after_a_final_fault_all_verbs_raise_it() -> None:
    link = EngineLink()
    bench = loaded(link)
    call = asyncio.create_task(link.open([1]))
    await settle()
    link.fail(LinkClosed("closed"))
    link.fail(EngineDied("later"))
    with pytest.raises(LinkClosed):
        await call
    with pytest.raises(LinkClosed):
        await link.wait_ready()
    with pytest.raises(LinkClosed):
        await link.statistics()
    assert not link.ready and link.overdue == math.inf
    await settle()
    assert bench.end.lost.is_set()


async def test_waiting_for_an_engine_raises_once_none_will_come() -> None:
    link = EngineLink()
    waiting = asyncio.create_task(link.wait_ready())
    await settle()
    link.fail(EngineDied("the engine cannot start again"))
    with pytest.raises(EngineDied, match="cannot start again"):
        await waiting
