"""``holdfast bench paired --before CHECKOUT NAME…``: run other benchmarks on this code and on older code,
alternately.

``CHECKOUT`` is another working tree of this repository with its own environment (`make .venv/ready` there).
Each round gives the ratio of every figure, new code ÷ old code; the result is the geometric mean of the rounds'
ratios and its 95 % interval (Student's t on the logarithms). A figure counts as slower only if the whole
interval is worse than 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from .harness.options import RESULTS, CannotMeasure, run
from .report import Goal, show, table

WORSE = 1.05
ROUND_SECONDS = 3600.0
_T95 = "12.71 4.30 3.18 2.78 2.57 2.45 2.36 2.31 2.26 2.23 2.20 2.18 2.16 2.14 2.13 2.12 2.11 2.10"
T95 = tuple(map(float, _T95.split()))
"""Student's t for a two-sided 95 % interval. Entry 0 is for one degree of freedom, the next for two, and so on;
beyond the last it is at most 2.09."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class PairedBench:
    """How one benchmark is run and compared. ``words``: its options. ``figures``: the paths in its JSON of the
    figures that are compared, with wildcards, and whether higher or lower is better."""

    words: str
    figures: dict[str, Better]


ONCE = "--rounds 1 --models toy-9m --peers none"
BENCHES = {
    "load": PairedBench(
        "--seconds 10 --shares 0.5",
        {
            "phases/0/request_throughput": "higher",
            "phases/0/gateway/microseconds_per_event": "lower",
            "phases/*/median_ttft_ms": "lower",
            "phases/*/median_itl_ms": "lower",
        },
    ),
    "turns": PairedBench(ONCE, {"on/*/figures/holdfast*/ttft_sum_ms": "lower"}),
    "decode": PairedBench(ONCE, {"on/*/tokens_per_second/*/holdfast": "higher"}),
    "restore": PairedBench("--rounds 11", {"on/*/*/ttft_ms": "lower"}),
    "fork": PairedBench("--rounds 10", {"fork_us/*/*/idle": "lower", "fork_us/*/*/generating": "lower"}),
    "sessions": PairedBench(ONCE, {"counted/prefilled_per_new/*": "lower", "timed/*/ttft_ms/*": "lower"}),
    "agent": PairedBench(
        "--rounds 1 --history 4096", {"on/*/session/step_ms": "lower", "on/*/session/gateway_ms": "lower"}
    ),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of a figure, new code ÷ old code, over all rounds: its geometric mean, the ends of its 95 %
    interval, and each round's ratio."""

    mean: float
    low: float
    high: float
    runs: tuple[float, ...]

    @classmethod
    def of(cls, runs: Sequence[float]) -> Ratio:
        """The mean and interval of these ratios, one for each round. Needs at least two."""
        logs = [log(value) for value in runs]
        degrees = len(logs) - 1
        wide = (T95[degrees - 1] if degrees <= len(T95) else 2.09) * stdev(logs) / sqrt(len(logs))
        return cls(exp(mean(logs)), exp(mean(logs) - wide), exp(mean(logs) + wide), tuple(runs))

    def slower(self, better: Better) -> float:
        """How much slower the new code is at the end of the interval that is best for it, as a ratio of times:
        above `WORSE` it is slower for certain. ``better``: which direction of the figure is good."""
        return self.low if better == "lower" else 1 / self.high


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="holdfast bench paired", description=__doc__)
    parser.add_argument("names", nargs="+", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older code")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--quick", action="store_true", help="tiny: does it work at all")
    chosen = parser.parse_args(words)
    return run("paired", lambda: measure(chosen))


def measure(chosen: Any) -> None:
    if chosen.rounds < 2:
        raise CannotMeasure("an interval needs two rounds or more")
    here, before = Path(__file__).resolve().parent.parent, chosen.before.resolve()
    found: dict[str, dict[str, Any]] = {}
    for number in range(chosen.rounds):
        for name in chosen.names:
            sides = {"after": here, "before": before}
            order = ("before", "after") if number % 2 else ("after", "before")
            told = {
                side: _figures(name, sides[side], chosen.seed + number, quick=chosen.quick) for side in order
            }
            for path, (value, better) in told["after"].items():
                if path in told["before"]:
                    one = found.setdefault(f"{name}: {path}", {"better": better, "after": [], "before": []})
                    one["after"].append(value)
                    one["before"].append(told["before"][path][0])
    goals, rows = [], []
    for path, one in found.items():
        pairs = zip(one["after"], one["before"], strict=True)
        ratio = Ratio.of([after / older for after, older in pairs])
        one |= {"ratio": ratio.mean, "low": ratio.low, "high": ratio.high, "runs": ratio.runs}
        goals.append(Goal(path, ratio.slower(one["better"]), "x", WORSE, "lower"))
        rows.append([path, ratio.mean, ratio.low, ratio.high, one["better"]])
    table(
        "after ÷ before: geometric mean and 95 % interval", ["figure", "ratio", "from", "to", "better"], rows
    )
    commits = {"before": _commit(before), "after": _commit(here)}
    settings = {"rounds": chosen.rounds, "quick": chosen.quick, **commits}
    show("paired", chosen.seed, {**settings, "figures": found}, goals, chosen.out)


def _figures(name: str, checkout: Path, seed: int, *, quick: bool) -> dict[str, tuple[float, Better]]:
    bench = BENCHES[name]
    with tempfile.TemporaryDirectory() as out:
        words = [*("--quick" if quick else bench.words).split(), "--seed", str(seed), "--out", out]
        here = checkout == Path(__file__).resolve().parent.parent
        python = sys.executable if here else str(checkout / ".venv" / "bin" / "python")
        program = f"from holdfast.benchmarks.{name} import main; import sys; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            (python, "-c", program, *words), cwd=out, capture_output=True, text=True, timeout=ROUND_SECONDS
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
            raise CannotMeasure(f"{name} failed in {checkout}: {last}")
        told = json.loads((Path(out) / f"{name}.json").read_text())
    found: dict[str, tuple[float, Better]] = {}
    for path, value in _leaves(told):
        for pattern, better in bench.figures.items():
            if _fits(path, pattern) and value > 0:
                found[path] = (value, better)
    if not found:
        raise CannotMeasure(f"{name} told no figure that is compared")
    return found


def _fits(path: str, pattern: str) -> bool:
    """Whether each part of the path, between slashes, matches the same part of the pattern, which may have
    wildcards."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _leaves(told: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a benchmark's JSON by their path, ``a/0/b``. Of a figure with several runs only the
    median."""
    if isinstance(told, dict) and {"median", "runs"} <= told.keys():
        yield path, float(told["median"])
    elif isinstance(told, dict):
        for name, inner in told.items():
            yield from _leaves(inner, f"{path}/{name}" if path else str(name))
    elif isinstance(told, list):
        for at, inner in enumerate(told):
            yield from _leaves(inner, f"{path}/{at}")
    elif isinstance(told, int | float) and not isinstance(told, bool):
        yield path, float(told)


def _commit(checkout: Path) -> str:
    words = ("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
