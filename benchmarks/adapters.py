"""``holdfast bench adapters``: what adapters (LoRA) cost a batch of eight, on the real engine without a link.

Eight sequences of 64 prompt and 128 generated tokens, the time includes the prompts: without adapters, with one
adapter of rank 16 on all linear layers for all, with one for each; and without adapters in an engine that has
no room for any. They are measured one after the other, in the same process, and compared inside a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..runtime.build import load_engine
from ..runtime.link.engine_end import LoadedEngine
from ..runtime.link.heartbeat import Liveness
from ..runtime.model.folder import find_model
from ..runtime.settings import EngineSettings
from ..runtime.verbs import Close, Generate, Opening, Sampling, TokenLimits
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import ratio, rotated
from .report import Goal, show, summary, table
from .toys import make_adapter

ROWS, RANK = 8, 16
PROMPT, OUT = 64, 128
LEAST, FREE = 0.8, 0.97
WAYS = ("no room", "none", "one", "eight")


class AdapterStage:
    """An engine with the adapters in these ``folders``; with none it has no room for any."""

    def __init__(self, model: str, dtype: str, folders: Sequence[Path]) -> None:
        modules = tuple(f"{number}={folder}" for number, folder in enumerate(folders))
        settings = EngineSettings(
            model=model,
            device="cpu",
            dtype=dtype,
            kv_bytes=256 << 20,
            host_bytes=0,
            max_context=1024,
            enable_lora=bool(folders),
            lora_modules=modules,
        )
        self.loaded: LoadedEngine = load_engine(settings, lambda done, what: None, Liveness())
        self.digests = [one.digest for one in self.loaded.hello.adapters]
        self._numbers = count(1)

    def rate(self, adapters: Sequence[bytes], rng: random.Random, out: int) -> float:
        """Tokens per second of a batch with a row for each of ``adapters``; an empty digest: none."""
        engine, vocabulary = self.loaded.engine, self.loaded.hello.vocab_size
        seqs = [next(self._numbers) for _ in adapters]
        prompts = [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in seqs]
        began, done = time.perf_counter(), 0
        for seq, prompt, adapter in zip(seqs, prompts, adapters, strict=True):
            opening = Opening(adapter=adapter)
            engine.apply(Generate(0, seq, Sampling(), TokenLimits(out), tokens=prompt, opening=opening))
        while (step := engine.step()) is not None:
            for row in step.rows:
                if row.error is not None:
                    raise CannotMeasure(row.error)
                done += len(row.tokens)
        seconds = time.perf_counter() - began
        for seq in seqs:
            engine.apply(Close(0, seq, keep_kv=False))
        return done / seconds


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("adapters", __doc__, ("smollm2",), rounds=10)
    parser.set_defaults(dtype="auto")
    options = options_of(parser.parse_args(words))
    return run("adapters", lambda: measure(options))


def measure(options: Options) -> None:
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for model in ("pocket",) if options.quick else options.models:
        with TemporaryDirectory() as folder:
            rates = _rates(model, Path(folder), options)
        figures[model] = {way: summary(runs, 1) for way, runs in rates.items()}
        goals += [
            Goal(
                f"{model}: eight adapters ÷ none", ratio(rates["eight"], rates["none"]), "x", LEAST, "higher"
            ),
            Goal(f"{model}: one adapter ÷ none", ratio(rates["one"], rates["none"]), "x", LEAST, "higher"),
            Goal(f"{model}: none ÷ no room", ratio(rates["none"], rates["no room"]), "x", FREE, "higher"),
        ]
        rows = [[way, figures[model][way]["median"]] for way in WAYS]
        table(f"{model}, a batch of {ROWS}, rank {RANK}", ["adapters", "tok/s"], rows)
    whole = {**options.told(), "rows": ROWS, "rank": RANK, "prompt": PROMPT, "out": OUT, "on": figures}
    show("adapters", options.seed, whole, goals, options.out)


def _rates(model: str, folder: Path, options: Options) -> dict[str, list[float]]:
    base = find_model(model)
    folders = [make_adapter(folder / str(seed), base, rank=RANK, seed=seed) for seed in range(ROWS)]
    without, stage = (AdapterStage(model, options.dtype, some) for some in ([], folders))
    nothing = [b""] * ROWS
    asked = {
        "no room": (without, nothing),
        "none": (stage, nothing),
        "one": (stage, stage.digests[:1] * ROWS),
        "eight": (stage, stage.digests),
    }
    rng, out = random.Random(options.seed), 8 if options.quick else OUT
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, options.rounds):  # the first round warms up
        for way in rotated(WAYS, number):
            on, adapters = asked[way]
            measured = on.rate(adapters, rng, out)
            if number >= 0:
                rates[way].append(measured)
    return rates
