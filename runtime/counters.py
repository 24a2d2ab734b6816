"""What the engine has done since it started. Counts only; gauges are read where they live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Tokens: ``computed`` by all rows; of these ``prefilled`` for the first time and ``recomputed``, the rest
    decoded; ``adopted`` from the prefix cache, ``restored`` from the host tier, ``sampled``, ``forced`` by
    grammars without being sampled.

    Rows: ``rows``, ``discarded`` (their sequence had moved on), ``faults``. Sequences: ``turns`` ended,
    ``preempted`` (running), ``taken`` (idle or waiting ones that lost their KV). ``stalls``: rows left out
    for want of blocks. ``copies``: blocks. ``steps``: plans made. ``isolations``: steps taken apart to find a
    culprit.
    """

    steps: int = 0
    rows: int = 0
    discarded: int = 0
    faults: int = 0
    computed: int = 0
    prefilled: int = 0
    recomputed: int = 0
    adopted: int = 0
    restored: int = 0
    sampled: int = 0
    forced: int = 0
    turns: int = 0
    preempted: int = 0
    taken: int = 0
    stalls: int = 0
    copies: int = 0
    isolations: int = 0

    def landed(self, computed: int, prefilled: int, recomputed: int) -> None:
        """A row computed so many tokens, of these so many for the first time and so many again."""
        self.computed += computed
        self.prefilled += prefilled
        self.recomputed += recomputed

    def drawn(self, tokens: int) -> None:
        """A row sampled so many tokens."""
        self.sampled += tokens
