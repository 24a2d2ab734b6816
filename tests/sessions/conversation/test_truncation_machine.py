"""Sessions that outgrow their context again and again, against a plain list of what should be left in it.

The list is cut by the rule as it is documented, one turn at a time. Turns, edits, ways back, forks and servers
that die in any mix: the model sees what the list says, and what left is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import Message
from holdfast.sessions.engine_copy import EngineCopy
from holdfast.sessions.errors import PromptTooLong
from holdfast.sessions.journal.records import AnyOperation
from holdfast.sessions.journal.replay import condensed, replay
from holdfast.sessions.session import Session
from holdfast.sessions.settings import TenantLimits
from holdfast.sessions.tenants import Tenant
from holdfast.sessions.turn.events import LeftOut, ReplyDone
from holdfast.sessions.turn.request import Truncation, TurnRequest

from ..scripted_link import ScriptedLink
from ..session_stage import END, LANGUAGE, toks
from ..test_verbs_machine import Kept, spoken

CONTEXT, LIMIT = 150, 12
HEAD = toks("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n")
INDEX = st.integers(0, 1000)


@dataclass
class Entry:
    """A user's message with its text, or a reply with its tokens."""

    id: str
    text: str = ""
    reply: list[int] | None = None


@dataclass
class PlainList:
    """A conversation, and what is out of the context, each time with the entry on which that was decided."""

    entries: list[Entry] = field(default_factory=list)
    cuts: list[tuple[str, set[str]]] = field(default_factory=list)

    @property
    def inside(self) -> list[Entry]:
        outside = set().union(*(gone for _, gone in self.cuts))
        return [entry for entry in self.entries if entry.id not in outside]

    def prompt(self, entries: list[Entry]) -> list[int]:
        """The tokens before the next reply."""
        tokens: list[int] = []
        asked = ""
        for entry in [*entries, None]:
            if entry is not None and entry.reply is None:
                asked += f"<|im_start|>user\n{entry.text}<|im_end|>\n"
                continue
            before = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
            if tokens:
                before = "\n" if tokens[-1] == END else "<|im_end|>\n"
            tokens += toks(before + asked + "<|im_start|>assistant\n")
            asked = ""
            tokens += entry.reply or [] if entry else []
        return tokens

    def cut(self, truncation: Truncation) -> tuple[list[Entry], set[str]] | None:
        """What the next turn puts before the model, and what it leaves out; None if it cannot."""
        most = CONTEXT - LIMIT
        if truncation.post_instructions is not None:
            most = min(most, len(HEAD) + truncation.post_instructions)
        wanted = len(HEAD) + int(max(0, most - len(HEAD)) * truncation.retained)
        turns: list[list[Entry]] = []
        for before, entry in zip([None, *self.inside], self.inside, strict=False):
            if before is None or (entry.reply is None and before.reply is not None):
                turns.append([])
            turns[-1].append(entry)
        kept = list(self.inside)
        last = turns.pop() if turns else []
        if len(self.prompt(kept)) > most:
            while turns and len(self.prompt(kept)) > wanted:
                kept = kept[len(turns.pop(0)) :]
        if len(self.prompt(kept)) > most:
            assert all(entry.reply is None for entry in last)
            while len(kept) > 1 and len(self.prompt(kept)) > wanted:
                kept = kept[1:]
        if len(self.prompt(kept)) >= CONTEXT:
            return None
        return kept, {entry.id for entry in self.inside} - {entry.id for entry in kept}

    def go_back(self, at: int) -> None:
        self.entries = self.entries[: at + 1]
        there = {entry.id for entry in self.entries}
        last = self.entries[-1].id if self.entries else ""
        self.cuts = [(since, gone) for since, gone in self.cuts if since in there and last not in gone]

    def delete(self, at: int) -> None:
        gone = self.entries.pop(at)
        heir = (self.entries[at : at + 1] or self.entries[-1:] or [Entry("")])[0].id
        self.cuts = [(heir if since == gone.id else since, left - {gone.id}) for since, left in self.cuts]


def stored(operations: list[AnyOperation]) -> list[AnyOperation]:
    """The operations as a journal gives them back."""
    encoded = msgspec.msgpack.encode(operations)
    return msgspec.msgpack.decode(encoded, type=list[AnyOperation])


