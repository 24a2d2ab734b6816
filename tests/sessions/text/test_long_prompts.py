"""Long prompts: refused at once where they cannot fit, else tokenized beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import Message, Preamble, Tool
from holdfast.sessions.errors import PromptTooLong
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.streaming_tokenizer import StablePrefixRule
from holdfast.sessions.turn.events import EndReason, ReplyDone, ReplyStatus
from holdfast.sessions.turn.request import TurnRequest
from holdfast.sessions.workers import Workers, WorkerSlot

from ..scripted_link import ScriptedLink
from ..session_stage import END, LANGUAGE, ask, one_shot, prompts, read, reciting, run, say, session_on
from .test_tokenizer import Watched

WORDS = "The weather in Paris is sunny and warm. "
LONG = WORDS * 1200
ACME, ZENITH = b"acme", b"zenith"


class Gate:
    """Lets long texts be tokenized a piece at a time: ``reached`` when one waits, until it is ``opened``.
    ``running``: how many works have a thread, or wait for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = asyncio.Event(), threading.Event()
        self.pieces, self._works = 0, list[asyncio.Future]()
        loop, pieces, begin = asyncio.get_running_loop(), StablePrefixRule.pieces, Workers.begin

        def gated(rule: StablePrefixRule, text: str, **more: object) -> Iterator[tuple[list[int], int]]:
            for piece in pieces(rule, text, **more):  # type: ignore[arg-type]
                loop.call_soon_threadsafe(self.reached.set)
                assert self.opened.wait(20), "it was not opened"
                self.pieces += 1
                yield piece

        def begun(workers: Workers, work: Callable) -> asyncio.Future:
            self._works.append(begin(workers, work))
            return self._works[-1]

        monkeypatch.setattr(StablePrefixRule, "pieces", gated)
        monkeypatch.setattr(Workers, "begin", begun)

    @property
    def running(self) -> int:
        return sum(not work.done() for work in self._works)


@run
async def test_a_prompt_that_cannot_fit_is_refused_untokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    link = reciting("Hello", max_context=80)
    session = session_on(link)
    long = say(session, "long " * 200_000)
    watched = Watched(LANGUAGE.tokenizer.backend)
    monkeypatch.setattr(LANGUAGE.tokenizer, "backend", watched)
    for given, param in ((None, None), (session.history.items(), "input")):
        with pytest.raises(PromptTooLong, match=r"context length is 80 tokens$") as refused:
            await read(session, TurnRequest.checked(input=given))
        assert refused.value.param == param
    typed = Message(id="item_1", role="user", text="long " * 200_000)
    assert (await session.prefilled_input(typed)).left > 80
    session.expect(typed)
    await asyncio.sleep(0.05)
    assert watched.total == 0 and link.log == [] and not session.history.busy
    session.history.delete(long.id)
    assert (await ask(session, "Hi")).status is ReplyStatus.COMPLETED


@run
async def test_no_more_is_tokenized_than_the_context_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    link = reciting("Hello", max_context=500)
    session = session_on(link)
    monkeypatch.setattr(LANGUAGE.tokenizer, "longest", None)  # as of one that may drop text
    say(session, LONG)
    watched = Watched(LANGUAGE.tokenizer.backend)
    monkeypatch.setattr(LANGUAGE.tokenizer, "backend", watched)
    with pytest.raises(PromptTooLong, match="at least"):
        await read(session)
    assert 0 < watched.total < len(LONG) / 2 and link.log == []


@run
async def test_a_long_prompt_has_the_ids_of_one_that_is_tokenized_at_once() -> None:
    link = reciting("Hello", "Bye", max_context=1 << 20)
    session = session_on(link)
    await ask(session, LONG)
    await ask(session, LONG + "And more?")
    assert prompts(link)[0] == one_shot(("user", LONG))
    assert prompts(link)[1] == one_shot(("user", LONG), ("assistant", "Hello"), ("user", LONG + "And more?"))


