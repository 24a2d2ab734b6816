"""What restoring and computing cost on this machine, as measured, and the choice between them.

::

    [0, have)          computed
    [have, meet)       computed now, while the disk brings up what follows
    [meet, end)        restored: read from disk where it must be, then copied to the device

Copying and computing are timed once per model, layout and machine. The disk is timed by the reads that turns
wait for: its latency by the small ones, its rate by the large ones. `CostBook` keeps the figures beside the
records they are about, with the machine's name, since a store may be carried to another machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ..plan import BlockLoad, PlanRow, Runner, plan_of

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


class Costs(msgspec.Struct):
    """What restoring and computing cost, as measured on this ``machine`` for this model, and kept in a file;
    0 where nothing was measured.

    ``copy``: bytes per second from the host tier to the device. ``fetch``: bytes per second from disk to the
    host tier, begun after ``latency`` seconds. ``token``: seconds to prefill a token with no history, and
    ``history`` more for each token before it. ``layout``: the version of the file's form.
    """

    layout: int = LAYOUT
    machine: str = ""
    copy: Figure = 0.0
    token: Figure = 0.0
    history: Figure = 0.0
    fetch: Figure = 0.0
    latency: Figure = 0.0

    def computing(self, first: int, end: int) -> float:
        """Seconds to prefill the tokens at the positions ``[first, end)``."""
        count = end - first
        return self.token * count + self.history * count * (first + end) / 2

    def fetching(self, size: int) -> float:
        """Seconds to bring ``size`` bytes from disk to the host tier; 0 for no bytes."""
        return self.latency + size / self.fetch if size else 0.0

    def blocks_to_compute(
        self, first: int, below: list[int], missing: list[int], tokens: int, size: int, *, beside: bool
    ) -> int:
        """How many blocks, from the first on, to compute instead of restoring them, so that all are there
        soonest.

        ``first``: how many tokens are computed already. For each full block of ``tokens`` tokens and ``size``
        bytes behind them, ``below``: of how many KV groups it is only on disk; ``missing``: of how many it is
        to be copied to the device. ``beside``: the disk works while the device computes. Of equal choices, the
        one that computes less. O(blocks).
        """
        best, soonest = 0, float("inf")
        fetched, copied = sum(below), sum(missing)
        for count in range(len(below) + 1):
            if count:
                fetched, copied = fetched - below[count - 1], copied - missing[count - 1]
            computing, fetching = self.computing(first, first + count * tokens), self.fetching(fetched * size)
            ends = max(computing, fetching) if beside else computing + fetching
            ends += copied * size / self.copy
            if ends < soonest:
                best, soonest = count, ends
        return best


class CostBook:
    """Measured costs, kept in the file ``path`` (None: not kept); those in it of another ``machine`` are
    ignored.

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
        """The measured costs; None while something has not been measured."""
        return self.measured if self.calibrated and self.measured.fetch else None

    def calibrate(self, measured: Costs) -> None:
        """Take over the figures of ``measured`` for copying and computing, and write all to the file. Those
        of the disk stay."""
        known = self.measured
        known.copy, known.token, known.history = measured.copy, measured.token, measured.history
        self.save()

    def fetched(self, size: int, seconds: float) -> None:
        """Learn that a turn waited ``seconds`` for ``size`` bytes from disk: blend that into the disk's
        latency if they are few bytes, else into its rate."""
        seconds, known = max(seconds, LEAST), self.measured
        if size < LARGE_BYTES:
            known.latency = _blended(known.latency, min(seconds, MOST_LATENCY))
        else:
            rate = size / max(seconds - known.latency, seconds / 2)
            known.fetch = _blended(known.fetch, rate)

    def passed_over(self) -> None:
        """Make the disk's figures a little better. Call this when a turn is computed because the disk is
        believed to be slow.

        Such a turn does not measure the disk, and a disk that is never tried would count as slow for ever,
        even after a single stall. So the figures improve until a turn tries the disk again.
        """
        self.measured.fetch *= DOUBT
        self.measured.latency /= DOUBT

    def save(self) -> None:
        """Write the figures to the file; errors of the disk are ignored."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                fresh.touch(0o600)
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
) -> Costs:
    """Time copies from the host tier to the device, and the prefill of prompts. Returns the costs of these
    two. The first device blocks are overwritten, and must be free.

    The plans have negative numbers, below a scheduler's. ``slots``: how many the host tier has; their bytes
    are only read. ``blocks``: of the pool.
    """
    steps = iter(range(-64, 0))

    def seconds(*rows: PlanRow, loads: tuple[BlockLoad, ...] = ()) -> float:
        best = float("inf")
        for _ in range(3):  # the first warms up
            began = clock()
            handle = runner.launch(plan_of(next(steps), rows, loads=loads))
            handle.tokens()
            handle.moved(wait=True)
            best = min(best, clock() - began)
        return max(best, LEAST)

    count = min(BLOCKS_COPIED, slots, blocks)
    # Each copied alone, as slots and blocks lie after a while.
    copying = seconds(loads=tuple(BlockLoad(at, count - 1 - at) for at in range(count)))
    room = blocks * block_tokens
    chunk = min(TOKENS_TIMED, max(1, room // 4))
    before = min(HISTORY_TIMED, room - chunk)
    table = np.arange(-(-(before + chunk) // block_tokens), dtype=np.int32)

    def computing(first: int) -> float:
        tokens = np.zeros(chunk, dtype=np.int64)
        return seconds(PlanRow(0, 0, first, chunk, tokens, table)) / chunk

    fresh, later = computing(0), computing(before)
    history = max(0.0, later - fresh) / before
    token = max(LEAST, fresh - history * chunk / 2)
    return Costs(copy=count * block_bytes / copying, token=token, history=history)


def _blended(old: float, new: float) -> float:
    return (1 - WEIGHT) * old + WEIGHT * new if old else new


def this_machine(device: str) -> str:
    """A text that names the processor, its cores and ``device``, to tell whether measured costs are of this
    machine."""
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(named, processor)
    return f"{processor}, {os.cpu_count()} cores, {device}"


def _read(path: Path | None, machine: str) -> Costs:
    if path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = msgspec.json.decode(path.read_bytes(), type=Costs)
            if (found.layout, found.machine) == (LAYOUT, machine):
                return found
    return Costs(machine=machine)
