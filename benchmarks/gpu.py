"""``make gpu``: what a GPU can show, by one command and without a network; one table, one JSON.

Runs as a file, from a checkout that need not be installed: it makes ``holdfast`` importable by a link.
Parts: ``ceilings`` (what the machine can do at all), ``engine`` (the pocket model on CUDA says what it says on
the CPU, and how fast it decodes), ``tests`` (the suite's ``gpu`` mark). Without a CUDA device it says so and
measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.model.load import LoadedModel

ROOT = Path(__file__).resolve().parent.parent
RUNS = 20
Figure = dict[str, Any]


@contextmanager
def importable() -> Iterator[str]:
    """``holdfast`` as this checkout, whether or not it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "holdfast").symlink_to(ROOT)
        sys.path.insert(0, folder)
        try:
            yield folder
        finally:
            sys.path.remove(folder)


def median_ms(work: Callable[[], object]) -> float:
    """Median device time of ``work`` in milliseconds, by events, after three runs to warm up."""
    import torch

    for _ in range(3):
        work()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times)[RUNS // 2])


def ceilings(_: str) -> list[Figure]:
    """Device copy (read + write), bf16 matmul, pinned host to device."""
    import torch

    size = 1 << 30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    side = 8192
    left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    return [
        figure("device copy", 2 * size / median_ms(lambda: target.copy_(source)) / 1e6, "GB/s"),
        figure("bf16 matmul", 2 * side**3 / median_ms(lambda: left @ right) / 1e9, "TFLOP/s"),
        figure("pinned host to device", size / median_ms(lambda: source.copy_(host)) / 1e6, "GB/s"),
    ]


def engine(_: str) -> list[Figure]:
    """Pocket in fp32 on CUDA against the CPU, greedy, sixteen prompts in one batch; then its decode rate."""
    torch = importlib.import_module("torch")
    load = importlib.import_module("holdfast.runtime.model.load")
    prompts = [[(7 * seed + 13 * at) % 900 + 20 for at in range(5 + 11 * seed)] for seed in range(16)]
    on_cpu, _seconds = _generate(load.load_model("pocket", "cpu", "float32"), prompts, 32)
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cuda, seconds = _generate(load.load_model("pocket", "cuda", "float32"), prompts, 32)
    equal = sum(one == other for one, other in zip(on_cpu, on_cuda, strict=True))
    return [
        figure("greedy replies equal to the CPU's, of 16", equal, "replies", goal=16),
        figure("decode, pocket, 16 sequences, eager fp32", 16 * 32 / seconds, "tok/s"),
    ]


def tests(package: str) -> list[Figure]:
    """The suite's ``gpu`` mark; pytest's exit status, where pytest is there."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests"),
    ]
    status = subprocess.run(command, env={**os.environ, "PYTHONPATH": package}, check=False).returncode
    return [figure("pytest -m gpu, exit status (5: none selected)", status, "", goal=0, better="lower")]


def figure(name: str, value: float, unit: str, goal: float | None = None, better: str = "higher") -> Figure:
    """One line of the table; with a goal, whether it is met."""
    met = None if goal is None else (value >= goal if better == "higher" else value <= goal)
    return {"name": name, "value": round(value, 3), "unit": unit, "goal": goal, "better": better, "met": met}


def _generate(model: LoadedModel, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Greedy ids for all prompts in one batch, and the seconds from the first step to the last."""
    messages = importlib.import_module("holdfast.runtime.link.messages")
    made = _engine(model)
    said: list[list[int]] = [[] for _ in prompts]
    for seq, prompt in enumerate(prompts):
        made.apply(messages.Open(0, seq, b"", prompt))
        made.apply(messages.Generate(0, seq, messages.Sampling(), messages.Limits(new)))
    start = time.perf_counter()
    while (step := made.step()) is not None:
        for row in step.rows:
            said[row.seq] += row.tokens
    return said, time.perf_counter() - start


def _engine(model: LoadedModel) -> Engine:
    parts = {
        name: importlib.import_module(f"holdfast.{name}")
        for name in (
            "kvstore.arena",
            "kvstore.keys",
            "kvstore.pool",
            "runtime.engine",
            "runtime.runner",
            "runtime.scheduler",
            "runtime.settings",
        )
    }
    blocks, size = 512, 16
    groups = model.kv_groups(size)
    device, dtype = model.decoder.device, model.decoder.dtype
    settings = parts["runtime.settings"].SchedulerSettings(
        blocks=blocks,
        vocab_size=model.config.vocab_size,
        max_context=2048,
        depth=2 if device.type == "cuda" else 1,
    )
    scheduler = parts["runtime.scheduler"].Scheduler(
        settings,
        parts["kvstore.pool"].BlockPool(blocks, size),
        parts["kvstore.keys"].BlockHasher(b"0" * 32, size),
        model.namespace(groups),
    )
    arenas = [parts["kvstore.arena"].DeviceArena(group, blocks, device, dtype) for group in groups]
    made: Engine = parts["runtime.engine"].Engine(
        scheduler, parts["runtime.runner"].TorchRunner(model.decoder, *arenas)
    )
    return made


PARTS: dict[str, Callable[[str], list[Figure]]] = {"ceilings": ceilings, "engine": engine, "tests": tests}


def report(part: str, figures: list[Figure]) -> Path:
    """Print the table and write the JSON under ``benchmarks/results/``."""
    import torch

    for one in figures:
        verdict = "" if one["met"] is None else ("met" if one["met"] else f"missed, goal {one['goal']}")
        print(f"{part:10} {one['name']:48} {one['value']:>12} {one['unit']:8} {verdict}", flush=True)
    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    goals = [one for one in figures if one["goal"] is not None]
    made = {"part": part, "machine": device, "versions": versions, "figures": figures, "goals": goals}
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    stamp = f"{datetime.date.today()}-{device.replace(' ', '-').lower()}-{part}.json"
    (folder / stamp).write_text(json.dumps(made, indent=1) + "\n")
    return folder / stamp


def main() -> int:
    """Run the parts asked for; 0 if they could be measured, or if there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append")
    parts = parser.parse_args().part or list(PARTS)
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing measured")
        return 0
    with importable() as package:
        for part in parts:
            report(part, PARTS[part](package))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
