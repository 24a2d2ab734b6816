"""``holdfast bench restore``: TTFT of a turn with KV in the host tier or on disk, against a turn with KV on the
device.

The same short turn is taken after 2k and 4k tokens, when their KV was dropped from the device, or from the host
tier too, or also from the page cache. The limit is TTFT with KV on the device, before and after, plus 1.3 times
the time to copy as many bytes in the same round. The turn must prefill only its new tokens: recomputing is
switched off.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .harness.options import CannotMeasure, Options, options_of, parser_of, run
from .harness.rounds import prompt, rotated, vocabulary
from .harness.workers import EngineWorker, commands, on_toy
from .report import Goal, show, summary, table

LENGTHS = (2048, 4096)
NEW = 16
FACTOR = 1.3
SOURCES = {"host": "memcpy", "disk, page cache warm": "warm", "disk, page cache cold": "cold"}
"""Where KV is restored from, and the name of the copying rate that each of these is compared with."""


@dataclass
class TierTimes:
    """The times of one source of KV, in seconds, one for each round: TTFT with KV from there (``ttft``), TTFT
    with KV on the device (``resident``), and the time to copy as many bytes (``copy``). ``bytes``: of the
    restored KV."""

    ttft: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    major_faults: list[int] = field(default_factory=list)
    bytes: int = 0

    def take(self, ttft: float, resident: float, copy: float) -> None:
        self.ttft.append(ttft)
        self.resident.append(resident)
        self.copy.append(copy)

    @property
    def share(self) -> float:
        """TTFT ÷ its limit, which is the resident TTFT + 1.3 × the copy's time: the median over the rounds."""
        rounds = zip(self.ttft, self.resident, self.copy, strict=True)
        return median(ttft / (resident + FACTOR * copy) for ttft, resident, copy in rounds)

    @property
    def times(self) -> float:
        """(TTFT − resident TTFT) ÷ the copy's time, to compare with the allowed 1.3: the median over the
        rounds."""
        rounds = zip(self.ttft, self.resident, self.copy, strict=True)
        return median((ttft - resident) / copy for ttft, resident, copy in rounds)

    def told(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "ttft_ms": summary(1e3 * one for one in self.ttft),
            "resident_ttft_ms": summary(1e3 * one for one in self.resident),
            "copy_ms": summary(1e3 * one for one in self.copy),
            "restore_over_copy": self.times,
            "ttft_over_limit": self.share,
            "major_faults": self.major_faults,
        }


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("restore", __doc__, ("toy-50m",), rounds=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    chosen = parser.parse_args(words)
    options = options_of(chosen)
    lengths = (64, 160) if options.quick else tuple(chosen.lengths)
    return run("restore", lambda: measure(options, lengths))


def measure(options: Options, lengths: Sequence[int]) -> None:
    found, _ = commands(["holdfast-tiered"], options)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    rows: list[list[object]] = []
    for model in options.models:
        with on_toy(model, found, options) as (worker,):
            for length in lengths:
                tiers, prefilled = _rounds(worker, model, length, options)
                figures[f"{model}, {length}"] = {name: tier.told() for name, tier in tiers.items()}
                rows += [_line(f"{model}, {length}, {name}", tier) for name, tier in tiers.items()]
                goals += _goals(f"{model}, {length}", tiers, prefilled)
    columns = ["KV from", "MB", "resident ms", "copy ms", "TTFT ms", "restore ÷ copy", "TTFT ÷ limit"]
    table("turn of 16 new tokens, medians", columns, rows)
    show("restore", options.seed, {**options.told(), "on": figures}, goals, options.out)


def _rounds(
    worker: EngineWorker, model: str, length: int, options: Options
) -> tuple[dict[str, TierTimes], float]:
    """The times of each source by round, after one round to warm up; and the greatest ratio of tokens prefilled
    by a turn with restored KV to those of the same turn with KV on the device."""
    rng = random.Random(options.seed)
    worker.ask("open", tokens=prompt(rng, length, vocabulary(model)))
    new = prompt(rng, NEW, vocabulary(model))
    tiers = {name: TierTimes() for name in SOURCES}
    most = 0.0
    for number in range(-1, options.rounds):
        for name in rotated(list(SOURCES), number):
            resident = worker.ask("again", tokens=new)
            before = worker.ask("lose", host=name != "host", cold=SOURCES[name] == "cold")
            restored = worker.ask("again", tokens=new)
            after = worker.ask("again", tokens=new)
            tier = tiers[name]
            tier.bytes = _blocks(restored, name) * worker.told["block_bytes"]
            rates = worker.ask("rates", bytes=tier.bytes)
            if number >= 0:
                calm = (resident["seconds"] + after["seconds"]) / 2
                tier.take(restored["seconds"], calm, rates[SOURCES[name]])
                tier.major_faults.append(restored["major_faults"] - before["major_faults"])
                most = max(most, _computed(restored) / _computed(resident))
    return tiers, most


def _computed(turn: dict[str, Any]) -> int:
    """The number of tokens that a turn computed before it sampled its first token."""
    return int(turn["work"]["prefilled"] + turn["work"]["recomputed"])


def _blocks(restored: dict[str, Any], name: str) -> int:
    """The number of restored blocks. Raises ``CannotMeasure`` unless all KV came from the source ``name``."""
    work = restored["work"]
    came = work["host"] if name == "host" else work["disk"]
    if not came or came != work["host"] + work["disk"] + work["resident"]:
        raise CannotMeasure(f"{name}: KV came from elsewhere: {work}")
    return -(-int(came) // 16)


def _line(name: str, tier: TierTimes) -> list[object]:
    times = [1e3 * median(one) for one in (tier.resident, tier.copy, tier.ttft)]
    return [name, tier.bytes / 1e6, *times, tier.times, tier.share]


def _goals(where: str, tiers: dict[str, TierTimes], prefilled: float) -> list[Goal]:
    limits = [
        Goal(f"{where}, {name}: TTFT ÷ (resident + 1.3 × bytes ÷ rate)", tier.share, "x", 1.0, "lower")
        for name, tier in tiers.items()
    ]
    return [*limits, Goal(f"{where}: prefilled ÷ truly new after a spill", prefilled, "x", 1.0, "lower")]
