"""Binds each computing thread to its own core. Linux.

A loop ends when its slowest part does. When another process runs for a moment, the kernel puts two computing
threads on one core and leaves them there for 10 to 30 ms while a core idles: measured beside a server's own
gateway on two cores, one step in twenty took three times as long. With as many threads as cores no thread is
better off elsewhere, so each is bound. Only two are: GNU's OpenMP ends the threads of a larger pool that a
loop does not need, and the ones it starts later would begin, and stay, on the core of the thread that starts
them.
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
"""Environment variables with which an operator tells OpenMP where threads run."""

POOL = 2
"""How many threads are bound; a pool of another size is left alone."""

log = logging.getLogger(__name__)
_gettid: Any = types.ExternalFunction("gettid", types.int32())


@compiled
def _named(parts: int, threads: Any) -> None:
    for part in prange(parts):
        threads[part] = _gettid()


def computing(count: int) -> list[int]:
    """The operating system's thread ids of the ``count`` threads that run the calling thread's compiled
    loops, the calling thread first."""
    threads = np.zeros(count, dtype=np.int32)
    _named(count, threads)
    return threads.tolist()


def bind() -> int:
    """Bind the calling thread, and the others that run its compiled loops, each to a core (or logical
    processor) of its own. Returns how many threads were bound; 0 if they are left alone.

    They are left alone if an operator has set one of `OPERATORS`, if they are not `POOL`, if this process may
    use more or fewer cores than that, as then it is not known which cores stay free, and if the system
    forbids it. A thread that this one starts later begins on its core (`kvstore.system_limits.roam`).
    """
    if not hasattr(os, "sched_setaffinity") or any(name in os.environ for name in OPERATORS):
        return 0
    allowed = os.sched_getaffinity(0)
    cores = cores_for(torch.get_num_threads(), allowed)
    if len(cores) != POOL:
        return 0
    threads = computing(POOL)
    if os.getpid() % POOL:  # so that the main threads of two engines are likely on two cores
        cores.reverse()
    bound: list[int] = []
    try:
        for thread, core in zip(threads, cores, strict=True):
            os.sched_setaffinity(thread, core)
            bound.append(thread)
    except OSError as error:  # a sandbox may forbid it
        log.warning("threads are not bound to cores: %s", error)
        for thread in bound:
            os.sched_setaffinity(thread, allowed)
    return len(bound) if len(bound) == POOL else 0


def _siblings(processor: int) -> set[int]:
    """The numbers of the logical processors on the same core as ``processor``; only itself if that is not
    known."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/core_cpus_list")
    try:
        return set(_listed(path.read_text()))
    except (OSError, ValueError):
        return {processor}


def cores_for(
    threads: int, allowed: Iterable[int], siblings: Callable[[int], set[int]] = _siblings
) -> list[set[int]]:
    """For each of ``threads`` threads the logical processors that it may run on, without overlap: those of
    one core, or one logical processor. Empty if the ``allowed`` processors are neither that many cores nor
    that many logical processors.

    ``siblings``: gives the logical processors of a processor's core.
    """
    processors = sorted(allowed)
    cores: dict[frozenset[int], set[int]] = {}
    for processor in processors:
        cores.setdefault(frozenset(siblings(processor)), set()).add(processor)
    if threads == len(cores):
        return list(cores.values())
    return [{processor} for processor in processors] if threads == len(processors) else []


def _listed(text: str) -> Iterable[int]:
    """The numbers of logical processors in ``text``, a list as Linux writes it in ``/sys``, such as
    ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
