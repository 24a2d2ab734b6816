"""Translates bodies and items of Responses into transcripts and requests, and back. Pure functions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from ...sdk.errors import FieldInvalid, FieldMissing
from ...sdk.frames.formats import AnyText
from ...sessions.conversation.items import (
    Message,
    Preamble,
    Tool,
    new_id,
)
from ...sessions.turn.request import RequestBounds, Truncation, TurnRequest
from ..clients import Asked
from ..live.requests import CallChoice, SentConversation, grammar_of, sampling_of
from ..live.sessions import Transcript, cache_key
from ..live.transcripts import Ask
from . import frames
from .events import ConversationRef, ReplyTextSettings, ResponseObject
from .items import (
    GivenCall,
    GivenCompaction,
    GivenItem,
    GivenMessage,
    GivenOutput,
    GivenParts,
    GivenReasoning,
    GivenReference,
    GivenRefusal,
    KeptCall,
    KeptCompaction,
    KeptInputText,
    KeptItem,
    KeptMessage,
    KeptOutput,
    KeptOutputText,
    KeptReasoning,
    whole_name,
)

SUMMARY_HEADING = "Summary of the conversation so far:\n"
"""The text before a summary, in the user's message that stands for a shortened conversation."""
SUMMARY_REQUEST = (
    "Summarise this conversation so far, for yourself: you will go on from your summary. "
    "Keep names, numbers, decisions, open questions and results of tools. Write only the summary."
)
SUMMARY_TOKENS = 512
_COMPACTION = "holdfast-summary-1:"


# --- items --------------------------------------------------------------------------------------------------


def kept_items(
    given: str | Sequence[GivenItem] | None,
    name: Callable[[str], str],
    referred: Mapping[str, KeptItem],
    param: str = "input",
) -> list[KeptItem]:
    """The items that a client gives, one for each, in the form in which they are stored. ``name``: makes an id
    with the given prefix, for an item that has none. ``referred``: by id, the stored items that references may
    name. ``param``: the field that has them, for errors. Raises ``FieldInvalid`` for a reference to another
    item, or a compaction that this server did not make."""
    if given is None:
        return []
    if isinstance(given, str):
        return [KeptMessage(id=name("msg"), role="user", content=[KeptInputText(text=given)])]
    return [_kept(item, name, referred, f"{param}[{at}]") for at, item in enumerate(given)]


def _kept(
    item: GivenItem, name: Callable[[str], str], referred: Mapping[str, KeptItem], param: str
) -> KeptItem:
    match item:
        case GivenMessage(role="assistant", content=content):
            said = KeptOutputText(text=text_of(content))
            phase = item.phase or UNSET
            status = item.status or "completed"
            return KeptMessage(
                id=item.id or name("msg"), role="assistant", content=[said], status=status, phase=phase
            )
        case GivenMessage(role=role, content=content):
            text = KeptInputText(text=text_of(content))
            return KeptMessage(id=item.id or name("msg"), role=role, content=[text])
        case GivenCall(call_id=call_id, name=called, arguments=arguments):
            return KeptCall(
                id=item.id or name("fc"),
                call_id=call_id,
                name=called,
                arguments=arguments,
                namespace=item.namespace or UNSET,
            )
        case GivenOutput(call_id=call_id, output=output):
            return KeptOutput(id=item.id or name("fco"), call_id=call_id, output=text_of(output))
        case GivenReasoning():
            return KeptReasoning(id=item.id or name("rs"))
        case GivenCompaction(encrypted_content=content):
            if summary_of(content) is None:
                raise FieldInvalid(
                    "This compaction was not made by this server", f"{param}.encrypted_content"
                )
            return KeptCompaction(id=item.id or name("cmp"), encrypted_content=content)
        case GivenReference(id=item_id):
            if item_id not in referred:
                raise FieldInvalid(f"Item with id {item_id!r} not found", f"{param}.id")
            return referred[item_id]


