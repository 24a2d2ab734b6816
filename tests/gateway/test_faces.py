"""A second face stands beside Realtime: it needs `Face`, `SessionFace` and a `LiveSession`, and no frames."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.live.session import LiveSession
from holdfast.gateway.live.sessions import LiveSessions
from holdfast.gateway.realtime.session import RealtimeFace
from holdfast.gateway.settings import ClientLimits
from holdfast.sessions.conversation.items import Message
from holdfast.sessions.errors import HandleUnknown, StorageUnavailable
from holdfast.sessions.registry import Reopened, SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.text.language import Language
from holdfast.sessions.turn.request import TurnRequest
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio


class PlainSession:
    """`SessionFace`: the text of the turns that ran."""

    def __init__(self, session: Session) -> None:
        self.live = LiveSession(session, self)
        self.text = ""
        self.over = asyncio.Event()
        self.detached = False

    async def tell(self, response: object, event: object) -> None:
        self.text += getattr(event, "text", "")

    def ended(self, response: object, error: Exception | None) -> None:
        assert error is None
        self.over.set()

    def detach(self) -> None:
        self.detached = True

    def alarm(self, fault: StorageUnavailable) -> None: ...

    def recovered(self, lost_seconds: float) -> None: ...

    def going_away(self, seconds: float) -> None: ...

    async def flushed(self) -> None: ...

    def child_config(self) -> bytes:
        return b""

    def fork(self, session: Session, config: bytes) -> LiveSession:
        return PlainSession(session).live


class PlainFace:
    """`Face`."""

    adapter = None

    def config(self) -> bytes:
        return b""

    def begin(self, session: Session, config: bytes) -> LiveSession:
        return PlainSession(session).live

    def reopen(self, reopened: Reopened, caller: TurnCaller) -> LiveSession:
        return PlainSession(reopened.session).live


class PlainConnection:
    """`SessionConnection`."""

    caller = TurnCaller()

    def taken(self, why: Exception) -> None: ...


async def test_a_face_without_frames_runs_turns_forks_and_leaves() -> None:
    link = Scripted(lambda tokens: END if len(tokens) % 7 == 0 else WORDS[len(tokens) % len(WORDS)], END)
    sessions = LiveSessions(SessionRegistry(link, Language.of(ours("chatml"))), ClientLimits())
    connection = PlainConnection()
    live = sessions.open(PlainFace(), connection, b"")
    side = live.face
    assert isinstance(side, PlainSession)
    live.session.history.insert(Message(id="u1", role="user", text="Hello!"), None)
    live.run(live.session.respond(TurnRequest.checked()))
    await side.over.wait()
    await live.idle()
    (answer,) = (item for item in live.session.history.items() if item.id != "u1")
    assert isinstance(answer, Message) and side.text == answer.text != ""
    (child,) = await sessions.fork(live, 1, None)
    assert isinstance(child.face, PlainSession) and len(child.session.history) == 2
    with pytest.raises(HandleUnknown):
        RealtimeFace.side_of(live)
    sessions.left(live, connection)
    assert side.detached and len(sessions) == 1, "only the fork waits for a client"
    await sessions.aclose()
