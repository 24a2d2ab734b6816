"""Cut anywhere, and going on is what it is after a fresh prefill of the tokens that were left."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from datetime import datetime

import pytest

from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.thread import ThreadEngine
from holdfast.runtime.verbs import Sampling, TokenLimits
from holdfast.sessions.conversation.items import Message, new_id
from holdfast.sessions.session import Session
from holdfast.sessions.text.language import Language
from holdfast.sessions.turn.events import ReplyDone, ReplyTextDelta
from holdfast.sessions.turn.request import TurnRequest

pytestmark = pytest.mark.anyio

LINES = ("Tell me the story of the fox.", "Repeat after me: bagruk 72 plimeen.", "My name is Marisol.")
THEN = ("What is my name?", "Tell me the story of the fox.", "What is my locker code?")
MOST = 40


@pytest.fixture
async def stage(pocket: EngineSettings) -> AsyncIterator[tuple[EngineLink, Language]]:
    async with ThreadEngine(pocket) as link:
        yield link, Language.load(find_model("pocket"))


def ask(session: Session, text: str) -> TurnRequest:
    session.history.insert(Message(id=new_id("item"), role="user", text=text))
    return TurnRequest.checked(max_output_tokens=MOST, temperature=0)


async def cut_somewhere(session: Session, rng: random.Random) -> None:
    """A reply is interrupted as it runs, or cut when it is over; the item is left as it was heard."""
    said, item, pieces = "", "", rng.choice([1, 2, 4, 8, 1000])
    response = session.respond(ask(session, rng.choice(LINES)))
    end = None
    async for event in response:
        if isinstance(event, ReplyTextDelta):
            said, item = said + event.text, event.item_id
            pieces -= 1
        if pieces == 0 and end is None and item:
            end = rng.randrange(len(said) + 1)
            assert session.cut(item, end) is response
            await response.cancel()
    if end is None:
        end = rng.randrange(len(said) + 1)
        assert session.cut(item, end) is None
    assert session.history.get(item).text == said[:end]


async def continued(session: Session, text: str) -> list[int]:
    async for event in session.respond(ask(session, text)):
        if isinstance(event, ReplyDone):
            assert event.usage.prefilled_tokens <= event.usage.new_tokens, (
                "what was heard is not computed again"
            )
    head = session.history.head
    assert head is not None
    return head.reply.ids.tolist()


async def fresh(link: EngineLink, language: Language, session: Session, number: int) -> list[int]:
    """What a sequence with the last turn's prompt says that shares no cache with any other."""
    head = session.history.head
    assert head is not None
    prompt = head.tokens()[: head.start].tolist()
    state = await link.open(prompt, salt=b"fresh %d" % number)
    limits = TokenLimits(MOST, tuple(language.end_ids(link.hello.eos_ids)))
    generation = await link.generate(state.seq, Sampling(), limits)
    ids = [token async for row in generation for token in row.tokens]
    await link.close(state.seq, keep_kv=False)
    return ids


async def cuts(link: EngineLink, language: Language, count: int) -> None:
    rng = random.Random(count)
    number = 0
    while number < count:
        session = Session(new_id("sess"), link, language, now=datetime(2025, 3, 1), salt=b"cuts")
        for _ in range(min(5, count - number)):
            await cut_somewhere(session, rng)
            went_on = await continued(session, rng.choice(THEN))
            assert went_on == await fresh(link, language, session, number), f"cut {number}"
            number += 1
        await session.aclose()


async def test_after_a_few_cuts_it_goes_on_as_from_a_fresh_prefill(
    stage: tuple[EngineLink, Language],
) -> None:
    await cuts(*stage, 15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_after_two_hundred_cuts_it_goes_on_as_from_a_fresh_prefill(
    stage: tuple[EngineLink, Language],
) -> None:
    await cuts(*stage, 200)
