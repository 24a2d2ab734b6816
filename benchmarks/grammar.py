"""``holdfast bench grammar``: what following a grammar costs a decode, and how long grammars take to compile.

A batch of sequences that write JSON by a schema against the same batch without a grammar, in turns, on one
engine; then the compile times of realistic schemas, each new to the engine, and the time to refuse bad
grammars, while another sequence decodes. Random weights, the pocket model's tokenizer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from holdfast.runtime.link.client import EngineLink
from holdfast.runtime.link.process import ChildEngine
from holdfast.runtime.model.folder import find_model
from holdfast.runtime.settings import EngineSettings
from holdfast.runtime.verbs import Finish, Grammar, GrammarKind, Row, Sampling, TokenLimits

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .report import Goal, percentile, show, summary, table
from .schemas import REAL, REFUSED
from .toys import make_toy

BATCH, PROMPT, OUT = 8, 64, 128
MOST_COST = 15.0
MOST_REFUSAL_MS = 1000.0
MOST_GAP = 1.5
"""The goal for another sequence's 99th percentile of gaps between tokens: while grammars are refused ÷
before."""

ENDLESS = {
    "type": "array",
    "minItems": 5000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer"},
            "kind": {"enum": ["add", "remove", "replace"]},
            "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}
"""A schema that never ends within a run, so that both batches write as many tokens."""


def main(words: Sequence[str] | None = None) -> int:
    chosen = parser_of("grammar", __doc__, ("toy-50m",), rounds=5).parse_args(words)
    options = options_of(chosen)
    return run("grammar", lambda: anyio.run(measure, options))


async def measure(options: Options) -> None:
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            spoken = make_toy(model, Path(folder) / model, vocab_size=4096, dtype=options.dtype)
            shutil.copy(find_model("pocket") / "tokenizer.json", spoken)
            asked = EngineSettings(model=str(spoken), dtype=options.dtype, max_context=4096, host_bytes=0)
            async with ChildEngine(asked) as link:
                figures[model] = await _measure(link, options)
        goals += _goals(model, figures[model])
        _tables(model, figures[model])
    whole = {**options.told(), "batch": BATCH, "prompt": PROMPT, "out": _out(options), "on": figures}
    show("grammar", options.seed, whole, goals, options.out)


async def _measure(link: EngineLink, options: Options) -> dict[str, Any]:
    bound = Sampling(temperature=1.0, grammar=_json(ENDLESS))
    free = Sampling(temperature=1.0)
    rates: dict[str, list[float]] = {"free": [], "bound": []}
    for number in range(-1, options.rounds):  # the first round warms up
        order = (("free", free), ("bound", bound))
        for name, sampling in order if number % 2 else reversed(order):
            rate = await _rate(link, sampling, _out(options))
            if number >= 0:
                rates[name].append(rate)
    costs = [100 * (1 - one / other) for one, other in zip(rates["bound"], rates["free"], strict=True)]
    compiled = {name: await _first(link, schema) for name, schema in REAL.items()}
    refused, gaps = await _refusals(link, options)
    return {
        "tokens_per_second": {name: summary(runs, 1) for name, runs in rates.items()},
        "cost_percent": summary(costs),
        "first_token_ms": compiled,
        "refused_ms": refused,
        "other_gap_ms": {"calm_p99": gaps.calm, "median": median(gaps.ms), "p99": percentile(gaps.ms, 0.99)},
    }


async def _rate(link: EngineLink, sampling: Sampling, out: int) -> float:
    """The tokens per second that a batch of sequences generates, timed after all of them were opened with their
    prompts."""
    opened = [(await link.open(_prompt(number))).seq for number in range(BATCH)]
    began = time.perf_counter()
    counts = [0] * BATCH

    async def read(number: int) -> None:
        async for row in await link.generate(opened[number], sampling, TokenLimits(out)):
            counts[number] += len(row.tokens)
            _check(row)

    async with anyio.create_task_group() as group:
        for number in range(BATCH):
            group.start_soon(read, number)
    seconds = time.perf_counter() - began
    for seq in opened:
        await link.close(seq, keep_kv=False)
    if counts != [out] * BATCH:
        raise CannotMeasure(f"the batch said {counts} tokens, not {out} each")
    return BATCH * out / seconds


async def _first(link: EngineLink, schema: dict[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token of a reply: with a grammar that is new to the engine, with the same
    grammar when it is known, and without one."""
    known = Sampling(grammar=_json(schema))
    return {
        "new": await _first_token(link, known),
        "known": await _first_token(link, known),
        "none": await _first_token(link, Sampling()),
    }


