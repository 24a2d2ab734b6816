"""The measurements of the streaming benchmark on one server; each call measures one thing once.

Input is text in the toys' language, streamed at a number of tokens per second or sent at once. Times are
seconds of ``time.perf_counter()``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median

from holdfast.sdk import Chat, Client

from ..toys import text_of
from .options import CannotMeasure

PERIOD = 0.1  # between two pieces
RETRACTED = 0.1  # of all pieces: their last tokens, one to three, are taken back
ENDLESS = 1 << 12  # tokens of another session's reply


@dataclass(frozen=True, slots=True)
class Spoken:
    """The figures of one turn. ``ttft``: seconds from the last byte of the input to the first text of the
    reply. ``prefilled``: tokens that were computed for it; ``new``: tokens that were truly new."""

    ttft: float
    prefilled: int
    new: int


class ToyText:
    """Endless text of random tokens of a seed, in a toy's language. ``vocabulary``: the number of the toy's
    tokens."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.random = Random(seed)
        self._vocabulary = vocabulary

    def take(self, tokens: int) -> str:
        return text_of(self.random.randrange(2, self._vocabulary) for _ in range(tokens))


def session(client: Client, out: int) -> AbstractAsyncContextManager[Chat]:
    """Open a session with replies of ``out`` tokens, closed at the end of the block."""
    return client.session(temperature=0, max_output_tokens=out)


async def at_once(chat: Chat, text: str) -> Spoken:
    """Take a turn with the whole text sent at once."""
    return await _reply(chat, text, time.perf_counter())


async def later(chat: Chat, text: str, rate: float) -> Spoken:
    """Take a turn as a client does that waits for the end of the input before it sends: after the time in which
    the text would have come at ``rate`` tokens per second."""
    await asyncio.sleep(len(text) / rate)
    return await at_once(chat, text)


async def streamed(chat: Chat, text: str, rate: float, mistakes: ToyText | None = None) -> Spoken:
    """Take a turn with the text streamed at ``rate`` tokens per second. ``mistakes``: wrong text from there is
    sent now and then, and replaced; None: no mistakes."""
    each = max(1, round(rate * PERIOD))
    typing = chat.input()
    last = due = time.perf_counter()
    for start in range(0, len(text), each):
        piece = text[start : start + each]
        due += len(piece) / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        last = time.perf_counter()
        wrong = (
            0 if mistakes is None or mistakes.random.random() >= RETRACTED else mistakes.random.randint(1, 3)
        )
        if mistakes is not None and 0 < wrong < len(piece) and start + each < len(text):
            await typing.append(piece[:-wrong] + mistakes.take(wrong))
            await asyncio.sleep(PERIOD / 2)
            await typing.replace(start + len(piece) - wrong, piece[-wrong:])
        else:
            await typing.append(piece)
    await typing.commit()
    return await _reply(chat, None, last)


async def _reply(chat: Chat, text: str | None, began: float) -> Spoken:
    first = 0.0
    async for _ in chat.say(text):
        first = first or time.perf_counter()
    kv = chat.last.kv
    if kv is None or not first:
        raise CannotMeasure("a turn came without a word or without its receipt")
    return Spoken(first - began, kv.prefilled, kv.new)


class Others:
    """Sessions that generate all the time beside the measured one, and when their tokens came."""

    def __init__(self) -> None:
        self._replies: list[list[float]] = []

    @asynccontextmanager
    async def speaking(self, client: Client, count: int, words: ToyText) -> AsyncIterator[None]:
        """Run ``count`` sessions until the end of the block, which begins when each of them has sent a token.
        ``words``: their input."""
        async with AsyncExitStack() as stack:
            chats = [await stack.enter_async_context(session(client, ENDLESS)) for _ in range(count)]
            begun = [asyncio.Event() for _ in chats]
            tasks = [
                asyncio.create_task(self._speak(chat, words, event))
                for chat, event in zip(chats, begun, strict=True)
            ]
            try:
                await asyncio.gather(*(event.wait() for event in begun))
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def gaps(self, began: float, ended: float) -> list[float]:
        """The seconds between two successive tokens of one reply, for those that came in the interval from
        ``began`` to ``ended``."""
        return [
            later - earlier
            for reply in self._replies
            for earlier, later in pairwise(reply)
            if began <= later < ended
        ]

    async def _speak(self, chat: Chat, words: ToyText, begun: asyncio.Event) -> None:
        while True:
            said: list[float] = []
            self._replies.append(said)
            async for _ in chat.say(words.take(32)):
                said.append(time.perf_counter())
                begun.set()


REPLY = 8  # tokens of a reply; only the first counts
TURN, HISTORY, HEARD = 168, 1024, 12  # tokens of a turn; before it; pieces of a reply before it is cut