def without_echoes(
    given: Sequence[KeptItem], known: Iterable[KeptItem], param: str = "input"
) -> list[KeptItem]:
    """The items that are new: one of ``known``, the items so far, that a client sends or names once more is
    that item. Raises ``FieldInvalid`` for two items with one id, unless it is such an echo."""
    before, found = {item.id: item for item in known}, dict[str, KeptItem]()
    for at, item in enumerate(given):
        if item.id in found or (item.id in before and _said(item) != _said(before[item.id])):
            raise FieldInvalid(f"Duplicate item found with id {item.id!r}", f"{param}[{at}].id")
        if item.id not in before:
            found[item.id] = item
    return list(found.values())


def _said(item: KeptItem) -> tuple[str, ...]:
    """What an item says, without what clients leave out when they send it back."""
    match item:
        case KeptMessage(role=role):
            return role, item.text
        case KeptCall(call_id=call_id, name=name, arguments=arguments):
            return call_id, name, arguments
        case KeptOutput(call_id=call_id, output=output):
            return call_id, output
        case KeptCompaction(encrypted_content=content):
            return (content,)
        case KeptReasoning():
            return ()


def text_of(content: GivenParts) -> str:
    """The text of a message's content or of a tool's output. Its parts are joined without a separator."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, GivenRefusal) else part.text for part in content)


def compaction_of(summary: str) -> str:
    """Encode a summary as the content of a compaction item, which is opaque to clients. `summary_of` decodes
    it."""
    return base64.b64encode((_COMPACTION + summary).encode()).decode()


def summary_of(content: str) -> str | None:
    """The summary in a compaction item's content; None if this server did not write it."""
    try:
        text = base64.b64decode(content, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_COMPACTION) if text.startswith(_COMPACTION) else None


def transcript_of(
    instructions: str | None, tools: tuple[Tool, ...], items: Sequence[KeptItem], given: int | None = None
) -> Transcript:
    """The conversation that consists of these items. ``instructions``: if it is None or empty, a first message
    of the system or the developer gives them. ``given``: the index in ``items`` of the first item that the
    request itself has, so that an error names its index in the request; None: 0.

    Raises ``FieldInvalid`` for a tool's output without a call before it.
    """
    first, begin = items[0] if items else None, 0
    if not instructions and isinstance(first, KeptMessage) and first.role in ("system", "developer"):
        instructions, begin = first.text, 1
    made = SentConversation()
    for at, item in enumerate(items[begin:], begin - (given or 0)):
        match item:
            case KeptMessage(role=role):
                made.message("system" if role == "developer" else role, item.text)
            case KeptCall():
                made.call(item.call_id, item.called, item.arguments)
            case KeptOutput(call_id=call_id, output=output):
                made.output(call_id, output, f"input[{at}].call_id")
            case KeptCompaction(encrypted_content=content):
                made.message("user", SUMMARY_HEADING + (summary_of(content) or ""))
            case KeptReasoning():
                continue
    return Transcript(Preamble(instructions=instructions or "", tools=tools), tuple(made.items))


def named_by(body: frames.CreateBody, transcript: Transcript, response_id: str) -> Transcript:
    """The transcript of a body with the names that lead to its session. ``response_id``: of its response."""
    key, conversation = body.prompt_cache_key, body.conversation_id
    keys = () if conversation is None else (f"conversation {conversation}",)
    after = "" if body.previous_response_id is None else f"response {body.previous_response_id}"
    return replace(transcript, after=after, name=f"response {response_id}", keys=(*keys, *cache_key(key)))


def functions_in(
    tools: Sequence[frames.OfferedFunction | frames.OfferedNamespace] | None,
) -> Iterator[frames.OfferedFunction]:
    """The functions among the tools of a body: those of a namespace by their whole names, the first of them
    with the description of the namespace before its own."""
    for offered in tools or ():
        if isinstance(offered, frames.OfferedFunction):
            yield offered
            continue
        heading = offered.description
        for inner in offered.tools:
            text = "\n\n".join(filter(None, (heading, inner.description)))
            yield msgspec.structs.replace(inner, name=whole_name(offered.name, inner.name), description=text)
            heading = None


# --- requests -----------------------------------------------------------------------------------------------


