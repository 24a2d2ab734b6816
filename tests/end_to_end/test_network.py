"""A server on a network: names, operators, TLS with an authority of its own, a prefix, and a real nginx."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import trustme
from websockets.exceptions import InvalidStatus

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings, Network
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import ConnectionFailed, connect
from holdfast.tests import threaded

from .wires import get, wire

pytestmark = pytest.mark.anyio
EXAMPLE = Path(__file__).resolve().parent.parent.parent / "gateway" / "deploy" / "nginx.conf.example"
OPERATED = """
[operators]
keys = ["root"]

[tenants.acme]
keys = ["alpha"]

[tenants.zenith]
keys = ["beta"]
sessions = 5
"""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """A client's context that trusts the authority, and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


async def secured_get(url: str, path: str, context: ssl.SSLContext, **headers: str) -> int:
    """The status of a GET with TLS."""

    def ask() -> int:
        connection = http.client.HTTPSConnection(urlsplit(url).netloc, timeout=60, context=context)
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/models", "/v1/models/pocket", "/version", "/ready", "/health"]
)
async def test_a_page_that_points_its_name_here_reads_nothing(server: Serving, path: str) -> None:
    status, body = await get(server.url, path, Host="evil.com")
    assert status == 403 and "host_not_allowed" in body and "--allowed-host" in body
    assert (await get(server.url, path, Host="localhost:1234"))[0] == 200


async def test_a_page_that_points_its_name_here_opens_no_socket(server: Serving) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with wire(server.url.replace("127.0.0.1", "evil.com"), host="127.0.0.1"):
            pass
    assert refused.value.response.status_code == 403


