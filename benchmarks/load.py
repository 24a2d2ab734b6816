"""``holdfast bench load``: agent-like sessions against a real server over sockets, at several rates of turns.

The pocket model, 64 sessions; many turns call a tool, which answers after a while. First the capacity is
measured, with every session always busy. Then turns arrive at random times (Poisson) at shares of it, whether
the server keeps up or not; a turn that waits for a free session counts its wait. The client runs in this
process, gateway and engine in theirs, on the same cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from holdfast.sdk import Chat, Client, connect

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.plots import Axes, Picture, draw
from .harness.servers import Server, server
from .harness.traffic import LoadPoint, Request, ResourceUsage, session, take_turn, talks
from .pocket.skills import ScoredConversation, ScoredTurn
from .report import Goal, show, table

GATEWAY_MICROSECONDS = 15.0
SHARES = (0.25, 0.5, 0.75, 1.0)
"""The rates at which turns arrive, as shares of the capacity."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The load of one run. ``sessions``: their number. ``seconds``: for how long each rate is offered.
    ``shares``: the rates, as shares of the capacity."""

    sessions: int
    seconds: float
    shares: tuple[float, ...]


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("load", __doc__, ("pocket",), rounds=1)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which each rate is offered")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the measured capacity")
    chosen = parser.parse_args(words)
    offer = Offer(chosen.sessions, chosen.seconds, tuple(chosen.shares))
    if chosen.quick:
        offer = Offer(sessions=2, seconds=1.0, shares=(0.5,))
    options = options_of(chosen)
    return run("load", lambda: measure(options, offer))


def measure(options: Options, offer: Offer) -> None:
    phases = [phase.told() for phase in asyncio.run(_phases(options, offer))]
    for phase in phases:
        if not phase["completed"]:
            raise CannotMeasure(f"at {phase['load']} no request was completed: {phase['failed'][:1]}")
    _table(phases, offer)
    print(draw(options.out / "load.png", _pictures(phases)), end="\n\n")
    micros = median(phase["gateway"]["microseconds_per_event"] for phase in phases)
    goal = Goal("gateway CPU per token event", micros, "µs", GATEWAY_MICROSECONDS, "lower")
    settings = {"model": "pocket", "threads": options.threads, "quick": options.quick, **asdict(offer)}
    show("load", options.seed, {**settings, "phases": phases}, [goal], options.out)


async def _phases(options: Options, offer: Offer) -> list[LoadPoint]:
    words = ("--device", "cpu", "--max-sequences", str(offer.sessions))
    with server("pocket", options.threads, *words) as running:
        async with connect(running.url) as client:
            load = Load(client, running, offer, options.seed)
            async with load.sessions():
                await load.closed("warm-up", offer.seconds / 4)
                capacity = await load.closed("closed loop", offer.seconds)
                phases = [capacity]
                for share in offer.shares:
                    rate = share * capacity.turns / capacity.used.at
                    phases.append(await load.open(f"{share:g} of capacity", rate))
        return phases


class Load:
    """The client's sessions on a running server, and the two ways to keep them busy: `closed` and `open`."""

    def __init__(self, client: Client, running: Server, offer: Offer, seed: int) -> None:
        self._client = client
        self._running = running
        self._offer = offer
        self._rng = random.Random(f"arrivals {seed}")
        self._tools = random.Random(f"tools {seed}")
        self._talks = talks(seed)
        self._free: asyncio.Queue[Agent] = asyncio.Queue()

    @asynccontextmanager
    async def sessions(self) -> AsyncIterator[None]:
        """Open all sessions, and keep them open until the end of the block."""
        async with AsyncExitStack() as stack:
            for _ in range(self._offer.sessions):
                agent = Agent(self._client, self._talks, self._tools)
                stack.push_async_callback(agent.leave)
                await agent.enter()
                self._free.put_nowait(agent)
            yield

    async def closed(self, name: str, seconds: float) -> LoadPoint:
        """Closed loop, for so many seconds: every session takes its next turn as soon as its last one has
        ended. ``name``: of the measurement. Returns its figures."""
        phase = LoadPoint(name, None)
        end = time.monotonic() + seconds

        async def work() -> None:
            agent = await self._free.get()
            while time.monotonic() < end:
                phase.take(await agent.turn(time.monotonic()))
            self._free.put_nowait(agent)

        async with self._measured(phase):
            await asyncio.gather(*(work() for _ in range(self._offer.sessions)))
        return phase

    async def open(self, name: str, rate: float) -> LoadPoint:
        """Open loop, for the seconds of the offer: turns arrive at ``rate`` per second, whether or not the
        server keeps up. ``name``: of the measurement. Returns its figures."""
        phase = LoadPoint(name, rate)

        async def work(arrived: float) -> None:
            agent = await self._free.get()
            phase.take(await agent.turn(arrived))
            self._free.put_nowait(agent)

        async with self._measured(phase), asyncio.TaskGroup() as group:
            arrival = time.monotonic()
            for _ in range(max(1, round(rate * self._offer.seconds))):
                arrival += self._rng.expovariate(rate)
                await asyncio.sleep(max(0.0, arrival - time.monotonic()))
                group.create_task(work(arrival))
        return phase

    @asynccontextmanager
    async def _measured(self, phase: LoadPoint) -> AsyncIterator[None]:
        before = ResourceUsage.of(self._running)
        yield
        phase.close(ResourceUsage.of(self._running).since(before), self._running)


