"""Conversation digests: what two conversations share, and how a session's history keeps its own."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from holdfast.sessions.continuation import (
    HistoryDigests,
    OpenConversations,
    digests_of,
    shared_length,
)
from holdfast.sessions.items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool, new_id

PREAMBLE = Preamble(instructions="Be brief.")
TEXTS = st.sampled_from(["", "a", "b", " a", "a ", "é", "a\0b"])


def item_of(kind: str, text: str, other: str) -> Item:
    match kind:
        case "call":
            return FunctionCall(id=new_id("item"), call_id=other or "c", name=text or "n", arguments="{}")
        case "output":
            return FunctionCallOutput(id=new_id("item"), call_id=other or "c", output=text)
        case role:
            return Message(id=new_id("item"), role=role, text=text)


ITEMS = st.lists(
    st.builds(item_of, st.sampled_from(["user", "assistant", "system", "call", "output"]), TEXTS, TEXTS),
    max_size=6,
)


def content(item: Item) -> object:
    """What counts of an item."""
    plain = replace(item, id="")
    if isinstance(plain, Message) and plain.role == "assistant":
        return replace(plain, text=plain.text.strip())
    return plain


@given(ITEMS, ITEMS, st.integers(0, 6))
def test_two_conversations_share_their_common_beginning(one: list[Item], other: list[Item], cut: int) -> None:
    other = [*(replace(item, id=new_id("item")) for item in one[:cut]), *other]
    wanted = 0
    for left, right in zip(one, other, strict=False):
        if content(left) != content(right):
            break
        wanted += 1
    assert shared_length(digests_of(b"", PREAMBLE, one), digests_of(b"", PREAMBLE, other)) == wanted


@pytest.mark.parametrize(
    "other",
    [
        Preamble(instructions="Be long."),
        Preamble(instructions="Be brief.", tools=(Tool(name="add"),)),
        Preamble(),
    ],
)
def test_another_preamble_shares_nothing(other: Preamble) -> None:
    items = [Message(id="1", role="user", text="a")]
    assert shared_length(digests_of(b"", PREAMBLE, items), digests_of(b"", other, items)) == -1


def test_another_tenant_shares_nothing() -> None:
    items = [Message(id="1", role="user", text="a")]
    assert not set(digests_of(b"one", PREAMBLE, items)) & set(digests_of(b"two", PREAMBLE, items))


def test_the_order_of_keys_in_arguments_and_schemas_does_not_count() -> None:
    def told(arguments: str, schema: dict[str, object]) -> list[bytes]:
        call = FunctionCall(id="1", call_id="c", name="add", arguments=arguments)
        return digests_of(b"", Preamble(tools=(Tool(name="add", parameters=schema),)), [call])

    assert told('{"a": 1, "b": [2]}', {"x": 1, "y": {"p": 1, "q": 2}}) == told(
        '{"b":[2],"a":1}', {"y": {"q": 2, "p": 1}, "x": 1}
    )
    assert told('{"a": 1}', {})[1] != told('{"a": 2}', {})[1]
    assert told("not JSON", {})[1] != told("no JSON", {})[1]


@given(st.lists(ITEMS, min_size=1, max_size=5))
def test_a_history_that_changes_has_the_digests_of_a_new_one(states: list[list[Item]]) -> None:
    history = HistoryDigests(b"salt")
    before: list[Item] = []
    for state in states:
        items = (*before[: len(before) // 2], *state)
        assert history.of(PREAMBLE, items) == digests_of(b"salt", PREAMBLE, items)
        before = list(items)
    assert history.of(Preamble(), tuple(before)) == digests_of(b"salt", Preamble(), before)


def test_open_conversations_forget_the_oldest_and_what_is_closed() -> None:
    known = OpenConversations(most=2)
    for name in "abc":
        known.add(name.encode(), name)
    assert known.find([b"a"]) is None
    assert known.find([b"b", b"c"]) == "c", "the longest beginning"
    known.add(b"c", "d")
    known.forget([b"b", b"c"], "c")
    assert known.find([b"b"]) == "b" and known.find([b"c"]) == "d", "another session has it now"
