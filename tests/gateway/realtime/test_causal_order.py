"""What a client reads has the order in which the session changed: events at random while replies run, a journal
that answers late, a client that reads slowly. After a restart the conversation is the one that was told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from holdfast.gateway.access.auth import ClientIdentity
from holdfast.gateway.net.channel import MemoryChannel, memory_pair
from holdfast.gateway.service import Service
from holdfast.gateway.settings import ClientLimits, GatewaySettings
from holdfast.sdk.frames import client, codec, server
from holdfast.sdk.frames.items import AnyItem, InputItem, MessageItem
from holdfast.sdk.frames.response import ResponseParams
from holdfast.sdk.frames.session import SessionPatch
from holdfast.sessions.exports import exported
from holdfast.sessions.journal import records
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.scripted_service import END, WORDS, Scripted
from holdfast.tests.sessions.text.chat_languages import ours

from .realtime_grammar import Grammar

pytestmark = pytest.mark.anyio
SEEDS = 15
SERVED, LAST = "served", "last"
"""Ids of events that are refused: all events before have been served; all answers have been read."""


def engine(most: int) -> Scripted:
    """An engine that writes replies of fewer tokens than ``most``."""
    return Scripted(lambda tokens: END if len(tokens) % most == 0 else WORDS[len(tokens) % len(WORDS)], END)


@asynccontextmanager
async def serving(store: Path, link: Scripted | None = None) -> AsyncIterator[Service]:
    link = link or engine(29)
    service = Service(GatewaySettings(limits=ClientLimits(outbox_events=8)), "scripted", link)
    journal = await Journal.open(store, b"model", JournalSettings(reserve_bytes=0))
    service.open(SessionRegistry(link, Language.of(ours("chatml")), None, journal), journal)
    try:
        yield service
    finally:
        await service.close()
        await journal.aclose()


@asynccontextmanager
async def connected(service: Service, *, resume: bool = False) -> AsyncIterator[MemoryChannel]:
    here, there = memory_pair()
    identity = ClientIdentity(resumable=True, resume=resume, model=None)
    talking = asyncio.create_task(service.converse(there, identity))
    try:
        yield here
    finally:
        await here.close(1000, "")
        await talking
        await there.close(1000, "")


def change_of(operation: records.AnyOperation) -> tuple[str, str] | None:
    """What the operation of a session's journal changes, if a client is told of that by one event."""
    match operation:
        case records.Inserted(item=item):
            return "added", item.id
        case records.Deleted(item=item_id):
            return "deleted", item_id
        case records.Rewound(item=item_id):
            return "rewound", item_id or ""
        case records.Ended(response=response, began=True):
            return "done", response
    return None


def told_of(event: server.ServerEvent, replies: set[str]) -> tuple[str, str] | None:
    """The change that the event tells of. ``replies``: ids of the items of replies."""
    match event:
        case server.ItemAdded(item=item) if item.id not in replies:
            return "added", item.id or ""
        case server.ItemDeleted(item_id=item_id):
            return "deleted", item_id
        case server.SessionRewound(item_id=item_id):
            return "rewound", item_id or ""
        case server.ResponseDone(response=response):
            return "done", response.id
    return None


