"""The command behind ``make gpu``: parts in order, a table, and one file of results, written part by part.

Runs as a file, from a checkout that need not be installed. Each part is a process of its own with a time
limit, so one that fails, hangs or loses the device does not affect the others. Results are JSON lines, on
disk at once; a second call with the same file runs the remaining parts. Without a CUDA device nothing is
measured; ``--rehearse`` then runs every line at toy sizes under triton's interpreter (servers compute by
the CPU's kernels).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "gpu.jsonl"
WHEELS = ROOT / ".whl"
PARTS = {
    "ceilings": "machine.ceilings",
    "correct": "attention.correct",
    "tests-kernels": "engine.kernel_tests",
    "tests-kvstore": "engine.kvstore_tests",
    "graphs": "serving.graphs",
    "decode": "attention.decode",
    "steps": "steps.steps",
    "contexts": "steps.contexts",
    "beside": "steps.beside",
    "draw": "memory.draws",
    "memory": "serving.memory",
    "serving": "serving.serving",
    "prefill": "attention.prefill",
    "rows": "memory.rows",
    "weights": "weights.weights",
    "invariant": "companies.invariant",
    "agent": "agent.agent",
    "tests": "engine.other_tests",
    "sanitizer": "engine.sanitizer",
    "refresh": "refresh.refresh",
}
BUDGET_S = 9 * 60.0  # of a call; ending a part may take KILL_S more
NAMED_S = 3600.0  # of a call for parts that were asked for by name
LIMIT_S = 240.0  # of a part
LIMITS_S = {"ceilings": 60.0, "tests-kernels": 180.0, "tests-kvstore": 90.0, "graphs": 120.0, "decode": 120.0}
LIMITS_S |= {"correct": 120.0, "steps": 300.0, "contexts": 300.0}
LEAST_S = 20.0  # no part is begun for less
KILL_S = 15.0
RIGHT = ("correct", "graphs", "invariant", "weights", "tests-kernels", "tests-kvstore", "tests", "sanitizer")
"""Parts in which a missed goal is a fault, not just a figure."""
WHOLE = ("tests-kernels", "tests-kvstore", "tests", "sanitizer")
"""Parts that are not rehearsed, because the test suite runs the same on a CPU."""
BY_NAME = ("refresh",)
"""Parts that run only if they are named, because they change the files that are measured."""

BEGUN, SOME, CUT, ENDED = "begun", "some", "cut", "ended"
"""The states of a part in the results file. ``BEGUN``: it has begun. ``SOME``: some of its figures are there.
``CUT``: it was cut by the time limit, and will be run again. ``ENDED``: it has ended."""


@dataclass(frozen=True, slots=True)
class Results:
    """The file of results, one JSON object per line. Each line is on disk when `add` returns."""

    path: Path

    def add(self, part: str, state: str, **more: Any) -> None:
        """Append a line about a part, on a line of its own even if a killed process has left half of one."""
        line = json.dumps({"part": part, "state": state, "at": _now(), **more}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        found = []
        with suppress(FileNotFoundError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def states(self) -> dict[str, str]:
        """The last state of each part that has any."""
        return {line["part"]: line["state"] for line in self.lines()}

    def left(self, parts: Sequence[str]) -> list[str]:
        """Those of ``parts`` that have not ended. Parts that have begun before come last."""
        states = self.states()
        left = [part for part in parts if states.get(part) != ENDED]
        return sorted(left, key=lambda part: part in states)


@contextmanager
def importable() -> Iterator[None]:
    """In the block, make ``holdfast`` importable as this checkout, installed or not, and also the packages of
    the wheels in ``.whl/``; for child processes, too."""
    found = find_spec("holdfast")
    ours = found is not None and found.origin is not None and Path(found.origin).resolve().parent == ROOT
    if ours and not WHEELS.is_dir():
        yield  # by its own path, under which compiled CPU kernels are kept
        return
    with tempfile.TemporaryDirectory() as folder:
        if not ours:
            (Path(folder) / "holdfast").symlink_to(ROOT)
        if WHEELS.is_dir():
            for line in _unpack(WHEELS, Path(folder)):
                print(line, flush=True)
        sys.path.insert(0, folder)
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            sys.path.remove(folder)
            os.environ["PYTHONPATH"] = before


def _unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack the wheels into ``folder`` by means of ``wheels.py`` beside this file, which is imported as a file
    because `holdfast` itself needs some of the packages. Returns a line for each wheel that is not for this
    Python."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        module = importlib.import_module("wheels")
        refused: list[str] = module.unpack(wheels, folder)
        return refused
    finally:
        sys.path.remove(str(Path(__file__).parent))


# --- the parts, one process after the other -------------------------------------------------------------------

Command = Callable[[str, float, bool], Sequence[str]]
"""Makes the command of a part's process from the part's name, its seconds, and whether a part that takes longer
is cut, to be run again, or has failed."""


def run_parts(
    parts: Sequence[str],
    results: Results,
    budget: float,
    command: Command,
    limits: dict[str, float] = LIMITS_S,
) -> list[str]:
    """Run the parts one after another, each in a process of its own, within ``budget`` seconds in all.
    ``limits``: seconds of a part, by name. Returns the parts that failed."""
    begun, failed = time.monotonic(), []
    for part in parts:
        limit, left = limits.get(part, LIMIT_S), budget - (time.monotonic() - begun)
        if left < min(LEAST_S, limit):
            break
        seconds, cut = min(limit, left), left < limit
        results.add(part, BEGUN)
        status = _run(command(part, seconds, cut), seconds + KILL_S)
        if results.states()[part] not in (ENDED, CUT):  # it could not write this itself
            print(f"{part:13} FAILED: {status}", flush=True)
            results.add(part, CUT if cut and status == OUT_OF_TIME else ENDED, failure=status, figures=[])
        last = results.lines()[-1]
        if last["state"] == ENDED and last["failure"]:
            failed.append(part)
    return failed


OUT_OF_TIME = "out of time, and killed"


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a part's process to its end or its time limit. Returns how it ended, as text."""
    process = subprocess.Popen(command, process_group=0)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it started
        process.wait()
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


