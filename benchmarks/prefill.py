"""``holdfast bench prefill``: tokens per second of an uncached prompt, against other engines in the same run.

Prompts of 512, 2,048 and 4,096 tokens, timed to the first generated token, with nothing cached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from .decode import ENGINES, Rates, rates_of, told
from .harness.options import Options, options_of, parser_of, run
from .harness.rounds import prompt, ratio, vocabulary
from .harness.workers import EngineWorker, commands, on_toy
from .report import Goal, show, table

LENGTHS = (512, 2048, 4096)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("prefill", __doc__, ("toy-9m",), rounds=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    lengths = (16, 40) if options.quick else tuple(chosen.lengths)
    return run("prefill", lambda: measure(options, lengths))


def measure(options: Options, lengths: Sequence[int]) -> None:
    found, left_out = commands(ENGINES, options)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for model in options.models:
        with on_toy(model, found, options) as workers:
            rates = _rates(workers, lengths, options, model)
            figures[model] = {"engines": {worker.name: worker.told for worker in workers}}
        figures[model]["tokens_per_second"] = told(rates)
        goals += _goals(model, rates)
        names = list(next(iter(rates.values())))
        rows = [[name, *(median(rates[length][name]) for length in rates)] for name in names]
        table("prompt to first token, medians", [f"{model}, tok/s at tokens", *map(str, rates)], rows)
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    show("prefill", options.seed, {**options.told(), "left_out": left_out, "on": figures}, goals, options.out)


def _rates(workers: list[EngineWorker], lengths: Sequence[int], options: Options, model: str) -> Rates:
    rng = random.Random(options.seed)

    def drawn(length: int) -> Callable[[EngineWorker], float]:
        tokens = prompt(rng, length, vocabulary(model))
        return lambda worker: length / float(worker.ask("prefill", tokens=tokens)["seconds"])

    return rates_of(workers, lengths, options.rounds, drawn)


def _goals(model: str, rates: Rates) -> list[Goal]:
    """The goals: not to be slower than transformers, at each length."""
    goals = []
    for length, engines in rates.items():
        if "transformers" in engines:
            times = ratio(engines["holdfast"], engines["transformers"])
            goals.append(Goal(f"{model}, {length} tokens: tok/s ÷ transformers", times, "x", 1.0, "higher"))
    return goals
