"""What every benchmark prints: the machine, the versions, the figures and their goals; a short table, then
JSON.

Knows nothing of what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

LIBRARIES = ("holdfast", "torch", "transformers", "numpy", "msgspec", "uvicorn", "websockets")


@dataclass(frozen=True)
class Goal:
    """A figure and where it should stand."""

    name: str
    value: float
    unit: str
    goal: float
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool:
        """Whether it stands there."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    def told(self) -> dict[str, Any]:
        """As the JSON has it."""
        return {**asdict(self), "met": self.met}


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile; ``share`` in 0 to 1. NaN for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def machine() -> dict[str, Any]:
    """The machine and the versions of what runs on it."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def show(name: str, seed: int, figures: Mapping[str, Any], goals: Sequence[Goal]) -> None:
    """Print the table of goals and the whole as JSON, to stdout."""
    width = max((len(goal.name) for goal in goals), default=0)
    for goal in goals:
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
    json.dump(whole, sys.stdout, indent=1, ensure_ascii=False)
    print()


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
