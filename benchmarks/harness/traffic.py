"""Traffic of the load benchmark: agent-like turns, timed at the client; the serving figures; and the CPU and
memory used.

One turn is one request of the pocket model's tool conversations, and one more if the model called a tool: the
agent answers after a while, and the model goes on. When turns begin is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, field
from itertools import count, pairwise
from math import log
from statistics import mean, median
from time import monotonic
from typing import Any

from holdfast.sdk import Chat, Client, SDKError
from holdfast.sdk.frames.items import FunctionCallItem, FunctionCallOutputItem, MessageItem
from holdfast.sdk.frames.server import ArgumentsDelta, TextDelta

from ..pocket.skills import ScoredConversation, ScoredTurn, conversations
from ..report import percentile
from .servers import Server, cpu_seconds, memory_bytes

MOST_TOKENS = 200
TOOL_ERROR = '{"error": "no such thing"}'
TOOL_MEDIAN, TOOL_SPREAD, TOOL_LONGEST = 0.00285, 3.0, 5.0
"""How long a tool takes, in seconds: log-normal with this median and standard deviation of the logarithm, at
most the third number. These are a coding agent's tools, at a hundredth of their time."""


@dataclass(slots=True)
class Request:
    """One response as the client saw it. ``began``: when it was due; ``events``: when each delta came;
    ``ended``: when its end came; all by ``time.monotonic()``. ``failed``: the error's text, None if it did not
    fail."""

    began: float
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    failed: str | None = None


def talks(seed: int) -> Iterator[ScoredConversation]:
    """Conversations without end, the same ones for the same seed."""
    for block in count():
        yield from conversations("tools", 64, 1000 * seed + block)


def session(client: Client, talk: ScoredConversation) -> AbstractAsyncContextManager[Chat]:
    given: dict[str, Any] = {} if talk.instructions is None else {"instructions": talk.instructions}
    return client.session(tools=talk.tools, temperature=0, max_output_tokens=MOST_TOKENS, **given)


async def take_turn(chat: Chat, turn: ScoredTurn, rng: random.Random, arrived: float) -> list[Request]:
    """Take a turn, and answer the tool call if the model makes one. ``rng``: decides how long the tool takes.
    ``arrived``: when the turn was due. Returns the turn's requests, one or two; if it failed, the last one has
    the error."""
    requests = [Request(arrived)]
    try:
        await chat.add(MessageItem.of("user", turn.user))
        calls = await _respond(chat, requests[-1])
        if calls:
            await asyncio.sleep(min(TOOL_LONGEST, rng.lognormvariate(log(TOOL_MEDIAN), TOOL_SPREAD)))
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


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """CPU seconds of the gateway, the engine and this client so far, and the moment ``at`` which they were
    read, by ``time.monotonic()``."""

    at: float
    gateway: float
    engine: float
    client: float

    @classmethod
    def of(cls, server: Server) -> ResourceUsage:
        return cls(
            monotonic(), cpu_seconds(server.gateway), cpu_seconds(server.engine), cpu_seconds(os.getpid())
        )

    def since(self, earlier: ResourceUsage) -> ResourceUsage:
        """The usage between an ``earlier`` moment and this one; its ``at`` is the seconds between them."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return ResourceUsage(*(now - then for now, then in pairs))


@dataclass(slots=True)
class LoadPoint:
    """One measurement of the load benchmark: the offered turns per second (``rate``; None: sessions that never
    pause), and what came of it."""

    name: str
    rate: float | None
    turns: int = 0
    requests: list[Request] = field(default_factory=list)
    used: ResourceUsage = ResourceUsage(0.0, 0.0, 0.0, 0.0)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def take(self, requests: list[Request]) -> None:
        self.turns += 1
        self.requests += requests

    def close(self, used: ResourceUsage, server: Server) -> None:
        self.used = used
        self.memory = {name: memory_bytes(getattr(server, name)) for name in ("gateway", "engine")}

    def told(self) -> dict[str, Any]:
        """The figures as JSON, with the keys that serving benchmarks use. TTFT includes waiting for a free
        session."""
        done = [one for one in self.requests if one.failed is None and one.events]
        tokens = sum(one.tokens for one in done)
        events = sum(len(one.events) for one in done)
        seconds = self.used.at or float("nan")
        times = {
            "ttft": [one.events[0] - one.began for one in done],
            "tpot": [(one.ended - one.events[0]) / (one.tokens - 1) for one in done if one.tokens > 1],
            "itl": [later - earlier for one in done for earlier, later in pairwise(one.events)],
            "e2el": [one.ended - one.began for one in done],
        }
        return {
            "load": self.name,
            "offered_turns_per_second": self.rate,
            "turns": self.turns,
            "duration": seconds,
            "completed": len(done),
            "failed": [one.failed for one in self.requests if one.failed is not None],
            "total_output_tokens": tokens,
            "request_throughput": len(done) / seconds,
            "output_throughput": tokens / seconds,
            **{key: value for name, values in times.items() for key, value in _in_ms(name, values)},
            **{name: self._process(name, events) for name in ("gateway", "engine")},
            "client": {"cpu_seconds": self.used.client, "cores": self.used.client / seconds},
        }

    def _process(self, name: str, events: int) -> dict[str, float]:
        cpu: float = getattr(self.used, name)
        memory = self.memory.get(name, {})
        return {
            "cpu_seconds": cpu,
            "cores": cpu / (self.used.at or float("nan")),
            "microseconds_per_event": 1e6 * cpu / max(1, events),
            "rss_bytes": memory.get("now", 0),
            "peak_rss_bytes": memory.get("peak", 0),
        }


def _in_ms(name: str, values: Iterable[float]) -> list[tuple[str, float]]:
    ms = [1000 * value for value in values] or [float("nan")]
    return [
        (f"mean_{name}_ms", mean(ms)),
        (f"median_{name}_ms", median(ms)),
        (f"p90_{name}_ms", percentile(ms, 0.9)),
        (f"p99_{name}_ms", percentile(ms, 0.99)),
    ]
