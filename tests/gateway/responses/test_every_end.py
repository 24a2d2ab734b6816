"""However a response ends, what is told, stored and told again has all that the standard requires."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from holdfast.gateway.live.reply import ReplyFold
from holdfast.gateway.responses import notes
from holdfast.gateway.responses.events import ResponseObject, ResponseStreamEvent
from holdfast.gateway.responses.notes import KeptResponse
from holdfast.gateway.responses.reply import ResponseReply
from holdfast.sessions.errors import EngineUnavailable, TurnFailed
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
    TokenScore,
    TurnUsage,
)
from holdfast.tests.gateway.scripted_service import Scripted

from .stage import Json, Stage, staged, told
from .standard import check_events, check_item, check_response
from .test_create import CALL, TOOL

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '
LONG = " ".join(f"word {number}" for number in range(100))

# --- any events, any end --------------------------------------------------------------------------------------

DELTAS = st.lists(st.sampled_from(["a", " b", "é ", '"'])).map(tuple)
ENDS: Sequence[tuple[ReplyStatus, EndReason] | Exception] = (
    (ReplyStatus.COMPLETED, EndReason.STOP),
    (ReplyStatus.INCOMPLETE, EndReason.MAX_OUTPUT_TOKENS),
    (ReplyStatus.INCOMPLETE, EndReason.REPETITION),
    (ReplyStatus.INCOMPLETE, EndReason.STEERED),
    (ReplyStatus.CANCELLED, EndReason.CLIENT_CANCELLED),
    (ReplyStatus.CANCELLED, EndReason.SERVER_LEAVING),
    (ReplyStatus.FAILED, EndReason.ERROR),
    EngineUnavailable("The engine died, and is not back"),
    RuntimeError("a mistake of ours"),
)


@dataclass(frozen=True)
class Told:
    """A response as it was told and stored. ``inputs``: its number of input items."""

    events: list[ResponseStreamEvent]
    kept: KeptResponse
    inputs: int

    @property
    def values(self) -> list[Json]:
        return [msgspec.to_builtins(event) for event in self.events]


@st.composite
def replies(draw: st.DrawFn) -> Told:
    """Any items, cut anywhere, with any end."""
    events: list[ReplyEvent] = [ReplyStarted(3)]
    for number in range(draw(st.integers(0, 4))):
        name, deltas = str(number), draw(DELTAS)
        match draw(st.sampled_from(["text", "reasoning", "call", "whole call", "broken call"])):
            case "text":
                score = (TokenScore(1, "a", -0.5, (TokenScore(2, "�", -2.0),)),)
                events += [ReplyTextDelta(name, one, draw(st.sampled_from([(), score]))) for one in deltas]
            case "reasoning":
                events += [ReplyReasoningDelta(one) for one in deltas]
            case kind:
                events.append(ReplyCallStarted(name, f"call_{name}", "f"))
                events += [ReplyArgumentsDelta(name, "c", one) for one in deltas if kind != "whole call"]
                events.append(ReplyCallDone(name, "c", "f", "".join(deltas), kind != "broken call"))
    end, inputs, done = draw(st.sampled_from(ENDS)), draw(st.integers(0, 2)), None
    del events[draw(st.integers(0, len(events))) :]
    if isinstance(end, tuple):
        fault = TurnFailed("The logits are not finite") if end[0] is ReplyStatus.FAILED else None
        done = ReplyDone(*end, (), TurnUsage(3, 2), fault)
        events.append(done)
    begun = ResponseObject(id="resp_1", created_at=1, model="m", store=True)
    by, reply = ResponseReply(begun, inputs), ReplyFold()
    made = list(by.begin())
    for event in events:
        made += reply.told(event, by)
    made += reply.close(by, complete=False)
    made.append(by.end(reply, None if done else end))  # type: ignore[arg-type]
    return Told(made, KeptResponse(response=by.response, input=[], cuts=by.cuts), inputs)


@given(replies())
def test_whatever_a_response_says_and_however_it_ends_nothing_is_missing(one: Told) -> None:
    check_events(one.values)
    last = one.values[-1]["response"]
    assert last["status"] not in ("in_progress", "queued")
    kept = notes.decoded(notes.encoded(one.kept))
    assert kept == one.kept
    again = ResponseReply.retold(one.kept.response, one.inputs, one.kept.cuts)
    assert again == one.events, "told again from the store"


# --- real turns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """A response, and how it ends. ``says``: what the model writes, if nothing happens. ``fields``: of the
    request. ``kinds``: the types of the items that come of it, with their statuses. ``happens``: after some
    tokens."""

    says: str
    status: str
    kinds: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()
    happens: str = ""
    after: int = 3


WHOLE, PART = ("message", "completed"), ("message", "incomplete")
TOOLS = ("tools", [TOOL])
SCENES = {
    "text": Scene("Hello there.", "completed", (WHOLE,)),
    "call": Scene(CALL, "completed", (("function_call", "completed"),), (TOOLS,)),
    "text and calls": Scene(
        "I look." + CALL + CALL, "completed", (WHOLE, *[("function_call", "completed")] * 2), (TOOLS,)
    ),
    "a call that nobody can answer is text": Scene("I look." + CALL, "completed", (WHOLE,)),
    "a call that must not be is text": Scene(CALL, "completed", (WHOLE,), (TOOLS, ("tool_choice", "none"))),
    "broken call": Scene(BROKEN + "ten.", "completed", (("function_call", "incomplete"),), (TOOLS,)),
    "broken call without tools": Scene(BROKEN + "ten.", "completed", (WHOLE,)),
    "cut call": Scene(
        BROKEN + LONG, "incomplete", (("function_call", "incomplete"),), (TOOLS, ("max_output_tokens", 30))
    ),
    "cut before the call has a name": Scene(CALL, "incomplete", (), (TOOLS, ("max_output_tokens", 2))),
    "cut": Scene(LONG, "incomplete", (PART,), (("max_output_tokens", 3),)),
    "empty": Scene("", "completed"),
    "stopped before its text": Scene("Hello.", "completed", (), (("stop", ["Hello"]),)),
    "stopped": Scene("Hello there.", "completed", (WHOLE,), (("stop", [" there"]),)),
    "prefilled": Scene("Hello.", "completed", (), (("prompt_cache_options", {"prewarm": True}),)),
    "failed": Scene(LONG, "failed", (PART,), (), "fails"),
    "failed in a call": Scene(
        BROKEN + LONG, "failed", (("function_call", "incomplete"),), (TOOLS,), "fails", 20
    ),
    "failed at once": Scene(LONG, "failed", (), (), "fails", 0),
    "cancelled": Scene(LONG, "cancelled", (PART,), (), "cancelled"),
    "cancelled in a call": Scene(
        BROKEN + LONG, "cancelled", (("function_call", "incomplete"),), (TOOLS,), "cancelled", 20
    ),
    "cancelled at once": Scene(LONG, "cancelled", (), (), "cancelled", 0),
    "the engine died": Scene("one two three four five six", "completed", (WHOLE,), (), "dies"),
    "the server ended": Scene(LONG, "failed", (), (), "ends"),
}


def engine(scene: Scene) -> Scripted:
    """Says what the scene says; stands still where something happens."""
    link = told(scene.says)
    model, said = link.model, 0

    def next_token(tokens: list[int]) -> int:
        nonlocal said
        if scene.happens == "fails" and said >= scene.after:
            raise RuntimeError("logits are not finite")
        said += 1
        link.flowing = not scene.happens or scene.happens == "fails" or said != scene.after
        return model(tokens)

    link.model = next_token
    link.flowing = scene.happens in ("", "fails") or scene.after > 0
    return link


async def happen(stage: Stage, scene: Scene, name: str) -> None:
    """What happens in the scene, to the response ``name``."""
    await stage.link.stuck.wait()
    if scene.happens == "cancelled":
        await stage.ask("POST", f"{RESPONSES}/{name}/cancel")
    elif scene.happens == "dies":
        stage.link.die()
        stage.link.flowing = True
        stage.link.restart()


async def check_told(stage: Stage, scene: Scene, name: str, conversation: str) -> Json:
    """All that is told of a stored response, in every way. Returns the response."""
    response = (await stage.ask("GET", f"{RESPONSES}/{name}")).json
    check_response(response)
    assert response["status"] == scene.status
    assert [(item["type"], item["status"]) for item in response["output"]] == list(scene.kinds)
    events = (await stage.ask("GET", f"{RESPONSES}/{name}?stream=true")).events
    check_events(events)
    assert events[-1]["response"] == response
    for after in range(len(events) - 1):
        rest = await stage.ask("GET", f"{RESPONSES}/{name}?stream=true&starting_after={after}")
        assert rest.events == events[after + 1 :]
    for path in (f"{RESPONSES}/{name}/input_items", f"{CONVERSATIONS}/{conversation}/items"):
        for item in (await stage.ask("GET", f"{path}?limit=100")).json["data"]:
            check_item(item)
    return response


@pytest.mark.anyio
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
async def test_a_stored_response_is_whole_however_it_ended(scene: Scene, tmp_path: Path) -> None:
    """As it is told while it runs, afterwards, and by the next server."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def begins(sent: bytes) -> bool:
        if b"\n\n" in sent and not begun.done():
            first = json.loads(sent.split(b"\n")[1].removeprefix(b"data: "))
            begun.set_result(first["response"]["id"])
        return False

    async with staged(tmp_path, link=engine(scene)) as stage:
        made = (await stage.ask("POST", CONVERSATIONS, {"items": [{"role": "user", "content": "Hi."}]})).json
        body = {"input": "Go on.", "background": True, "stream": True, "conversation": made["id"]}
        asked = stage.ask("POST", RESPONSES, {**body, **dict(scene.fields)}, leave=begins)
        streaming = asyncio.create_task(asked)
        name = await begun
        if scene.happens not in ("", "fails"):
            await happen(stage, scene, name)
        if scene.happens != "ends":
            events = (await streaming).events
            check_events(events)
            assert events == (await stage.ask("GET", f"{RESPONSES}/{name}?stream=true")).events
            assert events[-1]["response"] == await check_told(stage, scene, name, made["id"])
    await asyncio.gather(streaming, return_exceptions=True)
    async with staged(tmp_path) as stage:
        await check_told(stage, scene, name, made["id"])


