"""The app's layers around an open WebSocket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from holdfast.gateway import app
from holdfast.gateway.net.proxy import BehindProxy
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

GREETING = {"/v1/realtime": {}, "/v1/responses": {"type": "nonsense"}}
"""The WebSockets, and what a client sends to be told something."""


@pytest.fixture
def layered(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, list[str]]]:
    """A client, and the types of the requests that all layers but the outermost one have returned from."""
    link = Scripted(spoken, END, ahead=1)
    service = Service(GatewaySettings(), "pocket", link)
    returned = list[str]()

    class Watched(BehindProxy):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            returned.append(scope["type"])

    monkeypatch.setattr(app, "BehindProxy", Watched)
    with TestClient(app.build_app(service), base_url="http://localhost") as client:
        service.open(SessionRegistry(link, Language.of(ours("chatml"))))
        yield client, returned


@pytest.mark.parametrize("path", GREETING)
def test_an_open_socket_is_served_when_all_other_layers_have_returned(
    layered: tuple[TestClient, list[str]], path: str
) -> None:
    client, returned = layered
    with client.websocket_connect(path, headers={"host": "localhost"}) as socket:
        if sent := GREETING[path]:
            socket.send_json(sent)
        assert "type" in socket.receive_json()
        assert returned == ["websocket"]


def test_what_is_no_socket_passes_through(layered: tuple[TestClient, list[str]]) -> None:
    client, returned = layered
    assert client.get("/health").status_code == 200
    assert returned == ["http"]