class Agent:
    """A client that holds one conversation after another, each in a session of its own. ``waiting``: the
    conversations. ``tools``: decides how long tools take."""

    def __init__(self, client: Client, waiting: Iterator[ScoredConversation], tools: random.Random) -> None:
        self._client = client
        self._talks = waiting
        self._tools = tools
        self._stack = AsyncExitStack()
        self._chat: Chat
        self._left: Iterator[ScoredTurn]

    async def enter(self) -> None:
        talk = next(self._talks)
        self._chat = await self._stack.enter_async_context(session(self._client, talk))
        self._left = iter(talk.turns)

    async def leave(self) -> None:
        await self._stack.aclose()

    async def turn(self, arrived: float) -> list[Request]:
        """Take the next turn; after the last turn of a conversation, or a failure, the first turn of the next
        one. ``arrived``: when the turn was due. Returns its requests."""
        turn = next(self._left, None)
        if turn is None:
            await self.leave()
            await self.enter()
            turn = next(self._left)
        requests = await take_turn(self._chat, turn, self._tools, arrived)
        if requests[-1].failed is not None:
            self._left = iter(())
        return requests


def _table(phases: Sequence[dict[str, Any]], offer: Offer) -> None:
    columns = {"req/s": "request_throughput", "tok/s": "output_throughput"}
    for name in ("ttft", "itl", "e2el"):
        columns |= {name: f"median_{name}_ms", f"{name} p99": f"p99_{name}_ms"}
    rows = [
        [
            one["load"],
            *(one[key] for key in columns.values()),
            *(one[process]["cores"] for process in ("gateway", "engine", "client")),
        ]
        for one in phases
    ]
    title = f"{offer.sessions} sessions of agent-like turns; ms, median and p99; cores used"
    table(title, ["load", *columns, "gateway", "engine", "client"], rows)


def _pictures(phases: Sequence[dict[str, Any]]) -> list[Picture]:
    swept = [one for one in phases if one["offered_turns_per_second"] is not None]
    rates = [one["offered_turns_per_second"] for one in swept]
    return [
        (
            Axes(title, "turns per second offered", "ms", log=True),
            {which: (rates, [one[f"{which}_{key}_ms"] for one in swept]) for which in ("median", "p99")},
        )
        for key, title in (("ttft", "TTFT from arrival"), ("itl", "gap between tokens"))
    ]
