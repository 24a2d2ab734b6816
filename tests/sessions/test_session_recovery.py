"""A reply outlives its engine: nothing repeated, nothing missing, its cost told, and the poison rule."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.runtime.errors import EngineDied, GrammarUnavailable
from holdfast.runtime.link.generation import Generation
from holdfast.sessions import errors
from holdfast.sessions.conversation.items import Message
from holdfast.sessions.engine_copy import MAX_KILLS, EngineCopy
from holdfast.sessions.errors import EngineUnavailable, SequencePoisoned
from holdfast.sessions.session import Session
from holdfast.sessions.settings import SessionSettings
from holdfast.sessions.turn.events import EndReason, MissReason, ReplyDone, ReplyEvent, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.turn.response import TurnResponse

from .scripted_link import Held, ScriptedLink
from .session_stage import END, LANGUAGE, ask, cancel, reciting, run, say, session_on, text_of, toks

TALE = "The quick brown fox jumps over the lazy dog, and then 🎉 it goes home to sleep."


def telling(text: str = TALE, **more: object) -> ScriptedLink:
    """A model that tells a tale after any prompt that ends a user's turn: a function of the tokens alone."""
    told = [*toks(text), END]

    def model(tokens: list[int]) -> int:
        for said in range(len(told)):
            if tokens[len(tokens) - said :] == told[:said] and ends_prompt(tokens[: len(tokens) - said]):
                return told[said]
        raise AssertionError("no prompt of ours")

    return ScriptedLink(model, END, **more)


def ends_prompt(tokens: list[int]) -> bool:
    generation = toks("<|im_start|>assistant\n")
    return tokens[-len(generation) :] == generation


async def whole(response: TurnResponse) -> tuple[str, ReplyDone]:
    events = [event async for event in response]
    done = events[-1]
    assert isinstance(done, ReplyDone)
    return text_of(events), done


async def until(response: TurnResponse, tokens: int, link: ScriptedLink) -> list[ReplyEvent]:
    """Read until the engine has sampled so many tokens of the reply."""
    events: list[ReplyEvent] = []
    while not any(held.sampled >= tokens for held in link.held.values()):
        events.append(await anext(response))
    return events


async def rest(response: TurnResponse, events: list[ReplyEvent]) -> tuple[str, ReplyDone]:
    events = events + [event async for event in response]
    done = events[-1]
    assert isinstance(done, ReplyDone)
    return text_of(events), done


async def opened(link: ScriptedLink) -> Held:
    """The one sequence, as soon as there is one."""
    while True:
        for held in link.held.values():
            return held
        await asyncio.sleep(0)


async def die_and_return(link: ScriptedLink, outside: bool = False) -> None:
    """The engine dies, the reader finds out, another one comes."""
    link.waiting.clear()
    link.die(outside)
    await link.waiting.wait()
    link.restart()


@run
async def test_a_reply_goes_on_with_the_next_engine() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked(seed=7, temperature=0.5, max_output_tokens=200))
    events = await until(response, 5, link)
    before = list(link.log)
    link.log.clear()
    back = asyncio.create_task(die_and_return(link))
    text, done = await rest(response, events)
    await back
    assert text == TALE and done.status is ReplyStatus.COMPLETED
    ((_, _, tokens, limits, generated_from, _),) = [entry for entry in link.log if entry[0] == "begin"]
    prompt = next(entry[2] for entry in before if entry[0] == "begin")
    said = toks(TALE)[: len(tokens) - len(prompt)]
    assert tokens == prompt + said and len(said) >= 5
    assert limits.max_tokens == 200 and generated_from == len(said)
    usage = done.usage
    assert usage.prefilled_tokens == len(prompt) and usage.output_tokens == len(toks(TALE)) + 1
    assert usage.recomputed_tokens == len(prompt) + len(said) - 1, "all but the token without KV"
    assert usage.miss_reason is MissReason.ENGINE_RESTARTED
    after = await ask(session, "Again.")
    assert after.usage.miss_reason is None and after.usage.prefilled_tokens == after.usage.new_tokens


@run
async def test_what_was_computed_ahead_of_a_turn_is_of_its_cost_on_an_engine_that_died() -> None:
    link = telling()
    session = session_on(link)
    session.expect(Message(id="item_1", role="user", text="Tell me."))
    held = await opened(link)
    held.computed = len(held.tokens)
    session.expect(None)
    session.history.insert(Message(id="item_1", role="user", text="Tell me."))
    response = session.respond(TurnRequest.checked())
    events = await until(response, 5, link)
    back = asyncio.create_task(die_and_return(link))
    _, done = await rest(response, events)
    await back
    usage = done.usage
    assert held.computed > 1 and usage.prefilled_tokens == usage.new_tokens == usage.input_tokens
    assert usage.recomputed_tokens > 0 and usage.miss_reason is MissReason.ENGINE_RESTARTED


