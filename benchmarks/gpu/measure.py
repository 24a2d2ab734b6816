"""How parts measure: timing of kernels, the form of a figure, and a time limit.

Device time comes from events around the replay of one CUDA graph with many launches, each on its own inputs:
data has left the L2 cache before it is read again, and no launch waits for the host.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Figure = dict[str, Any]
Work = Callable[[], object]
RUNS = 20


@dataclass(frozen=True, slots=True)
class Bench:
    """Where parts run: on a GPU at full size, or in a rehearsal at toy sizes, of which the figures mean
    nothing. ``tell``: takes figures that a part has before it ends, so that they are kept if the part fails."""

    device: torch.device
    rehearsal: bool
    tell: Callable[[list[Figure]], None] = lambda lines: None

    def size(self, full: int, toy: int) -> int:
        return toy if self.rehearsal else full


def figure(name: str, value: float, unit: str, goal: float | None = None, better: str = "higher") -> Figure:
    """A line of the table: a value with its unit and, if there is a goal, whether it is met."""
    met = None if goal is None else (value >= goal if better == "higher" else value <= goal)
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "better": better, "met": met}


def note(name: str, text: str) -> Figure:
    """A line of the table without a value: the reason why something could not be measured."""
    return {"name": name, "value": None, "unit": "", "goal": None, "better": "", "met": None, "note": text}


def reason(error: BaseException) -> str:
    """An exception's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def median_us(bench: Bench, works: Sequence[Work], runs: int = RUNS, *, captured: bool = True) -> float:
    """The median microseconds of one of the ``works``, which differ only in their inputs. ``captured``: they
    are run as one CUDA graph, which is not possible for work that makes the host wait. On a CPU one of them is
    timed once."""
    _each(works)
    if bench.device.type != "cuda":
        start = time.perf_counter()
        works[0]()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    replay = _graph(works) if captured else partial(_each, works)
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(works))
    return float(sorted(times)[runs // 2])


def _graph(works: Sequence[Work]) -> Work:
    """A function that runs all ``works`` as one CUDA graph, or one by one if something cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            _each(works)
    except RuntimeError as error:
        print(f"not captured, timed eagerly: {reason(error)}", flush=True)
        torch.cuda.set_stream(stream)  # a capture that cannot be ended does not leave its own
        torch.cuda.synchronize()
        return partial(_each, works)
    return graph.replay


def _each(works: Sequence[Work]) -> None:
    for work in works:
        work()


@functools.cache
def copy_rate(bench: Bench) -> float:
    """The rate of a copy on the device in bytes per microsecond, read and written bytes counted: the upper
    limit of kernels bound by memory."""
    size = bench.size(1 << 30, 1 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / median_us(bench, [lambda: target.copy_(source)])


def of_copy_rate(
    bench: Bench, name: str, moved: int, micros: float, goal: float | None = None
) -> list[Figure]:
    """Two lines about a kernel that is bound by memory: its time, and the share of the measured copy rate that
    it reaches. ``moved``: the bytes that it reads and writes."""
    share = 100 * moved / micros / copy_rate(bench)
    return [figure(f"{name}, time", micros, "us"), figure(f"{name}, of the copy rate", share, "%", goal)]


def compared(name: str, ours: float, theirs: dict[str, float | str], goals: dict[str, float]) -> list[Figure]:
    """Lines with other libraries' times (``theirs``, by name, in microseconds or as the reason for having none)
    and how many times faster ours is. ``goals``: for these ratios, by name."""
    lines: list[Figure] = []
    for peer, micros in theirs.items():
        if isinstance(micros, str):
            lines.append(note(f"{name}, {peer}", micros))
        else:
            lines.append(figure(f"{name}, {peer}", micros, "us"))
            lines.append(figure(f"{name}, ours against {peer}", micros / ours, "x", goals.get(peer)))
    return lines


class _OutOfTime(KeyboardInterrupt):
    """Ends the block of `limited`. It is no ``Exception``, so that no task or callback of an event loop
    swallows it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Leave the block after so many seconds, with its clean-up. It cannot stop a library call that does not
    return. Only for the main thread. Raises ``TimeoutError``."""

    def strike(number: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, strike)
    set_before = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"not done within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *set_before)
