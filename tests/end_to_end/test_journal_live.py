"""A real server on a damaged journal, and on one of an earlier version: undamaged sessions go on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from random import Random

import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import SessionLost, connect
from holdfast.sessions.journal import admin

from .test_resume import served

pytestmark = pytest.mark.anyio
STORES = Path(__file__).parent.parent / "sessions" / "stores"
NAMES = ("Marisol", "Ann", "Boris", "Carla", "Olga", "Pedro", "Kenji", "Zoe")
QUESTION = "What is my name?"
PAGE = 4096


@pytest.mark.more
async def test_a_zeroed_page_of_the_journal_costs_the_sessions_it_hit_and_no_server(tmp_path: Path) -> None:
    handles: dict[str, str] = {}
    async with served(tmp_path) as (server, url):
        async with connect(url) as client:
            for name in NAMES:
                async with client.session() as chat:
                    await chat.say(f"My name is {name}.").text()
                    assert chat.handle is not None
                    handles[name] = chat.handle
        await server.kill()
        (log,) = (tmp_path / "journal").glob("*.log")
        data = bytearray(log.read_bytes())
        at = Random(3).choice([at for at in range(2 * PAGE, len(data), PAGE) if any(data[at : at + PAGE])])
        struck = {name for name in NAMES if f"My name is {name}." in data[at : at + PAGE].decode("latin-1")}
        data[at : at + PAGE] = bytes(PAGE)
        log.write_bytes(data)
        damage: list[str] = []
        list(admin.verify(tmp_path, damage))
        count = sum(line.startswith("session ") for line in damage)
        for start in range(2):
            url = await server.start()
            lost: set[str] = set()
            codes: set[str] = set()
            for name, handle in handles.items():
                async with connect(url) as client:
                    try:
                        async with client.resume(handle) as chat:
                            assert name in await chat.say(QUESTION, temperature=0.0).text()
                            assert chat.handle is not None
                            handles[name] = chat.handle
                    except SessionLost as fault:
                        codes.add(fault.code)
                        lost.add(name)
            assert codes <= {"session_damaged"}
            assert struck <= lost and 0 < len(lost) == count < len(NAMES), "and so they are after a restart"
            assert server.process is not None
            assert server.process.returncode is None
            async with connect(url) as client, client.session() as chat:
                assert await chat.say("Hello.").text()
            if start == 0:
                await server.kill()


async def test_sessions_of_an_earlier_versions_store_go_on_as_they_would_have_there(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    """Kept with the next turns that its own server said; KV is computed again."""
    told = json.loads((STORES / "format_3.json").read_text())
    with tarfile.open(STORES / "format_3.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "keys").write_text("key-of-acme acme\nkey-of-zenith zenith\n")
    settings = GatewaySettings(port=0, store=tmp_path, keys=tmp_path / "keys")
    for again in range(2):
        async with serving(settings, pocket) as running:
            for one in told.values():
                async with (
                    connect(running.url, api_key=one["key"]) as client,
                    client.resume(one["handle"]) as chat,
                ):
                    for line, wanted in [] if again else one["next"]:
                        assert await chat.say(line, temperature=0.0, max_output_tokens=24).text() == wanted
                    assert chat.handle is not None
                    one["handle"] = chat.handle
