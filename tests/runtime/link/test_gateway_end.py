"""The gateway's end, report by report: order, epochs, cancelled callers, ends of every kind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest

from holdfast.runtime.errors import (
    ContextExceeded,
    EngineDied,
    FrameInvalid,
    LinkClosed,
    SequenceUnknown,
    ShardMissing,
)
from holdfast.runtime.link.generation import Generation
from holdfast.runtime.link.messages import Fatal
from holdfast.runtime.verbs import (
    AnyVerb,
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Open,
    Opening,
    Refusal,
    Row,
    Sampling,
    SequenceState,
    Step,
    Stop,
    TokenLimits,
    Truncate,
    VerbReply,
    Work,
)
from holdfast.tests.runtime.link.memory import Bench, settle

pytestmark = pytest.mark.anyio

LIMITS = TokenLimits(8)


async def unused(seq: int, keep: int | None) -> None:
    raise AssertionError(f"{seq} is not stopped here")


def begin(bench: Bench, seq: int = 1) -> tuple[Generation, asyncio.Task[VerbReply]]:
    generation = Generation(unused)
    verb = Generate(bench.end.next_request(), seq, Sampling(), LIMITS)
    return generation, asyncio.create_task(bench.end.call(verb, generation))


async def begun(bench: Bench, epoch: int = 1, seq: int = 1) -> Generation:
    generation, task = begin(bench, seq)
    await settle()
    (verb,) = bench.sent()
    bench.up(VerbReply(verb.request, SequenceState(seq, 4, 3, epoch)))
    await task
    return generation


def step(*rows: Row) -> Step:
    return Step(1, list(rows))


def row(token: int, length: int, epoch: int = 1, finish: Finish | None = None) -> Row:
    return Row(1, epoch, [token], length, finish, Work(0, 0, 4, 1) if finish else None)


async def tokens_of(generation: Generation) -> list[int]:
    return [token async for came in generation for token in came.tokens]


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    """Let a caller send its verb, then cancel it."""
    task = asyncio.create_task(call)
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()


async def test_rows_in_the_same_read_as_the_reply_are_not_lost() -> None:
    bench = Bench()
    generation, task = begin(bench)
    await settle()
    (verb,) = bench.sent()
    bench.up(
        VerbReply(verb.request, SequenceState(1, 4, 3, 1)),
        step(row(7, 5)),
        step(row(8, 6, finish=Finish.LENGTH)),
    )
    await task
    assert generation.state == SequenceState(1, 4, 3, 1)
    assert await tokens_of(generation) == [7, 8]
    assert not bench.end.lengths()["link_generations"]


async def test_rows_of_other_epochs_are_dropped_and_counted() -> None:
    bench = Bench()
    generation = await begun(bench, epoch=5)
    bench.up(step(row(6, 5, epoch=4)), step(row(7, 5, epoch=5)), step(row(9, 6, 4, Finish.STOP)))
    bench.up(step(row(8, 6, epoch=5, finish=Finish.STOP)))
    assert await tokens_of(generation) == [7, 8]
    assert bench.end.lengths()["link_stale_rows"] == 2


async def test_replies_are_matched_by_request_in_any_order() -> None:
    bench = Bench()
    first = asyncio.create_task(bench.end.call(Extend(bench.end.next_request(), 1, [1])))
    second = asyncio.create_task(bench.end.call(Extend(bench.end.next_request(), 2, [1])))
    await settle()
    one, two = bench.sent()
    bench.up(
        VerbReply(two.request, SequenceState(2, 20, 0, 0)), VerbReply(one.request, SequenceState(1, 10, 0, 0))
    )
    assert (await first).state == SequenceState(1, 10, 0, 0)
    assert (await second).state == SequenceState(2, 20, 0, 0)


async def test_a_refusal_raises_its_class() -> None:
    bench = Bench()
    task = asyncio.create_task(bench.end.call(Extend(bench.end.next_request(), 1, [1])))
    await settle()
    bench.up(Refusal(bench.sent()[0].request, "context_exceeded", "9 tokens; the context holds 8"))
    with pytest.raises(ContextExceeded, match="9 tokens"):
        await task


async def test_a_cancelled_generate_is_stopped_at_once_and_disturbs_no_later_one() -> None:
    bench = Bench()
    await cancelled(bench.end.call(Generate(1001, 1, Sampling(), LIMITS), Generation(unused)))
    generation, task = begin(bench)
    await settle()
    first, stop, second = bench.sent()
    assert isinstance(first, Generate) and isinstance(second, Generate)
    assert isinstance(stop, Stop) and stop.seq == 1
    bench.up(VerbReply(first.request, SequenceState(1, 4, 3, 1)), step(row(7, 5, epoch=1)))
    bench.up(
        VerbReply(stop.request, SequenceState(1, 5, 5, 2)),
        VerbReply(second.request, SequenceState(1, 5, 5, 3)),
    )
    await task
    bench.up(step(row(8, 6, epoch=3, finish=Finish.LENGTH)))
    assert await tokens_of(generation) == [8]
    assert not bench.sent()
    assert bench.end.lengths()["link_calls"] == 0


async def test_a_generate_cancelled_when_its_reply_arrives_is_stopped() -> None:
    bench = Bench()
    generation, task = begin(bench)
    await settle()
    (verb,) = bench.sent()
    bench.up(VerbReply(verb.request, SequenceState(1, 4, 3, 1)), step(row(7, 5)))
    task.cancel()
    await settle()
    assert task.cancelled() and not generation.running
    assert [type(one) for one in bench.sent()] == [Stop]
    assert bench.end.lengths()["link_generations"] == 0


async def test_the_reply_to_a_cancelled_caller_is_dropped() -> None:
    bench = Bench()
    generation, task = begin(bench)
    await settle()
    (verb,) = bench.sent()
    task.cancel()  # it has not run yet when the reply comes
    bench.up(VerbReply(verb.request, SequenceState(1, 4, 3, 1)), step(row(7, 5)))
    await settle()
    assert task.cancelled() and not generation.running and bench.end.gone is None
    assert [type(one) for one in bench.sent()] == [Stop]


async def test_a_refused_generate_that_is_cancelled_stops_nothing() -> None:
    bench = Bench()
    _, task = begin(bench)
    await settle()
    bench.up(Refusal(bench.sent()[0].request, "sequence_busy", "sequence 1 is generating"))
    task.cancel()
    await settle()
    assert not bench.sent()


@pytest.mark.parametrize(
    ("verb", "closed"),
    [
        (Open(1, 7, b"", [1]), [7]),
        (Fork(1, 7, [8, 9]), [8, 9]),
        (Extend(1, 7, [1]), []),
        (Generate(1, 7, Sampling(), LIMITS, 0, [1], Opening()), [7]),
    ],
    ids=["open", "fork", "extend", "generate"],
)
async def test_what_a_cancelled_caller_began_is_closed(verb: AnyVerb, closed: list[int]) -> None:
    bench = Bench()
    await cancelled(bench.end.call(verb, Generation(unused) if isinstance(verb, Generate) else None))
    _, *undone = bench.sent()
    assert [one.seq for one in undone if isinstance(one, Close)] == closed
    assert len(undone) == len(closed), "and nothing else is done"


async def test_a_cancelled_stop_still_ends_the_generation() -> None:
    bench = Bench()
    generation = await begun(bench)
    await cancelled(bench.end.call(Stop(bench.end.next_request(), 1)))
    (stop,) = bench.sent()
    bench.up(step(row(7, 5)), VerbReply(stop.request, SequenceState(1, 5, 5, 2)))
    assert await tokens_of(generation) == [7]
    assert not generation.running


async def test_a_stop_that_meets_the_natural_end_gives_each_row_once() -> None:
    bench = Bench()
    generation = await begun(bench)
    stopping = asyncio.create_task(bench.end.call(Stop(bench.end.next_request(), 1)))
    await settle()
    (stop,) = bench.sent()
    bench.up(step(row(7, 5, finish=Finish.STOP)), VerbReply(stop.request, SequenceState(1, 5, 5, 2)))
    bench.up(step(row(7, 5, finish=Finish.STOP)))
    assert await tokens_of(generation) == [7]
    assert (await stopping).state == SequenceState(1, 5, 5, 2)
    assert not generation.running


async def test_rows_behind_a_stop_are_dropped() -> None:
    bench = Bench()
    generation = await begun(bench)
    stopping = asyncio.create_task(bench.end.call(Stop(bench.end.next_request(), 1)))
    await settle()
    bench.up(VerbReply(bench.sent()[0].request, SequenceState(1, 4, 4, 2)), step(row(7, 5)))
    await stopping
    assert await tokens_of(generation) == []


@pytest.mark.parametrize("verb", [Truncate(900, 1, 2, 1), Close(900, 1)], ids=["truncate", "close"])
async def test_truncate_and_close_end_the_generation(verb: Truncate | Close) -> None:
    bench = Bench()
    generation = await begun(bench)
    task = asyncio.create_task(bench.end.call(verb))
    reading = asyncio.create_task(tokens_of(generation))
    await settle()
    bench.up(VerbReply(900, SequenceState(1, 2, 2, 2) if isinstance(verb, Truncate) else None))
    await task
    assert await reading == []


async def test_a_fork_in_mid_generation_does_not_end_it() -> None:
    bench = Bench()
    generation = await begun(bench)
    task = asyncio.create_task(bench.end.call(Fork(900, 1, [2])))
    await settle()
    bench.up(VerbReply(900, SequenceState(1, 4, 4, 1)), step(row(7, 5, finish=Finish.LENGTH)))
    await task
    assert await tokens_of(generation) == [7]


async def test_a_cancelled_reader_loses_no_row() -> None:
    bench = Bench()
    generation = await begun(bench)
    await cancelled(tokens_of(generation))
    bench.up(step(row(7, 5)), step(row(8, 6, finish=Finish.LENGTH)))
    assert await tokens_of(generation) == [7, 8]


async def test_a_second_reader_raises() -> None:
    bench = Bench()
    generation = await begun(bench)
    reading = asyncio.create_task(tokens_of(generation))
    await settle()
    with pytest.raises(anyio.BusyResourceError):
        await tokens_of(generation)
    bench.up(step(row(7, 5, finish=Finish.LENGTH)))
    assert await reading == [7]


async def test_unread_rows_are_counted_until_they_are_read() -> None:
    bench = Bench()
    generation = await begun(bench)
    bench.up(step(row(7, 5)), step(row(8, 6, finish=Finish.LENGTH)))
    assert bench.end.lengths()["link_rows"] == 2
    await tokens_of(generation)
    assert bench.end.lengths()["link_rows"] == 0


async def test_all_that_wait_fail_when_the_link_ends() -> None:
    bench = Bench()
    generation = await begun(bench)
    call = asyncio.create_task(bench.end.call(Extend(900, 2, [1])))
    await settle()
    bench.up(step(row(7, 5)))
    bench.end.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(EngineDied, match="reset"):
        await call
    assert (await anext(generation)).tokens == [7]
    for _ in range(2):
        with pytest.raises(EngineDied):
            await anext(generation)
    with pytest.raises(EngineDied):
        await bench.end.call(Stop(901, 1))
    with pytest.raises(EngineDied):
        await bench.end.hello
    assert bench.end.lost.is_set()
    assert bench.end.lengths()["link_calls"] == 0


async def test_a_generation_that_had_ended_does_not_fail_afterwards() -> None:
    bench = Bench()
    generation = await begun(bench)
    bench.up(step(row(7, 5, finish=Finish.STOP)))
    bench.end.connection_lost(None)
    assert await tokens_of(generation) == [7]


async def test_closing_this_end_says_so() -> None:
    bench = Bench()
    call = asyncio.create_task(bench.end.call(Extend(900, 2, [1])))
    await settle()
    bench.end.close(LinkClosed("this end closed the link"))
    with pytest.raises(LinkClosed):
        await call
    await settle()
    assert bench.transport.aborted and bench.end.lost.is_set()


async def test_a_fatal_before_hello_is_raised_as_its_class() -> None:
    bench = Bench()
    bench.up(Fatal("shard_missing", "model-2.safetensors: missing"))
    bench.end.connection_lost(None)
    with pytest.raises(ShardMissing, match=r"model-2\.safetensors"):
        await bench.end.hello


async def test_a_later_fatal_is_the_reason_of_the_death() -> None:
    bench = Bench()
    generation = await begun(bench)
    bench.up(Fatal("engine_died", "three steps failed"))
    bench.end.connection_lost(None)
    with pytest.raises(EngineDied, match="three steps failed"):
        await anext(generation)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"HTTP/1.1 400 Bad Request\r\n"], ids=repr
)
async def test_garbage_fails_all_calls(garbage: bytes) -> None:
    bench = Bench()
    generation = await begun(bench)
    call = asyncio.create_task(bench.end.call(Extend(900, 2, [1])))
    await settle()
    bench.end.data_received(garbage)
    with pytest.raises(FrameInvalid):
        await call
    with pytest.raises(FrameInvalid):
        await anext(generation)
    await settle()
    assert bench.transport.aborted and bench.end.lost.is_set()


async def test_an_answer_to_no_request_ends_the_link() -> None:
    bench = Bench()
    bench.up(VerbReply(77, SequenceState(1, 1, 1, 1)))
    assert isinstance(bench.end.gone, FrameInvalid)


async def test_after_leave_nothing_is_read_and_a_refused_stop_is_dropped() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))

    async def refused(seq: int, keep: int) -> SequenceState:
        raise SequenceUnknown(f"no sequence {seq}, of which {keep} tokens stay")

    generation = Generation(refused)
    generation.state = SequenceState(1, 4, 3, 1)
    reading = asyncio.create_task(tokens_of(generation))
    await settle()
    assert generation.leave(6) is not None and generation.leave(6) is None
    assert await reading == [] and not generation.running
    await settle()
    gc.collect()
    assert not told
    generation = Generation(refused)
    generation.state = SequenceState(1, 4, 3, 1)
    stopping = generation.leave(6)
    assert stopping is not None
    with pytest.raises(SequenceUnknown, match="of which 6"):
        await stopping
