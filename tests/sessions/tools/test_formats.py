"""Calls in every form: streamed in any pieces they are read as at once, and told when their JSON closes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.items import Tool
from holdfast.sessions.tools.formats import (
    PYTHON_TAGS,
    REASONING,
    XML_FORMATS,
    Forms,
    find_forms,
)
from holdfast.sessions.tools.forms import CallForm, ReasoningForm
from holdfast.sessions.tools.scanner import (
    CallArguments,
    CallClosed,
    CallFormat,
    CallOpened,
    CallScanner,
    Piece,
    PlainText,
)

from .call_pieces import read_all, reasoned, split

FORMS = list(CallForm)
NUMBERED = [Tool(name="f", parameters={"type": "object", "properties": {"n": {"type": "number"}}})]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
words = st.text(st.characters(codec="utf-8", exclude_characters="<[{|"), max_size=10)
identifiers = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(
    lambda name: name.isidentifier() and not iskeyword(name)  # no call in Python is named so
)
calls = st.lists(
    st.tuples(identifiers, st.dictionaries(identifiers, values, max_size=3)), min_size=1, max_size=3
)
fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", "<tool"),
        *('{"name": "f", "arguments": ', '{"name": "f", "parameters": {', '{"type": "function", "name": "g"'),
        *('{"a": "}"}', "{}", "}", "{", "[", "]", '"', "\\", "f(", 'f(a="x")', "g(b=1, ", ")", ",", ";", "a="),
        *("<|tool_call|>", "<|/tool_call|>", "functools", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁sep｜>", "function<｜tool▁sep｜>f\n```json\n{", "<｜tool▁call▁end｜>", "Action:", "```json"),
        *("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "f", "parameters": {', "<function=f>"),
        *("<function=", "</function>", "<parameter=a>", "<parameter=n>", "</parameter>", "<seed:tool_call>"),
        *("<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>assistant", "<|constrain|>json"),
        *("analysis", "commentary", "final", " to=functions.f", "<|channel|>commentary to=functions.f"),
        *(" ", "\n", "x", "é", "f", "1", "null", "'", "-", "(1)", "[TOOL"),
    ]
)  # fmt: skip
GLM = ["<tool_call>f", "<tool_call>", "<arg_key>n</arg_key>", "<arg_key>", "a", "</arg_key>", "<arg_value>"]
GLM += ["</arg_value>", "</tool_call>", "1", "null", "f", "\n", " ", "</"]
NOTED = ["call:f{", "a:", "n:", "1.", "true", "None", "nul", "x y", *'{}[],:1-" \n']
JSON_CALL = ['{"name": "f", "arguments": ', '{"a": 1}', *'}{,[]x <"\n']
OWN = {
    CallForm.GLM45: GLM,
    CallForm.GLM47: GLM,
    CallForm.KIMI_K2: [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        *('{"a": 1}', '"a"', *"{}: f."),
    ],
    CallForm.MINIMAX: ["<tool_calls>", "</tool_calls>", *JSON_CALL],
    CallForm.NEMOTRON_JSON: ["<TOOLCALL>", "</TOOLCALL>", *JSON_CALL],
    CallForm.MINIMAX_M2: [
        *("<minimax:tool_call>", '<invoke name="f">', "<invoke name=", '"f"', ">", '<parameter name="n">'),
        *('<parameter name="a">', "</parameter>", "</invoke>", "</minimax:tool_call>", "null", *"1\nx<"),
    ],
    CallForm.GEMMA4: [
        *NOTED,
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        '<|"',
        "<|tool_call>call:f{",
        "<tool_",
    ],
    CallForm.FUNCTIONGEMMA: [
        *NOTED,
        "<start_function_call>call:f{",
        "<end_function_call>",
        "<escape>",
        "<esc",
    ],
    CallForm.LFM2: [
        *("<|tool_call_start|>[f(", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_", "f("),
        *("g(b=", "a=", "from=", '"""', "None", *"[](){},'\"\\ \n\0x1"),
    ],
}
"""Parts of calls in forms with tags that are theirs alone."""
texts = st.sampled_from(FORMS).flatmap(
    lambda form: st.tuples(
        st.just(form),
        st.lists(st.sampled_from(OWN[form]) if form in OWN else fragments, max_size=14).map("".join),
    )
)


