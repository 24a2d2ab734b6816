"""Hypothesis over interleavings: verbs, cancelled callers and steps in flight, through the real codec.

The real scheduler and engine run on the fake device; its tokens are a digest of all KV read; each
sequence's `Shadow` is a plain list of tokens. Bytes go down and come up in pieces of any size, verbs take
effect between steps, and an engine may die at any moment. A stale epoch, a desynchronised reply, a row twice
or none shows as another token, a wrong length or a task that never ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from holdfast.runtime.errors import EngineDied, EpochStale, SequenceUnknown
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.gateway_end import GatewayEnd
from holdfast.runtime.link.generation import Generation
from holdfast.runtime.link.messages import Hello, frame, verb_reader
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import AnyVerb, Finish, Sampling, TokenLimits, VerbReply
from holdfast.tests.runtime.fakes import Shadow, fake_engine
from holdfast.tests.runtime.link.memory import MemoryTransport, extended, settle

CONTEXT = 40
HELLO = Hello("fake", "fake", "none", 256, (), CONTEXT, 4, 24, 1, 0)

prompts = st.lists(st.integers(0, 255), min_size=1, max_size=12)
samplings = st.builds(Sampling, st.sampled_from([0.0, 1.0]), st.just(0), st.just(1.0), seed=st.integers(0, 3))


@dataclass(eq=False)
class Talk:
    """One sequence as its session sees it. ``lost``: how many tokens it holds must be asked."""

    seq: int
    shadow: Shadow
    epoch: int = 0
    sampling: Sampling = Sampling()
    generation: Generation | None = None
    reader: asyncio.Task[None] | None = None
    verb: asyncio.Task[None] | None = None
    ending: bool = False
    lost: bool = False
    cut: int | None = None
    gone: bool = False

    @property
    def free(self) -> bool:
        return not self.gone and (self.verb is None or self.verb.done())

    @property
    def running(self) -> bool:
        return self.generation is not None and self.generation.running and not self.ending

    @property
    def settled(self) -> bool:
        """Its length is known and nothing runs: verbs that need an idle sequence may come."""
        return (
            self.free and not self.lost and not self.running and (self.reader is None or self.reader.done())
        )


class LinkMachine(RuleBasedStateMachine):
    @initialize(depth=st.sampled_from([1, 2]), seed=st.integers(0, 2**32))
    def begin(self, depth: int, seed: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.depth, self.seed = depth, seed
        self.link = EngineLink()
        self.talks: list[Talk] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.do(self.start())
        for length in (3, 9, 14):
            self.open([length] * length)
        self.around()

    # --- the world ------------------------------------------------------------------------------------------

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the loop and let all tasks come to rest."""

        async def both() -> None:
            await work
            await settle()

        self.loop.run_until_complete(both())
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            if not task.cancelled():
                task.result()

    async def start(self) -> None:
        settings = SchedulerSettings(
            blocks=24, block_tokens=4, vocab_size=256, max_context=CONTEXT, max_step_tokens=16,
            max_sequences=4, depth=self.depth,
        )  # fmt: skip
        self.engine, _ = fake_engine(settings, chance=Random(self.seed + self.link.engine_number))
        self.end = GatewayEnd()
        self.transport = MemoryTransport(self.end)
        self.reader = verb_reader()
        self.inbox: deque[AnyVerb] = deque()
        self.rising = bytearray(frame(HELLO))
        self.link.attach(self.end)
        self.end.data_received(self.take_up(1 << 20))
        self.link.welcome(await self.end.hello)

    def take_up(self, count: int) -> bytes:
        data = bytes(self.rising[:count])
        del self.rising[:count]
        return data

    async def carry_down(self, count: int | None) -> None:
        self.inbox += self.reader.feed(self.transport.taken(count))

    async def turn(self, verbs: int) -> None:
        """What the device thread does: some verbs, then a step."""
        for _ in range(min(verbs, len(self.inbox))):
            self.rising += frame(self.engine.apply(self.inbox.popleft()))
        step = self.engine.step()
        self.quiet = step is None
        if step is not None:
            self.rising += frame(step)

    async def carry_up(self, count: int) -> None:
        if self.rising:
            self.end.data_received(self.take_up(count))

    @rule(count=st.none() | st.integers(1, 60))
    def down(self, count: int | None) -> None:
        self.do(self.carry_down(count))

    @rule(verbs=st.integers(0, 4))
    def step(self, verbs: int) -> None:
        self.do(self.turn(verbs))

    @rule(count=st.integers(1, 200))
    def up(self, count: int) -> None:
        self.do(self.carry_up(count))

    @rule(steps=st.integers(1, 3))
    def around(self, steps: int = 1) -> None:
        """All the way: otherwise runs get nowhere."""
        self.do(self.carry_down(None))
        for _ in range(steps):
            self.do(self.turn(100))
        self.do(self.carry_up(1 << 20))

    # --- sessions -------------------------------------------------------------------------------------------

    def give(self, talk: Talk, verb: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await verb
            except EngineDied:
                talk.gone = True
            except asyncio.CancelledError:
                talk.lost = True
                raise

        async def spawn() -> None:
            talk.verb = asyncio.ensure_future(guarded())
            self.tasks.append(talk.verb)

        self.do(spawn())

    def choose(self, data: st.DataObject, *, settled: bool) -> Talk | None:
        ready = [talk for talk in self.talks if (talk.settled if settled else talk.free and not talk.lost)]
        ready = [talk for talk in ready if talk.running] or ready  # where the races are
        return data.draw(st.sampled_from(ready)) if ready else None

    @precondition(lambda self: len(self.talks) < 6)
    @rule(prompt=prompts)
    def open(self, prompt: list[int]) -> None:
        talk = Talk(0, Shadow(prompt))

        async def verb() -> None:
            try:
                state = await self.link.open(prompt)
            except asyncio.CancelledError:
                talk.gone = True
                raise
            assert state.length == len(prompt)
            talk.seq = state.seq
            self.talks.append(talk)

        self.opening = talk
        self.give(talk, verb())

    @rule(data=st.data(), tokens=prompts)
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        talk = self.choose(data, settled=True)
        if talk is None or len(talk.shadow.tokens) + len(tokens) > CONTEXT:
            return
        talk.shadow.extend(tokens)  # it has been sent: it takes effect even if nothing awaits it

        async def verb() -> None:
            state = await extended(self.link, talk.seq, tokens)
            assert state.length == len(talk.shadow.tokens)

        self.give(talk, verb())

    @rule(data=st.data(), tokens=prompts, off=st.sampled_from([0, 0, -1, 1]))
    def hand(self, data: st.DataObject, tokens: list[int], off: int) -> None:
        """Nothing waits for the reply; what takes another length for granted changes nothing."""
        talk = self.choose(data, settled=True)
        if talk is None or len(talk.shadow.tokens) + len(tokens) > CONTEXT:
            return
        expected = len(talk.shadow.tokens) + off
        if not off:
            talk.shadow.extend(tokens)
        length = None if off else len(talk.shadow.tokens)

        async def sent() -> None:
            reply = self.link.extend(talk.seq, tokens, expect_length=expected)
            self.tasks.append(asyncio.ensure_future(self.answered(talk, reply, length)))

        self.do(sent())

    async def answered(self, talk: Talk, reply: asyncio.Future[VerbReply], length: int | None) -> None:
        try:
            state = (await reply).state
            assert state is not None and state.length == length
        except EpochStale:
            assert length is None
        except EngineDied:
            talk.gone = True

    @rule(data=st.data(), sampling=samplings, most=st.integers(1, 30))
    def generate(self, data: st.DataObject, sampling: Sampling, most: int) -> None:
        talk = self.choose(data, settled=True)
        if talk is None or not 0 < len(talk.shadow.tokens) < CONTEXT:
            return
        talk.sampling, talk.ending = sampling, False

        async def verb() -> None:
            there = len(talk.shadow.tokens)
            generation = await self.link.generate(talk.seq, sampling, TokenLimits(most), expect_length=there)
            assert generation.state.length == len(talk.shadow.tokens)
            assert generation.state.epoch > talk.epoch
            talk.epoch = generation.state.epoch
            talk.generation = generation
            talk.reader = asyncio.ensure_future(self.read(talk, generation, most))
            self.tasks.append(talk.reader)

        self.give(talk, verb())

    async def read(self, talk: Talk, generation: Generation, most: int) -> None:
        shadow, finish = talk.shadow, None
        try:
            async for row in generation:
                finish = row.finish
                for token in row.tokens:
                    assert token == shadow.next(talk.sampling)
                    shadow.extend([token])
                assert row.length == len(shadow.tokens)
        except EngineDied:
            talk.gone = True
            return
        if finish is not None:
            full = len(shadow.tokens) == generation.state.length + most
            assert finish is (Finish.LENGTH if full else Finish.CONTEXT)
        else:
            assert talk.ending

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        free = [talk for talk in self.talks if talk.free]
        free = [talk for talk in free if talk.running or talk.lost] or free
        if free:
            talk = data.draw(st.sampled_from(free))
            talk.ending = True
            self.give(talk, self.stopped(talk))

    async def stopped(self, talk: Talk) -> None:
        state = await self.link.stop(talk.seq)
        if talk.reader is not None:
            await talk.reader
        if talk.cut is not None:
            talk.shadow.truncate(talk.cut)
            talk.cut = None
        if talk.lost:  # tokens sampled unread are still right
            while len(talk.shadow.tokens) < state.length:
                talk.shadow.extend([talk.shadow.next(talk.sampling)])
            talk.lost = False
        assert state.length == len(talk.shadow.tokens)
        talk.epoch = state.epoch

    @rule(data=st.data(), share=st.floats(0, 1), stale=st.booleans())
    def truncate(self, data: st.DataObject, share: float, stale: bool) -> None:
        talk = self.choose(data, settled=False)
        if talk is None:
            return
        length = round(share * len(talk.shadow.tokens))
        talk.ending = talk.ending or not stale

        async def verb() -> None:
            if stale:
                with pytest.raises(EpochStale):
                    await self.link.truncate(talk.seq, length, talk.epoch - 1)
                return
            try:
                state = await self.link.truncate(talk.seq, length, talk.epoch)
            except asyncio.CancelledError:
                talk.cut = length  # it has been sent: it takes effect
                raise
            if talk.reader is not None:
                await talk.reader
            talk.shadow.truncate(length)
            assert state.length == length
            talk.epoch = state.epoch

        self.give(talk, verb())

    @precondition(lambda self: len(self.talks) < 6)
    @rule(data=st.data(), children=st.integers(1, 2), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, children: int, share: float) -> None:
        talk = self.choose(data, settled=False)
        if talk is None:
            return
        length = round(share * len(talk.shadow.tokens))
        shadow = talk.shadow.copy(length)

        async def verb() -> None:
            for seq in await self.link.fork(talk.seq, children, length):
                self.talks.append(Talk(seq, shadow.copy(length)))

        self.give(talk, verb())

    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: st.DataObject, keep: bool) -> None:
        free = [talk for talk in self.talks if talk.free]
        if not free:
            return
        talk = data.draw(st.sampled_from(free))
        talk.ending = talk.gone = True
        self.give(talk, self.link.close(talk.seq, keep))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a caller in the middle of its verb."""
        waiting = [talk for talk in [*self.talks, getattr(self, "opening", None)] if talk and talk.verb]
        waiting = [talk for talk in waiting if not talk.verb.done()]
        if waiting:
            verb = data.draw(st.sampled_from(waiting)).verb

            async def end() -> None:
                verb.cancel()

            self.do(end())

    @rule(chance=st.integers(0, 9))
    def die(self, chance: int) -> None:
        """The engine dies and another replaces it. No call keeps waiting, and no old sequence is known."""
        if chance:
            return
        old, self.talks = self.talks, []

        async def death() -> None:
            self.end.connection_lost(None)
            await settle()
            assert all(talk.verb is None or talk.verb.done() for talk in old)
            assert all(talk.reader is None or talk.reader.done() for talk in old)
            assert all(task.done() for task in self.tasks)
            await self.start()
            for talk in old:
                with pytest.raises(SequenceUnknown):
                    await self.link.stop(talk.seq)

        self.do(death())

    # --- the end --------------------------------------------------------------------------------------------

    def run_dry(self) -> None:
        for _ in range(300):
            self.around()
            if not self.tasks and self.quiet and not self.inbox and not self.rising:
                return
        raise AssertionError(f"still waiting: {self.tasks}")

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.finish()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(settle())
            self.loop.close()

    def finish(self) -> None:
        self.run_dry()
        for talk in self.talks:
            if not talk.gone:
                self.give(talk, self.stopped(talk))
        self.run_dry()
        for talk in [talk for talk in self.talks if not talk.gone]:
            self.give(talk, self.link.close(talk.seq))
        self.run_dry()
        lengths = self.end.lengths()
        assert (lengths["link_calls"], lengths["link_generations"]) == (0, 0)
        list(self.engine.scheduler.audit_in_slices())
        assert self.engine.statistics()["sequences"] == 0


TestInterleavings = LinkMachine.TestCase
TestInterleavings.settings = settings(max_examples=settings().max_examples * 3 // 5, stateful_step_count=80)
