"""Numbers of sequences that change in each step, as arrays by slot: for rows that merely decode, planning and
committing add to arrays and touch no object.

A sequence with a slot of the batch keeps these numbers here, and nowhere else: its own attributes read and
write them (`sequence.InColumn`). Such a write takes the sequence out of the rows that merely decode
(``plain``), until a row that goes through Python finds that it does nothing else from then on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FRESH = 64
"""So many sampled tokens of a sequence are gathered here before they go to its list of tokens."""
STOPS = 4
NO_STOP = NO_GRAMMAR = NO_ADAPTER = -1


class Columns:
    """Arrays ``[slots]``, int64 unless stated; tenants are uint64.

    ``seqs``: the sequence's number, -1 for a free slot; ``tenants``: its tenant's. ``computed``, ``planned``,
    ``pending_samples``, ``told``, ``mark``: as in `Sequence`. ``fresh``: int32 ``[slots, FRESH]``, tokens
    that its list of tokens lacks; ``fresh_count``: how many.

    ``plain``, bool: it has a turn, and each next row of it computes its last token and draws the next one, as
    long as it has blocks. Valid where it is plain: ``epochs``; ``lengths``, its number of tokens; ``prompts``,
    where its prompt ends; ``ends``, how many tokens it may have; ``rooms``, how many its blocks hold; ``last``,
    ``before``, its last token and the one before that; ``gather``, as in `TokenLimits`; ``adapters``, the slot
    of its adapter, -1 for none; ``grammars``, the number of its grammar, -1 for none; ``reads``, bool: drawing
    reads the past, of which the batch has ``heard`` tokens; ``rewired``, bool: its table has blocks that the
    batch lacks; ``stops``, ``[slots, stop ids]``, padded with -1. ``version``: another number whenever
    ``plain`` changes."""

    def __init__(self, slots: int) -> None:
        def numbers() -> NDArray[np.int64]:
            return np.zeros(slots, dtype=np.int64)

        self.seqs = np.full(slots, -1, dtype=np.int64)
        self.tenants = np.zeros(slots, dtype=np.uint64)
        self.computed, self.planned, self.pending_samples = numbers(), numbers(), numbers()
        self.told, self.mark, self.fresh_count = numbers(), numbers(), numbers()
        self.fresh = np.zeros((slots, FRESH), dtype=np.int32)
        self.plain, self.reads, self.rewired = (np.zeros(slots, dtype=bool) for _ in range(3))
        self.epochs, self.lengths, self.prompts, self.ends, self.rooms = (numbers() for _ in range(5))
        self.last, self.before, self.gather, self.heard, self.grammars = (numbers() for _ in range(5))
        self.adapters = np.full(slots, NO_ADAPTER, dtype=np.int64)
        self.stops = np.full((slots, STOPS), NO_STOP, dtype=np.int64)
        self.version = 0
        self._marks = 0

    def begin(self, slot: int, seq: int, tenant: int) -> None:
        """Take a sequence in, which then writes its numbers."""
        self.seqs[slot], self.tenants[slot] = seq, tenant
        self.take_back(slot)
        self.fresh_count[slot] = 0
        self.not_plain(slot)

    def end(self, slot: int) -> None:
        """Let a sequence go."""
        self.begin(slot, -1, 0)

    def take_back(self, slot: int) -> None:
        """Let the slot's rows in flight count no more: give it another mark."""
        self._marks += 1
        self.mark[slot] = self._marks

    def not_plain(self, slot: int) -> None:
        """Have the slot's next row go through Python."""
        if self.plain[slot]:
            self.plain[slot] = False
            self.version += 1

    def take_fresh(self, slot: int) -> NDArray[np.int32]:
        """The tokens that the sequence's list lacks; they are not here any more."""
        count, self.fresh_count[slot] = int(self.fresh_count[slot]), 0
        return self.fresh[slot, :count]
