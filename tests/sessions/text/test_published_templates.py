"""Published chat templates: plain turns, instructions, tools, calls and the turn behind a call, as transformers
writes them or with a stated difference."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from holdfast.sessions.conversation.edits import end_with, rewind
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, new_id
from holdfast.sessions.session import Session
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.tools.formats import REASONING, find_forms
from holdfast.sessions.tools.forms import CallForm
from holdfast.sessions.turn.events import ReplyStatus

from ..scripted_link import Recital, ScriptedLink
from ..session_stage import read, run
from .published_templates import (
    ALLOWED,
    ANSWER,
    ARGUMENTS,
    ASKED,
    CALL,
    CALL_ID,
    COLUMNS,
    EQUAL,
    NOON,
    OUTPUT,
    PUBLISHED,
    REFUSED,
    SCHEMA,
    TOLD,
    TOOL,
    Talk,
    compared,
    encoded,
    id_for,
    language,
    theirs,
    tokenizer_of,
    user,
    written_call,
)

FRAMED = [
    "mistral-nemo",
    "mistral-small-3.2",
    "ministral-3",
    "gpt-oss",
    "gemma-4",
    "gemma-4-v5",
    "minimax-m2",
]
"""Their templates must get the calls of a reply that an output follows."""
STATED = ("calls", "second_turn")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_as_transformers_has_it_or_the_difference_is_stated(name: str, column: str) -> None:
    assert compared(name, column) == PUBLISHED[name].results[column]


def test_the_table_holds_results_and_no_difference_that_is_not_stated() -> None:
    assert len(PUBLISHED) >= 60
    for found in PUBLISHED.values():
        for column, result in found.results.items():
            form = column == "calls" and result in list(CallForm)
            assert form or result in ALLOWED or result.startswith(REFUSED), (found.name, column)
    refused = [name for name, found in PUBLISHED.items() if found.results["plain"].startswith(REFUSED)]
    assert refused == ["firefunction-v2"], "it wants a variable that only its own server gives"


THOUGHTS = (
    "{begin}\nWhy\n{end}\n\nHello there",
    "{begin}Why{end}Hello",
    "{begin}\n\n{end}\n\nHello there",
    "\n{begin}\nIt has no end",
    "It has no begin\n{end}\n\nHello",
    "{begin}\n{begin}\nWhy{end}\n\n{end}\nHello\n",
)


@pytest.mark.parametrize(
    "name", [name for name, found in PUBLISHED.items() if not found.results["plain"].startswith(REFUSED)]
)
def test_reasoning_in_an_assistants_text_is_as_transformers_has_it(name: str) -> None:
    """For a client that sends the model's whole text, at the end of the conversation or before its end."""
    alternates = not language(name).report.rules.users
    for tags, thought, again in product(REASONING.values(), THOUGHTS, (False, True)):
        if alternates and not again:
            continue  # an empty user's message is put behind the assistant's
        text = thought.format(begin=tags.begin, end=tags.end)
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        items = [user("Hi"), Message(id="said", role="assistant", text=text)]
        if again:
            messages.append({"role": "user", "content": "Again"})
            items.append(user("Again"))
        with suppress(TemplateError):  # some templates refuse a text with tags that are not theirs
            expected = encoded(name, theirs(name, messages))
            talk = Talk(name)
            for item in items:
                talk.say(item)
            assert talk.prompt(verbatim=True) == expected, (text, again)


@pytest.mark.parametrize(
    "name", [name for name, found in PUBLISHED.items() if found.results["tools"] == EQUAL]
)
def test_reasoning_beside_a_call_is_as_transformers_has_it(name: str) -> None:
    rules = language(name).report.rules
    if not (rules.outputs and rules.calls):
        return  # it writes outputs or calls that a client sends as text of other messages
    function = {"name": TOOL.name, "arguments": CALL.arguments if rules.text_arguments else ARGUMENTS}
    calls = [{"type": "function", "id": id_for(name, CALL), "function": function}]
    for text in ("<think>\nWhy\n</think>\n\nI look.", "<think>Why</think>", "<think>\nWhy\n</think>\n\n"):
        told = [ASKED, {"role": "assistant", "content": text, "tool_calls": calls}]
        told.append(TOLD | {"tool_call_id": id_for(name, CALL)})
        talk = Talk(name, Preamble(tools=(TOOL,)))
        for item in (user("Paris?"), Message(id="said", role="assistant", text=text), CALL, ANSWER):
            talk.say(item)
        with suppress(TemplateError):
            assert talk.prompt(verbatim=True) == encoded(name, theirs(name, told, [SCHEMA])), text


