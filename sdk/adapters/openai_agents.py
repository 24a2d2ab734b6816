"""A model for the openai-agents package (the extra `agents`), over sessions that keep the history.

    agent = Agent(name="Pocket", model=SessionModel(client), tools=[get_weather])

A grammar enforces an agent's `output_type`: its reply is a call of a tool, or JSON that fits the type. That
package gives a model all items with each step; only new ones are sent to the session that holds the first
of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agents import Model, ModelBehaviorError, ModelResponse, UserError
from agents import Usage as AgentUsage
from anyio import CancelScope
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from ..chat import Chat
from ..client import Client
from ..connection.responses import Finished
from ..errors import ServerError
from ..frames.items import AnyItem, FunctionCallItem, FunctionCallOutputItem, MessageItem, Role
from ..frames.server import OutputItemDone, TextDelta

KEPT_SESSIONS = 8

_Key: TypeAlias = tuple[str, ...]
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_output_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
}


@dataclass(slots=True, eq=False)
class _Kept:
    """A session that is kept open for later steps. `keys`: of the items that it holds, in order (`_key`).
    `stack`: closes it. `head`: the instructions and tools that it has. `busy`: a response runs in it."""

    chat: Chat
    stack: AsyncExitStack
    keys: list[_Key] = field(default_factory=list)
    head: tuple[Any, ...] = ()
    busy: bool = False


class SessionModel(Model):
    """`agents.Model` over a `Client`. It keeps up to `KEPT_SESSIONS` sessions open, and `close` closes them.

    Raises `agents.UserError` for what is not served, also an output type that no grammar can be made of,
    `agents.ModelBehaviorError` for a reply that ends before its JSON does, and what `Chat.respond` raises.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: list[_Kept] = []

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the package's own word
        model_settings: Any,
        tools: list[Any],
        output_schema: Any,
        handoffs: list[Any],
        tracing: Any,
        **more: Any,
    ) -> Any:
        """Let the model respond to `input`, which has all items so far, and return the whole
        `agents.ModelResponse`. Only items that the session lacks are sent. `tracing` and `more` are ignored."""
        finished = None
        given = (system_instructions, input, model_settings, tools, output_schema, handoffs)
        async for event in self._respond(*given):
            finished = event if isinstance(event, Finished) else finished
        assert finished is not None
        usage = AgentUsage(requests=1, **vars(_usage(finished)))
        return ModelResponse(output=_outputs(finished), usage=usage, response_id=finished.response.id)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the package's own word
        model_settings: Any,
        tools: list[Any],
        output_schema: Any,
        handoffs: list[Any],
        tracing: Any,
        **more: Any,
    ) -> AsyncIterator[Any]:
        """Let the model respond to `input`, which has all items so far, and yield the response as it comes, in
        events of the Responses API: created, text deltas, finished items, completed. Only items that the
        session lacks are sent. `tracing` and `more` are ignored."""
        numbers = iter(range(1 << 30))
        begun = _whole("resp_begun", "in_progress", (), None)
        yield ResponseCreatedEvent(type="response.created", response=begun, sequence_number=next(numbers))
        given = (system_instructions, input, model_settings, tools, output_schema, handoffs)
        async with aclosing(self._respond(*given)) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        yield ResponseTextDeltaEvent(
                            type="response.output_text.delta",
                            item_id=event.item_id,
                            output_index=event.output_index,
                            content_index=0,
                            delta=event.delta,
                            logprobs=[],
                            sequence_number=next(numbers),
                        )
                    case OutputItemDone():
                        yield ResponseOutputItemDoneEvent(
                            type="response.output_item.done",
                            item=_output(event.item),
                            output_index=event.output_index,
                            sequence_number=next(numbers),
                        )
                    case Finished():
                        outputs, usage = _outputs(event), _usage(event)
                        whole = _whole(event.response.id, "completed", outputs, usage)
                        yield ResponseCompletedEvent(
                            type="response.completed", response=whole, sequence_number=next(numbers)
                        )

    async def close(self) -> None:
        """Close all sessions that are kept."""
        kept, self._kept = self._kept, []
        for one in kept:
            await one.stack.aclose()

    async def _respond(
        self, instructions: str | None, given: Any, settings: Any, tools: Any, schema: Any, handoffs: Any
    ) -> AsyncGenerator[Any, None]:
        """Send the items of `given` that the session lacks, ask for a response, and yield its server events;
        last comes the response itself, a `Finished`. If it is not read to its end, its session is closed."""
        fields = _fields(settings, schema)
        items = _items(given)
        keys = [_key(item) for item in items]
        kept = await self._session(keys)
        kept.busy, whole = True, False
        try:
            await _configure(kept, instructions or "", [*map(_tool, tools), *map(_handoff, handoffs)])
            for item, key in zip(items[len(kept.keys) :], keys[len(kept.keys) :], strict=True):
                await kept.chat.add(item)
                kept.keys.append(key)
            with _grammar_errors(schema):
                async for event in kept.chat.respond(**fields):
                    yield event
            finished = kept.chat.last
            if "text" in fields:
                _check_whole(finished)
            kept.keys += [_key(item) for item in finished.response.output]
            whole = True
            yield finished
        finally:
            kept.busy = False
            if not whole:  # it may hold text that the caller did not get
                await self._drop(kept)

    async def _session(self, keys: list[_Key]) -> _Kept:
        """The session to use, never a busy one: of those that hold the first of these items and no others, the
        one that holds the most. If there is none, a new one; if there are `KEPT_SESSIONS` already, an idle one
        is closed first, and if all are busy there is one more. ``keys``: those of the items."""
        fitting = [one for one in self._kept if not one.busy and keys[: len(one.keys)] == one.keys]
        if fitting:
            return max(fitting, key=lambda one: len(one.keys))
        idle = [one for one in self._kept if not one.busy]
        if len(self._kept) >= KEPT_SESSIONS and idle:
            await self._drop(idle[0])
        stack = AsyncExitStack()
        kept = _Kept(await stack.enter_async_context(self._client.session()), stack)
        self._kept.append(kept)
        return kept

    async def _drop(self, kept: _Kept) -> None:
        """Close a session and keep it no more. A later step sends its items to another one."""
        if kept in self._kept:
            self._kept.remove(kept)
        with CancelScope(shield=True):
            await kept.stack.aclose()


