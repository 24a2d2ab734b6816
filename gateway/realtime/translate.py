"""Translates between frames of the Realtime protocol and the types of `sessions`: items, tools, requests,
usage. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.verbs import Grammar, GrammarKind
from ...sdk.errors import FieldInvalid
from ...sdk.frames import formats
from ...sdk.frames import items as frames
from ...sdk.frames.formats import AllowedTools, FunctionTool, NamedFunction, TextConfig
from ...sdk.frames.response import (
    CachedTokensDetails,
    InputTokenDetails,
    OutputTokenDetails,
    ResponseParams,
    TruncatedContext,
    Usage,
)
from ...sdk.frames.sampling import SamplingFields, TokenLogprob, TopLogprob
from ...sdk.frames.session import RetentionRatio, SessionPatch, SessionResource
from ...sessions.conversation.items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool
from ...sessions.errors import GrammarInvalid, SamplingInvalid, ToolInvalid
from ...sessions.tools.grammar import checked_grammar, json_format
from ...sessions.turn.events import LeftOut, TokenScore, TurnUsage
from ...sessions.turn.request import UNBOUNDED, RequestBounds, Truncation, TurnRequest

SAMPLING = SamplingFields.__struct_fields__
"""The names of the sampling fields. A response that does not set one has it from its session;
`TurnRequest.checked` has parameters of these names."""

KEPT = frozenset(SessionPatch.__struct_fields__) & frozenset(SessionResource.__struct_fields__) - {
    "type",
    "model",
    "output_modalities",
}
"""The fields of `session.update` that become part of the configuration."""


def item_of(frame: frames.AnyItem, new_id: Callable[[str], str]) -> Item:
    """The session's item for a frame. ``new_id`` makes the ids that the client left out, from a prefix."""
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
    """The frame that shows an item to the client. ``status``: of an item that is still growing; its message has
    no part before its first text. None: completed or incomplete, as the item says."""
    match item:
        case Message(id=item_id, role=role, text=text, complete=complete):
            part = frames.TextPart(type=frames.PART_OF_ROLE[role], text=text)
            return frames.MessageItem(
                id=item_id,
                object="realtime.item",
                status=status or _status(complete),
                role=role,
                content=[] if status == "in_progress" and not text else [part],
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
    """The frames' function tools as the tools of `sessions`."""
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
    """The instructions and tools of a configuration. They stand before the first item in every prompt."""
    return Preamble(instructions=session.instructions, tools=tools_of(session.tools))


def patched(
    session: SessionResource,
    patch: SessionPatch,
    initial: SessionResource,
    names: frozenset[str] = frozenset(),
) -> SessionResource:
    """The configuration after `session.update`: ``session`` with the fields of ``patch`` that are set. A null
    field goes back to its value in ``initial``.

    ``names``: names of the served model; the session may take any of them. Raises `FieldInvalid` for another
    model.
    """
    changes: dict[str, Any] = {}
    if isinstance(patch.model, str) and patch.model != session.model:
        if patch.model not in names:
            others = ", ".join(map(repr, sorted(names - {session.model})))
            also = f"; this server serves it as {others}, too" if others else ""
            told = f"The session's model is {session.model!r} and cannot be changed{also}"
            raise FieldInvalid(told, "session.model")
        changes["model"] = patch.model
    for name in KEPT:
        value = getattr(patch, name)
        if value is not UNSET:
            changes[name] = getattr(initial, name) if value is None else value
    return msgspec.structs.replace(session, **changes)


@contextmanager
def under(section: str) -> Iterator[None]:
    """In the block, put ``section`` before the field that an error names: ``tools`` becomes
    ``session.tools``."""
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
    more: Sequence[Item] = (),
) -> TurnRequest:
    """The checked request of the turn that a `response.create` asks for with ``params``. A field that it leaves
    out, or sets to null, has the value of ``session``, the configuration.

    ``resolve`` returns the session's item for an input item, which may be a reference. ``bounds``: what the
    model allows. ``seed`` is used if neither sets one. ``more``: items that only this response reads, behind
    the conversation; for one that is out of band. Raises ``SamplingInvalid``, ``ItemInvalid``, ``ToolInvalid``,
    ``GrammarInvalid``, and what `resolve` raises.
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
        tool_choice=choice if isinstance(choice, str) else getattr(choice, "mode", "required"),
        tool=named,
        allowed=choice.names if isinstance(choice, AllowedTools) else (),
        parallel_calls=chosen("parallel_tool_calls") is not False,
        format=format_of(params),
        offered=tools_of(session.tools),
        more=more,
        truncation=truncation_of(session),
    )


def truncation_of(session: SessionResource) -> Truncation | None:
    """What a response of this session does if its prompt does not fit the context: how many of the oldest turns
    are left out. None: nothing is left out, and the response is refused."""
    match session.truncation:
        case "disabled":
            return None
        case RetentionRatio(retention_ratio=ratio, token_limits=limits):
            return Truncation(ratio, limits.post_instructions if limits else None)
    return Truncation()


class RequestCache:
    """Makes the turn requests of one session. Most `response.create` events set the same fields as the one
    before, often none; their request is checked once for each configuration, and then used again."""

    def __init__(self, bounds: RequestBounds) -> None:
        self._bounds = bounds
        self._cached: tuple[SessionResource, ResponseParams, TurnRequest] | None = None

    def of(
        self,
        params: ResponseParams,
        session: SessionResource,
        resolve: Callable[[frames.InputItem], Item],
        seed: int,
        more: Sequence[Item] = (),
    ) -> TurnRequest:
        """The checked request of the turn that a `response.create` asks for with ``params``. ``session``: the
        configuration. ``resolve`` returns the session's item for an input item. ``seed`` is used if neither
        ``params`` nor ``session`` sets one. ``more``: items that only this response reads. Raises what
        `request_of` does."""
        if more or isinstance(params.input, list):
            return request_of(params, session, resolve, self._bounds, seed, more)
        own = msgspec.structs.replace(params, metadata=UNSET, events=UNSET)
        known = self._cached
        if known is None or known[0] is not session or known[1] != own:
            known = self._cached = (session, own, request_of(own, session, resolve, self._bounds, seed))
        request = known[2]
        if isinstance(own.seed, int) or session.seed is not None:
            return request
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


def format_of(params: ResponseParams) -> Grammar | None:
    """The grammar that the reply's text must follow, from `text.format`, `response_format` or `grammar`; None:
    any text. Raises `GrammarInvalid` if it is not valid, or if more than one is set."""
    text = params.text.format if isinstance(params.text, TextConfig) else None
    asked = {"text.format": text, "response_format": params.response_format, "grammar": params.grammar}
    given = {name: wish for name, wish in asked.items() if wish is not None and wish is not UNSET}
    if len(given) > 1:
        raise GrammarInvalid(f"Only one of {' and '.join(given)} can be set", param=list(given)[-1])
    return next((_grammar_of(wish, name) for name, wish in given.items()), None)


def _grammar_of(wish: Any, name: str) -> Grammar | None:
    match wish:
        case formats.JsonObject():
            return json_format({"type": "object"}, strict=True, param=name)
        case formats.JsonSchema(schema=schema, strict=strict):
            return json_format(schema, strict=bool(strict), param=f"{name}.schema")
        case formats.ChatJsonSchema(json_schema=named):
            param = f"{name}.json_schema.schema"
            return json_format(named.schema, strict=bool(named.strict), param=param)
        case formats.RegexGrammar(pattern=pattern):
            return checked_grammar(Grammar(GrammarKind.REGEX, pattern), f"{name}.pattern")
        case formats.ChoiceGrammar(choices=choices):
            listed = msgspec.json.encode(choices).decode()
            return checked_grammar(Grammar(GrammarKind.CHOICE, listed), f"{name}.choices")
        case formats.LarkGrammar(definition=definition):
            return checked_grammar(Grammar(GrammarKind.LARK, definition), f"{name}.definition")
    return None


def seed_of(response_id: str) -> int:
    """The sampling seed of a response for which none was set: 63 bits of a hash of its id. The same response
    always has the same seed."""
    return int.from_bytes(hashlib.blake2b(response_id.encode(), digest_size=8).digest()) >> 1


def _given(value: str | UnsetType | None) -> str | None:
    return value if isinstance(value, str) else None


def logprobs_of(scores: Iterable[TokenScore]) -> list[TokenLogprob]:
    """The log probabilities of a reply's tokens, in the form of the standard's events."""
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
    """A turn's token counts, in the form of the standard's `response.done`."""
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


def truncated_of(left_out: LeftOut) -> TruncatedContext:
    """What a response left out because the context was full, in the form of our field in `response.done`."""
    return TruncatedContext(items=list(left_out.items), tokens=left_out.tokens)