def decoded(name: str, ids: list[int]) -> str:
    text: str = tokenizer_of(name).decode(ids, skip_special_tokens=False)
    return text


REFERENCE_REFUSES = ("llama-3.1", "llama-3.2", "kimi-k2", "kimi-k2-thinking")
"""transformers' rendering of two calls in a reply raises."""


@pytest.mark.parametrize(
    "name", [name for name, found in PUBLISHED.items() if found.results["tools"] == EQUAL]
)
def test_the_turn_behind_two_calls_is_as_transformers_has_it(name: str) -> None:
    other = msgspec.structs.replace(CALL, id="other", call_id="call67890", arguments='{"city": "Oslo"}')
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris and Oslo?" if name in REFERENCE_REFUSES else "Paris?"))
    first = talk.prompt()
    if name in REFERENCE_REFUSES:
        reply, after = [*encoded(name, "Two calls"), talk.ends[0]], None
    else:
        _, reply, after, _ = written_call(name, CALL, other)
    talk.reply(reply, CALL, other)
    talk.say(ANSWER)
    talk.say(msgspec.structs.replace(ANSWER, id="second", call_id=other.call_id))
    ids = talk.prompt()
    assert ids[: len(first) + len(reply) - 1] == [*first, *reply[:-1]]
    assert after is None or ids == [*first, *reply, *after]
    assert decoded(name, ids).count(OUTPUT) == 2


def weather(number: int) -> FunctionCall:
    return FunctionCall(
        id=f"item_{number}", call_id=f"call_{number}", name=TOOL.name, arguments=CALL.arguments
    )


def degrees(number: int) -> FunctionCallOutput:
    return FunctionCallOutput(id=f"output_{number}", call_id=f"call_{number}", output=f"{number} degrees")


def called_twice(name: str) -> tuple[Talk, list[int]]:
    """A conversation with a reply of two calls, and that reply."""
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    talk.prompt()
    _, reply, _, _ = written_call(name)
    reply = [*reply[:-1], *reply]
    talk.reply(reply, weather(1), weather(2))
    return talk, reply


@pytest.mark.parametrize("name", FRAMED)
def test_a_reply_keeps_its_own_tokens_when_all_is_rendered_anew(name: str) -> None:
    """Not the calls as the template writes them, and nothing of that twice."""
    talk, reply = called_twice(name)
    talk.say(degrees(1))
    talk.say(degrees(2))
    kept = talk.prompt()
    talk.reply(encoded(name, "Warm"), Message(id="warm", role="assistant", text="Warm"))
    talk.history.preamble = Preamble(instructions="Be brief.", tools=(TOOL,))
    talk.say(user("Again"))
    anew = talk.prompt()
    text = decoded(name, anew)
    assert decoded(name, reply[:-1]) in text and text.count("1 degrees") == text.count("2 degrees") == 1
    assert text.count('Paris"') + text.count("Paris<") == decoded(name, kept).count('Paris"') + decoded(
        name, kept
    ).count("Paris<")
    assert "Be brief." in text and text.index("2 degrees") < text.index("Warm") < text.index("Again")


@pytest.mark.parametrize("name", [*FRAMED, "hermes-2-pro-tool-use", "qwen3"])
def test_calls_stay_when_the_tools_are_gone(name: str) -> None:
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    talk.prompt()
    talk.reply(written_call(name)[1], CALL)
    talk.say(ANSWER)
    talk.prompt()
    talk.reply([*encoded(name, "Warm"), talk.ends[0]], Message(id="warm", role="assistant", text="Warm"))
    talk.history.preamble = Preamble(instructions="Be brief.")
    talk.say(user("Again"))
    text = decoded(name, talk.prompt())
    assert text.count(OUTPUT) == 1 and text.index(OUTPUT) < text.index("Warm") < text.index("Again")


