"""Agent-like turns for the load bench: the pocket model's tool conversations, timed from outside, per event.

One turn is one request, and one more if the model called a tool: the agent answers after a while, and the
model goes on. Uses the SDK; knows no rates.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from math import log
from typing import Any

from holdfast.sdk import Chat, Client, SDKError
from holdfast.sdk.frames.items import FunctionCallItem, FunctionCallOutputItem, MessageItem
from holdfast.sdk.frames.server import ArgumentsDelta, TextDelta

from ..pocket.skills import ScoredConversation, ScoredTurn, conversations

MOST_TOKENS = 200
TOOL_ERROR = '{"error": "no such thing"}'
TOOL_MEDIAN, TOOL_SPREAD, TOOL_LONGEST = 0.00285, 3.0, 5.0
"""Seconds a tool takes: the coding agent's log-normal at a hundredth of the time, cut."""


@dataclass(slots=True)
class Request:
    """One response. ``began``: when it was due; ``events``: when each delta came; by ``time.monotonic()``."""

    began: float
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    failed: str | None = None


class Tools:
    """Durations of tools."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def run(self) -> None:
        """One call."""
        await asyncio.sleep(min(TOOL_LONGEST, self._rng.lognormvariate(log(TOOL_MEDIAN), TOOL_SPREAD)))


def talks(seed: int) -> Iterator[ScoredConversation]:
    """Endless conversations, the same for the same seed."""
    for block in count():
        yield from conversations("tools", 64, 1000 * seed + block)


def session(client: Client, talk: ScoredConversation) -> AbstractAsyncContextManager[Chat]:
    """A session in which the conversation can be held."""
    given: dict[str, Any] = {} if talk.instructions is None else {"instructions": talk.instructions}
    return client.session(tools=talk.tools, temperature=0, max_output_tokens=MOST_TOKENS, **given)


async def take_turn(chat: Chat, turn: ScoredTurn, tools: Tools, arrived: float) -> list[Request]:
    """Take a turn and answer its call; gives its requests, the last one with the error, if any."""
    requests = [Request(arrived)]
    try:
        await chat.add(MessageItem.of("user", turn.user))
        calls = await _respond(chat, requests[-1])
        if calls:
            await tools.run()
            requests.append(Request(time.monotonic()))
            for call in calls:
                output = turn.tool_output or TOOL_ERROR
                await chat.add(FunctionCallOutputItem(call_id=call.call_id or "", output=output))
            await _respond(chat, requests[-1])
    except SDKError as error:
        requests[-1].failed = str(error)
        requests[-1].ended = time.monotonic()
    return requests


async def _respond(chat: Chat, request: Request) -> list[FunctionCallItem]:
    async for event in chat.respond():
        if isinstance(event, TextDelta | ArgumentsDelta):
            request.events.append(time.monotonic())
    request.ended = time.monotonic()
    finished = chat.last
    request.tokens = finished.usage.output_tokens if finished.usage else 0
    return finished.calls
