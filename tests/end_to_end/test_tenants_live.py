"""Two tenants on one server with limits, over real sockets: what one may not have costs the other nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.gateway.server import Serving, serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.disk.admin import accounts
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Client, ServerError, SessionLost, connect

from .wires import LONG, get

pytestmark = pytest.mark.anyio

FILE = """
[tenants.acme]
keys = ["alpha", "beta"]
sessions = 3
kept = 4
turns = 1
leased = "{leased}"
disk = "{disk}"

[tenants.zenith]
keys = ["gamma"]
"""
RECORDS = 8
STORY = "Tell me the story of the fox."


@asynccontextmanager
async def served(folder: Path, engine: EngineSettings) -> AsyncIterator[tuple[Serving, dict[str, Client]]]:
    """A server on the folder's store, and a client for each key."""
    keys, block = folder / "tenants.toml", 65_536
    keys.write_text(FILE.format(leased=f"{3 * block}", disk=f"{RECORDS * block}"))
    settings = GatewaySettings(port=0, keys=keys, store=folder / "store")
    engine = msgspec.structs.replace(
        engine, store=str(folder / "store"), host_bytes=32 << 20, disk_bytes=64 << 20
    )
    async with serving(settings, engine) as running, AsyncExitStack() as stack:
        names = ("alpha", "beta", "gamma")
        clients = [await stack.enter_async_context(connect(running.url, api_key=name)) for name in names]
        yield running, dict(zip(names, clients, strict=True))


async def figures(url: str, key: str) -> dict[tuple[str, str, str], float]:
    """The samples with a tenant's name on them."""
    _, text = await get(url, "/metrics", Authorization=f"Bearer {key}")
    return {
        (
            sample.name.removeprefix("holdfast_tenant_"),
            sample.labels["tenant"],
            sample.labels["of"],
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }


async def test_a_tenant_at_its_limits_is_refused_and_the_other_is_not(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    async with served(tmp_path, pocket) as (running, clients), AsyncExitStack() as stack:
        alpha, beta, gamma = (clients[name] for name in ("alpha", "beta", "gamma"))
        first, second = [await stack.enter_async_context(one.session(temperature=0)) for one in (alpha, beta)]
        stranger = await stack.enter_async_context(gamma.session(temperature=0))
        with pytest.raises(ServerError) as refused:
            await first.fork(2)
        assert refused.value.code == "session_limit_reached"
        (fork,) = await first.fork()
        with pytest.raises(ServerError) as refused:
            await stack.enter_async_context(beta.session())
        assert refused.value.code == "session_limit_reached"

        running_reply = first.say(STORY, **LONG)
        begun = await anext(running_reply)
        with pytest.raises(ServerError) as failed:
            await second.say("Hello!").text()
        assert failed.value.code == "too_many_responses"
        assert await stranger.say("Hello!").text()
        rest = await running_reply.text()
        assert await second.say(STORY, **LONG).text() == begun + rest, (
            "another key of the tenant, when it is free"
        )

        receipt = await first.lease(ttl=60)
        assert (receipt.status, receipt.tokens) == ("clipped", 3 * 16)
        assert (await second.lease(ttl=60)).status == "denied"
        assert (await stranger.lease(ttl=60)).status == "granted"

        seen = await figures(running.url, "beta")
        assert seen["used", "acme", "sessions"] == seen["limit", "acme", "sessions"] == 3
        assert (seen["limit", "acme", "turns"], seen["used", "acme", "turns"]) == (1, 0)
        assert {tenant for _, tenant, _ in seen} == {"acme"}, "no tenant sees another's numbers"
        await fork.aclose()


@pytest.mark.slow
async def test_limits_hold_after_a_restart(tmp_path: Path, pocket: EngineSettings) -> None:
    async with served(tmp_path, pocket) as (running, clients):
        handles = []
        for number in range(6):
            async with clients["alpha"].session(temperature=0) as chat:
                await chat.say(f"I am number {number}. {STORY}").text()
                assert (await chat.settle("disk")).tokens
                handles.append(chat.handle)
        assert (await figures(running.url, "alpha"))["used", "acme", "kept"] == 4
    (account,) = accounts(tmp_path / "store" / "kv", "stat")
    assert account.records == RECORDS, "what went to disk beyond the cap replaced what was there"
    async with served(tmp_path, pocket) as (running, clients), AsyncExitStack() as stack:
        seen = await figures(running.url, "alpha")
        assert (seen["used", "acme", "kept"], seen["used", "acme", "sessions"]) == (4, 0)
        assert seen["used", "acme", "journal"] > 0
        for handle in handles[:2]:
            with pytest.raises(SessionLost):
                await stack.enter_async_context(clients["alpha"].resume(handle))
        for handle in handles[2:5]:
            chat = await stack.enter_async_context(clients["alpha"].resume(handle))
            assert await chat.say("And then?").text()
        with pytest.raises(SessionLost):
            await stack.enter_async_context(clients["alpha"].resume(handles[5]))
        assert (await figures(running.url, "alpha"))["used", "acme", "sessions"] == 3
