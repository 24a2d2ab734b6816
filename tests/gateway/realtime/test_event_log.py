"""The event log: which events wait for the journal, and which are sent again to a client that comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.gateway.net.outbox import Outbox, SessionOutbox
from holdfast.gateway.realtime.event_log import EventLog, EventPosition
from holdfast.gateway.settings import ClientLimits
from holdfast.sdk.frames import server
from holdfast.sdk.frames.response import Response
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.errors import EventsExpired, StorageUnavailable

pytestmark = pytest.mark.anyio


def delta(text: str) -> server.TextDelta:
    return server.TextDelta(
        event_id="", response_id="r", output_index=0, item_id="i", content_index=0, delta=text
    )


def answer(item: str) -> server.ItemDeleted:
    return server.ItemDeleted(event_id="", item_id=item)


def done() -> server.ResponseDone:
    response = Response(id="r", status="completed", conversation_id="c", max_output_tokens="inf")
    return server.ResponseDone(event_id="", response=response)


def greeting(event_id: str, other: bool) -> server.SessionResumed:
    session = SessionResource(id="s", model="m")
    return server.SessionResumed(event_id=event_id, session=session, handle="h", reopened=other)


class Reader:
    """Takes what leaves."""

    def __init__(
        self, feed: EventLog, after: str | None = None, *, resumes: bool = True, running: bool = False
    ):
        self.outbox = Outbox(ClientLimits())
        self.events: list[dict[str, Any]] = []
        if resumes:
            feed.attach(SessionOutbox(self.outbox), greeting, after, running=running)
        else:
            feed.open_to(SessionOutbox(self.outbox))

    async def read(self) -> list[str]:
        """What all frames that have left so far said."""
        while self.outbox.statistics().events:
            frames = await self.outbox.take()
            self.events += map(msgspec.json.decode, frames)
            self.outbox.left(len(frames))
        return [event.get("delta") or event.get("item_id") or event["type"] for event in self.events]

    @property
    def last(self) -> str:
        return self.events[-1]["event_id"]


def said(feed: EventLog, *texts: str) -> None:
    for text in texts:
        feed.post([delta(text)], of_reply=True)


def ticket() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@given(
    posted=st.lists(
        st.tuples(st.sampled_from(["answer", "reply", "aside"]), st.none() | st.integers(0, 4)), max_size=24
    ),
    kept=st.permutations(range(5)),
    early=st.integers(0, 24),
)
async def test_events_leave_in_the_order_in_which_they_were_posted(
    posted: list[tuple[str, int | None]], kept: list[int], early: int
) -> None:
    """Some wait for the journal, which may have a later group before an earlier one."""
    feed = EventLog(ClientLimits())
    reader, tickets = Reader(feed, resumes=False), [ticket() for _ in range(5)]
    feed.begin_reply()
    for number, (kind, waits_for) in enumerate(posted):
        if number == early:
            tickets[kept[0]].set_result(None)
            await asyncio.sleep(0)
        event = answer(str(number)) if kind == "answer" else delta(str(number))
        feed.post([event], None if waits_for is None else tickets[waits_for], of_reply=kind == "reply")
    for group in kept:
        told = await reader.read()
        assert told == [str(number) for number in range(len(told))]
        held = posted[len(told)][1] if len(told) < len(posted) else None
        assert len(told) == len(posted) or (held is not None and not tickets[held].done())
        if not tickets[group].done():
            tickets[group].set_result(None)
        await asyncio.sleep(0)
    assert await reader.read() == [str(number) for number in range(len(posted))] and not feed.holding


async def test_news_of_the_server_do_not_wait_for_the_journal() -> None:
    feed = EventLog(ClientLimits())
    reader, kept = Reader(feed, resumes=False), ticket()
    feed.post([answer("a")], kept)
    feed.post_ahead(server.ServerGoingAway(event_id="", seconds=1, handle=None))
    assert await reader.read() == ["server.going_away"]
    kept.set_result(None)
    await asyncio.sleep(0)
    assert await reader.read() == ["server.going_away", "a"]


async def test_what_the_journal_never_got_is_not_acknowledged() -> None:
    feed = EventLog(ClientLimits())
    reader, kept = Reader(feed, resumes=False), ticket()
    said(feed, "1")
    feed.post([answer("a")], kept)
    kept.set_exception(StorageUnavailable("the disk is gone"))
    kept.exception()
    await asyncio.sleep(0)
    feed.post([answer("b")])
    said(feed, "2")
    assert await reader.read() == ["1"]


async def test_events_after_the_last_event_are_sent_once() -> None:
    feed = EventLog(ClientLimits())
    first = Reader(feed, resumes=False)
    feed.begin_reply()
    said(feed, "1", "2")
    await first.read()
    said(feed, "3")
    feed.detach()
    said(feed, "4")
    second = Reader(feed, first.last)
    said(feed, "5")
    assert await second.read() == ["session.resumed", "3", "4", "5"]
    assert await first.read() == ["1", "2", "3"], "the older socket is told no more"
    again = Reader(feed, second.last)
    assert await again.read() == ["session.resumed"]
    from_greeting = Reader(feed, second.events[0]["event_id"])
    assert await from_greeting.read() == ["session.resumed", "3", "4", "5"]


async def test_without_a_last_event_the_reply_that_runs_is_told() -> None:
    feed = EventLog(ClientLimits())
    for texts in (("old",), ("1", "2")):
        feed.begin_reply()
        said(feed, *texts)
    assert await Reader(feed, running=True).read() == ["session.resumed", "1", "2"]
    assert await Reader(feed).read() == ["session.resumed"]


async def test_a_client_that_read_only_the_greeting_gets_all_after_it() -> None:
    feed = EventLog(ClientLimits())
    for texts in (("old",), ("1", "2")):
        feed.begin_reply()
        said(feed, *texts)
        feed.post([answer("a")])
    said(feed, "3")
    greeted = Reader(feed, running=True)
    assert await greeted.read() == ["session.resumed", "1", "2", "3"]
    again = Reader(feed, greeted.events[0]["event_id"])
    assert await again.read() == ["session.resumed", "1", "2", "a", "3"]


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_reply_that_was_over_at_the_greeting_is_not_told_again_after_a_servers_death(
    resumed: bool,
) -> None:
    before = EventLog(ClientLimits())
    reader = Reader(before, resumes=False)
    before.begin_reply()
    said(before, "1", "2")
    before.post([done()], of_reply=True)
    await reader.read()
    greeted = Reader(before, reader.last if resumed else None)
    await greeted.read()
    after = EventLog(ClientLimits())
    again = Reader(after, greeted.last)
    after.begin_reply()
    said(after, "1", "2")
    after.begin_reply()
    said(after, "3")
    assert await again.read() == ["session.resumed", "3"]


async def test_a_client_greeted_by_the_next_server_gets_all_after_that() -> None:
    before, after = EventLog(ClientLimits()), EventLog(ClientLimits())
    reader = Reader(before, resumes=False)
    before.begin_reply()
    before.post([answer("a"), answer("b"), answer("c")])
    said(before, "1", "2", "3")
    await reader.read()
    after.begin_reply()
    said(after, "1", "2", "3", "4", "5")
    greeted = Reader(after, reader.last)
    assert await greeted.read() == ["session.resumed", "4", "5"]
    assert await Reader(after, greeted.events[0]["event_id"]).read() == ["session.resumed", "4", "5"]


@pytest.mark.parametrize("read", [0, 1, 3, 5])
async def test_after_a_servers_death_a_reply_that_is_told_again_goes_on_where_its_reader_was(
    read: int,
) -> None:
    before = EventLog(ClientLimits())
    client = Reader(before, resumes=False)
    before.begin_reply()
    said(before, *"12345"[:read])
    before.post([answer("x")])
    await client.read()
    feed = EventLog(ClientLimits())  # the journal has three
    feed.begin_reply()
    said(feed, *"123")
    again = Reader(feed, client.last)
    assert feed.behind == (read > 3)
    said(feed, *"456")
    feed.post([done()], of_reply=True)
    assert await again.read() == ["session.resumed", *"123456"[read:], "response.done"]
    assert not feed.behind and again.events[0]["reopened"]


async def test_a_reply_that_ends_sooner_when_told_again_still_ends() -> None:
    before = EventLog(ClientLimits())
    client = Reader(before, resumes=False)
    before.begin_reply()
    said(before, *"12345")
    await client.read()
    feed = EventLog(ClientLimits())
    feed.begin_reply()
    again = Reader(feed, client.last)
    said(feed, "1", "2")
    feed.post([done()], of_reply=True)
    assert await again.read() == ["session.resumed", "response.done"]


async def test_an_end_that_was_read_is_not_told_again() -> None:
    before = EventLog(ClientLimits())
    client = Reader(before, resumes=False)
    before.begin_reply()
    said(before, "1")
    before.post([done()], of_reply=True)
    await client.read()
    feed = EventLog(ClientLimits())
    feed.begin_reply()
    said(feed, "1")
    feed.post([done()], of_reply=True)
    assert await Reader(feed, client.last).read() == ["session.resumed"]


async def test_no_more_than_two_replies_are_kept() -> None:
    feed = EventLog(ClientLimits())
    client = Reader(feed, resumes=False)
    positions = []
    for text in ("one", "two", "three"):
        feed.begin_reply()
        said(feed, text)
        await client.read()
        positions.append(client.last)
    assert await Reader(feed, positions[0]).read() == ["session.resumed", "two", "three"]
    feed.begin_reply()
    said(feed, "four")
    with pytest.raises(EventsExpired):
        Reader(feed, positions[0])
    assert await Reader(feed, positions[1]).read() == ["session.resumed", "three", "four"]


async def test_a_done_response_shows_the_current_handle() -> None:
    handles = ["first"]
    feed = EventLog(ClientLimits(), handle=lambda: handles[-1])
    client = Reader(feed, resumes=False)
    feed.begin_reply()
    said(feed, "1")
    feed.post([done()], of_reply=True)
    await client.read()
    assert client.events[-1]["handle"] == "first"
    handles.append("second")
    again = Reader(feed, client.events[0]["event_id"])
    await again.read()
    assert again.events[-1]["handle"] == "second" and not again.events[0]["reopened"]


async def test_events_that_are_not_kept_any_more_are_not_skipped() -> None:
    feed = EventLog(ClientLimits(log_bytes=2000))
    client = Reader(feed, resumes=False)
    feed.begin_reply()
    said(feed, "first")
    await client.read()
    said(feed, *map(str, range(100)))
    for after in (client.last, "event_1", str(EventPosition.parse(client.last)).replace("-1-", "-999-", 1)):
        with pytest.raises(EventsExpired):
            Reader(feed, after)
    assert "99" in await client.read(), "the socket that is there loses nothing"


async def test_without_a_reader_a_reply_goes_on_until_no_more_can_be_kept() -> None:
    feed = EventLog(ClientLimits(log_bytes=4000))
    first = Reader(feed, resumes=False)
    feed.begin_reply()
    said(feed, "0")
    await first.read()
    feed.detach()
    await feed.room()
    said(feed, *map(str, range(1, 15)))
    waiting = asyncio.ensure_future(feed.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    second = Reader(feed, first.last)
    await waiting
    assert await second.read() == ["session.resumed", *map(str, range(1, 15))]


async def test_a_reply_that_waits_for_a_reader_that_left_goes_on_with_the_next() -> None:
    feed = EventLog(ClientLimits(outbox_events=2))
    slow = SessionOutbox(Outbox(ClientLimits(outbox_events=2)))
    feed.open_to(slow)
    feed.begin_reply()
    said(feed, "1", "2")
    waiting = asyncio.ensure_future(feed.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.detach()
    await waiting
