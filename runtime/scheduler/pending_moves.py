"""Stage and settle followed to their end, for who waits for it: where the tokens came from, or went.

Watches what `offload`, `planner` and the moves do for a sequence between two steps; only a settling takes
the next thing itself: a record that is safe below leaves the tiers above. The clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kv_placement.block_manager import BlockManager
from ..kv_placement.offload import Offload
from ..link.messages import Moved, VerbReply
from ..sequence import Sequence
from .queues import Queues

PATIENCE_SECONDS = 10.0  # then the answer is how far it came
AGAIN_SECONDS = 0.25  # between two tries to have the disk take what it has not: it may be full


@dataclass(slots=True)
class PendingMove:
    """``lowest``: a settling's keys go to disk too; ``left``: those that have not arrived; ``again``: when they
    are sent once more.
    """

    request: int
    sequence: Sequence
    since: float
    settling: bool
    lowest: bool = False
    left: list[bytes] = field(default_factory=list)
    again: float = 0.0
    host: int = 0
    disk: int = 0
    computed: int = 0


class PendingMoves:
    """All stages and settlings that somebody waits for. ``answers`` are for who asks next."""

    def __init__(self, queues: Queues, block_manager: BlockManager, offload: Offload) -> None:
        self._queues = queues
        self._block_manager = block_manager
        self._offload = offload
        self._running: list[PendingMove] = []
        self._answers: list[VerbReply] = []

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return bool(self._running)

    def of_stage(self, request: int, sequence: Sequence, now: float) -> PendingMove:
        """The move of a sequence that is about to be staged: some of it may come at once."""
        move = PendingMove(request, sequence, now, settling=False)
        move.computed = sequence.prefilled + sequence.recomputed
        move.host, move.disk = sequence.host, sequence.disk
        return move

    def of_settle(self, request: int, sequence: Sequence, now: float, *, disk: bool) -> PendingMove:
        """The move of a sequence that has just been settled."""
        lowest = disk and self._offload.disk is not None
        return PendingMove(request, sequence, now, settling=True, lowest=lowest, left=sequence.names())

    def follow(self, move: PendingMove) -> None:
        """Watch ``move`` until it can be answered."""
        self._running.append(move)

    def tick(self, now: float, *, idle: bool) -> None:
        """See how far each is. ``idle``: no step can be planned before a verb or an answer of the disk."""
        for move in list(self._running):
            over = self._settled(move, now) if move.settling else self._staged(move, idle=idle)
            if over or now > move.since + PATIENCE_SECONDS:
                self._running.remove(move)
                moved = self._where(move, now) if move.settling else self._whence(move, now)
                self._answers.append(VerbReply(move.request, move.sequence.state, moved=moved))

    def answers(self) -> list[VerbReply]:
        """Those that became ready since this was asked last."""
        ready, self._answers = self._answers, []
        return ready

    # --- up ---------------------------------------------------------------------------------------------

    def _staged(self, move: PendingMove, *, idle: bool) -> bool:
        sequence = move.sequence
        if self._used(sequence):
            return True
        if self._offload.restore.awaits(sequence) or sequence.planned > sequence.computed:
            return False
        return idle or sequence.id not in self._queues.prefill

    def _whence(self, move: PendingMove, now: float) -> Moved:
        sequence = move.sequence
        left = sequence.computed  # what came twice, since it was taken in between, counts once
        disk = min(left, max(0, sequence.disk - move.disk))
        host = min(left - disk, max(0, sequence.host - move.host - disk))
        computed = min(left - disk - host, max(0, sequence.prefilled + sequence.recomputed - move.computed))
        return Moved(left - disk - host - computed, host, disk, computed, now - move.since)

    # --- down -------------------------------------------------------------------------------------------

    def _settled(self, move: PendingMove, now: float) -> bool:
        sequence = move.sequence
        if (
            self._used(sequence)
            or sequence.id in self._queues.idle_eviction
            or sequence.id in self._queues.leased
        ):
            return True
        move.left = [key for key in move.left if not self._gone_down(key, move)]
        if move.left and move.lowest and now >= move.again:
            self._offload.send(move.left)
            move.again = now + AGAIN_SECONDS
        return not move.left

    def _gone_down(self, key: bytes, move: PendingMove) -> bool:
        """Whether the record is where it is to be, or will not come there; what stands above it lets go."""
        block_manager, disk = self._block_manager, self._offload.disk
        tier = block_manager.transfers.tier
        if tier is None or block_manager.transfers.saving(key):
            return tier is None
        on_disk = disk is not None and key in disk
        if tier.slot_of(key) is None and not on_disk:
            return True
        block = block_manager.pool.index.block_of(key)
        if (
            block is not None
            and not block_manager.pool.references(block)
            and not block_manager.pool.discard(block)
        ):
            return False  # behind the step fence
        if not move.lowest:
            return True
        if on_disk and not tier.promised(key, besides=move.sequence.id):
            tier.drop(key)
        return on_disk

    def _where(self, move: PendingMove, now: float) -> Moved:
        sequence, block_manager, disk = move.sequence, self._block_manager, self._offload.disk
        size, tier = block_manager.block_tokens, block_manager.transfers.tier
        end = (
            0 if sequence.tail is None else sequence.tail[1]
        )  # where it has grown since, it counts for nothing
        found = {"device": 0, "host": 0, "disk": 0}
        for at, key in enumerate(sequence.names()):
            tokens = size if at < len(sequence.keys) else max(0, end - size * at)
            if disk is not None and key in disk and move.lowest:
                found["disk"] += tokens
            elif tier is not None and key in tier:
                found["host"] += tokens
            elif block_manager.pool.index.block_of(key) is not None:
                found["device"] += tokens
            elif disk is not None and key in disk:
                found["disk"] += tokens
        lost = max(0, len(sequence.tokens) - 1 - sum(found.values()))
        return Moved(**found, recomputed=lost, seconds=now - move.since)

    def _used(self, sequence: Sequence) -> bool:
        """Whether it was closed, or has a turn."""
        return sequence.turn is not None or self._queues.sequences.get(sequence.id) is not sequence
