"""What clients are told while the engine loads: HTTP requests wait a while, and a refusal names the phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from holdfast.gateway.app import build_app
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link.messages import Heartbeat, Phase
from holdfast.sdk.errors import ConnectionFailed
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "scripted", "messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": SAID},
    "/v1/conversations": {},
    "/tokenize": {"prompt": "Hi"},
}
COMPILING = Heartbeat(Phase.COMPILING, 300.0, "compiling decoding", 0.5)


class Loading(Scripted):
    """An engine that compiles."""

    ready, phase, heartbeat = False, Phase.COMPILING, COMPILING


class Watched(Service):
    """Tells when a request begins to wait for the engine."""

    async def loaded(self, seconds: float | None = None) -> None:
        waiting = asyncio.ensure_future(super().loaded(seconds))
        await asyncio.sleep(0)  # it waits from then on
        self.waits.set()
        await waiting

    waits: asyncio.Event


@asynccontextmanager
async def loading(seconds: float) -> AsyncIterator[tuple[Watched, httpx2.AsyncClient]]:
    settings = GatewaySettings(loading_seconds=seconds, handshake_seconds=seconds)
    service = Watched(settings, "scripted", Loading(spoken, END))
    service.waits = asyncio.Event()
    transport = httpx2.ASGITransport(app=build_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield service, http
        await service.close()


def open_to(service: Service) -> None:
    """The engine is loaded."""
    service.open(SessionRegistry(Scripted(spoken, END), Language.of(ours("chatml"))))


@pytest.mark.parametrize("path", ASKED)
async def test_a_request_waits_for_the_engine(path: str) -> None:
    async with loading(1e6) as (service, http):
        asked = asyncio.create_task(http.post(path, json=ASKED[path]))
        await service.waits.wait()
        assert (await service.snapshot()).gateway["requests_waiting_for_engine"] == 1 and not asked.done()
        open_to(service)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("path", ASKED)
async def test_a_request_that_waited_too_long_is_told_what_the_engine_does(path: str) -> None:
    async with loading(0.0) as (_, http):
        refused = await http.post(path, json=ASKED[path])
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    error = refused.json()["error"]
    assert (error.get("code") or error["details"]["error_code"]) == "engine_loading"
    assert "compiling kernels (compiling decoding, 50%)" in error["message"]


async def test_what_is_wrong_is_refused_without_waiting() -> None:
    async with loading(1e6) as (_, http):
        for path in ASKED.keys() - {"/v1/conversations"}:
            assert (await http.post(path, content=b"{")).status_code == 400
        other = await http.post("/v1/chat/completions", json={"messages": SAID, "model": "other"})
        assert other.status_code == 404


async def test_a_server_that_gives_up_refuses_what_waits() -> None:
    async with loading(1e6) as (service, http):
        asked = asyncio.create_task(http.post("/v1/completions", json=ASKED["/v1/completions"]))
        await service.waits.wait()
        service.refuse()
        assert (await asked).json()["error"]["code"] == "server_going_away"


async def test_a_socket_waits_for_the_engine() -> None:
    async def talk(service: Service) -> str:
        async with in_memory(service).session(max_output_tokens=3) as chat:
            return await chat.say("Hi").text()

    async with loading(1e6) as (service, _):
        talking = asyncio.create_task(talk(service))
        await service.waits.wait()
        open_to(service)
        assert await talking


async def test_a_socket_that_waited_too_long_is_refused_with_the_phase() -> None:
    async with loading(0.0) as (service, _):
        with pytest.raises(ConnectionFailed, match="compiling kernels"):
            async with in_memory(service).session():
                pass
