"""What restoring and computing cost on this machine, as measured, and the choice between them.

::

    [0, have)          computed
    [have, meet)       computed now, while the disk brings up what follows
    [meet, end)        restored: read from disk where it must be, then copied to the device

Computing goes from the beginning, as a token needs all before it; so what is read meanwhile is the end, and the
two meet. ``meet = have`` restores everything, ``meet = end`` computes everything: `blocks_to_compute`, a pure
function of measured `Costs`.

Copying and computing are timed once per model, layout and machine. The disk is timed by the reads that turns
wait for: its latency by the small ones, its rate by the large ones; before the first large one its rate is
unknown. `CostBook` keeps the figures beside the records they are about, with the machine's name, since a store
may be carried to another machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ..plan import BlockLoad, Plan, PlanRow, Runner

LAYOUT = 2
BLOCKS_COPIED = 32
TOKENS_TIMED = 256
HISTORY_TIMED = 1024
WEIGHT = 0.25  # of the newest fetch in the running estimates
LARGE_BYTES = 1 << 20  # a fetch of less tells how long an answer takes, not how fast bytes come
MOST_LATENCY = 0.05  # a longer wait for a few bytes was for something else
DOUBT = 1.05
LEAST = 1e-12


Figure = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured on this machine for this model; all positive.

    ``copy``: bytes per second from the host tier to the device. ``fetch``: from disk to the host tier, begun
    after ``latency`` seconds. ``token``: seconds to prefill a token with no history, and ``history`` more for
    each token before it. ``beside``: whether the disk works while the device computes.
    """

    copy: float
    fetch: float
    latency: float
    token: float
    history: float
    beside: bool = True

    def computing(self, first: int, end: int) -> float:
        """Seconds to prefill ``[first, end)``."""
        count = end - first
        return self.token * count + self.history * count * (first + end) / 2

    def copying(self, size: int) -> float:
        """Seconds from the host tier to the device."""
        return size / self.copy

    def fetching(self, size: int) -> float:
        """Seconds from disk to the host tier."""
        return self.latency + size / self.fetch if size else 0.0


@dataclass(frozen=True, slots=True)
class Restorable:
    """What lower tiers hold behind ``first`` computed tokens: for each block whether it is only on disk."""

    first: int
    on_disk: tuple[bool, ...]
    block_tokens: int
    block_bytes: int


def blocks_to_compute(held: Restorable, costs: Costs | None) -> int:
    """How many of the blocks, from the first on, are better computed than restored: what ends soonest.

    0 where nothing was measured: restore. Of two that end at once the one that computes less. O(blocks).
    """
    if costs is None or not held.on_disk:
        return 0
    best, soonest = 0, float("inf")
    fetched = sum(held.on_disk)
    for count in range(len(held.on_disk) + 1):
        if count:
            fetched -= held.on_disk[count - 1]
        ends = _ends(held, costs, count, fetched)
        if ends < soonest:
            best, soonest = count, ends
    return best


def _ends(held: Restorable, costs: Costs, count: int, fetched: int) -> float:
    computing = costs.computing(held.first, held.first + count * held.block_tokens)
    fetching = costs.fetching(fetched * held.block_bytes)
    copying = costs.copying((len(held.on_disk) - count) * held.block_bytes)
    waiting = max(computing, fetching) if costs.beside else computing + fetching
    return waiting + copying


class Measured(msgspec.Struct, frozen=True):
    """As it is kept. Bytes per second, seconds; 0 for what has not been measured."""

    layout: int = LAYOUT
    machine: str = ""
    copy: Figure = 0.0
    token: Figure = 0.0
    history: Figure = 0.0
    fetch: Figure = 0.0
    latency: Figure = 0.0


