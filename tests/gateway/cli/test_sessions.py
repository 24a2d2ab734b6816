"""``holdfast sessions`` at a running server and on the store of one that does not run: what it prints, and with
which exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.gateway.cli.main import app
from holdfast.gateway.cli.sessions import ServerSessions, export
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.net.listener import listen
from holdfast.gateway.net.serving import served
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.errors import SettingsInvalid
from holdfast.sdk import connect
from holdfast.sdk.errors import ExportInvalid
from holdfast.sessions.journal.lock import StoreLock
from holdfast.tests.gateway.responses.stage import Stage, staged
from holdfast.tests.gateway.responses.stage import told as told_
from holdfast.tests.stored_files import bytes_below, strike

pytestmark = pytest.mark.anyio


def invoke(*words: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sessions", *words], env=environment)
    return result.exit_code, result.output


def rows(told: str) -> list[Any]:
    return [json.loads(line) for line in told.splitlines()]


@asynccontextmanager
async def listening(stage: Stage) -> AsyncIterator[str]:
    """Serve the routes on a loopback port; yields the address."""
    limits = ClientLimits()
    sock = listen("127.0.0.1", 0, limits)
    port = sock.getsockname()[1]
    async with served(stage.app, sock, limits):
        yield f"ws://127.0.0.1:{port}"


async def test_at_a_server_with_the_operators_key(tmp_path: Path) -> None:
    settings = GatewaySettings(api_key="key", operator_key="ops")
    file, link = tmp_path / "session.jsonl", told_("Hello, Marisol.", "Marisol.", "Marisol.")

    async def ask(*words: str, key: str = "ops") -> tuple[int, str]:
        return await asyncio.to_thread(invoke, *words, "--url", url, HOLDFAST_API_KEY=key)

    async with staged(tmp_path / "a", settings=settings, link=link) as stage, listening(stage) as url:
        async with connect(url, api_key="key") as client, client.session() as chat:
            await chat.say("My name is Marisol.").text()
            session_id = chat.session.id or ""
            (one,) = rows((await ask("list", "--json"))[1])
            assert (one["id"], one["state"], one["turns"]) == (session_id, "open", 1)
            assert one["kv"]["device"] == one["tokens"] > 10 and "hold_" not in json.dumps(one)
            code, told = await ask("list", "--json", key="key")
            assert code == 2 and "for operators" in told and len(told.splitlines()) == 1
            code, told = await ask("export", session_id, str(file))
            assert code == 0 and "2 entries" in told
            code, told = await ask("export", session_id, str(file))
            assert code == 2 and f"{file} exists already" in told and "Errno" not in told
            assert (await ask("export", "sess_none", str(tmp_path / "none")))[0] == 2
            assert not (tmp_path / "none").exists()
            assert await chat.say("What is my name?").text() == "Marisol."
            original = max((held.tokens for held in link.held.values()), key=len)
            assert await ask("close", session_id) == (0, f"{session_id}: closed, offloaded\n")
        code, told = await ask("show", session_id)
        assert code == 0 and "My name is Marisol." in told and "turns:        2" in told
        link.held.clear()
        async with connect(url, api_key="key") as client, client.import_session(file) as chat:
            assert await chat.say("What is my name?").text() == "Marisol."
            assert original in [held.tokens for held in link.held.values()]
        code, told = await ask("delete", session_id)
        assert code == 2 and "--yes" in told
        assert await ask("delete", session_id, "--yes") == (0, f"{session_id}: deleted\n")
        code, told = await ask("show", session_id)
        assert code == 2 and "no session" in told
        assert len(rows((await ask("list", "--json", "--limit", "5"))[1])) == 1
        code, told = await asyncio.to_thread(invoke, "list", "--store", str(tmp_path / "a"))
        assert code == 2 and "--url" in told and len(told.splitlines()) == 1
        file.write_bytes(file.read_bytes()[:-9])
        async with connect(url, api_key="key") as client:
            with pytest.raises(ExportInvalid):
                async with client.import_session(file):
                    pass
    code, told = await ask("list")
    assert code == 2 and "Cannot connect" in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(("file", "why"), [("old", "exists already"), ("no/file", "No such file")])
def test_a_file_that_cannot_be_made_is_refused_before_the_session_leaves_the_server(
    tmp_path: Path, file: str, why: str
) -> None:
    (tmp_path / "old").write_text("kept")

    class Server(ServerSessions):
        def exported(self, session_id: str) -> bytes:
            raise AssertionError("the session was sent")

    with pytest.raises(SettingsInvalid, match=why):
        list(export(Server("ws://localhost", None), "sess_1", tmp_path / file))
    assert (tmp_path / "old").read_text() == "kept"


@pytest.fixture
async def store(tmp_path: Path) -> tuple[Path, list[str]]:
    """The store of a server that has ended, with sessions of two tenants, the first made first; and their
    ids."""
    keys = tmp_path / "keys"
    keys.write_text("alpha acme\nbeta zenith\n")
    made = []
    link = told_("One.", "Two.", "Three.", "Four.")
    async with staged(tmp_path / "s", settings=GatewaySettings(keys=keys), link=link) as stage:
        for key, text in (("alpha", "The <first>."), ("beta", "The <second>.")):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 9}
            assert (await stage.ask("POST", "/v1/chat/completions", body, key=key)).status == 200
        await stage.ask("POST", "/v1/responses", {"input": "No session.", "store": True}, key="alpha")
        async with in_memory(stage.service).session(
            max_output_tokens=9, instructions="Be\x1b[31m brief."
        ) as chat:
            await chat.say("The third.").text()
            (fork,) = await chat.fork(1)
            made = [chat.session.id or "", fork.session.id or ""]
    return tmp_path / "s", made


async def test_on_the_store_of_a_server_that_does_not_run(
    store: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root, (third, fork) = store
    on = ("--store", str(root))
    code, told = invoke("list", *on, "--keys", str(tmp_path / "keys"), "--json")
    found = rows(told)
    assert code == 0 and {one["state"] for one in found} == {"offloaded"}
    assert [one["id"] for one in found[:2]] == [fork, third]
    assert sorted({one["tenant"] for one in found}) == ["", "acme", "zenith"]
    acme = rows(invoke("list", *on, "--tenant", "zenith", "--json")[1])
    assert [one["turns"] for one in acme] == [1]
    pages = [rows(invoke("list", *on, "--json", "--limit", "1")[1].splitlines()[0])]
    code, told = invoke("list", *on, "--limit", "1")
    assert "there are more: --after" in told and pages[0][0]["id"] == fork
    assert told.split("--after ")[1].split()[0] == fork
    assert third in invoke("list", *on, "--limit", "1", "--after", fork)[1]
    code, told = invoke("show", third, *on)
    assert code == 0 and "The third." in told and fork in told and "\x1b" not in told
    code, told = invoke("export", fork, *on)
    header, *entries = rows(told)
    assert code == 0 and header["entries"] == len(entries) == 2 and header["id"] == fork
    code, told = invoke("close", third, *on)
    assert code == 2 and "at its server" in told


async def test_a_session_whose_record_is_damaged_is_deleted_as_it_is_listed(
    store: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root, (third, fork) = store
    strike(root, fork)
    on = ("--store", str(root))
    (struck,) = [one["id"] for one in rows(invoke("list", *on, "--json")[1]) if one["state"] == "damaged"]
    assert invoke("show", struck, *on)[0] == 2
    assert invoke("delete", struck, "--yes", *on)[0] == 0
    left = {one["id"]: one["state"] for one in rows(invoke("list", *on, "--json")[1])}
    assert third in left and "damaged" not in left.values()


async def test_an_export_of_a_store_goes_on_at_a_server(
    store: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root, (third, _) = store
    file = tmp_path / "third.jsonl"
    assert invoke("export", third, str(file), "--store", str(root))[0] == 0
    assert file.stat().st_mode & 0o77 == 0
    link = told_("Yes.")
    async with (
        staged(tmp_path / "b", link=link) as stage,
        in_memory(stage.service).import_session(file) as chat,
    ):
        assert chat.session.instructions == "Be\x1b[31m brief."
        assert await chat.say("And now?").text() == "Yes."


async def test_a_session_is_deleted_from_every_file(store: tuple[Path, list[str]]) -> None:
    root, _ = store
    (root / "kv" / "abc").mkdir(parents=True)
    on = ("--store", str(root))
    found = {one["id"]: one for one in rows(invoke("list", *on, "--json", "--tenant", "acme")[1])}
    first = next(name for name in found if "The <first>." in invoke("show", name, *on)[1])
    assert b"<first>" in bytes_below(root)
    assert invoke("delete", first, *on, "--yes") == (0, f"{first}: deleted\n")
    data = bytes_below(root)
    assert b"<first>" not in data and b"<second>" in data and not (root / "kv").exists()
    assert invoke("delete", first, *on, "--yes")[0] == 2


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("list", "sess_1"), "takes no SESSION"),
        (("show",), "takes one"),
        (("close", "sess_1", "file"), "takes a file"),
        (("list", "--keys", "keys"), "--store"),
        (("list", "--store", "/nowhere"), "no such folder"),
        (("list", "--url", "ftp://x"), "Not the address"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(words: tuple[str, ...], cause: str) -> None:
    code, told = invoke(*words)
    assert code == 2 and cause in told and len(told.splitlines()) == 1


async def test_a_store_that_a_server_holds_is_left_alone(store: tuple[Path, list[str]]) -> None:
    root, (third, _) = store
    with StoreLock(root).acquire():
        for words in (("list",), ("show", third), ("export", third), ("delete", third, "--yes")):
            code, told = invoke(*words, "--store", str(root))
            assert code == 2 and "ask that server, by --url" in told and len(told.splitlines()) == 1
