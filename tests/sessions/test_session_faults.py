"""What goes wrong in a turn: refusals, engine errors, deaths and restarts. The session goes on."""

from __future__ import annotations

import pytest

from holdfast.sessions.errors import ConversationBusy, EngineFull, PromptTooLong, TemplateFailed, TurnFailed
from holdfast.sessions.session import Session
from holdfast.sessions.text.language import Language
from holdfast.sessions.turn.events import EndReason, MissReason, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest

from .session_stage import (
    BROKEN,
    NAME,
    ask,
    one_shot,
    prompts,
    read,
    reciting,
    run,
    say,
    session_on,
    text_of,
    toks,
)
from .text.chat_languages import ours


@run
async def test_prompt_too_long_is_refused_before_any_work() -> None:
    link = reciting("Hello")
    session = session_on(link)
    say(session, "Hi")
    prompt = len(one_shot(("user", "Hi")))
    link.max_context = prompt
    for given, param in ((None, None), (session.history.items(), "input")):
        with pytest.raises(PromptTooLong) as refused:
            await read(session, TurnRequest.checked(input=given))
        assert refused.value.param == param
    assert link.log == []
    assert not session.history.busy
    link.max_context = prompt + 1
    _, done = await read(session)
    assert done.usage.output_tokens == 1


@run
async def test_a_template_that_refuses_leaves_the_session_as_it_was() -> None:
    refusing = (
        ours(NAME).template + "{%- if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{%- endif %}"
    )
    language = Language.of(type(ours(NAME))(ours(NAME).backend, refusing))
    session = Session("s", reciting("Hello"), language)
    bad = say(session, "bad")
    with pytest.raises(TemplateFailed, match="no"):
        await read(session)
    session.history.delete(bad.id)
    assert (await ask(session, "good")).status is ReplyStatus.COMPLETED


@run
async def test_an_engine_error_rolls_the_turn_back() -> None:
    link = reciting([*toks("one two"), *BROKEN], "fine")
    session = session_on(link)
    say(session, "Hi")
    events, done = await read(session)
    assert (done.status, done.reason) == (ReplyStatus.FAILED, EndReason.ERROR)
    assert isinstance(done.error, TurnFailed)
    assert "not a number" in done.error.message
    assert done.usage.output_tokens == len(toks("one two"))
    assert [(item.text, item.complete) for item in done.items] == [("one two", False)]
    assert text_of(events) == "one two"
    assert [item.text for item in session.history.items()] == ["Hi"]
    assert link.held == {}  # given up: what it holds is in doubt
    _, done = await read(session)
    assert done.items[0].text == "fine"
    assert prompts(link)[-1] == one_shot(("user", "Hi"))


@run
async def test_a_restart_between_turns_is_the_miss_reason() -> None:
    link = reciting("Hello", "Back")
    session = session_on(link)
    await ask(session, "Hi")
    link.die()
    link.restart()
    done = await ask(session, "Still there?")
    assert done.status is ReplyStatus.COMPLETED
    assert done.usage.miss_reason is MissReason.ENGINE_RESTARTED
    assert done.usage.prefilled_tokens == done.usage.input_tokens > done.usage.new_tokens


@run
async def test_a_full_engine_fails_the_turn_alone() -> None:
    link = reciting("Hello", full=True)
    session = session_on(link)
    say(session, "Hi")
    _, done = await read(session)
    assert isinstance(done.error, EngineFull)
    link.full = False
    assert (await read(session))[1].status is ReplyStatus.COMPLETED


@run
async def test_a_second_response_is_refused_while_one_writes() -> None:
    session = session_on(reciting("Hello", "Fine"))
    say(session, "Hi")
    first = session.respond(TurnRequest.checked())
    with pytest.raises(ConversationBusy):
        session.respond(TurnRequest.checked())
    await anext(first)
    with pytest.raises(ConversationBusy):
        session.respond(TurnRequest.checked())
    assert [event async for event in first][-1].status is ReplyStatus.COMPLETED
    assert (await ask(session, "And?")).status is ReplyStatus.COMPLETED
