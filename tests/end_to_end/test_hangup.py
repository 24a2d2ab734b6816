"""SIGHUP: a terminal that hangs up drains the server; one without a terminal reads its keys again. Its log."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway.cli.serve import EXIT_AT_ONCE
from holdfast.sdk import ConnectionFailed, ServerError, connect

from .test_processes import SMALL
from .wires import LONG, address_of, get, wire

pytestmark = pytest.mark.anyio
PROGRAM = "from holdfast.gateway.cli.main import main; main()"


@pytest.fixture(autouse=True)
def _ignored_here() -> Iterator[None]:
    """This process ignores SIGHUP, as one started with nohup does: each test sets what its server inherits."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def under_terminal() -> None:
    """Make stdin's terminal the one that controls this new session, which SIGHUP ends."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def under_nohup() -> None:
    under_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@asynccontextmanager
async def started(*words: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """``holdfast serve pocket`` in a session of its own; killed at the end if it is still there."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "serve", "pocket", "--port", "0", *SMALL, *words),
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def shown_address(master: int) -> str:
    """The server's address, read from what it shows on its terminal, or writes to a pipe."""
    shown, found = b"", None
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(master, readable.set)
    try:
        while found is None:
            await readable.wait()
            readable.clear()
            shown += os.read(master, 65536)
            found = re.search(rb"holdfast: pocket at (http://[\d.:]+)", shown)
        return found[1].decode()
    finally:
        asyncio.get_running_loop().remove_reader(master)


def children_of(pid: int) -> set[str]:
    """The processes that any of its threads has started."""
    told = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(" ".join(told).split())


def ignores_hangups(pid: str) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) & 1 << signal.SIGHUP - 1)


async def test_a_terminal_that_hangs_up_drains_the_server_as_sigterm_does(tmp_path: Path) -> None:
    master, slave = os.openpty()
    options = {"stdin": slave, "stderr": slave, "preexec_fn": under_terminal}
    try:
        async with started("--store", str(tmp_path / "store"), **options) as process:
            os.close(slave)
            url = await shown_address(master)
            async with wire(url) as talking, wire(url) as idle:
                await talking.ask("Tell me the story of the fox.", **LONG)
                await talking.until("response.output_text.delta")
                while len(children := children_of(process.pid)) < 2 or not all(
                    map(ignores_hangups, children)
                ):
                    await asyncio.to_thread(bool)  # the disk process begins beside the engine
                os.close(master)
                master = -1
                await idle.until("server.going_away")
                os.killpg(process.pid, signal.SIGHUP)  # as a shell tells its jobs
                events = await talking.until("response.done")
                assert events[-1]["response"]["status"] == "completed"
                assert "session.recovered" not in [event["type"] for event in events], "the engine died of it"
                for one in (talking, idle):
                    await one.socket.wait_closed()
                    assert one.socket.close_code == 1012
            assert await process.wait() == 0
    finally:
        if master >= 0:
            os.close(master)


async def test_a_server_under_nohup_outlives_its_terminal() -> None:
    master, slave = os.openpty()
    options = {"stdin": slave, "stderr": asyncio.subprocess.PIPE, "preexec_fn": under_nohup}
    async with started("--no-store", **options) as process:
        os.close(slave)
        url = await address_of(process)
        async with wire(url) as connection:
            os.close(master)
            process.send_signal(signal.SIGHUP)
            assert (await connection.say("My name is Marisol."))["status"] == "completed"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_second_signal_ends_a_server_that_can_print_nothing() -> None:
    master, slave = os.openpty()
    options = {"stdin": slave, "stderr": slave, "preexec_fn": under_nohup}
    try:
        async with started("--no-store", **options) as process:
            os.close(slave)
            url = await shown_address(master)
            async with wire(url) as talking, wire(url) as idle:
                await talking.ask("Tell me the story of the fox.", **LONG)
                await talking.until("response.output_text.delta")
                os.close(master)
                master = -1
                process.send_signal(signal.SIGTERM)
                await idle.until("server.going_away")
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == EXIT_AT_ONCE
    finally:
        if master >= 0:
            os.close(master)


