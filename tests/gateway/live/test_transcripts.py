"""Clients that send whole conversations: which session goes on, and what one request does to another."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.live.session import LiveSession
from holdfast.gateway.live.sessions import LiveSessions, Transcript
from holdfast.gateway.live.transcripts import Ask, AskedTurn, Transcripts
from holdfast.gateway.settings import ClientLimits
from holdfast.sessions.conversation.continuation import ALIKE, GivenConversation
from holdfast.sessions.conversation.items import Item, Message, Preamble, new_id
from holdfast.sessions.errors import PromptTooLong, SessionLimit
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings, SessionSettings
from holdfast.sessions.text.language import Language
from holdfast.sessions.turn.events import ReplyDone, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.conversation.test_continuation import hashed
from holdfast.tests.sessions.text.chat_languages import ours
from holdfast.tests.sessions.text.test_tokenizer import Watched

pytestmark = pytest.mark.anyio

ALICE = TurnCaller(owner=b"alice", salt=b"a")
BOB = TurnCaller(owner=b"bob", salt=b"b")


def message(role: str, text: str) -> Message:
    return Message(id=new_id("item"), role=role, text=text)  # type: ignore[arg-type]


def asked(*items: Item, instructions: str = "", **more: object) -> Ask:
    request = TurnRequest.checked(max_output_tokens=8, temperature=0)
    keys, after, name = more.pop("keys", ()), more.pop("after", ""), more.pop("name", "")
    names = {"keys": keys, "after": after, "name": name}
    transcript = Transcript(Preamble(instructions=instructions), items, **names)  # type: ignore[arg-type]
    return Ask(transcript, request, **more)  # type: ignore[arg-type]


def again(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """The same conversation as another request carries it: with other ids."""
    return tuple(message(item.role, item.text) for item in items if isinstance(item, Message))


@asynccontextmanager
async def stage(
    store: Path | None = None, limits: ClientLimits | None = None, **settings: object
) -> AsyncIterator[tuple[Transcripts, LiveSessions]]:
    link = Scripted(spoken, END)
    language = Language.of(ours("chatml"))
    journal = None if store is None else await Journal.open(store, language.digest(), JournalSettings())
    registry = SessionRegistry(link, language, SessionSettings(**settings), journal)  # type: ignore[arg-type]
    sessions = LiveSessions(registry, limits or ClientLimits())
    try:
        yield Transcripts(sessions, link, None), sessions
    finally:
        await sessions.aclose()
        await registry.aclose()
        if journal is not None:
            await journal.aclose()


async def text_of(turn: AskedTurn) -> dict[int, str]:
    await turn.whole()
    return {reply.number: "".join(part.text for part in reply.parts) for reply in turn.replies}


async def told(transcripts: Transcripts, ask: Ask, client: TurnCaller = ALICE) -> tuple[str, ReplyDone, str]:
    """The reply, its last event, and the session that it came from."""
    async with transcripts.turn(client, ask, "reply") as turn:
        texts = await text_of(turn)
        done = turn.replies[0].done
        assert done is not None
        return texts.get(0, ""), done, turn.live.id


async def test_a_conversation_goes_on_in_its_session_and_prefills_what_is_new() -> None:
    async with stage() as (transcripts, sessions):
        items: tuple[Item, ...] = (message("user", "Hello!"),)
        first, _, session = await told(transcripts, asked(*items))
        for number in range(5):
            items = (*again(items), message("assistant", first), message("user", f"And {number}?"))
            first, done, same = await told(transcripts, asked(*items))
            assert same == session and len(sessions) == 1
            assert done.usage.new_tokens < 40 < done.usage.input_tokens


async def test_white_space_around_a_reply_does_not_count() -> None:
    async with stage() as (transcripts, _):
        said, _, session = await told(transcripts, asked(message("user", "Hello!")))
        items = (message("user", "Hello!"), message("assistant", f" {said} \n"), message("user", "More"))
        assert (await told(transcripts, asked(*items)))[2] == session


async def test_another_continuation_branches_off_and_leaves_the_first_one() -> None:
    async with stage() as (transcripts, sessions):
        said, _, session = await told(transcripts, asked(message("user", "Hello!")))
        begun = (message("user", "Hello!"), message("assistant", said))
        one = await told(transcripts, asked(*begun, message("user", "One")))
        other = await told(transcripts, asked(*again(begun), message("user", "Two")))
        assert one[2] == session != other[2] and len(sessions) == 2
        assert other[1].usage.new_tokens < other[1].usage.input_tokens
        once_more = await told(transcripts, asked(*again(begun), message("user", "One")))
        assert once_more[0] == one[0], "the same prompt, the same greedy reply"
        on = (*again(begun), message("user", "One"), message("assistant", one[0]), message("user", "On"))
        assert (await told(transcripts, asked(*on)))[2] in {session, once_more[2]}


async def test_two_requests_at_once_do_not_share_a_session() -> None:
    async with stage() as (transcripts, _):
        said, _, session = await told(transcripts, asked(message("user", "Hello!")))
        begun = (message("user", "Hello!"), message("assistant", said))
        asks = [asked(*again(begun), message("user", "The same")) for _ in range(4)]
        found = await asyncio.gather(*(told(transcripts, ask) for ask in asks))
        assert len({one[2] for one in found}) == 4 and session in {one[2] for one in found}
        assert len({one[0] for one in found}) == 1


async def test_other_instructions_and_other_tenants_begin_anew() -> None:
    async with stage() as (transcripts, _):
        said, _, session = await told(transcripts, asked(message("user", "Hello!")))
        items = (message("user", "Hello!"), message("assistant", said), message("user", "More"))
        assert (await told(transcripts, asked(*again(items), instructions="Be brief.")))[2] != session
        _, done, other = await told(transcripts, asked(*again(items)), BOB)
        assert other != session and done.usage.cached_tokens == 0


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    items: tuple[Item, ...] = (message("user", "Hello!"),)
    async with stage(tmp_path) as (transcripts, _):
        for text in ("One", "Two", "Three"):
            said = (await told(transcripts, asked(*again(items))))[0]
            items = (*again(items), message("assistant", said), message("user", text))
    for _ in range(2):  # the second time from a branch of the first
        async with stage(tmp_path) as (transcripts, sessions):
            said, done, _ = await told(transcripts, asked(*again(items)))
            assert done.usage.new_tokens < 40 < done.usage.input_tokens, done.usage
            items = (*again(items), message("assistant", said), message("user", "Again"))
            _, done, _ = await told(transcripts, asked(*again(items)), BOB)
            assert done.usage.new_tokens == done.usage.input_tokens, "another tenant's"
            assert len(sessions) == 2


class Counted:
    """What is hashed of conversations, and what is tokenized, in characters or bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes, chat = hashed(monkeypatch), ours("chatml")
        self.watched = Watched(chat.backend)
        monkeypatch.setattr(chat, "backend", self.watched)

    def taken(self) -> tuple[int, int, int]:
        """The counts since the last call."""
        taken = len(self.sizes), sum(self.sizes), self.watched.total
        self.sizes.clear()
        self.watched.total = 0
        return taken


