"""Part ``agent``: a loop of tool calls in a session against sent again, on CUDA, over a real socket.

The same as ``holdfast bench agent`` (`benchmarks.agent`), at one history and in three rounds.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..harness.options import Options
from .measure import Bench, Figure, note

HISTORY, STEPS, ROUNDS = 4096, 25, 3
THREADS = 2


def agent(bench: Bench) -> list[Figure]:
    """Bytes, CPU of the gateway and time per step, session ÷ resent; from a closing brace to its tool."""
    try:
        from .. import agent as loop
    except ImportError as missing:
        return [note("agent loop", f"{missing}: carry the wheels that a gateway needs")]
    os.environ["PYTHONPATH"] = bench.package  # the server is a process of its own, and so is its engine
    options = Options(("toy-50m",), ROUNDS, 0, "bfloat16", THREADS, Path(), Path(), quick=False)
    streamed = loop.Streamed(loop.TOOL_SECONDS, loop.STREAMED_TOKENS)
    _, goals = loop.measured(options, str(bench.device), (HISTORY,), STEPS, streamed)
    return [goal.told() for goal in goals]
