"""Tools that do not end when they are cancelled: nothing waits for them, and none of them stays."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from holdfast.sdk import CallFinished, ToolContext, tool
from holdfast.sdk.agent import tracing
from holdfast.sdk.agent.events import StepFinished
from holdfast.sdk.tools.running import Detached, in_thread

from ..scripted import Script, chatting, given_up

pytestmark = pytest.mark.anyio


class Stubborn:
    """What the tools here do, and what came of them. ``go_on`` lets those that wait for it return."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.refusals = 0
        self.began = False
        self.ended: list[str] = []

    async def shields(self, context: ToolContext) -> str:
        self.began = True
        try:
            with anyio.CancelScope(shield=True):
                await self.go_on.wait()
                context.write("late. ")
            return "too late"
        finally:
            self.ended.append("shields")

    async def catches(self, context: ToolContext) -> str:
        self.began = True
        while not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.refusals += 1
                if self.refusals > 1 and "closed" in self.ended:
                    break
        self.ended.append("catches")
        return "too late"

    async def breaks(self, context: ToolContext) -> str:
        self.began = True
        with anyio.CancelScope(shield=True):
            await self.go_on.wait()
        self.ended.append("breaks")
        raise ValueError("this error is dropped")

    def sync(self, context: ToolContext) -> Awaitable[str]:
        return self.shields(context)


@pytest.fixture
async def stubborn() -> AsyncIterator[Stubborn]:
    found = Stubborn()
    yield found
    found.go_on.set()


@asynccontextmanager
async def nothing_stays() -> AsyncIterator[None]:
    """No task is left, and nothing was logged, when the block is over."""
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    before = asyncio.all_tasks()
    yield
    assert await comes_to_be(lambda: not asyncio.all_tasks() - before)
    assert not logged


async def comes_to_be(condition: Callable[[], bool]) -> bool:
    """Whether it is so within some passes of the loop."""
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0)
    return False


WAYS = ["shields", "catches", "breaks", "sync"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("by", ["run", "say"])
async def test_the_loop_goes_on_at_the_timeout_whatever_the_tool_does(
    stubborn: Stubborn, how: str, by: str
) -> None:
    made = tool(timeout=0.01, name="stubborn")(getattr(stubborn, how))
    script = Script([("stubborn", "{}")], ["Sorry."])
    async with nothing_stays():
        async with chatting(script, tools=[made]) as chat:
            with anyio.fail_after(10):
                said = await (chat.run("Go").text() if by == "run" else chat.say("Go").text())
            assert said == "Sorry." and not stubborn.ended
            (output,) = script.outputs()
            assert "0.01 seconds" in json.loads(output)["error"]
            stubborn.go_on.set()
            await anyio.wait_all_tasks_blocked()
            assert stubborn.began or how == "sync", "a thread may take longer than the timeout"
            assert bool(stubborn.ended) == stubborn.began, "what began comes to its end"
        assert script.outputs() == [output]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("by", ["run", "say"])
async def test_what_was_left_behind_is_cancelled_with_the_session(
    stubborn: Stubborn, how: str, by: str
) -> None:
    made = tool(timeout=0.01, name="stubborn")(getattr(stubborn, how))
    async with nothing_stays(), chatting(Script([("stubborn", "{}")], ["Sorry."]), tools=[made]) as chat:
        with anyio.fail_after(10):
            await (chat.run("Go").text() if by == "run" else chat.say("Go").text())
        stubborn.ended.append("closed")


async def test_a_tool_left_running_is_not_cancelled_again(stubborn: Stubborn) -> None:
    """A scope that is cancelled goes on cancelling: the loop would do little else."""
    detached = Detached()
    outcome = await tool(timeout=0.01)(stubborn.catches).call("{}", detached=detached)
    await anyio.wait_all_tasks_blocked()
    refusals = stubborn.refusals
    assert outcome.kind == "timed_out" and refusals and len(detached) == 1
    for _ in range(100):
        await asyncio.sleep(0)
    assert stubborn.refusals == refusals
    stubborn.go_on.set()
    assert await comes_to_be(lambda: not len(detached))


@pytest.mark.parametrize("how", WAYS)
async def test_leaving_a_turn_does_not_wait_for_its_tools(stubborn: Stubborn, how: str) -> None:
    made = tool(name="stubborn")(getattr(stubborn, how))
    async with nothing_stays(), chatting(Script([("stubborn", "{}")], ["Again."]), tools=[made]) as chat:
        with anyio.fail_after(10):
            with anyio.move_on_after(0.01) as scope:
                await chat.say("Go").text()
            assert scope.cancelled_caught
        stubborn.ended.append("closed")


@pytest.mark.parametrize("how", WAYS)
async def test_a_chat_that_is_closed_while_a_tool_of_its_run_goes_on(stubborn: Stubborn, how: str) -> None:
    made = tool(name="stubborn")(getattr(stubborn, how))
    outcomes: list[str] = []
    async with nothing_stays(), chatting(Script([("stubborn", "{}")], ["Again."])) as chat:
        async for event in chat.run("Go", [made]):
            if isinstance(event, StepFinished):
                await anyio.wait_all_tasks_blocked()
                break
            if isinstance(event, CallFinished):
                outcomes.append(event.outcome)
        stubborn.ended.append("closed")
    assert not outcomes


@pytest.mark.parametrize("how", ["left", "cancelled", "ended"])
async def test_a_tracer_that_never_ends_is_cancelled_with_the_session(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(event: Any) -> None:
        told.append(event)
        await asyncio.Event().wait()

    async def read() -> None:
        async for _ in chat.run("Go", trace=[hangs]):
            if how == "left":
                break

    told: list[Any] = []
    monkeypatch.setattr(tracing, "LAST_SECONDS", 10.0 if how == "ended" else 0.01)
    async with nothing_stays(), chatting(Script(None if how == "cancelled" else ["Hello."])) as chat:
        await given_up(read)
        monkeypatch.setattr(tracing, "LAST_SECONDS", 0.01)
    assert told


async def test_a_coroutine_that_a_thread_returns_too_late_is_closed(stubborn: Stubborn) -> None:
    coroutine, threads = stubborn.shields(ToolContext()), list[threading.Thread]()
    began, go_on = threading.Event(), threading.Event()

    def returns() -> Awaitable[str]:
        threads.append(threading.current_thread())
        began.set()
        go_on.wait()
        return coroutine

    call = asyncio.ensure_future(in_thread(returns))
    await asyncio.to_thread(began.wait)
    call.cancel()
    await asyncio.wait([call])
    go_on.set()
    await asyncio.to_thread(threads[0].join)
    assert await comes_to_be(lambda: inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED)


async def test_a_cancelled_tool_can_clean_up() -> None:
    told: list[str] = []

    async def tidies(context: ToolContext) -> None:
        with suppress(asyncio.CancelledError):
            await anyio.sleep_forever()
        with anyio.CancelScope(shield=True):
            for _ in range(3):
                await asyncio.sleep(0)
        context.write("tidy")
        told.append("tidy")

    outcome = await tool(timeout=0.01)(tidies).call("{}")
    assert told == ["tidy"] and outcome.output.startswith("tidy\n")


async def test_a_shielded_tool_runs_on_after_the_timeout(stubborn: Stubborn) -> None:
    """The shield of a tool that is left is not broken while its session is open."""
    detached = Detached()
    made: Callable[..., Any] = tool(timeout=0.01)(stubborn.shields).call
    assert (await made("{}", detached=detached)).kind == "timed_out"
    stubborn.go_on.set()
    assert await comes_to_be(lambda: not len(detached))
    assert stubborn.ended == ["shields"]
