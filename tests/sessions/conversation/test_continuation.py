"""Digests of conversations and names: what two conversations share, and what is hashed."""

from __future__ import annotations

import hashlib
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from holdfast.sessions.conversation.continuation import (
    ALIKE,
    FIRST_CHARACTERS,
    PERSON,
    GivenConversation,
    OpenConversations,
    digest_of,
    name_digest,
)
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    Tool,
    new_id,
)

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


def history_of(items: list[Item], preamble: Preamble = PREAMBLE) -> History:
    history = History(preamble)
    for item in items:
        history.insert(item)
    return history


@given(ITEMS, ITEMS, st.integers(0, 6))
def test_two_conversations_share_their_common_beginning(one: list[Item], other: list[Item], cut: int) -> None:
    other = [*(replace(item, id=new_id("item")) for item in one[:cut]), *other]
    wanted = 0
    for left, right in zip(one, other, strict=False):
        if content(left) != content(right):
            break
        wanted += 1
    whole = GivenConversation(b"", PREAMBLE, one)
    assert whole.shared(PREAMBLE, other) == wanted
    for length in range(1, wanted + 1):
        assert whole.digest(length) == digest_of(b"", history_of(other[:length]))


@pytest.mark.parametrize(
    "other",
    [
        Preamble(instructions="Be long."),
        Preamble(instructions="Be brief.", tools=(Tool(name="add", parameters={"x": 1}),)),
        Preamble(instructions="Be brief.", tools=(Tool(name="add", parameters={"x": True}),)),
        Preamble(),
    ],
)
def test_another_preamble_shares_nothing(other: Preamble) -> None:
    items = [Message(id="1", role="user", text="a")]
    mine = Preamble(instructions="Be brief.", tools=(Tool(name="add", parameters={"x": 1.0}),))
    for preamble in (PREAMBLE, mine):
        assert GivenConversation(b"", preamble, items).shared(other, items) == 0
        assert GivenConversation(b"", preamble, items).shared(preamble, items) == 1


def test_another_tenant_shares_no_digest() -> None:
    items = [Message(id="1", role="user", text="a")]
    one, two = (GivenConversation(salt, PREAMBLE, items) for salt in (b"one", b"two"))
    assert one.digest(1) != two.digest(1)
    assert name_digest(b"one", "key k") != name_digest(b"two", "key k")


def test_the_order_of_keys_in_arguments_and_schemas_does_not_count() -> None:
    def told(arguments: str, schema: dict[str, object]) -> tuple[Preamble, list[Item]]:
        call = FunctionCall(id="1", call_id="c", name="add", arguments=arguments)
        return Preamble(tools=(Tool(name="add", parameters=schema),)), [call]

    def alike(one: tuple[Preamble, list[Item]], other: tuple[Preamble, list[Item]]) -> bool:
        same = GivenConversation(b"", *one).digest(1) == GivenConversation(b"", *other).digest(1)
        assert same is (GivenConversation(b"", *one).shared(*other) == 1)
        return same

    ordered, swapped = {"x": 1, "y": {"p": 1, "q": 2}}, {"y": {"q": 2, "p": 1}, "x": 1}
    assert alike(told('{"a": 1, "b": [2]}', ordered), told('{"b":[2],"a":1}', swapped))
    assert not alike(told('{"a": 1}', {}), told('{"a": 2}', {}))
    assert not alike(told("not JSON", {}), told("no JSON", {}))


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each hash that is computed from now on."""
    sizes: list[int] = []
    blake2b = hashlib.blake2b

    def counted(data: bytes, **more: Any) -> Any:
        sizes.extend([len(data)] * (more.get("person") == PERSON))
        return blake2b(data, **more)

    monkeypatch.setattr(hashlib, "blake2b", counted)
    return sizes


@pytest.mark.parametrize("items", [10, 1000])
def test_what_is_hashed_does_not_depend_on_what_lies_before(
    monkeypatch: pytest.MonkeyPatch, items: int
) -> None:
    said: list[Item] = [Message(id=f"i{at}", role="user", text="x" * 4000) for at in range(items)]
    known = history_of(said[:-1])
    sizes = hashed(monkeypatch)
    assert GivenConversation(b"", PREAMBLE, said).digest(items - 1) == digest_of(b"", known)
    assert len(sizes) == 6 and sum(sizes) < 4 * 4100 + 2 * (FIRST_CHARACTERS + 200)
    assert GivenConversation(b"", PREAMBLE, said).shared(PREAMBLE, known.items()) == items - 1
    assert len(sizes) == 6, "comparing hashes nothing"


def test_an_item_is_hashed_once_however_many_beginnings_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Item] = [Message(id=f"i{at}", role="user", text="x" * 4000) for at in range(20)]
    conversation, sizes = GivenConversation(b"", PREAMBLE, said), hashed(monkeypatch)
    for length in range(20, 0, -1):
        conversation.digest(length)
    assert sum(size > 4000 for size in sizes) == 20


def test_open_conversations_are_bounded_and_forget_the_oldest_and_what_is_closed() -> None:
    known = OpenConversations(most=2)
    for name in "abc":
        known.add(name.encode(), name)
    assert known.find(b"a") == () and len(known) == 2
    known.add(b"c", "d")
    assert known.find(b"c") == ("d", "c"), "the latest first"
    known.forget([b"b", b"c"], "c")
    assert known.find(b"b") == ("b",) and known.find(b"c") == ("d",)
    for number in range(2 * ALIKE):
        known.add(b"c", f"s{number}")
    assert known.find(b"c") == tuple(f"s{number}" for number in range(2 * ALIKE - 1, ALIKE - 1, -1))
    known.forget([b"c"], "s9")
    assert len(known.find(b"c")) == ALIKE - 1
