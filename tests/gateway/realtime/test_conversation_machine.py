"""Any sequence of events, valid or junk, with replies that run, break and are cut, against the grammar.

The machine plays the client and the session at once. After every step the client's view of the conversation,
built from server events alone, must be the history.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.gateway.realtime.conversation import CancelResponse, Conversation, StartResponse
from holdfast.sdk.errors import FrameError
from holdfast.sdk.frames import codec
from holdfast.sdk.frames.session import SessionResource
from holdfast.sessions.conversation.history import History, RunningTurn
from holdfast.sessions.conversation.items import FunctionCall, Item, Message
from holdfast.sessions.conversation.tree import Draft, TurnReply
from holdfast.sessions.errors import EngineUnavailable
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.turn.events import (
    EndReason,
    ReplyArgumentsDelta,
    ReplyCallDone,
    ReplyCallStarted,
    ReplyDone,
    ReplyEvent,
    ReplyStarted,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)
from holdfast.sessions.turn.request import TurnRequest

from .realtime_grammar import Grammar, served

NAMES = ["a", "b", "c", "d", "e", "root", "nobody"]
IDS = st.sampled_from(NAMES)
TEXTS = st.text(max_size=5)
ITEMS = st.one_of(
    st.builds(
        lambda item_id, role, text: {
            "type": "message",
            "role": role,
            "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": text}],
            **item_id,
        },
        st.one_of(st.just({}), st.builds(lambda name: {"id": name}, IDS)),
        st.sampled_from(["user", "system", "assistant"]),
        TEXTS,
    ),
    st.builds(lambda name: {"type": "function_call", "name": "f", "arguments": "{}", "id": name}, IDS),
    st.builds(lambda name: {"type": "function_call_output", "call_id": "c", "output": "1", "id": name}, IDS),
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), IDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "item", "id", "session", "response", "content", "role", "tools", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)


@dataclass
class Running:
    """A reply the machine plays: the turn it holds, and the item it is saying."""

    turn: RunningTurn | None
    items: list[Item] = field(default_factory=list)
    started: bool = False
    cancelled: bool = False
    call_open: bool = False


class ConversationMachine(RuleBasedStateMachine):
    """Both sides of one conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.history = History()
        self.conversation = Conversation(
            SessionResource(id="sess", model="pocket"),
            self.history,
            ids=lambda prefix: f"{prefix}_{next(self.numbers)}",
            parallel_responses=3,
        )
        self.grammar = Grammar()
        self.grammar.feed_all(self.conversation.greet())
        self.running: dict[str, Running] = {}
        self.asked = 0

    def send(self, event: Any) -> None:
        try:
            decoded = codec.decode_client(msgspec.json.encode(event))
        except FrameError as error:
            self.grammar.feed(self.conversation.refusal(error))
            return
        for effect in served(self.conversation, decoded):
            match effect:
                case StartResponse(response_id=response_id, request=request):
                    turn = None if request.out_of_band else self.history.prepare(TurnRequest.checked()).turn
                    self.running[response_id] = Running(turn)
                case CancelResponse(response_id=response_id):
                    self.running[response_id].cancelled = True
                case told:
                    self.grammar.feed(told)

    def tell(self, response_id: str, event: ReplyEvent) -> None:
        self.grammar.feed_all(self.conversation.reply(response_id, event))

    # --- the client ---

    def names(self) -> st.SearchStrategy[str]:
        """Ids a client may know: its own, and those it was told, of replies that run too."""
        return st.sampled_from([*NAMES, *(item.id for item in self.grammar.items if item.id not in NAMES)])

    @rule(item=ITEMS, data=st.data(), inserted=st.booleans(), taken=st.integers(0, 9))
    def create_item(self, item: Any, data: st.DataObject, inserted: bool, taken: int) -> None:
        behind = {"previous_item_id": data.draw(self.names())} if inserted else {}
        if taken == 0:
            item = {**item, "id": data.draw(self.names())}
        self.send({"type": "conversation.item.create", "item": item, **behind})

    @rule(data=st.data(), verb=st.sampled_from(["delete", "retrieve"]))
    def name_item(self, data: st.DataObject, verb: str) -> None:
        self.send({"type": f"conversation.item.{verb}", "item_id": data.draw(self.names())})

    @rule(out=st.booleans(), override=st.booleans(), reference=IDS)
    def ask(self, out: bool, override: bool, reference: str) -> None:
        response: dict[str, Any] = {"conversation": "none"} if out else {}
        if override:
            response["input"] = [{"type": "item_reference", "id": reference}]
        self.asked += 1
        self.send({"type": "response.create", "response": response})

    @rule(data=st.data(), named=st.booleans())
    def cancel(self, data: st.DataObject, named: bool) -> None:
        names = [*self.running, "resp_x"]
        field = {"response_id": data.draw(st.sampled_from(names))} if named else {}
        self.send({"type": "response.cancel", **field})

    @rule(instructions=TEXTS, tools=st.lists(st.sampled_from(["f", "g"]), max_size=2))
    def update(self, instructions: str, tools: list[str]) -> None:
        listed = [{"type": "function", "name": name} for name in tools]
        self.send({"type": "session.update", "session": {"instructions": instructions, "tools": listed}})

    @rule(junk=JUNK)
    def junk(self, junk: Any) -> None:
        self.send(junk)

    @rule(junk=JUNK, kind=st.sampled_from(["conversation.item.create", "session.update", "response.create"]))
    def typed_junk(self, junk: Any, kind: str) -> None:
        self.send({**(junk if isinstance(junk, dict) else {"item": junk}), "type": kind})

    # --- the session ---

    def one(self, data: st.DataObject) -> tuple[str, Running]:
        response_id = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running[response_id]
        if not run.started:
            run.started = True
            self.tell(response_id, ReplyStarted(3))
        return response_id, run

    @precondition(lambda self: self.running)
    @rule(data=st.data(), text=st.text(min_size=1, max_size=4), fresh=st.booleans())
    def speak(self, data: st.DataObject, text: str, fresh: bool) -> None:
        response_id, run = self.one(data)
        if run.call_open:
            return
        last = run.items[-1] if run.items else None
        if fresh or not isinstance(last, Message):
            last = Message(id=f"reply_{next(self.numbers)}", role="assistant", text="")
            run.items.append(last)
        run.items[-1] = msgspec.structs.replace(last, text=last.text + text)
        self.tell(response_id, ReplyTextDelta(last.id, text))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        response_id, run = self.one(data)
        last = run.items[-1] if run.items else None
        if run.call_open and isinstance(last, FunctionCall):
            run.call_open = False
            self.tell(response_id, ReplyCallDone(last.id, last.call_id, last.name, last.arguments))
            return
        made = FunctionCall(id=f"reply_{next(self.numbers)}", call_id="c", name="f", arguments="")
        run.items.append(made)
        run.call_open = True
        self.tell(response_id, ReplyCallStarted(made.id, made.call_id, made.name))

    @precondition(lambda self: any(run.call_open for run in self.running.values()))
    @rule(delta=st.text(min_size=1, max_size=4))
    def argue(self, delta: str) -> None:
        response_id, run = next((name, run) for name, run in self.running.items() if run.call_open)
        last = run.items[-1]
        assert isinstance(last, FunctionCall)
        run.items[-1] = msgspec.structs.replace(last, arguments=last.arguments + delta)
        self.tell(response_id, ReplyArgumentsDelta(last.id, last.call_id, delta))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ending=st.sampled_from(["end", "fail", "raise"]))
    def end(self, data: st.DataObject, ending: str) -> None:
        response_id = data.draw(st.sampled_from(sorted(self.running)))
        run = self.running.pop(response_id)
        broken = ending != "end"
        if run.turn is not None:
            self.close(run.turn, () if broken else tuple(run.items))
        if ending == "raise":
            self.grammar.feed_all(self.conversation.failed(response_id, EngineUnavailable("gone")))
            return
        if run.items and (broken or run.cancelled or run.call_open):
            run.items[-1] = msgspec.structs.replace(run.items[-1], complete=False)
        status = ReplyStatus.FAILED if broken else ReplyStatus.COMPLETED
        if run.cancelled and not broken:
            status = ReplyStatus.CANCELLED
        done = ReplyDone(status, EndReason.ERROR if broken else EndReason.STOP, tuple(run.items), TurnUsage())
        self.tell(response_id, done)

    def close(self, turn: RunningTurn, items: tuple[Item, ...]) -> None:
        if items:
            reply = TurnReply(items, ids_of([1]), True)
            self.history.commit_turn(turn, Draft(None, (), 0, ids_of([])), reply)
        else:
            self.history.abort_turn(turn)

    # --- what always holds ---

    @invariant()
    def the_client_sees_the_history(self) -> None:
        unsaid = {item.id for run in self.running.values() for item in run.items}
        seen = [item.id for item in self.grammar.items if item.id not in unsaid]
        assert seen == [item.id for item in self.history.items()]

    @invariant()
    def what_runs_is_known(self) -> None:
        assert set(self.conversation.running) == set(self.running)

    def teardown(self) -> None:
        for response_id, run in list(self.running.items()):
            if run.turn is not None:
                self.history.abort_turn(run.turn)
            self.grammar.feed_all(self.conversation.failed(response_id, EngineUnavailable("gone")))
        self.running.clear()
        self.the_client_sees_the_history()
        self.grammar.at_rest()


TestConversation = ConversationMachine.TestCase