async def test_totals_are_the_operators_and_tenants_see_their_own(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(OPERATED)
    async with serving(GatewaySettings(port=0, keys=keys), pocket) as running:
        async with connect(running.url, api_key="beta") as client, client.session() as chat:
            assert await chat.say("My name is Marisol.").text()
            told = {
                key: (await get(running.url, "/metrics", Authorization=f"Bearer {key}"))[1]
                for key in ("root", "alpha", "beta")
            }
        assert "holdfast_engine_steps_total" in told["root"] and "holdfast_sockets 1.0" in told["root"]
        for key, name, count in (("alpha", "acme", 0.0), ("beta", "zenith", 1.0)):
            samples = [line for line in told[key].splitlines() if not line.startswith("#")]
            assert f'holdfast_tenant_used{{of="sessions",tenant="{name}"}} {count}' in samples
            assert all(line.startswith(("holdfast_ready ", "holdfast_tenant_")) for line in samples), samples
            assert all(f'tenant="{name}"' in line for line in samples[1:])
        with pytest.raises(ConnectionFailed, match="401"):
            async with connect(running.url, api_key="root") as client, client.session():
                pass


@asynccontextmanager
async def secured(
    folder: Path, authority: trustme.CA, engine: EngineSettings, **fields: object
) -> AsyncIterator[tuple[Serving, Network]]:
    """A server with a certificate of the authority in this folder."""
    certificate, key = folder / "server.crt", folder / "server.key"
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    network = Network(certificate=certificate, private_key=key)
    async with threaded.serving(GatewaySettings(port=0, network=network, **fields), engine) as running:
        yield running, network


async def test_a_session_over_tls_with_an_authority_of_ones_own(
    tmp_path: Path, pocket: EngineSettings, authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    async with secured(tmp_path, authority, pocket) as (running, network):
        assert running.url.startswith("https://127.0.0.1:")
        async with connect(running.url, ssl=trusting) as client, client.session() as chat:
            await chat.say("My name is Marisol.").text()
            assert "Marisol" in await chat.say("What is my name?").text()
            with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
                async with connect(running.url) as strangers, strangers.session():
                    pass
            plain = running.url.replace("https", "http")
            with pytest.raises(http.client.HTTPException):
                await get(plain, "/ready")
            # a certificate that is renewed is taken up; one that is broken is not, and says so
            other = trustme.CA()
            issued = other.issue_cert("127.0.0.1")
            assert network.certificate is not None and network.private_key is not None
            before = network.private_key.read_bytes()
            issued.private_key_pem.write_to_path(network.private_key)
            with pytest.raises(Exception, match="no usable pair"):
                await running.reload()
            network.private_key.write_bytes(before)
            assert await secured_get(running.url, "/ready", trusting) == 200
            issued.private_key_pem.write_to_path(network.private_key)
            issued.cert_chain_pems[0].write_to_path(network.certificate)
            await running.reload()
            renewed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            other.configure_trust(renewed)
            assert await secured_get(running.url, "/ready", renewed) == 200
            assert "Marisol" in await chat.say("What is my name?").text(), "open sockets stay"


async def test_below_a_prefix_all_routes_work_with_it_and_without(pocket: EngineSettings) -> None:
    network = Network(root_path="/holdfast")
    async with threaded.serving(GatewaySettings(port=0, network=network, api_key="k"), pocket) as running:
        for prefix in ("", "/holdfast"):
            for path in ("/health", "/ready"):
                assert (await get(running.url, prefix + path))[0] == 200
            for path in ("/v1/models", "/v1/models/pocket", "/metrics", "/version"):
                assert (await get(running.url, prefix + path))[0] == 401
                assert (await get(running.url, prefix + path, Authorization="Bearer k"))[0] == 200
            assert (await get(running.url, f"{prefix}/nothing", Authorization="Bearer k"))[0] == 404
            async with connect(running.url + prefix, api_key="k") as client, client.session() as chat:
                assert await chat.say("My name is Marisol.").text()


@contextmanager
def nginx(folder: Path, authority: trustme.CA, upstream: str) -> Iterator[int]:
    """A real nginx with the example's text, but for its two ports; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = EXAMPLE.read_text()
    for told, here in (("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"), ("127.0.0.1:8040", upstream)):
        assert text.count(f"{told};") == 1
        text = text.replace(f"{told};", f"{here};")
    (folder / "holdfast.conf").write_text(text)
    issued = authority.issue_cert("127.0.0.1", "localhost", "chat.example.com")
    issued.cert_chain_pems[0].write_to_path(folder / "holdfast.crt")
    issued.private_key_pem.write_to_path(folder / "holdfast.key")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log {folder}/errors; events {{}}\n"
        # Bodies stay in memory: nginx's workers are another user, which cannot write into the test's folder.
        f"http {{ access_log off; client_body_buffer_size 4m; {temporary} include holdfast.conf; }}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # returns when it listens
    assert done.returncode == 0, done.stderr
    try:
        yield port
    finally:
        subprocess.run([*command, "-s", "stop"], check=True)


async def stream_and_long_body(url: str, trusting: ssl.SSLContext, running: Serving) -> None:
    """A stream's events pass while the reply is written, and so does a body of more than nginx's own 1 MB."""
    asked = {"model": "pocket", "messages": [{"role": "user", "content": "Tell me the story of the fox."}]}
    async with httpx2.AsyncClient(verify=trusting, base_url=url) as client:
        async with client.stream("POST", "v1/chat/completions", json={**asked, "stream": True}) as answer:
            events = answer.aiter_lines()
            assert (await anext(events)).startswith("data: ")
            numbers = (await running.service.snapshot()).gateway
            assert numbers["responses_running"] == 1, "the first event comes before the reply's end"
            *_, last, _ = [line async for line in events]
            assert last == "data: [DONE]"
        long = {**asked, "max_tokens": 4, "metadata": {"note": "x" * (2 << 20)}}
        assert (await client.post("v1/chat/completions", json=long)).status_code == 200


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_the_nginx_example_carries_a_session(
    tmp_path: Path, pocket: EngineSettings, authority: trustme.CA, trusting: ssl.SSLContext
) -> None:
    network = Network(
        root_path="/holdfast", trusted_proxies=("127.0.0.1",), allowed_hosts=("chat.example.com",)
    )
    async with threaded.serving(GatewaySettings(port=0, network=network), pocket) as running:
        with nginx(tmp_path, authority, urlsplit(running.url).netloc) as port:
            url = f"https://localhost:{port}/holdfast/"
            async with connect(url, ssl=trusting) as client, client.session() as chat:
                await chat.say("My name is Marisol.").text()
                pieces = [piece async for piece in chat.say("Tell me the story of the fox.")]
                assert len(pieces) > 5
                assert "Marisol" in await chat.say("What is my name?").text()
            await stream_and_long_body(url, trusting, running)
            for path in ("health", "ready", "v1/models", "metrics", "version"):
                assert await secured_get(url, f"/holdfast/{path}", trusting) == 200
                assert await secured_get(url, f"/holdfast/{path}", trusting, Host="chat.example.com") == 200
                assert await secured_get(url, f"/holdfast/{path}", trusting, Host="evil.com") == 403
            address, options = url.rstrip("/"), {"ssl": trusting, "local_addr": ("127.0.0.2", 0)}
            async with wire(address.replace("localhost", "127.0.0.1"), **options):
                (socket,) = running.service._sockets.values()
                assert socket.client.address == "127.0.0.2"