@run
async def test_a_limit_counts_what_was_said_on_all_engines() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked(max_output_tokens=9))
    events = await until(response, 4, link)
    back = asyncio.create_task(die_and_return(link))
    _, done = await rest(response, events)
    await back
    assert done.status is ReplyStatus.INCOMPLETE and done.usage.output_tokens == 9


@run
async def test_a_turn_asked_for_while_there_is_no_engine_waits_for_one() -> None:
    link = telling()
    session = session_on(link)
    link.die()
    say(session, "Tell me.")
    reading = asyncio.create_task(whole(session.respond(TurnRequest.checked())))
    await link.waiting.wait()
    link.restart()
    text, done = await reading
    assert text == TALE and done.usage.recomputed_tokens == 0


@run
async def test_without_an_engine_in_time_the_reply_fails_and_the_next_one_works() -> None:
    link = telling()
    impatient = Session("s", link, LANGUAGE, settings=SessionSettings(recovery_seconds=0.01))
    say(impatient, "Tell me.")
    response = impatient.respond(TurnRequest.checked())
    events = await until(response, 4, link)
    link.die()
    _, done = await rest(response, events)
    assert done.status is ReplyStatus.FAILED and isinstance(done.error, EngineUnavailable)
    assert [item.text for item in impatient.history.items()] == ["Tell me."]
    link.restart()
    assert (await whole(impatient.respond(TurnRequest.checked())))[0] == TALE


@run
async def test_an_engine_that_never_comes_back_fails_the_reply_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = telling()

    async def never() -> None:
        raise EngineDied("the engine cannot start again")

    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked())
    events = await until(response, 4, link)
    monkeypatch.setattr(link, "wait_ready", never)
    link.die()
    _, done = await rest(response, events)
    assert isinstance(done.error, EngineUnavailable) and "cannot start again" in done.error.message


@run
async def test_a_reply_cancelled_while_it_waits_keeps_its_words() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked())
    events = await until(response, 4, link)
    link.die()
    reading = asyncio.create_task(rest(response, events))
    await link.waiting.wait()
    await cancel(session)
    text, done = await reading
    assert done.status is ReplyStatus.CANCELLED and TALE.startswith(text) and text
    link.restart()
    assert (await ask(session, "Go on.")).status is ReplyStatus.COMPLETED


@run
async def test_a_reply_cut_because_the_server_leaves_is_incomplete() -> None:
    link = telling()
    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked())
    events = await until(response, 4, link)
    await response.cancel(EndReason.SERVER_LEAVING)
    text, done = await rest(response, events)
    assert (done.status, done.reason) == (ReplyStatus.INCOMPLETE, EndReason.SERVER_LEAVING)
    assert session.history.items()[-1].text == text, "what was said stays"


@run
async def test_a_stop_string_found_as_the_engine_dies_ends_the_reply_well() -> None:
    link = telling(ahead=3)
    session = session_on(link)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked(stop=["brown"]))

    async def dying(*_: object) -> None:
        link.die()
        raise EngineDied("just now")

    link.stop = dying  # type: ignore[method-assign]
    text, done = await whole(response)
    assert text == "The quick " and done.status is ReplyStatus.COMPLETED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_deaths_at_any_moments_change_no_word(deaths: list[int], ahead: int, per_row: int) -> None:
    async def play() -> None:
        link = telling(ahead=ahead, tokens_per_row=per_row)
        session = session_on(link)
        say(session, "Tell me.")
        response = session.respond(TurnRequest.checked())
        events: list[ReplyEvent] = []
        for death in deaths:
            events += [await anext(response) for _ in range(death) if not response.over]
            link.die(outside=True)
            link.restart()
        text, done = await rest(response, events)
        assert text == TALE and done.items[0].text == TALE
        usage = done.usage
        assert usage.output_tokens == len(toks(TALE)) + 1
        assert usage.prefilled_tokens == usage.input_tokens or usage.miss_reason is MissReason.UNREPORTED

    asyncio.run(asyncio.wait_for(play(), 20))


# --- poison -----------------------------------------------------------------------------------------------


