"""Coming back: cut sockets, servers that die, handles. The text is said exactly once, and is the same."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from holdfast.benchmarks.faults.network import proxy
from holdfast.gateway.server import Serving
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import Chat, Client, SDKError, SessionLost, connect
from holdfast.sdk.connection.reconnect import Patience
from holdfast.sdk.frames.items import MessageItem
from holdfast.sessions.conversation.items import Growing
from holdfast.sessions.session import Session
from holdfast.sessions.text.eager_prefill import PrefilledInput
from holdfast.tests.threaded import serving

from .wires import LONG, Wire, address_of, text_of

pytestmark = pytest.mark.anyio

STORY = "Tell me the story of the fox."
QUICK = Patience(first=0.002, longest=0.05, total=30.0)
SAMPLED = {"temperature": 0.9, "seed": 11, "max_output_tokens": 60}


@pytest.fixture(scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory, pocket: EngineSettings) -> AsyncIterator[Serving]:
    """A server with a journal."""
    store = tmp_path_factory.mktemp("store")
    async with serving(GatewaySettings(port=0, store=store), pocket) as running:
        yield running


async def undisturbed(url: str, *texts: str, **fields: Any) -> list[str]:
    async with connect(url) as client, client.session(**fields) as chat:
        return [await chat.say(text).text() for text in texts]


def told(chat: Chat) -> str:
    return chat.last.text


# --- sockets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "seed"), [("server", 0), ("kept", 1)])
async def test_sockets_cut_at_any_byte_lose_and_repeat_nothing(
    which: str, seed: int, server: Serving, kept: Serving
) -> None:
    running = {"server": server, "kept": kept}[which]
    dice = random.Random(seed)
    lines = ("My name is Marisol.", STORY, "What is my name?")
    wanted = await undisturbed(running.url, *lines)
    async with (
        proxy(running.url, lambda: dice.randrange(1, 6000)) as network,
        connect(network.url, patience=QUICK) as client,
        begun(client) as chat,
    ):
        for line, text in zip(lines, wanted, strict=True):
            pieces = [piece async for piece in chat.say(line)]
            assert "".join(pieces) == text == told(chat)
        assert network.cuts > 8
        assert (await running.service.snapshot()).gateway["sockets"], "the session is still there"


@asynccontextmanager
async def begun(client: Client) -> AsyncIterator[Chat]:
    """A session; its first connection may be cut before there is anything to resume."""
    while True:
        context = client.session()
        try:
            chat = await context.__aenter__()
        except SDKError:
            continue
        try:
            yield chat
        finally:
            await context.__aexit__(None, None, None)
        return


async def test_edits_are_made_once_and_answered_once_over_a_bad_network(kept: Serving) -> None:
    dice = random.Random(5)
    async with (
        proxy(kept.url, lambda: dice.randrange(600, 2500)) as network,
        connect(network.url, patience=QUICK) as client,
        begun(client) as chat,
    ):
        ids = []
        for number in range(12):
            item = await chat.add(MessageItem.of("user", f"Number {number}"))
            ids.append(item.id)
            assert item.text == f"Number {number}"
        assert len(set(ids)) == 12
        updated = await chat.update(instructions="Be brief.")
        assert updated.instructions == "Be brief."
        for number, item_id in enumerate(ids):
            assert (await chat.retrieve(item_id)).text == f"Number {number}"
        await chat.delete(ids[0])
        assert network.cuts > 3


# --- by hand ------------------------------------------------------------------------------------------------


def url_of(running: Serving, query: str) -> str:
    return f"/v1/realtime?{query}"


@asynccontextmanager
async def returning(running: Serving, **options: Any) -> AsyncIterator[Wire]:
    """A socket that gets no session of its own."""
    from websockets.asyncio.client import connect as dial

    address = running.url.replace("http", "ws", 1) + url_of(running, "resume=true")
    async with dial(address, compression=None, proxy=None, **options) as socket:
        yield Wire(socket)


@asynccontextmanager
async def greeted(running: Serving, query: str = "resumable=true") -> AsyncIterator[tuple[Wire, str]]:
    """A fresh session and its handle."""
    from websockets.asyncio.client import connect as dial

    address = running.url.replace("http", "ws", 1) + url_of(running, query)
    async with dial(address, compression=None, proxy=None) as socket:
        opened = Wire(socket)
        created = (await opened.until("conversation.created"))[0]
        yield opened, created["handle"]


async def test_the_newest_socket_has_the_session_and_the_older_is_closed(kept: Serving) -> None:
    async with greeted(kept) as (old, handle):
        await old.say("My name is Marisol.")
        async with returning(kept) as new:
            await new.send({"type": "session.resume", "handle": handle})
            resumed = await new.receive()
            assert resumed["type"] == "session.resumed" and resumed["handle"] != handle
            assert not resumed["reopened"] and resumed["running"] == []
            await old.socket.wait_closed()
            assert old.socket.close_code == 4001
            assert "Marisol" in text_of(await new.say("What is my name?"))


async def test_a_fresh_socket_may_leave_its_session_for_another(kept: Serving) -> None:
    async with greeted(kept) as (one, handle):
        await one.say("My name is Marisol.")
        async with greeted(kept) as (other, unused):
            await other.send({"type": "session.resume", "handle": handle, "event_id": "r"})
            assert (await other.receive())["type"] == "session.resumed"
            assert "Marisol" in text_of(await other.say("What is my name?"))
            assert unused != handle


async def test_response_done_carries_the_current_handle(kept: Serving) -> None:
    async with greeted(kept) as (one, handle):
        await one.send({"type": "response.create"})
        done = (await one.until("response.done"))[-1]
        assert done["handle"] == handle


async def test_a_handle_that_opens_nothing_gets_one_answer(kept: Serving) -> None:
    answers = []
    async with greeted(kept) as (one, handle), returning(kept) as good:
        await good.send({"type": "session.resume", "handle": handle, "event_id": "r"})
        newer = (await good.receive())["handle"]
        async with returning(kept) as better:
            await better.send({"type": "session.resume", "handle": newer, "event_id": "r"})
            await better.receive()
            for headers, wrong in (
                ({}, "hold_nothing"),
                ({}, handle),
                ({"Authorization": "Bearer another"}, newer),
            ):
                async with returning(kept, additional_headers=headers) as bad:
                    await bad.send({"type": "session.resume", "handle": wrong, "event_id": "r"})
                    answer = await bad.socket.recv()
                    own = json.loads(answer)["event_id"]
                    answers.append(answer.replace(own, "?" * len(own)))
                    await bad.send({"type": "response.create"})
                    assert (await bad.receive())["error"]["code"] == "session_required"
        assert one is not None
    assert json.loads(answers[0])["error"]["code"] == "session_not_found"
    assert all(answer == answers[0] for answer in answers), "to the byte"


async def test_a_resumable_clients_reply_goes_on_while_it_is_away(kept: Serving) -> None:
    (wanted,) = await undisturbed(kept.url, STORY)
    async with greeted(kept) as (one, handle):
        part = {"type": "input_text", "text": STORY}
        item = {"type": "message", "role": "user", "content": [part]}
        await one.send({"type": "conversation.item.create", "item": item, "event_id": "c1"})
        await one.send({"type": "response.create", "event_id": "c2"})
        last = (await one.until("response.output_text.delta"))[-1]
        one.socket.transport.abort()
    await asyncio.gather(*(session.idle() for session in kept.service.sessions()))
    async with returning(kept) as new:
        await new.send({"type": "session.resume", "handle": handle, "last_event": last["event_id"]})
        resumed, *rest = await new.until("response.done")
        assert resumed["last_client_event"] == "c2"
        deltas = [event["delta"] for event in rest if event["type"] == "response.output_text.delta"]
        assert last["delta"] + "".join(deltas) == wanted
        await new.send({"type": "response.create", "event_id": "c2"})
        await new.send({"type": "conversation.item.delete", "item_id": "none", "event_id": "c3"})
        assert (await new.receive())["error"]["event_id"] == "c3", "what is sent twice is served once"


@pytest.mark.parametrize("handed_over", [False, True], ids=["after the cut", "by the newer socket"])
async def test_a_commit_that_a_cut_falls_into_is_acknowledged_on_the_next_socket(
    kept: Serving, monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    began, may_go_on = asyncio.Event(), asyncio.Event()
    counted = Session.prefilled_input

    async def slowly(session: Session, item: Growing) -> PrefilledInput:
        began.set()
        await may_go_on.wait()
        return await counted(session, item)

    monkeypatch.setattr(Session, "prefilled_input", slowly)
    async with greeted(kept) as (old, handle):
        await old.send({"type": "input_text_buffer.append", "text": "Hello", "event_id": "c1"})
        await old.send({"type": "input_text_buffer.commit", "event_id": "c2"})
        await began.wait()
        if not handed_over:
            old.socket.transport.abort()
        async with returning(kept) as new:
            await new.send({"type": "session.resume", "handle": handle})
            assert (await new.receive())["last_client_event"] == "c1", "it is not served yet"
            await new.send({"type": "input_text_buffer.commit", "event_id": "c2"})
            await new.send({"type": "conversation.item.delete", "item_id": "none", "event_id": "c3"})
            await old.socket.wait_closed()
            may_go_on.set()
            told = [
                (event["type"], event.get("error", {}).get("event_id")) for event in await new.until("error")
            ]
            assert told == [
                ("input_text_buffer.committed", None),
                ("conversation.item.added", None),
                ("conversation.item.done", None),
                ("error", "c3"),
            ]


async def test_another_process_may_take_a_session_over_in_mid_reply(kept: Serving) -> None:
    async with greeted(kept) as (one, handle):
        await one.say("My name is Marisol.")
        part = {"type": "input_text", "text": STORY}
        item = {"type": "message", "role": "user", "content": [part]}
        await one.send({"type": "conversation.item.create", "item": item})
        await one.send({"type": "response.create"})
        await one.until("response.output_text.delta")
        async with connect(kept.url) as client, client.resume(handle) as chat:
            assert "Marisol" in await chat.say("What is my name?").text()


async def test_a_plain_clients_reply_is_cancelled_when_it_leaves(kept: Serving) -> None:
    async with greeted(kept, "") as (one, handle):
        part = {"type": "input_text", "text": STORY}
        item = {"type": "message", "role": "user", "content": [part]}
        await one.send({"type": "conversation.item.create", "item": item})
        await one.send({"type": "response.create"})
        await one.until("response.output_text.delta")
        one.socket.transport.abort()
    async with returning(kept) as new:
        await new.send({"type": "session.resume", "handle": handle})
        resumed = await new.receive()
        assert resumed["reopened"] and resumed["running"] == []
        await new.send({"type": "response.create"})
        await new.until("response.done")


async def test_a_session_not_resumed_in_time_is_put_away(tmp_path: Path, pocket: EngineSettings) -> None:
    limits = replace(ClientLimits(), resume_seconds=0.01)
    async with serving(GatewaySettings(port=0, store=tmp_path, limits=limits), pocket) as running:
        async with greeted(running) as (one, handle):
            await one.say("My name is Marisol.")
        while (await running.service.snapshot()).gateway["sessions_live"]:
            pass
        async with returning(running) as new:
            await new.send({"type": "session.resume", "handle": handle})
            assert (await new.receive())["reopened"]
            assert "Marisol" in text_of(await new.say("What is my name?"))


async def test_without_a_journal_a_session_not_resumed_in_time_ends(server: Serving) -> None:
    async with greeted(server, "") as (_, handle):
        pass
    async with returning(server) as new:
        await new.send({"type": "session.resume", "handle": handle})
        assert (await new.receive())["error"]["code"] == "session_not_found"


# --- servers ------------------------------------------------------------------------------------------------


class Server:
    """``holdfast serve`` on one store, killed and started again behind one address."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> str:
        self.url = await address_of(await self.spawn())
        return self.url

    async def spawn(self) -> asyncio.subprocess.Process:
        program = "from holdfast.gateway.cli.main import main; main()"
        words = "serve pocket --port 0 --kv-bytes 16MiB --max-context 2048 --dtype float32 --store"
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, *words.split(), str(self.store)),
            stderr=asyncio.subprocess.PIPE,
        )
        return self.process

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@asynccontextmanager
async def served(store: Path) -> AsyncIterator[tuple[Server, str]]:
    server = Server(store)
    try:
        yield server, await server.start()
    finally:
        await server.kill()


