"""Requests that are decided on when they come: which, with what answer, and the places of those let in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from holdfast.gateway.access.admission import TURN_ROUTES, Admission
from holdfast.gateway.access.auth import salt_of
from holdfast.gateway.access.turn_queue import Place, TurnQueue
from holdfast.gateway.app import build_app
from holdfast.gateway.net.listener import Refused
from holdfast.gateway.server import bound_socket, reachable
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.tests.gateway.keyed_service import FILE, KeyedService, keyed
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken

pytestmark = pytest.mark.anyio
PEER = ("127.0.0.1", 1)
CHAT = "/v1/chat/completions"
ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "begin"}]}


def request(
    path: str = CHAT,
    key: str = "free",
    *more: str,
    method: str = "POST",
    version: str = "1.1",
    body: bytes = b"{}",
    told: int | None = None,
) -> bytes:
    """``told``: the length that the head says."""
    lines = (
        f"{method} {path} HTTP/{version}",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body) if told is None else told}",
        *more,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def full(queue: TurnQueue, tenant: str = "free") -> None:
    """Let so many turns of the tenant wait that it gets no more."""
    queue.enter(salt_of(tenant))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues know how fast turns start."""
    monkeypatch.setattr(TurnQueue, "seconds_per_start", 7.0)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    settings = GatewaySettings(keys=path, max_queue_seconds=1.0)
    return Service(settings, "scripted", Scripted(spoken, END))


@pytest.fixture
def admission(service: Service) -> Admission:
    return Admission(service.turns, lambda: service.tenants.keys)


def read(answer: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("path", sorted(TURN_ROUTES))
def test_a_refusal_is_the_faces_own(path: str, service: Service, admission: Admission) -> None:
    full(service.turns.queue)
    found = admission.decide(request(path), PEER, close=True)
    assert isinstance(found, Refused) and found.close
    status, headers, body = read(found.answer)
    usual = TestClient(build_app(service)).post(path, headers={"Authorization": "Bearer free"})
    assert status == usual.status_code == (529 if path == "/v1/messages" else 503)
    assert headers["retry-after"] == usual.headers["retry-after"] == "7"
    assert set(headers) == {*usual.headers, "date", "connection"} - {"vary"}
    body.pop("request_id", None)
    assert body == {name: value for name, value in usual.json().items() if name != "request_id"}
    refused = service.turns.metrics.refused
    assert [(key[0], key[2], count) for key, count in refused.items()] == [("free", "engine_overloaded", 2)]
    (asked,) = service.turns.metrics.requests.items()
    assert asked == (("free", path, next(iter(refused))[1], str(status)), 2)
    assert len(service.turns.queue) == 1


def test_a_key_beyond_its_rate_is_told_what_is_left(service: Service, admission: Admission) -> None:
    for _ in range(3):
        place = admission.decide(request(key="alpha"), PEER, close=True)
        assert isinstance(place, Place)
        place.abandon()
        keys = service.tenants.keys
        assert keys is not None
        service.turns.rates.admit(keys.digests_of("alpha")[0], salt_of("acme"))
    found = admission.decide(request(key="alpha"), PEER, close=True)
    assert isinstance(found, Refused)
    status, headers, body = read(found.answer)
    assert status == 429 and headers["retry-after"] == "20"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert body["error"]["code"] == "rate_limit_exceeded"


def test_a_tenant_is_not_refused_for_anothers_queue(service: Service, admission: Admission) -> None:
    full(service.turns.queue, "zenith")
    assert isinstance(admission.decide(request(), PEER, close=True), Place)
    assert isinstance(admission.decide(request(key="gamma"), PEER, close=True), Refused)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        request()[:-1],
        request()[:60],
        request(told=3),
        request() + request(),
        request(version="1.0"),
        request("/health", method="GET"),
        request("/ready", method="GET"),
        request("/tokenize"),
        request(method="GET"),
        request(key="unknown"),
        request(CHAT, "free", "Origin: https://app.example.com"),
        request(CHAT, "free", "Transfer-Encoding: chunked"),
        request(CHAT, "free", "Upgrade: h2c"),
        request(CHAT, "free", "X-Two: of them\n\nPOST / HTTP/1.1"),
        request(f"{CHAT}?a HTTP/1.1\nContent-Length: 2\n\n{{}}"),
    ],
)
def test_nothing_else_is_decided_on(sent: bytes, service: Service, admission: Admission) -> None:
    full(service.turns.queue)
    assert admission.decide(sent, PEER, close=True) is None
    assert len(service.turns.queue) == 1


def test_what_waits_for_an_engine_that_loads_has_no_place(
    service: Service, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TurnQueue, "seconds_per_start", 0.0)
    assert admission.decide(request(), PEER, close=True) is None
    assert len(service.turns.queue) == 0


def test_the_prefix_of_a_proxy_does_not_matter(service: Service) -> None:
    admission = Admission(service.turns, lambda: service.tenants.keys, "/holdfast")
    full(service.turns.queue)
    for path in (f"/holdfast{CHAT}?beta=true", CHAT):
        assert isinstance(admission.decide(request(path), PEER, close=True), Refused)


