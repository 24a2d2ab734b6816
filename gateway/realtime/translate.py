"""Translates between frames and the types of `sessions`: items, tools, requests, usage. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.link.messages import Grammar, GrammarKind
from ...sdk.errors import FieldInvalid
from ...sdk.frames import formats
from ...sdk.frames import items as frames
from ...sdk.frames.formats import FunctionTool, NamedFunction, TextConfig
from ...sdk.frames.response import (
    CachedTokensDetails,
    InputTokenDetails,
    KVReceipt,
    OutputTokenDetails,
    ResponseParams,
    Usage,
)
from ...sdk.frames.sampling import SamplingFields, TokenLogprob, TopLogprob
from ...sdk.frames.session import SessionPatch, SessionResource
from ...sessions.errors import GrammarInvalid, SamplingInvalid, ToolInvalid
from ...sessions.items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool
from ...sessions.tools.grammar import checked_grammar, json_format
from ...sessions.turn.events import TokenScore, TurnUsage
from ...sessions.turn.request import UNBOUNDED, RequestBounds, TurnRequest

SAMPLING = SamplingFields.__struct_fields__
"""Fields that a response inherits from its session; `TurnRequest.checked` has the same names."""

_NOTHING = ResponseParams()

ECHOED = ("audio", "include", "parallel_tool_calls", "reasoning", "tracing")


def item_of(frame: frames.AnyItem, new_id: Callable[[str], str]) -> Item:
    """The session's item. Ids that the client left out are made."""
    item_id = frame.id or new_id("item")
    match frame:
        case frames.MessageItem(role=role):
            return Message(id=item_id, role=role, text=frame.text)
        case frames.FunctionCallItem(name=name, arguments=arguments):
            call_id = frame.call_id or new_id("call")
            return FunctionCall(id=item_id, call_id=call_id, name=name, arguments=arguments)
        case frames.FunctionCallOutputItem(call_id=call_id, output=output):
            return FunctionCallOutput(id=item_id, call_id=call_id, output=output)


def frame_of(item: Item, status: frames.ItemStatus | None = None) -> frames.AnyItem:
    """The item as a frame. `status`: of an item that is not final."""
    match item:
        case Message(id=item_id, role=role, text=text, complete=complete):
            part = frames.TextPart(type=frames.PART_OF_ROLE[role], text=text)
            return frames.MessageItem(
                id=item_id,
                object="realtime.item",
                status=status or _status(complete),
                role=role,
                content=[] if status == "in_progress" else [part],
            )
        case FunctionCall(id=item_id, call_id=call_id, name=name, arguments=arguments, complete=complete):
            return frames.FunctionCallItem(
                id=item_id,
                object="realtime.item",
                status=status or _status(complete),
                name=name,
                call_id=call_id,
                arguments=arguments,
            )
        case FunctionCallOutput(id=item_id, call_id=call_id, output=output):
            return frames.FunctionCallOutputItem(
                id=item_id, object="realtime.item", status="completed", call_id=call_id, output=output
            )


def _status(complete: bool) -> frames.ItemStatus:
    return "completed" if complete else "incomplete"


def tools_of(tools: list[FunctionTool]) -> tuple[Tool, ...]:
    """The session's tools."""
    return tuple(
        Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.parameters or {},
            strict=bool(tool.strict),
        )
        for tool in tools
    )


def preamble_of(session: SessionResource) -> Preamble:
    """The instructions and tools before the first item."""
    return Preamble(instructions=session.instructions, tools=tools_of(session.tools))


def patched(session: SessionResource, patch: SessionPatch, initial: SessionResource) -> SessionResource:
    """The configuration after `session.update`. A null field goes back to its first value.

    Raises `FieldInvalid` for another model, which cannot be changed.
    """
    if patch.model not in (UNSET, None, session.model):
        raise FieldInvalid(f"The session's model is {session.model!r} and cannot be changed", "session.model")
    changes: dict[str, Any] = {}
    for name in set(patch.__struct_fields__) - {"type", "model"}:
        value = getattr(patch, name)
        if value is not UNSET:
            changes[name] = getattr(initial, name) if value is None and name not in ECHOED else value
    return msgspec.structs.replace(session, **changes)


@contextmanager
def under(section: str) -> Iterator[None]:
    """Put the name of the object before the field that an error names."""
    try:
        yield
    except (SamplingInvalid, GrammarInvalid, ToolInvalid) as error:
        if error.param is not None:
            error.param = f"{section}.{error.param}"
        raise


