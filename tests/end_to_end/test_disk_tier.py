"""KV that outlives the server: on disk when a session settles, back from there before the next turn."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.disk.__main__ import NICENESS
from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Sampling, TokenLimits, Work

from .test_responses import ask
from .wires import text_of, wire

pytestmark = pytest.mark.anyio

PROMPT = [1 + n % 300 for n in range(77)]
SMALL = EngineSettings(
    model="pocket", dtype="float32", blocks=40, max_context=384, host_bytes=32 << 20, debug=True
)


@pytest.fixture
def stored(tmp_path: Path) -> EngineSettings:
    return msgspec.structs.replace(SMALL, store=str(tmp_path), disk_bytes=64 << 20)


async def turn(link: EngineLink, seq: int, count: int = 20) -> tuple[list[int], Work]:
    rows = [row async for row in await link.generate(seq, Sampling(), TokenLimits(count))]
    assert rows[-1].work is not None
    return [token for row in rows for token in row.tokens], rows[-1].work


async def statistics(link: EngineLink, name: str, least: float) -> None:
    """Wait until a figure is there."""
    while (await link.statistics()).get(name, -1) < least:
        pass


async def test_a_sequence_settled_to_disk_is_there_after_a_restart_of_everything(stored) -> None:
    async with ChildEngine(msgspec.structs.replace(SMALL, host_bytes=0)) as link:
        plain = (await link.open(PROMPT)).seq
        expected = [(await turn(link, plain))[0] for _ in range(2)]
    async with ChildEngine(stored) as link:
        await statistics(link, "disk_records", 0)
        seq = (await link.open(PROMPT)).seq
        said, _ = await turn(link, seq)
        assert said == expected[0]
        await link.settle(seq, disk=True)
        await statistics(link, "disk_records", 97 // 16)
    async with ChildEngine(stored) as link:
        await statistics(link, "disk_records", 97 // 16)
        seq = (await link.open([*PROMPT, *said])).seq
        again, work = await turn(link, seq)
        assert again == expected[1]
        assert (work.prefilled, work.recomputed, work.resident, work.host) == (1, 0, 0, 0)
        assert work.disk == 96 and work.restore_seconds > 0


def disk_processes() -> list[int]:
    """Those that this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ends meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"holdfast.kvstore.disk" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_disk_tier_that_dies_ends_no_turn(stored, how: signal.Signals) -> None:
    """Killed or stopped: the turn that waited for it computes, and another disk process serves the next one."""
    engine = ChildEngine(stored)
    async with engine as link:
        await statistics(link, "disk_records", 0)
        first, other = [(await link.open([*PROMPT, n])).seq for n in (7, 8)]
        said = [(await turn(link, seq))[0] for seq in (first, other)]
        for seq in (first, other):
            await link.settle(seq, disk=True)
        await statistics(link, "disk_records", 6 + 6 - 4)
    engine = ChildEngine(stored)
    async with engine as link:
        await statistics(link, "disk_records", 8)
        own, (disk,) = os.getpriority(os.PRIO_PROCESS, 0), disk_processes()
        assert os.getpriority(os.PRIO_PROCESS, disk) == min(19, own + NICENESS)
        os.kill(disk, how)
        seq = (await link.open([*PROMPT, 7, *said[0]])).seq
        again, _ = await turn(link, seq)
        assert len(again) == 20
        await statistics(link, "disk_lost", 1)
        await statistics(link, "disk_records", 8)
        seq = (await link.open([*PROMPT, 8, *said[1]])).seq
        _, work = await turn(link, seq)
        assert work.disk > 0


async def test_a_server_that_begins_anew_finds_its_sessions_kv_on_disk(stored) -> None:
    story = "My name is Marisol. " * 6
    async with serving(GatewaySettings(port=0), stored) as server, wire(server.url) as one:
        await one.say(story)
        await statistics(server.engine.link, "disk_records", 2)  # it was idle for a while
    async with serving(GatewaySettings(port=0), stored) as server, wire(server.url) as two:
        await statistics(server.engine.link, "disk_records", 2)
        done = await two.say(story)
        assert text_of(done) and done["kv"]["disk"] > 0


async def test_deleted_responses_leave_no_kv_on_any_tier(tmp_path: Path, stored: EngineSettings) -> None:
    tight = msgspec.structs.replace(stored, host_bytes=2 << 20)
    async with serving(GatewaySettings(port=0, store=tmp_path), tight) as running:
        link, made = running.engine.link, list[str]()
        while (await link.statistics()).get("disk_records", 0) < 20:
            text = f"My name is Marisol, and my number is {len(made)}. " * 8
            answer = await ask(running.url, "POST", "/v1/responses", {"input": text, "max_output_tokens": 16})
            made.append(answer["id"])
        for name in made:
            await ask(running.url, "DELETE", f"/v1/responses/{name}")
        while (found := await link.statistics())["disk_records"] or found["host_records"]:
            pass
