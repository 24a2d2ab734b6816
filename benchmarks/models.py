"""``holdfast bench models``: a real model behind our server and behind llama.cpp's, from the same file.

``--models`` names GGUF files (``smollm2``: the fetched one), ``--llama-server`` the program (or the variable
LLAMA_SERVER, or one on the path); without it ours is measured alone. Both have the same threads and room for
context, and alternate in each round:

- decode: tokens per second of 1, 8 and 32 sequences, 16 prompt + 128 generated tokens each; and how much of the
  bandwidth that the same threads read with, measured in the same round, one sequence takes: file bytes × tokens
  per second ÷ bandwidth
- prefill: tokens per second of a prompt of 512 tokens, timed to the first text
- turns: the sum of TTFT over 20 turns of one conversation, 130 new and 32 generated tokens each: ours in a
  session, llama.cpp's with its prompt cache
- memory: the peak of our engine process once its KV is full, mapped pages counted
- perplexity: 2,000 tokens of a public-domain text, by packed and by dequantised weights, in float32
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import torch

from holdfast.gateway.cli.doctor import read_per_second
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.model.folder import find_model, model_name
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Opening, Sampling, TokenLimits
from holdfast.sessions.text.tokenizer import ChatTokenizer

from .decode import Rates, rates_of, told
from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import ratio
from .harness.workers import Command, EngineWorker, loaded
from .memory import peak
from .report import Goal, show, summary, table
from .turns import Inputs, TurnScript, play

OURS, THEIRS = "holdfast-gateway", "llama-server"
MODULE = "holdfast.benchmarks.harness.model_servers"
TEXT = Path(__file__).parent / "harness" / "public_domain.txt"
PARTS = ("decode", "prefill", "turns", "memory", "perplexity")
DECODE_GOALS = {1: 1.1, 8: 2.0, 32: 3.0}
PREFILL_GOALS = {512: 3.0}
TURNS_GOAL = 0.15
READ_SHARE, READ_LEAST = 0.6, 256 << 20
"""One sequence's goal for its share of the bandwidth, of files with at least so many bytes: a smaller one is
read so fast that the rest of a step counts."""
FILE_TIMES, REST_BYTES = 1.1, 320 << 20
PERPLEXITY_GOAL = 0.003
PROMPT, OUT = 16, 128
CONTEXT, TURNS_CONTEXT = 1024, 8192
KV_BYTES = 128 << 20
SCORED = 2000


class Words:
    """Draws text of a model's tokenizer: words of a public-domain text, in random order, so that no two prompts
    begin alike and nothing is in a cache. ``text``: its tokens in their own order."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = ChatTokenizer.load(model)
        text = TEXT.read_text(encoding="utf-8")
        self._words = text.split()
        self.text = self._tokenizer.encode(text, leads=True)

    def drawn(self, rng: random.Random, length: int) -> list[int]:
        """``length`` tokens."""
        found: list[int] = []
        while len(found) < length:
            found = self._tokenizer.encode(" ".join(rng.choices(self._words, k=length)), leads=False)
        return found[:length]

    def turns(self, script: TurnScript) -> Inputs:
        """Turns of so many tokens, for `play`."""

        def drawn(seed: str, turns: int) -> Iterator[list[int]]:
            rng = random.Random(seed)
            return (self.drawn(rng, script.new) for _ in range(turns))

        return drawn


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("models", __doc__, ("smollm2",), rounds=5)
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, for comparison")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    if options.quick:
        options = replace(options, models=("pocket",))
    program = chosen.llama_server
    if program is None and not options.quick:
        program = os.environ.get("LLAMA_SERVER") or shutil.which(THEIRS)
    return run("models", lambda: measure(options, program, tuple(chosen.parts), quiet=chosen.json))


def measure(options: Options, program: Path | str | None, parts: Sequence[str], *, quiet: bool) -> None:
    left_out = {}
    if program is None:
        left_out[THEIRS] = "no --llama-server is given"
    elif not os.access(program, os.X_OK):
        raise CannotMeasure(f"{program}: no program that can be run")
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for name in options.models:
        measured = _OneModel(name, options, None if left_out else str(program))
        figures[measured.name] = {"file_bytes": measured.bytes}
        for part in parts:
            found, some = getattr(measured, part)()
            figures[measured.name][part] = found
            goals += some
        if not quiet:
            _tables(measured.name, figures[measured.name])
    if not quiet:
        for peer, why in left_out.items():
            print(f"left out: {peer} ({why})")
    whole = {**options.told(), "left_out": left_out, "on": figures}
    show("models", options.seed, whole, goals, options.out, quiet=quiet)