class Client:
    """A client that sends what comes to its mind, and reads through the grammar."""

    def __init__(self, channel: MemoryChannel, rng: random.Random) -> None:
        self.channel, self.rng = channel, rng
        self.grammar = Grammar()
        self.told: list[tuple[str, str]] = []
        self.replies: set[str] = set()
        self.handle = ""
        self.served = asyncio.Event()
        self._number = 0

    async def sends(self, event: client.ClientEvent) -> None:
        await self.channel.send(codec.encode(event))

    async def reads(
        self, until: Callable[[server.ServerEvent], bool], slowness: int = 0
    ) -> server.ServerEvent:
        while True:
            for _ in range(self.rng.randrange(slowness + 1)):
                await asyncio.sleep(0)
            event = codec.decode_server(await self.channel.receive())
            assert event is not None
            if isinstance(event, server.OutputItemAdded):
                self.replies.add(event.item.id or "")
            if isinstance(event, server.SessionCreated):
                self.handle = str(event.handle)
            if isinstance(event, server.ResponseDone):
                self.handle = str(event.handle)
            if refused(event) == SERVED:
                self.served.set()
            self.grammar.feed(event)
            if (change := told_of(event, self.replies)) is not None:
                self.told.append(change)
            if until(event):
                return event

    def known(self) -> str:
        return self.rng.choice([item.id or "" for item in self.grammar.items] or ["none"])

    def said(self) -> MessageItem:
        self._number += 1
        item = MessageItem.of("user", f"number {self._number}")
        return MessageItem(id=f"said_{self._number}", role="user", content=item.content)

    def idea(self) -> client.ClientEvent:
        rng = self.rng
        asked: list[InputItem] = [MessageItem.of("user", "apart")]
        ways: list[Callable[[], client.ClientEvent]] = [
            lambda: client.ItemCreate(item=self.said()),
            lambda: client.ItemCreate(item=self.said(), previous_item_id=rng.choice(["root", self.known()])),
            lambda: client.ItemDelete(item_id=self.known()),
            lambda: client.ItemRetrieve(item_id=rng.choice([None, self.known()])),
            lambda: client.ItemTruncate(item_id=self.known(), text_end=rng.randrange(4)),
            lambda: client.TextAppend(text="typed "),
            lambda: client.TextCommit(),
            lambda: client.SessionUpdate(session=SessionPatch(instructions=str(rng.random()))),
            lambda: client.SessionName(name=f"n{rng.random()}"),
            lambda: client.SessionRewind(to=self.known()),
            lambda: client.SessionBlocks(),
            lambda: client.ResponseCreate(),
            lambda: client.ResponseCreate(items=[self.said()]),
            lambda: client.ResponseCreate(response=ResponseParams(input=asked)),
            lambda: client.ResponseCreate(response=ResponseParams(conversation="none", input=asked)),
            lambda: client.ResponseSteer(input=[self.said()]),
            lambda: client.ResponseCancel(),
        ]
        return rng.choice(ways)()

    async def items(self) -> list[AnyItem]:
        """The whole conversation, as the server answers."""
        found: list[AnyItem] = []
        item_id: str | None = None
        while True:
            await self.sends(client.ItemRetrieve(item_id=item_id))
            event = await self.reads(
                lambda event: isinstance(event, server.ItemRetrieved | server.ErrorEvent)
            )
            if not isinstance(event, server.ItemRetrieved):
                return []
            found.append(event.item)
            item_id = event.previous_item_id
            if item_id is None:
                return found[::-1]


