"""Python callables as tools: their schema, and their outputs."""

from __future__ import annotations

import threading
from typing import Annotated, Any, Literal

import anyio
import anyio.to_thread
import msgspec
import pytest

from holdfast.sdk.errors import ToolInvalid, ToolTypeUnsupported
from holdfast.sdk.tools.context import ToolContext
from holdfast.sdk.tools.tool import tool, tool_of, tools_of

pytestmark = pytest.mark.anyio


class Place(msgspec.Struct):
    """Where."""

    city: str
    country: str = "IT"


def forecast(
    city: str,
    days: int = 3,
    unit: Literal["c", "f"] = "c",
    tags: list[str] | None = None,
    *,
    detail: Annotated[bool, msgspec.Meta(description="More words.")] = False,
) -> dict[str, Any]:
    """The weather of the
    days to come.

    Not a climate model.

    Args:
        city: Which city.
        days (int): How far.
        detail: Passed over: the hint says it.

    Returns:
        city: not an argument.
    """
    return {"city": city, "days": days, "unit": unit, "tags": tags, "detail": detail}


def test_the_schema_comes_from_hints_and_docstring() -> None:
    definition = tool_of(forecast).definition
    assert definition.name == "forecast"
    assert definition.description == "The weather of the days to come. Not a climate model."
    assert definition.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which city."},
            "days": {"type": "integer", "description": "How far.", "default": 3},
            "unit": {"enum": ["c", "f"], "default": "c"},
            "tags": {
                "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                "default": None,
            },
            "detail": {"type": "boolean", "description": "More words.", "default": False},
        },
        "required": ["city"],
    }


async def test_arguments_are_checked_and_defaults_filled_in() -> None:
    run = tool_of(forecast).run
    assert run is not None
    assert msgspec.json.decode(await run('{"city":"Rome","days":1}')) == {
        "city": "Rome", "days": 1, "unit": "c", "tags": None, "detail": False,
    }  # fmt: skip
    for wrong in ('{"days":1}', '{"city":1}', '{"city":"R","x":1}', '{"city"', "[]"):
        assert "error" in msgspec.json.decode(await run(wrong))


async def test_structs_come_as_structs() -> None:
    def where(place: Place) -> str:
        return f"{place.city}, {place.country}"

    where.__annotations__["place"] = Place
    tool = tool_of(where)
    assert tool.run is not None
    assert tool.definition.parameters is not None
    assert tool.definition.parameters["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert tool.definition.parameters["$defs"]["Place"]["required"] == ["city"]
    assert await tool.run('{"place":{"city":"Rome"}}') == "Rome, IT"


async def test_a_mutable_default_is_not_shared() -> None:
    def collect(word: str, into: list[str] = []) -> list[str]:  # noqa: B006 - what is tested
        into.append(word)
        return into

    run = tool_of(collect).run
    assert run is not None
    assert [await run('{"word":"a"}'), await run('{"word":"b"}')] == ['["a"]', '["b"]']


async def test_sync_in_a_thread_async_in_the_loop() -> None:
    where: list[bool] = []

    def sync() -> None:
        where.append(threading.current_thread() is threading.main_thread())

    async def asynchronous() -> None:
        where.append(threading.current_thread() is threading.main_thread())

    class Callable:
        __name__ = "callable"

        async def __call__(self) -> str:
            return "called"

    outputs = []
    for given in (sync, asynchronous, Callable()):
        run = tool_of(given).run
        assert run is not None
        outputs.append(await run(""))
    assert where == [False, True]
    assert outputs == ["null", "null", "called"]


def test_dicts_have_no_callable() -> None:
    tool = tool_of({"type": "function", "name": "f", "parameters": {"type": "object"}})
    assert tool.run is None
    assert tool_of(tool.definition) == tool


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a b"},
        {"type": "mcp", "name": "f"},
        {"name": "f", "color": 1},
        lambda x: x,
        lambda *args: args,
    ],
)
def test_callables_that_cannot_be_tools_are_refused(given: Any) -> None:
    with pytest.raises(ToolInvalid):
        tool_of(given)


@pytest.mark.parametrize(
    ("hint", "default"),
    [
        ("1 / 0", ""),  # evaluated
        (str, "\ud800"),  # no character
        (int, 2**64),  # no journal keeps it
    ],
)
def test_parameters_that_cannot_be_given_by_name_are_refused(hint: Any, default: Any) -> None:
    def given(value: Any = default) -> None: ...

    given.__annotations__["value"] = hint
    with pytest.raises(ToolInvalid, match="`given` cannot be a tool"):
        tool(given)


def test_two_of_one_name() -> None:
    with pytest.raises(ToolInvalid):
        tools_of([forecast, {"name": "forecast"}])


def test_a_type_that_is_no_json_type_is_named_when_decorated() -> None:
    class Socket:
        pass

    def send(text: str, socket: Socket) -> None: ...

    send.__annotations__["socket"] = Socket
    with pytest.raises(ToolTypeUnsupported, match="`socket`") as refused:
        tool(send)
    assert (refused.value.parameter, refused.value.type_name) == ("socket", "Socket")


def test_what_the_author_says_counts() -> None:
    @tool(name="where_is", description="Says where.", timeout=2.0, expected=1.5)
    def locate(thing: str) -> str:
        """Finds things."""
        return thing

    assert (locate.name, locate.definition.description) == ("where_is", "Says where.")
    assert (locate.timeout, locate.expects()) == (2.0, 1.5)
    assert tool_of(locate) is locate


async def test_a_tool_that_hangs_is_cancelled() -> None:
    ended: list[bool] = []

    @tool(timeout=0.01)
    async def hangs(context: ToolContext) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(context.cancelled)

    outcome = await hangs.call("{}")
    assert outcome.kind == "timed_out" and "0.01 seconds" in outcome.output
    assert ended == [False]
    assert hangs.expects() == outcome.seconds


async def test_a_thread_can_see_that_its_call_was_cancelled() -> None:
    begun, seen = threading.Event(), threading.Event()

    @tool
    def spins(context: ToolContext) -> None:
        begun.set()
        while not context.cancelled:
            threading.Event().wait(0.001)
        context.progress("too late")
        seen.set()

    async with anyio.create_task_group() as group:
        group.start_soon(spins.call, "{}")
        assert await anyio.to_thread.run_sync(begun.wait, 30.0)
        group.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(seen.wait, 30.0)
