"""Connections that are held without a key, in a server with few descriptors: a valid key is served beside them,
and the server ends without a complaint."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import pytest

from holdfast.tests.gateway.net.test_held_connections import CUT, END, GET, REJECTED

from .test_hangup import started
from .wires import address_of, wire

pytestmark = pytest.mark.anyio
DESCRIPTORS, HELD = 128, 300
UPGRADES = [GET.replace(b"/", b"/v1/realtime", 1) + headers + END for headers in REJECTED.values()]
COOKIE = GET.replace(b"/", b"/v1/realtime", 1) + b"Cookie: " + b"c" * 9000 + END + END


def with_few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


KINDS = (UPGRADES, [COOKIE], [b""], [cut for cut, _ in CUT.values()])


async def test_a_valid_key_is_served_beside_them_and_the_server_ends_clean(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("alpha acme\n")
    quiet = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    few = {"preexec_fn": with_few_descriptors}
    async with started("--no-store", "--keys", str(keys), **quiet, **few) as process:
        url = await address_of(process)
        host, _, port = url.removeprefix("http://").partition(":")
        held: list[asyncio.StreamWriter] = []

        async def hold(sent: list[bytes]) -> None:
            for number in range(HELD):
                _, writer = await asyncio.open_connection(host, int(port))
                held.append(writer)
                writer.write(sent[number % len(sent)])

        for sent in KINDS:
            await hold(sent)
            async with wire(url, additional_headers={"Authorization": "Bearer alpha"}) as client:
                assert (await client.say("My name is Marisol."))["status"] == "completed"
                await hold(sent)
                assert (await client.say("What is my name?"))["status"] == "completed"
        process.send_signal(signal.SIGTERM)
        _, told = await process.communicate()
        assert process.returncode == 0
        assert "Traceback" not in told.decode()
        for writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in held), return_exceptions=True)