class _OneModel:
    """The parts of the benchmark on one model. Each returns its figures and its goals."""

    def __init__(self, name: str, options: Options, program: str | None) -> None:
        self.path = find_model(name)
        self.name = model_name(name)
        files = [self.path] if self.path.is_file() else self.path.glob("*.safetensors")
        self.bytes = sum(file.stat().st_size for file in files)
        self._options = options
        self._program = program
        self._words = Words(self.path)

    def decode(self) -> tuple[dict[str, Any], list[Goal]]:
        sizes = (1, 2) if self._options.quick else tuple(DECODE_GOALS)
        out = 8 if self._options.quick else OUT
        rng = random.Random(self._options.seed)
        bandwidth: list[float] = []

        def drawn(count: int) -> Callable[[EngineWorker], float]:
            prompts = [self._words.drawn(rng, PROMPT) for _ in range(count)]
            if count == 1:
                bandwidth.append(read_per_second())

            def rate(worker: EngineWorker) -> float:
                answer = worker.ask("decode", prompts=prompts, out=out)
                if answer["tokens"] != count * out:
                    raise CannotMeasure(
                        f"{worker.name} generated {answer['tokens']} tokens, not {count * out}"
                    )
                return float(answer["tokens"] / answer["seconds"])

            return rate

        with self._workers(CONTEXT, max(sizes)) as workers:
            engines = {worker.name: worker.told for worker in workers}
            rates = rates_of(workers, sizes, self._options.rounds, drawn)
            peaks = {worker.name: worker.ask("memory")["peak"] for worker in workers}
        del bandwidth[0]  # of the round that warms up
        shares = {
            name: summary(self.bytes * rate / read for rate, read in zip(runs, bandwidth, strict=True))
            for name, runs in rates[1].items()
        }
        goals = _over(self.name, rates, DECODE_GOALS, "{} sequences: tok/s")
        if self.bytes >= READ_LEAST:
            what = f"{self.name}, 1 sequence: file bytes × tok/s ÷ bandwidth"
            goals.append(Goal(what, shares[OURS]["median"], "x", READ_SHARE, "higher"))
        return {
            "prompt": PROMPT,
            "out": out,
            "engines": engines,
            "tokens_per_second": told(rates),
            "ratio": _ratios(rates),
            "read_bytes_per_second": summary(bandwidth, 0),
            "share_of_bandwidth": shares,
            "peak_bytes": peaks,
        }, goals

    def prefill(self) -> tuple[dict[str, Any], list[Goal]]:
        rng = random.Random(self._options.seed)
        lengths = (40,) if self._options.quick else tuple(PREFILL_GOALS)

        def drawn(length: int) -> Callable[[EngineWorker], float]:
            tokens = self._words.drawn(rng, length)
            return lambda worker: length / float(worker.ask("prefill", tokens=tokens)["seconds"])

        with self._workers(CONTEXT, 1) as workers:
            rates = rates_of(workers, lengths, self._options.rounds, drawn)
        goals = _over(self.name, rates, PREFILL_GOALS, "{} tokens: tok/s of prefill")
        return {"tokens_per_second": told(rates), "ratio": _ratios(rates)}, goals

    def turns(self) -> tuple[dict[str, Any], list[Goal]]:
        script = TurnScript(turns=3, new=12, out=4) if self._options.quick else TurnScript(new=130)
        with self._workers(TURNS_CONTEXT, 1) as workers:
            played = play(workers, script, self._options, self._words.turns(script))
        sums = {name: one.sums for name, one in played.items()}
        found = {name: one.told(script) for name, one in played.items()}
        if THEIRS not in sums:
            return {"figures": found}, []
        times = ratio(sums[OURS], sums[THEIRS])
        goal = Goal(f"{self.name}: sum of TTFT ÷ {THEIRS}", times, "x", TURNS_GOAL, "lower")
        return {"figures": found, "ttft_sum_ratio": round(times, 3)}, [goal]

    def memory(self) -> tuple[dict[str, Any], list[Goal]]:
        rng = random.Random(self._options.seed)
        kv_bytes = 1 << 20 if self._options.quick else KV_BYTES
        found = asyncio.run(
            peak(self.path, self._options.dtype, kv_bytes, lambda length: self._words.drawn(rng, length))
        )
        allowed = FILE_TIMES * self.bytes + found["pool_bytes"] + REST_BYTES
        what = f"{self.name}: peak ÷ (1.1 × file + KV + 320 MiB)"
        return found, [Goal(what, found["peak_bytes"] / allowed, "x", 1.0, "lower")]

    def perplexity(self) -> tuple[dict[str, Any], list[Goal]]:
        """As the model is served; and in float32, where the form of the weights is all that differs, by packed
        and by dequantised ones. The reference kernels take no packed weights."""
        count = 100 if self._options.quick else SCORED
        tokens = self._words.text[:count]
        ways = {
            f"packed, {self._options.dtype}": (self._options.dtype, "auto"),
            "packed": ("float32", "auto"),
            "dequantised": ("float32", "reference"),
        }
        found: dict[str, Any] = {
            name: asyncio.run(_perplexity(self.path, *way, tokens)) for name, way in ways.items()
        }
        change = abs(found["packed"] / found["dequantised"] - 1)
        what = f"{self.name}: perplexity, packed against dequantised weights"
        return {**found, "tokens": count}, [Goal(what, 100 * change, "%", 100 * PERPLEXITY_GOAL, "lower")]

    def _workers(self, context: int, slots: int) -> AbstractContextManager[list[EngineWorker]]:
        """Workers of both servers with room for ``slots`` sequences of ``context`` tokens; they end with the
        block."""
        words = (sys.executable, "-m", MODULE, str(context), str(slots))
        commands = [Command(OURS, words)]
        if self._program is not None:
            commands.append(Command(THEIRS, (*words, self._program)))
        return loaded(commands, self.path, self._options)