def hermes(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in made
    )


def hermes_list(made: list[tuple[str, dict[str, Any]]]) -> str:
    return (
        f"<tool_call>{json.dumps([{'name': name, 'arguments': given} for name, given in made])}</tool_call>"
    )


def hermes_lines(made: list[tuple[str, dict[str, Any]]]) -> str:
    return hermes(made).replace("\n</tool_call>\n<tool_call>", "")


def llama3(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in made)


def mistral(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": given} for name, given in made])


def mistral_named(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in made)


def pythonic(made: list[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in made
    )
    return f"[{', '.join(written)}]"


def listed(opening: str, closing: str = "") -> Callable[[list[tuple[str, dict[str, Any]]]], str]:
    def write(made: list[tuple[str, dict[str, Any]]]) -> str:
        return opening + json.dumps([{"name": name, "arguments": given} for name, given in made]) + closing

    return write


def deepseek_v3(made: list[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```<｜tool▁call▁end｜>"
        for name, given in made
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(made: list[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
        for name, given in made
    )
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def command_r(made: list[tuple[str, dict[str, Any]]]) -> str:
    calls = [{"tool_name": name, "parameters": given} for name, given in made]
    return f"Action: ```json\n{json.dumps(calls, indent=4)}\n```"


def command_r7b(made: list[tuple[str, dict[str, Any]]]) -> str:
    calls = [
        {"tool_call_id": str(at), "tool_name": name, "parameters": given}
        for at, (name, given) in enumerate(made)
    ]
    return f"<|START_ACTION|>{json.dumps(calls, indent=4)}<|END_ACTION|>"


def qwen3_coder(made: list[tuple[str, dict[str, Any]]]) -> str:
    def parameter(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(key, value) for key, value in given.items())
        + "</function>\n</tool_call>"
        for name, given in made
    )


def glm47(made: list[tuple[str, dict[str, Any]]]) -> str:
    def argument(key: str, value: Any) -> str:
        return f"<arg_key>{key}</arg_key><arg_value>{json.dumps(value)}</arg_value>"

    return "".join(
        f"<tool_call>{name}{''.join(argument(key, value) for key, value in given.items())}</tool_call>"
        for name, given in made
    )


def glm45(made: list[tuple[str, dict[str, Any]]]) -> str:
    return re.sub(r"(?=<arg_|</tool_call>)|(?<=</tool_call>)(?=<)", "\n", glm47(made))


def kimi_k2(made: list[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{json.dumps(given)}"
        "<|tool_call_end|>"
        for at, (name, given) in enumerate(made)
    )
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def minimax(made: list[tuple[str, dict[str, Any]]]) -> str:
    lines = [json.dumps({"name": name, "arguments": given}) for name, given in made]
    return "\n".join(["<tool_calls>", *lines, "</tool_calls>"])


def minimax_m2(made: list[tuple[str, dict[str, Any]]]) -> str:
    written = (
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{json.dumps(value)}</parameter>\n' for key, value in given.items()
        )
        + "</invoke>\n"
        for name, given in made
    )
    return "<minimax:tool_call>\n" + "".join(written) + "</minimax:tool_call>"


def noted(value: Any, quote: str) -> str:
    """In Gemma's notation."""
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        pairs = (f"{quote}{key}{quote}:{noted(one, quote)}" for key, one in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(noted(one, quote) for one in value)}]"
    return json.dumps(value)


def gemma(opening: str, closing: str, quote: str) -> Callable[[list[tuple[str, dict[str, Any]]]], str]:
    def write(made: list[tuple[str, dict[str, Any]]]) -> str:
        return "".join(
            f"{opening}call:{name}{{"
            + ",".join(f"{key}:{noted(value, quote)}" for key, value in given.items())
            + f"}}{closing}"
            for name, given in made
        )

    return write


def lfm2(made: list[tuple[str, dict[str, Any]]]) -> str:
    return f"<|tool_call_start|>{pythonic(made)}<|tool_call_end|>"


def harmony(made: list[tuple[str, dict[str, Any]]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}<|call|>"
        for name, given in made
    )


WRITERS: list[tuple[CallForm, Callable[[list[tuple[str, dict[str, Any]]]], str]]] = [
    (CallForm.HERMES, hermes),
    (CallForm.HERMES, hermes_list),
    (CallForm.HERMES, hermes_lines),
    (CallForm.LLAMA3_JSON, llama3),
    (CallForm.MISTRAL, mistral),
    (CallForm.MISTRAL, mistral_named),
    (CallForm.PYTHONIC, pythonic),
    (CallForm.GRANITE, listed("<|tool_call|>")),
    (CallForm.GRANITE, listed("<tool_call>")),
    (CallForm.PHI4_MINI, listed("<|tool_call|>", "<|/tool_call|>")),
    (CallForm.FUNCTOOLS, listed("functools")),
    (CallForm.DEEPSEEK_V3, deepseek_v3),
    (CallForm.DEEPSEEK_V31, deepseek_v31),
    (CallForm.COMMAND_R, command_r),
    (CallForm.COMMAND_R7B, command_r7b),
    (CallForm.QWEN3_CODER, qwen3_coder),
    (CallForm.SEED_OSS, lambda made: qwen3_coder(made).replace("tool_call>", "seed:tool_call>")),
    (CallForm.GLM45, glm45),
    (CallForm.GLM45, glm47),
    (CallForm.GLM47, glm47),
    (CallForm.GLM47, glm45),
    (CallForm.KIMI_K2, kimi_k2),
    (CallForm.MINIMAX, minimax),
    (CallForm.MINIMAX, listed("<tool_calls>", "</tool_calls>")),
    (CallForm.MINIMAX_M2, minimax_m2),
    (CallForm.GEMMA4, gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    (CallForm.FUNCTIONGEMMA, gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    (CallForm.LFM2, lfm2),
    (CallForm.NEMOTRON_JSON, listed("<TOOLCALL>", "</TOOLCALL>")),
    (CallForm.HARMONY, harmony),
]


def parse(form: CallForm, pieces: list[str], *, cut: bool = False, tools: Sequence[Tool] = ()) -> list[Piece]:
    parser = Forms(form).call_parser(tools)
    return read_all(parser, pieces, cut=cut)


def any_typed(made: list[tuple[str, dict[str, Any]]]) -> list[Tool]:
    """Tools with arguments of any JSON type, so that a parser that asks the schema reads them as JSON."""
    anything = {"type": ["object", "array"]}
    return [
        Tool(name=name, parameters={"type": "object", "properties": dict.fromkeys(given, anything)})
        for name, given in made
    ]


@settings(max_examples=10 * settings().max_examples)
@given(
    texts,
    st.lists(st.integers(0, 500), max_size=12),
    st.booleans(),
)
def test_any_split_of_any_text_equals_one_shot(
    written: tuple[CallForm, str], cuts: list[int], cut: bool
) -> None:
    form, text = written
    whole = parse(form, [text], cut=cut, tools=NUMBERED)
    assert parse(form, split(text, cuts), cut=cut, tools=NUMBERED) == whole
    assert parse(form, list(text), cut=cut, tools=NUMBERED) == whole
    opened, given = False, ""
    for piece in whole:
        match piece:
            case CallOpened():
                assert not opened
                opened, given = True, ""
            case CallArguments(delta):
                given += delta
            case CallClosed(complete):
                assert opened and (not complete or isinstance(json.loads(given), dict))
                opened = False
    assert not opened


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(WRITERS), calls, st.lists(st.integers(0, 500), max_size=12))
def test_calls_are_read_as_they_were_meant(written: Any, made: list[Any], cuts: list[int]) -> None:
    form, writer = written
    if form in XML_FORMATS:  # one tool has one schema
        made = list({name: (name, given) for name, given in made}.values())
    read = parse(form, split(writer(made), cuts), tools=any_typed(made))
    assert [event.name for event in read if isinstance(event, CallOpened)] == [name for name, _ in made]
    given_ = [json.loads(event.delta) for event in read if isinstance(event, CallArguments)]
    assert given_ == [arguments for _, arguments in made]
    assert [event for event in read if isinstance(event, CallClosed)] == [CallClosed(True)] * len(made)
    assert not any(isinstance(event, PlainText) for event in read)


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(FORMS), words, st.lists(st.integers(0, 50), max_size=6))
def test_words_are_words_in_every_form(form: CallForm, text: str, cuts: list[int]) -> None:
    assert parse(form, split(text, cuts)) == [PlainText(text)] * bool(text)


@pytest.mark.parametrize(("form", "writer"), WRITERS)
def test_a_call_is_told_with_the_character_that_closes_it(form: CallForm, writer: Any) -> None:
    parser = Forms(form).call_parser()
    closing: list[str] = []
    for character in writer([("f", {"a": {"b": "}"}}), ("g", {"c": [1]})]):
        events = list(parser.feed(character))
        closing += [character for event in events if isinstance(event, CallClosed)]
        assert [event.complete for event in events if isinstance(event, CallClosed)] in ([], [True])
    last = ")" if form in PYTHON_TAGS else ">" if form in XML_FORMATS else "}"
    assert closing == [last, last]


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        (CallForm.LLAMA3_JSON, '{"answer": 42}', '{"answer": 42}'),
        (CallForm.LLAMA3_JSON, '{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}'),
        (CallForm.LLAMA3_JSON, '{"name": "Bob", "arguments": 7}', '{"name": "Bob", "arguments": 7}'),
        (CallForm.MISTRAL, "[TOOL_CALLS] none, really", "[TOOL_CALLS] none, really"),
        (CallForm.MISTRAL, "See \n[TOOL_CALLS] [1]", "See \n[TOOL_CALLS] [1]"),
        (CallForm.MISTRAL, "See [TOOL] and [1]", "See [TOOL] and [1]"),
        (CallForm.GRANITE, "<|tool_call|> no list", "<|tool_call|> no list"),
        (CallForm.PHI4_MINI, "So <|tool_call|>x<|/tool_call|> so", "So <|tool_call|>x<|/tool_call|> so"),
        (CallForm.FUNCTOOLS, "import functools\n", "import functools\n"),
        (CallForm.FUNCTOOLS, "functools[] This is just text", "functools[] This is just text"),
        (CallForm.FUNCTOOLS, 'functools[{"name": "f"}]', 'functools[{"name": "f"}]'),
        (CallForm.DEEPSEEK_V3, "<｜tool▁calls▁begin｜>, they say", "<｜tool▁calls▁begin｜>, they say"),
        (CallForm.COMMAND_R, "Action: ```json\n[1]```", "Action: ```json\n[1]```"),
        (CallForm.COMMAND_R, "Action: none", "Action: none"),
        (CallForm.COMMAND_R7B, "<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>[]<|END_ACTION|>"),
        (CallForm.QWEN3_CODER, "<tool_call>{}</tool_call> so", "<tool_call>{}</tool_call> so"),
        (CallForm.QWEN3_CODER, "<function= f", "<function= f"),
        (CallForm.GLM45, "<tool_call> is a tag", "<tool_call> is a tag"),
        (CallForm.GLM47, "So <tool_call>one two</tool_call>", "So <tool_call>one two</tool_call>"),
        (CallForm.GLM47, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'),
        (CallForm.KIMI_K2, "<|tool_calls_section_begin|> so", "<|tool_calls_section_begin|> so"),
        (CallForm.KIMI_K2, "<|tool_call_begin|>f {}", "<|tool_call_begin|>f {}"),
        (CallForm.MINIMAX, "<tool_calls>\n</tool_calls> so", "<tool_calls>\n</tool_calls> so"),
        (CallForm.MINIMAX_M2, "<minimax:tool_call> so", "<minimax:tool_call> so"),
        (CallForm.GEMMA4, "<|tool_call>f{}<tool_call|> so", "<|tool_call>f{}<tool_call|> so"),
        (CallForm.FUNCTIONGEMMA, "a <start_function_call>call:f", "a <start_function_call>call:f"),
        (CallForm.LFM2, "So [f(a=1)] <|tool_call_start|>[]", "So [f(a=1)] <|tool_call_start|>[]"),
        (CallForm.LFM2, "[link](url) \n<|tool_call", "[link](url) \n<|tool_call"),
        (CallForm.HARMONY, "No header.", "No header."),
        (CallForm.HARMONY, "assistant", "assistant"),
        (CallForm.HARMONY, "<|channel|>final no message<|end|>", "final no message"),
        (CallForm.PYTHONIC, "[1, 2, 3]", "[1, 2, 3]"),
        (CallForm.PYTHONIC, "[f(open('x').read())]", "[f(open('x').read())]"),
        (CallForm.PYTHONIC, "[f(1)]", "[f(1)]"),
        (CallForm.PYTHONIC, "[f(**{})] x", "[f(**{})] x"),
    ],
)
def test_what_only_looks_like_a_call_is_delivered_as_text(form: CallForm, text: str, said: str) -> None:
    assert parse(form, list(text)) == [PlainText(said)]


def test_another_form_is_another_table() -> None:
    head = re.compile(r'\{"tool": (?P<name>"[^"]*"), "with": \{')
    tagged = CallFormat(head=head, openings=("<fn>",), closing="</fn>")
    text = 'Well <fn>{"tool": "f", "with": {"a": 1}}</fn> so <fn>{"tool": "g"}</fn>'
    for pieces in ([text], list(text)):
        assert read_all(CallScanner(tagged), pieces) == [
            *(PlainText("Well"), CallOpened("f"), CallArguments('{"a": 1}'), CallClosed(True)),
            PlainText('so <fn>{"tool": "g"}</fn>'),
        ]
    bare = CallFormat(head=head, openings=("@",), named=regex.compile(r"(?P<name>[a-z]+)\s*\{"))
    for pieces in (['@f {"a": 1}@g{}'], list('@f {"a": 1}@g{}')):
        assert [
            piece.name for piece in read_all(CallScanner(bare), pieces) if isinstance(piece, CallOpened)
        ] == [
            "f",
            "g",
        ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "bomb",
    ["[" * 50_000, "{" * 50_000, '{"name":' * 9_000, "[f(a=" + "(" * 50_000, "[f(a=" + "-" * 50_000 + "1)]"],
)
def test_bombs_are_harmless(form: CallForm, bomb: str) -> None:
    pieces = [bomb[at : at + 1000] for at in range(0, len(bomb), 1000)]
    assert not [event for event in parse(form, pieces) if isinstance(event, CallClosed) and event.complete]


def thought(pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    return reasoned(Forms(reasoning=ReasoningForm.THINK, opened=opened).parser(parse_calls=False), pieces)


thoughts = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "x", "ab"]), max_size=10
)


@settings(max_examples=3 * settings().max_examples)
@given(thoughts.map("".join), st.lists(st.integers(0, 80), max_size=8), st.booleans())
def test_reasoning_split_off_any_pieces_equals_one_shot(text: str, cuts: list[int], opened: bool) -> None:
    whole = thought([text], opened=opened)
    assert thought(split(text, cuts), opened=opened) == whole
    assert thought(list(text), opened=opened) == whole


def test_what_is_thought_and_what_is_said() -> None:
    assert thought(["<think>\nHm.\n</think>\n\nYes."]) == ("Hm.", "Yes.")
    assert thought(["Hm.\n</think>\n\nYes."], opened=True) == ("Hm.", "Yes.")
    assert thought(["Yes, a <think> tag."]) == ("", "Yes, a <think> tag.")
    assert thought(["<think>cut"]) == ("cut", "")


TEMPLATES = {
    "hermes": "{{ '<tool_call>' }}",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "llama3-json": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "granite": "respond only with <|tool_call|> followed by a JSON list of tools used.",
    "phi4-mini": "{{- '<|tool_call|>' + (call['function'] | tojson) + '<|/tool_call|>' -}}",
    "functools": 'formatted as functools[{"name": [function name], "arguments": [function arguments]}, ...]',
    "deepseek-v3": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}",
    "deepseek-v3.1": "{{'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'}}",
    "command-r": """[{"tool_name": title of the tool in the specification, "parameters": a dict of …}]```""",
    "command-r7b": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ name }}"}]<|END_ACTION|>',
    "qwen3-coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",
    "seed-oss": "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1",
    "glm45": "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "kimi_k2": "<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>",
    "minimax": '<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}\\n...\\n</tool_calls>',
    "minimax_m2": '<invoke name="tool-name-1">\\n<parameter name="param-key-1">param-value-1</parameter>',
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "functiongemma": "{{- '<start_function_call>call:' + function['name'] + '{' -}}",
    "lfm2": "List of tools: <|tool_list_start|>[",
    "nemotron_json": "{{- '<TOOLCALL>[' -}}",
    "harmony": "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}",
}


def test_forms_are_named_by_their_flags() -> None:
    assert {form.value for form in CallForm} == {*TEMPLATES}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_found_in_the_chat_template(form: CallForm) -> None:
    found = find_forms(TEMPLATES[form], "")
    assert found.calls is form and found.known


def test_a_form_that_no_template_shows_is_assumed_and_said_to_be_unknown() -> None:
    functionary = (
        '<function=example_function_name>{{"example_name": "example_value"}}</function> <|python_tag|>'
    )
    minimax_m3 = '{{- "]<]minimax[>[<invoke name=" }}'
    for template in ("{{ messages }}", minimax_m3, functionary):
        found = find_forms(template, "")
        assert found.calls is CallForm.HERMES and not found.known


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ({"open": "<tool_call>"}, CallForm.HERMES),
        ({"open_pattern": r"<\|tool_call>call:(?P<name>\w+)"}, CallForm.GEMMA4),
        ({"open_pattern": r"\[TOOL_CALLS\]\s*"}, CallForm.MISTRAL),
        ({"open": ["<|python_tag|>"]}, CallForm.LLAMA3_JSON),
        ({"open": "<|START_ACTION|>"}, CallForm.COMMAND_R7B),
        ({"open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>"}, CallForm.QWEN3_CODER),
        ({"open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)"}, CallForm.HARMONY),
    ],
)
def test_what_a_response_template_says_counts_before_the_chat_template(field: Any, form: CallForm) -> None:
    told = {"fields": {"tool_calls": {**field, "content": "json"}}}
    other = TEMPLATES["pythonic"]
    assert find_forms(other, "", told).calls is form


def test_forms_are_told_in_words() -> None:
    assert str(Forms(CallForm.GRANITE, ReasoningForm.THINK)) == "granite; think"
    assert str(Forms(CallForm.HARMONY)) == "harmony; in channels"
    assert str(Forms(known=False)) == "unknown, read as hermes; none"


def test_reasoning_is_found_too() -> None:
    assert find_forms("", "<|assistant|>").reasoning is ReasoningForm.NONE
    assert find_forms("{{ '</think>' }}", "<|assistant|>").reasoning is ReasoningForm.THINK
    assert find_forms("{{ '</think>' }}", "<|assistant|><think>\n").reasoning is ReasoningForm.OPENED
    told = {"fields": {"thinking": {"open": "<think>", "close": "</think>"}}}
    assert find_forms("", "", told).reasoning is ReasoningForm.THINK
    for form, begin in (
        (ReasoningForm.COMMAND, "<|START_THINKING|>"),
        (ReasoningForm.MISTRAL, "[THINK]"),
        (ReasoningForm.SEED, "<seed:think>"),
        (ReasoningForm.GEMMA4, "<|channel>"),
    ):
        end = REASONING[form].end
        assert find_forms(f"{{{{ '{end}' }}}}", "<|assistant|>") == Forms(reasoning=form, known=False)
        assert find_forms("", f"<|assistant|>{begin}\n") == Forms(reasoning=form, known=False, opened=True)
