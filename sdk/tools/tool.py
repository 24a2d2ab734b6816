"""Python callables as tools: what the model is told of them, and running them.

    @tool(timeout=5.0)
    async def get_weather(city: str) -> dict[str, Any]:
        \"\"\"The weather in a city.\"\"\"

A sync callable runs in a thread, an async one is awaited; one that yields answers in pieces. What it raises,
and its hanging, becomes an output the model reads. Knows nothing of the conversation.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal, TypeAlias, overload

import msgspec

from ..detached import Detached
from ..errors import ToolInvalid
from ..frames.formats import FunctionTool
from .context import ToolContext
from .outputs import broken_off, characters, failure, joined, output_text
from .schemas import called_by, takes_of, yields
from .streaming import drained
from .threads import in_thread

Invoke: TypeAlias = Callable[[str, ToolContext], Awaitable[str]]
"""Takes a call's arguments as JSON text; gives the output, or raises."""
OutcomeKind: TypeAlias = Literal["completed", "failed", "invalid_arguments", "timed_out"]

LEARNT_FROM = 16

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

MAX_ERROR = 4096
"""Characters of what a tool raised that the model is shown."""


class Durations:
    """How long a tool's last calls took, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=LEARNT_FROM)

    def add(self, seconds: float) -> None:
        """One more."""
        self._seconds.append(seconds)

    def usual(self) -> float | None:
        """The median; None before the first."""
        return median(self._seconds) if self._seconds else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call: text for the model, whatever happened, and how long it took."""

    output: str
    kind: OutcomeKind
    seconds: float


@dataclass(frozen=True, slots=True)
class Tool:
    """What the model is told of a tool, and how to run it; without `invoke` its caller answers the calls.

    ``timeout``: seconds, after which a call is cancelled, and waited for no longer. ``expected``: seconds that
    a call usually takes, where its author knows; otherwise it is learnt from those that ran. ``streams``: it
    answers in pieces from its beginning on, which `Chat.run` gives to the model as they come. ``apart``: calls
    that went on after their end, outside of a chat. Raises `ToolInvalid` for `timeout` or `expected` where it
    can be none.
    """

    definition: FunctionTool
    invoke: Invoke | None = None
    timeout: float | None = None
    expected: float | None = None
    streams: bool = False
    durations: Durations = field(default_factory=Durations, compare=False, repr=False)
    apart: Detached = field(default_factory=Detached, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.timeout is None or (_is_number(self.timeout) and self.timeout > 0)):
            raise ToolInvalid(f"`{self.name}`: `timeout` must be seconds above 0, not {self.timeout!r}")
        if not (self.expected is None or (_is_number(self.expected) and 0 <= self.expected < math.inf)):
            raise ToolInvalid(f"`{self.name}`: `expected` must be seconds from 0 on, not {self.expected!r}")

    @property
    def name(self) -> str:
        """The name the model calls it by."""
        return self.definition.name

    @property
    def run(self) -> Callable[[str], Awaitable[str]] | None:
        """Takes a call's arguments, gives its output; None where its caller answers."""
        return None if self.invoke is None else self._run

    def expects(self) -> float | None:
        """Seconds that a call is expected to take: as declared, else as learnt."""
        return self.durations.usual() if self.expected is None else self.expected

    async def call(
        self, arguments: str, context: ToolContext | None = None, apart: Detached | None = None
    ) -> Outcome:
        """Run it; nothing it does is raised, but for being cancelled from outside.

        What it has written when something goes wrong stays, and behind it stands what went wrong. At its
        timeout, and when this is cancelled, it is left behind where it does not end: in `detached`, or for
        good.
        """
        assert self.invoke is not None, "a tool without a callable is its caller's to answer"
        context = context or ToolContext()
        began = time.perf_counter()
        try:
            work = partial(_told, self._answered, arguments, context)
            told = await (self.apart if apart is None else apart).run(work, self.timeout)
        finally:
            context.cancelled = True
        seconds = time.perf_counter() - began
        output, kind = told or ("", "timed_out")
        if kind == "timed_out":
            output = failure(f"The tool gave no answer within {self.timeout:g} seconds")
        if kind != "completed":
            output = broken_off(context.written, output)
        self.durations.add(seconds)
        return Outcome(output, kind, seconds)

    async def _answered(self, arguments: str, context: ToolContext) -> str:
        assert self.invoke is not None
        rest = await self.invoke(arguments, context)
        return joined(context.written, rest)

    async def _run(self, arguments: str) -> str:
        return (await self.call(arguments)).output