async def _perplexity(model: Path, dtype: str, kernels: str, tokens: list[int]) -> float:
    """The perplexity of ``tokens``, all but the first, as one prompt."""
    settings = EngineSettings(
        model=str(model), device="cpu", dtype=dtype, kernels=kernels, kv_bytes=KV_BYTES * 2, host_bytes=0
    )
    scores: list[float] = []
    async with ChildEngine(settings) as link:
        asked = Sampling(prompt_logprobs=0)
        async for row in await link.generate(Opening(), asked, TokenLimits(1), tokens=tokens):
            assert row.error is None
            scores += [score.logprob for score in row.prompt_logprobs or ()]
    if len(scores) != len(tokens) - 1:
        raise CannotMeasure(f"{model}: {len(scores)} of {len(tokens)} tokens have a log probability")
    return exp(-sum(scores) / len(scores))


def _ratios(rates: Rates) -> dict[int, float]:
    return {
        size: round(ratio(engines[OURS], engines[THEIRS]), 3)
        for size, engines in rates.items()
        if THEIRS in engines
    }


def _over(name: str, rates: Rates, goals: Mapping[int, float], what: str) -> list[Goal]:
    return [
        Goal(f"{name}, {what.format(size)} ÷ {THEIRS}", times, "x", goals[size], "higher")
        for size, times in _ratios(rates).items()
        if size in goals
    ]


def _tables(name: str, on: dict[str, Any]) -> None:
    for part, unit in (("decode", "tok/s at sequences"), ("prefill", "tok/s of a prompt of tokens")):
        if part not in on:
            continue
        rates = on[part]["tokens_per_second"]
        rows = [
            [engine, *(rates[size][engine]["median"] for size in rates)]
            for engine in next(iter(rates.values()))
        ]
        table("interleaved, medians", [f"{name}, {unit}", *map(str, rates)], rows)
    if "turns" in on:
        rows = [
            [engine, float(one["ttft_sum_ms"]["median"]), one["slope_ms_per_1k"]]
            for engine, one in on["turns"]["figures"].items()
        ]
        table("20 turns, medians", [f"{name}, TTFT", "sum, ms", "ms/1k"], rows)
