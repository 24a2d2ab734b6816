"""Parts ``graphs``, ``serving`` and ``memory``: mixed turns through the whole engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.backends import Needs, choose
from ...runtime.build import load_engine
from ...runtime.engine import Engine
from ...runtime.link.heartbeat import Liveness
from ...runtime.model.load import load_model
from ...runtime.settings import EngineSettings
from ...runtime.verbs import Grammar, GrammarKind, Sampling
from ..harness.traffic import LoadPoint, Request, ResourceUsage
from ..toys import make_toy
from .engine import BLOCK, Turn, captured, generate, parts_of, rows_of
from .measure import Bench, Figure, figure, note
from .models import drawn, shape_of

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}}'
MIXED = (
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, seed=3),
    Sampling(logprobs=5),
    Sampling(temperature=0.8, seed=4, grammar=Grammar(GrammarKind.JSON, SCHEMA, 64)),
    Sampling(temperature=1.0, min_p=0.05, seed=5, repetition_penalty=1.1, frequency_penalty=0.1),
)
"""How turns are sampled, one after the other."""

LARGE = (*MIXED[:3], MIXED[4], Sampling(temperature=1.0, typical_p=0.9, logprobs=20))
NAMES = ("architectures", "model_type")

WAYS = {
    "reference": ("reference", False),
    "eager": ("triton", False),
    "graph": ("triton", True),
    "invariant": ("triton-invariant", False),
}
"""Backend, and whether by graphs."""


def graphs(bench: Bench) -> list[Figure]:
    """Count the pocket model's replies that have the same tokens as those of the reference on the CPU: sixteen
    at once, in chunks of 64 tokens, some sampled, some with a grammar, penalties or log probabilities."""
    count, new, chunk = bench.size(16, 5), bench.size(32, 3), bench.size(64, 8)
    prompts = [[(7 * seed + 13 * at) % 900 + 20 for at in range(5 + 11 * seed)] for seed in range(count)]
    torch.backends.cuda.matmul.allow_tf32 = False
    expected, lines = list[list[int]](), list[Figure]()
    for way, (backend, by_graphs) in {"": ("reference", False), **WAYS}.items():
        loaded = load_model("pocket", str(bench.device) if way else "cpu", "float32")
        needs = Needs(loaded.decoder.dtype, [(loaded.config.head_dim, BLOCK)])
        kernels = choose(backend, loaded.decoder.device, needs).kernels
        model = replace(loaded, decoder=loaded.decoder.computing_by(kernels))
        said, told = generate(model, prompts, new, chunk, MIXED, graphs=by_graphs)
        if not way:
            expected = said
            continue
        equal = sum(one == other for one, other in zip(said, expected, strict=True))
        lines += [*told, figure(f"{way}: replies equal to the CPU's, of {count}", equal, "replies", count)]
        bench.tell(lines)
    return lines


def serving(bench: Bench) -> list[Figure]:
    """Serve 64 sessions that begin together, with prompts of 200 to 4,000 tokens and replies of 100 to 400,
    eager and by graphs."""
    model, lines = drawn(bench, "qwen3-0.6b"), list[Figure]()
    random, count = np.random.default_rng(0), bench.size(64, 5)
    lengths = random.integers(bench.size(200, 3), bench.size(4000, 20), count).tolist()
    replies = random.integers(bench.size(100, 2), bench.size(400, 4), count).tolist()
    prompts = [random.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    work = [(prompts[at], MIXED[at % len(MIXED)], replies[at]) for at in range(count)]
    blocks = sum(-(-(length + new) // BLOCK) + 1 for length, new in zip(lengths, replies, strict=True)) + 64
    generate(model, [prompt[:64] for prompt in prompts], 2, bench.size(512, 16), MIXED)  # compiles
    for way in ("eager", "graph"):
        scheduler, runner = parts_of(model, bench.size(8192, 16), blocks, bench.size(4480, 64))
        if way == "graph":
            captured(model, runner, scheduler.settings)
        told = _served(Engine(scheduler, runner), work)
        lines.append(figure(f"{way}: output", told["output_throughput"], "tok/s"))
        for name in ("ttft", "itl"):
            lines.append(figure(f"{way}: {name} p50", told[f"median_{name}_ms"], "ms"))
            lines.append(figure(f"{way}: {name} p99", told[f"p99_{name}_ms"], "ms"))
        bench.tell(lines)
    return lines


def _served(engine: Engine, work: Sequence[Turn]) -> dict[str, Any]:
    """The usual serving figures of these turns."""
    began = time.monotonic()
    requests = [Request(began) for _ in work]
    for row in rows_of(engine, work):
        one, now = requests[row.seq], time.monotonic()
        one.events += [now] if row.tokens else []
        one.tokens += len(row.tokens)
        one.ended = now
    used = ResourceUsage(time.monotonic() - began, 0.0, 0.0, 0.0)
    return LoadPoint("", None, len(work), requests, used).told()


def memory(bench: Bench) -> list[Figure]:
    """Compare the memory that an engine of the Qwen3-0.6B shape foresaw with what its largest steps took."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {name: value for name, value in shape_of(bench, "qwen3-0.6b").items() if name not in NAMES}
        make_toy("toy-50m", Path(folder), dtype="bfloat16", **shape)
        settings = EngineSettings(model=folder, device=str(bench.device))
        loaded = load_engine(settings, lambda done, what: None, Liveness())
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine, hello, random = loaded.engine, loaded.hello, np.random.default_rng(0)
    assert isinstance(engine, Engine)
    scored = Sampling(prompt_logprobs=20)
    work = [(random.integers(0, hello.vocab_size, bench.size(8192, 40)).tolist(), scored, 2)]
    for at in range(bench.size(hello.max_sequences, 4)):
        prompt = random.integers(0, hello.vocab_size, bench.size(200, 4)).tolist()
        work.append((prompt, LARGE[at % len(LARGE)], bench.size(64, 2)))
    said = sum(len(row.tokens) for row in rows_of(engine, work))
    lines = [
        note("foreseen", hello.memory or "a CPU has no memory of its own"),
        figure("said", said, "tokens"),
    ]
    if bench.device.type == "cuda":
        stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_reserved()
        taken = total - free + peak - torch.cuda.memory_reserved()
        lines += [
            figure("torch allocated at most", torch.cuda.max_memory_allocated() / 2**30, "GiB"),
            figure("torch reserved at most", peak / 2**30, "GiB"),
            figure("device's memory in use at most", taken / 2**30, "GiB"),
            figure(
                "in use ÷ allowed", 100 * taken / (settings.memory_utilization * total), "%", 100, "lower"
            ),
            figure("allocations that found no memory", stats["num_alloc_retries"], "", 0, "lower"),
        ]
    return lines
