"""Stage and settle followed to their end, for who waits for it: where the tokens came from, or went.

Watches what `offload`, `planner` and the moves do for a sequence between two steps; only a settling takes
the next thing itself: a record that is safe below leaves the tiers above. The clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kv_placement.block_manager import Paging
from ..kv_placement.offload import Shelving
from ..link.messages import Moved, Reply
from ..sequence import Sequence
from .queues import Roster

PATIENCE_SECONDS = 10.0  # then the answer is how far it came
AGAIN_SECONDS = 0.25  # between two tries to have the disk take what it has not: it may be full


@dataclass(slots=True)
class _Errand:
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


class Errands:
    """All stages and settlings that somebody waits for. ``answers`` are for who asks next."""

    def __init__(self, roster: Roster, paging: Paging, shelving: Shelving) -> None:
        self._roster = roster
        self._paging = paging
        self._shelving = shelving
        self._running: list[_Errand] = []
        self._answers: list[Reply] = []

    @property
    def busy(self) -> bool:
        """Whether somebody waits."""
        return bool(self._running)

    @staticmethod
    def before(request: int, sequence: Sequence, now: float) -> _Errand:
        """The sequence is about to be staged; some of it may come at once."""
        errand = _Errand(request, sequence, now, settling=False)
        errand.computed = sequence.prefilled + sequence.recomputed
        errand.host, errand.disk = sequence.host, sequence.disk
        return errand

    def stage(self, errand: _Errand) -> None:
        """The sequence has been staged."""
        self._running.append(errand)

    def settle(self, request: int, sequence: Sequence, now: float, *, disk: bool) -> None:
        """The sequence has just been settled."""
        lowest = disk and self._shelving.disk is not None
        names = sequence.names()
        self._running.append(_Errand(request, sequence, now, settling=True, lowest=lowest, left=names))

    def tick(self, now: float, *, idle: bool) -> None:
        """See how far each is. ``idle``: no step can be planned before a verb or an answer of the disk."""
        for errand in list(self._running):
            over = self._settled(errand, now) if errand.settling else self._staged(errand, idle=idle)
            if over or now > errand.since + PATIENCE_SECONDS:
                self._running.remove(errand)
                moved = self._where(errand, now) if errand.settling else self._whence(errand, now)
                self._answers.append(Reply(errand.request, errand.sequence.state, moved=moved))

    def answers(self) -> list[Reply]:
        """Those that became ready since this was asked last."""
        ready, self._answers = self._answers, []
        return ready

    # --- up ---------------------------------------------------------------------------------------------

    def _staged(self, errand: _Errand, *, idle: bool) -> bool:
        sequence = errand.sequence
        if self._used(sequence):
            return True
        if self._shelving.fetching.awaits(sequence) or sequence.planned > sequence.computed:
            return False
        return idle or sequence.id not in self._roster.prefill

    def _whence(self, errand: _Errand, now: float) -> Moved:
        sequence = errand.sequence
        left = sequence.computed  # what came twice, since it was taken in between, counts once
        disk = min(left, max(0, sequence.disk - errand.disk))
        host = min(left - disk, max(0, sequence.host - errand.host - disk))
        computed = min(left - disk - host, max(0, sequence.prefilled + sequence.recomputed - errand.computed))
        return Moved(left - disk - host - computed, host, disk, computed, now - errand.since)

    # --- down -------------------------------------------------------------------------------------------

    def _settled(self, errand: _Errand, now: float) -> bool:
        sequence = errand.sequence
        if self._used(sequence) or sequence.id in self._roster.holders or sequence.id in self._roster.leased:
            return True
        errand.left = [key for key in errand.left if not self._gone_down(key, errand)]
        if errand.left and errand.lowest and now >= errand.again:
            self._shelving.send(errand.left)
            errand.again = now + AGAIN_SECONDS
        return not errand.left

    def _gone_down(self, key: bytes, errand: _Errand) -> bool:
        """Whether the record is where it is to be, or will not come there; what stands above it lets go."""
        paging, disk = self._paging, self._shelving.disk
        tier = paging.moves.tier
        if tier is None or paging.moves.saving(key):
            return tier is None
        on_disk = disk is not None and key in disk
        if tier.slot_of(key) is None and not on_disk:
            return True
        block = paging.pool.index.block_of(key)
        if block is not None and not paging.pool.references(block) and not paging.pool.discard(block):
            return False  # behind the step fence
        if not errand.lowest:
            return True
        if on_disk and not tier.promised(key, besides=errand.sequence.id):
            tier.drop(key)
        return on_disk

    def _where(self, errand: _Errand, now: float) -> Moved:
        sequence, paging, disk = errand.sequence, self._paging, self._shelving.disk
        size, tier = paging.block_tokens, paging.moves.tier
        end = (
            0 if sequence.tail is None else sequence.tail[1]
        )  # where it has grown since, it counts for nothing
        found = {"device": 0, "host": 0, "disk": 0}
        for at, key in enumerate(sequence.names()):
            tokens = size if at < len(sequence.keys) else max(0, end - size * at)
            if disk is not None and key in disk and errand.lowest:
                found["disk"] += tokens
            elif tier is not None and key in tier:
                found["host"] += tokens
            elif paging.pool.index.block_of(key) is not None:
                found["device"] += tokens
            elif disk is not None and key in disk:
                found["disk"] += tokens
        lost = max(0, len(sequence.tokens) - 1 - sum(found.values()))
        return Moved(**found, recomputed=lost, seconds=now - errand.since)

    def _used(self, sequence: Sequence) -> bool:
        """Whether it was closed, or has a turn."""
        return sequence.turn is not None or self._roster.sequences.get(sequence.id) is not sequence
