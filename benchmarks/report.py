"""The output of every benchmark: the machine, versions, figures and goals, as a short table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 132
LIBRARIES = ("holdfast-llm", "torch", "transformers", "numpy", "msgspec", "uvicorn", "websockets")


@dataclass(frozen=True)
class Goal:
    """A measured figure, ``value``, and the ``goal`` that it is to reach: at least that if ``better`` is
    ``higher``, at most that if ``lower``."""

    name: str
    value: float
    unit: str
    goal: float
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool:
        """Whether the figure reaches its goal."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    def told(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def percentile(values: Iterable[float], share: float) -> float:
    """The percentile of the values by nearest rank. ``share``: 0.9 for the 90th. NaN for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def summary(values: Iterable[float], digits: int = 3) -> dict[str, Any]:
    """A figure that was measured several times: its ``median``, percentiles ``p50``, ``p90``, ``p99`` (nearest
    rank), and all values as ``runs``, rounded to so many digits."""
    runs = [round(value, digits) for value in values]
    ranks = {f"p{round(100 * share)}": percentile(runs, share) for share in (0.5, 0.9, 0.99)}
    return {"median": round(median(runs), digits), **ranks, "runs": runs}


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a short table to stdout. ``columns``: the headings. ``rows``: a cell for each column; the first
    column is text, the others are figures."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=TABLE_WIDTH, highlight=False).print(shown, "")


def show(
    name: str,
    seed: int,
    figures: Mapping[str, Any],
    goals: Sequence[Goal],
    out: Path | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Print the goals as a table, unless ``quiet``, and everything as JSON, to stdout. ``name``: of the
    benchmark. ``figures``: what goes into the JSON beside the machine, the seed and the goals. ``out``: a
    folder in which the JSON is saved, too; None: nowhere."""
    width = max((len(goal.name) for goal in goals), default=0)
    for goal in () if quiet else goals:
        sign = "≥" if goal.better == "higher" else "≤"
        verdict = "met" if goal.met else "MISSED"
        print(
            f"{goal.name:{width}}  {goal.value:8.2f} {goal.unit}  {sign} {goal.goal:g} {goal.unit}  {verdict}"
        )
    whole = {
        "benchmark": name,
        "seed": seed,
        **machine(),
        **figures,
        "goals": [goal.told() for goal in goals],
    }
    text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(text, encoding="utf-8")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        return platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
