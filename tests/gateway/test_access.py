"""The guard: with a key every route but the probes asks for it; without one foreign pages may not connect."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.gateway.access import Guard

pytestmark = pytest.mark.anyio
ROUTES = ["/v1/realtime", "/v1/models", "/v1/models/pocket", "/metrics", "/version", "/anything"]


async def answered(guard: Guard, kind: str, path: str, headers: Iterable[tuple[str, str]] = ()) -> int:
    """The status that the guard answers, or 200 where it lets the request through."""
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def receive() -> dict:
        raise AssertionError("the guard reads nothing")

    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    await guard({"type": kind, "path": path, "headers": raw}, receive, send)
    return sent[0]["status"]


async def let_in(scope: dict, receive: object, send) -> None:
    await send({"type": "http.response.start", "status": 200})


KEYED = Guard(let_in, "s3cret")
OPEN = Guard(let_in, None)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_key_guards_every_route(kind: str, path: str) -> None:
    assert await answered(KEYED, kind, path) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Bearer wrong")]) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Basic s3cret")]) == 401
    assert await answered(KEYED, kind, path, [("Authorization", "Bearer s3cret")]) == 200
    assert await answered(KEYED, kind, path, [("authorization", "bearer  s3cret")]) == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(path: str) -> None:
    assert await answered(KEYED, "http", path) == 200


async def test_a_key_in_letters_beyond_ascii_is_compared_too() -> None:
    guard = Guard(let_in, "schlüssel")
    assert await answered(guard, "http", "/version", [("Authorization", "Bearer schluessel")]) == 401


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.example", 403), ("http://127.0.0.1:8040", 200), ("null", 403)]
)
async def test_without_a_key_only_its_own_pages_may_connect(origin: str, status: int) -> None:
    headers = [("Host", "127.0.0.1:8040"), ("Origin", origin)]
    assert await answered(OPEN, "websocket", "/v1/realtime", headers) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example:8040", 403), ("localhost:8040", 200), ("[::1]:8040", 200), ("10.0.0.7", 200)],
)
async def test_a_page_that_points_its_own_name_here_may_not_connect(host: str, status: int) -> None:
    headers = [("Host", host), ("Origin", f"http://{host}")]
    assert await answered(OPEN, "websocket", "/v1/realtime", headers) == status


async def test_without_a_key_programs_may_connect() -> None:
    assert await answered(OPEN, "websocket", "/v1/realtime", [("Host", "127.0.0.1:8040")]) == 200
