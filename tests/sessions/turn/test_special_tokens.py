"""Forms with tags that are special tokens: they are read though decoded text leaves them out, and some of them
end the reply."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from holdfast.sessions.conversation.edits import cut_after, cut_tokens
from holdfast.sessions.conversation.items import FunctionCall, Message, Tool
from holdfast.sessions.conversation.tree import TurnReply
from holdfast.sessions.errors import CutInvalid
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.token_ids import ids_from, ids_of
from holdfast.sessions.tools.formats import FORMATS, XML_FORMATS
from holdfast.sessions.tools.forms import CallForm, ReasoningForm
from holdfast.sessions.turn.events import ReplyReasoningDelta
from holdfast.sessions.turn.reply_reader import ReplyReader
from holdfast.sessions.turn.request import TurnRequest

from ..text.chat_languages import FAMILIES, backend
from ..text.published_templates import language as published
from .test_reply_reader import rows_of

SPECIAL = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"),
    *("<|END_RESPONSE|>", "<|tool_call|>", "<|/tool_call|>", "<|eom_id|>", "<|eot_id|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|channel>", "<channel|>", "<|tool_response>", "<start_function_response>"),
)
SPECIAL += tuple(
    mark
    for form in (*FORMATS.values(), *XML_FORMATS.values())
    for mark in form.marks
    if mark[0] == "<" and mark not in SPECIAL and "seed:" not in mark
)
HARMONY = (
    "{%- for message in messages %}{{- '<|start|>' + message.role }}"
    "{%- if message.role == 'assistant' %}{{- '<|channel|>final' }}{%- endif %}"
    "{{- '<|message|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
ADD = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
CALLS = {
    CallForm.HARMONY: "<|channel|>analysis<|message|>Hello<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Hello<|end|><|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json"
    "<|message|>"
    '{"a": 1}<|call|>',
    CallForm.COMMAND_R7B: "<|START_THINKING|>Hello<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>"
    '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>',
    CallForm.GRANITE: 'Hello<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    CallForm.PHI4_MINI: 'Hello<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>',
    CallForm.DEEPSEEK_V31: "Hello<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    "```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    CallForm.QWEN3_CODER: "Hello\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    CallForm.GLM45: "Hello\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    CallForm.GLM47: "Hello<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    CallForm.KIMI_K2: "Hello<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    CallForm.MINIMAX: 'Hello\n<tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n</tool_calls>',
    CallForm.MINIMAX_M2: 'Hello\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    CallForm.GEMMA4: "<|channel>thought\nHello\n<channel|>Hello<|tool_call>call:add{a:1}<tool_call|>",
    CallForm.FUNCTIONGEMMA: "Hello<start_function_call>call:add{a:1}<end_function_call>",
    CallForm.LFM2: "Hello<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    CallForm.NEMOTRON_JSON: 'Hello\n<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>',
}

THINKING = (CallForm.HARMONY, CallForm.COMMAND_R7B, CallForm.GEMMA4)


@cache
def language(form: CallForm) -> Language:
    """A language in this form in which the tags of all forms are special tokens."""
    tokenizer = Tokenizer.from_str(backend("chatml").to_str())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    template = HARMONY if form is CallForm.HARMONY else FAMILIES["chatml"].template
    thinking = {CallForm.COMMAND_R7B: ReasoningForm.COMMAND, CallForm.GEMMA4: ReasoningForm.GEMMA4}
    reasoning = thinking.get(form)
    return Language.of(ChatTokenizer(tokenizer, template), form, reasoning)


def tokens(form: CallForm, text: str) -> list[int]:
    return list(language(form).tokenizer.backend.encode(text, add_special_tokens=False).ids)


def replied(form: CallForm, rows: list[list[int]], *, parse_calls: bool = True) -> tuple[TurnReply, str]:
    """The reply and its reasoning."""
    request = TurnRequest.checked(offered=[ADD], tool_choice="auto" if parse_calls else "none")
    reader = ReplyReader(language(form), request, language(form).end_ids(()), "response", [ADD])
    events = [event for row in rows for event in reader.feed(row)]
    events += reader.finish(cut=False)
    thought = "".join(event.text for event in events if isinstance(event, ReplyReasoningDelta))
    return TurnReply(reader.items(), ids_of(reader.ids), reader.ended), thought


@pytest.mark.parametrize("form", CALLS)
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_calls_and_reasoning_between_special_tokens_are_read(form: CallForm, cuts: list[int]) -> None:
    reply, thought = replied(form, rows_of(tokens(form, CALLS[form]), cuts))
    said, call = reply.items
    assert isinstance(said, Message) and said.text == "Hello"
    assert isinstance(call, FunctionCall) and (call.name, call.arguments) == ("add", '{"a": 1}')
    assert thought == ("Hello" if form in THINKING else "")


REASONED = {
    CallForm.GLM45: (ReasoningForm.THINK, "<think>Hm.</think>\n"),
    CallForm.GLM47: (ReasoningForm.OPENED, "Hm.</think>"),
    CallForm.KIMI_K2: (ReasoningForm.THINK, "<think>Hm.</think>"),
    CallForm.MINIMAX: (ReasoningForm.THINK, "<think>\nHm.\n</think>\n\n"),
    CallForm.MINIMAX_M2: (ReasoningForm.OPENED, "Hm.\n</think>\n\n"),
    CallForm.LFM2: (ReasoningForm.THINK, "<think>Hm.</think>"),
    CallForm.NEMOTRON_JSON: (ReasoningForm.OPENED, "Hm.\n</think>\n\n"),
}
"""How models with these forms write reasoning before a call."""


@pytest.mark.parametrize("form", REASONED)
@pytest.mark.parametrize("special", [False, True])
def test_reasoning_before_a_call_is_read(form: CallForm, special: bool) -> None:
    reasoning, thought = REASONED[form]
    backend_ = Tokenizer.from_str(language(form).tokenizer.backend.to_str())
    backend_.add_tokens(
        [AddedToken(tag, normalized=False, special=special) for tag in ("<think>", "</think>")]
    )
    found = Language.of(ChatTokenizer(backend_, FAMILIES["chatml"].template), form, reasoning)
    ids = backend_.encode(thought + CALLS[form], add_special_tokens=False).ids
    for rows in ([ids], [[token] for token in ids]):
        reader = ReplyReader(found, TurnRequest.checked(offered=[ADD]), frozenset(), "response", [ADD])
        events = [event for row in rows for event in reader.feed(row)] + reader.finish(cut=False)
        assert "".join(one.text for one in events if isinstance(one, ReplyReasoningDelta)) == "Hm."
        said, call = reader.items()
        assert isinstance(said, Message) and said.text == "Hello"
        assert isinstance(call, FunctionCall) and (call.name, call.arguments) == ("add", '{"a": 1}')


def test_reasoning_is_no_text_where_calls_are_not_read() -> None:
    for form in THINKING:
        reply, thought = replied(form, [tokens(form, CALLS[form])], parse_calls=False)
        assert thought == "Hello"
        assert all(isinstance(item, Message) and item.text.startswith("Hello") for item in reply.items)


def test_a_reply_in_channels_ends_with_a_call_or_its_last_message() -> None:
    ids = language(CallForm.HARMONY).tokenizer.special_ids
    assert language(CallForm.HARMONY).report.closing == ids["<|end|>"], "the template writes it"
    ends = language(CallForm.HARMONY).end_ids({7})
    assert {7, ids["<|call|>"], ids["<|return|>"]} <= ends and ids["<|end|>"] not in ends
    thinks = "<|channel|>analysis<|message|>Hm.<|end|>"
    text = f"{thinks}<|start|>assistant<|channel|>final<|message|>Yes.<|return|>No."
    reply, thought = replied(CallForm.HARMONY, [tokens(CallForm.HARMONY, text)])
    assert reply.ended and thought == "Hm." and [item.text for item in reply.items] == ["Yes."]


def test_a_call_of_llama_ends_with_its_own_token() -> None:
    found = language(CallForm.LLAMA3_JSON)
    ids = found.tokenizer.special_ids
    assert ids["<|eom_id|>"] in found.end_ids({ids["<|eot_id|>"]})
    assert ids["<|eom_id|>"] not in language(CallForm.GRANITE).end_ids(())


def test_calls_of_gemma_end_where_their_outputs_begin() -> None:
    for form, end in (
        (CallForm.GEMMA4, "<|tool_response>"),
        (CallForm.FUNCTIONGEMMA, "<start_function_response>"),
    ):
        assert language(form).tokenizer.special_ids[end] in language(form).end_ids(())


def test_a_cut_falls_into_what_was_said_though_special_tokens_hide_the_reasoning() -> None:
    reply, _ = replied(CallForm.COMMAND_R7B, [tokens(CallForm.COMMAND_R7B, CALLS[CallForm.COMMAND_R7B])])
    tokenizer = language(CallForm.COMMAND_R7B).tokenizer
    cut = cut_after(reply, reply.items[0].id, 4, tokenizer)
    assert cut is not None
    left = reply.up_to(cut.keep, ids_from(cut.tail), cut.items)
    assert tokenizer.backend.decode(left.ids.tolist(), skip_special_tokens=False) == (
        "<|START_THINKING|>Hello<|END_THINKING|><|START_RESPONSE|>Hell"
    )


def test_a_reply_in_channels_is_cut_as_items_not_as_tokens() -> None:
    reply, _ = replied(CallForm.HARMONY, [tokens(CallForm.HARMONY, CALLS[CallForm.HARMONY])])
    tokenizer = language(CallForm.HARMONY).tokenizer
    assert cut_after(reply, reply.items[0].id, 4, tokenizer) is None
    with pytest.raises(CutInvalid, match="name an item"):
        cut_tokens(reply, 6, tokenizer)


FOUND = {
    "gpt-oss": (CallForm.HARMONY, ReasoningForm.NONE),
    "granite-3.0": (CallForm.GRANITE, ReasoningForm.NONE),
    "granite-3.3": (CallForm.GRANITE, ReasoningForm.THINK),
    "granite-4.0": (CallForm.HERMES, ReasoningForm.NONE),
    "deepseek-v3": (CallForm.DEEPSEEK_V3, ReasoningForm.OPENED),
    "deepseek-r1-distill-llama": (CallForm.DEEPSEEK_V3, ReasoningForm.OPENED),
    "deepseek-v3.1": (CallForm.DEEPSEEK_V31, ReasoningForm.THINK),
    "qwen3-coder": (CallForm.QWEN3_CODER, ReasoningForm.NONE),
    "qwen3.5": (CallForm.QWEN3_CODER, ReasoningForm.OPENED),
    "seed-oss": (CallForm.SEED_OSS, ReasoningForm.SEED),
    "ministral-3": (CallForm.MISTRAL, ReasoningForm.MISTRAL),
    "glm-4.5": (CallForm.GLM45, ReasoningForm.THINK),
    "glm-4.6": (CallForm.GLM45, ReasoningForm.THINK),
    "glm-4.7-flash": (CallForm.GLM47, ReasoningForm.OPENED),
    "kimi-k2": (CallForm.KIMI_K2, ReasoningForm.NONE),
    "kimi-k2-first": (CallForm.KIMI_K2, ReasoningForm.NONE),
    "kimi-k2-thinking": (CallForm.KIMI_K2, ReasoningForm.THINK),
    "minimax-m1": (CallForm.MINIMAX, ReasoningForm.NONE),
    "minimax-m2": (CallForm.MINIMAX_M2, ReasoningForm.OPENED),
    "apriel-1.5": (CallForm.MINIMAX, ReasoningForm.NONE),
    "gemma-4": (CallForm.GEMMA4, ReasoningForm.GEMMA4),
    "gemma-4-v5": (CallForm.GEMMA4, ReasoningForm.GEMMA4),
    "lfm2": (CallForm.LFM2, ReasoningForm.NONE),
    "lfm2-v2": (CallForm.LFM2, ReasoningForm.NONE),
    "lfm2.5": (CallForm.LFM2, ReasoningForm.THINK),
    "nemotron-nano-v2": (CallForm.NEMOTRON_JSON, ReasoningForm.OPENED),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_published_template_shows_its_forms(name: str) -> None:
    forms = published(name).forms
    assert forms.known and (forms.calls, forms.reasoning) == FOUND[name]
    assert forms.opened == (forms.reasoning is ReasoningForm.OPENED)


@pytest.mark.parametrize("name", ["functionary-v3.1", "minicpm5", "apertus", "solar-open"])
def test_a_form_that_is_not_read_is_said_to_be_unknown(name: str) -> None:
    assert not published(name).forms.known