BOUND = {"grammar": {"type": "regex", "pattern": "(The [a-z]{1,6}[.] ){12}"}}


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        pytest.param(SAMPLED, {}, marks=pytest.mark.more),
        pytest.param({}, {}, marks=pytest.mark.slow),
        pytest.param(SAMPLED, BOUND, marks=pytest.mark.slow),
    ],
    ids=["sampled", "greedy", "bound"],
)
async def test_a_killed_servers_sessions_go_on_in_the_next(
    tmp_path: Path, fields: dict[str, Any], bound: dict[str, Any]
) -> None:
    lines = ("My name is Marisol.", STORY, "What is my name?")
    async with served(tmp_path) as (server, url):
        async with connect(url) as client, client.session(**fields) as chat:
            wanted = [
                await chat.say(line, **more).text() for line, more in zip(lines, ({}, bound, {}), strict=True)
            ]
        async with (
            proxy(url) as network,
            connect(network.url, patience=QUICK) as client,
            client.session(**fields) as chat,
        ):
            assert await chat.say(lines[0]).text() == wanted[0]
            await server.kill()
            network.retarget(await server.start())
            pieces = []
            async for piece in chat.say(lines[1], **bound):
                pieces.append(piece)
                if len(pieces) == 9:
                    await server.kill()
                    network.retarget(await server.start())
            assert "".join(pieces) == wanted[1] == told(chat)
            assert server.process is not None
            assert await chat.say(lines[2]).text() == wanted[2]
            assert chat.last.kv is not None and chat.last.kv.prefilled <= chat.last.kv.new
            handle = chat.handle
        assert handle is not None
        url = server.url
        metrics = await asyncio.to_thread(lambda: urlopen(f"{url}/metrics").read().decode())
        turns = [line for line in metrics.splitlines() if line.startswith("holdfast_turns_total{")]
        assert turns and all('protocol="realtime"' in line for line in turns), "the one that went on, too"
        async with connect(url) as client, client.resume(handle) as chat:
            assert chat.session.temperature == fields.get("temperature", 0.0)
            assert "Marisol" in await chat.say("What is my name?", temperature=0.0).text()
            newest = chat.handle
        async with connect(url) as client, client.resume(newest) as chat:
            pass
        async with connect(url) as client:
            with pytest.raises(SessionLost):
                async with client.resume(handle):
                    pass


