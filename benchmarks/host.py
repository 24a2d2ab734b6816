"""``holdfast bench steps --host``: what a step costs the host, beside the device's work.

The engine with its real scheduler, runner and sampler, on kernels that compute nothing, from sampled ids to
the framed message. Rows decode under fair shares, half of them for each of two tenants. A figure is the median
time of a step, in microseconds and as a ratio to a loop of fixed work in the same run; ``--before CHECKOUT``
runs an older working tree of this repository too, alternating with this one, and gives the ratio of the two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..kernels.batch import PagedBatch
from ..kernels.device import CpuDevice, Graph
from ..kernels.interface import Kernels
from ..kernels.reference import backend
from ..kvstore.arena import DeviceArena
from ..kvstore.groups import HeadLayout, KVGroup
from ..kvstore.keys import BlockHasher
from ..kvstore.pool import BlockPool
from ..runtime.engine import Engine
from ..runtime.execution.batch import Capacity
from ..runtime.execution.runner import TorchRunner
from ..runtime.grammar.llguidance import Compiler, Matchers
from ..runtime.link.messages import frame
from ..runtime.model.config import read_config
from ..runtime.model.folder import find_model
from ..runtime.scheduler.scheduler import Scheduler
from ..runtime.settings import SchedulerSettings, StepSize
from ..runtime.verbs import (
    Generate,
    Grammar,
    GrammarKind,
    Open,
    Opening,
    Sampling,
    Step,
    TokenLimits,
)
from .harness.options import CannotMeasure
from .report import Goal, show, table

ROWS = (1, 16, 64, 256)
CONTEXT = 1024
LONG = 8192
VOCAB = 512
BLOCK_TOKENS = 16
STEPS = 400
IDLE = 10_000
CASES: dict[str, tuple[int, int, int, Sampling]] = {
    **{f"{rows} rows": (rows, CONTEXT, 0, Sampling(temperature=0.7, top_p=0.9)) for rows in ROWS},
    "64 rows, greedy": (64, CONTEXT, 0, Sampling()),
    "64 rows of 8k": (64, LONG, 0, Sampling(temperature=0.7, top_p=0.9)),
    "64 rows beside 10,000 idle": (64, CONTEXT, IDLE, Sampling(temperature=0.7, top_p=0.9)),
    "64 rows with penalties": (
        64,
        CONTEXT,
        0,
        Sampling(temperature=0.7, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.1),
    ),
    "64 rows with a grammar": (
        64,
        CONTEXT,
        0,
        Sampling(temperature=0.7, top_p=0.9, grammar=Grammar(GrammarKind.REGEX, "[a-z ]*")),
    ),
}
"""Each case: rows, tokens of context, idle sequences beside, and the rows' sampling."""


class RecordingDevice(CpuDevice):
    """A device that records steps as a GPU does; a replay does nothing."""

    def capture(self, work: Callable[[], object]) -> Graph:
        """A recording of nothing."""
        return _NoGraph()


class _NoGraph:
    def replay(self) -> None:
        """Does nothing."""


class NoWork:
    """A decoder and its kernels that compute nothing: hidden states and logits are memory made before."""

    device = torch.device("cpu")
    by_slot = True
    groups = 1
    weights = SimpleNamespace(adapts=False)
    allow = count = penalize = staticmethod(lambda *_, **__: None)

    def __init__(self, ids: Tensor, vocab: int) -> None:
        """``ids``: what each row draws, int64 ``[rows]``."""
        self._hidden = torch.zeros(1 << 16, 1)
        self._logits = torch.zeros(len(ids), vocab)
        self._ids = ids

    @property
    def kernels(self) -> Kernels:
        """These kernels."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(backend, name)

    def hidden(self, ids: Tensor, batches: Sequence[PagedBatch], arena: Tensor) -> Tensor:
        """``[tokens, 1]``."""
        return self._hidden[: len(ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]``."""
        return self._logits[: len(hidden)]

    def sample(self, logits: Tensor, *_: Tensor, **__: object) -> Tensor:
        """What each row draws."""
        return self._ids[: len(logits)]

    def copy_blocks(
        self, arena: Tensor, sources: Iterable[int], targets: Iterable[int], device: object = None
    ) -> None:
        """Nothing is copied."""


