"""Parts ``steps``, ``contexts`` and ``beside``: whole steps of the engine, eager and by CUDA graphs, on random
weights of real models' shapes.

A decode step is compared with its floor: the time to read weights and KV once at the machine's copy rate.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ...kernels.device import device_of
from ...kvstore.arena import DeviceArena
from ...kvstore.block_mover import BlockMover, Moving
from ...kvstore.host.slots import SlotMemory, make_memory
from ...runtime.engine import Engine
from ...runtime.model.load import LoadedModel
from ...runtime.plan import Handle, Plan, Runner
from ...runtime.verbs import Close, Generate, Opening, Sampling, TokenLimits
from ..harness.talker import apply, rest
from ..report import percentile
from .engine import BLOCK, captured, parts_of
from .measure import Bench, Figure, copy_rate, figure, median_us
from .models import drawn

ROWS = (1, 16, 64, 256)
CONTEXT, LONG, LONGEST = 1024, 8192, 32_768
NEW, MORE = 200, 1000
"""How many tokens each row generates: some come while others' prompts are computed. ``MORE``: beside copies."""

FLOOR = {("qwen3-8b", 1, CONTEXT): 85.0, ("qwen3-8b", 64, LONG): 75.0, ("qwen3-0.6b", 1, CONTEXT): 50.0}
"""By model, rows and context, how much of a step by graphs the floor is to be, in percent."""

IDLE = {"qwen3-8b": 2.0, "qwen3-0.6b": 10.0}
"""By model, how much of the time the device may wait for the host, in percent."""

RESTORE, SLOWER = 85.0, 5.0
MOST_OF_FREE = 0.85
FULL = 1.5
"""Copies beside decode are enqueued so many times as fast as the link makes them, so that it is never idle."""


def steps(bench: Bench) -> list[Figure]:
    """Time decode steps of 1 to 256 rows of 1k tokens, eager and by graphs, with what the host does and how
    long the device is idle."""
    lines, context = list[Figure](), bench.size(CONTEXT, 20)
    for name in IDLE:
        made = Decoding(bench, drawn(bench, name), bench.size(max(ROWS), 2), context)
        for way in ("eager", "graph"):
            if way == "graph":
                lines += [one | {"name": f"{name}: {one['name']}"} for one in made.capture()]
            for rows in ROWS if not bench.rehearsal else (1, 2):
                lines += made.figures(name, rows, context, way)
                bench.tell(lines)
        del made
        _free(bench)
    return lines


def contexts(bench: Bench) -> list[Figure]:
    """Time steps by graphs of 64 rows of 8k tokens, or as many as fit, and steps of a chunk of 512 tokens alone
    and beside a row of 32k."""
    lines, context = list[Figure](), bench.size(LONG, 40)
    for name in IDLE:
        model = drawn(bench, name)
        rows = bench.size(64, 2)
        while not _fits(bench, model, rows, context):
            rows //= 2
        made = Decoding(bench, model, rows, context)
        made.capture()
        lines += made.figures(name, rows, context, "graph")
        bench.tell(lines)
        del made
        _free(bench)
        lines += _beside_a_chunk(bench, name, model)
        bench.tell(lines)
        del model
        _free(bench)
    return lines


def beside(bench: Bench) -> list[Figure]:
    """Time steps of 64 decoding rows while 10 GB are saved, and while they are loaded; and the rate of these
    copies, as a share of the link's."""
    model, rows, context = drawn(bench, "qwen3-0.6b"), bench.size(64, 2), bench.size(CONTEXT, 20)
    groups, blocks = model.kv_groups(BLOCK), bench.size(1024, 4)
    size = groups[0].block_bytes
    fd = make_memory(bench.size(10 << 30, 8 * size + (1 << 16)))
    memory = SlotMemory(fd, bytes(16), size)
    os.close(fd)
    arena = DeviceArena(groups[0], _blocks(rows, context, MORE) * len(groups) + blocks, bench.device)
    mover = BlockMover(arena, memory, model.decoder.kernels.copy_pieces)
    mover.registration.begin()
    link = _link(bench, memory)
    made = Decoding(bench, model, rows, context, arena, mover)
    made.capture()
    spare = made.engine.scheduler.pool.allocate(blocks).blocks
    pairs = [(spare[at % blocks], at) for at in np.random.default_rng(0).permutation(memory.slots).tolist()]
    made.begin(rows, context)
    alone = made.times(bench.size(100, 2))
    lines = [figure("link, pinned host to device", link / 1e3, "GB/s"), *_latencies("decode alone", alone)]
    each = max(1, int(FULL * link * median(alone) / size))
    for name in ("saves", "loads"):
        made.begin(rows, context)
        during, took, hashed = _copying(made, mover, pairs, name == "loads", each)
        rate, slower = len(pairs) * size / took, 100 * (median(during) / median(alone) - 1)
        goal = RESTORE if name == "loads" else None
        lines += [
            figure(f"{name} beside decode, of the link", 100 * rate / link, "%", goal),
            figure(f"decode beside {name}, slower by", slower, "%", SLOWER, "lower"),
            *_latencies(f"decode beside {name}", during),
        ]
        if name == "saves":
            lines.append(figure("saves beside decode, copied and hashed", hashed / took, "x", better="lower"))
        bench.tell(lines)
    mover.close()
    return lines


