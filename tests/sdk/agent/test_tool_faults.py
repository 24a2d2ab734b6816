"""Tools as authors write them: what they raise and return becomes an output, what cannot be is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from holdfast.sdk import CallFinished, ToolContext, ToolInvalid, tool
from holdfast.sdk.tools.context import MAX_OUTPUT_BYTES
from holdfast.sdk.tools.tool import tool_of

from ..scripted import Script, chatting

pytestmark = pytest.mark.anyio


class Panic(BaseException):
    """As extensions in Rust raise."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def awaits_what_was_cancelled() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(3600))
    inner.cancel()
    await inner


def leaves() -> None:
    sys.exit(3)


async def leaves_from_the_loop() -> None:
    sys.exit(3)


def panics() -> None:
    raise Panic("index out of range")


def runs_out() -> None:
    next(iter([]))


def speechless() -> None:
    raise Speechless


def looks_up() -> None:
    {}["Oslo"]


async def waits_too_long() -> None:
    raise TimeoutError


async def breaks_together() -> None:
    raise ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("Oslo"), IndexError("out of range")])


# --- what it raises ---


@pytest.mark.parametrize(
    ("raises", "told"),
    [
        (awaits_what_was_cancelled, "It was cancelled"),
        (leaves, "It ended itself"),
        (leaves_from_the_loop, "It ended itself"),
        (panics, "index out of range"),
        (runs_out, "The tool failed, and does not say why"),
        (speechless, "The tool failed, and does not say why"),
        (looks_up, "Not found: 'Oslo'"),
        (waits_too_long, "It took too long"),
        (breaks_together, "Not found: 'Oslo'; out of range"),
    ],
)
@pytest.mark.parametrize("by", ["run", "say"])
async def test_the_model_reads_any_exception_of_a_tool(
    raises: Callable[..., Any], told: str, by: str
) -> None:
    script = Script([(raises.__name__, "{}")], ["Sorry."])
    async with chatting(script, tools=[raises]) as chat:
        with anyio.fail_after(10):
            said = await (chat.run("Go").text() if by == "run" else chat.say("Go").text())
    assert said == "Sorry."
    (output,) = script.outputs()
    assert json.loads(output)["error"] == told


async def test_the_reader_of_a_run_gets_what_the_tool_raised() -> None:
    script = Script([("looks_up", "{}")], ["Sorry."])
    async with chatting(script, tools=[looks_up]) as chat:
        ended = [event async for event in chat.run("Go") if isinstance(event, CallFinished)]
    assert [type(event.error) for event in ended] == [KeyError]


async def test_a_long_message_is_shortened() -> None:
    def breaks() -> None:
        raise ValueError("x" * 5_000_000)

    outcome = await tool_of(breaks).call("{}")
    assert outcome.kind == "failed" and len(outcome.output) < 10_000


async def test_a_tool_can_be_cancelled_from_outside() -> None:
    called = tool_of(functools.partial(anyio.sleep, 3600))
    task = asyncio.ensure_future(called.call("{}"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_with_a_task_cancelled_from_outside_gets_an_output() -> None:
    async def ends_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.sleep_forever()

    script = Script([("ends_itself", "{}")], ["Sorry."])
    async with chatting(script) as chat:
        with anyio.fail_after(10):
            events = [event async for event in chat.run("Go", [ends_itself])]
    assert [event.outcome for event in events if isinstance(event, CallFinished)] == ["cancelled"]


# --- what it returns ---


@dataclasses.dataclass
class Reading:
    degrees: float


class Model:
    """As pydantic's."""

    def model_dump(self) -> dict[str, Any]:
        return {"reading": Reading(7.0)}


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (b"total 8\n", "total 8\n"),
        (b"\xff\x00", '"/wA="'),
        ("file-\udcff", "file-\ufffd"),
        ({"name": "\ud800"}, '{"name": "\ufffd"}'),
        ("\ud83d\ude00", "\U0001f600"),
        (Model(), '{"reading": {"degrees": 7.0}}'),
        ([Model()], '[{"reading": {"degrees": 7.0}}]'),
    ],
)
async def test_results_become_text_that_a_frame_can_hold(result: Any, output: str) -> None:
    async def gives() -> Any:
        return result

    script = Script([("gives", "{}")], ["Ok."])
    async with chatting(script) as chat:
        assert await chat.run("Go", [gives]).text() == "Ok."
    assert script.outputs() == [output]


