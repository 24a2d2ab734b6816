"""Parts ``graphs``, ``steps``, ``contexts``, ``beside``, ``memory`` and ``serving``: whole steps of the
engine, eager and by CUDA graphs, on random weights of real models' shapes.

A decode step is compared with its floor: the time to read weights and KV once at the machine's copy rate.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles

import numpy as np
import torch

from ...kernels.backends import Needs, choose
from ...kernels.device import device_of
from ...kvstore.arena import DeviceArena
from ...kvstore.block_mover import BlockMover
from ...kvstore.host.slots import SlotMemory, make_memory
from ...runtime import verbs
from ...runtime.build import load_engine
from ...runtime.engine import Engine
from ...runtime.link.heartbeat import Liveness
from ...runtime.model.load import LoadedModel, load_model
from ...runtime.settings import EngineSettings
from .engine import engine_of, generate, rows_of
from .measure import Bench, Figure, copy_rate, figure, median_us, note
from .models import COMMON, SHAPES, TOY, drawn

BLOCK = 16
FLOORS = {("qwen3-8b", 1): 85.0, ("qwen3-0.6b", 1): 50.0}
LONG_FLOOR = 75.0
IDLE = {"qwen3-8b": 2.0, "qwen3-0.6b": 10.0}


def graphs(bench: Bench) -> list[Figure]:
    """Count the replies of the pocket model that are equal eager, by graphs and on the reference: greedy and
    sampled, sixteen at once in chunks of 64 tokens."""
    prompts = [
        [(7 * seed + 13 * at) % 900 + 20 for at in range(5 + 11 * seed)] for seed in range(bench.size(16, 2))
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    loaded, lines = load_model("pocket", str(bench.device), "float32"), []
    needs = Needs(loaded.decoder.dtype, [(loaded.config.head_dim, BLOCK)])
    for name, sampling in (
        ("greedy", verbs.Sampling()),
        ("top-p", verbs.Sampling(temperature=0.8, top_p=0.9, seed=3)),
    ):
        said = {}
        for way, kernels, captured in (
            ("reference", "reference", False),
            ("eager", "triton", False),
            ("graph", "triton", True),
        ):
            computing = loaded.decoder.computing_by(choose(kernels, bench.device, needs).kernels)
            model, new = replace(loaded, decoder=computing), bench.size(32, 2)
            said[way], _ = generate(model, prompts, new, bench.size(64, 8), sampling, graphs=captured)
        for one, other in (("graph", "eager"), ("eager", "reference")):
            equal = sum(a == b for a, b in zip(said[one], said[other], strict=True))
            lines.append(figure(f"{name}: replies equal, {one} and {other}", equal, "replies", len(prompts)))
    return lines


def steps(bench: Bench) -> list[Figure]:
    """Time decode steps of 1 to 256 rows of 1k tokens, eager and by graphs, with what the host does and the
    device's idle time."""
    lines = []
    for name in ("qwen3-0.6b", "qwen3-8b"):
        model = _model(bench, name)
        for rows in (1, 16, 64, 256) if not bench.rehearsal else (1, 2):
            for captured in (False, True):
                found = _decode(bench, name, model, rows, bench.size(1024, 20), captured)
                bench.tell(found)
                lines += found
        del model
        _emptied(bench)
    return lines


def contexts(bench: Bench) -> list[Figure]:
    """Time decode steps of 64 rows of 8k tokens, and a row of 32k tokens beside a chunk of 512."""
    lines = []
    for name in ("qwen3-0.6b", "qwen3-8b"):
        model = _model(bench, name)
        rows, context = bench.size(64, 2), bench.size(8192, 40)
        if _fits(bench, model, rows * (context + 200)):
            lines += _decode(bench, name, model, rows, context, True, goal=LONG_FLOOR)
        else:
            lines.append(note(f"{name}: {rows} rows of {context}", "its KV does not fit this device"))
        if name == "qwen3-0.6b":
            lines += _beside_a_chunk(bench, model)
        bench.tell(lines)
        del model
        _emptied(bench)
    return lines


