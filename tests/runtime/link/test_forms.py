"""One suite for both forms of the link, on a real model: what a session may rely on, thread or process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.runtime.build import load_engine
from holdfast.runtime.errors import (
    ContextExceeded,
    EpochStale,
    LengthInvalid,
    RuntimeFault,
    SamplingInvalid,
    SequenceBusy,
    SequenceUnknown,
)
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.heartbeat import Liveness
from holdfast.runtime.link.messages import MAX_FRAME_BYTES
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.runtime.verbs import Finish, Generate, Open, Sampling, TokenLimits
from holdfast.tests.runtime.link.memory import extended

pytestmark = pytest.mark.anyio

CONTEXT, BLOCKS = 4096, 272
GREEDY = Sampling()
WARM = Sampling(temperature=1.0, seed=5)
PROMPT = [7 * n % 251 for n in range(40)]


def settings_for(model: Path) -> EngineSettings:
    return EngineSettings(model=str(model), device="cpu", blocks=BLOCKS, max_context=CONTEXT, debug=True)


@pytest.fixture(scope="module", params=[ThreadEngine, ChildEngine], ids=["thread", "process"])
async def link(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[EngineLink]:
    async with request.param(settings_for(tiny)) as link:
        yield link


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[Sampling, list[int]]:
    """What an engine without a link says after the prompt: 60 tokens."""
    said = {}
    for sampling in (GREEDY, WARM):
        engine = load_engine(settings_for(tiny), lambda done, what: None, Liveness()).engine
        engine.apply(Open(1, 1, b"", PROMPT))
        engine.apply(Generate(2, 1, sampling, TokenLimits(60)))
        said[sampling] = []
        while (step := engine.step()) is not None:
            said[sampling] += [token for row in step.rows for token in row.tokens]
        assert len(set(said[sampling])) > 3, "a model that only repeats itself shows nothing"
    return said


async def say(link: EngineLink, seq: int, count: int, sampling: Sampling = GREEDY) -> list[int]:
    generation = await link.generate(seq, sampling, TokenLimits(count))
    return [token async for row in generation for token in row.tokens]


async def test_hello_describes_the_model(link: EngineLink, tiny: Path) -> None:
    hello = link.hello
    assert hello.model == str(tiny)
    assert (hello.vocab_size, hello.max_context, hello.blocks, hello.block_tokens) == (
        256,
        CONTEXT,
        BLOCKS,
        16,
    )
    assert hello.device == "cpu" and hello.dtype == "float32" and hello.parameters == 78_208
    assert hello.block_bytes == 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, slots, dims, bytes
    assert link.ready and link.engine_number == 1


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
async def test_tokens_are_those_of_an_engine_without_a_link(
    link: EngineLink, expected: dict[Sampling, list[int]], sampling: Sampling
) -> None:
    seq = (await link.open(PROMPT)).seq
    generation = await link.generate(seq, sampling, TokenLimits(60))
    rows = [row async for row in generation]
    assert [token for row in rows for token in row.tokens] == expected[sampling]
    assert rows[-1].finish is Finish.LENGTH and rows[-1].length == len(PROMPT) + 60
    work = rows[-1].work
    assert work is not None and work.decoded == 60
    assert work.prefilled + work.resident == len(PROMPT)
    await link.close(seq)


async def test_sixteen_turns_at_once(link: EngineLink, expected: dict[Sampling, list[int]]) -> None:
    async def turn(number: int) -> None:
        seq = (await link.open(PROMPT)).seq
        sampling = (GREEDY, WARM)[number % 2]
        assert await say(link, seq, 10 + number, sampling) == expected[sampling][: 10 + number]
        await link.close(seq)

    await asyncio.gather(*map(turn, range(16)))


async def test_a_stopped_turn_has_the_length_of_its_rows(
    link: EngineLink, expected: dict[Sampling, list[int]]
) -> None:
    seq = (await link.open(PROMPT)).seq
    generation = await link.generate(seq, GREEDY, TokenLimits(4000))  # still runs when it is stopped
    given = (await anext(generation)).tokens
    with pytest.raises(SequenceBusy):
        await extended(link, seq, [1])
    state = await link.stop(seq)
    given += [token async for row in generation for token in row.tokens]
    assert state.length == len(PROMPT) + len(given)
    assert given[:60] == expected[GREEDY][: len(given)]
    again = await link.truncate(seq, len(PROMPT), state.epoch)
    assert again.length == len(PROMPT)
    assert await say(link, seq, 20) == expected[GREEDY][:20]
    await link.close(seq)


async def test_forks_continue_as_their_parent(link: EngineLink, expected: dict[Sampling, list[int]]) -> None:
    seq = (await link.open(PROMPT)).seq
    assert await say(link, seq, 5) == expected[GREEDY][:5]
    one, two = await link.fork(seq, 2)
    assert await asyncio.gather(say(link, one, 10), say(link, two, 20)) == [
        expected[GREEDY][5:15],
        expected[GREEDY][5:25],
    ]
    for each in (seq, one, two):
        await link.close(each)


async def test_refusals_raise_their_classes_and_change_nothing(link: EngineLink) -> None:
    state = await link.open(PROMPT)
    seq = state.seq
    refused: list[tuple[type[RuntimeFault], object]] = [
        (LengthInvalid, link.open([1, 256])),
        (LengthInvalid, link.open([2**64])),
        (LengthInvalid, extended(link, seq, [70_000] * (MAX_FRAME_BYTES // 5 + 1))),
        (ContextExceeded, extended(link, seq, [1] * CONTEXT)),
        (EpochStale, link.truncate(seq, 1, state.epoch + 1)),
        (SamplingInvalid, link.generate(seq, Sampling(temperature=-1.0), TokenLimits(1))),
        (SamplingInvalid, link.generate(seq, GREEDY, TokenLimits(0))),
        (SequenceUnknown, link.stop(10**9)),
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            await call  # type: ignore[misc]
    after = await link.stop(seq)
    assert (after.length, after.epoch) == (len(PROMPT), state.epoch + 1)
    await link.close(seq)


async def test_cancelled_callers_leave_no_sequence_behind(link: EngineLink) -> None:
    async def talk() -> None:
        seq = (await link.open(PROMPT)).seq
        try:
            await say(link, seq, 100)
            await link.fork(seq, 1)
        finally:
            await link.close(seq)

    for turns in range(12):
        tasks = [asyncio.create_task(talk()) for _ in range(4)]
        for _ in range(3 * turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
    counted = await link.statistics()
    assert counted["running"] == counted["waiting"] == 0
    assert counted["link_calls"] == counted["link_generations"] == counted["link_inbox_verbs"] == 0
    assert counted["pool_held"] == 0 and counted["sequences"] == 0
