"""``holdfast bench agent``: a loop of 25 tool calls in a session, against a client that resends all of it.

Every reply of the toy model is one call that a grammar forces (`harness/callers.py`); its history begins with
4,096 or 16,384 tokens. Two loops alternate on one server: `chat.run`, which sends only tool outputs, and a
stateless client (`response.create{conversation: "none", input: [all]}`). Steps after the first are compared:
both loops find all but the new tokens in the cache. The engine reports how long it computed and was idle; the
rest of a step belongs to the other processes. Then the same with a tool that streams `--streamed-tokens` over
`--tool-seconds`. Last, the time from the sampled closing brace of a call until the client starts its tool.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from holdfast.gateway.server import serving
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.settings import EngineSettings
from holdfast.sdk import CallStarted, Chat, Client, RunEvent, RunLimits, StepFinished, Tool
from holdfast.sdk.connection.responses import Finished
from holdfast.sdk.connection.transport import WebSocketTransport, dial
from holdfast.sdk.frames.items import AnyItem, FunctionCallOutputItem, MessageItem

from .harness.callers import Caller
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import ratio
from .harness.servers import Server, engine_statistics, run_seconds, server
from .harness.stamped_child import program
from .report import Goal, show, summary, table

HISTORIES, STEPS = (4096, 16384), 25
TOOL_SECONDS, STREAMED_TOKENS = 0.285, 256
"""The duration of the median tool of the coding workload, and about a third of the tokens that a tool answers
there."""
WAYS = ("session", "resent")
STEP_TIME = "time per step ÷ resent"
LESS_BYTES, LESS_CPU, STEP_SHARE, DISPATCH_MS = 0.9, 0.8, 0.7, 5.0
"""The goals: the share of bytes and of gateway CPU that is saved, the ratio of times per step, milliseconds to
a tool."""
COMPUTE, BETWEEN = ("t_launch", "t_device"), ("t_gap",)
ENGINE = (*COMPUTE, *BETWEEN, "steps")
"""The names of the engine's statistics of its steps: seconds by part, and their number."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tool output of so many ``tokens`` that is produced over ``seconds``."""

    seconds: float
    tokens: int


@dataclass(slots=True)
class Loop:
    """What one loop cost, without its first step. ``step_seconds``: of each step. ``wire_bytes``: both ways;
    ``sent_bytes``: to the server. ``engine``: how much the engine's statistics grew. ``prompts``: tokens of
    each prompt."""

    step_seconds: list[float] = field(default_factory=list)
    wire_bytes: int = 0
    sent_bytes: int = 0
    gateway_seconds: float = 0.0
    engine: dict[str, float] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.step_seconds)

    @property
    def step_ms(self) -> float:
        return 1000 * sum(self.step_seconds) / self.steps

    def part(self, *names: str) -> float:
        """Milliseconds per step of the parts that the engine reports under these names."""
        return 1000 * sum(self.engine[name] for name in names) / self.steps


class Counted:
    """A transport that counts the bytes that it carries, both ways."""

    def __init__(self, inner: WebSocketTransport) -> None:
        self._inner = inner
        self.bytes = self.sent = 0

    async def send(self, frame: bytes) -> None:
        self.bytes += len(frame)
        self.sent += len(frame)
        await self._inner.send(frame)

    async def receive(self) -> bytes:
        frame = await self._inner.receive()
        self.bytes += len(frame)
        return frame

    async def aclose(self) -> None:
        await self._inner.aclose()


