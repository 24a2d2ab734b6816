"""Between frames and the types of `sessions`: items, tools, requests and receipts, as pure functions.

Knows nothing of when an event may come, nor of sockets.
"""

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
from ...sessions.errors import GrammarInvalid, SamplingInvalid
from ...sessions.items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool
from ...sessions.tools.grammar import checked_grammar, json_format
from ...sessions.turn.events import TokenScore, TurnUsage
from ...sessions.turn.request import TurnRequest

SAMPLING = SamplingFields.__struct_fields__
"""Fields that a response inherits from its session, by the names that `TurnRequest.checked` has for them."""

_NOTHING = ResponseParams()

ECHOED = ("audio", "include", "parallel_tool_calls", "reasoning", "tracing")


def item_of(frame: frames.AnyItem, new_id: Callable[[str], str]) -> Item:
    """The session's item; ids the client left out are made."""
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
    """The item as the wire shows it; `status` stands in where the item is not final."""
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
    """What the configuration puts before the first item."""
    return Preamble(instructions=session.instructions, tools=tools_of(session.tools))


def patched(session: SessionResource, patch: SessionPatch, initial: SessionResource) -> SessionResource:
    """The configuration after `session.update`; a null field goes back to what it was at the beginning.

    Raises `FieldInvalid` for another model: it is the session's for life.
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
    """What is refused of sampling is named as the client wrote it: with the object that holds the field."""
    try:
        yield
    except (SamplingInvalid, GrammarInvalid) as error:
        if error.param is not None:
            error.param = f"{section}.{error.param}"
        raise


def request_of(
    params: ResponseParams,
    session: SessionResource,
    resolve: Callable[[frames.InputItem], Item],
    vocab_size: int | None = None,
    seed: int | None = None,
) -> TurnRequest:
    """The turn that `response.create` asks for, with the session's values where it gives none.

    `seed` is used where neither names one. `resolve` finds what an input item stands for. Raises what
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
        vocab_size=vocab_size,
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

    def __init__(self, vocab_size: int | None) -> None:
        self._vocab_size = vocab_size
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
            return request_of(params, session, resolve, self._vocab_size, seed)
        if self._cached is None or self._cached[0] is not session:
            self._cached = (session, request_of(_NOTHING, session, resolve, self._vocab_size, seed))
        request = self._cached[1]
        drawn = seed if session.seed is None else session.seed
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, seed=drawn)
        )


def format_of(params: ResponseParams) -> Grammar | None:
    """What the reply's text must be; None: anything. Raises `GrammarInvalid`."""
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
    """The seed of a response for which nobody named one: as random as its id, and the same when told again."""
    return int.from_bytes(hashlib.blake2b(response_id.encode(), digest_size=8).digest()) >> 1


def _given(value: str | UnsetType | None) -> str | None:
    return value if isinstance(value, str) else None


def logprobs_of(scores: Iterable[TokenScore]) -> list[TokenLogprob]:
    """Tokens' log probabilities as the wire shows them."""
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
    """What a turn's KV cost, and where what it did not compute was found."""
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