def beside(bench: Bench) -> list[Figure]:
    """Time steps of 64 decoding rows while 10 GB are saved, and while they are loaded; and the rate of these
    copies as a share of that of one from pinned memory."""
    model = _model(bench, "qwen3-0.6b")
    made = _Decoding.of(model, bench.size(64, 1), bench.size(1024, 20), graphs=True)
    groups = model.kv_groups(BLOCK)
    arenas = [DeviceArena(group, bench.size(1024, 4), bench.device) for group in groups]
    size = sum(group.block_bytes for group in groups)
    fd = make_memory(bench.size(10 << 30, 8 * size + (1 << 16)))
    memory = SlotMemory(fd, bytes(16), size)
    os.close(fd)
    slots = memory.slots
    mover = BlockMover(arenas, memory, model.decoder.kernels.copy_pieces, device_of(bench.device))
    mover.registration.begin(lambda done: None)
    host = torch.zeros(
        bench.size(1 << 28, 1 << 16), dtype=torch.uint8, pin_memory=bench.device.type == "cuda"
    )
    target = torch.empty_like(host, device=bench.device)
    link = len(host) / median_us(bench, [lambda: target.copy_(host)], captured=False)
    alone, lines = made.times(bench.size(100, 2)), []
    for name in ("saves", "loads"):
        some = [(at % arenas[0].blocks, at, BLOCK) for at in range(slots)]
        each = max(1, slots // bench.size(100, 2))
        began, during = time.perf_counter(), []
        moving = None
        for at in range(0, slots, each):
            part = some[at : at + each]
            loads = [(slot, block) for block, slot, _ in part]
            with device_of(bench.device).active():
                moving = mover.move(part, []) if name == "saves" else mover.move([], loads)
            during += made.times(1)
        if moving is not None:
            moving.done(wait=True)
        rate = slots * size / (time.perf_counter() - began) / 1e6
        slower = 100 * (median(during) / median(alone) - 1)
        lines += [
            figure(f"{name} beside decode, of the link", 100 * rate / link, "%", 85.0),
            figure(f"decode beside {name}, slower by", slower, "%", 5.0, "lower"),
            figure(f"decode beside {name}, p99", _p99(during) / 1e3, "ms"),
        ]
    lines.append(figure("decode alone, p99", _p99(alone) / 1e3, "ms"))
    mover.close()
    return lines


def memory(bench: Bench) -> list[Figure]:
    """Compare the memory that an engine of the pocket model foresaw with what it took in its largest steps."""
    settings = EngineSettings(model="pocket", device=str(bench.device), kernels="auto")
    loaded = load_engine(settings, lambda done, what: None, Liveness())
    if bench.device.type != "cuda":
        return [note("memory", "a CPU has none of its own")]
    most = loaded.hello.max_sequences
    for seq in range(most):
        tokens = [(seq + at) % 900 + 20 for at in range(100)]
        loaded.engine.apply(
            verbs.Generate(seq, seq, WARM, verbs.TokenLimits(4), tokens=tokens, opening=verbs.Opening())
        )
    assert isinstance(loaded.engine, Engine)
    for _ in rows_of(loaded.engine):
        pass
    total = torch.cuda.get_device_properties(bench.device).total_memory
    used = 100 * torch.cuda.max_memory_reserved() / (settings.memory_utilization * total)
    return [note("foreseen", loaded.hello.memory), figure("taken ÷ allowed", used, "%", 100.0, "lower")]


def serving(bench: Bench) -> list[Figure]:
    """Serve 64 sessions of different lengths, some sampled, eager and by graphs."""
    model, lines = _model(bench, "qwen3-0.6b"), []
    random = np.random.default_rng(0)
    work = [
        (
            int(random.integers(*((200, 4000) if not bench.rehearsal else (5, 20)))),
            int(random.integers(*((100, 400) if not bench.rehearsal else (2, 4)))),
        )
        for _ in range(bench.size(64, 3))
    ]
    blocks = sum(-(-(prompt + new) // BLOCK) + 1 for prompt, new in work) + 64
    for name, captured in (("eager", False), ("graph", True)):
        engine = engine_of(model, bench.size(2048, 8), blocks, bench.size(8192, 64), graphs=captured)
        for seq, (prompt, new) in enumerate(work):
            how = WARM if seq % 4 == 0 else verbs.Sampling()
            engine.apply(verbs.Open(0, seq, b"", random.integers(0, 200, prompt).tolist()))
            engine.apply(verbs.Generate(0, seq, how, verbs.TokenLimits(new, min_tokens=new)))
        began, heard, gaps, firsts, count = (
            time.perf_counter(),
            dict[int, float](),
            list[float](),
            list[float](),
            0,
        )
        for row in rows_of(engine):
            now = time.perf_counter()
            count += len(row.tokens)
            if row.seq in heard:
                gaps.append((now - heard[row.seq]) * 1e6)
            else:
                firsts.append((now - began) * 1e6)
            heard[row.seq] = now
        lines += [
            figure(f"{name}: output", count / (time.perf_counter() - began), "tok/s"),
            figure(f"{name}: TTFT p50", median(firsts) / 1e3, "ms"),
            figure(f"{name}: ITL p50", median(gaps) / 1e3, "ms"),
            figure(f"{name}: ITL p99", _p99(gaps) / 1e3, "ms"),
        ]
    return lines


WARM = verbs.Sampling(temperature=0.8, top_p=0.9, seed=3)


@dataclass(slots=True)
class _Decoding:
    """An engine in which ``rows`` sequences decode."""

    engine: Engine
    rows: int

    @classmethod
    def of(cls, model: LoadedModel, rows: int, context: int, *, graphs: bool) -> _Decoding:
        """Prompts of ``context`` tokens are computed first."""
        new = 400
        blocks = rows * (math.ceil((context + new) / BLOCK) + 1) + 64
        engine = engine_of(model, max(512, rows), blocks, context + new, rows=rows, graphs=graphs)
        for seq in range(rows):
            prompt = [(7 * seq + at) % 200 for at in range(context)]
            engine.apply(verbs.Open(0, seq, b"", prompt))
            engine.apply(verbs.Generate(0, seq, verbs.Sampling(), verbs.TokenLimits(new, min_tokens=new)))
        made = cls(engine, rows)
        while made.step() < rows:
            pass
        return made

    def step(self) -> int:
        """Make a step. Returns how many sequences have a token of it."""
        step = self.engine.step()
        assert step is not None
        return len(step.rows)

    def times(self, count: int) -> list[float]:
        """The microseconds of the next ``count`` steps, each."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            self.step()
            taken.append((time.perf_counter() - began) * 1e6)
        return taken


def _decode(
    bench: Bench,
    name: str,
    model: LoadedModel,
    rows: int,
    context: int,
    captured: bool,
    goal: float | None = None,
) -> list[Figure]:
    made, count = _Decoding.of(model, rows, context, graphs=captured), bench.size(100, 2)
    made.times(bench.size(20, 1))
    before = made.engine.statistics()
    micros = median(made.times(count))
    after = made.engine.statistics()
    kv = sum(group.block_bytes for group in model.kv_groups(BLOCK)) / BLOCK * rows * context
    reading = (model.parameters * model.decoder.dtype.itemsize + kv) / copy_rate(bench)
    way = f"{name}: {rows} rows of {context}, {'graph' if captured else 'eager'}"
    wanted = (goal or FLOORS.get((name, rows))) if captured else None
    lines = [
        figure(f"{way}: a step", micros, "us"),
        figure(f"{way}: floor ÷ a step", 100 * reading / micros, "%", wanted),
    ]
    for part in ("plan", "launch", "commit"):
        spent = after[f"t_{part}"] - before[f"t_{part}"]
        lines.append(figure(f"{way}: {part}", spent / count * 1e6, "us"))
    return [*lines, *_traced(bench, way, made, IDLE[name] if captured else None)]


def _traced(bench: Bench, way: str, made: _Decoding, goal: float | None) -> list[Figure]:
    """Kernels of a step, and the share of the time in which none runs, by torch's profiler."""
    if bench.device.type != "cuda":
        return []
    count = 8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        made.times(count)
        torch.cuda.synchronize()
    kernels = sorted(
        (one.time_range.start, one.time_range.end) for one in trace.events() if one.time_range.end
    )
    busy = sum(end - begin for begin, end in _merged(kernels))
    whole = kernels[-1][1] - kernels[0][0]
    return [
        figure(f"{way}: kernels of a step", len(kernels) / count, ""),
        figure(f"{way}: device idle", 100 * (1 - busy / whole), "%", goal, "lower"),
    ]


def _merged(spans: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    begin, end = spans[0]
    for first, last in spans[1:]:
        if first > end:
            yield begin, end
            begin = first
        end = max(end, last)
    yield begin, end


def _beside_a_chunk(bench: Bench, model: LoadedModel) -> list[Figure]:
    long, chunk = bench.size(32_768, 60), bench.size(512, 16)
    if not _fits(bench, model, long + 4 * chunk + 1000):
        return [note("a long row beside a chunk", "its KV does not fit this device")]
    blocks, times = (long + 40 * chunk + 1000) // BLOCK, {}
    for name in ("alone", "beside"):
        engine = engine_of(model, chunk + 1, blocks, long + 1000, graphs=False)
        if name == "beside":
            engine.apply(verbs.Open(0, 0, b"", [at % 200 for at in range(long)]))
            engine.apply(verbs.Generate(0, 0, verbs.Sampling(), verbs.TokenLimits(300, min_tokens=300)))
            while (step := engine.step()) is not None and not step.rows:
                pass
        engine.apply(verbs.Open(0, 1, b"", [at % 190 for at in range(bench.size(20, 2) * chunk)]))
        engine.apply(verbs.Generate(0, 1, verbs.Sampling(), verbs.TokenLimits(1)))
        times[name] = median(_Decoding(engine, 1).times(bench.size(15, 1)))
    return [
        figure(f"a chunk of {chunk} alone", times["alone"], "us"),
        figure(f"beside a row of {long}", times["beside"], "us"),
    ]


def _model(bench: Bench, name: str) -> LoadedModel:
    shape = {**COMMON, **SHAPES[name], **(TOY if bench.rehearsal else {}), "max_position_embeddings": 65_536}
    return drawn(shape, bench.device, torch.float32 if bench.rehearsal else torch.bfloat16)


def _fits(bench: Bench, model: LoadedModel, tokens: int) -> bool:
    if bench.device.type != "cuda":
        return True
    each = sum(group.block_bytes for group in model.kv_groups(BLOCK)) / BLOCK
    return tokens * each < 0.85 * torch.cuda.mem_get_info()[0]


def _emptied(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def _p99(times: list[float]) -> float:
    return quantiles(times, n=100)[-1] if len(times) > 1 else times[0]
