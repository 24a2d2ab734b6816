"""Our frames against the `openai` package's types: it parses all we send, and we know all it may send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given

from holdfast.gateway.realtime.conversation import Conversation
from holdfast.sdk.errors import FieldUnsupported
from holdfast.sdk.frames import client, codec, items, response, server, unserved
from holdfast.sdk.frames.formats import FunctionTool
from holdfast.sdk.frames.server import ItemTruncated
from holdfast.sdk.frames.session import SessionPatch, SessionResource
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, Message
from holdfast.sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)
from holdfast.tests.gateway.realtime.realtime_grammar import served
from holdfast.tests.gateway.responses.test_every_end import Told, replies

TEXT = Message(id="a", role="assistant", text="Hi")
CALL = FunctionCall(id="f", call_id="c", name="add", arguments="{}")
SPOKEN: list[ReplyEvent] = [
    ReplyStarted(3),
    ReplyTextDelta("a", "Hi"),
    ReplyCallStarted("f", "c", "add"),
    ReplyArgumentsDelta("f", "c", "{}"),
    ReplyCallDone("f", "c", "add", "{}"),
]


NOT_OF_TEXT = (
    "conversation.item.input_audio_transcription.",
    "input_audio_buffer.",
    "mcp_list_tools.",
    "output_audio_buffer.",
    "response.mcp_call",
    "response.output_audio",
    "conversation.item.created",  # the beta's word for `conversation.item.added`
)
"""Events of sound, and of tools that a server calls."""

OF_RESPONSES = {"session.tool_choice.tools[].type", "response.tool_choice.tools[].type"}
"""Fields of Realtime that are ours, as Responses has them (`allowed_tools`)."""

OURS = (
    "input_text_buffer.",
    "session.resume",
    "session.rewind",
    "session.fork",
    "session.tree",
    "session.name",
    "session.prune",
    "session.attach",
    "session.detach",
    "session.lease",
    "session.stage",
    "session.settle",
    "session.blocks",
    "response.steer",
)


def every_event() -> list[server.ServerEvent]:
    """A connection on which everything we ever send is sent."""
    session = SessionResource(id="sess", model="m", tools=[FunctionTool(name="add")], max_output_tokens=9)
    conversation = Conversation(session, History())
    told: list[server.ServerEvent] = list(conversation.greet())

    def receive(event: client.ClientEvent) -> None:
        told.extend(one for one in served(conversation, event) if isinstance(one, server.ServerEvent))

    receive(client.SessionUpdate(session=SessionPatch(audio={"input": {}}, max_output_tokens="inf")))
    for item in (
        items.MessageItem.of("user", "Hi"),
        items.MessageItem.of("system", "Hi"),
        items.MessageItem.of("assistant", "Hi"),
        items.FunctionCallItem(name="add", arguments="{}", call_id="c"),
        items.FunctionCallOutputItem(call_id="c", output="3"),
    ):
        receive(client.ItemCreate(item=item, event_id="e"))
    receive(client.ItemCreate(item=items.MessageItem(id="i", role="user", content=[])))
    receive(client.ItemRetrieve(item_id="i"))
    told.append(ItemTruncated(event_id="e", item_id="i", text_end=3))
    receive(client.ItemDelete(item_id="i"))
    receive(client.ItemDelete(item_id="i", event_id="e"))
    receive(client.ResponseCancel())
    for status, reason in (
        (ReplyStatus.COMPLETED, EndReason.STOP),
        (ReplyStatus.CANCELLED, EndReason.CLIENT_CANCELLED),
        (ReplyStatus.INCOMPLETE, EndReason.MAX_OUTPUT_TOKENS),
        (ReplyStatus.INCOMPLETE, EndReason.SERVER_LEAVING),
        (ReplyStatus.FAILED, EndReason.ERROR),
    ):
        params = response.ResponseParams(metadata={"k": "v"})
        receive(client.ResponseCreate(response=params))
        (response_id,) = conversation.running
        for spoken in (*SPOKEN, ReplyDone(status, reason, (TEXT, CALL), TurnUsage(input_tokens=3))):
            told.extend(conversation.reply(response_id, spoken))
    receive(client.ResponseCreate(response=response.ResponseParams(conversation="none")))
    told.extend(conversation.reply(next(iter(conversation.running)), ReplyStarted(3)))
    told.extend(conversation.failed(next(iter(conversation.running)), RuntimeError("broke")))
    left = server.RateLimit(name="requests", limit=60, remaining=59, reset_seconds=1.0)
    told.append(server.RateLimitsUpdated(event_id="e", rate_limits=[left]))
    return told


def test_openai_parses_every_event_we_send(client_script: Callable[..., Any]) -> None:
    events = every_event()
    standard = {kind for kind in get_args(server.ServerEvent) if not issubclass(kind, server.OwnFrame)}
    assert {type(event) for event in events} == standard
    frames = "\n".join(codec.encode(event).decode() for event in events)
    assert len(client_script("openai_types.py", "parse", given=frames)) == len(events)


def test_openai_parses_every_response_we_send(client_script: Callable[..., Any]) -> None:
    """Whatever a reply says, wherever it is cut, and however it ends."""
    lines: list[str] = []

    @given(replies())
    def tell(one: Told) -> None:
        lines.extend(msgspec.json.encode(event).decode() for event in one.events)

    tell()
    assert len(client_script("openai_types.py", "responses", given="\n".join(lines))) == len(lines) > 200


def standard_fields(fields: dict[str, list[str]]) -> dict[str, list[str]]:
    """The fields of a text session; those of `type: transcription` sessions are refused with the type."""
    hidden = ("session.audio.", "response.audio.", "session.tracing.", "session.prompt.", "response.prompt.")
    folded = {path.replace("response.input[]", "item", 1): values for path, values in fields.items()}
    return {path: values for path, values in folded.items() if not path.startswith(hidden)}


def test_every_field_of_the_standard_is_served_or_named(client_script: Callable[..., Any]) -> None:
    """A field is ours, or it is listed as echoed or refused: none is refused as unknown."""
    known = client_script("openai_types.py", "fields")
    ours = {
        "session": set(SessionPatch.__struct_fields__),
        "response": set(response.ResponseParams.__struct_fields__),
        "item": {"type", *(name for kind in get_args(items.AnyItem) for name in kind.__struct_fields__)},
        "item.content[]": set(items.TextPart.__struct_fields__),
        "session.tools[]": {"type", *FunctionTool.__struct_fields__},
        "response.tools[]": {"type", *FunctionTool.__struct_fields__},
    }
    unknown = []
    for path in standard_fields(known["fields"]):
        parent, _, name = path.removesuffix("[]").rpartition(".")
        if parent in ours and name not in ours[parent] and path not in unserved.REFUSED_FIELDS:
            unknown.append(path)
    assert unknown == []


def test_every_client_event_of_the_standard_is_served_or_named(client_script: Callable[..., Any]) -> None:
    events = set(client_script("openai_types.py", "fields")["events"])
    served = {kind.__struct_config__.tag for kind in get_args(client.ClientEvent)}
    ours = {tag for tag in served if str(tag).startswith(OURS)}
    assert events == (served - ours) | unserved.REFUSED_EVENTS


def test_every_server_event_of_the_standard_is_sent_or_is_not_of_text(
    client_script: Callable[..., Any],
) -> None:
    told = client_script("openai_types.py", "fields")["told"]
    sent = {kind.__struct_config__.tag for kind in get_args(server.ServerEvent)}
    unsent = {kind for kind in told if kind not in sent}
    assert {kind for kind in unsent if not kind.startswith(NOT_OF_TEXT)} == set()


def test_every_value_of_the_standard_is_served_or_named(client_script: Callable[..., Any]) -> None:
    """Each literal the standard allows at a field we serve decodes, or is refused as unsupported."""
    fields = standard_fields(client_script("openai_types.py", "fields")["fields"])
    checked = 0
    assert unserved.REFUSED_VALUES.keys() - fields.keys() == OF_RESPONSES
    for path in unserved.REFUSED_VALUES.keys() & fields.keys():
        for value in fields[path]:
            checked += 1
            if unserved.is_unserved(path, value):
                continue
            try:
                codec.decode_client(msgspec.json.encode(holding(path, value)))
            except FieldUnsupported:
                pytest.fail(f"{path} {value!r} is refused, but not listed")
    assert checked > 20


def holding(path: str, value: str) -> dict[str, Any]:
    """A client event with this value at this path, and all that is required around it."""
    if path == "item.type":
        bodies = {
            "message": {"role": "user", "content": []},
            "function_call": {"name": "f", "arguments": ""},
            "function_call_output": {"call_id": "c", "output": ""},
        }
        return {"type": "conversation.item.create", "item": {"type": value, **bodies[value]}}
    if path == "item.content[].type":
        role = "assistant" if value == "output_text" else "user"
        content = [{"type": value, "text": ""}]
        return {
            "type": "conversation.item.create",
            "item": {"type": "message", "role": role, "content": content},
        }
    section, _, name = path.partition(".")
    given: Any = value
    if name.endswith("[].type"):
        name, given = name.removesuffix("[].type"), [{"type": value, "name": "f"}]
    elif name.endswith("[]"):
        name, given = name.removesuffix("[]"), [value]
    elif name.endswith(".type"):
        name, given = name.removesuffix(".type"), {"type": value, "name": "f"}
    kind = "session.update" if section == "session" else "response.create"
    return {"type": kind, section: {name: given}}
