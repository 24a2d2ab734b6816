"""Counts what code does, so that a test can say that it does no more beside twelve times as much.

Counted are lines that run in the rooms' files, loops in one line included, and items that `sorted`, `sum`,
`min`, `max`, `any` and `all` go through on their own; and bytes of memory that are taken meanwhile, which shows
copies that C makes. Neither depends on the machine.
"""

from __future__ import annotations

import builtins
import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("kvstore", "runtime", "sessions", "gateway"))
WALKS = ("sorted", "sum", "min", "max", "any", "all")
TIMES = 5
FACTOR, LINES, BYTES = 1.2, 60, 8192


@dataclass(frozen=True)
class Operations:
    """``lines``: run, and items walked; ``bytes``: taken."""

    lines: float
    bytes: float

    def within(self, few: Operations) -> bool:
        """Whether it is no more than what was done beside a few things, but for what caches and memory that
        grows in leaps make of it."""
        return self.lines <= FACTOR * few.lines + LINES and self.bytes <= FACTOR * few.bytes + BYTES


class Lines:
    """Counts lines. ``begin`` and ``end``: in each thread that is to be counted, or in all that begin after
    `everywhere`."""

    def __init__(self) -> None:
        self.count = 0
        self._on = False

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Count in the threads that begin during the block, too, between `begin` and `end` in this one."""
        threading.settrace(self._on_call)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    def begin(self) -> None:
        self._on = True
        sys.settrace(self._on_call)

    def end(self) -> None:
        sys.settrace(None)
        self._on = False

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._on_line if self._on and frame.f_code.co_filename.startswith(ROOMS) else None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "line"
        return self._on_line

    @contextmanager
    def of_walks(self) -> Iterator[None]:
        """Count the items that C goes through, too."""
        before = {name: getattr(builtins, name) for name in WALKS}
        for name, act in before.items():
            setattr(builtins, name, self._walking(act))
        try:
            yield
        finally:
            for name, act in before.items():
                setattr(builtins, name, act)

    def _walking(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def walk(*items: Any, **named: Any) -> Any:
            if len(items) == 1 and hasattr(items[0], "__len__"):
                self.count += len(items[0])
            return act(*items, **named)

        return walk


def lines_of(act: Callable[[], object]) -> int:
    """The lines that run in this thread while ``act`` does."""
    lines = Lines()
    with lines.of_walks():
        lines.begin()
        try:
            act()
        finally:
            lines.end()
    return lines.count


def bytes_of(act: Callable[[], object]) -> int:
    """The most bytes that are taken at once while ``act`` runs."""
    gc.collect()  # empties Python's lists of free objects: what is taken from these is not traced
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        act()
        return tracemalloc.get_traced_memory()[1] - begun
    finally:
        tracemalloc.stop()


def operations_of(act: Callable[[], object]) -> Operations:
    """The lines that ``act`` runs usually, and the least bytes that it takes, of so many times: a table of
    Python's grows in leaps, now and then."""
    lines = [lines_of(act) for _ in range(TIMES)]
    return Operations(median(lines), min(bytes_of(act) for _ in range(TIMES)))
