"""Python callables as tools: their definitions for the model, and running them.

A sync callable runs in a thread, an async one is awaited; a generator gives its output in pieces. Exceptions
and timeouts become outputs that the model reads.
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

from ..errors import ToolInvalid
from ..frames.formats import FunctionTool
from .context import ToolContext, broken_off, characters, failure, joined, output_text
from .running import Detached, drained, in_thread
from .schemas import callable_name, signature_of, yields

Invoke: TypeAlias = Callable[[str, ToolContext], Awaitable[str]]
"""A function that runs one call of a tool: it gets the call's arguments as JSON text, may write pieces of the
output to the context, and returns the rest of the output, or raises."""
ResultKind: TypeAlias = Literal["completed", "failed", "invalid_arguments", "timed_out"]

LEARNT_FROM = 16
"""A tool's usual duration is estimated from this many of its last calls."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

MAX_ERROR = 4096
"""The model reads at most so many characters of an exception's text."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """How a call ended. `output`: the text for the model, also if it failed; `kind`: `completed`, or how it
    failed; `seconds`: how long it took; `error`: what the tool raised, of which the model reads the text."""

    output: str
    kind: ResultKind
    seconds: float
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's definition for the model, and how to run it; without `invoke` the caller answers its calls.

    ``timeout``: seconds after which a call is cancelled and no longer waited for (None: never). ``expected``:
    seconds that a call usually takes (None: the median of the last ``durations``). ``streams``: the output
    comes in pieces, which `Chat.run` sends as they come. ``detached``: keeps tasks of calls that do not end
    when cancelled, if `call` is given nothing else for that. Raises `ToolInvalid` unless `timeout` is above 0
    and `expected` a finite number from 0 on.
    """

    definition: FunctionTool
    invoke: Invoke | None = None
    timeout: float | None = None
    expected: float | None = None
    streams: bool = False
    durations: deque[float] = field(
        default_factory=lambda: deque(maxlen=LEARNT_FROM), compare=False, repr=False
    )
    detached: Detached = field(default_factory=Detached, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.timeout is None or (_is_number(self.timeout) and self.timeout > 0)):
            raise ToolInvalid(f"`{self.name}`: `timeout` must be seconds above 0, not {self.timeout!r}")
        if not (self.expected is None or (_is_number(self.expected) and 0 <= self.expected < math.inf)):
            raise ToolInvalid(f"`{self.name}`: `expected` must be seconds from 0 on, not {self.expected!r}")

    @property
    def name(self) -> str:
        """The name that the model uses."""
        return self.definition.name

    @property
    def run(self) -> Callable[[str], Awaitable[str]] | None:
        """A function that takes a call's arguments as JSON text and returns its output, also if it fails. None
        if the caller answers the calls."""
        return None if self.invoke is None else self._run

    def expects(self) -> float | None:
        """Seconds that a call is expected to take: `expected`, or what earlier calls took; None: not known."""
        if self.expected is None and self.durations:
            return median(self.durations)
        return self.expected

    async def call(
        self, arguments: str, context: ToolContext | None = None, detached: Detached | None = None
    ) -> ToolResult:
        """Run one call with these arguments (JSON text). Only the cancellation of this is raised: errors and
        timeouts are in the result.

        The output of a call that fails holds what was written, then the error. A task that does not end at the
        timeout, or when this is cancelled, is left to `detached` (None: the tool's own).
        """
        assert self.invoke is not None, "the caller answers calls of a tool without a callable"
        context = context or ToolContext()
        began = time.perf_counter()
        try:
            work = partial(_guarded, self.invoke, arguments, context)
            ended = await (self.detached if detached is None else detached).run(work, self.timeout)
        finally:
            context.cancelled = True
        seconds = time.perf_counter() - began
        output, kind, error = ended or ("", "timed_out", None)
        if kind == "timed_out":
            output = failure(f"The tool gave no answer within {self.timeout:g} seconds")
        if kind != "completed":
            output = broken_off(context.written, output)
        self.durations.append(seconds)
        return ToolResult(output, kind, seconds, error)

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
    """Make a tool of a callable; also a decorator, with or without arguments.

    `name`: by default the callable's. `description`: by default from its docstring. `timeout`: seconds after
    which a call is cancelled (None: never). `expected`: seconds that a call usually takes (None: learnt from
    earlier calls). The parameters follow from the type hints. Raises `ToolInvalid`, or `ToolTypeUnsupported`
    where a parameter's type is no JSON type.
    """

    def made(function: Callable[..., Any]) -> Tool:
        called = callable_name(function) if name is None else name
        if not (isinstance(called, str) and _NAME.fullmatch(called)):
            raise ToolInvalid(
                f"{called!r} is not a name of a tool, which has 1 to 64 of a-z, A-Z, 0-9, `_`, `.` and `-`: "
                "set one with tool(name=...)"
            )
        signature = signature_of(function, called)
        try:
            definition = FunctionTool(
                name=called,
                description=description or signature.description or None,
                parameters=signature.parameters,
            )
            msgspec.json.decode(msgspec.json.encode(definition), type=FunctionTool)
        except (TypeError, ValueError) as error:
            raise ToolInvalid(f"`{called}` cannot be a tool: {error}") from error

        async def invoke(arguments: str, context: ToolContext) -> str:
            """Call the function. Returns the output that comes behind the pieces that were written to
            `context`."""
            result = await _call(function, signature.given(arguments, context))
            if await drained(result, context) or (result is None and context.written):
                return ""
            return output_text(result)

        return Tool(definition, invoke, timeout, expected, yields(function))

    return made if function is None else made(function)


