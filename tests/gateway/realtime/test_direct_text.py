"""Text that leaves as its row arrives, in no task: the same events, counts and bounds as on the way through the
turn's reader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.access.rate_limits import KeyRates, RateLimiter
from holdfast.gateway.live.sessions import LiveSessions
from holdfast.gateway.live.turns import Turns
from holdfast.gateway.net.outbox import Outbox, SessionOutbox
from holdfast.gateway.realtime.event_log import DeltaFrames
from holdfast.gateway.realtime.session import RealtimeFace
from holdfast.gateway.settings import ClientLimits
from holdfast.runtime.link.generation import Generation
from holdfast.runtime.verbs import Finish, Row, Work
from holdfast.sdk.frames import codec, server
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio

CREATE = {"type": "response.create", "event_id": "ask"}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count."}]}


class Holder:
    """`SessionConnection`."""

    caller = TurnCaller(b"key", b"salt")

    def taken(self, why: Exception) -> None:
        """The session goes on elsewhere."""


class Stage:
    """A session on a socket that takes every frame while ``open``, and an engine that gives a row when the test
    says so."""

    def __init__(self, limits: ClientLimits | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.link = Scripted(spoken, END)
        self.link.flowing = False
        self.turns = Turns(RateLimiter({b"salt": KeyRates(requests=9, tokens=900)}))
        registry = SessionRegistry(self.link, Language.of(ours("chatml")))
        self.sessions = LiveSessions(registry, self.limits, self.turns)
        face = RealtimeFace(self.sessions, self.link, ("scripted",), self.limits)
        self.side = face.open(Holder(), b"")
        self.frames: list[bytes] = []
        self.open = True
        self.outbox = Outbox(self.limits, self._send)
        self.side.event_log.open_to(SessionOutbox(self.outbox))

    def _send(self, frame: bytes) -> bool:
        if self.open:
            self.frames.append(frame)
        return self.open

    async def asks(self, **response: Any) -> Generation:
        """Ask for a reply; its generation has given its first token."""
        event = {**CREATE, "items": [ITEM], "response": response}
        await self.side.take(codec.decode_client(msgspec.json.encode(event)))
        await self.settle()
        assert self.link.stuck.is_set()
        (held,) = (held for held in self.link.held.values() if held.generation is not None)
        assert held.generation is not None
        self.tokens = held.tokens
        self.give(held.generation)
        await self.settle()
        return held.generation

    def give(self, generation: Generation, token: int = WORDS[1], finish: Finish | None = None) -> None:
        """A row of one token arrives."""
        self.tokens.append(token)
        state = generation.state
        work = None if finish is None else Work(0, 0, state.length, len(self.tokens) - state.length)
        generation.put(Row(state.seq, state.epoch, [token], len(self.tokens), finish, work))

    async def settle(self) -> None:
        """Let all tasks run, and write what waits if the socket is open."""
        for _ in range(20):
            await asyncio.sleep(0)
        if self.open and self.outbox.statistics().events:
            frames = await self.outbox.take()
            self.frames += frames
            self.outbox.left(len(frames))
            await self.settle()

    @property
    def events(self) -> list[Any]:
        return [codec.decode_server(frame) for frame in self.frames]

    @property
    def said(self) -> str:
        return "".join(event.delta for event in self.events if isinstance(event, server.TextDelta))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the events that left."""
        return [int(event.event_id.split("-")[1]) for event in self.events]


async def test_text_leaves_before_any_task_runs_and_is_numbered_as_every_event() -> None:
    stage = Stage()
    generation = await stage.asks()
    before = len(stage.frames)
    for token in WORDS[1:8]:
        stage.give(generation, token)
        assert not generation.queued
    assert len(stage.frames) == before + 7
    stage.give(generation, END, Finish.STOP)
    await stage.settle()
    assert stage.numbers == list(range(1, len(stage.frames) + 1))
    done = next(event for event in stage.events if isinstance(event, server.TextDone))
    assert done.text == stage.said and len(done.text) > 7
    ends = [event.response.status for event in stage.events if isinstance(event, server.ResponseDone)]
    assert ends == ["completed"]
    positions = [event.event_id.split("-")[2:] for event in stage.events if "text.delta" in event.type]
    assert [int(reply) for reply, _ in positions] == [1] * 8
    assert [int(told) for _, told in positions] == list(range(int(positions[0][1]), int(positions[0][1]) + 8))


async def test_text_that_left_so_is_counted_for_metrics_and_rates() -> None:
    stage = Stage()
    generation = await stage.asks()
    for _ in range(5):
        stage.give(generation)
    assert stage.turns.metrics.first_token.buckets()[-1][1] == 1
    assert stage.turns.metrics.inter_token.buckets()[-1][1] == 5
    stage.give(generation, END, Finish.STOP)
    await stage.settle()
    assert stage.turns.metrics.generated.total() == 7
    usage = next(event.response.usage for event in stage.events if isinstance(event, server.ResponseDone))
    assert usage is not None and usage.output_tokens == 7
    limits = [event.rate_limits for event in stage.events if isinstance(event, server.RateLimitsUpdated)]
    left = {limit.name: limit.remaining for limit in limits[-1]}
    assert left["requests"] == 8 and left["tokens"] <= 900 - 7


