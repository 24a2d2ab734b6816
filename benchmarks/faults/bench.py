"""``holdfast bench faults``: break things while clients talk, and count what was lost or wrong.

Prints a table (fault, tries, lost, wrong, longest gap) and the JSON of every benchmark. The number
of tries is for a long run; ``--scale`` multiplies it, ``--tries`` replaces it; ``--only`` runs rows by name.
Exits 1 if anything was lost or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .. import steps
from ..report import Goal, show
from . import badio, engine_faults, file_faults, server_faults, store_faults, tier_faults
from .crowd import FaultTally

log = logging.getLogger(__name__)

Row = Callable[[int, int], Awaitable[FaultTally]]


def aside(row: Callable[[int, int], FaultTally]) -> Row:
    return lambda tries, seed: asyncio.to_thread(row, tries, seed)


def stormed(tries: int, seed: int) -> FaultTally:
    """Run `benchmarks.steps` with each of its settings. A try is a step."""
    tally = FaultTally("steps under pressure")
    for course in steps.COURSES.values():
        passed = steps.run(course, -(-tries // len(steps.COURSES)), seed)
        tally.tries += passed.steps
        tally.replies += passed.turns
        tally.wrong += bool(passed.mismatch)
        tally.notes += [passed.mismatch] * bool(passed.mismatch)
    return tally


Disturbed = Callable[[str, engine_faults.Strike, int, int], Awaitable[FaultTally]]


def struck(disturbed: Disturbed, fault: str, strike: engine_faults.Strike) -> Row:
    """Make a row of the table. ``disturbed`` runs it: it causes the fault by ``strike``, at the engine or the
    disk process, at random moments. ``fault``: its name in the table."""
    return lambda tries, seed: disturbed(fault, strike, tries, seed)


_PLAIN, _TIERED = engine_faults.disturbed, tier_faults.disturbed
ROWS: dict[str, tuple[int, Row]] = {
    "kill": (200, struck(_PLAIN, "engine killed", engine_faults.killed)),
    "kill-twice": (40, struck(_PLAIN, "engine killed, and while it loads", engine_faults.killed_twice)),
    "stop": (20, struck(_PLAIN, "engine stopped", engine_faults.stopped)),
    "hang": (5, engine_faults.hung),
    "poison": (10, lambda tries, seed: engine_faults.poisoned(tries)),
    "kill-tiers": (60, struck(_TIERED, "engine killed, tiers on", engine_faults.killed)),
    "kill-disk": (60, struck(_TIERED, "disk process killed", tier_faults.disk_process_killed)),
    "stop-disk": (10, struck(_TIERED, "disk process stopped", tier_faults.disk_process_stopped)),
    "restart": (40, tier_faults.restarted),
    "cuts": (2000, tier_faults.cut),
    "orphans": (20, server_faults.orphaned),
    "drain": (20, server_faults.drained),
    "flip-kv": (1000, aside(file_faults.flipped_records)),
    "flip-journal": (1000, aside(file_faults.flipped_journal)),
    "cut-kv": (100, aside(file_faults.truncated_records)),
    "cut-journal": (100, aside(file_faults.truncated_journal)),
    "journal-pages": (400, aside(file_faults.damaged_pages)),
    "journal-gone": (100, aside(file_faults.vanished_journal)),
    "full-kv": (48, aside(file_faults.full_records)),
    "full-journal": (24, aside(file_faults.full_journal)),
    "fill-disk": (10, tier_faults.filled),
    "two-servers": (220, store_faults.two_servers),
    "moved-store": (60, store_faults.moved),
    "clocks": (100, store_faults.stepped),
    "kill-merge": (400, store_faults.killed_in_merges),
    "empty-disk": (60, store_faults.emptied),
    "badio-kv": (1000, lambda tries, seed: badio.worked("kv", tries)),
    "badio-journal": (1000, lambda tries, seed: badio.worked("journal", tries)),
    "steps": (1_000_000, aside(stormed)),
}
"""The rows of the table by name: the number of tries of a long run, and the function that makes so many tries
with a seed. Those of `badio` end earlier if every k was tried."""


async def measured(
    names: Sequence[str], scale: float, seed: int, most: int | None = None
) -> list[FaultTally]:
    """Run the rows asked for, in the table's order. Each is printed when it is done, with how long it took.
    ``scale`` multiplies the number of tries; ``most``: the number of tries of each row instead; None: not
    set."""
    head = ("tries", "replies", "lost", "wrong", "longest gap, s", "took, s")
    print(
        f"{'fault':36}", *(f"{name:>{width}}" for name, width in zip(head, (7, 8, 5, 6, 15, 8), strict=True))
    )
    tallies = []
    for name in names:
        tries, run = ROWS[name]
        began = time.monotonic()
        tally = await _run(name, run, most or max(1, round(tries * scale)), seed)
        print(
            f"{tally.fault:36} {tally.tries:7} {tally.replies:8} {tally.lost:5} {tally.wrong:6}"
            f" {tally.gap:15.2f} {time.monotonic() - began:8.0f}",
            flush=True,
        )
        tallies.append(tally)
    return tallies


async def _run(name: str, run: Row, tries: int, seed: int) -> FaultTally:
    """Run one row. A row that raises counts as wrong, so that the later rows still run."""
    try:
        return await run(tries, seed)
    except Exception as fault:
        log.exception("row %s", name)
        return FaultTally(name, wrong=1, notes=[f"the row ended: {type(fault).__name__}: {fault}"])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast bench faults", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--tries", type=int, help="of each row, instead of the long run's")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    tallies = asyncio.run(measured(asked.only, asked.scale, asked.seed, asked.tries))
    figures: dict[str, Any] = {"faults": [vars(tally) for tally in tallies]}
    lost, wrong = sum(tally.lost for tally in tallies), sum(tally.wrong for tally in tallies)
    goals = [Goal("lost", lost, "replies", 0, "lower"), Goal("wrong", wrong, "replies", 0, "lower")]
    show("faults", asked.seed, figures, goals)
    return 1 if lost or wrong else 0