async def _first_token(link: EngineLink, sampling: Sampling) -> float:
    seq = (await link.open(_prompt(0))).seq
    await link.stage(seq)
    began = time.perf_counter()
    async for row in await link.generate(seq, sampling, TokenLimits(1)):
        _check(row)
    ms = 1e3 * (time.perf_counter() - began)
    await link.close(seq)
    return round(ms, 3)


@dataclass(slots=True)
class _Gaps:
    """Milliseconds between the tokens of another sequence; ``calm``: their 99th percentile before grammars were
    refused."""

    ms: list[float]
    calm: float = 0.0


async def _refusals(link: EngineLink, options: Options) -> tuple[dict[str, float], _Gaps]:
    """For each bad grammar, by name, the most milliseconds that its refusal took, repeated while another
    sequence decodes; and that sequence's gaps."""
    told: dict[str, float] = {}
    gaps = _Gaps([])
    seq = (await link.open(_prompt(1))).seq
    talk = await link.generate(seq, Sampling(), TokenLimits(3000))

    async def listen() -> None:
        last = time.perf_counter()
        async for _ in talk:
            now = time.perf_counter()
            gaps.ms.append(1e3 * (now - last))
            last = now

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        seconds = 0.3 if options.quick else 3.0
        await anyio.sleep(seconds)
        gaps.calm = round(percentile(gaps.ms[1:], 0.99), 3)
        gaps.ms.clear()
        end = time.perf_counter() + seconds  # as long, or one 99th percentile is of far fewer gaps
        while not told or time.perf_counter() < end:
            for name, grammar in REFUSED.items():
                told[name] = max(told.get(name, 0.0), await _refused(link, grammar))
        group.cancel_scope.cancel()
    await link.close(seq)
    return told, gaps


async def _refused(link: EngineLink, grammar: Grammar) -> float:
    seq = (await link.open(_prompt(2))).seq
    began = time.perf_counter()
    last: Row | None = None
    async for row in await link.generate(seq, Sampling(grammar=grammar), TokenLimits(400)):
        last = row
    ms = 1e3 * (time.perf_counter() - began)
    await link.close(seq)
    if last is None or last.finish is not Finish.ERROR:
        raise CannotMeasure(f"{grammar.text[:60]!r} was not refused")
    return round(ms, 3)


def _check(row: Row) -> None:
    if row.finish is Finish.ERROR:
        raise CannotMeasure(row.error or "a reply failed")


def _prompt(number: int) -> list[int]:
    return [(7 * number + at) % 1500 for at in range(PROMPT)]


def _json(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(schema))


def _goals(model: str, figures: dict[str, Any]) -> list[Goal]:
    cost = figures["cost_percent"]["median"]
    slowest = max(figures["refused_ms"].values())
    gaps = figures["other_gap_ms"]["p99"] / figures["other_gap_ms"]["calm_p99"]
    return [
        Goal(f"{model}: masks' cost of the decode rate at batch {BATCH}", cost, "%", MOST_COST, "lower"),
        Goal(f"{model}: slowest refusal of a bad grammar", slowest, "ms", MOST_REFUSAL_MS, "lower"),
        Goal(f"{model}: another's p99 token gap meanwhile ÷ before", gaps, "x", MOST_GAP, "lower"),
    ]


def _tables(model: str, figures: dict[str, Any]) -> None:
    rates = figures["tokens_per_second"]
    rows = [[name, rates[name]["median"]] for name in rates]
    rows.append(["cost, %", figures["cost_percent"]["median"]])
    table(f"{BATCH} sequences", [f"{model}, tok/s", "median"], rows)
    first = [[name, *times.values()] for name, times in figures["first_token_ms"].items()]
    table("to the first token, ms", ["schema", "new", "known", "no grammar"], first)
    table("refused after, ms", ["grammar", "ms"], [list(one) for one in figures["refused_ms"].items()])


def _out(options: Options) -> int:
    return 16 if options.quick else OUT
