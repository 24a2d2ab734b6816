"""The engine's loop, through the thread form, on an engine that the test controls step by step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from holdfast.runtime.errors import EngineDied, LinkClosed, SequenceBusy, ShardMissing
from holdfast.runtime.link import engine_end
from holdfast.runtime.link.engine_end import LoadedEngine, LoadProgress
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.runtime.verbs import Finish, Sampling, Step, TokenLimits
from holdfast.tests.runtime.link.memory import extended
from holdfast.tests.runtime.link.scripted import HELLO, Scripted, flowing

pytestmark = pytest.mark.anyio

SETTINGS = EngineSettings(model="scripted")
GREEDY = Sampling()


class Beats:
    """Heartbeats, and a wait for one of a kind."""

    def __init__(self) -> None:
        self.all: list[Heartbeat] = []
        self._news = asyncio.Event()

    def __call__(self, beat: Heartbeat) -> None:
        self.all.append(beat)
        self._news.set()

    async def wait_for(self, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
        seen = 0
        while True:
            while seen < len(self.all):
                seen += 1
                if wanted(self.all[seen - 1]):
                    return self.all[seen - 1]
            self._news.clear()
            await self._news.wait()


async def test_a_turn_from_open_to_close() -> None:
    engine = flowing()
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        assert link.hello == HELLO and link.engine_number == 1
        state = await link.open([1, 2, 3])
        generation = await link.generate(state.seq, GREEDY, TokenLimits(4))
        rows = [row async for row in generation]
        assert [row.tokens for row in rows] == [[3], [4], [5], [6]]
        assert rows[-1].finish is Finish.LENGTH
        assert (await extended(link, state.seq, [9, 9])).length == 9
        await link.close(state.seq)
        assert not engine.held
    assert engine.steps == 4


async def test_verbs_wait_for_the_step_in_flight_and_keep_their_order() -> None:
    engine = Scripted()
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        seq = (await link.open([1])).seq
        generation = await link.generate(seq, GREEDY, TokenLimits(100))
        stopping = asyncio.create_task(link.stop(seq))
        refused = asyncio.create_task(link.truncate(seq, 0, expect_epoch=99))
        extension = asyncio.create_task(extended(link, seq, [7]))
        await asyncio.sleep(0)
        engine.gate.set()
        state = await stopping
        rows = [row async for row in generation]
        assert state.length == 1 + len(rows) == rows[-1].length
        with pytest.raises(Exception, match="epoch"):
            await refused
        assert (await extension).length == state.length + 1


async def test_a_refusal_changes_nothing_and_raises_its_class() -> None:
    engine = Scripted()
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        seq = (await link.open([1])).seq
        generation = await link.generate(seq, GREEDY, TokenLimits(1 << 19))
        engine.gate.set()
        with pytest.raises(SequenceBusy):
            await extended(link, seq, [1])
        state = await link.stop(seq)
        assert sum([len(row.tokens) async for row in generation]) == state.length - 1


async def test_leaving_a_generation_stops_it() -> None:
    engine = flowing()
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        seq = (await link.open([1])).seq
        generation = await link.generate(seq, GREEDY, TokenLimits(1 << 19))
        await anext(generation)
        stopping = generation.leave(1 << 20)
        assert stopping is not None
        await stopping
        assert engine.held[seq].until is None
        assert (await extended(link, seq, [1])).epoch == 2


async def test_statistics_include_both_ends() -> None:
    async with ThreadEngine(SETTINGS, load=flowing().loaded) as link:
        counted = await link.statistics()
        assert counted["steps"] == 0 and counted["link_inbox_verbs"] == 0 and counted["link_rows"] == 0


async def test_an_engine_that_raises_fails_all_calls_with_its_error() -> None:
    engine = Scripted(broken=ZeroDivisionError("by chance"))
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        seq = (await link.open([1])).seq
        generation = await link.generate(seq, GREEDY, TokenLimits(2))
        engine.gate.set()
        with pytest.raises(EngineDied, match="ZeroDivisionError: by chance"):
            await anext(generation)
        with pytest.raises(EngineDied):
            await link.open([1])
        assert not link.ready


async def test_a_typed_fault_of_loading_is_raised_as_its_class() -> None:
    def load(*_: object) -> LoadedEngine:
        raise ShardMissing("model-2.safetensors: missing")

    with pytest.raises(ShardMissing, match=r"model-2\.safetensors"):
        async with ThreadEngine(SETTINGS, load=load):
            pass


async def test_an_unexpected_error_of_loading_raises_engine_died() -> None:
    def load(*_: object) -> LoadedEngine:
        raise KeyError("rope")

    with pytest.raises(EngineDied, match="rope"):
        async with ThreadEngine(SETTINGS, load=load):
            pass


async def test_loading_reports_progress_and_stops_when_the_gateway_closes() -> None:
    beats = Beats()
    given_up = threading.Event()
    aboard = threading.Event()

    def load(settings: EngineSettings, progress: LoadProgress, liveness: Liveness) -> LoadedEngine:
        progress(0.5, "loading layer 7")
        aboard.set()
        try:
            while True:
                progress(0.5, "loading layer 7")
        except LinkClosed:
            given_up.set()
            raise

    form = ThreadEngine(SETTINGS, load=load, on_heartbeat=beats)
    entering = asyncio.create_task(form.__aenter__())
    beat = await beats.wait_for(lambda beat: beat.fraction == 0.5)
    assert beat.phase is Phase.LOADING and beat.detail == "loading layer 7"
    assert form.link.phase is Phase.LOADING and not form.link.ready
    with pytest.raises(EngineDied, match="loading"):
        await form.link.open([1])
    entering.cancel()
    await asyncio.wait([entering])
    assert given_up.is_set()


async def test_during_a_hung_step_the_link_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "STEP_FLOOR", 0.05)
    engine, beats = Scripted(), Beats()
    async with ThreadEngine(SETTINGS, load=engine.loaded, on_heartbeat=beats) as link:
        await beats.wait_for(lambda beat: beat.phase is Phase.IDLE)
        assert link.ready
        seq = (await link.open([1])).seq
        generation = await link.generate(seq, GREEDY, TokenLimits(2))
        told = await beats.wait_for(lambda beat: beat.deadline == 0)
        assert told.phase is Phase.STEPPING and "without progress" in told.detail
        assert link.overdue > 0 and not link.ready and link.phase is Phase.STEPPING
        engine.gate.set()  # it was only slow, after all
        assert len([row async for row in generation]) == 2
        beats.all.clear()
        await beats.wait_for(lambda beat: beat.phase is Phase.IDLE)
        assert link.ready


async def test_an_ended_sequence_is_no_longer_recorded_when_its_end_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[set[int]] = []
    made = Liveness(record=lambda sequences: recorded.append(set(sequences)))
    monkeypatch.setattr(engine_end, "Liveness", lambda: made)

    class Engaging(Scripted):
        """Computes one step at once; the next look for work waits for the gate."""

        def step(self) -> Step | None:
            if self.steps:
                self.gate.wait()
                return None
            running = [seq for seq, held in self.held.items() if held.until is not None]
            if not running:
                return None
            made.engage(frozenset(running))
            self.steps = 1
            return Step(1, [self._row(seq, self.held[seq]) for seq in running])

    engine = Engaging()
    async with ThreadEngine(SETTINGS, load=engine.loaded) as link:
        try:
            state = await link.open([1, 2, 3])
            generation = await link.generate(state.seq, GREEDY, TokenLimits(1))
            rows = [row async for row in generation]
            assert rows[-1].finish is Finish.LENGTH
            assert recorded == [{state.seq}, set()], "an engine that dies now did not die of it"
        finally:
            engine.gate.set()
