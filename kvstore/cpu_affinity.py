"""Where threads run that compute nothing: wherever this process may, but not on a core that is one thread's.

The engine's thread may be bound to a core of its own (`kernels.cpu.cores`), and a thread that it makes begins
there, where it would run instead of a step, not beside it. Linux; elsewhere nothing is bound.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def roam() -> None:
    """The first act of a thread that another has made: run wherever any thread of this process may, but not
    where the one that made it is bound to.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox forbids it, or a thread has just ended
        threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
        allowed = set().union(*map(os.sched_getaffinity, threads))
        os.sched_setaffinity(0, allowed - os.sched_getaffinity(0) or allowed)
