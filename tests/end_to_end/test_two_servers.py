"""Real servers, one store: the second is refused, and the first acknowledges nothing while it is not there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.sdk import SDKError, connect

from .test_resume import Server, served
from .wires import cause_in, get

pytestmark = pytest.mark.anyio


async def refused(store: Path) -> str:
    """What a server says that may not use the store."""
    process = await Server(store).spawn()
    _, told = await process.communicate()
    assert process.returncode == 2
    return cause_in(told.decode())


async def test_a_removed_lock_lets_no_second_server_in_and_a_moved_store_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    store, moved = tmp_path / "store", tmp_path / "moved"
    (tmp_path / "link").symlink_to(store)
    async with served(store) as (server, url), connect(url) as client, client.session() as chat:
        await chat.say("My name is Marisol.").text()
        assert server.process is not None
        for lock in store.rglob("*lock"):
            lock.unlink()
        held = f"is held by process {server.process.pid} on {socket.gethostname()}"
        assert await refused(tmp_path / "link") == f"holdfast: the store {tmp_path / 'link'} {held}"
        assert (await get(url, "/ready"))[0] == 200
        store.rename(moved)
        while (await get(url, "/ready"))[0] == 200:
            pass
        assert f"the store {store} is gone" in (await get(url, "/ready"))[1]
        with pytest.raises(SDKError, match="is gone"):
            await chat.say("What is my name?").text()
        assert await refused(moved) == f"holdfast: the store {moved} {held}"
        moved.rename(store)
        while (await get(url, "/ready"))[0] != 200:
            pass
        assert "Marisol" in await chat.say("What is my name?").text()