@run
async def test_of_one_tenant_one_long_prompt_is_tokenized_at_a_time_and_others_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = SessionRegistry(ScriptedLink(lambda tokens: END, END, max_context=1 << 20), LANGUAGE)
    gate = Gate(monkeypatch)
    flood = [registry.create(salt=ACME) for _ in range(3)]
    for session in flood:
        say(session, LONG)
    turns = [asyncio.ensure_future(read(session)) for session in flood]
    await gate.reached.wait()
    short, stranger = registry.create(salt=ACME), registry.create(salt=ZENITH)
    assert (await ask(short, "Hi")).status is ReplyStatus.COMPLETED
    gate.reached.clear()
    say(stranger, LONG)
    other = asyncio.ensure_future(read(stranger))
    await gate.reached.wait()  # the stranger has a thread of its own
    assert gate.running == 2 and not any(turn.done() for turn in turns)
    gate.opened.set()
    for _, done in await asyncio.gather(other, *turns):
        assert done.status is ReplyStatus.COMPLETED
    await registry.aclose()


@run
async def test_a_cancelled_turn_tokenizes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    link = reciting("one", "two", max_context=1 << 20)
    session = session_on(link)
    gate = Gate(monkeypatch)
    item = say(session, LONG)
    response = session.respond(TurnRequest.checked())
    reading = asyncio.ensure_future(_all(response))
    await gate.reached.wait()
    await response.cancel()
    gate.opened.set()
    done = (await reading)[-1]
    assert isinstance(done, ReplyDone) and done.reason is EndReason.CLIENT_CANCELLED and gate.pieces == 1
    assert link.log == [] and not session.history.busy
    session.history.delete(item.id)
    assert (await ask(session, "Hi")).status is ReplyStatus.COMPLETED
    assert prompts(link)[0] == one_shot(("user", "Hi"))


@run
async def test_a_reader_that_leaves_gives_the_thread_back(monkeypatch: pytest.MonkeyPatch) -> None:
    link = reciting("one", "two", max_context=1 << 20)
    registry = SessionRegistry(link, LANGUAGE)
    session, other = registry.create(salt=ACME), registry.create(salt=ACME)
    gate = Gate(monkeypatch)
    say(session, LONG)
    say(other, LONG)
    reading = asyncio.ensure_future(read(session))
    await gate.reached.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert not session.history.busy
    waiting = asyncio.ensure_future(read(other))
    await asyncio.sleep(0)
    assert gate.running == 1, "what was left still has the thread, until its next piece"
    gate.opened.set()
    assert (await waiting)[1].status is ReplyStatus.COMPLETED
    assert prompts(link)[0] == one_shot(("user", LONG))
    await registry.aclose()


@run
async def test_work_that_fails_after_all_waits_ended_raises_nothing() -> None:
    workers, begun, opened = Workers(), asyncio.Event(), threading.Event()
    slot, loop = WorkerSlot(workers), asyncio.get_running_loop()

    def work(stopped: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        opened.wait(20)
        raise ValueError("too late")

    left = asyncio.ensure_future(slot.run(work))
    await begun.wait()
    left.cancel()
    opened.set()
    assert await slot.run(lambda stopped: 7) == 7
    assert left.cancelled()
    with pytest.raises(ValueError, match="too late"):
        await slot.run(work)
    await workers.aclose()


def test_tools_and_instructions_count_as_text_to_write() -> None:
    tools = (Tool(name="one", parameters={"description": "long " * 9000}),)
    history = History(Preamble(instructions="short", tools=tools))
    assert history.script().characters() > 40_000
    assert history.branch().script().characters() == history.script().characters()
    assert history.script(Preamble(instructions="x")).characters() < 100
    history.preamble = Preamble()
    assert history.script().characters() == 0


async def _all(response: object) -> list[object]:
    return [event async for event in response]  # type: ignore[attr-defined]
