"""The client without `async`: Ctrl-C at any point of a reply, and reading on after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from holdfast.sdk.chat import Chat
from holdfast.sdk.sync import SyncChat

from .scripted import Script, chatting


class StruckPortal:
    """A portal in which Ctrl-C comes when the next task was handed to the event loop: ``before`` its future is
    returned, or while the thread waits for the result."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self.strike = ""

    def start_task_soon(self, act: Callable[..., Any], *args: object) -> Future[Any]:
        strike, self.strike = self.strike, ""
        future: Future[Any] = self._portal.start_task_soon(act, *args)
        if strike == "before":
            raise KeyboardInterrupt
        if strike == "waiting":
            return StruckFuture(future)  # type: ignore[return-value]
        return future

    def call(self, act: Callable[..., Any], *args: object) -> Any:
        return self.start_task_soon(act, *args).result()


class StruckFuture:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self) -> Any:
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


@pytest.fixture
def portal() -> Iterator[StruckPortal]:
    with start_blocking_portal() as portal:
        yield StruckPortal(portal)


def chat_of(portal: StruckPortal, script: Script) -> Any:
    return portal._portal.wrap_async_context_manager(chatting(script))


@pytest.mark.parametrize("strike", ["before", "waiting"])
def test_a_reply_is_cancelled_and_read_on_after_ctrl_c(portal: StruckPortal, strike: str) -> None:
    script = Script(None)
    with chat_of(portal, script) as opened:
        chat: SyncChat = SyncChat(portal, opened)  # type: ignore[arg-type]
        reply = chat.say("Go")
        assert next(reply) == "Once "
        portal.strike = strike
        with pytest.raises(KeyboardInterrupt):
            next(reply)
        chat.cancel()
        assert list(reply) == ["upon"]
        assert chat.last.status == "cancelled"


@pytest.mark.parametrize("strike", ["before", "waiting"])
def test_no_piece_is_lost_by_ctrl_c(portal: StruckPortal, strike: str) -> None:
    with chat_of(portal, Script(["a|b|c|d|e|f|g"])) as opened:
        reply = SyncChat(portal, opened).say("Go")  # type: ignore[arg-type]
        read = []
        for number in range(20):
            portal.strike = strike if number % 2 else ""
            try:
                read.append(next(reply))
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        assert "".join(read) == "abcdefg"


@pytest.mark.parametrize("strike", ["before", "waiting"])
def test_a_reply_that_ctrl_c_left_gives_way_to_the_next(portal: StruckPortal, strike: str) -> None:
    with chat_of(portal, Script(None, ["new"])) as opened:
        left: Chat = opened
        chat = SyncChat(portal, left)  # type: ignore[arg-type]
        reply = chat.say("Go")
        assert next(reply) == "Once "
        portal.strike = strike
        with pytest.raises(KeyboardInterrupt):
            next(reply)
        assert chat.say("Again").finish().text == "new"
