"""Parts ``engine``, ``tests`` and ``sanitizer``: the pocket model on CUDA against the CPU; the tests marked
``gpu``; these under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.backends import Needs, choose
from ...kvstore.arena import DeviceArena
from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ...runtime import verbs
from ...runtime.engine import Engine
from ...runtime.execution.batch import Capacity
from ...runtime.execution.runner import TorchRunner
from ...runtime.model.load import LoadedModel, load_model
from ...runtime.scheduler.scheduler import Scheduler
from ...runtime.settings import EngineSettings, SchedulerSettings, StepSize
from .measure import Bench, Figure, figure, note

ROOT = Path(__file__).resolve().parents[2]
GREEDY = verbs.Sampling()
CUDA_BIN = "/usr/local/cuda/bin"
PYTEST_S = 240.0


def engine(_: Bench) -> list[Figure]:
    """Compare greedy replies of the pocket model in fp32 on CUDA with those on the CPU, sixteen prompts in one
    batch, for each backend; and time them."""
    prompts = [[(7 * seed + 13 * at) % 900 + 20 for at in range(5 + 11 * seed)] for seed in range(16)]
    on_cpu, _seconds = generate(load_model("pocket", "cpu", "float32"), prompts, 32)
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded, lines = load_model("pocket", "cuda", "float32"), []
    for name in ("reference", "triton", "triton-invariant"):
        needs = Needs(loaded.decoder.dtype, [(loaded.config.head_dim, 16)])
        kernels = choose(name, loaded.decoder.device, needs).kernels
        model = replace(loaded, decoder=loaded.decoder.computing_by(kernels))
        on_cuda, _compiling = generate(model, prompts, 32)
        _again, seconds = generate(model, prompts, 32)
        equal = sum(one == other for one, other in zip(on_cpu, on_cuda, strict=True))
        lines.append(figure(f"{name}: greedy replies equal to the CPU's, of 16", equal, "replies", goal=16))
        lines.append(figure(f"{name}: decode, pocket, 16 sequences, fp32", 16 * 32 / seconds, "tok/s"))
    return lines


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
    sampling: verbs.Sampling = GREEDY,
    scored: bool = False,
    graphs: bool = False,
) -> tuple[list[list[Any]], float]:
    """Generate ``new`` tokens after each prompt, all in one batch. Returns the ids for each prompt, and the
    seconds from the first step to the last. ``step_tokens``: the most that one step computes. ``scored``: pairs
    of id and log probability in place of ids. ``graphs``: by captured steps."""
    made = engine_of(model, step_tokens, graphs=graphs)
    said: list[list[Any]] = [[] for _ in prompts]
    for seq, prompt in enumerate(prompts):
        made.apply(verbs.Open(0, seq, b"", prompt))
        made.apply(verbs.Generate(0, seq, sampling, verbs.TokenLimits(new)))
    start = time.perf_counter()
    for row in rows_of(made):
        scores = [one.logprob for one in row.logprobs or ()]
        said[row.seq] += zip(row.tokens, scores, strict=True) if scored else row.tokens
    return said, time.perf_counter() - start


def rows_of(engine: Engine) -> Iterator[verbs.Row]:
    """Run steps until all sequences end, and yield their rows. Raises ``SequenceFailed``."""
    while (step := engine.step()) is not None:
        for row in step.rows:
            if row.finish is verbs.Finish.ERROR:
                raise SequenceFailed(row.error)
            yield row


class SequenceFailed(Exception):
    """A sequence ended with an error, which is the text."""


def engine_of(
    model: LoadedModel,
    step_tokens: int,
    blocks: int = 512,
    context: int = 2048,
    rows: int = 64,
    *,
    graphs: bool = False,
) -> Engine:
    """An engine without host and disk tier, with ``blocks`` blocks of 16 tokens. ``context``: the most tokens
    of a sequence; ``rows``: the most rows of a step; ``graphs``: its steps are captured, as those of a
    server."""
    size = 16
    groups = model.kv_groups(size)
    device = model.decoder.device
    settings = SchedulerSettings(
        blocks=blocks,
        vocab_size=model.config.vocab_size,
        max_context=context,
        max_step_tokens=step_tokens,
        max_sequences=min(rows, step_tokens),
        depth=2 if device.type == "cuda" else 1,
    )
    pool, hasher = BlockPool(blocks), BlockHasher(b"0" * 32, size)
    scheduler = Scheduler(settings, pool, hasher, model.namespace(groups))
    arenas = [DeviceArena(group, blocks, device) for group in groups]
    most = StepSize(step_tokens, settings.max_sequences)
    capacity = Capacity(settings.depth * most.rows, -(-context // size), *most)
    runner = TorchRunner(model.decoder, *arenas, capacity=capacity)
    if graphs:
        runner.capture(EngineSettings(model="").captures(most))
    return Engine(scheduler, runner)