def check_create(body: frames.CreateBody) -> None:
    """Check the fields of a body against each other. Raises ``FieldInvalid``, ``FieldMissing``."""
    if body.previous_response_id is not None and body.conversation is not None:
        told = "Mutually exclusive parameters: 'previous_response_id' and 'conversation'"
        raise FieldInvalid(told, "previous_response_id")
    if body.background and not body.stored:
        raise FieldInvalid("`background` needs `store`", "background")
    if not body.input and body.previous_response_id is None and body.conversation is None:
        raise FieldMissing("Missing required parameter: 'input'", "input")
    if body.conversation_id == "":
        raise FieldInvalid("An empty conversation id", "conversation")


def ask_of(
    body: frames.CreateBody,
    transcript: Transcript,
    bounds: RequestBounds,
    defaults: Mapping[str, Any],
    default_tokens: int | None,
    *,
    streamed: bool,
) -> Ask:
    """The turn that a body asks for, in the conversation ``transcript``. ``bounds``: what the model allows.
    ``defaults``: the model's sampling parameters, for fields that the body leaves out; ``default_tokens``: the
    most tokens of a reply if its request sets no limit; None: as many as the context holds. ``streamed``:
    deliver a tool call's arguments while they come.

    Raises ``FieldInvalid``, and what `TurnRequest.checked` raises.
    """
    choice = CallChoice.of(body.tool_choice)
    tools = transcript.preamble.tools
    if choice.tool is not None and all(tool.name != choice.tool for tool in tools):
        raise FieldInvalid(f"Tool choice {choice.tool!r} not found in 'tools'", "tool_choice")
    sampling = {"max_output_tokens": default_tokens, **sampling_of(body)}
    if frames.LOGPROBS in (body.include or ()):
        sampling.setdefault("top_logprobs", 0)
    else:
        sampling.pop("top_logprobs", None)
    request = TurnRequest.checked(
        **{**defaults, **sampling},
        **choice.fields(),
        bounds=bounds,
        offered=tools,
        format=grammar_of({"text.format": None if body.text is None else body.text.format}),
        truncation=Truncation() if body.truncation == "auto" else None,
        ignore_eos=bool(body.ignore_eos),
        parallel_calls=body.parallel_tool_calls is not False,
    )
    return Ask(transcript, request, whole_calls=not streamed, kept=body.stored)


def summary_ask(transcript: Transcript, bounds: RequestBounds, defaults: Mapping[str, Any]) -> Ask:
    """The turn that summarises a conversation. It does not join the conversation, and the journal keeps nothing
    of it: no client could delete that. ``bounds``: what the model allows; ``defaults``: the model's sampling
    parameters. Raises what `TurnRequest.checked` raises."""
    wish = Message(id=new_id("item"), role="user", text=SUMMARY_REQUEST)
    request = TurnRequest.checked(
        **defaults,
        bounds=bounds,
        offered=transcript.preamble.tools,
        tool_choice="none",
        max_output_tokens=SUMMARY_TOKENS,
        out_of_band=True,
        more=[wish],
    )
    return Ask(transcript, request, whole_calls=True, kept=False)


def response_of(
    asked: Asked[frames.CreateBody], response_id: str, model: str, created_at: int, request: TurnRequest
) -> ResponseObject:
    """The response object to a body, as it is when the response begins. ``request``: its turn, which has the
    sampling values in force."""
    body = asked.body
    conversation = body.conversation_id
    top = body.top_logprobs
    drawn = request.sampling
    form = body.text.format if body.text is not None else None
    limit = body.max_output_tokens
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        model=model,
        background=bool(body.background),
        conversation=None if conversation is None else ConversationRef(id=conversation),
        frequency_penalty=drawn.frequency_penalty,
        instructions=body.instructions,
        max_output_tokens=limit if isinstance(limit, int) else None,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=drawn.presence_penalty,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        store=body.stored,
        temperature=drawn.temperature,
        text=ReplyTextSettings(format=form or AnyText()),
        tool_choice=body.tool_choice or "auto",
        tools=list(body.tools or ()),
        top_logprobs=top if isinstance(top, int) else 0,
        top_p=drawn.top_p,
        truncation=body.truncation or "disabled",
        unserved=asked.unserved or UNSET,
        user=body.user,
    )
