"""The command behind ``make gpu``: parts in order, one table, one JSON per part.

Runs as a file, from a checkout that need not be installed: it makes ``holdfast`` importable by a link. A part
that fails says so in the table and in its JSON, and the others run. Without a CUDA device nothing is measured;
``--rehearse`` then runs every line at toy sizes under triton's interpreter (servers compute by the CPU's
kernels) and writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "ceilings": "machine.ceilings",
    "correct": "attention.correct",
    "decode": "attention.decode",
    "prefill": "attention.prefill",
    "prefix": "attention.prefix",
    "rows": "memory.rows",
    "draw": "memory.draws",
    "invariant": "companies.invariant",
    "engine": "engine.engine",
    "models": "models.models",
    "agent": "agent.agent",
    "tests": "engine.tests",
    "refresh": "refresh.refresh",
}
BUDGET_S = 9 * 60  # less what ending a part takes
NAMED_S = 3600.0  # of a part that was asked for by name
RIGHT = ("correct", "invariant", "tests")  # a goal that one of these misses is a fault, not a figure
WHOLE = ("engine", "tests")  # not rehearsed: they are run on a CPU by the suite
BY_NAME = ("refresh",)  # it changes what is measured


@contextmanager
def importable() -> Iterator[None]:
    """``holdfast`` as this checkout, whether or not it is installed, for child processes too."""
    found = find_spec("holdfast")
    if found is not None and found.origin is not None and Path(found.origin).resolve().parent == ROOT:
        yield  # by its own path, under which compiled CPU kernels are kept
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "holdfast").symlink_to(ROOT)
        sys.path.insert(0, folder)
        before = os.environ.get("PYTHONPATH", "")  # wheels that were carried may lie there
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            sys.path.remove(folder)
            os.environ["PYTHONPATH"] = before


def measured(part: str, bench: Any, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """A part's lines, and why it failed, if it did; within so many seconds."""
    if seconds <= 0:
        return [], f"out of time: make gpu PART={part}"
    module, function = PARTS[part].split(".")
    limits = importlib.import_module("holdfast.benchmarks.gpu.limits")
    try:
        with limits.limited(seconds):
            made = importlib.import_module(f"holdfast.benchmarks.gpu.{module}")
            lines: list[dict[str, Any]] = getattr(made, function)(bench)
    except Exception as error:  # said in the table and the JSON; the exit status tells, too
        return [], f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    wrong = [one["name"] for one in lines if part in RIGHT and one["met"] is False]
    return lines, f"wrong: {', '.join(wrong)}" if wrong else ""


def show(part: str, lines: list[dict[str, Any]], failure: str, rehearsal: bool) -> None:
    """The part's rows of the table; in rehearsal without numbers, which would mean nothing."""
    for one in lines:
        value = one.get("note") or ("rehearsed" if rehearsal else f"{one['value']:>12} {one['unit']:8}")
        verdict = {None: "", True: "met", False: f"missed, goal {one['goal']}"}[one["met"]]
        if rehearsal and one["unit"] in ("us", "ms", "%", "x", "TFLOP/s", "GB/s"):
            verdict = ""
        print(f"{part:10} {one['name']:58} {value} {verdict}", flush=True)
    if failure:
        print(f"{part:10} {'FAILED' if lines else 'NOT MEASURED'}: {failure}", flush=True)


def write(part: str, lines: list[dict[str, Any]], failure: str, seconds: float) -> None:
    """The part's JSON under ``benchmarks/results/``."""
    import torch
    import triton

    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    made = {
        "part": part,
        "machine": device,
        "versions": versions | {"python": platform.python_version()},
        "seed": 0,
        "seconds": round(seconds, 1),
        "failure": failure or None,
        "figures": lines,
        "goals": [one for one in lines if one["met"] is not None],
    }
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    stamp = f"{datetime.date.today()}-{device.replace(' ', '-').lower()}-{part}.json"
    (folder / stamp).write_text(json.dumps(made, indent=1) + "\n")


def main() -> int:
    """Run the parts asked for; 0 if all were measured and compute right, or there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, interpreted, no figures kept")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers end with us
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if asked.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not torch.cuda.is_available() and not asked.rehearse:
        print(f"no CUDA device (torch {torch.__version__}): nothing measured")
        return 0
    device, failed, begun = torch.device("cpu" if asked.rehearse else "cuda"), False, time.monotonic()
    with importable():
        bench = importlib.import_module("holdfast.benchmarks.gpu.measure").Bench(device, asked.rehearse)
        left = (*BY_NAME, *(WHOLE if asked.rehearse else ()))
        for part in asked.part or [name for name in PARTS if name not in left]:
            start = time.monotonic()
            left_s = NAMED_S if asked.part else BUDGET_S - (start - begun)
            lines, failure = measured(part, bench, left_s)
            show(part, lines, failure, asked.rehearse)
            failed = failed or bool(failure)
            if not asked.rehearse:
                write(part, lines, failure, time.monotonic() - start)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
