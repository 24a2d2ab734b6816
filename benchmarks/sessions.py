"""``holdfast bench sessions``: agent-like sessions with four times as much KV as the device holds.

Counts tokens prefilled ÷ truly new ones. A seeded trace (`harness/agents.py`) runs through the real scheduler
and tiers on a device that computes nothing; lower tiers hold everything, half of the working set, or nothing.
It is compared with the optimum that knows the future, and with a policy that knows the odds of each pause
(`harness/optimum.py`). In the runs named *tools foreseen* the engine gets hints of how long tools' pauses last,
exact or off by a factor of 1.6 for half of them. Also times TTFT on a toy model, with a device for a quarter of
the working set and with one for all of it.

With ``--windowed`` instead a model shaped as Gemma 3: five layers with a window of 512 tokens to one without.
The blocks that a session of 16,384 tokens holds, how many more sessions a pool holds than without windows, and
tokens prefilled ÷ truly new ones of the same trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from holdfast.runtime.verbs import Generate, Opening, Refusal, Sampling, TokenLimits

from .harness.agents import Scale, TraceTurn, coding, told, truly_new, working_set
from .harness.optimum import knowing_odds, optimum
from .harness.options import Options, options_of, parser_of, run
from .harness.replay import BLOCK, VOCABULARY, Clock, TokenTally, fake_engine, replay
from .harness.talker import rest
from .harness.workers import EngineWorker, commands, on_toy
from .report import Goal, percentile, show, summary, table

AMPLE = 1.1
NEAR = 1.15
ROUGH, FORESIGHT_SEED = 0.7, 7
"""``ROUGH``: the standard deviation of the logarithm of the factor by which a hint of a tool's duration is off;
half of them are off by a factor of 1.6 or more. ``FORESIGHT_SEED``: the seed of these factors."""
REAL = Scale(tokens=64, times=100.0, context=1024)
REAL_SESSIONS = 16
WINDOWS, WHOLE, LONG = (*(512,) * 5, None), (None,) * 6, 16_384
HELD, FEWER = 1.15, 0.9


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("sessions", __doc__, ("toy-9m",), rounds=1)
    parser.add_argument("--sessions", type=int, default=32, help="agents at a time, in the replay")
    parser.add_argument("--turns", type=int, default=1500, help="of all of them, in the replay")
    parser.add_argument("--real-turns", type=int, default=160, help="on the toy")
    parser.add_argument("--windowed", action="store_true", help="KV groups with windows")
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    sizes = (6, 40, 12) if options.quick else (chosen.sessions, chosen.turns, chosen.real_turns)
    if chosen.windowed:
        return run("windowed", lambda: _windowed(options, *sizes[:2]))
    return run("sessions", lambda: measure(options, *sizes))


def measure(options: Options, sessions: int, turns: int, real_turns: int) -> None:
    scale = Scale(context=2048 if options.quick else 4096)
    trace = coding(sessions, turns, options.seed, scale)
    counted, goals = _counted(trace, scale)
    timed: dict[str, Any] = {}
    found, _ = commands(["holdfast-twins"], options)
    for model in options.models:
        with on_toy(model, found, options) as (worker,):
            timed[model] = _timed(worker, coding(REAL_SESSIONS, real_turns, options.seed, REAL), options)
        _show_timed(model, timed[model])
    figures = {"trace": {"sessions": sessions, "turns": turns}, "counted": counted, "timed": timed}
    show("sessions", options.seed, {**options.told(), **figures}, goals, options.out)


def _counted(trace: Sequence[TraceTurn], scale: Scale) -> tuple[dict[str, Any], list[Goal]]:
    blocks, new = working_set(trace, scale, BLOCK), truly_new(trace, scale)
    device, half = max(blocks // 4, -(-scale.context // BLOCK)), blocks // 2
    runs = {
        "ample tiers": replay(trace, scale, device=device, host=6 * blocks),
        "host and disk at 0.5": replay(trace, scale, device=device, host=half // 2, disk=half - half // 2),
        "host alone at 0.5": replay(trace, scale, device=device, host=half),
        "no tiers": replay(trace, scale, device=device),
    }
    right, rough = (told(trace, spread, FORESIGHT_SEED, scale) for spread in (0.0, ROUGH))
    runs |= {
        "host and disk at 0.5, tools foreseen": replay(
            trace, scale, device=device, host=half // 2, disk=half - half // 2, said=right
        ),
        "no tiers, tools foreseen": replay(trace, scale, device=device, said=right),
        "no tiers, tools foreseen roughly": replay(trace, scale, device=device, said=rough),
    }
    least = {
        "a store of 0.5": 1 + optimum(trace, scale, BLOCK, half) / new,
        "device and 0.5 as one store": 1 + optimum(trace, scale, BLOCK, device + half) / new,
        "the device alone": 1 + optimum(trace, scale, BLOCK, device, runs=True) / new,
    }
    odds = 1 + knowing_odds(trace, scale, BLOCK, device, runs=True) / new
    rows = [_line(name, tally, new) for name, tally in runs.items()]
    rows += [[f"optimum, {name}", factor, "", ""] for name, factor in least.items()]
    rows.append(["knowing the odds, the device alone", odds, "", ""])
    title = f"{len(trace)} turns, working set {blocks} blocks, device {device}"
    table(title, ["KV below the device", "prefilled ÷ new", "from host", "from disk"], rows)
    factors = {name: tally.prefilled / new for name, tally in runs.items()}
    goals = [
        Goal("ample tiers: prefilled ÷ truly new", factors["ample tiers"], "x", AMPLE, "lower"),
        *(
            Goal(
                f"{name}: prefilled ÷ the optimum's, {store}",
                factors[name] / least[store],
                "x",
                NEAR,
                "lower",
            )
            for store, mark in (("a store of 0.5", "0.5"), ("the device alone", "no tiers"))
            for name in runs
            if mark in name
        ),
        Goal("no tiers: prefilled ÷ by knowing the odds", factors["no tiers"] / odds, "x", NEAR, "lower"),
    ]
    found = {"working_set": blocks, "device": device, "truly_new": new, "prefilled_per_new": factors}
    return {**found, "optimum_per_new": least, "knowing_odds_per_new": {"the device alone": odds}}, goals


def _windowed(options: Options, sessions: int, turns: int) -> None:
    scale = Scale(context=2048 if options.quick else 4096)
    trace = coding(sessions, turns, options.seed, scale)
    new, needed = truly_new(trace, scale), len(WINDOWS) * -(-scale.context // BLOCK)
    blocks = working_set(trace, scale, BLOCK) * len(WINDOWS)
    held = {name: _held(windows) for name, windows in (("windows", WINDOWS), ("none", WHOLE))}
    ideal = sum(LONG if window is None else window for window in WINDOWS) / BLOCK
    runs = {
        f"{name}, {tiers}": replay(
            trace, scale, device=max(blocks // share, needed), host=host, windows=windows
        )
        for name, windows in (("windows", WINDOWS), ("none", WHOLE))
        for tiers, share, host in (
            ("all on the device", 1, 0),
            ("a third on the device", 3, 0),
            ("a sixth on the device, ample tiers", 6, 6 * blocks),
        )
    }
    title = f"{len(trace)} turns, working set {blocks} blocks in {len(WINDOWS)} KV groups"
    rows = [[*_line(name, tally, new)[:3]] for name, tally in runs.items()]
    table(title, ["KV", "prefilled ÷ new", "from host"], rows)
    factors = {name: tally.prefilled / new for name, tally in runs.items()}
    goals = [
        Goal(f"blocks held at {LONG:,} ÷ windows and the whole", held["windows"] / ideal, "x", HELD, "lower"),
        Goal(
            "sessions that fit ÷ without windows, of the ideal",
            held["none"] / held["windows"] / (len(WINDOWS) * LONG / BLOCK / ideal),
            "x",
            FEWER,
            "higher",
        ),
        *(
            Goal(f"{name}: prefilled ÷ truly new", factor, "x", AMPLE, "lower")
            for name, factor in factors.items()
            if name.startswith("windows") and "third" not in name
        ),
    ]
    found = {"working_set": blocks, "held": held, "truly_new": new, "prefilled_per_new": factors}
    show("windowed", options.seed, {**options.told(), **found}, goals, options.out)


def _held(windows: tuple[int | None, ...]) -> float:
    """The blocks that a session of `LONG` tokens holds once its turn has ended."""
    pool = len(windows) * (LONG // BLOCK + 1)
    with fake_engine(pool, 0, 0, LONG, Clock(), windows) as engine:
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, LONG - 8).tolist()
        verb = Generate(0, 0, Sampling(), TokenLimits(8), 0, tokens, Opening(b"long"))
        assert not isinstance(engine.apply(verb), Refusal)
        rest(engine)
        return engine.statistics()["pool_held"]


def _line(name: str, tally: TokenTally, new: int) -> list[object]:
    return [name, tally.prefilled / new, tally.host, tally.disk]


def _timed(worker: EngineWorker, trace: Sequence[TraceTurn], options: Options) -> dict[str, Any]:
    """Play each turn of the trace on both engines of ``worker``, in alternating order. Returns their
    figures."""
    blocks = working_set(trace, REAL, BLOCK)
    device = max(blocks // 4, REAL.context // BLOCK)
    told = worker.ask("build", device=device, ample=8 * blocks, seed=options.seed)
    ttft: dict[str, list[float]] = {name: [] for name in told["engines"]}
    prefilled = dict.fromkeys(ttft, 0)
    for number, turn in enumerate(trace):
        names = list(ttft) if number % 2 else list(reversed(ttft))
        for name in names:
            fields = {name: getattr(turn, name) for name in TraceTurn.__slots__}
            said = worker.ask("speak", engine=name, turn=fields)
            ttft[name].append(said["ttft_ms"])
            prefilled[name] += said["prefilled"]
    return {
        "device_blocks": device,
        "working_set": blocks,
        "prefilled_per_new": {name: count / truly_new(trace, REAL) for name, count in prefilled.items()},
        "ttft_ms": {name: summary(runs) for name, runs in ttft.items()},
        "ratio": {
            f"p{round(100 * share)}": percentile(ttft["quarter"], share)
            / percentile(ttft["unlimited"], share)
            for share in (0.5, 0.9)
        },
        "ratio_per_turn": median(
            one / other for one, other in zip(ttft["quarter"], ttft["unlimited"], strict=True)
        ),
    }


def _show_timed(model: str, timed: dict[str, Any]) -> None:
    rows = [
        [name, runs["p50"], runs["p90"], timed["prefilled_per_new"][name]]
        for name, runs in timed["ttft_ms"].items()
    ]
    columns = [f"{model}, device", "TTFT p50 ms", "p90", "prefilled ÷ new"]
    table("a quarter of the working set, and all", columns, rows)