Way = Callable[[Chat, str, float], Awaitable[Spoken]]
WAYS: dict[str, Way] = {"streamed": streamed, "at once": later}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measurements. ``lengths``: of inputs, in tokens. ``share``: the rate of streamed input,
    as a share of the prefill capacity. ``others``: how many sessions generate beside it. ``loads``: the offered
    loads of the sweep, as shares of the capacity; each has ``turns`` turns of ``turn`` tokens, streamed at
    ``pace`` of the capacity."""

    lengths: tuple[int, ...] = (2048, 4096)
    share: float = 0.3
    others: int = 4
    loads: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    turns: int = 16
    turn: int = 512
    pace: float = 0.15


@dataclass(slots=True)
class LengthFigures:
    """The figures of one input length: turns ``alone`` and ``beside`` other sessions, by how they were sent;
    the others' token ``gaps`` in each round, with and without the streamed input; and turns with
    ``mistakes``."""

    alone: dict[str, list[Spoken]] = field(default_factory=lambda: {way: [] for way in WAYS})
    beside: dict[str, list[Spoken]] = field(default_factory=lambda: {way: [] for way in WAYS})
    gaps: dict[str, list[list[float]]] = field(default_factory=lambda: {"with": [], "without": []})
    mistakes: list[Spoken] = field(default_factory=list)


class Listening:
    """Measures on one server with a toy model. ``client``: of the server. ``words``: text in the toy's
    language."""

    def __init__(self, client: Client, words: ToyText, sizes: Sizes) -> None:
        self._client = client
        self._words = words
        self._sizes = sizes

    async def capacity(self, rounds: int) -> float:
        """The tokens per second at which an idle server prefills prompts that are not cached: the median of
        ``rounds``."""
        length = self._sizes.lengths[0]
        await self._said("at once", length, 1e9)  # warms up
        return length / median([(await self._said("at once", length, 1e9)).ttft for _ in range(rounds)])

    async def alone(self, length: int, rate: float, heard: LengthFigures) -> None:
        """Send one input at once, one streamed, and one streamed with mistakes, and add the figures to
        ``heard``. ``length``: tokens of an input. ``rate``: tokens per second."""
        heard.alone["at once"].append(await self._said("at once", length, 1e9))
        heard.alone["streamed"].append(await self._said("streamed", length, rate))
        async with session(self._client, REPLY) as chat:
            text = self._words.take(length)
            heard.mistakes.append(await streamed(chat, text, rate, self._words))

    async def beside(self, length: int, rate: float, heard: LengthFigures) -> None:
        """Send one input streamed and one at once while other sessions generate, and add the figures to
        ``heard``. The others' token gaps are also measured for as long without the input.

        Half of that time is before and half after, because the others' history grows, and their steps with it.
        """
        others = Others()
        async with others.speaking(self._client, self._sizes.others, self._words):
            times = [time.perf_counter()]
            await asyncio.sleep(length / rate / 2)
            times.append(time.perf_counter())
            heard.beside["streamed"].append(await self._said("streamed", length, rate))
            times.append(time.perf_counter())
            await asyncio.sleep(length / rate / 2)
            before, during, after = (others.gaps(*ends) for ends in pairwise([*times, time.perf_counter()]))
            heard.gaps["with"].append(during)
            heard.gaps["without"].append(before + after)
            heard.beside["at once"].append(await self._said("at once", length, 1e9))

    async def load(self, share: float, capacity: float) -> dict[str, list[Spoken]]:
        """Take turns that begin at random times, at ``share`` of the ``capacity``, sent in each way. Returns
        their figures by way."""
        found = {}
        begins, at = [], 0.0
        for _ in range(self._sizes.turns):
            begins.append(at)
            at += self._words.random.expovariate(share * capacity / self._sizes.turn)
        for way in WAYS:
            turns = (self._begun(way, begin, self._sizes.pace * capacity) for begin in begins)
            found[way] = list(await asyncio.gather(*turns))
        return found

    async def cancelled(self, rounds: int) -> dict[str, list[float]]:
        """Seconds to the first text of a turn, by what came before: a turn that ended, one that was cancelled,
        one that was steered (`response.steer`)."""
        found: dict[str, list[float]] = {"undisturbed": [], "from the cut": [], "from the steer": []}
        for _ in range(rounds):
            for way, seconds in found.items():
                async with session(self._client, 4 * HEARD) as chat:
                    seconds.append(await self._turn_after(chat, way))
        return found

    async def _turn_after(self, chat: Chat, way: str) -> float:
        read = 0
        async for _ in (reading := chat.say(self._words.take(HISTORY))):
            read += 1
            if way != "undisturbed" and read == HEARD:
                break
        text, began = self._words.take(TURN), time.perf_counter()
        if way == "from the cut":
            await chat.cancel()
        following = chat.steer(text) if way == "from the steer" else chat.say(text)
        del reading  # the reply before is no longer read
        first = 0.0
        async for _ in following:
            first = first or time.perf_counter()
        return first - began

    async def _begun(self, way: str, begin: float, rate: float) -> Spoken:
        await asyncio.sleep(begin)
        return await self._said(way, self._sizes.turn, rate)

    async def _said(self, way: str, length: int, rate: float) -> Spoken:
        async with session(self._client, REPLY) as chat:
            return await WAYS[way](chat, self._words.take(length), rate)