@pytest.mark.parametrize("name", FRAMED)
def test_calls_without_an_output_and_late_outputs_are_rendered(name: str) -> None:
    talk, _ = called_twice(name)
    talk.say(degrees(2))
    assert "2 degrees" in decoded(name, talk.prompt())
    talk.reply(encoded(name, "Warm"), Message(id="warm", role="assistant", text="Warm"))
    talk.say(user("And?"))
    talk.say(degrees(1))
    text = decoded(name, talk.prompt())
    assert text.index("2 degrees") < text.index("Warm") < text.index("And?") < text.index("1 degrees")


@pytest.mark.parametrize("name", FRAMED)
def test_a_user_may_speak_behind_an_output_that_was_not_answered(name: str) -> None:
    talk, _ = called_twice(name)
    talk.say(degrees(1))
    talk.prompt()
    talk.history.abort_turn(talk.turn)
    talk.say(user("Never mind"))
    text = decoded(name, talk.prompt())
    assert text.index("1 degrees") < text.index("Never mind")


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.parametrize(
    "tool", ['say "hi"', "naïve\\tool", "a.b-c_1", "[0-9]+", "<|im_end|>", "zqtoolqz", "x\ny"]
)
def test_a_call_of_a_tool_with_an_odd_name_is_found(name: str, tool: str) -> None:
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    first = talk.prompt()
    talk.reply([*encoded(name, "Odd"), talk.ends[0]], msgspec.structs.replace(CALL, name=tool))
    talk.say(ANSWER)
    text = decoded(name, talk.prompt()[len(first) :])
    assert text.startswith("Odd") and OUTPUT in text and "Paris" not in text


@pytest.mark.parametrize("name", FRAMED)
def test_an_output_that_grows_behind_its_call_is_prefilled(name: str) -> None:
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    talk.prompt()
    talk.reply(written_call(name)[1], CALL)
    early = []
    for words in (
        "",
        "It is warm",
        "It is warm and sunny and I am fine",
        "It is warm and sunny and I am fine too.",
    ):
        grown, script = msgspec.structs.replace(ANSWER, output=words), talk.history.script()
        script = replace(script, segments=(*script.segments, grown))
        early.append(talk.renderer.stable_tokens(script).tolist())
    talk.say(grown)
    whole = talk.prompt()
    assert all(whole[: len(ids)] == ids for ids in early)
    assert len(early[0]) < len(early[1]) < len(early[2])


@pytest.mark.parametrize("name", ["mistral-nemo", "mistral-small-3.2"])
def test_an_output_names_the_call_by_the_id_that_the_model_wrote(name: str) -> None:
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    talk.prompt()
    _, reply, _, _ = written_call(name)
    talk.reply(reply, msgspec.structs.replace(CALL, call_id="call_0123456789abcdef"))
    talk.say(msgspec.structs.replace(ANSWER, call_id="call_0123456789abcdef"))
    ids = talk.prompt()
    assert decoded(name, ids).count(CALL_ID) == 2
    assert encoded(name, decoded(name, ids)) == ids


def kimi_with_ids() -> tuple[Language, ChatTokenizer]:
    """Kimi K2 with the ids that it gets, as in later revisions of its template."""
    template = PUBLISHED["kimi-k2-first"].template
    own = "{%- set formatted_id = 'functions.' + func_name + ':' + loop.index0|string -%}"
    assert own in template
    template = template.replace(own, "{%- set formatted_id = tool_call['id'] -%}")
    tokenizer = ChatTokenizer(tokenizer_of("kimi-k2-first"), template, PUBLISHED["kimi-k2-first"].named)
    return Language.of(tokenizer), tokenizer


@pytest.mark.parametrize("given", [True, False])
def test_kimi_gets_numbered_ids_of_calls_and_outputs(given: bool) -> None:
    """Those that the model wrote; calls that a client inserts are counted."""
    found, tokenizer = kimi_with_ids()
    assert found.forms.known and found.forms.calls is CallForm.KIMI_K2
    talk = Talk("kimi-k2-first", Preamble(tools=(TOOL,)))
    talk.renderer = Renderer(tokenizer, NOON, found.prefix_rule, found.report.rules)
    calls = [msgspec.structs.replace(weather(at), id=f"id{at}") for at in (1, 2)]
    talk.say(user("Paris?"))
    if given:
        for call in calls:
            talk.say(call)
        numbers = ("0", "1")
    else:
        talk.prompt()
        written = (
            f'<|tool_call_begin|>functions.get_weather:{number}<|tool_call_argument_begin|>{{"city": "Paris"}}'
            "<|tool_call_end|>"
            for number in ("4", "7")
        )
        text = f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|><|im_end|>"
        talk.reply(encoded("kimi-k2-first", text), *calls)
        numbers = ("4", "7")
    talk.say(degrees(1))
    talk.say(degrees(2))
    text = decoded("kimi-k2-first", talk.prompt())
    for at, number in enumerate(numbers, 1):
        assert (
            text.count(f"<|tool_call_begin|>functions.get_weather:{number}<|tool_call_argument_begin|>") == 1
        )
        assert f"## Return of functions.get_weather:{number}\\n{at} degrees" in text
    assert "call_1" not in text and "call_2" not in text