def test_a_client_may_keep_its_connection(service: Service, admission: Admission) -> None:
    full(service.turns.queue)
    for more, close in ((), False), (("Connection: close",), True):
        found = admission.decide(request(CHAT, "free", *more), PEER, close=False)
        assert isinstance(found, Refused) and found.close is close
        assert read(found.answer)[1].get("connection") == ("close" if close else None)


# --- on a real socket -----------------------------------------------------------------------------------


class Dialled:
    """A server on a scripted engine, and its address."""

    def __init__(self, served: KeyedService, host: str, port: int) -> None:
        self.served = served
        self.queue = served.service.turns.queue
        self.address = host, port

    async def ask(self, sent: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *lines = head.decode().lower().split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 (what it watches has no event)
            await asyncio.sleep(0)


@asynccontextmanager
async def dialled(folder: Path) -> AsyncIterator[Dialled]:
    async with keyed(folder, port=0, max_queue_seconds=1.0) as served:
        with bound_socket(served.service.settings) as sock:
            host, port = sock.getsockname()
            async with reachable(served.service, sock):
                yield Dialled(served, host, port)


async def test_probes_and_running_replies_go_on_while_turns_are_refused(tmp_path: Path) -> None:
    async with dialled(tmp_path) as on:
        on.served.link.flowing = False
        running = asyncio.ensure_future(on.ask(request(body=json.dumps(ASKED).encode())))
        await on.until(lambda: on.served.begun > 0)
        begun, sessions = on.served.begun, len(on.served.service.sessions())
        for _ in range(3):
            status, headers, body = await on.ask(request(body=json.dumps(ASKED).encode()))
            assert status == 503 and headers["retry-after"] == "7" and b"engine_overloaded" in body
        assert (await on.ask(request("/health", method="GET")))[0] == 200
        assert (await on.ask(request("/ready", method="GET")))[0] == 200
        assert (await on.ask(request(key="gamma", body=b"rubbish")))[0] == 400, "another tenant"
        assert on.served.begun == begun and len(on.served.service.sessions()) == sessions
        on.served.link.flow()
        assert (await running)[0] == 200
        await on.until(lambda: len(on.queue) == 0)
        assert (await on.ask(request(body=json.dumps(ASKED).encode())))[0] == 200


async def test_a_request_that_is_not_whole_is_refused_before_its_body_has_come(tmp_path: Path) -> None:
    async with dialled(tmp_path) as on:
        full(on.queue)
        status, headers, body = await on.ask(request(told=1 << 20))
        assert status == 503 and headers["retry-after"] == "7" and b"engine_overloaded" in body


async def test_a_kept_connection_is_served_after_its_refusal(tmp_path: Path) -> None:
    async with dialled(tmp_path) as on:
        reader, writer = await asyncio.open_connection(*on.address)

        async def ask(sent: bytes) -> bytes:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            (told,) = (line for line in lines if line.startswith(b"content-length: "))
            await reader.readexactly(int(told.partition(b" ")[2]))
            return head

        assert (await ask(request("/version", method="GET", body=b""))).startswith(b"HTTP/1.1 200")
        full(on.queue)
        head = await ask(request(body=json.dumps(ASKED).encode()))
        assert head.startswith(b"HTTP/1.1 503") and b"x-request-id: req_" in head
        on.queue.leave(salt_of("free"))
        assert (await ask(request(body=json.dumps(ASKED).encode()))).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_request_waits_from_when_it_comes_and_a_turn_has_one_place(tmp_path: Path) -> None:
    lengths = []

    class Watched(TurnQueue):
        def enter(self, salt: bytes) -> None:
            super().enter(salt)
            lengths.append(len(self))

    async with dialled(tmp_path) as on:
        on.queue = on.served.service.turns.queue = Watched(1.0)
        status, _, _ = await on.ask(request(body=json.dumps(ASKED).encode()))
        assert status == 200 and lengths == [1] and len(on.queue) == 0
        for sent in (b"rubbish", b'{"model": "another", "messages": []}'):
            assert (await on.ask(request(body=sent)))[0] in (400, 404)
        assert lengths == [1, 1, 1], "these had a place until they were answered"
        assert (await on.ask(request(CHAT, "free", "not a header", body=b"{}")))[0] == 400
        assert lengths == [1, 1, 1, 1]
        await on.until(lambda: len(on.queue) == 0)
        on.served.link.flowing = False
        _, writer = await asyncio.open_connection(*on.address)
        writer.write(request(body=json.dumps({**ASKED, "stream": True}).encode()))
        await on.until(lambda: len(on.queue) == 1 and on.served.begun > 1)
        writer.transport.abort()
        await on.until(lambda: len(on.queue) == 0)


async def test_a_reply_in_the_background_waits_on_after_its_answer(tmp_path: Path) -> None:
    async with dialled(tmp_path) as on:
        on.served.link.flowing = False
        body = {"model": "scripted", "input": "begin", "background": True}
        status, _, _ = await on.ask(request("/v1/responses", body=json.dumps(body).encode()))
        assert status == 200
        await on.until(lambda: on.served.begun > 0)
        assert len(on.queue) == 1
        on.served.link.flow()
        await on.until(lambda: len(on.queue) == 0)
