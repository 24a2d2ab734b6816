"""Each computing thread on a core of its own.

A loop is done when its slowest part is. Whenever another process runs for a moment, the kernel puts two
computing threads on one core, and leaves them there for 10 to 30 ms while a core idles: measured beside a
server's own gateway, on two cores, one step in twenty took three times as long. Where there are as many threads
as cores none is better off elsewhere, so each stays. Two of them, no more: of a larger pool GNU's OpenMP ends
the threads that a loop does not need, and those that it makes for the next would begin, and stay, on the core
of the one that makes them. Knows threads and processors, not what is computed. Linux.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import prange, types

from .compiling import compiled

OPERATORS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Variables by which OpenMP is told where threads run: who sets one has decided."""

POOL = 2
"""Threads that are bound."""

log = logging.getLogger(__name__)
_gettid: Any = types.ExternalFunction("gettid", types.int32())


def _name(parts: int, threads: Any) -> None:
    for part in prange(parts):
        threads[part] = _gettid()


_named = compiled(_name, parallel=True)


def computing(count: int) -> list[int]:
    """The system's numbers of ``count`` threads that compute for this one, itself the first."""
    threads = np.zeros(count, dtype=np.int32)
    _named(count, threads)
    return threads.tolist()


def bind() -> int:
    """Bind the threads that compute for this one, itself among them; how many, 0 where they are left alone.

    They are where an operator has said so (`OPERATORS`), where there are not `POOL` of them, and where cores
    are more or fewer: nobody knows then which ones others leave free. A thread that this one makes later begins
    on its core (`kvstore.system_limits.roam`).
    """
    if not hasattr(os, "sched_setaffinity") or any(name in os.environ for name in OPERATORS):
        return 0
    allowed = os.sched_getaffinity(0)
    places = places_for(torch.get_num_threads(), allowed)
    if len(places) != POOL:
        return 0
    threads = computing(POOL)
    if os.getpid() % POOL:  # of two engines the threads that do more than compute are not on one core
        places.reverse()
    bound: list[int] = []
    try:
        for thread, place in zip(threads, places, strict=True):
            os.sched_setaffinity(thread, place)
            bound.append(thread)
    except OSError as error:  # a sandbox may forbid it
        log.warning("threads are not bound to cores: %s", error)
        for thread in bound:
            os.sched_setaffinity(thread, allowed)
    return len(bound) if len(bound) == POOL else 0


def _siblings(processor: int) -> set[int]:
    """The logical processors of its core; itself alone where nobody says."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/core_cpus_list")
    try:
        return set(_listed(path.read_text()))
    except (OSError, ValueError):
        return {processor}


def places_for(
    threads: int, allowed: Iterable[int], siblings: Callable[[int], set[int]] = _siblings
) -> list[set[int]]:
    """For each thread the logical processors it may run on, no two in common: one core, or one of them where
    there are as many threads as those. Empty where there is no such division of the ``allowed`` ones.
    """
    processors = sorted(allowed)
    cores: dict[frozenset[int], set[int]] = {}
    for processor in processors:
        cores.setdefault(frozenset(siblings(processor)), set()).add(processor)
    if threads == len(cores):
        return list(cores.values())
    return [{processor} for processor in processors] if threads == len(processors) else []


def _listed(text: str) -> Iterable[int]:
    """Numbers as the kernel lists them: ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