async def test_failed_connections_do_not_fill_the_log() -> None:
    options = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    async with started("--no-store", **options) as process:
        host, _, port = (await address_of(process)).removeprefix("http://").partition(":")
        for _ in range(200):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
            await writer.wait_closed()
        process.send_signal(signal.SIGTERM)
        _, told = await process.communicate()
    lines = [line for line in told.decode().splitlines() if "request refused" in line]
    assert len(lines) == 11 and "190 more lines like this" in lines[-1]


BEFORE = """
[tenants.acme]
keys = ["alpha"]

[tenants.zenith]
keys = ["beta"]
sessions = 1
"""
AFTER = """
[tenants.zenith]
keys = ["beta", "gamma"]
sessions = 2
"""


async def test_without_a_terminal_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(BEFORE)
    options = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    async with started("--no-store", "--keys", str(keys), **options) as process:
        url = await address_of(process)
        assert process.stderr is not None

        async def reloaded(text: str) -> str:
            keys.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            while "reloaded" not in (line := (await process.stderr.readline()).decode()):
                assert line, "the server ended"
            return line

        def bearing(key: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {key}"}

        async with (
            wire(url, additional_headers=bearing("alpha")) as removed,
            connect(url, api_key="beta") as client,
            client.session() as chat,
        ):
            await chat.say("My name is Marisol.").text()
            with pytest.raises(ServerError) as refused:
                async with client.session():
                    pass
            assert refused.value.code == "session_limit_reached"

            told = await reloaded(AFTER)
            assert told.endswith(f" holdfast: reloaded: keys: 2 from {keys}; connections closed: 1\n")
            await removed.socket.wait_closed()
            assert (removed.socket.close_code, removed.socket.close_reason) == (1008, "invalid_api_key")
            assert (await get(url, "/v1/models", **bearing("alpha")))[0] == 401
            with pytest.raises(ConnectionFailed, match="401"):
                async with connect(url, api_key="alpha") as gone, gone.session():
                    pass
            async with connect(url, api_key="gamma") as new, new.session() as second:
                assert await second.say("Hello!").text(), "a new key, and room for a second session"
            assert "Marisol" in await chat.say("What is my name?").text()

            told = await reloaded("[tenants.zenith\n")
            assert f" holdfast: not reloaded, all stays as it was: {keys}: " in told
            assert (await get(url, "/v1/models", **bearing("gamma")))[0] == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_keys_are_reloaded_when_their_file_changes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(BEFORE)
    options = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    async with started("--no-store", "--keys", str(keys), **options) as process:
        url = await address_of(process)
        assert process.stderr is not None
        async with wire(url, additional_headers={"Authorization": "Bearer alpha"}) as removed:
            keys.write_text(AFTER)
            while "reloaded" not in (line := (await process.stderr.readline()).decode()):
                assert line, "the server ended"
            assert line.endswith(f" holdfast: reloaded: keys: 2 from {keys}; connections closed: 1\n")
            await removed.socket.wait_closed()
            assert removed.socket.close_reason == "invalid_api_key"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_keys_are_reloaded_although_the_log_is_not_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(BEFORE)
    read, write = os.pipe()
    options = {"stdin": asyncio.subprocess.DEVNULL, "stderr": write}
    try:
        async with started("--no-store", "--keys", str(keys), **options) as process:
            os.close(write)
            url = await shown_address(read)
            alpha = {"Authorization": "Bearer alpha"}
            beta = {"Authorization": "Bearer beta"}
            async with wire(url, additional_headers=alpha) as one, wire(url, additional_headers=beta) as two:
                os.close(read)
                read = -1
                for text, removed in ((AFTER, one), (BEFORE.partition("[tenants.zenith]")[0], two)):
                    keys.write_text(text)
                    process.send_signal(signal.SIGHUP)
                    await removed.socket.wait_closed()
                    assert removed.socket.close_reason == "invalid_api_key"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if read >= 0:
            os.close(read)