@pytest.mark.parametrize("names", [{}, {"keys": ("key k",)}], ids=["messages", "key"])
async def test_finding_a_conversation_costs_the_same_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, object]
) -> None:
    async with stage() as (transcripts, sessions):
        counted, costs = Counted(monkeypatch), []
        items: tuple[Item, ...] = (message("user", "Hello! " * 20),)
        for _ in range(12):
            counted.taken()
            said = (await told(transcripts, asked(*again(items), **names)))[0]
            costs.append(counted.taken())
            items = (*again(items), message("assistant", said), message("user", "And then? " * 15))
        assert len(sessions) == 1
        hashes, hashed, tokenized = zip(*costs, strict=True)
        assert max(hashes) <= 12
        assert hashed[-1] <= hashed[2] + 100 and tokenized[-1] <= tokenized[2] + 100


async def test_a_head_that_differs_in_the_middle_is_not_gone_on_from() -> None:
    """Its digest is the same: the number of items, the first one and the last two are equal."""
    async with stage() as (transcripts, sessions):
        begun = (message("user", "Hello!"), message("assistant", "What?"))
        for word in ("lamp", "door"):
            middle = (message("user", f"It is the {word}."), message("assistant", "Well."))
            head = (*again(begun), *middle, message("user", "Go on"))
            said, done, session = await told(transcripts, asked(*head))
            assert done.usage.new_tokens == done.usage.input_tokens or word == "door"
            on = (*again(head), message("assistant", said), message("user", "More"))
            _, _, same = await told(transcripts, asked(*again(on)))
            assert same == session, "each goes on in its own"
        assert len(sessions) == 2
        live = {one.id: one.session.history.items() for one in sessions.live()}
        words = {items[2].text for items in live.values() if isinstance(items[2], Message)}
        assert words == {"It is the lamp.", "It is the door."}


