"""A client or a session that is used without `async with`, or `with`, says what to write."""

from __future__ import annotations

import copy

import pytest

from holdfast.sdk import NotEntered, SDKError, ToolInvalid, connect, sync
from holdfast.sdk.client import Client

pytestmark = pytest.mark.anyio


def offline() -> Client:
    async def dial(model: str | None) -> None:
        raise AssertionError("nothing is dialled")

    return Client(dial)


@pytest.mark.parametrize(
    ("use", "written"),
    [
        (lambda: connect("ws://127.0.0.1:1").session(), "async with connect(...) as client:"),
        (lambda: offline().session().say("Hello!"), "async with client.session(...) as chat:"),
        (lambda: offline().resume("hold_1").handle, "async with client.resume(handle) as chat:"),
        (lambda: connect("ws://127.0.0.1:1").__enter__(), "async with connect(...) as client:"),
        (lambda: sync.connect("ws://127.0.0.1:1").session(), "with connect(...) as client:"),
    ],
)
def test_what_is_not_opened_says_what_to_write(use, written: str) -> None:
    with pytest.raises(NotEntered) as caught:
        use()
    assert isinstance(caught.value, SDKError) and f"`{written}`" in str(caught.value)
    assert "\n" not in caught.value.message


async def test_awaiting_it_says_so_too() -> None:
    with pytest.raises(NotEntered, match="async with connect"):
        await connect("ws://127.0.0.1:1")  # type: ignore[misc]
    with pytest.raises(NotEntered, match=r"`with connect"):
        async with sync.connect("ws://127.0.0.1:1"):  # type: ignore[attr-defined]
            pass
    with pytest.raises(NotEntered, match="async with connect"), connect("ws://127.0.0.1:1"):  # type: ignore
        pass


def test_it_can_be_asked_what_it_has_and_be_copied() -> None:
    opening = connect("ws://127.0.0.1:1")
    assert not hasattr(opening, "session") and hasattr(opening, "__aenter__")
    assert type(copy.copy(opening)) is type(opening)


async def test_wrong_tools_are_told_before_a_session_is_opened_again() -> None:
    async def dial(model: str | None) -> None:
        raise AssertionError("nothing is dialled")

    with pytest.raises(ToolInvalid):
        async with Client(dial, redial=dial).resume("hold_1", tools=[{"type": "function"}]):  # type: ignore
            pass