def request_of(
    params: ResponseParams,
    session: SessionResource,
    resolve: Callable[[frames.InputItem], Item],
    bounds: RequestBounds = UNBOUNDED,
    seed: int | None = None,
) -> TurnRequest:
    """The turn that `response.create` asks for. The session's values stand in for fields that it leaves out.

    `seed` is used where neither has one. `resolve` finds the item that an input item names. Raises what
    `TurnRequest.checked` and `resolve` raise.
    """

    def chosen(name: str) -> Any:
        for source in (params, session):
            value = getattr(source, name)
            if value is not UNSET and value is not None:
                return value
        return None

    choice = chosen("tool_choice") or "auto"
    named = choice.name if isinstance(choice, NamedFunction) else None
    sampling = {name: value for name in SAMPLING if (value := chosen(name)) not in (None, "inf")}
    return TurnRequest.checked(
        **{"seed": seed, **sampling},
        bounds=bounds,
        out_of_band=params.conversation == "none",
        input=[resolve(item) for item in params.input] if isinstance(params.input, list) else None,
        instructions=_given(params.instructions),
        tools=tools_of(params.tools) if isinstance(params.tools, list) else None,
        tool_choice=choice if isinstance(choice, str) else "required",
        tool=named,
        format=format_of(params),
        offered=tools_of(session.tools),
    )


class RequestCache:
    """The requests of one session's responses. Most responses say nothing of their own: their request is made
    once for each configuration.
    """

    def __init__(self, bounds: RequestBounds) -> None:
        self._bounds = bounds
        self._cached: tuple[SessionResource, TurnRequest] | None = None

    def of(
        self,
        params: ResponseParams,
        session: SessionResource,
        resolve: Callable[[frames.InputItem], Item],
        seed: int,
    ) -> TurnRequest:
        """The turn that `response.create` asks for. Raises what `request_of` does."""
        own = msgspec.structs.replace(params, metadata=UNSET, events=UNSET)
        if own != _NOTHING:
            return request_of(params, session, resolve, self._bounds, seed)
        if self._cached is None or self._cached[0] is not session:
            self._cached = (session, request_of(_NOTHING, session, resolve, self._bounds, seed))
        request = self._cached[1]
        drawn = seed if session.seed is None else session.seed
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=drawn)
        )


def format_of(params: ResponseParams) -> Grammar | None:
    """The grammar of the reply's text; None: any text. Raises `GrammarInvalid`."""
    text = params.text.format if isinstance(params.text, TextConfig) else None
    asked = {"text.format": text, "response_format": params.response_format, "grammar": params.grammar}
    given = {name: wish for name, wish in asked.items() if wish is not None and wish is not UNSET}
    if len(given) > 1:
        raise GrammarInvalid(f"One of {' and '.join(given)} can be followed", param=list(given)[-1])
    return next((_grammar_of(wish, name) for name, wish in given.items()), None)


def _grammar_of(wish: Any, name: str) -> Grammar | None:
    match wish:
        case formats.JsonObject():
            return json_format({"type": "object"}, strict=True, param=name)
        case formats.JsonSchema(schema=schema, strict=strict):
            return json_format(schema, strict=strict is not False, param=f"{name}.schema")
        case formats.ChatJsonSchema(json_schema=named):
            param = f"{name}.json_schema.schema"
            return json_format(named.schema, strict=named.strict is not False, param=param)
        case formats.RegexGrammar(pattern=pattern):
            return checked_grammar(Grammar(GrammarKind.REGEX, pattern), f"{name}.pattern")
        case formats.ChoiceGrammar(choices=choices):
            listed = msgspec.json.encode(choices).decode()
            return checked_grammar(Grammar(GrammarKind.CHOICE, listed), f"{name}.choices")
        case formats.LarkGrammar(definition=definition):
            return checked_grammar(Grammar(GrammarKind.LARK, definition), f"{name}.definition")
    return None


def seed_of(response_id: str) -> int:
    """The seed of a response without one. It follows from the id, so that it is the same when told again."""
    return int.from_bytes(hashlib.blake2b(response_id.encode(), digest_size=8).digest()) >> 1


def _given(value: str | UnsetType | None) -> str | None:
    return value if isinstance(value, str) else None


def logprobs_of(scores: Iterable[TokenScore]) -> list[TokenLogprob]:
    """Tokens' log probabilities as frames."""
    return [
        TokenLogprob(
            token=score.text,
            id=score.token,
            logprob=score.logprob,
            top_logprobs=[
                TopLogprob(token=other.text, id=other.token, logprob=other.logprob) for other in score.top
            ],
        )
        for score in scores
    ]


def usage_of(usage: TurnUsage) -> Usage:
    """A turn's cost in the standard's fields."""
    cached = usage.cached_tokens
    return Usage(
        total_tokens=usage.input_tokens + usage.output_tokens,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        input_token_details=InputTokenDetails(
            cached_tokens=cached,
            text_tokens=usage.input_tokens,
            cached_tokens_details=CachedTokensDetails(text_tokens=cached),
        ),
        output_token_details=OutputTokenDetails(text_tokens=usage.output_tokens),
    )


def receipt_of(usage: TurnUsage) -> KVReceipt:
    """The receipt of a turn's KV: the tokens that it computed, and the tiers that held the others."""
    return KVReceipt(
        new=usage.new_tokens,
        prefilled=usage.prefilled_tokens,
        resident=usage.cached_tokens - usage.host_tokens - usage.disk_tokens,
        recomputed=usage.recomputed_tokens,
        host=usage.host_tokens,
        disk=usage.disk_tokens,
        restore_ms=usage.restore_ms,
        miss_reason=None if usage.miss_reason is None else usage.miss_reason.value,
    )
