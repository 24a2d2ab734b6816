"""KV that comes back from disk: turns that wait for it, and sequences that are expected to be wanted.

A turn whose KV is on disk stands in the queues as *fetching* while others run; its records come through the
host tier piece by piece, and what has come goes to the device while the rest comes, so that a long sequence
needs few slots there. When all have come, or will not, it waits for admission like any other. A sequence
without a turn is fetched for the same way, at the first sign of its return. Where the device is this machine,
what lies in its memory anyway is copied at once, and waits for nobody; and what does not comes *direct*: the
disk only has it in memory, from where it is copied once, to the device. The clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ..counters import Counters
from ..scheduler.preemption import Preemption
from ..scheduler.queues import Queues
from ..sequence import Sequence
from .block_manager import BlockManager
from .costs import CostBook, Restorable, blocks_to_compute

FETCH_SECONDS = 8.0  # a turn waits so long for the disk's next piece, then it is computed
FETCH_POLL_SECONDS = 0.0003  # while a sequence waits for its records
WINDOW_SHARE = 8  # of the host tier's slots one in so many may be on its way up for one sequence
AT_ONCE_BYTES = 64 << 20  # copied to the device between two steps: some 10 ms; and direct on its way at most
FETCHED_SHARE = 0.75  # of the slots may hold what has come for one and finds no room on the device


@dataclass(slots=True)
class _Awaited:
    """Records of a sequence on their way up, in order.

    ::

        [0, moved)        on the device
        [moved, arrived)  in the host tier, or in memory
        [arrived, asked)  on their way there
        [asked, end)      on disk

    ``since``: when it began; ``stirred``: when the last piece came. ``compute_until``: the position up to which
    tokens are computed meanwhile.
    ``tokens``: the sequence's when its records were looked for.
    """

    sequence: Sequence
    tokens: int
    keys: list[bytes]
    since: float
    stirred: float
    compute_until: int = 0
    direct: bool = False
    moved: int = 0
    arrived: int = 0
    asked: int = 0
    broken: bool = False

    def goes_on(self, sequence: Sequence) -> bool:
        """Whether all that could be looked for is on its way."""
        same = self.sequence is sequence and self.tokens == len(sequence.tokens)
        return same and not self.broken and not self.compute_until

    def cut(self) -> None:
        """One of them will not come: what follows it is of no use."""
        self.broken = True
        del self.keys[self.asked :]


class Restore:
    """Brings records from ``disk`` up for the sequences of ``queues``."""

    def __init__(
        self,
        queues: Queues,
        block_manager: BlockManager,
        preemption: Preemption,
        counters: Counters,
        disk: DiskTier | None,
        costs: CostBook | None = None,
    ) -> None:
        self._disk = disk
        self.costs = costs or CostBook(None)
        self._queues = queues
        self._block_manager = block_manager
        self._preemption = preemption
        self._counters = counters
        self._awaited: dict[int, _Awaited] = {}

    def __len__(self) -> int:
        return len(self._awaited)

    def finds(self, sequence: Sequence) -> bool:
        """Whether a tier below the device holds what goes on where the sequence's computed tokens end."""
        located = self._block_manager.residency.locate(sequence)
        return bool(located.in_host() or located.on_disk())

    def fetch(self, sequence: Sequence, now: float, *, direct: bool = True) -> bool:
        """Have what the disk holds of a sequence brought up; whether it has to wait for that.

        A turn need not wait where it is computed instead, by measured costs, or computed from its beginning to
        where it meets what is on its way. ``direct``: past the host tier, where the device is within reach.
        """
        disk, tier = self._disk, self._block_manager.transfers.tier
        if disk is None or tier is None or not len(disk):
            return False
        began = self._awaited.get(sequence.id)
        if disk.reads_directly and (began is None or began.sequence is not sequence):
            before = disk.reading_seconds
            self._read(sequence, disk, tier, disk.offset_known, now)
            sequence.restore_seconds += disk.reading_seconds - before
        meets, skipped = self._meeting(sequence, disk)
        direct &= disk.reads_directly and not meets
        if (
            began is not None
            and began.goes_on(sequence)
            and began.direct <= direct
            and not skipped
            and not meets
        ):
            return True
        keys = self._block_manager.residency.locate(sequence).on_disk()[skipped:]
        if keys:  # what comes up must not take the places of its own beginning
            self._block_manager.transfers.touch(sequence.keys)
        same = began is not None and began.sequence is sequence and began.direct == direct
        since = began.since if same and began is not None else now
        awaited = _Awaited(sequence, len(sequence.tokens), keys, since, now, meets, direct)
        self._ask(awaited, disk, tier, now)
        if not awaited.asked:
            return False
        sequence.from_disk.update(keys)
        self._awaited[sequence.id] = awaited
        if meets:
            sequence.compute_until = meets
        return not meets

    def line_up(self, sequence: Sequence, now: float) -> None:
        """A turn takes its place among the others, or does so when its KV has come up."""
        self._queues.taken(sequence)
        self._queues.restoring[sequence.id] = sequence
        if not self.fetch(sequence, now):
            del self._queues.restoring[sequence.id]
            self._queues.enqueue(sequence)

    def _meeting(self, sequence: Sequence, disk: DiskTier) -> tuple[int, int]:
        """Up to which position a turn is computed meanwhile, 0 for none; and records on disk before it."""
        costs, tier = self.costs.costs(), self._block_manager.transfers.tier
        if costs is None or sequence.turn is None or tier is None or sequence.planned != sequence.computed:
            return 0, 0
        first, on_disk = self._block_manager.residency.locate(sequence).to_restore()
        size = self._block_manager.block_tokens
        held = Restorable(first * size, tuple(on_disk), size, tier.memory.block_bytes)
        count = blocks_to_compute(held, costs)
        sequence.chosen = count * size
        if any(on_disk[:count]) and not (costs.beside and any(on_disk[count:])):
            self.costs.passed_over()
        if count == len(
            on_disk
        ):  # all of it is computed; or nothing full is there, and a tail is not worth it
            return 0, len(sequence.keys) + 1 if count else 0
        return (first + count) * size if count else 0, sum(on_disk[:count])

    def stage(self, sequence: Sequence, now: float) -> None:
        """An idle sequence will be wanted: bring it up, or as far as the host tier first."""
        if self.fetch(sequence, now):
            self._queues.prefill.pop(sequence.id, None)
            self._queues.staged[sequence.id] = sequence

    def tick(self, now: float) -> None:
        """See what has come, and let go on who waited for it."""
        if self._disk is not None:
            for awaited in list(self._awaited.values()):
                self._advance(awaited, self._disk, now)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether anything is on its way up for it."""
        awaited = self._awaited.get(sequence.id)
        return awaited is not None and awaited.sequence is sequence

    # --- inside ---------------------------------------------------------------------------------------

    def _read(
        self,
        sequence: Sequence,
        disk: DiskTier,
        tier: HostTier,
        there: Callable[[bytes], bool],
        now: float,
    ) -> list[bytes]:
        """Read records that lie in this machine's memory to the device, now: no step is in flight.

        Those that go on where the computed tokens end: in the host tier, or on disk and ``there``. At most
        `AT_ONCE_BYTES`, and as many as find blocks. Without one of the disk it does nothing: a plan loads what
        is in the host tier. Returns the keys of those that are on the device now.
        """
        self._adopt(sequence)
        keys = self._block_manager.residency.locate(sequence).readable(there)
        first = next((key for key in keys if key not in tier), None)
        if first is None or not disk.in_page_cache(first):
            return []
        del keys[max(1, AT_ONCE_BYTES // tier.memory.block_bytes) :]
        if len(keys) > self._block_manager.pool.available:
            self._preemption.relieve(len(keys), sequence, now)
        sequence.from_disk.update(key for key in keys if key not in tier)
        own = sequence.computed // self._block_manager.block_tokens
        restored = self._block_manager.read_up(sequence, keys, disk)
        self._counters.restored += restored
        return keys[: len(sequence.table) - own] if restored else []

    def _adopt(self, sequence: Sequence) -> None:
        adopted = self._block_manager.adopt(sequence)
        self._counters.adopted += adopted
        sequence.found(adopted)

    def _ask(self, awaited: _Awaited, disk: DiskTier, tier: HostTier, now: float) -> None:
        """Ask for the next records: as many as may give up their slots for these, or for a while to copy."""
        window = awaited.arrived + max(tier.free, tier.memory.slots // WINDOW_SHARE, 1)
        most = awaited.moved + max(1, int(tier.memory.slots * FETCHED_SHARE))
        if awaited.direct:
            window = most = awaited.moved + max(1, AT_ONCE_BYTES // tier.memory.block_bytes)
        tenant, fetch = awaited.sequence.tenant, self._block_manager.transfers.fetch
        for key in awaited.keys[awaited.asked : min(window, most)]:
            above = self._is_above(key, tier)
            if not above and not fetch(key, now, tenant, direct=awaited.direct):
                if key not in disk:
                    awaited.cut()
                return
            awaited.asked += 1

    def _advance(self, awaited: _Awaited, disk: DiskTier, now: float) -> None:
        """See what has come; have it taken to the device, and ask for more, or be done."""
        tier = self._block_manager.transfers.tier
        assert tier is not None
        before = awaited.arrived
        self._count(awaited, disk, tier)
        if awaited.arrived > before:
            awaited.stirred = now
        if not self._wanted(awaited.sequence):
            awaited.cut()
            awaited.sequence.compute_until = None
        elif awaited.direct and awaited.arrived > awaited.moved and not self._take(awaited, disk, tier, now):
            return self._turn_to_slots(awaited, now)
        if not awaited.broken and now <= awaited.stirred + FETCH_SECONDS:
            self._ask(awaited, disk, tier, now)
        met = self._met(awaited)
        if met and awaited.arrived > awaited.moved:
            awaited.sequence.needs_lookup = True
        over = awaited.arrived == len(awaited.keys) and met
        if over or now > awaited.stirred + FETCH_SECONDS:
            self._arrived(awaited, tier, now)
        return None

    def _take(self, awaited: _Awaited, disk: DiskTier, tier: HostTier, now: float) -> bool:
        """To the device with what has come direct; whether all of it went.

        It does not where blocks are short, where it has left the memory again, or is not what was stored.
        """
        sequence, came = awaited.sequence, set(awaited.keys[awaited.moved : awaited.arrived])
        went: set[bytes] = set()
        while came - went:
            read = self._read(sequence, disk, tier, came.__contains__, now)
            if not read:
                break
            went.update(read)
        if sequence.turn is None:
            self._queues.rank(sequence)
        self._pass_moved(awaited, went)
        return awaited.moved == awaited.arrived

    def _turn_to_slots(self, began: _Awaited, now: float) -> None:
        """What is not on the device yet comes by way of the host tier, if it is to come at all."""
        sequence = began.sequence
        sequence.restore_seconds += now - began.since
        if not self.fetch(sequence, now, direct=False):
            if self._awaited[sequence.id] is began:
                del self._awaited[sequence.id]
            self._let_go(sequence, now)

    def _count(self, awaited: _Awaited, disk: DiskTier, tier: HostTier) -> None:
        keys = awaited.keys
        while awaited.arrived < awaited.asked and not disk.fetching(keys[awaited.arrived]):
            key = keys[awaited.arrived]
            if not awaited.broken and not awaited.direct and not self._is_above(key, tier):
                awaited.cut()
            awaited.arrived += 1
        self._pass_moved(awaited)

    def _pass_moved(self, awaited: _Awaited, went: Container[bytes] = ()) -> None:
        """Count those on the device; ``went``: there, if no longer."""
        on_device, keys = self._block_manager.pool.index.block_of, awaited.keys
        while awaited.moved < awaited.arrived:
            key = keys[awaited.moved]
            if key not in went and on_device(key) is None:
                break
            awaited.moved += 1

    def _is_above(self, key: bytes, tier: HostTier) -> bool:
        return key in tier or self._block_manager.pool.index.block_of(key) is not None

    def _wanted(self, sequence: Sequence) -> bool:
        """Whether it still waits: it was not stopped, closed, or taken for another."""
        queues = self._queues
        waits = queues.restoring.get(sequence.id) is sequence or queues.staged.get(sequence.id) is sequence
        meets = sequence.compute_until is not None and queues.sequences.get(sequence.id) is sequence
        return waits or meets

    def _met(self, awaited: _Awaited) -> bool:
        """Whether the turn has been computed up to what was fetched, or never will be."""
        sequence = awaited.sequence
        return sequence.compute_until is None or sequence.computed >= sequence.compute_until

    def _arrived(self, awaited: _Awaited, tier: HostTier, now: float) -> None:
        sequence = awaited.sequence
        del self._awaited[sequence.id]
        sequence.compute_until = None
        whole = awaited.arrived == len(awaited.keys) and not awaited.broken
        if whole and (self.costs.beside or not awaited.compute_until):
            self.costs.fetched(len(awaited.keys) * tier.memory.block_bytes, awaited.stirred - awaited.since)
        if self._queues.sequences.get(sequence.id) is sequence:
            sequence.restore_seconds += now - awaited.since
            self._let_go(sequence, now)

    def _let_go(self, sequence: Sequence, now: float) -> None:
        """It waits for the disk no longer."""
        sequence.needs_lookup = True
        if self._queues.restoring.pop(sequence.id, None) is not None:
            self._queues.enqueue(sequence)
        elif sequence.turn is None:
            self._queues.staged.pop(sequence.id, None)
            self._queues.touch(sequence, now)