def late_answers(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """The journal tells each that waits after a while of its own, not in the order of its groups."""
    real = SessionLog.sync

    async def later(written: asyncio.Future[None]) -> None:
        await written
        for _ in range(rng.choice([0, 1, 3, 20])):
            await asyncio.sleep(0)

    monkeypatch.setattr(SessionLog, "sync", lambda log: asyncio.ensure_future(later(real(log))))


@pytest.mark.parametrize("slowness", [0, 12], ids=["fast reader", "slow reader"])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_events_are_read_in_the_order_in_which_the_session_changed(
    seed: int, slowness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    late_answers(monkeypatch, rng)
    changes: list[tuple[str, str]] = []
    async with serving(tmp_path) as service, connected(service) as channel:
        talker = Client(channel, rng)
        await talker.reads(lambda event: isinstance(event, server.ConversationCreated))
        (live,) = service.sessions()
        history = live.session.history
        record = history.record

        def seen(operation: records.AnyOperation) -> None:
            if (change := change_of(operation)) is not None:
                changes.append(change)
            record(operation)

        history.record = seen
        reading = asyncio.create_task(talker.reads(lambda event: refused(event) == LAST, slowness))
        for _ in range(40):
            await talker.sends(talker.idea())
            for _ in range(rng.choice([0, 1, 5, 40])):
                await asyncio.sleep(0)
        await talker.sends(client.ItemRetrieve(item_id="none", event_id=SERVED))
        await talker.served.wait()
        await live.idle()
        await talker.sends(client.ItemRetrieve(item_id="none", event_id=LAST))
        await reading
        assert talker.told == changes
        talker.grammar.at_rest()
        announced = talker.grammar.items
        assert await talker.items() == announced
    await told_again(tmp_path, talker, announced)


def refused(event: server.ServerEvent) -> str | None:
    return event.error.event_id if isinstance(event, server.ErrorEvent) else None


async def told_again(store: Path, before: Client, announced: list[AnyItem]) -> None:
    """The next server has the conversation as it was told; so has an export of it."""
    async with serving(store) as service, connected(service, resume=True) as channel:
        client_ = Client(channel, before.rng)
        await client_.sends(client.SessionResume(handle=before.handle))
        assert isinstance(codec.decode_server(await channel.receive()), server.SessionResumed)
        client_.grammar = before.grammar
        assert await client_.items() == announced
        (live,) = service.sessions()
        ids = [item.id for entry in exported(live.session.history) for item in entry.items]
        assert ids == [item.id for item in announced]


WAYS: dict[str, Callable[[str], list[client.ClientEvent]]] = {
    "at the end": lambda reply: [client.ItemCreate(item=named("new"))],
    "after an item of the reply": lambda reply: [
        client.ItemCreate(item=named("last")),
        client.ItemCreate(item=named("new"), previous_item_id=reply),
    ],
    "after one that follows the reply": lambda reply: [
        client.ItemCreate(item=named("first")),
        client.ItemCreate(item=named("last")),
        client.ItemCreate(item=named("new"), previous_item_id="first"),
    ],
    "after the reply's input": lambda reply: [
        client.ItemCreate(item=named("new"), previous_item_id="asked"),
        client.ItemCreate(item=named("last")),
    ],
    "at the beginning": lambda reply: [client.ItemCreate(item=named("new"), previous_item_id="root")],
    "as streamed text": lambda reply: [client.TextAppend(text="typed"), client.TextCommit()],
}


def named(name: str) -> MessageItem:
    return MessageItem(id=name, role="user", content=MessageItem.of("user", name).content)


@pytest.mark.parametrize("ends", [False, True], ids=["interrupted", "ended"])
@pytest.mark.parametrize("way", WAYS)
async def test_an_item_that_is_added_while_a_reply_runs_stays_where_it_was_announced(
    way: str, ends: bool, tmp_path: Path
) -> None:
    """Also in the next server, where an interrupted reply goes on."""
    rng, written = random.Random(0), count()

    def stopping(tokens: Sequence[int]) -> int:
        link.flowing = next(written) < 40  # the reply stands still in its midst
        return WORDS[len(tokens) % len(WORDS)]

    link = Scripted(stopping, END)
    async with serving(tmp_path, link) as service, connected(service) as channel:
        talker = Client(channel, rng)
        await talker.reads(lambda event: isinstance(event, server.ConversationCreated))
        await talker.sends(client.ResponseCreate(items=[named("asked")]))
        begun = await talker.reads(lambda event: isinstance(event, server.TextDelta))
        assert isinstance(begun, server.TextDelta)
        asked = WAYS[way](begun.item_id)
        for event in asked:
            await talker.sends(event)
        for event in asked:
            if not isinstance(event, client.TextAppend):
                await talker.reads(lambda event: isinstance(event, server.ItemDone))
        seen = await talker.items()
        assert [item.id for item in seen] == [item.id for item in talker.grammar.items]
        assert [item.status for item in seen if item.id == begun.item_id] == ["in_progress"]
        if ends:
            await talker.sends(client.ResponseCancel())
            await talker.reads(lambda event: isinstance(event, server.ResponseDone))
            assert await talker.items() == talker.grammar.items
    async with serving(tmp_path) as service, connected(service, resume=True) as channel:
        again = Client(channel, rng)
        await again.sends(client.SessionResume(handle=talker.handle))
        assert isinstance(codec.decode_server(await channel.receive()), server.SessionResumed)
        again.grammar = talker.grammar
        (live,) = service.sessions()
        await live.idle()
        stored = [item.id for item in live.session.history.items()]
        assert stored == [item.id for item in talker.grammar.items]
        assert stored == [item.id for one in exported(live.session.history) for item in one.items]