def _copying(
    made: Decoding, mover: BlockMover, pairs: list[tuple[int, int]], up: bool, each: int
) -> tuple[list[float], float, float]:
    """Make steps while these pairs (block, slot) are copied, ``each`` of them more at every step. Returns the
    microseconds of each step, those until all is copied, and those until it is hashed, too."""
    during, moves, began = list[float](), deque[Moving](), time.perf_counter()
    parts = deque(pairs[first : first + each] for first in range(0, len(pairs), each))
    while parts or (mover.busy and len(during) < MORE // 2):
        some = parts.popleft() if parts else []
        loads = [(slot, block) for block, slot in some if up]
        moving = mover.move([] if up else [(block, slot, BLOCK) for block, slot in some], loads)
        moves += [] if moving is None else [moving]
        during += made.times(1)
        while moves and moves[0].done():
            moves.popleft()
    while mover.busy:
        time.sleep(0)
    took = time.perf_counter() - began
    assert all(moving.done(wait=True) for moving in moves)
    return during, took * 1e6, (time.perf_counter() - began) * 1e6


def _link(bench: Bench, memory: SlotMemory) -> float:
    """The rate of one copy from the registered memory to the device, in bytes per microsecond."""
    host = torch.frombuffer(memory.map, dtype=torch.uint8)[: memory.stride * memory.slots // 4]
    target = torch.empty_like(host, device=bench.device)
    return len(host) / median_us(bench, [lambda: target.copy_(host, non_blocking=True)], captured=False)


class Decoding:
    """An engine with room for ``rows`` sequences of ``context`` tokens that decode. ``arena``, ``mover``: as
    for `parts_of`."""

    def __init__(
        self,
        bench: Bench,
        model: LoadedModel,
        rows: int,
        context: int,
        arena: DeviceArena | None = None,
        mover: BlockMover | None = None,
    ) -> None:
        self._bench, self._model = bench, model
        self._new = NEW if mover is None else MORE
        blocks = _blocks(rows, context, self._new) * len(model.kv_groups(BLOCK))
        blocks = blocks if arena is None else len(arena.kv)
        most = bench.size(8192, 16), blocks, context + self._new, rows
        scheduler, self._runner = parts_of(model, *most, arena, mover)
        self._timed = Timed(self._runner, bench.device)
        self.engine = Engine(scheduler, self._timed)
        self._seqs = range(0)

    def capture(self) -> list[Figure]:
        """From now on steps are replayed. Returns what `captured` tells."""
        return captured(self._model, self._runner, self.engine.scheduler.settings)

    def begin(self, rows: int, context: int) -> float:
        """Close all sequences, and begin others; return when all of them decode. Returns how many tokens of
        prompts it computed per second: those that are not cached."""
        for seq in self._seqs:
            apply(self.engine, Close(0, seq))
        rest(self.engine)
        self._seqs = range(self._seqs.stop, self._seqs.stop + rows)
        counters, began = self.engine.scheduler.counters, time.perf_counter()
        before = counters.prefilled
        for at, seq in enumerate(self._seqs):
            apply(self.engine, _turn(self._model, seq, at, context, self._new))
        while (step := self.engine.step()) is None or len(step.rows) < rows:
            assert step is not None, "they ended before all decoded"
        return (counters.prefilled - before) / (time.perf_counter() - began)

    def times(self, count: int) -> list[float]:
        """The microseconds of each of the next ``count`` steps."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            assert self.engine.step() is not None, "they have ended"
            taken.append((time.perf_counter() - began) * 1e6)
        return taken

    def figures(self, name: str, rows: int, context: int, way: str) -> list[Figure]:
        """Time the steps of so many rows with so long contexts. ``way``: ``eager`` or ``graph``."""
        what, count = f"{name}: {rows} x {context}, {way}", self._bench.size(60, 2)
        prefill = self.begin(rows, context)
        self.times(self._bench.size(10, 1))
        self._timed.spans.clear()
        before = self.engine.statistics()
        micros = median(self.times(count))
        after = self.engine.statistics()
        floor = 100 * self._floor(rows, context) / micros
        goal = FLOOR.get((name, rows, context)) if way == "graph" else None
        lines = [
            figure(f"{what}: prefill before", prefill, "tok/s"),
            figure(f"{what}: a step", micros, "us"),
            figure(f"{what}: floor ÷ a step", floor, "%", goal),
        ]
        for part in ("plan", "launch", "commit"):
            spent = (after[f"t_{part}"] - before[f"t_{part}"]) / count
            lines.append(figure(f"{what}: {part}", spent * 1e6, "us"))
        if self._timed.spans:
            goal = IDLE[name] if way == "graph" else None
            waits = 100 * self._timed.waits()
            lines.append(figure(f"{what}: device waits for the host", waits, "%", goal, "lower"))
        launches, busy = self._traced(self._bench.size(8, 1))
        lines.append(figure(f"{what}: kernels and copies of a step", launches, ""))
        lines.append(figure(f"{what}: none of them runs", 100 * (1 - busy / micros), "%", better="lower"))
        return lines

    def _floor(self, rows: int, context: int) -> float:
        """Microseconds to read weights and KV once. An embedding that is not the head is not read."""
        config, parameters = self._model.config, self._model.parameters
        if not config.tied_head:
            parameters -= config.vocab_size * config.hidden_size
        kv = sum(group.block_bytes for group in self._model.kv_groups(BLOCK)) // BLOCK * rows * context
        return (parameters * self._model.decoder.dtype.itemsize + kv) / copy_rate(self._bench)

    def _traced(self, count: int) -> tuple[float, float]:
        """How many kernels and copies a step has, and the microseconds in which one of them runs, by torch's
        profiler in ``count`` steps."""
        kind = self._bench.device.type.upper()
        with profile(activities=[getattr(ProfilerActivity, kind)]) as trace:
            self.times(count)
            device_of(self._bench.device).synchronize()
        events = [one for one in trace.events() or () if one.device_type.name == kind]
        spans = sorted((one.time_range.start, one.time_range.end) for one in events)
        busy, until = 0.0, 0.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        return len(spans) / count, busy / count


class Timed:
    """A runner that records an event before and behind each step of ``runner``, if ``device`` is a GPU: in
    ``spans``."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self.spans: list[tuple[Any, Any]] = []

    def launch(self, plan: Plan) -> Handle:
        """As the runner's."""
        if self._device.type != "cuda":
            return self._runner.launch(plan)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        handle = self._runner.launch(plan)
        end.record()
        self.spans.append((begin, end))
        return handle

    def waits(self) -> float:
        """The share of the time in which the device had done a step, and the next one was not launched yet."""
        torch.cuda.synchronize()
        gaps = sum(end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(self.spans))
        return float(gaps / self.spans[0][0].elapsed_time(self.spans[-1][1]))


def _turn(model: LoadedModel, seq: int, seed: int, context: int, new: int) -> Generate:
    """The verb that begins a sequence with random tokens, and generates."""
    prompt = np.random.default_rng(seed).integers(0, model.config.vocab_size, context).tolist()
    return Generate(seq, seq, Sampling(), TokenLimits(new), tokens=prompt, opening=Opening())


def _beside_a_chunk(bench: Bench, name: str, model: LoadedModel) -> list[Figure]:
    long, chunk, count = bench.size(LONGEST, 60), bench.size(512, 15), bench.size(16, 2)
    prompt = (count + 4) * chunk
    blocks = -(-(long + NEW + 2 * prompt) // BLOCK) + 64
    engine, took = Engine(*parts_of(model, chunk + 1, blocks, long + NEW, 2)), list[float]()
    for seq, others in enumerate((False, True)):
        if others:
            apply(engine, _turn(model, 9, 9, long, NEW))
            while (step := engine.step()) is None or not step.rows:
                pass
        apply(engine, _turn(model, seq, seq, prompt, 1))
        engine.step()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - began) * 1e6)
        took.append(median(times))
        if not others:
            rest(engine)
    what = f"{name}: chunks of {chunk}"
    return [
        figure(f"{what} alone, a step", took[0], "us"),
        figure(f"{what} beside a row of {long}, a step", took[1], "us"),
        figure(f"{what} beside a row of {long}, against alone", took[1] / took[0], "x", better="lower"),
    ]


def _latencies(name: str, times: Sequence[float]) -> list[Figure]:
    shares = ((0.5, "p50"), (0.99, "p99"))
    return [figure(f"{name}, a step, {word}", percentile(times, share), "us") for share, word in shares]


def _blocks(rows: int, context: int, new: int) -> int:
    return rows * (-(-(context + new) // BLOCK) + 1) + 64


def _fits(bench: Bench, model: LoadedModel, rows: int, context: int) -> bool:
    if bench.device.type != "cuda":
        return True
    size = sum(group.block_bytes for group in model.kv_groups(BLOCK))  # a block of each
    return _blocks(rows, context, NEW) * size < MOST_OF_FREE * torch.cuda.mem_get_info()[0]


def _free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
