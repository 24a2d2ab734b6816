"""What a request looks like behind a proxy: headers of trusted proxies alone, and the prefix put right."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.gateway.net.proxy import BehindProxy
from holdfast.gateway.settings import Network

pytestmark = pytest.mark.anyio
TRUSTING = Network(trusted_proxies=("10.0.0.0/8", "::1"))


async def passed(
    network: Network, peer: str = "10.1.2.3", path: str = "/ready", **headers: str
) -> dict[str, Any]:
    """The scope that the application gets."""
    seen: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: object, send: object) -> None:
        seen.append(scope)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "websocket",
        "scheme": "ws",
        "client": (peer, 4711),
        "headers": raw,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
    }
    await BehindProxy(app, network)(scope, None, None)
    return seen[0]


FORWARDED = {
    "host": "127.0.0.1:8040",
    "x_forwarded_for": "203.0.113.9, 10.9.9.9",
    "x_forwarded_proto": "https",
    "x_forwarded_host": "localhost, chat.example.com",
}


@pytest.mark.parametrize("peer", ["10.1.2.3", "::1"])
async def test_a_trusted_proxy_tells_client_scheme_and_host(peer: str) -> None:
    scope = await passed(TRUSTING, peer, **FORWARDED)
    assert scope["client"][0] == "203.0.113.9" and scope["scheme"] == "wss"
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    assert hosts == [b"chat.example.com"], "the last: what stands before it a client may have sent"


@pytest.mark.parametrize(
    ("network", "peer"), [(TRUSTING, "11.1.2.3"), (TRUSTING, "::2"), (Network(), "10.1.2.3")]
)
async def test_headers_of_an_untrusted_peer_do_not_count(network: Network, peer: str) -> None:
    scope = await passed(network, peer, **FORWARDED)
    assert scope["client"] == (peer, 4711) and scope["scheme"] == "ws"
    assert [value for name, value in scope["headers"] if name == b"host"] == [b"127.0.0.1:8040"]


@pytest.mark.parametrize("path", ["/v1/models", "/holdfast/v1/models"])
async def test_the_prefix_may_be_stripped_or_kept(path: str) -> None:
    scope = await passed(Network(root_path="/holdfast"), path=path)
    assert (scope["root_path"], scope["path"]) == ("/holdfast", "/holdfast/v1/models")
    assert scope["raw_path"] == b"/holdfast/v1/models"


async def test_a_path_that_only_begins_like_the_prefix_is_another() -> None:
    scope = await passed(Network(root_path="/hold"), path="/holdfast")
    assert scope["path"] == "/hold/holdfast"