class CostBook:
    """``path``: where it is kept, None for nowhere; of another ``machine`` it counts for nothing.
    ``beside``: disk and copies work while the device computes.
    """

    def __init__(self, path: Path | None, *, machine: str = "", beside: bool = True) -> None:
        self._path = path
        self.beside = beside
        self.measured = _read(path, machine)

    @property
    def calibrated(self) -> bool:
        """Whether copying and computing have been timed."""
        return self.measured.copy > 0 and self.measured.token > 0

    def costs(self) -> Costs | None:
        """For the policy; None while something has not been measured."""
        known = self.measured
        if not self.calibrated or not known.fetch:
            return None
        return Costs(known.copy, known.fetch, known.latency, known.token, known.history, self.beside)

    def calibrate(self, measured: Measured) -> None:
        """Take over, and keep, what a calibration found."""
        seen = self.measured
        self.measured = msgspec.structs.replace(
            measured, machine=seen.machine, fetch=seen.fetch, latency=seen.latency
        )
        self.save()

    def fetched(self, size: int, seconds: float) -> None:
        """A turn waited so long for so many bytes; its waiting for the disk to begin counts."""
        seconds = max(seconds, LEAST)
        known = self.measured
        if size < LARGE_BYTES:
            latency = _blended(known.latency, min(seconds, MOST_LATENCY))
            self.measured = msgspec.structs.replace(known, latency=latency)
            return
        rate = size / max(seconds - known.latency, seconds / 2)
        self.measured = msgspec.structs.replace(known, fetch=_blended(known.fetch, rate))

    def passed_over(self) -> None:
        """A turn is computed for what the disk is believed to cost, and its wait, if any, tells nothing of it.

        What is not tried is not seen to have changed, or to have been a stall: each such turn makes the belief
        a little better, until one tries again.
        """
        known = self.measured
        self.measured = msgspec.structs.replace(
            known, fetch=known.fetch * DOUBT, latency=known.latency / DOUBT
        )

    def save(self) -> None:
        """Keep it; a full or missing disk goes without."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fresh.write_bytes(msgspec.json.encode(self.measured))
                fresh.replace(self._path)
            finally:
                fresh.unlink(missing_ok=True)


def measure(
    runner: Runner,
    *,
    slots: int,
    blocks: int,
    block_tokens: int,
    block_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Time copies into the first blocks, which nobody holds yet, and prompts computed in them.

    Plans are numbered below those of any scheduler. ``slots``: the host tier's; their bytes are only read.
    """
    steps = iter(range(-64, 0))

    def seconds(**work: object) -> float:
        best = float("inf")
        for _ in range(3):  # the first warms up
            began = clock()
            runner.launch(Plan(next(steps), **work)).tokens()  # type: ignore[arg-type]
            best = min(best, clock() - began)
        return max(best, LEAST)

    count = min(BLOCKS_COPIED, slots, blocks)
    copying = seconds(rows=(), loads=tuple(BlockLoad(at, at) for at in range(count)))
    room = blocks * block_tokens
    chunk = min(TOKENS_TIMED, max(1, room // 4))
    before = min(HISTORY_TIMED, room - chunk)
    table = np.arange(-(-(before + chunk) // block_tokens), dtype=np.int32)

    def computing(first: int) -> float:
        tokens = np.zeros(chunk, dtype=np.int64)
        return seconds(rows=(PlanRow(0, 0, first, chunk, tokens, table),)) / chunk

    fresh, later = computing(0), computing(before)
    history = max(0.0, later - fresh) / before
    token = max(LEAST, fresh - history * chunk / 2)
    return Measured(copy=count * block_bytes / copying, token=token, history=history)


def _blended(old: float, new: float) -> float:
    return (1 - WEIGHT) * old + WEIGHT * new if old else new


def this_machine(device: str) -> str:
    """The processor and its cores, and what computes."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(named, processor)
    return f"{processor}, {os.cpu_count()} cores, {device}"


def _read(path: Path | None, machine: str) -> Measured:
    if path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode(path.read_bytes(), type=Measured)
            if (found.layout, found.machine) == (LAYOUT, machine):
                return found
    return Measured(machine=machine)
