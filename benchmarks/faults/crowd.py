"""Clients that talk while something breaks: the expected text, the received text, and the longest silence.

They use the SDK. What breaks is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.sdk import Chat, Client, SDKError

WEDGED_SECONDS = 300.0
"""If nothing comes for so many seconds, a reply counts as lost, on a machine of any speed."""
STORY = "Tell me the story of the fox."
FACTS = "My name is Marisol, and my locker code is 4821. I like walks by the sea, old books and rain."
LETTERS, LETTERS_SECONDS = 5, 0.01
"""How streamed input is typed: so many characters (``LETTERS``) at once, and then a pause of
``LETTERS_SECONDS``."""


@dataclass(frozen=True)
class Talk:
    """What one client says in one session. ``lines``: the user's text of each turn. ``fields``: the session's
    settings, such as how replies are sampled. ``typed``: the input is streamed as if typed."""

    lines: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    typed: bool = False


TALKS = (
    Talk(("My name is Marisol.", STORY, "What is my name?")),
    Talk((STORY, "What is my locker code?"), {"temperature": 1, "seed": 11, "max_output_tokens": 90}),
    Talk(("My locker code is 4821.", STORY, "What is my locker code?")),
    Talk((STORY, "Why?"), {"temperature": 0.8, "seed": 5, "max_output_tokens": 120}),
    Talk((f"{FACTS} {STORY}", f"{FACTS} Why?", "What is my name?"), {"max_output_tokens": 60}, typed=True),
    Talk((FACTS, STORY), {"temperature": 0.8, "seed": 7, "max_output_tokens": 90}, typed=True),
)
"""Talks with greedy and with seeded replies, and with something to remember. Not hotter: if hundreds of tokens
are about as likely, a draw can fall between two of them by the rounding of logits that were computed again."""


@dataclass
class FaultTally:
    """What came of one kind of fault: how often it was caused, and how many replies were expected, lost or
    wrong. ``gap``: the longest silence within a reply, in seconds."""

    fault: str
    tries: int = 0
    replies: int = 0
    lost: int = 0
    wrong: int = 0
    gap: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass
class HeardReply:
    """One reply as it was received. ``error``: the code of the error that ended it; None if it ended well.
    ``gap``: the longest silence in it, in seconds."""

    text: str = ""
    error: str | None = None
    gap: float = 0.0


@asynccontextmanager
async def begun(client: Client, fields: dict[str, Any]) -> AsyncIterator[Chat]:
    """Open a session with these settings, for the block. If the connection is cut before the client has a
    handle, tries again."""
    deadline = time.monotonic() + WEDGED_SECONDS
    while True:
        context = client.session(**fields)
        try:
            chat = await context.__aenter__()
            break
        except SDKError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)
    try:
        yield chat
    finally:
        await context.__aexit__(None, None, None)


async def listen(client: Client, talk: Talk, stirs: Callable[[], None] = lambda: None) -> list[HeardReply]:
    """Hold a whole talk in a session of its own; it ends at the first reply that fails. ``stirs`` is called for
    each piece of text. Returns the replies."""
    heard: list[HeardReply] = []
    try:
        async with begun(client, talk.fields) as chat:
            for line in talk.lines:
                heard.append(HeardReply())
                last = time.monotonic()
                if talk.typed:
                    await _type(chat, line)
                async for piece in chat.say(None if talk.typed else line):
                    heard[-1].text += piece
                    heard[-1].gap = max(heard[-1].gap, time.monotonic() - last)
                    last = time.monotonic()
                    stirs()
    except SDKError as error:
        (heard or [HeardReply()])[-1].error = error.code
    return heard


async def _type(chat: Chat, line: str) -> None:
    async with chat.input() as text:
        for at in range(0, len(line), LETTERS):
            await text.append(line[at : at + LETTERS])
            await asyncio.sleep(LETTERS_SECONDS)


class Crowd:
    """Clients that hold the ``talks``, all at once, and what each of them is answered by an undisturbed server.
    ``stirred`` is set by each piece of text that comes. ``seconds``: how long all talks take on an undisturbed
    server, all at once."""

    def __init__(self, client: Client, talks: Iterable[Talk] = TALKS) -> None:
        self._client = client
        self.talks = tuple(talks)
        self._expected: dict[int, list[str]] = {}
        self.seconds = 0.0
        self.stirred = asyncio.Event()

    def join(self, client: Client) -> None:
        """Use ``client`` for all talks from now on."""
        self._client = client

    async def rehearse(self) -> None:
        """Hold all talks undisturbed, first one by one, which gives the expected text, then all at once, which
        measures how long that takes."""
        for number, talk in enumerate(self.talks):
            heard = await listen(self._client, talk)
            if any(reply.error for reply in heard):
                raise RuntimeError(f"an undisturbed server failed: {heard}")
            self._expected[number] = [reply.text for reply in heard]
        began = time.monotonic()
        await asyncio.gather(*(listen(self._client, talk) for talk in self.talks))
        self.seconds = time.monotonic() - began

    async def talk(self, tally: FaultTally) -> None:
        """Hold all talks at once, compare each with its expected text, and count the result in ``tally``."""
        heard = await asyncio.gather(*(listen(self._client, talk, self.stirred.set) for talk in self.talks))
        for number, replies in enumerate(heard):
            expected = self._expected[number]
            tally.replies += len(expected)
            tally.lost += len(expected) - sum(reply.error is None for reply in replies)
            for reply, text in zip(replies, expected, strict=False):
                tally.gap = max(tally.gap, reply.gap)
                if reply.error is not None:
                    tally.notes.append(f"{reply.error} after {len(reply.text)} characters")
                elif reply.text != text:
                    tally.wrong += 1
                    tally.notes.append(f"said {reply.text!r}, not {text!r}")
