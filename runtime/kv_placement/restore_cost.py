"""Restore, recompute, or both at once: the choice by measured costs, as a pure function of plain numbers.

::

    [0, have)          computed
    [have, meet)       computed now, while the disk brings up what follows
    [meet, end)        restored: fetched from disk where it must be, then copied to the device

Computing goes from the beginning, as a token needs all before it; so what is fetched meanwhile is the end, and
the two meet. ``meet = have`` restores everything, ``meet = end`` computes everything. Knows no tier, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass


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
class Held:
    """What lower tiers hold behind ``first`` computed tokens: blocks in order, True for those only on disk."""

    first: int
    on_disk: tuple[bool, ...]
    block_tokens: int
    block_bytes: int


def blocks_to_compute(held: Held, costs: Costs | None) -> int:
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


def _ends(held: Held, costs: Costs, count: int, fetched: int) -> float:
    computing = costs.computing(held.first, held.first + count * held.block_tokens)
    fetching = costs.fetching(fetched * held.block_bytes)
    copying = costs.copying((len(held.on_disk) - count) * held.block_bytes)
    waiting = max(computing, fetching) if costs.beside else computing + fetching
    return waiting + copying