ToolLike: TypeAlias = Callable[..., Any] | Mapping[str, Any] | FunctionTool | Tool


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    expected: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    expected: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """A tool from a callable, as a decorator with or without arguments; `timeout` and `expected` in seconds.

    Raises `ToolInvalid`, or `ToolTypeUnsupported` where no JSON can be a parameter's type.
    """

    def made(function: Callable[..., Any]) -> Tool:
        return _from_callable(function, name, description, timeout, expected)

    return made if function is None else made(function)


def tool_of(given: ToolLike) -> Tool:
    """A tool from a callable, a dict in the Realtime form, or a `FunctionTool`. Raises `ToolInvalid`."""
    if isinstance(given, Tool):
        return given
    if isinstance(given, FunctionTool | Mapping):
        try:
            plain = given if isinstance(given, Mapping) else msgspec.to_builtins(given)
            definition = msgspec.convert({"type": "function", **plain}, FunctionTool)
            msgspec.json.encode(definition)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolInvalid(f"Not a function tool: {error}") from None
        return Tool(definition)
    return _from_callable(given)


def tools_of(given: Iterable[ToolLike]) -> dict[str, Tool]:
    """Tools by name. Raises `ToolInvalid`, also for two of one name."""
    tools: dict[str, Tool] = {}
    for one in map(tool_of, given):
        if one.name in tools:
            raise ToolInvalid(f"Two tools are named `{one.name}`")
        tools[one.name] = one
    return tools


def no_such_tool(name: str, known: Iterable[str]) -> str:
    """Why a call of a tool that nobody knows is not run, for the model to read."""
    return f"There is no tool `{name}`. There are: {', '.join(f'`{one}`' for one in known) or 'none'}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _from_callable(
    function: Callable[..., Any],
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    expected: float | None = None,
) -> Tool:
    called = called_by(function) if name is None else name
    if not (isinstance(called, str) and _NAME.fullmatch(called)):
        raise ToolInvalid(
            f"{called!r} is no name of a tool, which has 1 to 64 of a-z, A-Z, 0-9, `_`, `.` and `-`: "
            "give it one with tool(name=...)"
        )
    takes = takes_of(function, called)
    try:
        definition = FunctionTool(
            name=called, description=description or takes.description or None, parameters=takes.parameters
        )
        msgspec.json.decode(msgspec.json.encode(definition), type=FunctionTool)
    except (TypeError, ValueError) as error:
        raise ToolInvalid(f"`{called}` cannot be a tool: {error}") from error

    async def invoke(arguments: str, context: ToolContext) -> str:
        """What stands behind the pieces that were written, if any were."""
        result = await _call(function, takes.given(arguments, context))
        if await drained(result, context) or (result is None and context.written):
            return ""
        return output_text(result)

    return Tool(definition, invoke, timeout, expected, yields(function))


async def _told(invoke: Invoke, arguments: str, context: ToolContext) -> tuple[str, OutcomeKind]:
    """The output; whatever is raised is the model's to read, but for what ends the caller too."""
    try:
        return await invoke(arguments, context), "completed"
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return _failed(error), "invalid_arguments"
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _failed(error), "failed"  # of something that the tool awaited
    except BaseException as error:
        return _failed(error), "failed"


def _failed(error: BaseException) -> str:
    try:
        told = characters(str(error))
    except Exception:
        told = "it cannot say why"
    shown = told if len(told) <= MAX_ERROR else f"{told[:MAX_ERROR]}…"
    return failure(f"{type(error).__name__}: {shown}")


async def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        return await function(**given)
    if yields(function):
        return function(**given)
    result = await in_thread(lambda: function(**given))
    return await result if inspect.isawaitable(result) else result
