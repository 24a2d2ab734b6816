"""Part ``agent``: a loop of tool calls in a session against resending it, over a real socket, on CUDA.

Measures what ``holdfast bench agent`` does, with one history and three rounds. Server and engine are processes
of their own; they end with the part.
"""

from __future__ import annotations

from .measure import Bench, Figure, limited, note
from .wheels import missing

LIMIT_S = 240.0


def agent(bench: Bench) -> list[Figure]:
    """Measure bytes, gateway CPU and time per step, in a session against resending; and the time from a call's
    closing brace to its tool."""
    lacking = missing("engine")
    if lacking:
        return [note("agent loop", f"carry the wheels of {', '.join(lacking)}")]
    from . import loops  # a gateway comes with it

    with limited(LIMIT_S):
        return loops.figures(bench)
