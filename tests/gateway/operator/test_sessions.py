"""The operator's routes: sessions are listed, shown, exported, closed and deleted, wherever they are; and an
exported one goes on elsewhere with the tokens that it had."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator

from holdfast.gateway.app import ROWS
from holdfast.gateway.documents.api import openapi
from holdfast.gateway.embedded import in_memory
from holdfast.gateway.settings import GatewaySettings
from holdfast.kvstore.log_lines import LogSettings, logging_lines
from holdfast.sdk import Chat, Client
from holdfast.sdk.errors import ConnectionLost, ExportInvalid, SessionLost
from holdfast.sdk.frames.items import MessageItem
from holdfast.sessions.settings import JournalSettings
from holdfast.tests.gateway.responses.stage import Json, Stage, staged, told
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.operations import Lines
from holdfast.tests.stored_files import bytes_below, strike

pytestmark = pytest.mark.anyio
SESSIONS = "/operator/sessions"
DOCUMENT = openapi(ROWS, "1.2.3")


async def asked(stage: Stage, path: str = "", method: str = "GET", key: str | None = None) -> Any:
    """An answer, which is as the document says."""
    answer = await stage.ask(method, SESSIONS + path, key=key)
    assert answer.status == 200, answer.body
    one, _, act = path.partition("?")[0].strip("/").partition("/")
    route = SESSIONS + "/{session_id}" * bool(one) + f"/{act}" * bool(act)
    schema = DOCUMENT["paths"][route][method.lower()]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    Draft202012Validator({"components": DOCUMENT["components"], **schema}).validate(answer.json)
    return answer.json


async def listed(stage: Stage, query: str = "") -> list[Json]:
    found: list[Json] = (await asked(stage, query))["data"]
    return found


async def left(client: Client, *texts: str, **options: Any) -> tuple[str, str]:
    """A session in which these texts were said, and which its client has left: its id and its handle."""
    async with client.session(**{"max_output_tokens": 16, **options}) as chat:
        for text in texts:
            await chat.say(text).text()
        assert chat.session.id and chat.handle
        return chat.session.id, chat.handle


# --- the list -----------------------------------------------------------------------------------------------


async def test_sessions_are_listed_with_what_they_do_and_where_their_kv_is(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        client = in_memory(stage.service)
        idle, _ = await left(client, "Hello!", "And again?")
        async with client.session(max_output_tokens=8) as chat:
            await stage.create("This is a stored response, no session.", max_output_tokens=4)
            chatted, last, first = await listed(stage)
            assert [last["id"], first["id"]] == [chat.session.id, idle]
            assert [last["state"], first["state"]] == ["open", "idle"]
            assert [last["turns"], first["turns"], chatted["turns"]] == [0, 2, 1]
            assert first["items"] == 4 and first["kv"]["device"] == first["tokens"] > 20
            assert first["unused_seconds"] < 60 and first["created"].startswith("20")
    async with staged(tmp_path) as stage:
        states = {one["state"] for one in await listed(stage)}
        shown = await asked(stage, f"/{idle}")
        assert states == {"offloaded"} and (shown["turns"], shown["items"], shown["tokens"]) == (
            2,
            4,
            first["tokens"],
        )
        assert shown["kv"] == {"device": 0, "host": 0, "disk": 0, "none": first["tokens"]}


@pytest.mark.parametrize("kept", [True, False])
async def test_pages_have_each_session_once_the_latest_first(tmp_path: Path, kept: bool) -> None:
    async with staged(tmp_path if kept else None) as stage:
        client = in_memory(stage.service)
        made = [(await left(client, str(number)))[0] for number in range(7)]
        found: list[str] = []
        query = "?limit=3"
        for size in (3, 3, 1):
            page = await asked(stage, query)
            found += [one["id"] for one in page["data"]]
            assert len(page["data"]) == size
            query = f"?limit=3&after={page['next']}"
        assert page["next"] is None and found == made[::-1]
        behind = await listed(stage, f"?limit=3&after={found[2]}")
        assert [one["id"] for one in behind] == found[3:6]
        assert await stage.refused("GET", f"{SESSIONS}?after=x") == (400, "invalid_value", "after")
        assert await stage.refused("GET", f"{SESSIONS}?limit=101") == (400, "invalid_value", "limit")


async def test_only_an_operators_key_opens_the_routes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[operators]\nkeys = ["ops"]\n[tenants.acme]\nkeys = ["alpha"]\n[tenants.zenith]\nkeys = ["beta"]'
    )
    settings = GatewaySettings(keys=keys)
    async with staged(tmp_path / "store", settings=settings) as stage:
        for key, text in (("alpha", "one"), ("beta", "two")):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
            assert (await stage.ask("POST", "/v1/chat/completions", body, key=key)).status == 200
        both = (await asked(stage, key="ops"))["data"]
        assert sorted(one["tenant"] for one in both) == ["acme", "zenith"]
        (one,) = (await asked(stage, "?tenant=acme", key="ops"))["data"]
        for method, path in (
            ("GET", ""),
            ("GET", f"/{one['id']}"),
            ("GET", f"/{one['id']}/export"),
            ("POST", f"/{one['id']}/close"),
            ("DELETE", f"/{one['id']}"),
        ):
            assert await stage.refused(method, SESSIONS + path, key="alpha") == (
                403,
                "operator_key_required",
                None,
            )
            assert await stage.refused(method, SESSIONS + path, key="no") == (401, "invalid_api_key", None)
        assert one["id"] in [left["id"] for left in (await asked(stage, key="ops"))["data"]]
        assert await stage.refused("POST", "/v1/sessions", b"", key="ops") == (401, "invalid_api_key", None)
        assert b"hold_" not in json.dumps(await asked(stage, f"/{one['id']}", key="ops")).encode()


async def test_what_an_operator_does_to_a_session_is_logged_with_its_tenant_and_the_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[operators]\nkeys = ["ops"]\n[tenants.acme]\nkeys = ["alpha"]')
    async with staged(tmp_path / "store", settings=GatewaySettings(keys=keys)) as stage:
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
        assert (await stage.ask("POST", "/v1/chat/completions", body, key="alpha")).status == 200
        (one,) = (await asked(stage, key="ops"))["data"]
        capsys.readouterr()
        with logging_lines("holdfast", LogSettings(form="json")):
            assert (await stage.ask("GET", f"{SESSIONS}/{one['id']}/export", key="ops")).status == 200
            await asked(stage, f"/{one['id']}/close", "POST", key="ops")
            await asked(stage, f"/{one['id']}", "DELETE", key="ops")
        told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    done = [line for line in told if line["message"].endswith("by an operator")]
    assert [line["message"].split()[1] for line in done] == ["exported", "closed", "deleted"]
    digest = hashlib.blake2b(b"ops", digest_size=32).hexdigest()
    for line in done:
        assert (line["session"], line["tenant"], line["level"]) == (one["id"], "acme", "info")
        assert line["operator"] == f"blake2b:{digest[:8]}" and "ops" not in line.values()


async def test_a_damaged_session_is_listed_as_one_and_hides_no_other(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        client = in_memory(stage.service)
        whole, _ = await left(client, "This one is whole.")
        struck, _ = await left(client, "This <one> is struck.")
    for log in sorted((tmp_path / "journal").iterdir()):
        data = log.read_bytes()
        await anyio.Path(log).write_bytes(data.replace(b"<one>", b"<two>"))
    async with staged(tmp_path) as stage:
        found = {one["id"]: one["state"] for one in await listed(stage)}
        assert found == {whole: "offloaded", struck: "damaged"}
        for path in (f"/{struck}", f"/{struck}/export"):
            assert await stage.refused("GET", SESSIONS + path) == (500, "session_damaged", None)
        assert (await asked(stage, f"/{struck}", "DELETE"))["deleted"]
        assert [one["id"] for one in await listed(stage)] == [whole]


async def test_a_session_whose_record_is_damaged_is_deleted_as_it_is_listed(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        client = in_memory(stage.service)
        whole, _ = await left(client, "This one is whole.")
        session_id, _ = await left(client, "This one is struck.")
    strike(tmp_path, session_id)
    async with staged(tmp_path) as stage:
        (struck,) = [one["id"] for one in await listed(stage) if one["state"] == "damaged"]
        path = f"/{struck}"
        assert await stage.refused("GET", SESSIONS + path) == (500, "session_damaged", None)
        assert (await asked(stage, path, "DELETE"))["deleted"]
        assert [one["id"] for one in await listed(stage)] == [whole]
    async with staged(tmp_path) as stage:
        assert [one["id"] for one in await listed(stage)] == [whole]


async def test_one_session_is_shown_in_brief(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        client = in_memory(stage.service)
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        async with client.session(instructions="Be brief.", tools=[tool], max_output_tokens=8) as chat:
            await chat.say("x" * 500).text()
            await chat.name("first")
            (fork,) = await chat.fork(1)
            shown = await asked(stage, f"/{chat.session.id}?items=2")
            assert (shown["instructions"], shown["tools"], shown["name"]) == ("Be brief.", ["look"], "first")
            assert shown["forks"] == [{"id": fork.session.id, "name": ""}]
            said, reply = shown["latest"]
            assert (said["role"], said["text"], said["characters"]) == ("user", "x" * 200, 500)
            assert (reply["role"], reply["text"]) == ("assistant", chat.last.text)
            child = await asked(stage, f"/{fork.session.id}")
            assert child["parent"] == chat.session.id and child["created"] > shown["created"]
    assert await _unknown_of(tmp_path) == (404, "session_not_found", "session_id")


async def _unknown_of(store: Path) -> Any:
    async with staged(store) as stage:
        return await stage.refused("GET", f"{SESSIONS}/sess_000000000000000000000000")


# --- the end and the deletion -------------------------------------------------------------------------------


async def test_a_closed_session_loses_its_connection_and_goes_on_when_its_client_comes_back(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        client = in_memory(stage.service)
        async with client.session(max_output_tokens=8) as chat:
            await chat.say("Hello!").text()
            handle, session_id = chat.handle or "", chat.session.id
            assert (await asked(stage, f"/{session_id}/close", "POST"))["state"] == "offloaded"
            with pytest.raises(ConnectionLost):
                await chat.say("Are you there?").text()
        async with client.resume(handle) as chat:
            assert await chat.say("And now?").text()
            assert (await asked(stage, f"/{session_id}"))["turns"] == 2


async def test_a_reply_that_runs_is_ended_by_a_close(tmp_path: Path) -> None:
    link = Scripted(spoken, END, ahead=1)
    async with staged(tmp_path, link=link) as stage, in_memory(stage.service).session() as chat:
        link.flowing = False
        turn = asyncio.ensure_future(chat.say("Tell me a long story.").text())
        await link.stuck.wait()
        session_id = chat.session.id
        assert (await asked(stage, f"/{session_id}"))["state"] == "running"
        assert (await asked(stage, f"/{session_id}/close", "POST"))["state"] == "offloaded"
        await asyncio.wait([turn])
        with pytest.raises(ConnectionLost):
            await chat.add(MessageItem.of("user", "Are you there?"))
        shown = await asked(stage, f"/{session_id}")
        assert (shown["state"], shown["turns"], shown["items"]) == ("offloaded", 0, 1)


async def leaves(root: Path, text: bytes) -> bool:
    """Wait until no file below ``root`` has the text; returns false if that does not come."""
    for _ in range(1000):
        if text not in bytes_below(root):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize("where", ["open", "idle", "offloaded"])
async def test_a_deleted_session_leaves_the_servers_files_and_opens_no_more(
    tmp_path: Path, where: str
) -> None:
    journal = JournalSettings(reserve_bytes=0, erase_seconds=0)
    async with staged(tmp_path, journal=journal) as stage:
        client = in_memory(stage.service)
        stays, _ = await left(client, "This <one> stays.")
        session_id, handle = await left(client, "This <two> goes.")
        if where == "offloaded":
            await asked(stage, f"/{session_id}/close", "POST")
        if where == "open":
            async with client.resume(handle) as chat:
                handle = chat.handle or ""
                assert (await asked(stage, f"/{session_id}", "DELETE"))["deleted"]
                with pytest.raises(SessionLost) as told_of:
                    await chat.say("Are you there?").text()
                assert (told_of.value.code, told_of.value.close_code) == ("session_deleted", 4004)
                assert "deleted" in told_of.value.message and "opens" not in told_of.value.message
        else:
            assert (await asked(stage, f"/{session_id}", "DELETE"))["deleted"]
        assert [one["id"] for one in await listed(stage)] == [stays]
        assert await stage.refused("GET", f"{SESSIONS}/{session_id}") == (
            404,
            "session_not_found",
            "session_id",
        )
        with pytest.raises(SessionLost):
            async with client.resume(handle):
                pass
        assert await leaves(tmp_path, b"<two>") and b"<one>" in bytes_below(tmp_path)


# --- from one server to another -----------------------------------------------------------------------------


async def exported(stage: Stage, session_id: str, path: Path) -> Path:
    answer = await stage.ask("GET", f"{SESSIONS}/{session_id}/export")
    assert answer.status == 200, answer.body
    await anyio.Path(path).write_bytes(answer.body)
    return path


def prompt(link: Scripted) -> list[int]:
    """The tokens of the one sequence that the engine has with the most."""
    return max((held.tokens for held in link.held.values()), key=len)


@pytest.mark.parametrize("where", ["idle", "offloaded"])
async def test_an_imported_session_goes_on_with_the_tokens_of_the_original(
    tmp_path: Path, where: str
) -> None:
    """Its replies have tokens that their text would not be cut into again."""
    odd = ["w", "ea", "ther", " is", " f", "i", "ne"]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    options: Any = {"instructions": "Be brief.", "tools": [tool], "temperature": 0.5, "seed": 7}
    here = _spelled(odd, "Second.", "Third.")
    async with staged(tmp_path / "a", link=here) as stage:
        client = in_memory(stage.service)
        session_id, handle = await left(client, "Hello!", "And again?", **options)
        if where == "offloaded":
            await asked(stage, f"/{session_id}/close", "POST")
        path = await exported(stage, session_id, tmp_path / "session.jsonl")
        async with client.resume(handle) as chat:
            assert await chat.say("And now?").text() == "Third."
            settings = chat.session
        original = prompt(here)
    there = told("Third.", "Fourth.")
    async with staged(tmp_path / "b", link=there) as stage:
        client = in_memory(stage.service)
        async with client.import_session(path) as chat:
            assert await chat.say("And now?").text() == "Third."
            assert prompt(there) == original
            ours, theirs = chat.session, settings
            assert (ours.instructions, ours.tools, ours.temperature, ours.seed) == (
                theirs.instructions,
                theirs.tools,
                theirs.temperature,
                theirs.seed,
            )
            assert ours.id != session_id
            shown = await asked(stage, f"/{ours.id}")
            handle = chat.handle or ""
        assert shown["items"] == 6 and shown["turns"] == 3
    async with staged(tmp_path / "b") as stage, in_memory(stage.service).resume(handle) as chat:
        again = await exported(stage, chat.session.id, tmp_path / "again.jsonl")
        assert again.read_bytes().splitlines()[1:5] == path.read_bytes().splitlines()[1:]


def _spelled(pieces: list[str], *texts: str) -> Scripted:
    """An engine that says the first text in these pieces, then the others."""
    from holdfast.tests.sessions.text.chat_languages import ids

    lines = [[*(one for piece in pieces for one in ids("chatml", piece)), END]]
    lines += [[*ids("chatml", text), END] for text in texts]
    flat = iter([token for line in lines for token in line])
    return Scripted(lambda tokens: next(flat, END), END, max_context=1 << 16)


async def test_what_is_out_of_the_context_stays_out_of_it(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten " * 6
    path, again = tmp_path / "session.jsonl", tmp_path / "again.jsonl"

    async def gone_on(chat: Chat, link: Scripted) -> list[int]:
        """The prompt of one more turn, with its reply."""
        await chat.say("Go on.").text()
        return max((held.tokens for held in link.held.values()), key=len)

    link = Scripted(spoken, END, ahead=1, max_context=512)
    async with staged(tmp_path / "a", link=link) as stage:
        client = in_memory(stage.service)
        session_id, handle = await left(client, *[long] * 8)
        await exported(stage, session_id, path)
        assert (await asked(stage, f"/{session_id}?items=100"))["latest"][0]["left_out"]
        link.held.clear()
        async with client.resume(handle) as chat:
            original = await gone_on(chat, link)
    link = Scripted(spoken, END, ahead=1, max_context=512)
    async with (
        staged(tmp_path / "b", link=link) as stage,
        in_memory(stage.service).import_session(path) as chat,
    ):
        await exported(stage, chat.session.id or "", again)
        assert await gone_on(chat, link) == original
    assert again.read_bytes().splitlines()[1:] == path.read_bytes().splitlines()[1:]


async def test_another_tokenizer_takes_the_text_alone(tmp_path: Path) -> None:
    async with staged(tmp_path / "a", link=_spelled(["w", "ea", "ther"])) as stage:
        session_id, _ = await left(in_memory(stage.service), "Hello!")
        path = await exported(stage, session_id, tmp_path / "session.jsonl")
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([json.dumps({**json.loads(header), "tokenizer": "00"}).encode() + b"\n", *lines])
    )
    async with staged(tmp_path / "b") as stage, in_memory(stage.service).import_session(path) as chat:
        shown = await asked(stage, f"/{chat.session.id}")
        assert (shown["turns"], shown["items"]) == (0, 2) and shown["latest"][1]["text"] == "weather"
        assert await chat.say("Go on.").text()


async def test_a_reply_that_runs_is_exported_as_far_as_it_came(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage, in_memory(stage.service).session() as chat:
        pieces = []
        async for piece in chat.say("Hello!"):
            pieces.append(piece)
            if len(pieces) == 2:
                path = await exported(stage, chat.session.id, tmp_path / "session.jsonl")
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert [line["items"][0]["role"] for line in lines[1:2]] == ["user"]
        assert len(lines) == 1 + lines[0]["entries"]


def rubbish(whole: bytes) -> Iterator[tuple[str, bytes, str]]:
    header, first, *_ = whole.splitlines(keepends=True)
    changed = json.loads(header)
    yield "empty", b"", "Line 1"
    yield "text", b"Hello!\n", "Line 1"
    yield "another object", b'{"type": "message"}\n', "no exported session"
    yield "binary", bytes(range(256)), "Line 1"
    yield "cut off at a line", header + first, "cut off"
    yield "cut off in a line", whole[:-20], "is not one of an exported session"
    yield "too long", whole + first, "too many lines"
    yield "of another version", json.dumps({**changed, "version": 2}).encode() + b"\n" + first, "form 2"
    yield "without items", header + b'{"items": []}\n' * changed["entries"], "Line 2"


async def test_what_is_no_whole_export_is_refused_in_a_line_and_nothing_is_made(tmp_path: Path) -> None:
    async with staged(tmp_path / "a") as stage:
        session_id, _ = await left(in_memory(stage.service), "Hello!")
        path = await exported(stage, session_id, tmp_path / "session.jsonl")
    whole = path.read_bytes()
    async with staged(tmp_path / "b") as stage:
        client = in_memory(stage.service)
        for name, data, cause in rubbish(whole):
            path.write_bytes(data)
            with pytest.raises(ExportInvalid, match=cause) as refused:
                async with client.import_session(path):
                    pass
            assert "\n" not in str(refused.value), name
            answer = await stage.ask("POST", "/v1/sessions", data)
            assert (answer.status, answer.error["code"]) == (400, "invalid_export"), name
        header, *lines = (json.loads(line) for line in whole.splitlines())
        wrong: list[tuple[str, Json, list[Json]]] = [
            ("invalid_value", header, [lines[0], {**lines[1], "tokens": [5000]}]),
            ("item_already_exists", header, [lines[0], lines[0]]),
            ("invalid_value", {**header, "clock": "yesterday"}, lines),
            ("invalid_export", {**header, "session": {**header["session"], "temperature": 9}}, lines),
            ("invalid_export", {**header, "session": {**header["session"], "tools": [{"type": "x"}]}}, lines),
        ]
        for code, first, more in wrong:
            data = b"".join(json.dumps(line).encode() + b"\n" for line in (first, *more))
            answer = await stage.ask("POST", "/v1/sessions", data)
            assert answer.status in (400, 409) and answer.error["code"] == code, answer.body
        assert await listed(stage) == []
        data = b"".join(json.dumps(line).encode() + b"\n" for line in (header, *lines))
        assert (await stage.ask("POST", "/v1/sessions", data)).status == 200
        assert len(await listed(stage)) == 1


# --- size ---------------------------------------------------------------------------------------------------


async def held_for(stage: Stage, lines: Lines, path: str) -> int:
    """The most lines for which the event loop is held at once while this is asked for."""
    longest = 0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = lines.count
            await asyncio.sleep(0)
            longest = max(longest, lines.count - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    with lines.of_walks():
        lines.begin()
        assert (await stage.ask("GET", SESSIONS + path)).status == 200
        lines.end()
    watching.cancel()
    return longest


async def test_neither_a_page_nor_a_search_holds_the_loop_longer_beside_more_sessions(tmp_path: Path) -> None:
    found: dict[int, list[int]] = {}
    for size in (10, 80):
        lines = Lines()
        async with staged(tmp_path / str(size)) as stage:
            client = in_memory(stage.service)
            oldest, _ = await left(client, "The first.")
            for number in range(size):
                async with client.session(instructions=str(number)):
                    pass
        async with staged(tmp_path / str(size)) as stage:
            found[size] = [
                await held_for(stage, lines, path) for path in ("?limit=5", f"/{oldest}", f"/{oldest}")
            ]
    assert all(many <= 1.5 * few + 200 for few, many in zip(found[10], found[80], strict=True)), found
