"""Engines for the parts, without a link to a gateway; and the parts ``tests`` and ``sanitizer``: the tests
marked ``gpu``, and these under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...kvstore.arena import DeviceArena
from ...kvstore.block_mover import BlockMover
from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ...runtime import verbs
from ...runtime.engine import Engine
from ...runtime.execution.batch import Capacity
from ...runtime.execution.runner import TorchRunner
from ...runtime.execution.warmup import rehearse
from ...runtime.grammar.llguidance import Compiler, Matchers
from ...runtime.model.load import LoadedModel
from ...runtime.scheduler.scheduler import Scheduler
from ...runtime.settings import EngineSettings, SchedulerSettings, StepSize
from ..harness.talker import apply
from .measure import Bench, Figure, figure, note

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
GREEDY = verbs.Sampling()
CUDA_BIN = "/usr/local/cuda/bin"
PYTEST_S = 240.0

Turn = tuple[list[int], verbs.Sampling, int]
"""A prompt, how its reply is sampled, and how many tokens it has."""


def kernel_tests(_: Bench) -> list[Figure]:
    return _tests("kernels")


def kvstore_tests(_: Bench) -> list[Figure]:
    return _tests("kvstore")


def other_tests(_: Bench) -> list[Figure]:
    return _tests(*(room for room in _marked() if room not in ("kernels", "kvstore")))


def sanitizer(_: Bench) -> list[Figure]:
    """Run the kernels' tests under compute-sanitizer, if that is installed."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_BIN)
    if found is None:
        return [note("out-of-bounds reads", "compute-sanitizer is not installed")]
    wrapped = (found, "--tool", "memcheck", "--error-exitcode", "9")
    status = _pytest(_marked()["kernels"], wrapped)
    return [figure("kernels under compute-sanitizer, exit status", status, "", 0, "lower")]


def _tests(*rooms: str) -> list[Figure]:
    marked = _marked()
    return [
        figure(f"pytest -m gpu tests/{room}, exit status", _pytest(marked[room]), "", 0, "lower")
        for room in rooms
    ]


def _marked() -> dict[str, list[str]]:
    """The test files with the ``gpu`` mark, by room. Each room is run by itself, so that files that cannot be
    imported affect no other room."""
    files: dict[str, list[str]] = {}
    tests = ROOT / "tests"
    for path in sorted(tests.rglob("test_*.py")):
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8"):
            files.setdefault(path.relative_to(tests).parts[0], []).append(str(path))
    return files


def _pytest(files: list[str], before: tuple[str, ...] = ()) -> int:
    """Run the tests with the ``gpu`` mark in these files. ``before``: words before the command. Returns the
    exit status; 124 if they ran out of time, as `timeout` has it. Warnings are not errors, because the
    libraries are the machine's own."""
    words = ("-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
    command = [*before, sys.executable, "-m", "pytest", *words, *files]
    try:
        return subprocess.run(command, check=False, timeout=PYTEST_S).returncode
    except subprocess.TimeoutExpired:
        return 124


def generate(
    model: LoadedModel,
    prompts: list[list[int]],
    new: int,
    step_tokens: int = 512,
    sampling: verbs.Sampling | Sequence[verbs.Sampling] = GREEDY,
    scored: bool = False,
    *,
    graphs: bool = False,
) -> tuple[list[list[Any]], list[Figure]]:
    """Generate ``new`` tokens after each prompt, all in one batch. Returns the ids for each prompt, and with
    ``graphs`` what `captured` tells. ``step_tokens``: the most that one step computes. ``sampling``: of all, or
    of each. ``scored``: pairs of id and log probability instead of ids."""
    scheduler, runner = parts_of(model, step_tokens)
    told = captured(model, runner, scheduler.settings) if graphs else []
    each = [sampling] if isinstance(sampling, verbs.Sampling) else sampling
    said: list[list[Any]] = [[] for _ in prompts]
    work = [(prompt, each[at % len(each)], new) for at, prompt in enumerate(prompts)]
    for row in rows_of(Engine(scheduler, runner), work):
        scores = [one.logprob for one in row.logprobs or ()]
        said[row.seq] += zip(row.tokens, scores, strict=True) if scored else row.tokens
    return said, told


def rows_of(engine: Engine, work: Sequence[Turn]) -> Iterator[verbs.Row]:
    """Begin a sequence for each turn, with ids from 0 on, run steps until all have ended, and yield their rows.
    Raises ``SequenceFailed``."""
    for seq, (prompt, sampling, new) in enumerate(work):
        limits = verbs.TokenLimits(new)
        apply(engine, verbs.Generate(seq, seq, sampling, limits, tokens=prompt, opening=verbs.Opening()))
    left = len(work)
    while left:
        step = engine.step()
        if step is None:  # a grammar is compiled
            time.sleep(engine.due() or 0.0)
        for row in step.rows if step else ():
            if row.finish is verbs.Finish.ERROR:
                raise SequenceFailed(row.error)
            left -= row.finish is not None
            yield row


class SequenceFailed(Exception):
    """A sequence ended with an error, which is the text."""


def parts_of(
    model: LoadedModel,
    step_tokens: int,
    blocks: int = 512,
    context: int = 2048,
    rows: int = 64,
    arena: DeviceArena | None = None,
    mover: BlockMover | None = None,
) -> tuple[Scheduler, TorchRunner]:
    """The scheduler and the runner of an engine without host and disk tier, with ``blocks`` blocks; on a GPU
    all kernels are compiled. ``context``: the most tokens of a sequence; ``rows``: the most rows of a step.
    ``arena``: made before, with as many blocks, for the runner's ``mover``."""
    groups = model.kv_groups(BLOCK)
    device = model.decoder.device
    settings = SchedulerSettings(
        blocks=blocks,
        vocab_size=model.config.vocab_size,
        max_context=context,
        max_step_tokens=step_tokens,
        max_sequences=min(rows, step_tokens),
        depth=2 if device.type == "cuda" else 1,
        windows=tuple(group.window for group in groups),
    )
    pool, hasher, matchers = BlockPool(blocks), BlockHasher(b"0" * 32, BLOCK), Matchers()
    compiler = Compiler(model.folder, model.config.vocab_size, model.config.eos_ids)
    scheduler = Scheduler(settings, pool, hasher, model.namespace(), compiler=compiler, matchers=matchers)
    most = StepSize(step_tokens, settings.max_sequences)
    capacity = Capacity(settings.depth * most.rows, -(-context // BLOCK), *most)
    arena = arena or DeviceArena(groups[0], blocks, device)
    runner = TorchRunner(model.decoder, arena, mover=mover, grammars=matchers, capacity=capacity)
    if device.type == "cuda":
        rehearse(runner, BLOCK, context, kernels=True)
    return scheduler, runner


def captured(model: LoadedModel, runner: TorchRunner, settings: SchedulerSettings) -> list[Figure]:
    """Have a server's sizes of steps captured, and tell how many graphs there are, the seconds, and the memory
    that they take."""
    sizes = EngineSettings(model="").captures(settings.step_size)
    cuda = model.decoder.device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    began = time.perf_counter()
    runner.capture(sizes)
    took, graphs = time.perf_counter() - began, sum(1 + one.single for one in sizes)
    taken = free - torch.cuda.mem_get_info()[0] if cuda else 0
    return [
        figure(f"graphs of {len(sizes)} sizes", runner.captured, "graphs", graphs if cuda else None),
        figure(f"graphs of {len(sizes)} sizes, captured in", took, "s"),
        figure(f"graphs of {len(sizes)} sizes, memory", taken / 2**20, "MiB"),
    ]
