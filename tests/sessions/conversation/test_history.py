"""The history under edits and turns, against a plain list of ids."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.sessions.conversation.history import ROOT, History, RunningTurn
from holdfast.sessions.conversation.items import FunctionCall, Message, Preamble, new_id
from holdfast.sessions.conversation.tree import Draft, TurnReply
from holdfast.sessions.errors import ConversationBusy, ItemExists, ItemInvalid, ItemUnknown
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.turn.events import MissReason
from holdfast.sessions.turn.request import TurnRequest


def user(item_id: str = "") -> Message:
    return Message(id=item_id or new_id("item"), role="user", text="hi")


def said(*item_ids: str) -> TurnReply:
    return TurnReply(tuple(Message(id=i, role="assistant", text="yes") for i in item_ids), ids_of([7]), True)


def drafted(turn: RunningTurn) -> Draft:
    """A draft as a renderer makes it, but for the ids: the turns after the base are rebuilt."""
    parent = turn.script.base
    kept = sum(1 for _ in parent.ancestry()) if parent else 0
    inputs: list = []
    for segment in turn.script.segments:
        if not isinstance(segment, TurnReply):
            inputs.append(segment)
            continue
        if kept == 0:
            keep = parent.length if parent else 0
            parent = Draft(parent, tuple(inputs), keep, ids_of([1])).node(segment)
        kept = max(0, kept - 1)
        inputs = []
    return Draft(parent, tuple(inputs), parent.length if parent else 0, ids_of([1]), turn.script.miss)


def take_turn(history: History, *item_ids: str) -> None:
    turn = history.prepare(TurnRequest.checked()).turn
    history.commit_turn(turn, drafted(turn), said(*item_ids))


def order(history: History) -> list[str]:
    return [item.id for item in history.items()]


def test_items_stand_where_they_were_put() -> None:
    history = History()
    history.insert(user("b"))
    history.insert(user("d"))
    history.insert(user("a"), ROOT)
    history.insert(user("c"), "b")
    assert order(history) == ["a", "b", "c", "d"]
    assert history.get("c").id == "c"


def test_unknown_known_and_unfit_items_are_refused() -> None:
    history = History()
    history.insert(user("a"))
    with pytest.raises(ItemUnknown) as unknown:
        history.insert(user("b"), "zz")
    assert unknown.value.param == "previous_item_id"
    for refused in (lambda: history.delete("zz"), lambda: history.get("zz")):
        with pytest.raises(ItemUnknown):
            refused()
    with pytest.raises(ItemExists):
        history.insert(user("a"))
    with pytest.raises(ItemExists):
        history.insert(user(ROOT))
    with pytest.raises(ItemInvalid):
        history.insert(user("x" * 65))
    assert order(history) == ["a"]


def test_a_conversation_has_a_cap() -> None:
    history = History(max_items=2)
    history.insert(user())
    history.insert(user())
    with pytest.raises(ItemInvalid, match="at most 2"):
        history.insert(user())


def test_appending_keeps_the_head_as_base() -> None:
    history = History()
    history.insert(user("a"))
    take_turn(history, "b")
    history.insert(user("c"))
    script = history.script()
    assert script.base is history.head
    assert script.miss is None


def test_one_turn_at_a_time() -> None:
    history = History()
    turn = history.prepare(TurnRequest.checked()).turn
    with pytest.raises(ConversationBusy):
        history.prepare(TurnRequest.checked())
    history.abort_turn(turn)
    history.prepare(TurnRequest.checked())


def test_an_aborted_turn_leaves_no_trace() -> None:
    history = History()
    history.insert(user("a"))
    before = history.script()
    history.abort_turn(history.prepare(TurnRequest.checked()).turn)
    assert history.script() == before
    assert history.head is None


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        (lambda history: history.delete("a"), 0),
        (lambda history: history.delete("b"), 0),
        (lambda history: history.delete("c"), 1),
        (lambda history: history.insert(user("x"), "b"), 1),
        (lambda history: history.insert(user("x"), ROOT), 0),
    ],
)
def test_an_edit_keeps_the_turns_before_it(edit, kept: int) -> None:
    history = History()
    for asked, answer in (("a", "b"), ("c", "d"), ("e", "f")):
        history.insert(user(asked))
        take_turn(history, answer)
    path = tuple(history.head.ancestry())[::-1]
    edit(history)
    script = history.script()
    assert script.base is (path[kept - 1] if kept else None)
    assert script.miss is MissReason.HISTORY_EDITED
    take_turn(history, "g")
    assert history.script().miss is None
    assert tuple(history.head.ancestry())[::-1][:kept] == path[:kept]
    assert path[-1].tokens().size > 0  # the old branch is as it was


def test_a_preamble_that_comes_back_costs_nothing() -> None:
    history = History()
    history.insert(user("a"))
    take_turn(history, "b")
    history.preamble = Preamble(instructions="other")
    assert history.script().miss is MissReason.INSTRUCTIONS_CHANGED
    history.preamble = Preamble()
    assert history.script().base is history.head


def test_editing_within_a_reply_gives_up_its_ids_and_keeps_its_other_items() -> None:
    history = History()
    history.insert(user("a"))
    turn = history.prepare(TurnRequest.checked()).turn
    call = FunctionCall(id="c", call_id="call", name="f", arguments="{}")
    reply = TurnReply((Message(id="b", role="assistant", text="yes"), call), ids_of([7]), True)
    history.commit_turn(turn, drafted(turn), reply)
    history.delete("b")
    assert order(history) == ["a", "c"]
    assert history.script().segments == (history.get("a"), call)


class Editing(RuleBasedStateMachine):
    """Any edits around any turns: items keep the order of a plain list, bases only ever match it."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History()
        self.shadow: list[str] = []
        self.turn: RunningTurn | None = None

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        item = user()
        known = [item_id for item_id in self.shadow if item_id != "*"]
        after = data.draw(st.sampled_from([None, ROOT, *known]))
        self.history.insert(item, after)
        at = {None: len(self.shadow), ROOT: 0}.get(after)
        self.shadow.insert(self.shadow.index(after) + 1 if at is None else at, item.id)

    @precondition(lambda self: any(item_id != "*" for item_id in self.shadow))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from([item_id for item_id in self.shadow if item_id != "*"]))
        self.history.delete(gone)
        self.shadow.remove(gone)

    @precondition(lambda self: self.turn is None)
    @rule()
    def begin(self) -> None:
        self.turn = self.history.prepare(TurnRequest.checked()).turn
        self.shadow.append("*")

    @precondition(lambda self: self.turn is not None)
    @rule(items=st.integers(0, 3))
    def commit(self, items: int) -> None:
        made = [new_id("item") for _ in range(items)]
        node = self.history.commit_turn(self.turn, drafted(self.turn), said(*made))
        assert self.history.head is node
        at = self.shadow.index("*")
        self.shadow[at : at + 1] = made
        self.turn = None

    @precondition(lambda self: self.turn is not None)
    @rule()
    def abort(self) -> None:
        self.history.abort_turn(self.turn)
        self.shadow.remove("*")
        self.turn = None

    @invariant()
    def the_order_is_the_lists(self) -> None:
        assert order(self.history) == [item_id for item_id in self.shadow if item_id != "*"]
        assert len(self.history) == len(self.history.items())
        assert all(self.history.get(item.id) is item for item in self.history.items())

    @invariant()
    def the_base_is_what_the_entries_begin_with(self) -> None:
        script = self.history.script()
        wanted = [] if script.base is None else list(script.base.ancestry())[::-1]
        spoken = [entry for node in wanted for entry in (*node.inputs, node.reply)]
        assert all(a is b for a, b in zip(spoken, script.segments, strict=False))
        assert len(spoken) <= len(script.segments)


Editing.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEditing = Editing.TestCase
