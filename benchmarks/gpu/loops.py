"""The measurements of part ``agent``: loops of tool calls by `benchmarks.agent`, on one server."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from .. import agent
from ..harness.callers import Caller
from ..harness.options import Options
from .measure import Bench, Figure, figure

THREADS = 2
WARMING = 1000
"""The seed of loops that are run first and not measured, because kernels are compiled in the first steps of a
shape."""


def figures(bench: Bench) -> list[Figure]:
    """Measure loops with a tool that answers at once, and with one that streams its output; and the time from a
    call's closing brace to its tool."""
    model = "tiny" if bench.rehearsal else "toy-50m"
    options = Options(
        (model,), bench.size(3, 1), 0, "bfloat16", THREADS, Path(), Path(), quick=bench.rehearsal
    )
    device, history, steps = str(bench.device), bench.size(4096, 64), bench.size(agent.STEPS, 3)
    streamed = agent.Streamed(agent.TOOL_SECONDS, bench.size(agent.STREAMED_TOKENS, 32))
    with tempfile.TemporaryDirectory() as folder:
        caller = Caller.make(model, Path(folder), options.seed, options.dtype)
        with agent.serving_loops(caller, options, device) as running:
            agent.alternating(running, caller, replace(options, rounds=1, seed=WARMING), history, 3)
            plain = agent.alternating(running, caller, options, history, steps)
            slow = agent.alternating(running, caller, options, history, steps, streamed)
        dispatch = asyncio.run(agent.dispatched(caller, options, device, history, steps))
    found, name = agent.shares(plain), f"{steps} calls on {history}"
    return [
        figure(f"{name}: less bytes than resent", 1 - found.bytes, "x", agent.LESS_BYTES),
        figure(f"{name}: less gateway CPU", 1 - found.gateway_cpu, "x", agent.LESS_CPU),
        *_steps(name, plain),
        *_steps(f"{name}, streamed", slow),
        figure("closing brace to tool", median(dispatch), "ms", agent.DISPATCH_MS, "lower"),
    ]


def _steps(name: str, loops: dict[str, list[agent.Loop]]) -> list[Figure]:
    """Figures of the time of a step: as a share, session ÷ resending, and for both in ms, with the part in
    which the engine computed."""
    lines = [
        figure(f"{name}: {agent.STEP_TIME}", agent.shares(loops).step_time, "x", agent.STEP_SHARE, "lower")
    ]
    for way, ones in loops.items():
        lines.append(figure(f"{name}: a step, {way}", median(one.step_ms for one in ones), "ms"))
        computing = median(one.part(*agent.COMPUTE) for one in ones)
        lines.append(figure(f"{name}: computing, {way}", computing, "ms"))
    return lines
