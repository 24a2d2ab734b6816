"""The options and the exit codes of all speed benchmarks: 0 measured, 1 could not measure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.runtime.errors import RuntimeFault
from holdfast.sdk import SDKError

RESULTS = Path(__file__).resolve().parent.parent / "results"


class CannotMeasure(Exception):
    """A program to be measured did not run; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of every benchmark. ``models``: names of toys to measure on. ``rounds``: repetitions.
    ``dtype``: of weights and KV. ``threads``: computing threads of each engine. ``peers``: the folder with the
    other engines' environments. ``out``: the folder for JSON and plots.

    ``quick``: tiny settings and no other engines, for tests; its figures mean nothing.
    """

    models: tuple[str, ...]
    rounds: int
    seed: int
    dtype: str
    threads: int
    peers: Path
    out: Path
    quick: bool

    def told(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("models", "rounds", "dtype", "threads", "quick")}


def parser_of(name: str, about: str | None, models: Iterable[str], rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"holdfast bench {name}", description=about)
    parser.add_argument("--models", nargs="+", default=tuple(models), help="toys to measure on")
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds; five or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and KV")
    parser.add_argument("--threads", type=int, default=2, help="computing threads of each engine")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="made by `make peers`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the plot")
    parser.add_argument("--quick", action="store_true", help="tiny, without peers: does it work at all")
    return parser


def options_of(chosen: argparse.Namespace) -> Options:
    options = Options(**{name: getattr(chosen, name) for name in Options.__slots__})
    if options.quick:
        return replace(options, models=("tiny",), rounds=2)
    return replace(options, models=tuple(options.models))


def run(name: str, measure: Callable[[], None]) -> int:
    """Run ``measure`` for the benchmark ``name``. Returns the exit code: 0, or 1 with one line on stderr if it
    could not measure."""
    try:
        measure()
    except (CannotMeasure, RuntimeFault, SDKError, OSError) as failed:
        print(f"holdfast bench {name}: {failed or type(failed).__name__}", file=sys.stderr)
        return 1
    return 0
