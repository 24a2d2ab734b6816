"""What a small frame may cost: no frame has a long conversation looked through again and again."""

from __future__ import annotations

import itertools
from dataclasses import replace as changed
from typing import Any

import msgspec
import pytest

from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.live.sessions import LiveSessions
from holdfast.gateway.realtime.conversation import Conversation, Effect
from holdfast.gateway.realtime.session import RealtimeFace
from holdfast.gateway.settings import ClientLimits
from holdfast.sdk.frames import codec, server
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation import history as history_room
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, Preamble
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

from .realtime_grammar import served


class Stage:
    """A conversation of a session with so much room for text."""

    def __init__(self, most_characters: int | None = None) -> None:
        numbers = itertools.count(1)
        self.history = History()
        self.conversation = Conversation(
            SessionResource(id="sess", model="pocket"),
            self.history,
            ids=lambda prefix: f"{prefix}_{next(numbers)}",
            most_characters=most_characters,
        )

    def does(self, **event: Any) -> list[Effect]:
        return served(self.conversation, codec.decode_client(msgspec.json.encode(event)))

    def refused(self, **event: Any) -> str | None:
        first = next(iter(self.does(**event)), None)
        return first.error.code if isinstance(first, server.ErrorEvent) else None


def test_many_outputs_in_one_frame_look_through_the_conversation_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, looks = Stage(), list[int]()
    for number in range(500):
        stage.history.insert(FunctionCall(id=f"i{number}", call_id=f"c{number}", name="f", arguments="{}"))
    items = History.items
    monkeypatch.setattr(History, "items", lambda history: looks.append(1) or items(history))
    outputs = [
        {"type": "function_call_output", "call_id": f"c{number}", "output": "1"} for number in range(400)
    ]
    stage.does(type="response.create", items=outputs)
    assert len(stage.history) == 900 and len(looks) <= 1
    again = {"type": "function_call_output", "call_id": "c7", "output": "2"}
    assert stage.refused(type="conversation.item.create", item=again) == "tool_call_already_answered"
    answer = next(item for item in items(stage.history) if item.id not in {f"i{n}" for n in range(500)})
    stage.history.delete(answer.id)
    assert stage.refused(type="conversation.item.create", item={**again, "call_id": "c0"}) is None


def test_streamed_text_beyond_what_the_context_holds_is_refused() -> None:
    stage = Stage(most_characters=100)
    append, replace = "input_text_buffer.append", "input_text_buffer.replace"
    for _ in range(10):
        assert stage.refused(type=append, text="0123456789") is None
    assert stage.refused(type=append, text="0") == "context_length_exceeded"
    assert stage.refused(type=replace, **{"from": 95}, text="012345") == "context_length_exceeded"
    assert len(stage.conversation.buffer.text) == 100
    assert stage.refused(type=replace, **{"from": 95}, text="01234") is None


@pytest.mark.anyio
async def test_forks_share_their_parents_checked_preamble(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Scripted(spoken, END)
    book = SessionRegistry(link, Language.of(ours("chatml")))
    sessions = LiveSessions(book, ClientLimits())
    one = RealtimeFace(sessions, link, ("scripted",), ClientLimits()).open(Holder(), b"")
    tools = [{"type": "function", "name": f"tool_{number}", "parameters": {}} for number in range(50)]
    update = {"type": "session.update", "session": {"type": "realtime", "tools": tools, "temperature": 0.5}}
    await one.take(codec.decode_client(msgspec.json.encode(update)))
    checked, seen = history_room.checked_preamble, list[int]()

    def counted(preamble: Preamble) -> Preamble:
        seen.append(len(preamble.tools))
        return checked(preamble)

    monkeypatch.setattr(history_room, "checked_preamble", counted)
    (forked, *_) = await sessions.fork(one.live, 8, None)
    child = RealtimeFace.side_of(forked)
    assert len(one.conversation.session.tools) == 50 and not any(seen)
    assert child.session.history.preamble is one.session.history.preamble
    assert child.conversation.session == msgspec.structs.replace(
        one.conversation.session, id=child.session.id
    )
    child.session.history.preamble = Preamble(instructions="other")
    assert len(one.session.history.preamble.tools) == 50
    await sessions.aclose()


@pytest.mark.anyio
async def test_only_the_latest_events_ids_are_remembered() -> None:
    link = Scripted(spoken, END)
    limits = changed(ClientLimits(), client_events=3)
    sessions = LiveSessions(SessionRegistry(link, Language.of(ours("chatml"))), limits)
    face = RealtimeFace(sessions, link, ("scripted",), limits)
    one = face.open(Holder(), b"")
    one.live.resumable = True

    async def lengths_after(*event_ids: str) -> list[int]:
        lengths = []
        for event_id in event_ids:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
            sent = {"type": "conversation.item.create", "event_id": event_id, "item": item}
            await one.take(codec.decode_client(msgspec.json.encode(sent)))
            lengths.append(len(one.session.history))
        return lengths

    assert await lengths_after("a", "b", "a", "b", "c") == [1, 2, 2, 2, 3], "each is served once"
    assert await lengths_after("d", "c", "b") == [4, 4, 4], "the oldest, a, made room"
    await lengths_after("e")
    assert await lengths_after("c", "d") == [5, 5]
    await sessions.aclose()


@pytest.mark.anyio
async def test_sessions_of_one_face_share_their_first_configuration() -> None:
    link = Scripted(spoken, END)
    sessions = LiveSessions(SessionRegistry(link, Language.of(ours("chatml"))), ClientLimits())
    face = RealtimeFace(sessions, link, ("scripted",), ClientLimits())
    one, two = face.open(Holder(), b""), face.open(Holder(), b"")
    first, second = one.conversation.session, two.conversation.session
    assert first.id != second.id
    assert first.output_modalities is second.output_modalities
    await sessions.aclose()


class Holder:
    """`SessionConnection`."""

    caller = TurnCaller()

    def taken(self, why: Exception) -> None:
        """The session goes on elsewhere."""
