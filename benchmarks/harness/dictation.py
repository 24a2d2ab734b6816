"""Streamed input: text in the toys' language at so many tokens per second, or sent at once.

Times the replies, and the token gaps of other sessions meanwhile. Uses the SDK; knows no loads or goals.
Times in seconds, by ``time.perf_counter()``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from holdfast.sdk import Chat, Client

from ..toys import text_of
from .options import CannotMeasure

PERIOD = 0.1  # between two pieces
RETRACTED = 0.1  # of all pieces: their last tokens, one to three, are taken back
ENDLESS = 1 << 12  # tokens of another session's reply


@dataclass(frozen=True, slots=True)
class Spoken:
    """``ttft``: from the last byte of the input to the first piece of the reply. ``prefilled`` tokens were
    computed for it, ``new`` were truly new.
    """

    ttft: float
    prefilled: int
    new: int


class ToyText:
    """Endless text of seeded random tokens; ``vocabulary``: the toy's."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.random = Random(seed)
        self._vocabulary = vocabulary

    def take(self, tokens: int) -> str:
        """The next ``tokens`` tokens."""
        return text_of(self.random.randrange(2, self._vocabulary) for _ in range(tokens))


def session(client: Client, out: int) -> AbstractAsyncContextManager[Chat]:
    """A session with replies of ``out`` tokens."""
    return client.session(temperature=0, max_output_tokens=out)


async def at_once(chat: Chat, text: str) -> Spoken:
    """Take a turn with the text sent at once."""
    return await _reply(chat, text, time.perf_counter())


async def later(chat: Chat, text: str, rate: float) -> Spoken:
    """The same by a client that waits for the end of the input before it sends."""
    await asyncio.sleep(len(text) / rate)
    return await at_once(chat, text)


async def streamed(chat: Chat, text: str, rate: float, mistakes: ToyText | None = None) -> Spoken:
    """Take a turn with the text streamed at ``rate`` tokens per second; ``mistakes`` are sent and replaced."""
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
    """Sessions that generate all the time."""

    def __init__(self) -> None:
        self._replies: list[list[float]] = []

    @asynccontextmanager
    async def speaking(self, client: Client, count: int, words: ToyText) -> AsyncIterator[None]:
        """Run so many sessions until the end of the block, which begins when each has sent a token."""
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
        """Gaps between two tokens of one reply, if the later one came in this interval."""
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
