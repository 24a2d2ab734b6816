"""The pocket world: its dialogues repeat, its splits stay apart, template and tokenizer lose nothing."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from holdfast.benchmarks.pocket.chatter import STORIES
from holdfast.benchmarks.pocket.dialogues import dialogue
from holdfast.benchmarks.pocket.script import Dialogue, head, segments
from holdfast.benchmarks.pocket.skills import SKILLS, ScoredConversation, conversations
from holdfast.benchmarks.pocket.tokens import MARKS, SPECIAL, train_tokenizer
from holdfast.benchmarks.pocket.words import WorldWords, is_held_out

SHIPPED = Path(__file__).resolve().parents[2] / "runtime" / "pocket"
DIALOGUES = [dialogue(seed, 500) for seed in range(40)]


@cache
def shipped() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return shipped()


def pieces(made: Dialogue) -> Iterator[str]:
    """The dialogue's text in the pieces the model reads and writes it in."""
    lead = head(made)
    if lead is not None:
        yield lead.text
    yield from (segment.text for exchange in made.exchanges for segment in segments(exchange))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def render(tokenizer, messages, tools, prompt=False) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
    )


def test_a_seed_is_one_dialogue() -> None:
    assert dialogue(7, 600) == dialogue(7, 600)
    assert dialogue(7, 600) != dialogue(8, 600)


@pytest.mark.parametrize("skill", SKILLS)
def test_a_seed_is_one_conversation(skill: str) -> None:
    assert list(conversations(skill, 5, 1)) == list(conversations(skill, 5, 1))
    assert list(conversations(skill, 5, 1)) != list(conversations(skill, 5, 2))


def test_held_out_words_never_occur_in_training() -> None:
    rng = random.Random(5)
    held, own = WorldWords(rng, held_out=True), WorldWords(rng)
    kinds = ("name", "place", "made_up", "word", "code", "time")
    drawn = {getattr(held, kind)().lower() for kind in kinds for _ in range(300)}
    trained = {getattr(own, kind)().lower() for kind in kinds for _ in range(300)}
    emoji = {word for word in drawn if not re.search(r"\w", word)}
    assert not (drawn - emoji) & trained
    text = " ".join(piece for seed in range(400) for piece in pieces(dialogue(seed, 600)))
    seen = set(re.findall(r"[\w:]+", text.lower()))
    assert not drawn & seen


def test_conversations_ask_for_held_out_values() -> None:
    talks = conversations("recall_short", 300, 1)
    answers = [turn.expect or "" for talk in talks for turn in talk.turns if turn.scored]
    names = [
        word for answer in answers for name in re.findall(r"called (.+)\.$", answer) for word in name.split()
    ]
    assert len(names) > 50
    assert all(is_held_out(word) for word in names if re.search(r"\w", word))


def test_the_template_writes_what_training_reads(tokenizer) -> None:
    for made in DIALOGUES:
        assert render(tokenizer, made.messages(), made.tools) == "".join(pieces(made))


def test_the_template_only_appends(tokenizer) -> None:
    for made in DIALOGUES[:15]:
        messages = made.messages()
        whole = render(tokenizer, messages, made.tools)
        for count in range(1, len(messages)):
            asks = messages[count]["role"] == "assistant"
            assert whole.startswith(render(tokenizer, messages[:count], made.tools, prompt=asks))


def test_consecutive_tool_results_share_one_user_turn(tokenizer) -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    written = render(tokenizer, [{"role": "user", "content": "hi"}, *results, results[0]], None)
    one, two = "\n<tool_response>\n1\n</tool_response>", "\n<tool_response>\n2\n</tool_response>"
    assert written.endswith(f"<|im_start|>user{one}{two}{one}<|im_end|>\n")


def test_tools_and_arguments_read_alike_in_every_form(tokenizer) -> None:
    made = next(made for made in DIALOGUES if any(exchange.call for exchange in made.exchanges))
    nested = [{"type": "function", "function": tool} for tool in made.tools]
    messages = made.messages()
    assert render(tokenizer, messages, nested) == render(tokenizer, messages, made.tools)
    as_text = json.loads(json.dumps(messages))
    for message in as_text:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    assert render(tokenizer, as_text, nested) == render(tokenizer, messages, made.tools)


def test_replies_put_back_as_text_are_the_tokens_generated(tokenizer) -> None:
    for made in DIALOGUES:
        generated = [token for piece in pieces(made) for token in encode(tokenizer, piece)]
        assert encode(tokenizer, render(tokenizer, made.messages(), made.tools)) == generated


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back(text: str) -> None:
    assert shipped().decode(encode(shipped(), text)) == text


def test_every_digit_and_mark_is_one_token(tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    assert not [token for token in vocabulary if len(token) > 1 and re.search(r"\d", token)]
    assert all(len(encode(tokenizer, mark)) == 1 for mark in (*SPECIAL, *MARKS))
    assert set(tokenizer.all_special_tokens) <= set(SPECIAL)


def test_stories_are_long(tokenizer) -> None:
    assert all(120 <= len(encode(tokenizer, story)) <= 260 for story in STORIES.values())


def asked_from_afar(conversation: ScoredConversation, tokenizer) -> tuple[int, int]:
    """Turns and tokens between the last fact asked for and its question."""
    made = conversation.dialogue()
    first = next(number for number, turn in enumerate(conversation.turns) if turn.scored)
    between = made.exchanges[4:first]  # four facts at most are told at the start
    return len(between), sum(len(encode(tokenizer, s.text)) for e in between for s in segments(e))


def test_long_recall_is_over_ten_turns_and_a_thousand_tokens(tokenizer) -> None:
    for conversation in conversations("recall_long", 40, 1):
        turns, tokens = asked_from_afar(conversation, tokenizer)
        assert turns >= 10
        assert tokens >= 1000


def test_the_shipped_folder_is_whole_and_small() -> None:
    names = {file.name for file in SHIPPED.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (SHIPPED / "model.safetensors").stat().st_size <= 8_000_000
    with safe_open(SHIPPED / "model.safetensors", framework="pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {"torch.bfloat16"}  # noqa: SIM118


def test_the_shipped_tokenizer_is_reproduced(tokenizer) -> None:
    ours = train_tokenizer()
    assert ours.get_vocab() == tokenizer.get_vocab()
    assert ours.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert ours.chat_template == tokenizer.chat_template
