"""What a browser asks before a page may read an answer or open a socket, and what it needs to be told.

https://fetch.spec.whatwg.org/#http-cors-protocol, https://websockets.spec.whatwg.org
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.gateway.app import build_app
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings, Network
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted

pytestmark = pytest.mark.anyio
PAGE = "https://app.example.com"


def app_of(**settings: Any) -> Any:
    link = Scripted(lambda tokens: WORDS[len(tokens) % len(WORDS)], END, ahead=1)
    return build_app(Service(GatewaySettings(**settings), "scripted", link))


async def asked(app: Any, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request from a page."""
    told: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = {"host": "127.0.0.1:8040", **{name.replace("_", "-"): text for name, text in headers.items()}}
    raw = [(name.lower().encode(), text.encode()) for name, text in given.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": raw,
        "query_string": b"",
        "root_path": "",
    }
    scope |= {
        "scheme": "http",
        "server": ("127.0.0.1", 8040),
        "client": ("127.0.0.1", 5),
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    answer = {name.decode().lower(): text.decode() for name, text in told[0]["headers"]}
    return told[0]["status"], answer, b"".join(message.get("body", b"") for message in told[1:])


PREFLIGHT = {"Access_Control_Request_Method": "GET", "Access_Control_Request_Headers": "authorization"}


async def test_a_page_with_a_key_may_ask_and_read() -> None:
    """Its preflight has no key: a browser sends none."""
    app = app_of(api_key="s3cret")
    status, headers, _ = await asked(app, "OPTIONS", "/v1/models", Origin=PAGE, **PREFLIGHT)
    assert status == 200 and headers["access-control-allow-origin"] == "*"
    assert "authorization" in headers["access-control-allow-headers"].lower()
    status, headers, body = await asked(app, "GET", "/v1/models", Origin=PAGE, Authorization="Bearer s3cret")
    assert status == 200 and headers["access-control-allow-origin"] == "*" and b"scripted" in body
    status, headers, body = await asked(app, "GET", "/v1/models", Origin=PAGE)
    assert status == 401 and headers["access-control-allow-origin"] == "*", "a page can read why"
    assert json.loads(body)["error"]["code"] == "invalid_api_key"


async def test_without_keys_only_pages_of_allowed_origins_may_read() -> None:
    app = app_of(network=Network(allowed_origins=(PAGE,)))
    status, headers, _ = await asked(app, "OPTIONS", "/v1/models", Origin=PAGE, **PREFLIGHT)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    status, headers, _ = await asked(app, "GET", "/v1/models", Origin=PAGE)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    for open_to in (app, app_of()):
        for method in ("OPTIONS", "GET"):
            status, headers, _ = await asked(
                open_to, method, "/v1/models", Origin="https://evil.example", **PREFLIGHT
            )
            assert status in (400, 403) and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("method", "path", "status", "served"),
    [
        ("POST", "/v1/models", 405, "/v1/models has GET"),
        ("GET", "/v1/chat", 404, "/v1/chat/completions"),
        ("POST", "/chat/completions", 404, "POST /v1/chat/completions"),
        ("POST", "/v1/message", 404, "POST /v1/messages,"),
        ("GET", "/v1/realtim", 404, "the WebSocket /v1/realtime"),
        ("GET", "/v1/conversations/a/item", 404, "GET or POST /v1/conversations/{conversation_id}/items"),
        ("GET", "/" + "v" * 5000, 404, "/v1/"),
    ],
)
async def test_a_page_can_read_what_is_served_instead(
    method: str, path: str, status: int, served: str
) -> None:
    told = await asked(app_of(api_key="s3cret"), method, path, Origin=PAGE, Authorization="Bearer s3cret")
    assert told[0] == status and told[1]["access-control-allow-origin"] == "*"
    message = json.loads(told[2])["error"]["message"]
    assert served in message and len(message) < 600
    assert status == 405 or message.count(" /v1/") + message.count("POST /to") <= 4, "three, not all"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, HEAD"),
        ("/v1/chat/completions", "POST"),
        ("/v1/conversations/conv_1", "DELETE, GET, HEAD, POST"),
        ("/v1/messages", "POST"),
        ("/v1/realtime", "GET, HEAD"),
    ],
)
async def test_a_refused_method_is_told_the_allowed_ones(path: str, allowed: str) -> None:
    status, headers, _ = await asked(app_of(), "PATCH", path)
    assert (status, headers["allow"]) == (405, allowed)