def engine_of(rows: int, context: int, idle: int, *, grammar: bool = False) -> Engine:
    """An engine with room for ``rows`` rows of ``context`` tokens, and for ``idle`` short sequences. Rows draw
    their numbers; with ``grammar`` a letter, of the pocket model's vocabulary."""
    vocab, ids, compiler = VOCAB, torch.arange(max(ROWS), dtype=torch.int64), None
    if grammar:
        folder = find_model("pocket")
        config, tokenizer = read_config(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocab, compiler = config.vocab_size, Compiler(folder, config.vocab_size, config.eos_ids)
        ids = torch.full_like(ids, tokenizer.encode("a", add_special_tokens=False).ids[0])
    matchers = Matchers()
    each = -(-(context + STEPS * 2) // BLOCK_TOKENS)
    blocks = rows * each + idle + 64
    settings = SchedulerSettings(
        blocks=blocks,
        vocab_size=vocab,
        max_context=each * BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        max_step_tokens=8192,
        max_sequences=max(ROWS),
        depth=2,
    )
    work = NoWork(ids, vocab)
    arena = DeviceArena(KVGroup(0, (0,), HeadLayout(1, 1), "float32", BLOCK_TOKENS), blocks)
    capacity = Capacity(settings.depth * settings.max_sequences, each, *settings.step_size)
    runner = TorchRunner(
        work,  # type: ignore[arg-type]
        arena,
        device=RecordingDevice(),
        grammars=matchers,
        capacity=capacity,
    )
    runner.capture(StepSize(one, one) for one in ROWS)
    hasher = BlockHasher(bytes(16), BLOCK_TOKENS)
    scheduler = Scheduler(settings, BlockPool(blocks), hasher, compiler=compiler, matchers=matchers)
    return Engine(scheduler, runner)


def microseconds(rows: int, context: int, idle: int, sampling: Sampling) -> float:
    """The median time of a step in which ``rows`` rows decode."""
    engine = engine_of(rows, context, idle, grammar=sampling.grammar is not None)
    random = np.random.default_rng(0)
    for seq in range(idle):
        engine.apply(Open(seq, rows + seq, b"", random.integers(0, VOCAB, 8).tolist()))
    while engine.step() is not None or not engine.idle:
        pass
    for seq in range(rows):
        tokens = random.integers(0, VOCAB, context).tolist()
        salt = b"other" if seq % 2 else b""
        engine.apply(
            Generate(seq, seq, sampling, TokenLimits(1 << 20), tokens=tokens, opening=Opening(salt=salt))
        )
    decoding = 0
    while decoding < 8:
        step = engine.step()
        decoding += step is not None and sent(step) == rows
    return _median(lambda: _send(engine.step()), STEPS)


def sent(step: Step) -> int:
    """How many sequences' tokens a step's message has."""
    return len(step.rows)


def _send(step: Step | None) -> None:
    assert step is not None
    frame(step)


def calibration() -> float:
    """Microseconds of a loop of fixed work, as a step has it: objects made, dicts asked, small arrays added."""
    held = {number: [number] for number in range(64)}
    array = np.arange(64)

    def loop() -> None:
        found = [held[number][0] + 1 for number in range(64)]
        assert len(found) == 64 and int((array + array)[-1]) == 126

    return _median(loop, 2000)


def _median(act: Callable[[], None], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter_ns()
        act()
        taken.append(time.perf_counter_ns() - began)
    return median(taken) / 1e3


def figures(names: Sequence[str]) -> dict[str, float]:
    """The microseconds of each case, and of the loop of fixed work."""
    torch.set_num_threads(1)
    return {"loop": calibration(), **{name: microseconds(*CASES[name]) for name in names}}


TELL = """
import json, sys
from holdfast.benchmarks import host
print(json.dumps(host.figures([name for name in sys.argv[1:] if name in host.CASES])))
"""


def measure(before: Path | None, rounds: int, seed: int, names: Sequence[str] = tuple(CASES)) -> None:
    """Measure here, and in the checkout ``before`` if there is one, alternately; print and show the result."""
    sides = {"after": Path(__file__).resolve().parent.parent, **({"before": before} if before else {})}
    told: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, root in sides.items():
            told[side].append(_told(root.resolve(), names))
    after = {name: median(one[name] for one in told["after"]) for name in ("loop", *names)}
    lines, kept = [], {}
    for name in names:
        ratio = after[name] / after["loop"]
        kept[name] = {"us": after[name], "to_loop": ratio}
        if before and name in told["before"][0]:
            kept[name]["before_us"] = median(one[name] for one in told["before"])
            kept[name]["before_to_after"] = kept[name]["before_us"] / after[name]
        lines.append((name, *(round(value, 2) for value in kept[name].values())))
    table("Host time of a step", ("case", *next(iter(kept.values()))), lines)
    goals = []
    if before:
        gates = {"64 rows": 15.0, "256 rows": 10.0}
        goals = [
            Goal(f"{name}: before ÷ after", kept[name]["before_to_after"], "x", gate, "higher")
            for name, gate in gates.items()
            if name in kept
        ]
    show("steps_host", seed, {"loop_us": after["loop"], "cases": kept, "rounds": rounds}, goals)


def _told(root: Path, names: Sequence[str]) -> dict[str, float]:
    """The figures of a checkout, from a process of its own; of the cases that it knows."""
    python = root / ".venv/bin/python"
    command = [str(python), "-c", TELL, *names]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"{root}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(figures(sys.argv[1:] or list(CASES))))
