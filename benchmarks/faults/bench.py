"""``holdfast bench faults``: break things while clients talk, and count what was lost or wrong.

Prints a table (fault, tries, lost, wrong, longest gap) and the JSON of every benchmark. Tries are those of a
long run; ``--scale`` multiplies them. Exits 1 if anything was lost or wrong: these are no figures of speed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..report import Goal, show
from . import engine_faults, server_faults
from .crowd import Tally

Row = Callable[[int, int], Awaitable[Tally]]

ROWS: dict[str, tuple[int, Row]] = {
    "kill": (
        200,
        lambda tries, seed: engine_faults.disturbed("engine killed", engine_faults.killed, tries, seed),
    ),
    "kill-twice": (
        40,
        lambda tries, seed: engine_faults.disturbed(
            "engine killed, and while it loads", engine_faults.killed_twice, tries, seed
        ),
    ),
    "stop": (
        20,
        lambda tries, seed: engine_faults.disturbed("engine stopped", engine_faults.stopped, tries, seed),
    ),
    "hang": (5, engine_faults.hung),
    "poison": (10, lambda tries, seed: engine_faults.poisoned(tries)),
    "orphans": (20, server_faults.orphaned),
    "drain": (20, server_faults.drained),
}
"""By name: tries of a long run, and what runs so many with a seed."""


async def measured(names: Sequence[str], scale: float, seed: int) -> list[Tally]:
    """The rows asked for, in the table's order; each is printed when it is done."""
    print(f"{'fault':36} {'tries':>6} {'replies':>8} {'lost':>5} {'wrong':>6} {'longest gap, s':>15}")
    tallies = []
    for name in names:
        tries, run = ROWS[name]
        tally = await run(max(1, round(tries * scale)), seed)
        print(
            f"{tally.fault:36} {tally.tries:6} {tally.replies:8} {tally.lost:5} {tally.wrong:6}"
            f" {tally.gap:15.2f}",
            flush=True,
        )
        tallies.append(tally)
    return tallies


def main(words: Sequence[str]) -> int:
    """Run it; 0 if nothing was lost or wrong."""
    parser = argparse.ArgumentParser(prog="holdfast bench faults", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    tallies = asyncio.run(measured(asked.only, asked.scale, asked.seed))
    figures: dict[str, Any] = {"faults": [tally.row() for tally in tallies]}
    lost, wrong = sum(tally.lost for tally in tallies), sum(tally.wrong for tally in tallies)
    show(
        "faults",
        asked.seed,
        figures,
        [Goal("lost", lost, "replies", 0, "lower"), Goal("wrong", wrong, "replies", 0, "lower")],
    )
    return 1 if lost or wrong else 0