@run
async def test_a_sequence_of_two_deaths_goes_on_alone_and_is_cleared_by_a_token() -> None:
    link = telling(flowing=False)
    sequence = EngineCopy(link)
    session = session_on(link, sequence=sequence)
    say(session, "Tell me.")
    response = session.respond(TurnRequest.checked())
    events = [await anext(response)]
    reading = asyncio.create_task(rest(response, events))
    for _ in range(2):
        link.stuck.clear()
        await link.stuck.wait()
        await die_and_return(link)
    link.stuck.clear()
    await link.stuck.wait()
    alone = [entry[5] for entry in link.log if entry[0] == "begin"]
    assert alone == [False, False, True]
    link.flow()
    assert (await reading)[0] == TALE
    assert not sequence.crashes.isolated


@run
async def test_an_engine_that_dies_of_one_alone_fails_it_and_tries_it_alone_at_once_the_next_time() -> None:
    link = telling(flowing=False)
    session = session_on(link)
    say(session, "Poison.")
    reading = asyncio.create_task(whole(session.respond(TurnRequest.checked())))
    for _ in range(3):
        link.stuck.clear()
        await link.stuck.wait()
        await die_and_return(link)
    _, done = await reading
    assert isinstance(done.error, SequencePoisoned) and not session.history.busy
    reading = asyncio.create_task(whole(session.respond(TurnRequest.checked())))
    link.stuck.clear()
    await link.stuck.wait()
    await die_and_return(link)
    assert isinstance((await reading)[1].error, SequencePoisoned)


@run
async def test_engines_killed_by_others_accuse_no_sequence_but_not_without_end() -> None:
    link = telling(flowing=False)
    sequence = EngineCopy(link)
    session = session_on(link, sequence=sequence)
    say(session, "Tell me.")
    reading = asyncio.create_task(whole(session.respond(TurnRequest.checked())))
    for death in range(MAX_KILLS):
        assert not sequence.crashes.isolated and not reading.done(), death
        link.stuck.clear()
        await link.stuck.wait()
        await die_and_return(link, outside=True)
    assert isinstance((await reading)[1].error, SequencePoisoned)


@run
async def test_a_sequence_outside_the_step_is_not_accused() -> None:
    link = reciting("Hello", "Fine")
    session = session_on(link)
    await ask(session, "Hi")
    for _ in range(4):
        link.die()
        link.restart()
    assert (await ask(session, "And?")).status is ReplyStatus.COMPLETED
    assert [entry[5] for entry in link.log if entry[0] == "begin"] == [False, False]


async def half_read(link: ScriptedLink) -> tuple[Session, TurnResponse, AsyncIterator[ReplyEvent]]:
    """A reply in the middle; its engine was killed and followed by another, and a lease was granted there."""
    session = session_on(link)
    say(session, "Hi")
    response = session.respond(TurnRequest.checked())
    reply = aiter(response)
    for _ in range(3):
        await anext(reply)
    link.die(outside=True)
    link.restart()
    await session.placement.lease(1, 60.0, None)
    return session, response, reply


@run
async def test_a_reply_outlives_its_engine_though_a_lease_opened_the_next_ones_sequence() -> None:
    text = "Hello there, this is long enough!"
    session, _, reply = await half_read(reciting(text))
    events = [event async for event in reply]
    assert isinstance(events[-1], ReplyDone) and events[-1].status is ReplyStatus.COMPLETED
    assert session.history.items()[-1].text == text


@run
async def test_such_a_reply_can_be_cancelled_and_the_next_turn_runs() -> None:
    session, response, reply = await half_read(reciting("Hello there, this is long enough!", "Again!"))
    await response.cancel()
    events = [event async for event in reply]
    assert isinstance(events[-1], ReplyDone) and events[-1].status is ReplyStatus.CANCELLED
    assert (await ask(session, "And now?")).items[0].text == "Again!"


@run
async def test_a_later_turn_that_is_refused_for_its_grammar_keeps_the_sequence() -> None:
    link = reciting("Hello!", "Again!", "More!")
    session = session_on(link)
    await ask(session, "Hi")
    with pytest.MonkeyPatch.context() as patch:

        async def refused(*_: object) -> Generation:
            raise GrammarUnavailable("no")

        patch.setattr(link, "generate", refused)
        done = await ask(session, "And?")
    assert isinstance(done.error, errors.GrammarUnavailable) and len(link.held) == 1
    assert (await ask(session, "Now?")).items[0].text == "Again!"