async def test_a_client_that_comes_back_gets_the_text_behind_what_it_read() -> None:
    stage = Stage()
    generation = await stage.asks()
    for token in WORDS[1:6]:
        stage.give(generation, token)
    (*_, third, _, _) = stage.events
    told = stage.said
    stage.side.event_log.detach()
    stage.give(generation)  # nothing can leave: it is kept
    await stage.settle()
    stage.frames = []
    stage.side.resume(SessionOutbox(stage.outbox), third.event_id)
    await stage.settle()
    again = [event.delta for event in stage.events if isinstance(event, server.TextDelta)]
    assert told.endswith("".join(again[:2])) and len(again) == 3
    stage.give(generation)
    assert len(stage.events) == 5 and stage.said == "".join(again) + again[-1]


async def test_a_socket_that_takes_nothing_stops_its_own_reply_and_loses_nothing() -> None:
    stage = Stage(replace(ClientLimits(), outbox_events=4))
    generation = await stage.asks()
    stage.open = False
    for _ in range(12):
        stage.give(generation)
        await asyncio.sleep(0)
    assert stage.outbox.statistics().events <= 5 and generation.queued > 6
    stage.open = True
    await stage.settle()
    stage.give(generation, END, Finish.STOP)
    await stage.settle()
    assert stage.numbers == list(range(1, len(stage.frames) + 1))
    done = next(event for event in stage.events if isinstance(event, server.TextDone))
    assert done.text == stage.said and sum("text.delta" in event.type for event in stage.events) == 13


async def test_what_waits_in_the_outbox_leaves_before_the_text_behind_it() -> None:
    stage = Stage()
    generation = await stage.asks()
    stage.open = False
    stage.give(generation, WORDS[1])
    stage.open = True
    stage.give(generation, WORDS[2])
    await stage.settle()
    assert stage.numbers == list(range(1, len(stage.frames) + 1))


async def test_a_cancelled_reply_ends_behind_the_text_that_has_left() -> None:
    stage = Stage()
    generation = await stage.asks()
    for token in WORDS[1:4]:
        stage.give(generation, token)
    cancel = asyncio.create_task(stage.side.take(codec.decode_client(b'{"type":"response.cancel"}')))
    await stage.settle()
    told = stage.said
    stage.give(generation)  # the engine was ahead
    await cancel
    await stage.settle()
    assert stage.said == told
    done = next(event for event in stage.events if isinstance(event, server.TextDone))
    assert done.text == told
    assert stage.side.session.history.items()[-1].text == told  # type: ignore[union-attr]


async def test_a_mistake_in_sending_ends_this_reply_alone() -> None:
    stage = Stage()
    generation = await stage.asks()

    def breaks(*_: object) -> bool:
        raise ValueError("a mistake")

    stage.side.tell_now = breaks  # type: ignore[method-assign]
    stage.give(generation)
    stage.give(generation)
    await stage.settle()
    ends = [event.response for event in stage.events if isinstance(event, server.ResponseDone)]
    assert [end.status for end in ends] == ["failed"]
    assert not stage.side.live.running


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "full"])
async def test_a_brief_reply_ends_with_its_item_and_its_done(is_open: bool) -> None:
    """Both are written past the outbox while it is empty, and behind the text that waits in it otherwise."""
    stage = Stage()
    generation = await stage.asks(events="brief")
    stage.open = is_open
    for token in WORDS[1:4]:
        stage.give(generation, token)
    stage.give(generation, END, Finish.STOP)
    await stage.settle()
    stage.open = True
    await stage.settle()
    assert stage.numbers == list(range(1, len(stage.frames) + 1)), "in order, each once"
    reply = [event for event in stage.events if not isinstance(event, server.RateLimitsUpdated)]
    assert [event.type for event in reply[-3:]] == [
        "response.output_text.delta",
        "response.output_item.done",
        "response.done",
    ]
    item, end = reply[-2:]
    assert item.item.content[0].text == stage.said and stage.said
    assert item.item.status == end.response.status == "completed" and item.response_id == end.response.id
    assert end.response.output == [] and end.response.usage.output_tokens == 5
    assert end.handle == stage.side.session.handles.current
    assert [event.event_id.split("-")[2:] for event in reply[-2:]] == [["1", "6"], ["1", "7"]]


async def test_a_client_that_has_read_the_item_of_a_brief_reply_gets_its_done() -> None:
    stage = Stage()
    generation = await stage.asks(events="brief")
    stage.give(generation, END, Finish.STOP)
    await stage.settle()
    item = next(event for event in stage.events if isinstance(event, server.OutputItemDone))
    stage.side.event_log.detach()
    stage.frames = []
    stage.side.resume(SessionOutbox(stage.outbox), item.event_id)
    await stage.settle()
    assert [event.type for event in stage.events if event.type.startswith("response.")] == ["response.done"]


async def test_a_fork_in_the_middle_of_a_reply_has_the_text_that_has_left() -> None:
    stage = Stage()
    generation = await stage.asks()
    for token in WORDS[1:6]:
        stage.give(generation, token)
    history, _ = stage.side.session.branch()
    assert history.items()[-1].text == stage.said  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["a", ' "quoted" \\ ', "é\u2028\U0001f600", "\x00\x1f", "</script>"])
def test_frames_are_those_of_the_codec(text: str) -> None:
    first = server.TextDelta(
        event_id="", response_id="r\\", output_index=1, item_id='i"', content_index=0, delta=""
    )
    event = msgspec.structs.replace(first, event_id="event_1-2-3-4", delta=text)
    assert DeltaFrames(first).frame("event_1-2-3-4", text) == codec.encode(event)
