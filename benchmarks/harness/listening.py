"""The measurements of the streaming benchmark on one server; each call measures one thing once.

Uses a client and `dictation`; knows no goals and no tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from holdfast.sdk import Chat, Client

from .dictation import Others, Spoken, ToyText, later, session, streamed

REPLY = 8  # tokens of a reply; only the first counts
TURN, HISTORY, HEARD = 168, 1024, 12  # tokens of a turn; before it; pieces of a reply before it is cut

Way = Callable[[Chat, str, float], Awaitable[Spoken]]
WAYS: dict[str, Way] = {"streamed": streamed, "at once": later}


@dataclass(frozen=True, slots=True)
class Sizes:
    """``lengths``: of inputs, in tokens. ``share``: of the capacity: their rate. ``others`` sessions generate
    meanwhile. ``loads``: shares of the capacity in the sweep, of ``turns`` turns of ``turn`` tokens each,
    streamed at ``pace`` of the capacity.
    """

    lengths: tuple[int, ...] = (2048, 4096)
    share: float = 0.3
    others: int = 4
    loads: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    turns: int = 16
    turn: int = 512
    pace: float = 0.15


@dataclass(slots=True)
class LengthFigures:
    """Figures of one input length: turns ``alone`` and ``beside`` others, by way of sending; others' ``gaps``
    by round, with and without streamed input; and turns with ``mistakes``.
    """

    alone: dict[str, list[Spoken]] = field(default_factory=lambda: {way: [] for way in WAYS})
    beside: dict[str, list[Spoken]] = field(default_factory=lambda: {way: [] for way in WAYS})
    gaps: dict[str, list[list[float]]] = field(default_factory=lambda: {"with": [], "without": []})
    mistakes: list[Spoken] = field(default_factory=list)


class Listening:
    """``client`` of a server with a toy; ``words`` are in the toy's language."""

    def __init__(self, client: Client, words: ToyText, sizes: Sizes) -> None:
        self._client = client
        self._words = words
        self._sizes = sizes

    async def capacity(self, rounds: int) -> float:
        """Tokens per second of prompts that are not cached, on an idle server."""
        length = self._sizes.lengths[0]
        await self._said("at once", length, 1e9)  # warms up
        return length / median([(await self._said("at once", length, 1e9)).ttft for _ in range(rounds)])

    async def alone(self, length: int, rate: float, heard: LengthFigures) -> None:
        """Send one input each way, and one with mistakes."""
        heard.alone["at once"].append(await self._said("at once", length, 1e9))
        heard.alone["streamed"].append(await self._said("streamed", length, rate))
        async with session(self._client, REPLY) as chat:
            text = self._words.take(length)
            heard.mistakes.append(await streamed(chat, text, rate, self._words))

    async def beside(self, length: int, rate: float, heard: LengthFigures) -> None:
        """The same while other sessions generate; their gaps are also measured for as long without the input.

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
        """Turns at random times, at ``share`` of the capacity, each way."""
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
        """Seconds to the first piece of a turn: after a turn that ended, after a cut, and after a steer."""
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
