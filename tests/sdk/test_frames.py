"""Frames: what is accepted, what is refused and how, and that each survives the wire both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sdk import errors
from holdfast.sdk.frames import client, codec, items, packed, server, unserved
from holdfast.sdk.frames.formats import FunctionTool
from holdfast.sdk.frames.response import KVReceipt, Response, ResponseParams
from holdfast.sdk.frames.sampling import TokenLogprob, TopLogprob
from holdfast.sdk.frames.session import SessionPatch, SessionResource

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
SHOWN = items.MessageItem(id="i", object="realtime.item", status="completed", role="user", content=[])
RESPONSE = Response(id="r", status="in_progress", conversation_id=None, max_output_tokens="inf")
OUTPUT = {"event_id": "e", "response_id": "r", "output_index": 0}
PART = {**OUTPUT, "item_id": "i", "content_index": 0}
CALL = {**OUTPUT, "item_id": "i", "call_id": "c"}

LOGPROB = TokenLogprob(
    token="Hi", id=7, logprob=-0.5, top_logprobs=[TopLogprob(token="Yo", id=8, logprob=-0.25)]
)

CLIENT_EVENTS: list[client.ClientEvent] = [
    client.SessionUpdate(session=SessionPatch(instructions="", tools=[], temperature=None)),
    client.ItemCreate(item=items.MessageItem.of("assistant", "Hello"), previous_item_id="root", event_id="e"),
    client.ItemCreate(item=items.FunctionCallItem(name="add", arguments="{}", call_id="c")),
    client.ItemCreate(item=items.FunctionCallOutputItem(call_id="c", output="3", id="o")),
    client.ItemRetrieve(item_id="i"),
    client.ItemDelete(item_id="i"),
    client.ResponseCreate(),
    client.ResponseCreate(
        response=ResponseParams(
            conversation="none", input=[items.ItemReference(id="i")], metadata={"a": "b"}, max_output_tokens=5
        )
    ),
    client.ResponseCancel(response_id="r"),
    client.TextAppend(text="Hello", role="system"),
    client.TextAppend(text="", call_id="call_1"),
    client.TextReplace(start=3, text="p"),
    client.TextClear(),
    client.TextCommit(event_id="e"),
    client.TextCommit(call_id="call_1"),
    client.SessionResume(handle="h", last_event="e"),
    client.SessionLease(priority=2, ttl=60.0, returns_in=1.5),
    client.SessionStage(),
    client.SessionSettle(tier="host"),
    client.SessionBlocks(session_id="s"),
    client.ItemTruncate(item_id="i", text_end=3),
    client.ItemTruncate(item_id="i", audio_end_ms=3, timing=[client.Heard(ms=2, text_end=1)]),
    client.SessionRewind(to="i"),
    client.SessionRewind(to=7),
    client.SessionFork(at="i", children=3, session_id="s"),
    client.SessionTree(),
    client.SessionName(name="left"),
    client.SessionPrune(session="s", session_id="t"),
    client.SessionAttach(session="h", last_event="e"),
    client.SessionDetach(session_id="s"),
    client.ResponseSteer(input=[items.MessageItem.of("user", "No")], response=ResponseParams()),
]
SERVER_EVENTS: list[server.ServerEvent] = [
    server.ReasoningDelta(event_id="e", response_id="r", delta="Hm."),
    server.SessionCreated(event_id="e", session=SessionResource(id="s", model="m", unserved=["audio"])),
    server.SessionCreated(event_id="e", session=SessionResource(id="s", model="m"), handle="h"),
    server.SessionResumed(
        event_id="e", session=SessionResource(id="s", model="m"), handle="h", last_client_event="c"
    ),
    server.SessionUpdated(
        event_id="e", session=SessionResource(id="s", model="m", tools=[FunctionTool(name="f")])
    ),
    server.ConversationCreated(event_id="e", conversation=server.ConversationResource(id="c")),
    server.ItemAdded(event_id="e", item=SHOWN, previous_item_id=None),
    server.ItemDone(event_id="e", item=SHOWN, previous_item_id="p"),
    server.ItemRetrieved(event_id="e", item=SHOWN),
    server.ItemDeleted(event_id="e", item_id="i"),
    server.TextCommitted(event_id="e", item_id="i", prefilled_tokens=3, left_tokens=4),
    server.TextCommitted(event_id="e", item_id="i", prefilled_tokens=3, left_tokens=4, call_id="c"),
    server.TextCleared(event_id="e"),
    server.SessionLeased(
        event_id="e", status="clipped", priority=0, ttl=3.0, returns_in=0.0, tokens=32, host_tokens=40
    ),
    server.SessionStaged(event_id="e", source="disk", tokens=40, ms=0.25),
    server.SessionSettled(event_id="e", tier="host", tokens=40, ms=3.0),
    server.SessionBlocksListed(
        event_id="e",
        blocks=server.BlockCounts(device=0, host=3, disk=0, shared=3, none=1, total=4),
        runs=[
            server.BlockRun(tier="host", shared=True, count=3),
            server.BlockRun(tier="none", shared=False, count=1),
        ],
        tokens=49,
        block_tokens=16,
    ),
    server.ResponseCreated(event_id="e", response=RESPONSE),
    server.ResponseDone(
        event_id="e",
        response=msgspec.structs.replace(
            RESPONSE,
            kv=KVReceipt(new=1, prefilled=1, resident=2, recomputed=0, host=0, disk=0, restore_ms=0.0),
        ),
    ),
    server.OutputItemAdded(**OUTPUT, item=SHOWN),
    server.OutputItemDone(**OUTPUT, item=SHOWN),
    server.ContentPartAdded(**PART, part=server.ContentPart(text="")),
    server.ContentPartDone(**PART, part=server.ContentPart(text="Hi")),
    server.TextDelta(**PART, delta="H"),
    server.TextDone(**PART, text="Hi", logprobs=[LOGPROB]),
    server.ArgumentsDelta(**CALL, delta="{"),
    server.ArgumentsDone(**CALL, name="add", arguments="{}"),
    server.ErrorEvent(event_id="e", error=server.ErrorDetails(type="server_error", code=None, message="No")),
    server.SessionRecovered(event_id="e", lost_ms=812.5),
    server.RateLimitsUpdated(
        event_id="e",
        rate_limits=[server.RateLimit(name="requests", limit=9, remaining=1, reset_seconds=2.5)],
    ),
    server.ServerGoingAway(event_id="e", seconds=10.0, handle="h"),
    server.ItemTruncated(event_id="e", item_id="i", text_end=3),
    server.SessionRewound(event_id="e", item_id=None, tokens=7),
    server.SessionForked(event_id="e", sessions=[server.Fork(id="s", handle="h")]),
    server.SessionTreeListed(
        event_id="e",
        sessions=[
            server.Relative(id="s", parent=None, open=True, items=2, tokens=9),
            server.Relative(id="t", parent="s", name="left"),
        ],
    ),
    server.SessionNamed(event_id="e", name=""),
    server.SessionPruned(event_id="e", session="s"),
    server.SteerAccepted(event_id="e", response_id="r", session_id="s"),
    server.SessionDetached(event_id="e", session_id="s"),
]


@pytest.mark.parametrize("event", CLIENT_EVENTS, ids=lambda event: event.type)
def test_client_events_survive_the_wire(event: client.ClientEvent) -> None:
    frame = codec.encode(event)
    assert codec.decode_client(frame) == event
    assert codec.decode_client(frame.decode()) == event


@pytest.mark.parametrize("event", SERVER_EVENTS, ids=lambda event: event.type)
def test_server_events_survive_the_wire(event: server.ServerEvent) -> None:
    assert codec.decode_server(codec.encode(event)) == event


def test_every_event_is_tried_above() -> None:
    assert {type(event) for event in CLIENT_EVENTS} == set(get_args(client.ClientEvent))
    assert {type(event) for event in SERVER_EVENTS} == set(get_args(server.ServerEvent))


def refused(event: Any) -> errors.FrameError:
    frame = event if isinstance(event, bytes | str) else msgspec.json.encode(event)
    with pytest.raises(errors.FrameError) as caught:
        codec.decode_client(frame)
    return caught.value


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "event_id": "e1", "session": session}


def create(**item: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "event_id": "e1", "item": item}


def respond(**response: Any) -> dict[str, Any]:
    return {"type": "response.create", "event_id": "e1", "response": response}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


UNKNOWN, UNSUPPORTED = errors.FieldUnknown, errors.FieldUnsupported
MISSING, MISTYPED, INVALID = errors.FieldMissing, errors.FieldMistyped, errors.FieldInvalid


@pytest.mark.parametrize(
    ("event", "kind", "param"),
    [
        # the traps of other servers
        ({**update(), "model": "m"}, UNKNOWN, "model"),
        (update(modalities=["text"]), UNKNOWN, "session.modalities"),
        (update(voice="alloy"), UNKNOWN, "session.voice"),
        ({**respond(), "stream_id": "s"}, UNKNOWN, "stream_id"),
        (create(**USER, color="red"), UNKNOWN, "item.color"),
        ({"type": "response.text.delta"}, INVALID, "type"),
        ({**respond(), "": 1}, UNKNOWN, ""),
        # of the standard, not served
        (update(type="transcription"), UNSUPPORTED, "session.type"),
        (update(output_modalities=["pictures"]), INVALID, "session.output_modalities[0]"),
        (update(tool_choice={"type": "mcp", "server_label": "x"}), UNSUPPORTED, "session.tool_choice.type"),
        (respond(tool_choice={"type": "custom", "name": "f"}), UNSUPPORTED, "response.tool_choice.type"),
        (respond(text={"verbosity": "low"}), UNSUPPORTED, "response.text.verbosity"),
        (update(tools=[TOOL, {"type": "mcp", "server_label": "x"}]), UNSUPPORTED, "session.tools[1].type"),
        (update(truncation="oldest"), INVALID, "session.truncation"),
        (
            update(truncation={"type": "retention_ratio", "retention_ratio": 1.5}),
            INVALID,
            "session.truncation.retention_ratio",
        ),
        (
            update(truncation={"type": "retention_ratio", "retention_ratio": 1, "token_limits": {"all": 5}}),
            UNKNOWN,
            "session.truncation.token_limits.all",
        ),
        (update(prompt={"id": "p"}), UNSUPPORTED, "session.prompt"),
        (respond(prompt={"id": "p"}), UNSUPPORTED, "response.prompt"),
        (
            create(type="message", role="user", content=[{"type": "input_audio", "audio": ""}]),
            UNSUPPORTED,
            "item.content[0].type",
        ),
        (respond(input=[{"type": "mcp_call"}]), UNSUPPORTED, "response.input[0].type"),
        ({"type": "input_audio_buffer.append", "audio": ""}, UNSUPPORTED, "type"),
        ({"type": "output_audio_buffer.clear"}, UNSUPPORTED, "type"),
        # shape
        ({}, MISSING, "type"),
        ({"type": "session.update"}, MISSING, "session"),
        (create(type="message", role="user"), MISSING, "item.content"),
        (create(role="user", content=[]), MISSING, "item.type"),
        ([], MISTYPED, None),
        ({"type": 1}, MISTYPED, "type"),
        (update(instructions=1), MISTYPED, "session.instructions"),
        (respond(metadata={"a": 1}), MISTYPED, "response.metadata[...]"),
        (create(type="message", role="robot", content=[]), INVALID, "item.role"),
        (create(**{**USER, "role": "assistant"}), INVALID, "item"),
        (create(**USER, id=""), INVALID, "item.id"),
        (create(**USER, id="x" * 65), INVALID, "item.id"),
        ({"type": "response.create", "event_id": "e" * 513}, INVALID, "event_id"),
        (update(tools=[{**TOOL, "name": "a b"}]), INVALID, "session.tools[0].name"),
        (update(tools=[{**TOOL, "name": "a\n"}]), INVALID, "session.tools[0].name"),
        (update(tools=[{**TOOL, "name": str(at)} for at in range(129)]), INVALID, "session.tools"),
        (update(tools=[{**TOOL, "parameters": nested(65)}]), INVALID, "session.tools[0]"),
        (update(audio=nested(65)), INVALID, "session"),
        (update(tools=[{**TOOL, "parameters": {"default": 2**64}}]), INVALID, "session.tools[0]"),
        (update(tools=[{**TOOL, "parameters": {"enum": [-(2**63) - 1]}}]), INVALID, "session.tools[0]"),
        (respond(tools=[{**TOOL, "parameters": {"default": 2**64}}]), INVALID, "response.tools[0]"),
        (update(tracing={"group": [2**64]}), INVALID, "session"),
        (update(tool_choice="any"), INVALID, "session.tool_choice"),
        (update(tool_choice={"type": "function"}), MISSING, "session.tool_choice.name"),
        (respond(response_format={"type": "json_schema"}), MISSING, "response.response_format.json_schema"),
        (
            respond(text={"format": {"type": "json_schema", "name": "x", "schema": nested(65)}}),
            INVALID,
            "response.text.format",
        ),
        (
            respond(text={"format": {"type": "json_schema", "schema": {}}}),
            MISSING,
            "response.text.format.name",
        ),
        (respond(grammar={"type": "gbnf", "definition": "x"}), INVALID, "response.grammar.type"),
        (respond(grammar={"type": "regex", "pattern": ""}), INVALID, "response.grammar.pattern"),
        (respond(grammar={"type": "choice", "choices": []}), INVALID, "response.grammar.choices"),
        (respond(grammar={"type": "lark", "syntax": "x"}), UNKNOWN, "response.grammar.syntax"),
        (respond(metadata={str(at): "" for at in range(17)}), INVALID, "response.metadata"),
        (respond(conversation="conv_1"), INVALID, "response.conversation"),
    ],
)
def test_each_refused_frame_has_its_error_code(
    event: Any, kind: type[errors.FrameError], param: str | None
) -> None:
    error = refused(event)
    assert type(error) is kind
    assert error.param == param
    given = event.get("event_id") if isinstance(event, dict) else None
    assert error.event_id == (given if given is None or len(given) <= 512 else None)


NUMBERS = [
    ("temperature", 0, 2, 0.000001),
    ("top_p", 0, 1, 0.000001),
    ("top_k", 0, 2**31 - 1, 1),
    ("seed", 0, 2**63 - 1, 1),
    ("max_output_tokens", 1, 2**31 - 1, 1),
    ("min_output_tokens", 0, 2**31 - 1, 1),
    ("min_p", 0, 1, 0.000001),
    ("typical_p", 0.000001, 1, 0.000001),
    ("repetition_penalty", 0.01, 100, 0.000001),
    ("presence_penalty", -2, 2, 0.000001),
    ("frequency_penalty", -2, 2, 0.000001),
    ("top_logprobs", 0, 20, 1),
]


@pytest.mark.parametrize("frame", [update, respond], ids=["session", "response"])
@pytest.mark.parametrize(("name", "least", "most", "step"), NUMBERS, ids=[number[0] for number in NUMBERS])
def test_numbers_at_their_bounds_and_beyond(
    frame: Any, name: str, least: float, most: float, step: float
) -> None:
    for value in (least, most):
        assert codec.decode_client(msgspec.json.encode(frame(**{name: value})))
    section = "session" if frame is update else "response"
    for raw in (repr(least - step), repr(most + step), "-1e308", "1e400", "9" * 400, "9" * 5000):
        text = msgspec.json.encode(frame(**{name: 1})).decode().replace(f'"{name}":1', f'"{name}":{raw}')
        error = refused(text)
        assert error.code in ("invalid_value", "invalid_type"), (raw, error)
        assert error.param == f"{section}.{name}"


COLLECTIONS = [
    ("logit_bias", [{}, {0: -100, 2**31 - 1: 100.0}, dict.fromkeys(range(1024), 0)],
     [{-1: 0}, {2**31: 0}, {1: 100.1}, {1: -100.1}, {1: "1"}, {"x": 1}, [[1, 1]],
      dict.fromkeys(range(1025), 0)]),
    ("bad_words", [[], [[0]], ["x", [1, 2]], [[2**31 - 1] * 64], ["x" * 256] * 256],
     [[[]], [""], [[-1]], [[2**31]], [[1] * 65], ["x" * 257], [1], "x", [["x"]], ["x"] * 257]),
    ("stop_token_ids", [[], [0, 2**31 - 1], [1] * 64], [[-1], [2**31], [1] * 65, ["1"], [1.5], 1]),
]  # fmt: skip


@pytest.mark.parametrize("frame", [update, respond], ids=["session", "response"])
@pytest.mark.parametrize(("name", "good", "bad"), COLLECTIONS, ids=[one[0] for one in COLLECTIONS])
def test_collections_at_their_bounds_and_beyond(frame: Any, name: str, good: list, bad: list) -> None:
    for value in good:
        event = codec.decode_client(msgspec.json.encode(frame(**{name: value})))
        assert codec.decode_client(codec.encode(event)) == event
    section = "session" if frame is update else "response"
    for value in bad:
        error = refused(frame(**{name: value}))
        assert error.code in ("invalid_value", "invalid_type"), (value, error)
        assert (error.param or "").startswith(f"{section}.{name}"), (value, error)


def test_inf_is_a_limit_and_other_strings_are_not() -> None:
    assert codec.decode_client(msgspec.json.encode(update(max_output_tokens="inf")))
    assert refused(update(max_output_tokens="infinite")).code == "invalid_value"
    assert refused(update(max_output_tokens=1.5)).code == "invalid_type"


def test_what_the_standard_has_without_effect_is_accepted() -> None:
    event = codec.decode_client(
        msgspec.json.encode(
            update(audio={"input": {"turn_detection": None}}, tracing="auto", include=None, reasoning={})
        )
    )
    assert isinstance(event, client.SessionUpdate)
    assert event.session.audio == {"input": {"turn_detection": None}}
    for path in unserved.IGNORED:
        section, name = path.split(".")
        frame = update if section == "session" else respond
        assert codec.decode_client(msgspec.json.encode(frame(**{name: None})))


def test_the_refused_are_refused_by_name() -> None:
    for event_type in unserved.REFUSED_EVENTS:
        assert refused({"type": event_type}).code == "unsupported_field"
    for path, values in unserved.REFUSED_VALUES.items():
        for value in values:
            assert unserved.is_unserved(path, value)
            assert unserved.is_unserved(path, {"type": value})


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xfe",
        b'{"type":"response.create","event_id":"\xed\xa0\x80"}',
        '{"type":"response.create","event_id":"\ud800"}',
        b'{"type":"response.create","event_id":"\\ud800"}',
        b'{"type":"response.create"',
        b'{"type":"session.update","session":{"audio":' + b"[" * 30_000,
        b'{"a":' * 30_000,
        b"\xef\xbb\xbf{}",
        b'{"type":"response.create"}{}',
    ],
)
def test_frames_that_are_no_json_are_refused(frame: bytes | str) -> None:
    error = refused(frame)
    assert type(error) is errors.FrameMalformed
    assert len(error.message) < 400
    assert error.message.encode()


@pytest.mark.parametrize("behind", ["", " x", "\\n and more text", "\\ud83d", "\\u0041"])
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00"])
def test_half_a_surrogate_pair_is_named_and_other_faults_are_not(half: str, behind: str) -> None:
    for frame in (f'{{"type": "{half}{behind}"}}', f'{{"{half}{behind}": 1}}'):
        assert "surrogate" in refused(frame).message
        other = refused(frame.replace(half, "\\" + half)[:-2])
        assert "surrogate" not in other.message or "u" in behind


def test_a_frame_has_a_size() -> None:
    frame = msgspec.json.encode(
        create(**{**USER, "content": [{"type": "input_text", "text": "x" * 999_000}]})
    )
    assert codec.decode_client(frame)
    with pytest.raises(errors.FrameTooLarge):
        codec.decode_client(frame, max_bytes=len(frame) - 1)
    with pytest.raises(errors.FrameTooLarge):
        codec.decode_client("é" * (codec.MAX_FRAME_BYTES // 2 + 1))


def test_errors_quote_large_values_shortened() -> None:
    for event in ({"type": "x" * 500_000}, {"type": "response.create", "x" * 500_000: 1}):
        error = refused(event)
        assert len(error.message) < 700
        assert len(error.param or "") < 400


def test_unknown_server_events_are_left_to_the_future() -> None:
    assert codec.decode_server(b'{"type":"response.thought","event_id":"e"}') is None
    with pytest.raises(errors.FrameError):
        codec.decode_server(b'{"type":"response.created","event_id":"e"}')


SECTIONS = ["type", "event_id", "session", "response", "item", "item_id", "previous_item_id", "response_id"]
FIELDS = [
    *SessionPatch.__struct_fields__,
    "input",
    "metadata",
    "conversation",
    "content",
    "role",
    "id",
    "text",
]
NAMES = [kind.__struct_config__.tag for kind in get_args(client.ClientEvent)]
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=-(10**40), max_value=10**40),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(
            [*NAMES, "message", "function", "mcp", "input_text", "user", "inf", "root", "realtime"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text(max_size=8)), inner, max_size=4),
    ),
    max_leaves=12,
)


def only_frame_errors(frame: bytes | str) -> None:
    try:
        event = codec.decode_client(frame)
    except errors.FrameError as error:
        details = server.ErrorDetails(
            type="t", code=error.code, message=error.message, param=error.param, event_id=error.event_id
        )
        assert codec.encode(server.ErrorEvent(event_id="e", error=details))
    else:
        assert codec.decode_client(codec.encode(event)) == event


@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES), st.sampled_from([*NAMES, None]))
def test_any_json_is_an_event_or_a_frame_error(fields: dict[str, Any], name: str | None) -> None:
    only_frame_errors(msgspec.json.encode(fields if name is None else {**fields, "type": name}))


@given(st.one_of(st.binary(max_size=200), st.text(st.characters(exclude_categories=()), max_size=200)))
def test_any_bytes_are_an_event_or_a_frame_error(frame: bytes | str) -> None:
    only_frame_errors(frame)


@given(st.sampled_from(CLIENT_EVENTS), st.data())
def test_any_damage_is_an_event_or_a_frame_error(event: client.ClientEvent, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(event))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not frame:
            break
    only_frame_errors(bytes(frame))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_messagepack_and_json_hold_the_same_object(value: dict[str, Any]) -> None:
    finite = not any(isinstance(one, float) and math.isinf(one) for one in leaves(value))
    if finite:
        frame = msgspec.json.encode(value)
        assert packed.unpacked(packed.packed(frame), 1 << 20) == frame
    else:
        with pytest.raises(errors.FrameMalformed):
            packed.unpacked(msgspec.msgpack.encode(value), 1 << 20)


def values_in(value: Any) -> int:
    """How many values JSON holds: each list or object, and its entries beyond the first."""
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(inner) - 1) + sum(map(values_in, inner))


@given(JSON, st.integers(0, 6), st.booleans())
def test_values_are_counted_without_decoding_them(value: Any, off: int, ascii_only: bool) -> None:
    """Whatever the texts hold: commas, brackets, quotes, backslashes."""
    whole = {"x": value, ',[{"\\': [',"[', "\\", '\\"{,']}
    data = json.dumps(whole, ensure_ascii=ascii_only, separators=(",", ":")).encode(errors="replace")
    most = max(0, values_in(whole) - 3 + off)
    assert codec.has_more_values(data, most) == (values_in(whole) > most)


def test_values_of_a_body_in_many_lines_are_counted_once() -> None:
    lines = [{"text": '\\\\", [{' * 9, "of": [at, "more"]} for at in range(6000)]
    data = json.dumps(lines, indent=1).encode()
    assert len(data) > 4 * codec.PART
    assert codec.has_more_values(data, values_in(lines) - 1)
    assert not codec.has_more_values(data, values_in(lines))


@pytest.mark.parametrize("piece", [b"1,", b"[],", b'{"a":1},', b'"\\"",'])
def test_a_frame_of_too_many_values_is_refused_in_both_forms(piece: bytes) -> None:
    frame = b'{"type":"session.update","x":[' + piece * 40_000 + b"0]}"
    assert isinstance(refused(frame), errors.FrameTooLarge)
    with pytest.raises(errors.FrameTooLarge):
        packed.unpacked(packed.packed(frame), 1 << 20, codec.MAX_FRAME_VALUES)
    text = b'{"type":"session.update","x":"' + b",[{" * 40_000 + b'"}'
    assert not isinstance(refused(text), errors.FrameTooLarge)
    packed.unpacked(packed.packed(text), 1 << 20, codec.MAX_FRAME_VALUES)
    assert packed.unpacked(packed.packed(frame), 1 << 20), "a server may send more"


@given(JSON, st.integers(0, 5))
def test_packed_values_are_counted_without_decoding_them(value: Any, off: int) -> None:
    """Of frames that are long enough to be counted."""
    whole = {"x": value, "y": ["z" * 40_000, 1 << 40, -(1 << 40), 1.5, None, "é" * 300]}
    frame = msgspec.msgpack.encode({**whole, "w": [0] * (codec.MAX_FRAME_VALUES - off - 14)})
    names_too = sum(1 for _ in walked(msgspec.msgpack.decode(frame)))
    try:
        packed.unpacked(frame, 1 << 20, codec.MAX_FRAME_VALUES)
    except errors.FrameTooLarge:
        assert names_too > codec.MAX_FRAME_VALUES
    except errors.FrameMalformed:  # a number that is not finite
        assert names_too <= codec.MAX_FRAME_VALUES
    else:
        assert names_too <= codec.MAX_FRAME_VALUES


def walked(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.items() if isinstance(value, dict) else value if isinstance(value, list) else ():
        for one in inner if isinstance(value, dict) else (inner,):
            yield from walked(one)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value