def main(words_given: Sequence[str] | None = None) -> int:
    parser = parser_of("agent", __doc__, ("toy-50m",), rounds=5)
    parser.add_argument(
        "--history", type=int, nargs="+", default=HISTORIES, help="tokens before the first step"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of each loop")
    parser.add_argument(
        "--tool-seconds", type=float, default=TOOL_SECONDS, help="that a tool takes which streams"
    )
    parser.add_argument("--streamed-tokens", type=int, default=STREAMED_TOKENS, help="that it answers")
    parser.add_argument("--device", default="cpu", help="that the engine computes on")
    chosen = parser.parse_args(words_given)
    options = options_of(chosen)
    histories, steps = ((64,), 4) if options.quick else (tuple(chosen.history), chosen.steps)
    streamed = Streamed(chosen.tool_seconds, chosen.streamed_tokens)
    return run("agent", lambda: measure(options, chosen.device, histories, steps, streamed))


def measure(options: Options, device: str, histories: Sequence[int], steps: int, streamed: Streamed) -> None:
    on: dict[str, Any] = {}
    goals: list[Goal] = []
    for name, figures, found in measured(options, device, histories, steps, streamed):
        if WAYS[0] in figures:
            _print(name, figures)
        on[name] = figures
        goals += found
    told = {**options.told(), "device": device, "steps": steps, "on": on}
    show("agent", options.seed, told, goals, options.out)


def measured(
    options: Options, device: str, histories: Sequence[int], steps: int, streamed: Streamed
) -> Iterator[tuple[str, dict[str, Any], list[Goal]]]:
    """Run all measurements, and yield each result: its name (model and history; only the model for the times to
    a tool), its figures, its goals."""
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            caller = Caller.make(model, Path(folder), options.seed, options.dtype)
            for history in histories:
                with serving_loops(caller, options, device) as running:
                    loops = alternating(running, caller, options, history, steps)
                yield _found(f"{model}, {history}", loops)
            for history in histories:
                with serving_loops(caller, options, device) as running:
                    loops = alternating(running, caller, options, history, steps, streamed)
                name = f"{model}, {history}, {streamed.tokens} tokens stream for {streamed.seconds:g} s"
                _, figures, goals = _found(name, loops)
                yield name, figures, [goal for goal in goals if goal.name.endswith(STEP_TIME)]
            dispatch = asyncio.run(dispatched(caller, options, device, min(histories), steps))
        goal = Goal(f"{model}: closing brace to tool, median", median(dispatch), "ms", DISPATCH_MS, "lower")
        yield model, {"dispatch_ms": summary(dispatch)}, [goal]


# --- a session, and all of it again ---------------------------------------------------------------------------


def serving_loops(caller: Caller, options: Options, device: str) -> AbstractContextManager[Server]:
    words = ("--device", device, "--dtype", options.dtype, "--no-store")
    return server(str(caller.folder), options.threads, *words)


def alternating(
    running: Server,
    caller: Caller,
    options: Options,
    history: int,
    steps: int,
    streamed: Streamed | None = None,
) -> dict[str, list[Loop]]:
    """Run one loop in each of the `WAYS` in every round, in alternating order. ``history``: tokens before the
    first step. ``streamed``: how the tool streams its output; None: it answers at once. Returns the loops by
    way."""
    found: dict[str, list[Loop]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            told = caller.words(history, options.seed + 2 * number + WAYS.index(way))
            tool = caller.tool(0) if streamed is None else caller.tool(0, *astuple(streamed))
            found[way].append(asyncio.run(_loop(running, way, caller, told, steps, tool)))
    return found


async def _loop(running: Server, way: str, caller: Caller, told: str, steps: int, tool: Tool) -> Loop:
    async with _session(running.url, caller, tool) as (chat, counted):
        loop = Loop()
        meter = _Meter(loop, counted, running)
        if way == "session":
            limits = RunLimits(steps=steps, calls=None)
            await chat.run(told, limits=limits, trace=[meter.told], hint_seconds=None).done()
        else:
            await _resend(chat, told, steps, tool, meter)
        meter.over()
        return loop


async def _resend(chat: Chat, told: str, steps: int, tool: Tool, meter: _Meter) -> None:
    """Run the loop as a client that keeps the history itself and sends all of it with each request."""
    items: list[AnyItem] = [MessageItem.of("user", told)]
    for _ in range(steps):
        async for _event in chat.respond(conversation="none", input=items):
            pass
        meter.finished(chat.last)
        for call in chat.last.calls:
            outcome = await tool.call(call.arguments)
            plain = msgspec.structs.replace(
                call, id=None, object=None, status=None
            )  # as a client sends it back
            items += [plain, FunctionCallOutputItem(call_id=call.call_id or "", output=outcome.output)]


class _Meter:
    """Reads bytes, CPU and time at the end of each response of a loop, and adds them to ``loop``."""

    def __init__(self, loop: Loop, counted: Counted, running: Server) -> None:
        self._loop = loop
        self._counted = counted
        self._running = running
        self._first: tuple[int, int, float] | None = None
        self._engine: dict[str, float] = {}
        self._before = 0.0

    def told(self, event: RunEvent) -> None:
        if isinstance(event, StepFinished):
            self.finished(event.finished)

    def finished(self, finished: Finished) -> None:
        if not finished.calls or finished.usage is None or finished.kv is None:
            raise CannotMeasure(f"a reply is no call but {finished.text!r}, {finished.status}")
        if self._first is None:
            self._engine = engine_statistics(self._running.url)
        now, spent = time.perf_counter(), run_seconds(self._running.gateway)
        carried, sent = self._counted.bytes, self._counted.sent
        loop = self._loop
        loop.prompts.append(finished.usage.input_tokens)
        if self._first is None:
            self._first = (carried, sent, spent)
        else:
            loop.step_seconds.append(now - self._before)
            loop.wire_bytes, loop.sent_bytes = carried - self._first[0], sent - self._first[1]
            loop.gateway_seconds = spent - self._first[2]
        self._before = time.perf_counter()

    def over(self) -> None:
        """The loop has ended: add to it what the engine has done since the first response."""
        now = engine_statistics(self._running.url)
        self._loop.engine = {name: now[name] - self._engine[name] for name in ENGINE}


@asynccontextmanager
async def _session(url: str, caller: Caller, tool: Tool) -> AsyncIterator[tuple[Chat, Counted]]:
    made: list[Counted] = []

    async def counting(wanted: str | None) -> Counted:
        made.append(Counted(await dial(url, wanted)))
        return made[-1]

    async with Client(counting).session(tools=[tool], **caller.forced()) as chat:
        yield chat, made[0]


# --- from the brace to the tool -------------------------------------------------------------------------------


async def dispatched(caller: Caller, options: Options, device: str, history: int, steps: int) -> list[float]:
    """For each call of some loops, the milliseconds from sampling its closing brace to the start of its
    tool."""
    stamps, begun = caller.folder / "stamps", list[int]()

    def trace(event: RunEvent) -> None:
        if isinstance(event, CallStarted):
            begun.append(time.monotonic_ns())

    settings = EngineSettings(model=str(caller.folder), device=device, dtype=options.dtype)
    engine = ChildEngine(settings, program=program(caller.closing, stamps))
    async with serving(GatewaySettings(port=0), settings, engine=engine) as running:
        for number in range(options.rounds):
            async with _session(running.url, caller, caller.tool(0)) as (chat, _):
                told = caller.words(history // 4, options.seed + number)
                await chat.run(told, limits=RunLimits(steps=steps, calls=None), trace=[trace]).done()
    sampled = [int(line) for line in stamps.read_text().split()]
    ran = [stamp for at, stamp in enumerate(sampled) if (at + 1) % steps]  # the last step's call is not run
    if len(ran) != len(begun):
        raise CannotMeasure(f"{len(begun)} calls were begun, {len(ran)} sampled")
    return [(one - other) / 1e6 for one, other in zip(begun, ran, strict=True)]


# --- figures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionShares:
    """What a session costs, divided by what resending costs: the median of the rounds' ratios, each."""

    bytes: float
    gateway_cpu: float
    step_time: float


def shares(loops: dict[str, list[Loop]]) -> SessionShares:
    """The shares from alternating loops. Raises ``CannotMeasure`` if the prompts of the two ways had different
    lengths."""
    ours, theirs = (loops[way] for way in WAYS)
    if [loop.prompts for loop in ours] != [loop.prompts for loop in theirs]:
        raise CannotMeasure("the two ways have not put the same number of tokens before the model")
    return SessionShares(
        ratio([loop.wire_bytes for loop in ours], [loop.wire_bytes for loop in theirs]),
        ratio([loop.gateway_seconds for loop in ours], [loop.gateway_seconds for loop in theirs]),
        ratio([sum(loop.step_seconds) for loop in ours], [sum(loop.step_seconds) for loop in theirs]),
    )


def _found(name: str, loops: dict[str, list[Loop]]) -> tuple[str, dict[str, Any], list[Goal]]:
    found = shares(loops)
    told: dict[str, Any] = {way: _of_way(ones) for way, ones in loops.items()}
    goals = [
        Goal(f"{name}: less bytes", 1 - found.bytes, "x", LESS_BYTES, "higher"),
        Goal(f"{name}: less gateway CPU", 1 - found.gateway_cpu, "x", LESS_CPU, "higher"),
        Goal(f"{name}: {STEP_TIME}", found.step_time, "x", STEP_SHARE, "lower"),
    ]
    return name, {**told, "prompts": loops[WAYS[0]][0].prompts, "ratio": asdict(found)}, goals


def _print(name: str, figures: dict[str, Any]) -> None:
    heads = ["", "kB on the wire", "of these sent", "gateway CPU ms", "ms"]
    columns = [*heads, "engine steps", "computing", "between", "rest"]
    rows = [[way, *(one["median"] for one in figures[way].values())] for way in WAYS]
    table(f"{name}, per step", columns, rows)


def _of_way(loops: list[Loop]) -> dict[str, Any]:
    return {
        "kilobytes": summary(loop.wire_bytes / loop.steps / 1000 for loop in loops),
        "kilobytes_sent": summary(loop.sent_bytes / loop.steps / 1000 for loop in loops),
        "gateway_ms": summary(1000 * loop.gateway_seconds / loop.steps for loop in loops),
        "step_ms": summary(loop.step_ms for loop in loops),
        "engine_steps": summary(loop.engine["steps"] / loop.steps for loop in loops),
        "computing_ms": summary(loop.part(*COMPUTE) for loop in loops),
        "between_ms": summary(loop.part(*BETWEEN) for loop in loops),
        "rest_ms": summary(loop.step_ms - loop.part(*COMPUTE, *BETWEEN) for loop in loops),
    }
