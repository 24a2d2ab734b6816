"""Stage and settle verbs that wait: each is followed to its end and then answered.

Looks at what placement, planner and transfers do for a sequence between two steps. It acts only for a settle: a
record that is safe in a lower tier is dropped from the tiers above.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from ...kvstore.tiers import BELOW, DEVICE, HOST
from ..kv_placement.block_manager import BlockManager
from ..kv_placement.placement import KVPlacement
from ..order.queues import AT_REST, Queues
from ..sequence import Sequence
from ..verbs import Moved, VerbReply

PATIENCE_SECONDS = 10.0  # then the answer is how far it came
AGAIN_SECONDS = 0.25  # between two tries to have the disk take what it has not: it may be full
LOOKS = 512  # the most verbs and records that are looked at between two steps


@dataclass(slots=True)
class PendingMove:
    """One stage or settle verb that waits. ``since``: when it began. ``settling``: it is a settle.
    ``lowest``: its records are to go to disk too; ``left``: keys of its records from the first that is not yet
    where it is to go; ``again``: when they are sent once more. ``host``, ``disk``, ``computed``: the sequence's
    token counts before a stage."""

    request: int
    sequence: Sequence
    since: float
    settling: bool
    lowest: bool = False
    left: deque[bytes] = field(default_factory=deque)
    again: float = 0.0
    host: int = 0
    disk: int = 0
    computed: int = 0


@dataclass(eq=False)
class PendingMoves:
    """All stage and settle verbs that wait for KV to move."""

    _queues: Queues
    _block_manager: BlockManager
    _placement: KVPlacement
    _running: dict[int, PendingMove] = field(default_factory=dict)  # by request

    @property
    def busy(self) -> bool:
        """Whether any verb waits."""
        return bool(self._running)

    def stage(self, request: int, sequence: Sequence, now: float) -> None:
        """Follow a stage verb until it is answered. Call this before the sequence is staged: it notes what the
        sequence has now, and staging may bring some KV before it returns."""
        came, computed = sequence.from_tiers, sequence.work.total
        self._running[request] = PendingMove(
            request, sequence, now, settling=False, host=came.host, disk=came.disk, computed=computed
        )

    def settle(self, request: int, sequence: Sequence, now: float, *, disk: bool) -> None:
        """Follow a settle verb until it is answered, when the sequence has just been settled. ``disk``: its KV
        is to go to disk."""
        lowest = disk and bool(self._block_manager.tiers.below)
        left = deque(self._block_manager.residency.names(sequence))
        self._running[request] = PendingMove(request, sequence, now, settling=True, lowest=lowest, left=left)

    def tick(self, now: float, *, idle: bool) -> list[VerbReply]:
        """Look at the waiting verbs, at those first that were not looked at for longest. Returns the replies
        of verbs that are done, or have waited for `PATIENCE_SECONDS`. ``idle``: nothing is in flight, and
        nothing can be planned."""
        looks, ready = LOOKS, list[VerbReply]()
        for move in list(islice(self._running.values(), LOOKS)):
            if looks <= 0:
                break
            before = len(move.left)
            over = self._is_down(move, now, looks) if move.settling else self._is_up(move, idle=idle)
            looks -= 1 + before - len(move.left)
            del self._running[move.request]
            if not over and now <= move.since + PATIENCE_SECONDS:
                self._running[move.request] = move
            else:
                moved = self._found_where(move, now) if move.settling else self._came_from(move, now)
                ready.append(VerbReply(move.request, move.sequence.state, moved=moved))
        return ready

    def _is_up(self, move: PendingMove, *, idle: bool) -> bool:
        sequence = move.sequence
        if sequence.status not in AT_REST:  # closed, or with a turn
            return True
        if self._placement.awaits(sequence) or sequence.planned > sequence.computed:
            return False
        if self._block_manager.transfers.delays(sequence.table.view):
            return False
        return idle or sequence.id not in self._queues.prefill

    def _came_from(self, move: PendingMove, now: float) -> Moved:
        sequence = move.sequence
        left = sequence.computed  # tokens that came twice, having been taken in between, count once
        disk = min(left, max(0, sequence.from_tiers.disk - move.disk))
        host = min(left - disk, max(0, sequence.from_tiers.host - move.host - disk))
        computed = min(left - disk - host, max(0, sequence.work.total - move.computed))
        return Moved(left - disk - host - computed, host, disk, computed, now - move.since)

    def _is_down(self, move: PendingMove, now: float, looks: int) -> bool:
        sequence = move.sequence
        if sequence.status not in AT_REST or sequence.id in self._queues.idle:
            return True
        while looks and move.left and self._gone_down(move.left[0], move):
            move.left.popleft()
            looks -= 1
        if looks and move.left and move.lowest and now >= move.again:
            self._block_manager.tiers.send(list(islice(move.left, LOOKS)))
            move.again = now + AGAIN_SECONDS
        return not move.left

    def _gone_down(self, key: bytes, move: PendingMove) -> bool:
        """Whether the record is in the tier where the settle wants it, or will not get there, so that nothing
        waits for it. Its copies in the tiers above are dropped."""
        pool, tiers = self._block_manager.pool, self._block_manager.tiers
        if not tiers.slots or self._block_manager.transfers.saving(key):
            return not tiers.slots
        below = tiers.found_below(key)
        if key not in tiers.host and not below:
            return True
        block = pool.index.here.get(key)
        if block is not None and not pool.references.of(block):
            pool.distrust([block])
        if not move.lowest:
            return True
        if below and not tiers.host.promised(key, besides=move.sequence.id):
            tiers.host.drop(key)
        return below

    def _found_where(self, move: PendingMove, now: float) -> Moved:
        sequence, manager = move.sequence, self._block_manager
        size, tiers, on_device = manager.block_tokens, manager.tiers, manager.pool.index.here
        end = 0 if sequence.tail is None else sequence.tail[1]  # tokens that came since are not counted
        found = {DEVICE: 0, HOST: 0, BELOW: 0}
        # Of each block its last group's, as all go alike.
        numbered = dict(manager.residency.numbered(sequence))
        behind = next(iter(numbered), 0)  # nothing needs the blocks before: they go with the next
        levels = tiers.levels(list(numbered.values()), on_device, whole=True)
        for (at, key), level in zip(numbered.items(), levels, strict=True):
            tokens = size if at < len(sequence.keys) else max(0, end - size * at)
            tokens += size * behind if at == behind else 0
            if move.lowest and tiers.found_below(key):
                found[BELOW] += tokens
            else:
                for tier in (HOST, DEVICE, BELOW):
                    if level & tier:
                        found[tier] += tokens
                        break
        lost = max(0, len(sequence.tokens) - 1 - sum(found.values()))
        return Moved(found[DEVICE], found[HOST], found[BELOW], lost, now - move.since)
