"""A reply cut at a character or a token: every id before it stays, and what remains says what was kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdfast.sessions.conversation.edits import check_cut, cut_after, cut_tokens, inside_character
from holdfast.sessions.conversation.items import FunctionCall, Message
from holdfast.sessions.conversation.tree import TurnReply
from holdfast.sessions.errors import CutInvalid
from holdfast.sessions.token_ids import ids_from, ids_of
from holdfast.sessions.tools.formats import Forms
from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.sessions.turn.reply_reader import ReplyReader
from holdfast.sessions.turn.request import TurnRequest

from .session_stage import END, LANGUAGE, NAME, toks
from .text.chat_languages import backend, ours

TOKENIZER = ours(NAME)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = [
    "Hello there, how are you today?",
    "Привет, как дела? 你好，今天天气怎么样？",
    "emoji 😀 🎉 👩‍👩‍👧 and combining é ñ, flags 🇳🇴🇸🇪.",
    "  spaces\n\nand lines\t",
]


def said(text: str) -> TurnReply:
    reader = ReplyReader(LANGUAGE, TurnRequest(), frozenset({END}), "response")
    reader.feed([*toks(text), END])
    reader.finish(cut=False)
    return TurnReply(reader.items(), ids_of(reader.ids), reader.ended)


def test_a_cut_falls_into_what_was_said_though_it_was_thought_before() -> None:
    thinking = replace(LANGUAGE, forms=Forms(reasoning=ReasoningForm.THINK))
    reader = ReplyReader(thinking, TurnRequest(), frozenset({END}), "response")
    reader.feed([*toks("<think>\nHello there?\n</think>\n\nHello there."), END])
    reader.finish(cut=False)
    reply = TurnReply(reader.items(), ids_of(reader.ids), reader.ended)
    (message,) = reply.items
    cut = cut_after(reply, message.id, 5, TOKENIZER)
    assert cut is not None
    left = reply.up_to(cut.keep, ids_from(cut.tail), cut.items)
    assert text_of(left.ids) == "<think>\nHello there?\n</think>\n\nHello"
    assert left.items[0].text == "Hello"


def text_of(ids: object) -> str:
    return backend(NAME).decode(list(ids), skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_keeps_all_ids_before_it_and_says_what_was_heard(text: str) -> None:
    reply = said(text)
    (message,) = reply.items
    for end in range(len(message.text) + 1):
        cut = cut_after(reply, message.id, end, TOKENIZER)
        assert cut is not None
        left = reply.up_to(cut.keep, ids_from(cut.tail), cut.items)
        assert text_of(left.ids) == text[:end] == left.items[0].text
        assert left.ids[: cut.keep].tolist() == reply.ids[: cut.keep].tolist()
        assert not left.ended and left.respelled == len(ids_from(cut.tail))
        if cut.keep < len(reply.ids) - 1:
            longer = text_of(reply.ids[: cut.keep + 1])
            assert "�" in longer or len(longer) > end, "a whole token more would still be heard"


def test_the_token_a_cut_goes_through_alone_is_spelled_anew() -> None:
    rng = random.Random(3)
    for text in TEXTS:
        reply = said(text)
        end = rng.randrange(len(text))
        cut = cut_after(reply, reply.items[0].id, end, TOKENIZER)
        assert cut is not None
        kept = text_of(reply.ids[: cut.keep])
        token = text_of(reply.ids[: cut.keep + 1])[len(kept) :]
        assert len(text_of(ids_from(cut.tail))) <= max(len(token), 3)


def test_a_message_after_a_call_is_cut_in_its_own_characters() -> None:
    reply = said(f"So. {CALL}\nSo. It is one.")
    first, call, last = reply.items
    assert isinstance(call, FunctionCall) and isinstance(last, Message)
    cut = cut_after(reply, last.id, 5, TOKENIZER)
    assert cut is not None and [item.id for item in cut.items] == [first.id, call.id, last.id]
    assert text_of([*reply.ids[: cut.keep], *ids_from(cut.tail)]).endswith("</tool_call>\nSo. I")
    cut = cut_after(reply, first.id, 2, TOKENIZER)
    assert cut is not None and [item.text for item in cut.items] == ["So"]
    cut = cut_after(reply, call.id, None, TOKENIZER)
    assert cut is not None and len(cut.items) == 2
    assert text_of([*reply.ids[: cut.keep], *ids_from(cut.tail)]).endswith("</tool_call>")


def test_a_cut_at_a_token_gives_the_items_so_far() -> None:
    reply = said(f"So. {CALL}\nSo. It is one.")
    inside = refused = 0
    for keep in range(1, len(reply.ids) + 1):
        try:
            cut = cut_tokens(reply, keep, TOKENIZER)
        except CutInvalid:
            refused += 1
            continue
        inside += 1
        reader = ReplyReader(LANGUAGE, TurnRequest(), frozenset({END}), "response")
        reader.feed(reply.ids[:keep].tolist())
        reader.finish(cut=True)
        shown = [getattr(item, "text", "").strip() for item in reader.items()]
        assert [getattr(item, "text", "").strip() for item in cut.items] == shown
    assert inside and refused, "words may be cut, calls may not"


def test_no_character_is_taken_apart() -> None:
    assert inside_character("e\u0301", 1) and inside_character("👩‍👩‍👧", 1) and inside_character("👩‍👩‍👧", 2)
    assert inside_character("🇳🇴🇸🇪", 1) and not inside_character("🇳🇴🇸🇪", 2) and inside_character("🇳🇴🇸🇪", 3)
    assert inside_character("\r\n", 1) and inside_character("👍🏽", 1)
    assert not inside_character("ab", 1) and not inside_character("e\u0301", 0)
    with pytest.raises(CutInvalid, match="apart"):
        check_cut("e\u0301", 1)
    with pytest.raises(CutInvalid, match="2 characters, none at 3"):
        check_cut("ab", 3)


def test_a_token_that_is_a_piece_of_a_character_is_no_place_to_stop() -> None:
    reply = said("a🦊")
    assert len(reply.ids) > 3, "the fox has several tokens"
    with pytest.raises(CutInvalid, match="apart"):
        cut_tokens(reply, 2, TOKENIZER)
    assert cut_tokens(reply, 1, TOKENIZER).items[0].text == "a"
