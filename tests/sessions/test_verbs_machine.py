"""All verbs of sessions in any mix, against plain lists of tokens.

The engine is scripted: what it says is a function of the tokens before, so the lists say it too. After every
turn the engine holds what the list says, and the delivered text is that of its ids; a session opened again from
its journal is the one it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.sessions.conversation.items import Message
from holdfast.sessions.engine_copy import EngineCopy
from holdfast.sessions.errors import ConversationBusy, CutInvalid, ItemUnknown
from holdfast.sessions.journal.records import AnyOperation, Emitted
from holdfast.sessions.journal.replay import replay
from holdfast.sessions.session import Session
from holdfast.sessions.turn.events import EndReason, ReplyDone, ReplyTextDelta
from holdfast.sessions.turn.request import TurnRequest

from .scripted_link import ScriptedLink
from .session_stage import END, LANGUAGE, NAME, Kept, toks
from .text.chat_languages import backend

WORDS = sorted(set(toks("one two three four five, six. Seven eight nine ten")))
LIMIT = 12
MOST = 4
REQUEST = TurnRequest.checked(max_output_tokens=LIMIT)
FRACTIONS = st.floats(0, 1)
INDEX = st.integers(0, 1000)


def spoken(tokens: list[int]) -> int:
    """The engine's model: the next token, from those before."""
    value = hash((len(tokens), *tokens[-6:])) % 37
    return END if value < 3 else WORDS[value % len(WORDS)]


def text_of(ids: list[int]) -> str:
    return backend(NAME).decode(ids, skip_special_tokens=True)


@dataclass
class Said:
    """One turn: what was asked, by ids, and the reply's tokens and item."""

    inputs: list[tuple[str, str]]
    reply: list[int]
    item: str


@dataclass
class Shadow:
    """A conversation as a plain list."""

    turns: list[Said] = field(default_factory=list)
    waiting: list[tuple[str, str]] = field(default_factory=list)

    def tokens(self) -> list[int]:
        """Of all turns."""
        tokens: list[int] = []
        for turn in self.turns:
            tokens = self._asked(tokens, turn.inputs) + turn.reply
        return tokens

    def prompt(self) -> list[int]:
        """Of the next turn."""
        return self._asked(self.tokens(), self.waiting)

    def items(self) -> list[tuple[str, str]]:
        """Ids and texts."""
        found = []
        for turn in self.turns:
            found += [*turn.inputs, (turn.item, text_of(turn.reply))]
        return found + self.waiting

    def speak(self, most: int = LIMIT) -> list[int]:
        """What the engine answers now."""
        tokens, reply = self.prompt(), []
        while len(reply) < most and reply[-1:] != [END]:
            reply.append(spoken(tokens + reply))
        return reply

    def go_back(self, at: int) -> None:
        """Keep the first items, up to and with number ``at``."""
        keep = {item_id for item_id, _ in self.items()[: at + 1]}
        turns, self.turns, waiting = self.turns, [], self.waiting
        for turn in turns:
            if turn.item in keep:
                self.turns.append(turn)
            else:
                waiting = turn.inputs
                break
        self.waiting = [(item, text) for item, text in waiting if item in keep]

    @staticmethod
    def _asked(tokens: list[int], inputs: list[tuple[str, str]]) -> list[int]:
        if not tokens:
            text = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        else:
            text = "\n" if tokens[-1] == END else "<|im_end|>\n"
        text += "".join(f"<|im_start|>user\n{said}<|im_end|>\n" for _, said in inputs)
        return tokens + toks(text + "<|im_start|>assistant\n")


def cut_ids(reply: list[int], end: int) -> list[int]:
    """A reply's first ``end`` characters: whole tokens, and the rest of the one in between spelled anew."""
    kept: list[int] = []
    for token in reply:
        length = len(text_of([*kept, token]))
        if length > end:
            return kept + toks(text_of([*reply])[len(text_of(kept)) : end])
        kept.append(token)
        if length == end:
            return kept
    return kept


