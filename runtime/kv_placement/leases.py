"""Leases: promises to keep KV, within a budget and with a receipt; never a lock.

A lease covers the beginning of a sequence, as much of it as the budget has room for, and grows with it at the
end of each turn. Where KV groups have windows it covers all of the sequence or nothing. What it covers is
evicted last, and is restored shortly before the sequence is expected back. A lease ends with its time or with
its sequence. The time when a sequence is expected back counts without a lease too, as a hint for eviction
(`idle_eviction`).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace

from ...kvstore.priorities import Priorities
from ...kvstore.quotas import tenant_of
from ..order.queues import Queues
from ..sequence import GrantedLease, Sequence
from ..settings import SchedulerSettings
from ..verbs import Grant, Lease, Receipt
from .block_manager import BlockManager
from .placement import KVPlacement

MOST_SECONDS = 86_400.0
USUAL_SECONDS = 300.0
MOST_PRIORITY = 8
LEAD_SECONDS = 0.5  # KV is restored so long before the expected return


class Leases:
    """All leases of one engine. Together they may cover a share (`SchedulerSettings.lease_share`) of the
    pool's blocks, and the same share of the host tier's slots.

    A tenant's leases cover no more blocks than its cap in `SchedulerSettings.lease_caps`, and no more
    records.
    """

    def __init__(
        self, settings: SchedulerSettings, queues: Queues, block_manager: BlockManager, placement: KVPlacement
    ) -> None:
        self._settings = settings
        self._queues = queues
        self._block_manager = block_manager
        self._placement = placement
        self._ends = Priorities[int]()  # ids of the sequences with a lease, by its end
        self._expected = Priorities[int]()  # and of those that are expected back; some are back by now
        self._blocks: Counter[int] = Counter()  # that leases cover, by tenant
        self._records: Counter[int] = Counter()
        root = block_manager.residency.root
        self._caps = {tenant_of(root(salt)): most for salt, most in settings.lease_caps.items()}

    def __len__(self) -> int:
        return len(self._ends)

    def grant(self, sequence: Sequence, wish: Lease, now: float) -> Receipt:
        """Give the sequence the lease that ``wish`` asks for, instead of the one it has, as far as the
        budget allows. Returns the receipt: whether all, a part or nothing was granted. With a ``ttl`` of 0
        only the expected return is noted."""
        self.end(sequence)
        asked = USUAL_SECONDS if wish.ttl is None else wish.ttl
        ttl = _within(asked, 0.0, MOST_SECONDS)
        back = ttl if wish.returns_in is None else wish.returns_in
        returns_in = _within(back, 0.0, ttl or MOST_SECONDS)
        priority = int(_within(wish.priority or 0, -MOST_PRIORITY, MOST_PRIORITY))
        if not ttl or self._room(sequence)[0] < 1:
            self._expect(sequence, None if wish.returns_in is None else now + returns_in, now)
            if ttl:
                return Receipt(Grant.DENIED, 0, 0.0, 0.0 if wish.returns_in is None else returns_in, 0, 0)
            grant = Grant.GRANTED if (asked, back) == (0.0, returns_in) else Grant.CLIPPED
            return Receipt(grant, 0, 0.0, returns_in, 0, 0)
        self._set(sequence, GrantedLease(priority, now + returns_in, 0, 0))
        self._ends.put(sequence.id, now + ttl)
        self._expect(sequence, now + returns_in, now)
        self.cover(sequence)
        tokens, below = self._covered(sequence)
        whole = (asked, back, wish.priority or 0, len(sequence.tokens)) == (ttl, returns_in, priority, tokens)
        grant = Grant.GRANTED if whole else Grant.CLIPPED
        return Receipt(grant, priority, ttl, returns_in, tokens, below)

    def cover(self, sequence: Sequence) -> None:
        """Extend the sequence's lease to its present tokens, as far as the budget goes, and tell the tiers
        which records are leased. Does nothing without a lease."""
        lease = sequence.lease
        if lease is None:
            return
        names, windows = self._block_manager.residency.names(sequence), self._block_manager.windows
        block_room, record_room = self._room(sequence)
        wanted = windows.blocks(len(sequence.tokens))
        blocks, records = min(wanted, block_room), min(len(names), record_room)
        if windows.narrow:  # a beginning is of no use without what the next token sees
            blocks, records = (wanted if blocks == wanted else 0), (records if records == len(names) else 0)
        self._set(sequence, replace(lease, blocks=blocks, records=records))
        self._block_manager.tiers.lease(sequence.id, names[:records], lease.returns)

    def end(self, sequence: Sequence) -> None:
        """End the sequence's lease, if there is one, and forget when the sequence is expected back. Its KV
        can be evicted like any other then."""
        sequence.expect_return(None)
        self._expected.discard(sequence.id)
        self._ends.discard(sequence.id)
        if sequence.lease is not None:
            self._set(sequence, None)
            self._block_manager.tiers.lease(sequence.id, [], 0.0)
            self._rank(sequence)

    def tick(self, now: float) -> None:
        """End leases that are over, and restore sequences that are expected back soon."""
        while (first := self._ends.first) is not None and self._ends[first] <= now:
            self.end(self._queues[first])
        while self._next_return() <= now + LEAD_SECONDS:
            sequence = self._queues[self._expected.first or 0]
            self._expected.discard(sequence.id)
            # What lies in no tier is computed before the turn only with a lease: without one the sequence may
            # be late, and lose it again.
            if sequence.turn is None and (sequence.lease is not None or self._placement.finds(sequence)):
                sequence.look_up()
                self._queues.touch(sequence, now)
                self._placement.stage(sequence, now)

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: never."""
        first = self._ends.first
        ends = math.inf if first is None else self._ends[first]
        next_one = min(ends, self._next_return() - LEAD_SECONDS)
        return None if next_one == math.inf else max(0.0, next_one - now)

    def statistics(self) -> dict[str, float]:
        """How many leases there are, how many blocks of the device they cover, and how many records of blocks
        in the host tier."""
        blocks, records = self._blocks.total(), self._records.total()
        return {"leases": len(self), "leased_blocks": blocks, "leased_records": records}

    def _set(self, sequence: Sequence, lease: GrantedLease | None) -> None:
        """Give the sequence this lease instead of the one it has, and count what leases cover."""
        before, tenant = sequence.lease, sequence.tenant
        self._blocks[tenant] += (lease.blocks if lease else 0) - (before.blocks if before else 0)
        self._records[tenant] += (lease.records if lease else 0) - (before.records if before else 0)
        sequence.lease = lease

    def _expect(self, sequence: Sequence, returns: float | None, now: float) -> None:
        """Note that the sequence is expected back at ``returns``; None: that is not known.

        Shortly before that time `tick` restores it. Without a lease, a sequence that is expected right now is
        not restored by `tick`: its turn asks for the KV itself.
        """
        sequence.expect_return(returns)
        if returns is not None and (sequence.lease is not None or returns > now + LEAD_SECONDS):
            self._expected.put(sequence.id, returns)
        self._rank(sequence)

    def _next_return(self) -> float:
        """When the next sequence is expected back; infinite if none is. Those that are back are forgotten."""
        while (first := self._expected.first) is not None:
            if self._queues[first].returns is not None:
                return float(self._expected[first])
            self._expected.discard(first)
        return math.inf

    def _rank(self, sequence: Sequence) -> None:
        if sequence.id in self._queues.idle:
            self._queues.idle.put(sequence)

    def _room(self, sequence: Sequence) -> tuple[int, int]:
        """How many blocks and host slots the sequence's lease may cover: what the other leases leave of the
        budget, and of its tenant's cap."""
        own, tenant = sequence.lease, sequence.tenant
        own_blocks, own_records = (0, 0) if own is None else (own.blocks, own.records)
        share, cap = self._settings.lease_share, self._caps.get(tenant, sys.maxsize)
        blocks = int(share * self._settings.blocks) - self._blocks.total() + own_blocks
        records = int(share * self._block_manager.tiers.slots) - self._records.total() + own_records
        return (
            min(blocks, cap - self._blocks[tenant] + own_blocks),
            min(records, cap - self._records[tenant] + own_records),
        )

    def _covered(self, sequence: Sequence) -> tuple[int, int]:
        """How many tokens the sequence's lease covers on the device, and in the host tier."""
        lease = sequence.lease
        assert lease is not None
        size, length = self._settings.block_tokens, len(sequence.tokens)
        manager = self._block_manager
        below = min(lease.records // manager.groups, len(sequence.keys)) * size
        if lease.records == len(manager.residency.names(sequence)):
            below = len(sequence.keys) * size if sequence.tail is None else max(below, sequence.tail[1])
        return min(length, manager.windows.within(lease.blocks, length) * size), min(length, below)


def _within(value: float, least: float, most: float) -> float:
    return least if math.isnan(value) else min(max(value, least), most)
