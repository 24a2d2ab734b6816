"""Replies that do not end by themselves: stop strings, limits, cancels, readers that leave."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.sessions.engine_copy import EngineCopy
from holdfast.sessions.errors import SessionClosed
from holdfast.sessions.turn.events import (
    EndReason,
    MissReason,
    ReplyDone,
    ReplyStatus,
    ReplyTextDelta,
    TurnUsage,
)
from holdfast.sessions.turn.request import TurnRequest

from .session_stage import (
    END,
    NAME,
    ask,
    cancel,
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


@pytest.mark.parametrize("ahead", [1, 3, 50])
@pytest.mark.parametrize("tokens_per_row", [1, 4])
@run
async def test_a_stop_string_cuts_the_text_and_the_tokens(ahead: int, tokens_per_row: int) -> None:
    said = "one two three four five six seven"
    link = reciting(said, "next", ahead=ahead, tokens_per_row=tokens_per_row)
    session = session_on(link)
    say(session, "Count")
    events, done = await read(session, TurnRequest.checked(stop=["ee fo", "zzz"]))
    assert (done.status, done.reason, done.stopped_by) == (ReplyStatus.COMPLETED, EndReason.STOP, "ee fo")
    assert text_of(events) == done.items[0].text == "one two thr"
    assert 7 <= done.usage.output_tokens < len(toks(said)), (
        "those of the stop string were sampled, and no more"
    )
    await ask(session, "More")
    first, second = prompts(link)[:2]
    kept = second[len(first) : second.index(END, len(first))]
    assert second[: len(first)] == first and ours(NAME).backend.decode(kept) == "one two thr"
    sampled = [token for token, wanted in zip(kept, toks(said), strict=False) if token == wanted]
    assert len(sampled) >= len(kept) - 2, "all but the rest of a token are those that were sampled"


@run
async def test_held_back_text_is_delivered_when_no_stop_comes() -> None:
    session = session_on(reciting("one two ST"))
    say(session, "Hi")
    events, done = await read(session, TurnRequest.checked(stop=["STOP"]))
    assert text_of(events) == "one two ST" and done.stopped_by is None


@run
async def test_max_output_tokens_ends_incomplete_and_history_goes_on() -> None:
    link = reciting("one two three four", "ok")
    session = session_on(link)
    done = await ask(session, "Count", max_output_tokens=2)
    assert (done.status, done.reason) == (ReplyStatus.INCOMPLETE, EndReason.MAX_OUTPUT_TOKENS)
    assert done.usage.output_tokens == 2
    assert not done.items[0].complete
    partial = ours(NAME).backend.decode(toks("one two three four")[:2])
    assert done.items[0].text == partial
    await ask(session, "And?")
    assert prompts(link)[1] == [
        *prompts(link)[0],
        *toks("one two three four")[:2],
        END,
        *prompts(link)[1][len(prompts(link)[0]) + 3 :],
    ]


@run
async def test_the_context_limits_the_reply() -> None:
    link = reciting("one two three four")
    session = session_on(link)
    say(session, "Count")
    link.max_context = len(one_shot(("user", "Count"))) + 3
    _, done = await read(session)
    assert (done.status, done.usage.output_tokens) == (ReplyStatus.INCOMPLETE, 3)


@pytest.mark.parametrize("ahead", [1, 8])
@run
async def test_cancel_keeps_what_was_said_and_its_kv(ahead: int) -> None:
    said = "one two three four five six seven eight nine ten"
    link = reciting(said, "ok", ahead=ahead)
    sequence = EngineCopy(link)
    session = session_on(link, sequence=sequence)
    say(session, "Count")
    response = session.respond(TurnRequest.checked())
    events = [await anext(response) for _ in range(4)]
    assert await cancel(session)
    events += [event async for event in response]
    done = events[-1]
    assert (done.status, done.reason) == (ReplyStatus.CANCELLED, EndReason.CLIENT_CANCELLED)
    kept = session.history.head.reply.ids.tolist()
    assert kept == toks(said)[: len(kept)]
    assert text_of(events) == done.items[0].text == ours(NAME).backend.decode(kept)
    assert not done.items[0].complete
    await sequence.wait_stopped()
    assert [held.tokens for held in link.held.values()] == [prompts(link)[0] + kept]
    link.sent()
    done = await ask(session, "Go on")
    assert prompts(link)[1] == one_shot(
        ("user", "Count"), ("assistant", ours(NAME).backend.decode(kept)), ("user", "Go on")
    )
    assert done.usage.prefilled_tokens <= done.usage.new_tokens
    assert done.usage.miss_reason is None
    assert not await cancel(session)


@run
async def test_cancel_while_the_reader_waits() -> None:
    link = reciting("one two three four")
    session = session_on(link)
    say(session, "Count")
    response = session.respond(TurnRequest.checked())
    for _ in range(3):
        await anext(response)
    link.flowing = False
    waiting = asyncio.create_task(anext(response))
    await link.stuck.wait()
    assert await cancel(session)
    rest = [await waiting, *[event async for event in response]]
    assert rest[-1].status is ReplyStatus.CANCELLED


@run
async def test_cancel_before_the_first_token_leaves_no_reply() -> None:
    link = reciting("Hello")
    session = session_on(link)
    say(session, "Hi")
    response = session.respond(TurnRequest.checked())
    await response.cancel()
    events = [event async for event in response]
    assert (events[-1].status, events[-1].items) == (ReplyStatus.CANCELLED, ())
    assert [item.text for item in session.history.items()] == ["Hi"]
    assert not session.history.busy
    _, done = await read(session)
    assert done.items[0].text == "Hello"
    assert prompts(link)[0] == one_shot(("user", "Hi"))


@run
async def test_a_reader_that_leaves_cancels() -> None:
    link = reciting("one two three four five", "ok", ahead=2)
    sequence = EngineCopy(link)
    session = session_on(link, sequence=sequence)
    say(session, "Count")
    async with session.respond(TurnRequest.checked()) as response:
        async for event in response:
            if isinstance(event, ReplyTextDelta):
                break
    assert not session.history.busy
    assert "one two".startswith(session.history.items()[-1].text)
    kept = session.history.head.reply.ids.tolist()
    await sequence.wait_stopped()
    assert [held.tokens for held in link.held.values()] == [prompts(link)[0] + kept]


@run
async def test_a_cut_is_told_at_once_and_the_turn_behind_it_waits_for_the_engine() -> None:
    link = reciting("one two three four", "ok")
    session = session_on(link)
    say(session, "Count")
    response = session.respond(TurnRequest.checked())
    for _ in range(4):
        await anext(response)
    link.cut_off.add("stop")
    assert await cancel(session)
    done = [event async for event in response][-1]
    assert done.status is ReplyStatus.CANCELLED and not session.history.busy
    await link.stuck.wait()
    link.sent()
    following = asyncio.create_task(ask(session, "Go on"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(following), 0.05)
    assert not link.sent(), "what it holds is not known before that"
    link.cut_off.clear()
    link.freed.set()
    done = await following
    assert (done.status, done.items[0].text) == (ReplyStatus.COMPLETED, "ok")
    kept = prompts(link)[0] + session.history.head.parent.reply.ids.tolist()
    assert prompts(link)[1][: len(kept)] == kept and done.usage.miss_reason is None


@pytest.mark.parametrize("verb", ["begin", "generate", "row"])
@run
async def test_a_reader_cancelled_at_any_await_leaves_a_session_that_works(verb: str) -> None:
    link = reciting(*["ready"] * (verb == "generate"), "one two three", "one two three", "ok", "ok")
    session = session_on(link)
    if verb == "generate":  # which later turns are; the first one is `begin`
        await ask(session, "Hello")
    say(session, "Count")
    if verb == "row":
        link.flowing = False
    else:
        link.cut_off.add(verb)
    task = asyncio.create_task(read(session, TurnRequest.checked(stop=["two"])))
    await link.stuck.wait()
    assert not task.done()
    task.cancel()
    link.cut_off.clear()
    with pytest.raises(asyncio.CancelledError):
        await task
    link.flowing = True
    assert not session.history.busy
    done = await ask(session, "Again")
    assert done.status is ReplyStatus.COMPLETED
    decoded = ours(NAME).backend.decode(prompts(link)[-1], skip_special_tokens=False)
    assert decoded.endswith("<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n")


@run
async def test_closing_cancels_and_lets_the_sequence_go() -> None:
    link = reciting("one two three four")
    session = session_on(link)
    say(session, "Count")
    response = session.respond(TurnRequest.checked())
    await anext(response)
    await anext(response)
    await session.aclose()
    assert link.held == {}
    assert [event async for event in response][-1].status in (ReplyStatus.CANCELLED, ReplyStatus.FAILED)
    with pytest.raises(SessionClosed):
        session.respond(TurnRequest.checked())


@run
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_cancelled_turn_says_what_it_cost_or_that_this_is_not_known(tokens: int) -> None:
    link = reciting("Hello", "It goes on and on", "It goes on and on")
    session = session_on(link)
    await ask(session, "Hi")

    async def cancelled() -> TurnUsage:
        say(session, "Go on.")
        response = session.respond(TurnRequest.checked())
        for _ in range(1 + tokens):
            await anext(response)
        await response.cancel()
        done = [event async for event in response][-1]
        assert isinstance(done, ReplyDone) and done.status is ReplyStatus.CANCELLED
        return done.usage

    usage = await cancelled()
    known = usage.prefilled_tokens + usage.cached_tokens == usage.input_tokens and usage.miss_reason is None
    assert known if tokens else usage.miss_reason is MissReason.UNREPORTED
    for held in link.held.values():  # its KV went to the disk
        held.computed, link.on_disk = 0, len(held.tokens)
    usage = await cancelled()
    assert usage.miss_reason is MissReason.UNREPORTED and usage.new_tokens
    assert usage.prefilled_tokens == usage.disk_tokens == usage.cached_tokens == 0