class VerbsMachine(RuleBasedStateMachine):
    """A few sessions that come from one."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.link = ScriptedLink(spoken, END, ahead=2, max_context=1 << 20)
        self.number, self.copies = 0, dict[str, EngineCopy]()
        self.sessions = [self.run(self.opened([]))]
        self.shadows = [Shadow()]

    def teardown(self) -> None:
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 20))

    async def opened(self, operations: list[AnyOperation], **more: Any) -> Session:
        if operations and "history" not in more:
            more["history"] = replay(operations, max_items=1000).history
        self.number += 1
        name, log = f"s{self.number}", Kept(operations)
        self.copies[name] = more.setdefault("sequence", EngineCopy(self.link))
        return Session(name, self.link, LANGUAGE, now=datetime(2025, 3, 1), log=log, **more)

    def one(self, index: int) -> tuple[Session, Shadow]:
        at = index % len(self.sessions)
        return self.sessions[at], self.shadows[at]

    def ask(self, session: Session, shadow: Shadow, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            item = Message(id=f"item_{self.number}", role="user", text=f"word {self.number}")
            session.history.insert(item)
            shadow.waiting.append((item.id, item.text))

    async def heard(self, session: Session, shadow: Shadow, pieces: int, cut: float | None) -> None:
        """A turn of which so many pieces are read; with ``cut`` it is interrupted there."""
        response, said, item = session.respond(REQUEST), "", ""
        end = None
        async for event in response:
            if isinstance(event, ReplyTextDelta):
                said, item, pieces = said + event.text, event.item_id, pieces - 1
            if pieces <= 0 and not isinstance(event, ReplyDone) and not response.over:
                if cut is not None and item and end is None:
                    end = round(cut * len(said))
                    with pytest.raises(CutInvalid):
                        session.cut(item, 10_000)
                    assert session.cut(item, end) is response
                await response.cancel()
            if isinstance(event, ReplyDone):
                done = event
        await self.copies[session.id].wait_stopped()
        if self.count(shadow, done, end):
            self.agree(session, shadow, engine=end is None)

    def count(self, shadow: Shadow, done: ReplyDone, end: int | None = None) -> bool:
        """The turn in the list, if it became one."""
        reply = shadow.speak(done.usage.output_tokens) if done.usage.output_tokens else []
        assert "".join(item.text for item in done.items) == text_of(reply)
        if not done.items:
            return False
        if end is not None and end < len(text_of(reply)):
            reply = cut_ids(reply, end)
        shadow.turns.append(Said(shadow.waiting, reply, done.items[0].id))
        shadow.waiting = []
        return True

    def agree(self, session: Session, shadow: Shadow, *, engine: bool) -> None:
        head = session.history.head
        assert ([] if head is None else head.tokens().tolist()) == shadow.tokens()
        if engine and shadow.turns:
            assert self.copies[session.id].held.tolist() == shadow.tokens()

    # --- the verbs ---

    @rule(index=INDEX, count=st.integers(0, 2))
    def say(self, index: int, count: int) -> None:
        session, shadow = self.one(index)
        self.ask(session, shadow, count or not shadow.items())
        self.run(self.heard(session, shadow, 1000, None))

    @rule(index=INDEX, pieces=st.integers(0, 8), cut=st.one_of(st.none(), FRACTIONS))
    def interrupt(self, index: int, pieces: int, cut: float | None) -> None:
        session, shadow = self.one(index)
        self.ask(session, shadow)
        self.run(self.heard(session, shadow, pieces, cut))

    @rule(index=INDEX, turn=INDEX, cut=FRACTIONS)
    def cut(self, index: int, turn: int, cut: float) -> None:
        session, shadow = self.one(index)
        if not shadow.turns:
            return
        one = shadow.turns[turn % len(shadow.turns)]
        text = text_of(one.reply)
        end = round(cut * len(text))
        for wrong in (len(text) + 1, 10_000):
            with pytest.raises(CutInvalid):
                session.cut(one.item, wrong)
        with pytest.raises(ItemUnknown):
            session.cut("unknown", 0)
        assert session.cut(one.item, end) is None
        if end < len(text):
            one.reply = cut_ids(one.reply, end)

    @rule(index=INDEX, item=INDEX)
    def rewind(self, index: int, item: int) -> None:
        session, shadow = self.one(index)
        items = shadow.items()
        at = item % (len(items) + 1) - 1
        session.rewind(items[at][0] if at >= 0 else "root")
        shadow.go_back(at)

    @rule(index=INDEX, turn=INDEX, inside=FRACTIONS)
    def rewind_to_token(self, index: int, turn: int, inside: float) -> None:
        session, shadow = self.one(index)
        if not shadow.turns:
            return
        if session.history.told is None:
            with pytest.raises(CutInvalid):
                session.rewind(1)
            return
        with pytest.raises(CutInvalid):
            session.rewind(len(shadow.tokens()) + 1)
        with pytest.raises(CutInvalid):
            session.rewind(2)
        at = turn % len(shadow.turns)
        one = shadow.turns[at]
        before = Shadow(shadow.turns[:at], one.inputs)
        keep = round(inside * len(one.reply))
        session.rewind(len(before.prompt()) + keep)
        if keep == 0 or not text_of(one.reply[:keep]):
            shadow.turns, shadow.waiting = before.turns, one.inputs
        else:
            one.reply = one.reply[:keep]
            shadow.turns, shadow.waiting = shadow.turns[: at + 1], []

    @precondition(lambda self: len(self.sessions) < MOST)
    @rule(index=INDEX, item=st.one_of(st.none(), INDEX), pieces=st.integers(-3, 5))
    def fork(self, index: int, item: int | None, pieces: int) -> None:
        session, shadow = self.one(index)
        if pieces >= 0:
            self.ask(session, shadow)
        self.run(self.forked(session, shadow, item, pieces))

    async def forked(self, session: Session, shadow: Shadow, item: int | None, pieces: int) -> None:
        """A child, of a session that is idle or has said so many pieces."""
        mirror = deepcopy(shadow)
        response = session.respond(REQUEST) if pieces >= 0 else None
        while response is not None and pieces >= 0:
            pieces -= 1
            event = await anext(response)
            if isinstance(event, ReplyDone):
                self.count(shadow, event)
                mirror, response = deepcopy(shadow), None
        session.log.gather()  # as a fork does
        if response is not None:
            emitted = (one for one in session.log.operations if isinstance(one, Emitted))
            reply = mirror.speak(sum(len(one.ids) // 4 for one in emitted if one.response == response.id))
            if text_of(reply):
                so_far, _ = session.branch(None)
                mirror.turns.append(Said(mirror.waiting, reply, so_far.items()[-1].id))
                mirror.waiting = []
        known = mirror.items()
        at = None if item is None or not known else item % len(known)
        history, operations = session.branch(None if at is None else known[at][0])
        if at is not None:
            mirror.go_back(at)
        child = await self.opened(
            [*session.log.operations, *operations], history=history.branch(), sequence=session.heir()
        )
        await session.lend([child], history.head)
        if response is not None:
            with pytest.raises(ConversationBusy):
                session.rewind("root")
            with pytest.raises(ConversationBusy):
                session.respond(REQUEST)
            async for event in response:
                if isinstance(event, ReplyDone) and self.count(shadow, event):
                    self.agree(session, shadow, engine=True)
        self.sessions.append(child)
        self.shadows.append(mirror)

    @rule(index=INDEX, pieces=st.integers(0, 6))
    def steer(self, index: int, pieces: int) -> None:
        session, shadow = self.one(index)
        self.ask(session, shadow)
        self.run(self.steered(session, shadow, pieces))

    async def steered(self, session: Session, shadow: Shadow, pieces: int) -> None:
        response = session.respond(REQUEST)
        async for event in response:
            pieces -= 1
            if pieces < 0 and not isinstance(event, ReplyDone):
                await response.cancel(EndReason.STEERED)
            if isinstance(event, ReplyDone):
                self.count(shadow, event)
        self.ask(session, shadow)
        await self.heard(session, shadow, 1000, None)

    @rule(index=INDEX)
    def ask_aside(self, index: int) -> None:
        """Out of band, on the same context: nothing of it stays."""
        session, shadow = self.one(index)
        self.ask(session, shadow, not shadow.items())
        prompt = shadow.prompt()

        async def answered() -> str:
            request = TurnRequest.checked(max_output_tokens=LIMIT, out_of_band=True)
            return "".join([e.text async for e in session.respond(request) if isinstance(e, ReplyTextDelta)])

        expected = shadow.speak()
        assert self.run(answered()) == text_of(expected)
        assert shadow.prompt() == prompt

    # --- the faults ---

    @rule()
    def die(self) -> None:
        self.link.die()
        self.link.restart()

    @rule(index=INDEX)
    def reopen(self, index: int) -> None:
        """The server goes, and comes back with the journal."""
        at = index % len(self.sessions)
        session = self.sessions[at]
        operations = session.log.operations
        self.run(session.aclose())
        self.sessions[at] = self.run(self.opened(operations, sequence=EngineCopy(self.link, reopened=True)))

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        """The others go on."""
        at = index % len(self.sessions)
        self.run(self.sessions.pop(at).aclose())
        self.shadows.pop(at)

    def plain(self, at: int) -> bool:
        """Whether no turn waits for being written anew."""
        history = self.sessions[at].history
        return history.told is not None or history.head is None

    @invariant()
    def the_items_are_those_of_the_lists(self) -> None:
        for at, (session, shadow) in enumerate(zip(self.sessions, self.shadows, strict=True)):
            told = [(item.id, item.text) for item in session.history.items()]
            assert told == shadow.items()
            if self.plain(at) and session.history.head is not None:
                self.agree(session, shadow, engine=False)


def test_any_mix_of_verbs_does_what_it_does_to_plain_lists() -> None:
    run_state_machine_as_test(VerbsMachine, settings=settings(max_examples=8, stateful_step_count=25))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_of_verbs() -> None:
    run_state_machine_as_test(VerbsMachine, settings=settings(max_examples=100, stateful_step_count=100))