def measured(part: str, bench: Any, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run a part in this process for at most so many seconds. Returns its figures, and the reason if it failed,
    else an empty text."""
    module, function = PARTS[part].split(".")
    measure = importlib.import_module("holdfast.benchmarks.gpu.measure")
    try:
        with measure.limited(seconds):
            made = importlib.import_module(f"holdfast.benchmarks.gpu.{module}")
            lines: list[dict[str, Any]] = getattr(made, function)(bench)
    except Exception as error:  # in the table, in the results, and in the exit status
        return [], f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    wrong = [one["name"] for one in lines if part in RIGHT and one["met"] is False]
    return lines, f"wrong: {', '.join(wrong)}" if wrong else ""


def show(part: str, lines: list[dict[str, Any]], failure: str, rehearsal: bool) -> None:
    """Print the part's figures as rows of the table; in a rehearsal without numbers. ``failure``: why the part
    failed; empty if it did not."""
    for one in lines:
        value = one.get("note") or ("rehearsed" if rehearsal else f"{one['value']:>12} {one['unit']:8}")
        verdict = {None: "", True: "met", False: f"missed, goal {one['goal']}"}[one["met"]]
        if rehearsal and one["unit"] in ("us", "ms", "%", "x", "TFLOP/s", "GB/s"):
            verdict = ""
        print(f"{part:13} {one['name']:58} {value} {verdict}", flush=True)
    if failure:
        print(f"{part:13} {'FAILED' if lines else 'NOT MEASURED'}: {failure}", flush=True)


def child(part: str, results: Results, seconds: float, cut: bool, rehearsal: bool) -> int:
    """Run one part in this process, which `run_parts` has started, and write its results. ``cut``: if it takes
    too long, it is cut, and will be run again. Returns the exit code: 0 if it was measured and computes
    right."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it ends with its parent
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with us
    import torch

    start, device = time.monotonic(), torch.device("cpu" if rehearsal else "cuda")
    about = _about(rehearsal)

    def tell(lines: list[dict[str, Any]]) -> None:
        results.add(part, SOME, figures=lines, **about)

    bench = importlib.import_module("holdfast.benchmarks.gpu.measure").Bench(device, rehearsal, tell)
    lines, failure = measured(part, bench, seconds)
    show(part, lines, failure, rehearsal)
    state = CUT if cut and failure.startswith("TimeoutError") else ENDED
    goals = [one for one in lines if one["met"] is not None]
    took = round(time.monotonic() - start, 1)
    results.add(part, state, seconds=took, failure=failure or None, figures=lines, goals=goals, **about)
    return int(bool(failure))


def _about(rehearsal: bool) -> dict[str, Any]:
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    machine = "rehearsal" if rehearsal else torch.cuda.get_device_name()
    return {"machine": machine, "versions": versions | {"python": platform.python_version()}, "seed": 0}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main() -> int:
    """Run the parts that are left. Returns the exit code: 0 if all are measured and compute right, or if there
    is no CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only these")
    parser.add_argument("--again", action="store_true", help="also parts that have results already")
    parser.add_argument(
        "--results", type=Path, help=f"a file of JSON lines (default: {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument("--budget", type=float, help="seconds in all")
    parser.add_argument(
        "--rehearse", action="store_true", help="toy sizes, interpreted; figures mean nothing"
    )
    parser.add_argument("--child", nargs=2, metavar=("SECONDS", "CUT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if asked.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not torch.cuda.is_available() and not asked.rehearse:
        print(f"no CUDA device (torch {torch.__version__}): nothing measured")
        return 0
    if asked.child:
        (part,), (seconds, cut) = asked.part, asked.child
        return child(part, Results(asked.results), float(seconds), cut == CUT, asked.rehearse)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder, importable():
        path = Path(folder) / "rehearsal.jsonl" if asked.rehearse and not asked.results else asked.results
        return _all(asked, Results((path or RESULTS).resolve()))


def _all(asked: argparse.Namespace, results: Results) -> int:
    def command(part: str, seconds: float, cut: bool) -> Sequence[str]:
        words = [
            "--part",
            part,
            "--results",
            str(results.path),
            "--child",
            str(seconds),
            CUT if cut else ENDED,
        ]
        return [sys.executable, str(Path(__file__).resolve()), *words, *["--rehearse"] * asked.rehearse]

    left_out = (*BY_NAME, *(WHOLE if asked.rehearse else ()))
    parts = asked.part or [name for name in PARTS if name not in left_out]
    todo = parts if asked.again else results.left(parts)
    if done := [part for part in parts if part not in todo]:
        print(f"{'before':13} {', '.join(done)}: in {results.path.name}", flush=True)
    budget = asked.budget or (NAMED_S if asked.part or asked.rehearse else BUDGET_S)
    limits = dict.fromkeys(PARTS, budget) if asked.part else LIMITS_S
    failed = run_parts(todo, results, budget, command, limits)
    left = results.left(parts)
    print(f"failed: {', '.join(failed) or 'none'}; left: {', '.join(left) or 'none'}", flush=True)
    if left:
        print(f"call again with the same {results.path.name} for what is left", flush=True)
    return int(bool(failed or left))


if __name__ == "__main__":
    raise SystemExit(main())
