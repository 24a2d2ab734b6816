"""One live session: requests in order, turns that tell its face, leaving and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.gateway.live.session import LiveSession
from holdfast.sessions.errors import StorageUnavailable
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.session import Session
from holdfast.sessions.turn.events import EndReason, ReplyDone, ReplyEvent, ReplyStatus, ReplyTextDelta
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.response import TurnResponse
from holdfast.tests.sessions.session_stage import reciting, say, session_on

pytestmark = pytest.mark.anyio

TEXT = "A reply of some words, long enough to be cut."


class Listener:
    """A session's face: it notes what it is told, and may make the turns wait."""

    def __init__(self) -> None:
        self.events: list[ReplyEvent] = []
        self.calls: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails: Exception | None = None
        self.on_end: Callable[[], None] = lambda: None

    async def tell(self, response: TurnResponse, event: ReplyEvent) -> None:
        if self.fails is not None:
            raise self.fails
        self.events.append(event)
        await self.open.wait()

    def tell_now(self, response: TurnResponse, event: ReplyTextDelta) -> bool:
        return False

    def ended(self, response: TurnResponse, error: Exception | None) -> None:
        self.calls.append("ended" if error is None else f"ended: {error}")
        self.on_end()

    def detach(self) -> None:
        self.calls.append("detach")

    def alarm(self, fault: StorageUnavailable) -> None: ...

    def recovered(self, lost_seconds: float) -> None: ...

    def going_away(self, seconds: float) -> None:
        self.calls.append("going away")

    async def flushed(self) -> None:
        self.calls.append("flushed")

    def child_config(self) -> bytes:
        return b""

    def fork(self, session: Session, config: bytes) -> LiveSession:
        raise AssertionError("no session is forked here")

    @property
    def end(self) -> ReplyDone:
        """The last event of the turn."""
        done = self.events[-1]
        assert isinstance(done, ReplyDone)
        return done


def lively(*texts: str) -> tuple[LiveSession, Listener]:
    face = Listener()
    return LiveSession(session_on(reciting(*texts)), face), face


def begin(live: LiveSession, text: str = "Hi") -> TurnResponse:
    say(live.session, text)
    response = live.session.respond(TurnRequest.checked())
    live.run(response)
    return response


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it looks at what has no event
            await asyncio.sleep(0)


async def test_requests_are_served_one_after_the_other() -> None:
    live, _ = lively()
    done: list[str] = []

    def work(name: str, turns: int) -> Callable[[], Any]:
        async def serve() -> None:
            done.append(f"{name} begins")
            for _ in range(turns):
                await asyncio.sleep(0)
            done.append(f"{name} ends")

        return serve

    await asyncio.gather(live.in_order(work("first", 9)), live.in_order(work("second", 1)))
    assert done == ["first begins", "first ends", "second begins", "second ends"]


async def test_a_request_goes_on_when_its_caller_is_cancelled_and_counts_until_then() -> None:
    live, _ = lively()
    gate, done = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        await gate.wait()
        done.set()

    caller = asyncio.create_task(live.in_order(serve))
    await until(lambda: not live.at_rest)
    caller.cancel()
    await asyncio.wait([caller])
    assert not live.at_rest and not done.is_set()
    gate.set()
    await until(lambda: live.at_rest)
    assert done.is_set()


async def test_a_turn_tells_its_face_and_is_over_before_it_is_idle() -> None:
    live, face = lively(TEXT)
    response = begin(live)
    assert live.running == (response,) and not live.at_rest
    waiting = asyncio.create_task(live.idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    await live.wait_ended(response.id)
    await waiting
    assert face.end.status is ReplyStatus.COMPLETED and face.calls == ["ended"]
    assert not live.running and live.at_rest


async def test_a_face_that_raises_ends_this_turn_and_no_other() -> None:
    live, face = lively(TEXT, TEXT)
    face.fails = RuntimeError("broken")
    response = begin(live)
    await live.wait_ended(response.id)
    assert face.calls == ["ended: broken"] and live.at_rest
    face.fails = None
    begin(live, "Again")
    await live.idle()
    assert face.end.status is ReplyStatus.COMPLETED


async def test_a_draining_session_that_cannot_be_resumed_is_cut_and_its_client_has_the_end() -> None:
    live, face = lively(TEXT)
    live.resumable = True  # but its journal is not durable
    face.open.clear()
    begin(live)
    await until(lambda: face.events)
    face.on_end = lambda: face.calls.append("cut")
    draining = asyncio.create_task(live.drain(0.0))
    await until(lambda: "going away" in face.calls)
    assert live.draining
    face.open.set()
    await draining
    assert face.end.status is ReplyStatus.INCOMPLETE and face.end.reason is EndReason.SERVER_LEAVING
    assert face.calls == ["going away", "ended", "cut", "flushed"]


async def test_a_draining_session_in_the_journal_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    live, face = lively(TEXT)
    monkeypatch.setattr(SessionLog, "durable", True)
    live.resumable = True
    face.open.clear()
    response = begin(live)
    await until(lambda: face.events)
    await live.drain(0.0)
    assert live.running == (response,) and face.calls == ["going away", "flushed"]
    await live.aclose()


async def test_a_drain_waits_for_a_turn_that_ends_in_time() -> None:
    live, face = lively(TEXT)
    begin(live)
    await live.drain(30.0)
    assert face.end.status is ReplyStatus.COMPLETED and face.calls == ["going away", "ended", "flushed"]


async def test_closing_ends_turns_requests_and_background_work() -> None:
    live, face = lively(TEXT)
    begun: list[str] = []
    ended: list[str] = []

    async def endless(name: str) -> None:
        begun.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    live.in_background(endless("background"))
    caller = asyncio.create_task(live.in_order(lambda: endless("request")))
    face.open.clear()
    begin(live)
    await until(lambda: face.events and len(begun) == 2)
    assert not live.at_rest
    await live.aclose()
    assert sorted(ended) == ["background", "request"] and live.at_rest
    assert face.calls[0] == "detach"
    await asyncio.wait([caller])