async def test_a_server_that_leaves_in_mid_reply_keeps_the_reply_for_the_next(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    settings = GatewaySettings(port=0, store=tmp_path, drain_seconds=0.0)
    async with serving(settings, pocket) as running:
        (wanted,) = await undisturbed(running.url, STORY, **LONG)
        async with greeted(running) as (one, handle):
            await one.ask(STORY, **LONG)
            last = (await one.until("response.output_text.delta"))[-1]
            await running.service.close()
            await one.socket.wait_closed()
            assert one.socket.close_code == 1012
    async with serving(settings, pocket) as running, returning(running) as new:
        await new.send({"type": "session.resume", "handle": handle, "last_event": last["event_id"]})
        resumed, *rest = await new.until("response.done")
        assert resumed["reopened"] and len(resumed["running"]) == 1
        deltas = [event["delta"] for event in rest if event["type"] == "response.output_text.delta"]
        assert last["delta"] + "".join(deltas) == wanted


async def test_text_on_its_way_and_edits_come_back_with_the_session(
    tmp_path: Path, pocket: EngineSettings
) -> None:
    settings = GatewaySettings(port=0, store=tmp_path)
    async with serving(settings, pocket) as running, greeted(running) as (one, handle):
        await one.send({"type": "input_text_buffer.append", "text": "My name is Maria", "event_id": "1"})
        await one.send({"type": "input_text_buffer.replace", "from": 15, "text": "sol", "event_id": "2"})
        fields = {"temperature": 0.0, "seed": 3}
        await one.send({"type": "session.update", "session": fields, "event_id": "3"})
        await one.until("session.updated")
        await running.service.close()
    async with serving(settings, pocket) as running, returning(running) as new:
        await new.send({"type": "session.resume", "handle": handle})
        resumed = await new.receive()
        assert resumed["last_client_event"] == "3" and resumed["session"]["seed"] == 3
        await new.send({"type": "input_text_buffer.append", "text": ".", "event_id": "4"})
        await new.send({"type": "input_text_buffer.commit", "event_id": "5"})
        item = (await new.until("conversation.item.done"))[-1]["item"]
        assert item["content"][0]["text"] == "My name is Marisol."
        await new.send({"type": "response.create"})
        await new.until("response.done")
        assert "Marisol" in text_of(await new.say("What is my name?"))
