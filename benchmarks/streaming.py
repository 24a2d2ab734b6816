"""``holdfast bench streaming``: the gain of prefilling input while it arrives, and the cost for others.

Input comes at a share of the measured prefill capacity. Measures TTFT from the last byte, streamed against sent
at once, alone and beside sessions that generate; the token gaps of these sessions; a sweep of loads to
saturation; tokens that retractions waste; and the turn after a cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.sdk import connect

from .harness.listening import WAYS, LengthFigures, Listening, Sizes, Spoken, ToyText
from .harness.options import Options, options_of, parser_of, run
from .harness.ours import KV_BYTES
from .harness.plots import Axes, Picture, draw
from .harness.servers import server
from .report import Goal, percentile, show, summary, table
from .toys import SHAPES, make_toy, teach

TTFT, GAP, SWEEP, CUT = 0.15, 1.5, 1.0, 1.2
"""The goals, all of them ratios: of TTFT, of the others' token gaps, of TTFT in the sweep, of TTFT after a
cancel."""

CUTS = 4  # per round
QUICK = Sizes((48, 96), others=2, loads=(0.5,), turns=2, turn=32)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("streaming", __doc__, ("toy-50m",), rounds=5)
    parser.add_argument("--share", type=float, default=Sizes().share, help="of the prefill capacity")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=Sizes().lengths, help="of inputs, in tokens"
    )
    parser.add_argument("--turns", type=int, default=Sizes().turns, help="at each load of the sweep")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    sizes = QUICK if options.quick else Sizes(tuple(chosen.lengths), chosen.share, turns=chosen.turns)
    return run("streaming", lambda: measure(options, sizes))


def measure(options: Options, sizes: Sizes) -> None:
    on = {model: _on(model, options, sizes) for model in options.models}
    goals = [goal for model, figures in on.items() for goal in _goals(model, figures)]
    for model, figures in on.items():
        _tables(model, figures)
        print(draw(options.out / f"streaming-{model}.png", _pictures(figures["sweep"])), end="\n\n")
    show("streaming", options.seed, {**options.told(), **asdict(sizes), "on": on}, goals, options.out)


def _on(model: str, options: Options, sizes: Sizes) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        teach(make_toy(model, folder, seed=options.seed, dtype=options.dtype))
        store = stack.enter_context(TemporaryDirectory())
        words = ("--device", "cpu", "--dtype", options.dtype, "--kv-bytes", str(KV_BYTES), "--store", store)
        running = stack.enter_context(server(str(folder), options.threads, *words))
        vocabulary = SHAPES[model]["vocab_size"]
        return asyncio.run(_all(running.url, ToyText(options.seed, vocabulary), options.rounds, sizes))


async def _all(url: str, words: ToyText, rounds: int, sizes: Sizes) -> dict[str, Any]:
    async with connect(url) as client:
        listening = Listening(client, words, sizes)
        capacity = await listening.capacity(rounds)
        heard = {length: LengthFigures() for length in sizes.lengths}
        for _ in range(rounds):
            for length, one in heard.items():
                await listening.alone(length, sizes.share * capacity, one)
                await listening.beside(length, sizes.share * capacity, one)
        swept: dict[float, dict[str, list[Spoken]]] = {
            load: {way: [] for way in WAYS} for load in sizes.loads
        }
        for _ in range(rounds):
            for load, found in swept.items():
                for way, spoken in (await listening.load(load, capacity)).items():
                    found[way] += spoken
        cuts = await listening.cancelled(CUTS * rounds)
    return {
        "prefill_tokens_per_second": capacity,
        "input_tokens_per_second": sizes.share * capacity,
        "inputs": {str(length): _heard(found) for length, found in heard.items()},
        "sweep": [_load(load, found) for load, found in swept.items()],
        "after_a_cut": {name: _ms(runs) for name, runs in cuts.items()},
    }


# --- figures ------------------------------------------------------------------------------------------------


def _heard(found: LengthFigures) -> dict[str, Any]:
    gaps = {name: list(chain.from_iterable(rounds)) for name, rounds in found.gaps.items()}
    pairs = zip(found.gaps["with"], found.gaps["without"], strict=True)
    return {
        "alone": _spoken(found.alone),
        "beside": _spoken(found.beside),
        "gaps": {
            name: {key: value for key, value in _ms(all_).items() if key != "runs"}
            for name, all_ in gaps.items()
        },
        "gap_p90_ratio": summary(percentile(one, 0.9) / percentile(other, 0.9) for one, other in pairs),
        "wasted_per_new": {
            "streamed": _wasted(chain(found.alone["streamed"], found.beside["streamed"])),
            "with retractions": _wasted(found.mistakes),
        },
    }


def _spoken(ways: dict[str, list[Spoken]]) -> dict[str, Any]:
    pairs = zip(ways["streamed"], ways["at once"], strict=True)
    told = {way: _ms(one.ttft for one in runs) for way, runs in ways.items()}
    return {"ttft_ms": told, "ratio": summary(one.ttft / other.ttft for one, other in pairs)}


def _load(share: float, found: dict[str, list[Spoken]]) -> dict[str, Any]:
    ttft = {way: _ms(one.ttft for one in found[way]) for way in WAYS}
    ratio = {key: ttft["streamed"][key] / ttft["at once"][key] for key in ("median", "p90")}
    return {"load": share, "ttft_ms": ttft, "ratio": ratio}


def _ms(seconds: Iterable[float]) -> dict[str, Any]:
    return summary(1000 * one for one in seconds)


def _wasted(runs: Iterable[Spoken]) -> float:
    """Tokens prefilled beyond the truly new ones, divided by the new ones, over all these turns."""
    listed = list(runs)
    return sum(one.prefilled for one in listed) / sum(one.new for one in listed) - 1


def _goals(model: str, figures: dict[str, Any]) -> list[Goal]:
    goals = []
    for length, on in figures["inputs"].items():
        for where in ("alone", "beside"):
            name = f"{model}, {length} {where}: TTFT streamed ÷ at once"
            goals.append(Goal(name, on[where]["ratio"]["median"], "x", TTFT, "lower"))
        name = f"{model}, {length}: others' p90 gap ÷ without"
        goals.append(Goal(name, on["gap_p90_ratio"]["median"], "x", GAP, "lower"))
    for key in ("median", "p90"):
        worst = max(one["ratio"][key] for one in figures["sweep"])
        goals.append(Goal(f"{model}, sweep: worst {key} TTFT streamed ÷ not", worst, "x", SWEEP, "lower"))
    cuts = figures["after_a_cut"]
    ratio = cuts["from the cut"]["median"] / cuts["undisturbed"]["median"]
    return [*goals, Goal(f"{model}: TTFT from a cancel ÷ undisturbed", ratio, "x", CUT, "lower")]


# --- shown --------------------------------------------------------------------------------------------------


def _tables(model: str, figures: dict[str, Any]) -> None:
    rows: list[list[object]] = []
    for length, on in figures["inputs"].items():
        for where in ("alone", "beside"):
            ttft = on[where]["ttft_ms"]
            medians = [ttft[way]["median"] for way in WAYS]
            gaps = (
                [on["gaps"][name]["p90"] for name in ("with", "without")] if where == "beside" else ["", ""]
            )
            rows.append([f"{length} {where}", *medians, on[where]["ratio"]["median"], *gaps])
    pace = f"{model}: input at {figures['input_tokens_per_second']:.0f} tok/s; TTFT from the last byte, ms"
    table(pace, ["input", *WAYS, "ratio", "others' p90 gap", "without"], rows)
    wasted = [[length, *on["wasted_per_new"].values()] for length, on in figures["inputs"].items()]
    table("prefilled in vain per new token", ["input", "streamed", "with retractions"], wasted)
    swept = [
        [f"{one['load']:g}", *(one["ttft_ms"][way][key] for way in WAYS for key in ("median", "p90"))]
        for one in figures["sweep"]
    ]
    columns = [f"{way} {key}" for way in WAYS for key in ("median", "p90")]
    table("TTFT by load, a share of the capacity, ms", ["load", *columns], swept)
    cuts = figures["after_a_cut"]
    table("TTFT after a cut, ms", [*cuts], [[f"{one['median']:.1f}" for one in cuts.values()]])


def _pictures(swept: Sequence[dict[str, Any]]) -> list[Picture]:
    loads = [one["load"] for one in swept]
    return [
        (
            Axes(f"TTFT from the last byte, {key}", "load, a share of the prefill capacity", "ms", log=True),
            {way: (loads, [one["ttft_ms"][way][key] for one in swept]) for way in WAYS},
        )
        for key in ("median", "p90")
    ]