async def test_an_edited_message_branches_off_before_it_and_each_session_is_compared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All later turns of the conversation have the digests that they had before the edit."""
    compared: list[int] = []
    shared = GivenConversation.shared

    def counted(self: GivenConversation, preamble: Preamble, items: Sequence[Item]) -> int:
        compared.append(shared(self, preamble, items))
        return compared[-1]

    monkeypatch.setattr(GivenConversation, "shared", counted)
    async with stage() as (transcripts, sessions):
        items: tuple[Item, ...] = (message("user", "Hello!"),)
        for number in range(8):
            said, _, session = await told(transcripts, asked(*again(items)))
            items = (*again(items), message("assistant", said), message("user", f"And {number}?"))
        assert len(sessions) == 1
        edited = (*again(items[:4]), message("user", "And what else?"), *again(items[5:]))
        compared.clear()
        _, done, other = await told(transcripts, asked(*edited))
        assert compared == [4] and other != session
        live = {one.id: one.session.history.items() for one in sessions.live()}
        kept, changed = [[getattr(item, "text", "") for item in live[one]][:17] for one in (session, other)]
        assert kept[4] == "And 1?" and kept[:4] == changed[:4]
        assert changed == [getattr(item, "text", "") for item in edited]
        assert 0 < done.usage.input_tokens - done.usage.new_tokens < done.usage.new_tokens


async def test_a_key_finds_its_conversation_among_many_that_look_alike() -> None:
    """They have one digest, and more of them were seen since than are remembered for it."""

    def head(word: int) -> tuple[Item, ...]:
        asked_first = (message("user", "Hello!"), message("assistant", "What?"))
        return (*asked_first, message("user", f"Word {word}"), message("assistant", "Well."))

    async with stage() as (transcripts, _):
        found: dict[int, tuple[str, str]] = {}
        for word in range(ALIKE + 1):
            items = (*head(word), message("user", "Go on"))
            said, _, session = await told(transcripts, asked(*items, keys=(f"key {word}",)))
            found[word] = (said, session)
        assert len({said for said, _ in found.values()}) == 1, "they look alike"
        on = (*head(0), message("user", "Go on"), message("assistant", found[0][0]), message("user", "More"))
        for client, keys, knows in (
            (ALICE, (), False),
            (ALICE, ("key other",), False),
            (BOB, ("key 0",), False),
            (ALICE, ("key 0",), True),
        ):
            _, done, session = await told(transcripts, asked(*again(on), keys=keys), client)
            assert (session == found[0][1]) is knows, keys
            assert (done.usage.new_tokens < 40) is knows


async def test_a_key_with_another_head_begins_anew_and_leaves_what_it_led_to() -> None:
    async with stage() as (transcripts, _):
        said, _, session = await told(transcripts, asked(message("user", "Hello!"), keys=("key k",)))
        _, done, other = await told(transcripts, asked(message("user", "Good morning"), keys=("key k",)))
        assert other != session and done.usage.new_tokens == done.usage.input_tokens
        items = (message("user", "Hello!"), message("assistant", said), message("user", "More"))
        assert (await told(transcripts, asked(*items, keys=("key k",))))[2] == session
        ask = asked(*again(items), instructions="Be brief.", keys=("key k",))
        assert (await told(transcripts, ask))[2] not in {session, other}


async def test_of_two_conversations_with_one_head_the_key_finds_its_own() -> None:
    async with stage() as (transcripts, sessions):
        begun = (message("user", "Hello!"),)
        found = {}
        for key in ("one", "two"):
            ask = asked(*again(begun), keys=(f"key {key}",))
            async with transcripts.turn(ALICE, ask, "reply") as turn:
                found[key] = turn.live.id
                if key == "one":  # both run at once, so each has a session of its own
                    said = await told(transcripts, asked(*again(begun), keys=("key two",)))
                    found["two"] = said[2]
                await text_of(turn)
            if key == "one":
                break
        assert found["one"] != found["two"] and len(sessions) == 2
        on = (*begun, message("assistant", said[0]), message("user", "More"))
        for key, session in found.items():
            assert (await told(transcripts, asked(*again(on), keys=(f"key {key}",))))[2] == session


async def test_a_key_leads_to_any_point_of_its_conversation_after_a_restart(tmp_path: Path) -> None:
    items: tuple[Item, ...] = (message("user", "Hello!"),)
    async with stage(tmp_path) as (transcripts, _):
        for number in range(14):
            said = (await told(transcripts, asked(*again(items), keys=("key k",))))[0]
            items = (*again(items), message("assistant", said), message("user", f"Number {number}"))
        await told(transcripts, asked(message("user", "Hello!")))  # another one with the same first turn
    back = (*items[:8], message("user", "Something else"))  # of this point the journal has no digest
    news = {}
    for client, key in ((BOB, "k"), (ALICE, "other"), (ALICE, "k")):
        async with stage(tmp_path) as (transcripts, _):
            _, done, _ = await told(transcripts, asked(*again(back), keys=(f"key {key}",)), client)
            news[client.owner, key] = done.usage.new_tokens
    assert news[b"alice", "k"] < 40 < news[b"alice", "other"] < news[b"bob", "k"]


async def test_after_a_restart_a_conversation_is_found_by_its_last_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: tuple[Item, ...] = (message("user", "Hello! " * 20),)
    async with stage(tmp_path) as (transcripts, _):
        for _ in range(10):
            said = (await told(transcripts, asked(*again(items))))[0]
            items = (*again(items), message("assistant", said), message("user", "And then? " * 15))
    async with stage(tmp_path) as (transcripts, _):
        counted = Counted(monkeypatch)
        _, done, _ = await told(transcripts, asked(*again(items)))
        hashes, hashed, tokenized = counted.taken()
        assert done.usage.new_tokens < 400 < 1000 < done.usage.input_tokens, done.usage
        assert hashes <= 12 and hashed < 5000 and tokenized < 1500


async def test_what_a_running_reply_comes_before_is_not_shared() -> None:
    """Items that were added while it runs stand behind it, so the next request does not continue them."""
    first = asked(message("user", "Hello!"), keys=("key k",))
    async with stage() as (transcripts, sessions), transcripts.turn(ALICE, first, "reply") as turn:
        turn.live.session.history.insert(message("user", "More"))
        both = (message("user", "Hello!"), message("user", "More"))
        _, _, other = await told(transcripts, asked(*both, keys=("key k",)))
        texts = [item.text for live in sessions.live() if live.id == other for item in items_in(live)]
        assert texts[:2] == ["Hello!", "More"], "without the other one's reply"
        await text_of(turn)


def items_in(live: LiveSession) -> list[Message]:
    return [item for item in live.session.history.items() if isinstance(item, Message)]


async def test_an_older_point_of_a_stored_conversation_is_found(tmp_path: Path) -> None:
    items: tuple[Item, ...] = (message("user", "Hello!"),)
    async with stage(tmp_path) as (transcripts, _):
        for number in range(12):
            said = (await told(transcripts, asked(*again(items))))[0]
            items = (*again(items), message("assistant", said), message("user", f"Number {number}"))
    async with stage(tmp_path) as (transcripts, _):
        back = (*again(items[:10]), message("user", "Something else"))
        _, done, _ = await told(transcripts, asked(*back))
        assert done.usage.new_tokens < 40 < done.usage.input_tokens, done.usage


async def test_further_choices_are_out_of_band() -> None:
    async with stage() as (transcripts, sessions):
        async with transcripts.turn(ALICE, asked(message("user", "Hello!"), choices=3), "reply") as turn:
            texts = await text_of(turn)
        assert set(texts) == {0, 1, 2} and all(reply.done for reply in turn.replies) and len(sessions) == 1
        assert len(turn.live.session.history) == 2


async def test_a_turn_that_is_left_is_cancelled_and_its_session_goes_on() -> None:
    async with stage() as (transcripts, sessions):
        async with transcripts.turn(ALICE, asked(message("user", "Hello!")), "reply") as turn:
            pass
        assert sessions.turns.running == 0
        (live,) = sessions.live() or [turn.live]
        assert live.at_rest
        _, done, _ = await told(transcripts, asked(message("user", "Hello!")))
        assert done.status is not ReplyStatus.FAILED


async def test_a_turn_may_be_left_after_the_server_has_closed_its_session(tmp_path: Path) -> None:
    async with (
        stage(tmp_path) as (transcripts, sessions),
        transcripts.turn(ALICE, asked(message("user", "Hello!")), "resp_1"),
    ):
        await sessions.aclose()
    assert not sessions.live()


async def test_a_refused_turn_leaves_no_session(tmp_path: Path) -> None:
    async with stage(tmp_path) as (transcripts, sessions):
        with pytest.raises(PromptTooLong) as refused:
            await told(transcripts, asked(message("user", "word " * 100_000)))
        for words in ("this model's maximum context length is", "prompt is too long"):
            assert words in str(refused.value).lower(), "clients tell this error by such words"
        assert refused.value.tokens > refused.value.context == transcripts.context, "told in tokens"
        assert len(sessions) == 0
        assert (await sessions.registry.journal.statistics())["journal_sessions"] == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("restart", [False, True], ids=["in memory", "stored"])
async def test_refused_turns_of_a_known_conversation_leave_no_sessions(tmp_path: Path, restart: bool) -> None:
    first = message("user", "Hello!")

    async def sessions_after_refusals(transcripts: Transcripts, sessions: LiveSessions, said: str) -> object:
        items = (*again((first,)), message("assistant", said), message("user", "word " * 1000))
        for _ in range(5):
            with pytest.raises(PromptTooLong):
                await told(transcripts, asked(*again(items)))
        assert len(sessions) <= 1
        return (await sessions.registry.journal.statistics())["journal_sessions"]  # type: ignore[union-attr]

    async with stage(tmp_path) as (transcripts, sessions):
        said = (await told(transcripts, asked(first)))[0]
        if not restart:
            assert await sessions_after_refusals(transcripts, sessions, said) == 1
    async with stage(tmp_path) as (transcripts, sessions):
        assert await sessions_after_refusals(transcripts, sessions, said) == 1
        items = (*again((first,)), message("assistant", said), message("user", "And then?"))
        _, done, _ = await told(transcripts, asked(*items))
        assert done.status is not ReplyStatus.FAILED and done.usage.new_tokens < 40


async def test_idle_sessions_make_room_without_a_journal() -> None:
    async with stage(max_sessions=3) as (transcripts, sessions):
        for number in range(10):
            await told(transcripts, asked(message("user", f"Number {number}")))
        assert len(sessions) <= 3
        async with AsyncExitStack() as stack:
            for text in "abc":
                await stack.enter_async_context(
                    transcripts.turn(ALICE, asked(message("user", text)), "reply")
                )
            with pytest.raises(SessionLimit):
                await told(transcripts, asked(message("user", "d")))


async def test_prompts_of_tokens_are_replies_of_their_own_and_are_not_kept(tmp_path: Path) -> None:
    async with stage(tmp_path) as (transcripts, sessions):
        request = TurnRequest.checked(max_output_tokens=4, out_of_band=True, prompt=[5])
        ask = Ask(Transcript(Preamble(), ()), request, choices=2, prompts=((5, 6), (7,)))
        async with transcripts.turn(ALICE, ask, "reply") as turn:
            await text_of(turn)
        assert [reply.usage.input_tokens for reply in turn.replies] == [2, 2, 1, 1]
        assert len(sessions) == 0
        assert (await sessions.registry.journal.statistics())["journal_sessions"] == 0  # type: ignore[union-attr]


async def test_a_closed_session_is_freed_without_the_garbage_collector() -> None:
    """A full collection stops all sockets, so a busy server makes none."""
    async with stage(limits=replace(ClientLimits(), resume_seconds=0.01)) as (transcripts, sessions):
        gc.collect()
        gc.disable()
        try:
            async with transcripts.turn(ALICE, asked(message("user", "Hello!")), "reply") as turn:
                await text_of(turn)
                live, session = weakref.ref(turn.live), weakref.ref(turn.live.session)
            del turn
            assert session() is not None
            while len(sessions):  # noqa: ASYNC110 - a timer of the server closes it
                await asyncio.sleep(0.01)
            while live() is not None or session() is not None:  # noqa: ASYNC110 - its task ends by itself
                await asyncio.sleep(0)
        finally:
            gc.enable()
