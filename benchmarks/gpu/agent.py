"""Part ``agent``: a loop of tool calls in a session against sent again, over a real socket, on CUDA.

What ``holdfast bench agent`` measures, after one history and in three rounds. The server is a process of its
own, and so is its engine; whatever happens to the part, they end with it.
"""

from __future__ import annotations

from .limits import limited
from .measure import Bench, Figure, note
from .wheels import missing

LIMIT_S = 240.0


def agent(bench: Bench) -> list[Figure]:
    """Bytes, CPU of the gateway and time per step, session against resent; from a closing brace to its tool."""
    lacking = missing("engine")
    if lacking:
        return [note("agent loop", f"carry the wheels of {', '.join(lacking)}")]
    from . import loops  # a gateway comes with it

    with limited(LIMIT_S):
        return loops.figures(bench)
