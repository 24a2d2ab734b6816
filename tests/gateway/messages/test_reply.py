"""Events of a reply become the events of a stream, or one answer with the same content."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.gateway.clients import Asked
from holdfast.gateway.live.reply import SILENT, ReplyFold
from holdfast.gateway.messages import frames
from holdfast.gateway.messages.reply import MessageReply, signature_of
from holdfast.sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyReasoningDelta,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)


def done(reason: EndReason = EndReason.STOP, stopped_by: str | None = None, **usage: int) -> ReplyDone:
    status = ReplyStatus.COMPLETED if reason is EndReason.STOP else ReplyStatus.INCOMPLETE
    spent = TurnUsage(**{"input_tokens": 30, "output_tokens": 5, "cached_tokens": 20, **usage})
    return ReplyDone(status, reason, (), spent, stopped_by=stopped_by)


def reply_to(**fields: Any) -> MessageReply:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **fields}
    return MessageReply(Asked(frames.REQUEST.decode(msgspec.json.encode(body))), "req_1")


def told(events: list[ReplyEvent], **fields: Any) -> list[Any]:
    by, reply = reply_to(**fields), ReplyFold(limit=5)
    return [json.loads(msgspec.json.encode(one)) for event in events for one in reply.told(event, by)]


def whole(events: list[ReplyEvent], **fields: Any) -> Any:
    by, reply = reply_to(**fields), ReplyFold(limit=5)
    for event in events:
        assert not list(reply.told(event, SILENT))
    return json.loads(msgspec.json.encode(by.whole([reply])))


def gathered(events: list[Any]) -> list[Any]:
    """The content that a client gathers from a stream; checks the order of the events."""
    assert events[0]["type"] == "message_start" and events[1]["type"] == "ping"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    content: list[Any] = []
    texts: list[str] = []
    open_at = None
    for event in events[2:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_at is None and event["index"] == len(content)
            open_at = event["index"]
            content.append(event["content_block"])
            texts.clear()
            continue
        assert event["index"] == open_at, "one block at a time"
        if kind == "content_block_stop":
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads("".join(texts) or "{}")
            open_at = None
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": text}:
                content[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                content[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": signature}:
                content[-1]["signature"] += signature
            case {"type": "input_json_delta", "partial_json": text}:
                texts.append(text)
    assert open_at is None
    return content


THINK = [ReplyReasoningDelta("Let me "), ReplyReasoningDelta("see.")]
CALL = [
    ReplyCallStarted("i2", "c1", "f"),
    ReplyArgumentsDelta("i2", "c1", '{"a":'),
    ReplyArgumentsDelta("i2", "c1", " 1}"),
    ReplyCallDone("i2", "c1", "f", '{"a": 1}'),
]
TEXT = [ReplyTextDelta("i1", "one "), ReplyTextDelta("i1", "two")]
MORE = [ReplyTextDelta("i3", "three")]


@given(st.lists(st.sampled_from([THINK, CALL, TEXT, MORE]), max_size=4), st.sampled_from(["", "omitted"]))
def test_a_stream_and_an_answer_have_the_same_content(parts: list[list[ReplyEvent]], display: str) -> None:
    events = [ReplyStarted(30), *(event for part in parts for event in part), done()]
    thinking = {"type": "adaptive", **({"display": display} if display else {})}
    streamed, answer = told(events, thinking=thinking), whole(events, thinking=thinking)
    assert gathered(streamed) == answer["content"]
    assert streamed[-2]["delta"]["stop_reason"] == answer["stop_reason"]
    assert streamed[-2]["usage"] == answer["usage"]


def test_reasoning_is_a_thinking_block_unless_it_is_disabled() -> None:
    events = [ReplyStarted(30), *THINK, *TEXT, done()]
    signature = signature_of("Let me see.")
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": signature}
    answer = {"type": "text", "text": "one two", "citations": None}
    assert whole(events)["content"] == [thought, answer]
    omitted = {"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}}
    assert whole(events, **omitted)["content"] == [{**thought, "thinking": ""}, answer]
    for fields in ({"thinking": {"type": "disabled"}},):
        assert whole(events, **fields)["content"] == gathered(told(events, **fields)) == [answer]


@pytest.mark.parametrize(
    ("parts", "end", "reason"),
    [
        (TEXT, done(), "end_turn"),
        (CALL, done(), "tool_use"),
        ([*CALL, *MORE], done(), "tool_use"),
        (TEXT, done(stopped_by="x"), "stop_sequence"),
        (TEXT, done(EndReason.MAX_OUTPUT_TOKENS), "max_tokens"),
        (TEXT, done(EndReason.MAX_OUTPUT_TOKENS, output_tokens=4), "model_context_window_exceeded"),
        (TEXT, done(EndReason.REPETITION), "max_tokens"),
    ],
)
def test_reasons(parts: list[ReplyEvent], end: ReplyDone, reason: str) -> None:
    events = [ReplyStarted(30), *parts, end]
    answer, delta = whole(events), told(events)[-2]["delta"]
    assert answer["stop_reason"] == delta["stop_reason"] == reason
    assert answer["stop_sequence"] == delta["stop_sequence"] == end.stopped_by


def test_a_call_that_was_cut_is_not_one_to_run() -> None:
    cut = [*CALL[:2], ReplyCallDone("i2", "c1", "f", '{"a":', complete=False)]
    events = [ReplyStarted(30), *cut, done(EndReason.MAX_OUTPUT_TOKENS)]
    answer = whole(events)
    assert answer["stop_reason"] == told(events)[-2]["delta"]["stop_reason"] == "max_tokens"
    assert answer["content"] == [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]


def test_usage_tells_cached_tokens_apart() -> None:
    usage = whole([ReplyStarted(30), *TEXT, done()])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (10, 20, 5)