@pytest.mark.anyio
@pytest.mark.parametrize("offered", [False, True], ids=["none offered", "none may be called"])
async def test_no_face_tells_a_call_to_a_client_that_did_not_ask_for_any(offered: bool) -> None:
    """It is told as text: such a client reads the content of each item."""
    said, function = "I look." + CALL, {key: value for key, value in TOOL.items() if key != "type"}
    anthropic = {"name": "get_weather", "input_schema": TOOL["parameters"]}
    offers = {
        "/v1/chat/completions": {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "none",
        },
        "/v1/messages": {"tools": [anthropic], "tool_choice": {"type": "none"}},
        RESPONSES: {"tools": [TOOL], "tool_choice": "none"},
    }
    turn = [{"role": "user", "content": "Weather?"}]
    async with staged(link=told(said, said, said)) as stage:
        for path, fields in offers.items():
            asked = {"input": turn} if path == RESPONSES else {"messages": turn, "max_tokens": 200}
            answer = await stage.ask("POST", path, {**asked, "model": "fake", **(fields if offered else {})})
            assert answer.status == 200, answer.body
            match path, answer.json:
                case "/v1/chat/completions", {"choices": [{"message": message, "finish_reason": "stop"}]}:
                    assert message["content"] == said and not message.get("tool_calls")
                case "/v1/messages", {"content": [block], "stop_reason": "end_turn"}:
                    assert block["text"] == said
                case _, {"output": [item]}:
                    assert item["content"][0]["text"] == said
                case _, other:
                    pytest.fail(f"{path}: {other}")