@pytest.mark.parametrize("name", ["mistral-nemo", "mistral-small-3.2", "ministral-3"])
@run
async def test_a_session_goes_on_behind_a_call(name: str) -> None:
    before, reply, after, _ = written_call(name)
    end = reply[-1]
    link = ScriptedLink(Recital(reply[:-1], encoded(name, "It is warm"), end=end), end)
    session = Session("s", link, language(name), now=NOON)
    session.history.preamble = Preamble(tools=(TOOL,))
    session.history.insert(user("Paris?"))
    assert (await read(session))[1].status is ReplyStatus.COMPLETED
    call = session.history.items()[-1]
    assert isinstance(call, FunctionCall) and call.name == TOOL.name
    session.history.insert(msgspec.structs.replace(ANSWER, call_id=call.call_id))
    assert (await read(session))[1].status is ReplyStatus.COMPLETED
    assert isinstance(link.model, Recital)
    assert link.model.prompts[-1] == [*encoded(name, before), *reply, *after]


@pytest.mark.parametrize(
    "arguments", ["", "none", "[1]", '{"city": "Par', '{"a":' + "[" * 100 + "]" * 100 + "}"]
)
@pytest.mark.parametrize(
    "name", [name for name, found in PUBLISHED.items() if found.results["tools"] == EQUAL]
)
def test_a_call_whose_arguments_are_no_object_is_written(name: str, arguments: str) -> None:
    """What a model wrote wrongly is told as text in an object, if the template needs one."""
    talk = Talk(name, Preamble(tools=(TOOL,)))
    for item in (user("Paris?"), msgspec.structs.replace(CALL, arguments=arguments), ANSWER):
        talk.say(item)
    text = decoded(name, talk.prompt())
    assert text.index("Paris?") < text.index(OUTPUT)
    assert any(one in text for one in (arguments, json.dumps(arguments), json.dumps(arguments)[1:-1]))


def test_gpt_oss_gets_no_second_header_before_a_reply_that_has_its_own() -> None:
    name = "gpt-oss"
    talk = Talk(name)
    talk.say(user("Hi"))
    talk.prompt()
    own = "<|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    talk.reply(encoded(name, own + "<|return|>"), Message(id="hello", role="assistant", text="Hello"))
    talk.history.preamble = Preamble(instructions="Be brief.")
    talk.say(user("Again"))
    text = decoded(name, talk.prompt())
    assert (
        f"<|start|>user<|message|>Hi<|end|><|start|>assistant{own}<|end|><|start|>user<|message|>Again"
        in text
    )


def test_instructions_that_a_template_drops_go_into_the_first_user_message() -> None:
    assert "Be brief." not in theirs("phi-3-medium", [{"role": "system", "content": "Be brief."}, ASKED])
    talk = Talk("phi-3-medium", Preamble(instructions="Be brief."))
    talk.say(user("Hi"))
    assert "<|user|>\nBe brief.\n\nHi<|end|>" in decoded("phi-3-medium", talk.prompt())


def test_a_system_message_that_a_template_drops_later_is_the_users() -> None:
    talk = Talk("gpt-oss")
    talk.say(user("Hi"))
    talk.say(Message(id="later", role="system", text="Be brief."))
    assert "<|start|>user<|message|>Be brief.<|end|>" in decoded("gpt-oss", talk.prompt())


def test_the_form_that_reads_the_templates_own_call_is_taken() -> None:
    """A sign in its text may be another form's."""
    template = PUBLISHED["llama-3.1"].template + "{# no <tool_call> here #}"
    assert find_forms(template, "").calls is CallForm.HERMES
    found = Language.of(
        ChatTokenizer(tokenizer_of("llama-3.1"), template, PUBLISHED["llama-3.1"].named)
    ).forms
    assert found.known and found.calls is CallForm.LLAMA3_JSON