def tool_of(given: ToolLike) -> Tool:
    """A tool from a callable, or, for calls that the caller answers, from a dict in the Realtime form or a
    `FunctionTool`. A `Tool` is returned as it is. Raises `ToolInvalid`."""
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
    return tool(given)


def tools_of(given: Iterable[ToolLike]) -> dict[str, Tool]:
    """The tools that `tool_of` makes of these, by name, in order. Raises `ToolInvalid`, also for two of one
    name."""
    tools: dict[str, Tool] = {}
    for one in map(tool_of, given):
        if one.name in tools:
            raise ToolInvalid(f"Two tools are named `{one.name}`")
        tools[one.name] = one
    return tools


def no_such_tool(name: str, known: Iterable[str]) -> str:
    """The error text for a call of the unknown tool `name`; the model reads it, with the names of the `known`
    tools."""
    return f"There is no tool `{name}`. There are: {', '.join(f'`{one}`' for one in known) or 'none'}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


async def _guarded(
    invoke: Invoke, arguments: str, context: ToolContext
) -> tuple[str, ResultKind, BaseException | None]:
    """Run a call. Returns its whole output and `completed`, or an error for the model, how it failed and what
    was raised. Raises only what also has to end the caller: the task's own cancellation, `KeyboardInterrupt`,
    `GeneratorExit`."""
    try:
        rest = await invoke(arguments, context)
        return joined(context.written, rest), "completed", None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return _failed(error), "invalid_arguments", error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _failed(error), "failed", error  # something that the tool awaited was cancelled
    except BaseException as error:
        return _failed(error), "failed", error


def _failed(error: BaseException) -> str:
    text = _reason(error)
    return failure(text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…")


def _reason(error: BaseException) -> str:
    """Why a tool failed, in words for the model: the exception's own text. Names of Python classes tell the
    model nothing that it can act on, and show how the program is made. What has no text, or one that needs its
    class to be understood, gets other words."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_reason, error.exceptions))
    try:
        text = characters(str(error))
    except Exception:
        text = ""
    if isinstance(error, KeyError):
        return f"Not found: {text}" if text else "Something was not found"
    if isinstance(error, SystemExit):
        return "It ended itself"
    if isinstance(error, TimeoutError):
        return text or "It took too long"
    if isinstance(error, asyncio.CancelledError):
        return text or "It was cancelled"
    return text or "The tool failed, and does not say why"


async def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        return await function(**given)
    if yields(function):
        return function(**given)
    result = await in_thread(lambda: function(**given))
    return await result if inspect.isawaitable(result) else result