class TruncationMachine(RuleBasedStateMachine):
    """One session, and the list; a fork replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.number = 0
        self.tenant = Tenant(TenantLimits())
        self.list = PlainList()
        self.link = ScriptedLink(spoken, END, ahead=2, max_context=CONTEXT)
        self.session = self.opened([])

    @initialize(ratio=st.sampled_from([0.0, 0.5, 0.8, 1.0]), limit=st.sampled_from([None, None, 60]))
    def configure(self, ratio: float, limit: int | None) -> None:
        self.truncation = Truncation(ratio, limit)
        self.request = TurnRequest.checked(max_output_tokens=LIMIT, truncation=self.truncation)

    def teardown(self) -> None:
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 20))

    def opened(self, operations: list[AnyOperation]) -> Session:
        history = replay(operations, max_items=1000).history if operations else None
        return self.session_of(operations, history)

    def session_of(self, operations: list[AnyOperation], history: History | None) -> Session:
        now, log = datetime(2025, 3, 1), Kept(operations)
        self.copy, more = EngineCopy(self.link), {"history": history, "tenant": self.tenant}
        return Session("s", self.link, LANGUAGE, now=now, log=log, sequence=self.copy, **more)

    def ask(self, words: list[int]) -> None:
        for count in words:
            self.number += 1
            item = Message(id=f"item_{self.number}", role="user", text=" ".join(["five"] * count) + " seven")
            self.session.history.insert(item)
            self.list.entries.append(Entry(item.id, item.text))

    def check(self, done: ReplyDone, expected: tuple[list[Entry], set[str]], died: bool = False) -> None:
        """The turn was as the list says; put it there. ``died``: its server died while it ran; a reply that was
        whole by then needs no engine to be told, so that the engine may hold nothing."""
        kept, gone = expected
        prompt, reply = self.list.prompt(kept), list[int]()
        while len(reply) < done.usage.output_tokens:
            reply.append(spoken(prompt + reply))
        assert done.usage.input_tokens == len(prompt)
        order = tuple(entry.id for entry in self.list.inside if entry.id in gone)
        whole = len(self.list.prompt(self.list.inside))
        if gone:
            assert isinstance(done.left_out, LeftOut) and done.left_out.items == order
            assert done.left_out.tokens <= whole - len(prompt)
        else:
            assert done.left_out is None
        if not done.items:  # nothing was said: it is no turn
            return
        if gone:
            self.list.cuts.append((kept[-1].id, gone))
        self.list.entries.append(Entry(done.items[0].id, "", reply))
        head = self.session.history.head
        assert head is not None and head.tokens().tolist() == prompt + reply
        assert self.copy.held.tolist() in ([prompt + reply, []] if died else [prompt + reply])

    # --- the verbs ---

    @rule(words=st.lists(st.integers(0, 30), min_size=1, max_size=3), pieces=st.one_of(st.none(), INDEX))
    def say(self, words: list[int], pieces: int | None) -> None:
        """A turn; with ``pieces`` its server dies while it runs, and the next one goes on."""
        self.ask(words)
        expected = self.list.cut(self.truncation)
        if expected is None:
            with pytest.raises(PromptTooLong):
                self.run(self.heard(self.session.respond(self.request)))
            assert not self.session.history.busy
            return
        done = self.run(self.through_death(pieces))
        self.check(done, expected, died=pieces is not None)

    async def through_death(self, pieces: int | None) -> ReplyDone:
        response = self.session.respond(self.request)
        if pieces is not None:
            for _ in range(pieces % 6):
                event = await anext(response)
                if isinstance(event, ReplyDone):
                    await self.copy.wait_stopped()
                    return event
            operations = stored(self.session.log.operations)
            self.session.log.operations = list(operations)  # what the dead server still does is lost
            await response.aclose()
            replayed = replay(operations, max_items=1000)
            assert replayed.last is not None
            self.session = self.session_of(operations, replayed.history)
            response = self.session.go_on(replayed.last)
        return await self.heard(response)

    async def heard(self, response: Any) -> ReplyDone:
        *_, done = [event async for event in response]
        assert isinstance(done, ReplyDone)
        await self.copy.wait_stopped()
        return done

    @rule(item=INDEX)
    def rewind(self, item: int) -> None:
        at = item % (len(self.list.entries) + 1) - 1
        self.session.rewind(self.list.entries[at].id if at >= 0 else "root")
        self.list.go_back(at)

    @rule(item=INDEX)
    def delete(self, item: int) -> None:
        if not self.list.entries:
            return
        at = item % len(self.list.entries)
        self.session.history.delete(self.list.entries[at].id)
        self.list.delete(at)

    @rule(item=INDEX)
    def read(self, item: int) -> None:
        """Whatever has left the context can be read, where it stood."""
        known = [entry.id for entry in self.list.entries]
        assert [item.id for item in self.session.history.items()] == known
        if known:
            assert self.session.history.get(known[item % len(known)]).id == known[item % len(known)]

    @rule(snapshot=st.booleans())
    def die(self, snapshot: bool) -> None:
        """The next server opens the session from its journal, which may have been merged."""
        operations = stored(self.session.log.operations)
        if snapshot and (found := condensed(operations)) is not None:
            operations = stored([found[1], *operations[found[0] :]])
        self.session = self.opened(operations)

    @rule(item=st.one_of(st.none(), INDEX))
    def fork(self, item: int | None) -> None:
        """A fork goes on, and the original is what it was."""
        before = [id(segment) for segment in self.session.history.segments()]
        mirror = deepcopy(self.list)
        at = None if item is None or not mirror.entries else item % len(mirror.entries)
        _, operations = self.session.branch(None if at is None else mirror.entries[at].id)
        if at is not None:
            mirror.go_back(at)
        assert [id(segment) for segment in self.session.history.segments()] == before
        self.list = mirror
        self.session = self.opened(stored([*self.session.log.operations, *operations]))

    @invariant()
    def the_context_is_as_the_list_says(self) -> None:
        inside = [entry.id for entry in self.list.inside]
        segments = self.session.history.segments()
        items = [item for one in segments for item in (one.items if hasattr(one, "items") else (one,))]
        assert [item.id for item in items] == inside


def test_what_stays_in_the_context_is_as_a_plain_list_says() -> None:
    run_state_machine_as_test(TruncationMachine, settings=settings(max_examples=20, stateful_step_count=20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_thousand_steps_of_full_contexts() -> None:
    run_state_machine_as_test(TruncationMachine, settings=settings(max_examples=300, stateful_step_count=50))
