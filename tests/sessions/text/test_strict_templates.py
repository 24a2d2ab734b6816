"""Templates that want users and assistants to alternate take every conversation that a session can come to."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.sessions.conversation.edits import end_with, rewind
from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, new_id
from holdfast.sessions.conversation.tree import Script, Segment, TurnReply
from holdfast.sessions.session import Session
from holdfast.sessions.text.chat_template import RoleRules
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.text.tokenizer import CLOSE_MARK, OPEN_MARK
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.turn.events import ReplyStatus
from holdfast.sessions.turn.request import TurnRequest

from ..scripted_link import Recital, ScriptedLink
from ..session_stage import BROKEN, read, run, say
from .chat_languages import STRICT, end_id, ids, ours, reference
from .test_renderer import typed

NOON = datetime(2025, 3, 1, 12)
SPACED = ("mistral-v2", "mistral-v3")
"""Their templates write a space before what the model says, and the model says it itself."""
FOLDED = ("mistral-v1", "gemma-2")
"""They take no system message."""
MOVING = ("mistral-v3", "mistral-nemo")
"""The system message moves to the last user's with every turn."""
SAID = ("Hello there", "Fine thank you", "The weather is warm", "21 degrees")


@cache
def language(name: str) -> Language:
    return Language.of(ours(name))


def renderer_of(name: str) -> Renderer:
    found = language(name)
    return Renderer(found.tokenizer, NOON, found.prefix_rule, found.report.rules)


def message(role: str, text: str) -> Message:
    return Message(id=new_id("item"), role=role, text=text)


def replied(name: str, text: str) -> TurnReply:
    said = ids(name, (" " if name in SPACED else "") + text)
    return TurnReply((message("assistant", text),), ids_of([*said, end_id(name)]), ended=True)


def alternating(name: str, segments: tuple[Segment, ...], instructions: str = "") -> list[dict[str, str]]:
    """The conversation as a person would write it for such a template."""
    told: list[dict[str, str]] = []
    if instructions:
        told.append({"role": "user" if name in FOLDED else "system", "content": instructions})
    for segment in segments:
        item = segment.items[0] if isinstance(segment, TurnReply) else segment
        assert isinstance(item, Message)
        first = not told and name not in FOLDED
        role = "user" if item.role == "system" and not first else item.role
        last = told[-1]["role"] if told else ""
        text = item.text.replace(OPEN_MARK, "").replace(CLOSE_MARK, "")
        if last == role and not isinstance(segment, TurnReply):
            told[-1]["content"] = "\n\n".join(filter(None, [told[-1]["content"], text]))
            continue
        if role == "assistant" and last != "user":
            told.append({"role": "user", "content": ""})
        told.append({"role": role, "content": text})
    return told if told and told[-1]["role"] == "user" else [*told, {"role": "user", "content": ""}]


def one_shot(name: str, messages: list[dict[str, str]]) -> list[int]:
    return reference(name).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, sanitize_control_tokens=True
    )


STEPS = ["say", "say", "fail", "cancel", "item", "assistant", "system", "again", "fork", "rewind"]
texts = typed.filter(lambda text: text.strip() == text)


@pytest.mark.parametrize("name", STRICT)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), texts, st.integers(0, 99)), max_size=9),
    last=texts,
    told=st.booleans(),
)
def test_whatever_was_appended_the_ids_are_those_of_one_rendering(
    name: str, steps: list[tuple[str, str, int]], last: str, told: bool
) -> None:
    instructions = "Be brief" if told and name not in MOVING else ""
    renderer, history = renderer_of(name), History(Preamble(instructions=instructions))
    for step, text, number in [*steps, ("say", last, 0)]:
        if step == "system" and name in MOVING and not history.items():
            step = "item"
        match step:
            case "item" | "assistant" | "system":
                history.insert(message("user" if step == "item" else step, text))
                continue
            case "fork":
                history = history.branch()
                continue
            case "rewind":
                items = history.items()
                rewind(history, items[number % len(items)].id if items else "root", ours(name))
                continue
            case "say" | "fail" | "cancel":
                history.insert(message("user", text))
        expected = one_shot(name, alternating(name, history.script().segments, instructions))
        turn = history.prepare(TurnRequest.checked()).turn
        if step == "cancel":
            history.abort_turn(turn)
            continue
        draft = renderer.draft(turn.script)
        assert draft.tokens().tolist() == expected
        if step == "fail":
            history.abort_turn(turn)
        else:
            history.commit_turn(turn, draft, replied(name, SAID[number % len(SAID)]))


EDITS = [*STEPS, "interrupt", "delete", "first", "call", "answer"]