async def _configure(kept: _Kept, instructions: str, tools: Sequence[Mapping[str, Any]]) -> None:
    head = (instructions, *(repr(tool) for tool in tools))
    if head != (kept.head or ("",)):
        await kept.chat.update(instructions=instructions, tools=tools)
        kept.head = head


# --- there ----------------------------------------------------------------------------------------------------


def _items(given: Any) -> list[AnyItem]:
    if isinstance(given, str):
        return [MessageItem.of("user", given)]
    return [item for one in given if (item := _item(dict(one))) is not None]


def _item(given: Mapping[str, Any]) -> AnyItem | None:
    """An item of the Responses API as an item of our frames; None for reasoning, which is not sent back. Raises
    `agents.UserError` for other types."""
    match given.get("type", "message"):
        case "message":
            role: Role = "system" if given["role"] == "developer" else given["role"]
            return MessageItem.of(role, _text(given["content"]))
        case "function_call":
            return FunctionCallItem(
                name=given["name"], arguments=given["arguments"], call_id=given["call_id"]
            )
        case "function_call_output":
            return FunctionCallOutputItem(call_id=given["call_id"], output=_text(given["output"]))
        case "reasoning":
            return None
        case kind:
            raise UserError(f"Items of the type {kind!r} are not served by this model")


def _text(content: Any) -> str:
    """The text of an item's content. Raises `agents.UserError` if it holds more than text."""
    if isinstance(content, str):
        return content
    for part in content:
        if "text" not in part:
            raise UserError(f"Content of the type {part.get('type')!r} is not served by this model")
    return "".join(part["text"] for part in content)


def _key(item: AnyItem) -> _Key:
    """A key that is equal for items with equal content. It shows which of the items that the package gives the
    session holds already."""
    match item:
        case MessageItem():
            return ("message", item.role, item.text)
        case FunctionCallItem():
            return ("call", item.call_id or "", item.name, item.arguments)
        case FunctionCallOutputItem():
            return ("output", item.call_id, item.output)