@pytest.mark.parametrize(
    "result", ["x" * MAX_OUTPUT_BYTES, "\x00" * (MAX_OUTPUT_BYTES // 6 + 1), b"x" * 10_000_000]
)
async def test_a_result_that_is_too_long_for_a_frame_fails_with_its_size(result: Any) -> None:
    async def gives() -> Any:
        return result

    outcome = await tool_of(gives).call("{}")
    assert outcome.kind == "failed"
    assert "bytes" in json.loads(outcome.output)["error"] and len(outcome.output) < 200


# --- what cannot be a tool ---


def yields(count: int) -> Iterator[int]:
    yield from range(count)


async def yields_later(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Shop:
    def buy(self, thing: str) -> str:
        return thing

    @classmethod
    def opened(cls, day: str) -> str:
        return day

    @staticmethod
    def price(thing: str) -> int:
        return len(thing)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (yields, "yields"),
        (yields_later, "yields"),
        (functools.partial(yields, 3), "yields"),
        (Shop.buy, "method of `Shop`"),
    ],
)
def test_a_tool_that_yields_no_text_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(ToolInvalid, match=why):
        tool_of(function)


def test_bound_methods_are_tools() -> None:
    for method in (Shop().buy, Shop.opened, Shop.price):
        (parameter,) = tool_of(method).definition.parameters["properties"]  # type: ignore[index]
        assert parameter in ("thing", "day")


@pytest.mark.parametrize(
    "fields",
    [
        *({"timeout": value} for value in (-1, 0, math.nan, "5", True)),
        *({"expected": value} for value in (-1, math.nan, math.inf, "5")),
    ],
)
def test_seconds_that_are_none_are_refused_when_decorated(fields: dict[str, Any]) -> None:
    with pytest.raises(ToolInvalid, match=next(iter(fields))):
        tool(**fields)(Shop.price)


@pytest.mark.parametrize("given", [{"name": "f", "parameters": {"x": {1, object()}}}, {"name": "f", 3: 4}])
def test_a_dict_that_is_no_json_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ToolInvalid):
        tool_of(given)


# --- the schema for the model ---


def search(query: str, api_key: str, most: int = 3) -> str:
    """Search the web.

    Args:
        query: What to look for,
            in a few words.
        most:
            How many: one
            or two.
    """
    return f"{query} {api_key} {most}"


async def test_arguments_of_partial_are_hidden_from_the_model() -> None:
    bound = tool_of(functools.partial(search, api_key="secret"))
    assert (bound.name, bound.definition.description) == ("search", "Search the web.")
    assert "secret" not in json.dumps(bound.definition.parameters)
    assert list(bound.definition.parameters["properties"]) == ["query", "most"]  # type: ignore[index]
    assert (await bound.call('{"query": "fox"}')).output == "fox secret 3"
    assert (await bound.call('{"query": "fox", "api_key": "mine"}')).kind == "invalid_arguments"


def test_descriptions_of_arguments_can_have_several_lines() -> None:
    told = tool_of(search).definition.parameters["properties"]  # type: ignore[index]
    assert told["query"]["description"] == "What to look for, in a few words."
    assert told["most"]["description"] == "How many: one or two."
    assert "description" not in told["api_key"]


@dataclasses.dataclass
class Arguments:
    """An author's own."""

    depth: int


async def test_a_type_may_have_any_name() -> None:
    def dig(how: Arguments) -> int:
        return how.depth

    dig.__annotations__["how"] = Arguments
    assert (await tool_of(dig).call('{"how": {"depth": 3}}')).output == "3"


async def test_a_parameter_may_have_any_name_and_a_context_be_optional() -> None:
    def odd(__struct_fields__: int, __x: int, self: int = 0, cls: str = "t") -> list[Any]:
        return [__struct_fields__, __x, self, cls]

    def watched(one: ToolContext, two: ToolContext | None = None) -> bool:
        return one is two

    arguments = '{"__struct_fields__": 1, "__x": 2, "cls": "u"}'
    assert (await tool_of(odd).call(arguments)).output == '[1, 2, 0, "u"]'
    assert (await tool_of(watched).call("{}")).output == "true"
    assert tool_of(watched).definition.parameters == {"type": "object", "properties": {}, "required": []}


def test_a_refusal_says_what_to_do() -> None:
    def sends(where: Path) -> None: ...

    sends.__annotations__["where"] = Path
    with pytest.raises(ToolInvalid, match=r"`where` has the type `Path`.*dataclasses") as refused:
        tool_of(sends)
    assert "hook" not in str(refused.value)
    with pytest.raises(ToolInvalid, match=r"tool\(name="):
        tool_of(lambda x: x)


# --- threads ---

HANGS = """
import time
import anyio
from holdfast.sdk import tool

@tool(timeout=0.05)
def hangs():
    time.sleep(3600)

async def main():
    for _ in range(50):  # more than may run at once: threads that were left running do not count
        print((await hangs.call("{}")).kind)

anyio.run(main)
"""


def test_a_sync_tool_that_hangs_blocks_neither_other_tools_nor_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.split() == ["timed_out"] * 50


async def test_progress_comes_from_any_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def fans_out(context: ToolContext) -> str:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: context.progress(f"part {part}"), range(3)))
        return "done"

    seen: list[str] = []
    outcome = await tool_of(fans_out).call("{}", ToolContext("c", lambda note, _: seen.append(note)))
    assert outcome.output == "done" and sorted(seen) == ["part 0", "part 1", "part 2"]
