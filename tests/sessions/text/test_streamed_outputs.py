"""A tool's output that still grows: what is settled of it begins the tokens of the whole, in every style."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from holdfast.sessions.conversation.tree import Script, TurnReply
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.text.streaming_tokenizer import StablePrefixRule
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.token_ids import ids_of

from .chat_languages import FAMILIES, backend, end_id, ids
from .test_renderer import NASTY, NOON, replied, take_turn, typed, user

TALK = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}TOOL
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""A template; what it writes for a tool's message stands instead of TOOL."""

MISTRAL = (
    """{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id"""
    """ + '"}[/TOOL_RESULTS]' -}}"""
)
MERGED = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
)
STYLES = {
    "hermes": FAMILIES["chatml"].template,
    "qwen3": FAMILIES["qwen3"].template,
    "llama3-json": FAMILIES["llama3"].template,
    "plain": FAMILIES["tools-last"].template,
    "mistral": TALK.replace("TOOL", MISTRAL),
    "mistral-json": TALK.replace("TOOL", "{{- '[TOOL_RESULTS]' + {'content': message.content}|tojson -}}"),
    "pythonic": TALK.replace(
        "TOOL", "{{- '<|im_start|>ipython\\n' + {'output': message.content}|tojson + '<|im_end|>' -}}"
    ),
    "merged": TALK.replace("TOOL", MERGED),
    "trimmed": TALK.replace("TOOL", "{{- '<|im_start|>tool\\n' + (message.content|trim|tojson) -}}"),
    "silent": TALK.replace(
        "TOOL", "{%- if message.content -%}{{- '<tool_response>\\n' + message.content -}}{%- endif -%}"
    ),
}
OBSCURE = {
    "ascii": "{{- message.content|tojson(ensure_ascii=true) -}}",
    "upper": "{{- message.content|upper -}}",
    "doubled": "{{- message.content + message.content -}}",
    "backwards": "{{- message.content|reverse -}}",
    "measured": "{{- '<|im_start|>' ~ (message.content|length) -}}",
}
"""Ways of writing it that leave nothing settled: what follows would change what stands."""
ESCAPED = ['"', "\\", "\\n", '\\"', "\n\n", " \n ", "\x00", "\x7f", "</tool_response>", '{"a": "b"}', "é\n"]
outputs = st.lists(
    st.sampled_from([*NASTY, *ESCAPED]) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=10,
).map("".join)


@cache
def language(template: str) -> ChatTokenizer:
    return ChatTokenizer(backend("chatml"), template, {"bos_token": "<|im_start|>"})


def renderer_of(template: str) -> Renderer:
    tokenizer = language(template)
    return Renderer(tokenizer, NOON, StablePrefixRule(tokenizer))


def called(renderer: Renderer, calls: int) -> History:
    """A history with a last reply that has made so many calls."""
    history = History(Preamble(tools=(Tool(name="look"),)))
    history.insert(user("Look!"))
    made = [
        FunctionCall(id=f"item_{n}", call_id=f"call_{n}", name="look", arguments="{}") for n in range(calls)
    ]
    said = [*ids("chatml", "I look."), end_id("chatml")]
    take_turn(history, renderer, TurnReply((*made,), ids_of(said), ended=True))
    return history


def output(number: int, text: str) -> FunctionCallOutput:
    return FunctionCallOutput(id=f"output_{number}", call_id=f"call_{number}", output=text)


def growing(history: History, item: FunctionCallOutput | Message) -> Script:
    script = history.script()
    return Script(script.preamble, (*script.segments, item), script.base)


@pytest.mark.parametrize("style", [*STYLES, *OBSCURE])
@settings(max_examples=60, deadline=None)
@given(before=st.lists(outputs, max_size=2), whole=outputs, cut=st.integers(0, 80))
@example(before=[], whole="", cut=0)
@example(before=["one"], whole="\n\n\n a", cut=3)
@example(before=[], whole="word word word\n\n\n\n\n", cut=17)
def test_what_is_settled_of_an_output_begins_the_tokens_of_the_whole(
    style: str, before: list[str], whole: str, cut: int
) -> None:
    renderer = renderer_of(STYLES.get(style) or TALK.replace("TOOL", OBSCURE[style]))
    history = called(renderer, len(before) + 1)
    for number, text in enumerate(before):
        history.insert(output(number, text))
    early = renderer.stable_tokens(growing(history, output(len(before), whole[:cut]))).tolist()
    history.insert(output(len(before), whole))
    tokens = renderer.draft(history.script()).tokens().tolist()
    assert tokens[: len(early)] == early


@pytest.mark.parametrize("style", STYLES)
def test_an_output_settles_as_it_grows(style: str) -> None:
    """Before a word of it the opening is, where the template writes one; all but the last words are later."""
    renderer = renderer_of(STYLES[style])
    history = called(renderer, 2)
    history.insert(output(0, "21 degrees"))
    lengths = [
        len(renderer.stable_tokens(growing(history, output(1, text))))
        for text in ("", "The weather", 'The weather\nin "Paris" is sunny and warm, and I am fine')
    ]
    head = history.head
    assert head is not None and lengths == sorted(lengths)
    assert lengths[0] > head.length, "the output before it stands"
    assert lengths[2] > lengths[0] + 12


@pytest.mark.parametrize("style", OBSCURE)
def test_nothing_is_settled_where_more_text_changes_what_stands(style: str) -> None:
    renderer = renderer_of(TALK.replace("TOOL", OBSCURE[style]))
    history = called(renderer, 1)
    assert not len(
        renderer.stable_tokens(growing(history, output(0, "The weather in Paris is sunny and warm")))
    )


@settings(max_examples=40, deadline=None)
@given(whole=typed, cut=st.integers(0, 40))
def test_a_message_settles_as_before(whole: str, cut: int) -> None:
    renderer = renderer_of(STYLES["hermes"])
    history = History()
    history.insert(user("Hi"))
    take_turn(history, renderer, replied("chatml", "Hello"))
    early = renderer.stable_tokens(growing(history, user(whole[:cut]))).tolist()
    history.insert(user(whole))
    assert renderer.draft(history.script()).tokens().tolist()[: len(early)] == early


def test_a_turn_before_it_that_must_be_rendered_anew_leaves_nothing_settled() -> None:
    renderer = renderer_of(STYLES["hermes"])
    history = called(renderer, 1)
    history.preamble = Preamble(instructions="Now be brief")
    assert not len(renderer.stable_tokens(growing(history, output(0, "The weather in Paris is sunny"))))
