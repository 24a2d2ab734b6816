"""Draws plots beside the JSON, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Axes:
    """The title and axis labels of one plot. ``across``, ``up``: labels of the x and y axis. ``log``: the y
    axis is logarithmic."""

    title: str
    across: str
    up: str
    log: bool = False


Curve = tuple[Sequence[float], Sequence[float]]
Picture = tuple[Axes, Mapping[str, Curve]]


def draw(path: Path, pictures: Sequence[Picture]) -> str:
    """Draw the plots side by side into the file ``path``. Returns a line to print: the path, or that matplotlib
    is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    figure = Figure(figsize=(6.4 * len(pictures), 4.8), layout="constrained")
    for column, (axes, curves) in enumerate(pictures):
        plot = figure.add_subplot(1, len(pictures), column + 1)
        for name, (xs, ys) in curves.items():
            plot.plot(xs, ys, marker=".", label=name)
        plot.set_title(axes.title)
        plot.set_xlabel(axes.across)
        plot.set_ylabel(axes.up)
        if axes.log:
            plot.set_yscale("log")
        plot.grid(alpha=0.3)
        plot.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return f"plot: {path}"