@pytest.mark.parametrize("name", STRICT)
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(EDITS), texts, st.integers(0, 99)), max_size=12))
def test_no_edit_of_a_conversation_is_refused(name: str, steps: list[tuple[str, str, int]]) -> None:
    renderer, history = renderer_of(name), History(Preamble(instructions="Be brief"))
    for step, text, number in [*steps, ("say", "And now?", 0)]:
        items = history.items()
        item = items[number % len(items)] if items else None
        match step:
            case "item" | "assistant" | "system":
                history.insert(message("user" if step == "item" else step, text))
            case "fork":
                history = history.branch()
            case "rewind":
                rewind(history, "root" if item is None else item.id, ours(name))
            case "interrupt" if isinstance(item, Message) and item.role == "assistant" and len(item.text) > 5:
                end_with(history, item.id, 5 * (number % 2), ours(name))
            case "delete" if item is not None:
                history.delete(item.id)
            case "first":
                history.insert(message("assistant" if number % 2 else "user", text), "root")
            case "call":
                history.insert(FunctionCall(id=new_id("item"), call_id="c", name="look", arguments="{}"))
            case "answer":
                history.insert(FunctionCallOutput(id=new_id("item"), call_id="c", output=text))
            case "say" | "fail" | "cancel" | "again":
                if step != "again":
                    history.insert(message("user", text))
                turn = history.prepare(TurnRequest.checked()).turn
                draft = renderer.draft(turn.script)
                if step in ("say", "again"):
                    history.commit_turn(turn, draft, replied(name, SAID[number % len(SAID)]))
                else:
                    history.abort_turn(turn)


@pytest.mark.parametrize("name", STRICT)
@settings(max_examples=40, deadline=None)
@given(before=st.lists(texts, max_size=2), whole=typed, after=st.booleans())
def test_text_that_grows_behind_what_was_not_answered_settles(
    name: str, before: list[str], whole: str, after: bool
) -> None:
    """What is prefilled while a user types, behind items that have no reply, begins the prompt."""
    renderer, history = renderer_of(name), History()
    if after:
        history.insert(message("user", "Hi"))
        turn = history.prepare(TurnRequest.checked()).turn
        history.commit_turn(turn, renderer.draft(turn.script), replied(name, "Hello there"))
    for text in before:
        history.insert(message("user", text))
    item, early = message("user", ""), []
    for end in range(len(whole) + 1):
        grown = Message(id=item.id, role="user", text=whole[:end])
        script = history.script()
        early.append(renderer.stable_tokens(Script(script.preamble, (*script.segments, grown), script.base)))
    history.insert(Message(id=item.id, role="user", text=whole))
    tokens = renderer.draft(history.script()).tokens().tolist()
    for settled in early:
        assert tokens[: len(settled)] == settled.tolist()


@pytest.mark.parametrize("name", STRICT)
def test_text_behind_what_was_not_answered_is_prefilled_as_it_comes(name: str) -> None:
    renderer, history = renderer_of(name), History()
    history.insert(message("user", "The weather in Paris"))
    lengths = []
    for text in ("", "is sunny and warm", "is sunny and warm and I am fine thank you"):
        script = Script(history.preamble, (*history.items(), message("user", text)))
        lengths.append(len(renderer.stable_tokens(script)))
    assert 3 < lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("name", STRICT)
@run
async def test_turns_that_failed_or_were_cancelled_do_not_brick_the_session(name: str) -> None:
    spaced = " " if name in SPACED else ""
    said = [ids(name, spaced + "Hello there"), BROKEN, ids(name, spaced + "Fine thank you")]
    link = ScriptedLink(Recital(*said, end=end_id(name)), end_id(name))
    session = Session("s", link, language(name), now=NOON)
    say(session, "Hi")
    assert (await read(session))[1].status is ReplyStatus.COMPLETED
    say(session, "One")
    assert (await read(session))[1].status is ReplyStatus.FAILED
    say(session, "Two")
    async with session.respond(TurnRequest.checked()) as response:
        assert await anext(response)  # and it is left before the first token
    say(session, "Three")
    _, done = await read(session)
    assert done.status is ReplyStatus.COMPLETED
    talk = [("user", "Hi"), ("assistant", "Hello there"), ("user", "One\n\nTwo\n\nThree")]
    messages = [{"role": role, "content": text} for role, text in talk]
    assert isinstance(link.model, Recital)
    assert link.model.prompts[-1] == one_shot(name, messages)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_other_templates_get_every_message_by_itself(name: str) -> None:
    rules = language(name).report.rules
    assert replace(rules, calls=True, schemas=True, outputs=True) == RoleRules(reasoning=rules.reasoning)