def test_a_form_that_does_not_read_the_templates_own_call_is_not_told_as_known() -> None:
    assert not language("functionary-v3.1").forms.known


@pytest.mark.parametrize("name", ["mistral-small-3", "gemma-3", "llama-3", "deepseek-r1-distill-qwen"])
def test_the_fallback_is_told_as_the_form_of_calls(name: str) -> None:
    assert not language(name).shows_tools
    found = language(name, tool_fallback=True)
    assert found.shows_tools and found.forms.known and found.forms.calls.value == "hermes"


EDITS = [
    "say",
    "again",
    "fail",
    "calls",
    "output",
    "late",
    "assistant",
    "system",
    "call",
    "delete",
    "cut",
    "rewind",
]


@pytest.mark.parametrize("name", FRAMED)
@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 99)), max_size=14))
def test_no_order_of_calls_outputs_and_messages_is_refused(name: str, steps: list[tuple[str, int]]) -> None:
    found = language(name)
    talk = Talk(name, Preamble(instructions="Be brief.", tools=(TOOL,)))
    _, reply, _, _ = written_call(name)
    for at, (step, number) in enumerate([*steps, ("say", 0)]):
        items = talk.history.items()
        item = items[number % len(items)] if items else None
        calls = [item for item in items if isinstance(item, FunctionCall)]
        match step:
            case "assistant" | "system":
                talk.say(Message(id=new_id("item"), role=step, text="Well"))
            case "call":
                talk.say(weather(2 * at))
            case "output" | "late" if calls:
                call = calls[-1] if step == "output" else calls[number % len(calls)]
                talk.say(FunctionCallOutput(id=new_id("item"), call_id=call.call_id, output=f"{at} degrees"))
            case "delete" if item is not None:
                talk.history.delete(item.id)
            case "rewind":
                rewind(talk.history, "root" if item is None else item.id, found.tokenizer)
            case "cut" if isinstance(item, Message) and item.role == "assistant" and len(item.text) > 5:
                end_with(talk.history, item.id, 5 * (number % 2), found.tokenizer)
            case "say" | "again" | "fail" | "calls":
                if step != "again":
                    talk.say(user(f"Number {at}"))
                ids = talk.prompt()
                if step == "say":
                    assert f"Number {at}" in decoded(name, ids)
                if step == "fail":
                    talk.history.abort_turn(talk.turn)
                elif step == "calls" or (step == "again" and number % 2):
                    talk.reply(
                        reply * (1 + number % 2), *map(weather, range(2 * at, 2 * at + 1 + number % 2))
                    )
                else:
                    said = Message(id=new_id("item"), role="assistant", text="Fine thank you")
                    talk.reply(encoded(name, said.text), said)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_that_is_sent_whole_reads_as_transformers_writes_it(name: str) -> None:
    """Whatever the model wrote: its tokens are used again only if they say the same."""
    if PUBLISHED[name].results["plain"].startswith(REFUSED):
        return
    told = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    told.append({"role": "user", "content": "Again"})
    before, after = theirs(name, told[:1]), theirs(name, told)
    first, whole = encoded(name, before), encoded(name, after)
    lead = after.removeprefix(before).partition("Hello there")[0] if after.startswith(before) else ""
    for said in ("Hello there", "<think>\nHm.\n</think>\n\nHello there", " Hello there \n"):
        talk = Talk(name)
        talk.say(user("Hi"))
        assert talk.prompt(verbatim=True) == first
        reply = [*encoded(name, lead), *(token for character in said for token in encoded(name, character))]
        talk.reply([*reply, talk.ends[0]], Message(id="reply", role="assistant", text="Hello there"))
        talk.say(user("Again"))
        again = talk.prompt(verbatim=True)
        assert text_of(name, again) == text_of(name, whole)
        kept = again[: len(first) + len(reply)] == first + reply
        assert kept is (said == "Hello there" and PUBLISHED[name].results["plain"] == EQUAL)


def text_of(name: str, ids: list[int]) -> str:
    return str(tokenizer_of(name).decode(ids, skip_special_tokens=False))
