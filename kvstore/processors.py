"""Where threads run that compute nothing: wherever this process may.

The engine's thread may be bound to a core of its own (`kernels.cpu.cores`), and a thread that it makes begins
there, where it would run instead of a step, not beside it. Knows no threads.
"""

from __future__ import annotations

import os
import sys

PROCESSORS = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
"""As it was when this module was loaded, which an engine does before it binds a thread."""


def roam() -> None:
    """The calling thread's first act, where another has made it: any of the processors is as good."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, PROCESSORS)