def _tool(tool: Any) -> dict[str, Any]:
    schema = getattr(tool, "params_json_schema", None)
    if schema is None:
        raise UserError(f"The tool {getattr(tool, 'name', tool)!r} is not served by this model")
    return _function(tool.name, tool.description, schema)


def _handoff(handoff: Any) -> dict[str, Any]:
    return _function(handoff.tool_name, handoff.tool_description, handoff.input_json_schema)


def _function(name: str, description: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": description, "parameters": _plain(schema)}


def _plain(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic gives everything, which only repeat names."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
        return {key: _plain(value) for key, value in kept.items()}
    return [_plain(value) for value in schema] if isinstance(schema, list) else schema


def _fields(settings: Any, schema: Any) -> dict[str, Any]:
    """The keyword arguments of `Chat.respond` for these settings and this output type. Where a call is forced
    there is no text, and so no format."""
    given = {ours: getattr(settings, theirs, None) for theirs, ours in _SETTINGS.items()}
    choice = given["tool_choice"]
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        given["tool_choice"] = choice = {"type": "function", "name": choice}
    if choice in (None, "auto", "none") and not _is_plain(schema):
        given["text"] = {"format": _format(schema)}
    return {name: value for name, value in given.items() if value is not None}


def _is_plain(schema: Any) -> bool:
    return schema is None or schema.is_plain_text()


def _format(schema: Any) -> dict[str, Any]:
    """The `text.format` for an output type. Its name is fixed: a type's own, such as `list[int]`, is not
    valid."""
    return {
        "type": "json_schema",
        "name": "final_output",
        "schema": schema.json_schema(),
        "strict": schema.is_strict_json_schema(),
    }


@contextmanager
def _grammar_errors(schema: Any) -> Iterator[None]:
    """Raise `agents.UserError` instead of the server's error if it can make no grammar of the output type or
    the tools."""
    try:
        yield
    except ServerError as refused:
        if refused.code != "invalid_grammar":
            raise
        message = f"This model cannot enforce the output type or tools: {refused.message}"
        if not _is_plain(schema) and schema.is_strict_json_schema() and "tool" not in (refused.param or ""):
            message += ". AgentOutputSchema(…, strict_json_schema=False) ignores unsupported keywords"
        raise UserError(message) from refused


def _check_whole(finished: Finished) -> None:
    if finished.status == "completed":
        return
    details = finished.response.status_details
    reason = details and (details.error.message if details.error else details.reason)
    raise ModelBehaviorError(f"The reply ended before its JSON was whole: {reason or finished.status}")


# --- and back -------------------------------------------------------------------------------------------------


def _outputs(finished: Finished) -> list[Any]:
    return [_output(item) for item in finished.response.output]


def _output(item: AnyItem) -> Any:
    assert not isinstance(item, FunctionCallOutputItem), "a model gives no outputs of calls"
    if isinstance(item, FunctionCallItem):
        return ResponseFunctionToolCall(
            type="function_call",
            id=item.id,
            call_id=item.call_id or "",
            name=item.name,
            arguments=item.arguments,
            status=item.status,
        )
    part = ResponseOutputText(type="output_text", text=item.text, annotations=[])
    status = item.status or "completed"
    return ResponseOutputMessage(
        type="message", id=item.id or "", role="assistant", status=status, content=[part]
    )


def _usage(finished: Finished) -> Any:
    usage = finished.usage
    counts = (0, 0, 0) if usage is None else (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    cached = 0 if usage is None else usage.input_token_details.cached_tokens
    return ResponseUsage.construct(
        input_tokens=counts[0],
        output_tokens=counts[1],
        total_tokens=counts[2],
        input_tokens_details=InputTokensDetails.construct(cached_tokens=cached, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails.construct(reasoning_tokens=0),
    )


def _whole(response_id: str, status: str, output: Iterable[Any], usage: Any) -> Any:
    return Response.construct(
        id=response_id,
        object="response",
        created_at=time.time(),
        model="holdfast",
        status=status,
        output=list(output),
        usage=usage,
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
    )
