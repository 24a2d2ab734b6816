"""Copies between device blocks and the host tier, as data: saves and loads for the plan being made.

Evicted blocks are saved by the plan being made; a save that finds no slot is dropped. Saves of blocks that
stay on the device may wait. Where copies make a step longer, a step that samples carries only a few of these,
because turns wait for it. A slot that is loaded is held from the plan until that is done; a slot that is filled
is found after it. Without a tier every method does nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap

import numpy as np
from numpy.typing import NDArray

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ..plan import BlockLoad, BlockSave, Plan

FEW, PART, MANY = 2, 8, 16
"""How many saves of blocks that stay on the device a step that samples carries, where copies make it longer:
of those that wait one in ``PART``, at least ``FEW`` and at most ``MANY``."""

AT_ONCE = 256
"""How many blocks that stay on the device a plan saves, and how many it loads for one sequence, where copies
run beside the steps: to enqueue them takes the host's time, and a launch waits for that."""

ALONE = 8
"""How many saves of blocks that stay on the device a plan without rows carries, where copies take the
device's time: a verb that comes meanwhile waits for them."""


@dataclass(eq=False)
class Transfers:
    """Collects copies between the pool's blocks and the host tier ``tier``, below which is ``disk``, until a
    plan takes them.

    ``block_of``: gives the block that a key names in the pool. ``block_tokens``: tokens in a block.
    ``beside``: copies run beside the step and delay nothing. ``saved``, ``loaded``: blocks copied so far.
    """

    tier: HostTier | None
    _block_of: Callable[[bytes], int | None]
    _block_tokens: int
    disk: DiskTier | None
    _beside: bool
    saved: int = 0
    loaded: int = 0
    _wanted: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # (block, tokens), saved next
    _spare: set[bytes] = field(default_factory=set)  # of those: saved only if no record is evicted for them
    # Full blocks, here until `evicted`; spare, too. OrderedDict: its first is O(1) even after deletions.
    _staying: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _loads: list[BlockLoad] = field(default_factory=list)
    _loading: Counter[int] = field(default_factory=Counter)  # loads of each block that are not done
    _leaving: set[bytes] = field(default_factory=set)  # see `foresee_evictions`
    _tenants: dict[int, int] = field(default_factory=dict)  # by block: of its content when sealed or loaded

    @property
    def waiting(self) -> bool:
        """Whether saves or loads wait for a plan; a plan without rows can carry them, too."""
        return bool(self._wanted or self._staying or self._loads)

    def save(self, key: bytes, block: int, tokens: int | None = None, tenant: int = 0) -> None:
        """Have the first ``tokens`` tokens (None: all) of a tenant's block copied to the host tier, under
        ``key``, by one of the next plans. The block's content must be committed. Does nothing if the host
        tier has the record.

        A full block stays on the device until `evicted`. So its copy is a spare one: no other record is
        evicted to make room for it, and it is the first to be evicted.
        """
        self._tenants[block] = tenant
        if self.tier is None or self.tier.has_slot(key):
            return
        if tokens is not None:
            self._wanted[key] = block, tokens
        elif key not in self._wanted:
            self._staying[key] = block

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Have host slots copied into allocated blocks, before the rows of the plan being made. ``pairs``:
        (slot, block) of each. The slots are held until that is done."""
        assert self.tier is not None
        self.tier.hold(*(slot for slot, _ in pairs))
        tenant_of = self.tier.tenant_of
        self._tenants.update((block, tenant_of(slot)) for slot, block in pairs)
        self._loads.extend(starmap(BlockLoad, pairs))
        self._loading.update(block for _, block in pairs)

    def at_once(self, blocks: int) -> int:
        """How many of so many blocks one plan may load for one sequence."""
        return min(blocks, AT_ONCE) if self._beside else blocks

    def delays(self, table: NDArray[np.int32]) -> bool:
        """Whether loads to these blocks are not done and run beside the steps: then a row that reads the
        blocks now would keep the others in its step waiting. int32 ``[blocks]``."""
        return self._beside and bool(self._loading) and bool(np.isin(table, list(self._loading)).any())

    def read_into(self, blocks: Iterable[int], tenant: int) -> None:
        """Note that records of ``tenant`` were read into these blocks without a plan, so that later saves of
        the blocks count for this tenant."""
        self._tenants.update(dict.fromkeys(blocks, tenant))

    def pending(self) -> set[int]:
        """The blocks that the plan being made saves or loads: nothing but a plan may write them. Those that
        stay on the device are not among them: they cannot be allocated before `evicted`."""
        return {block for block, _ in self._wanted.values()} | {load.block for load in self._loads}

    def checked(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the leading records of ``keys`` that the host tier holds, up to the first that it does
        not hold; their bytes are checked."""
        return [] if self.tier is None else self.tier.find(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these records of the host tier as used now, in this order."""
        if self.tier is not None:
            self.tier.touch(keys)

    def lease(self, holder: int, keys: Sequence[bytes], returns: float) -> None:
        """Let the lease of the sequence ``holder`` cover the records ``keys``, and no others, so that the
        lower tiers evict them last. ``returns``: when it is expected back, in seconds."""
        if self.tier is not None:
            self.tier.lease(holder, keys, returns)

    def saving(self, key: bytes) -> bool:
        """Whether the record will be in the host tier soon: its save waits for a plan, or runs."""
        return (
            key in self._wanted
            or key in self._staying
            or (self.tier is not None and self.tier.has_slot(key) and self.tier.slot_of(key) is None)
        )

    def evicted(self, block: int, key: bytes, wanted: bool = True) -> None:
        """Note that the pool evicted a full block. If a tier below has its record, count that as used now;
        else have the block saved by the plan being made. If not ``wanted``, it is saved only where no other
        record has to go for it."""
        if self.tier is None:
            return
        self._staying.pop(key, None)
        on_disk = self.disk is not None and self.disk.stored(key)
        if not on_disk and not self.tier.has_slot(key):
            self._wanted[key] = block, self._block_tokens
            if not wanted:
                self._spare.add(key)
        elif wanted and self.tier.has_slot(key):
            self.tier.touch([key])
        elif wanted and self.disk is not None:
            self.disk.touch(key)
        if wanted:
            self._spare.discard(key)

    def fetch(self, key: bytes, now: float, tenant: int, *, direct: bool) -> bool:
        """Ask the disk process to bring a record up, into a host slot that counts as ``tenant``'s, or with
        ``direct`` into the page cache. Returns whether it is on its way. If a slot is taken from another
        record, that one counts as used now on disk."""
        assert self.disk is not None
        fetching = self.disk.fetch(key, now, tenant, direct=direct)
        self._note_evicted()
        return fetching

    def foresee_evictions(self, share: int, most: int, at_once: int) -> tuple[list[bytes], list[bytes]]:
        """Foresee which records the host tier evicts next that the device does not have: of each tenant's one
        in ``share``, ``most`` at most. Returns the keys of those that came since the last call, about
        ``at_once`` at most, and of those that are foreseen no longer. O(changes since the last call).

        On disk they count as used now, and not again when the host tier evicts them. Those that are foreseen
        no longer are evicted first on disk if a tier above has them.
        """
        tier, disk, block_of = self.tier, self.disk, self._block_of
        assert tier is not None and disk is not None
        came, gone = tier.foresee(share, most, at_once)
        self._leaving.difference_update(gone)
        disk.evict_first(key for key in gone if key in tier or block_of(key) is not None)
        here, alone = tier.here, [key for key in came if block_of(key) is None]
        # The others gave way before: they are on the device too, as they were used or computed again there.
        tier.evict_first(here[key] for key in came if block_of(key) is not None)
        for key in alone:
            disk.touch(key)
        self._leaving.update(alone)
        return alone, gone

    def foresees(self, key: bytes) -> bool:
        """Whether `foresee_evictions` has named the record, and it is still foreseen."""
        return key in self._leaving

    def _note_evicted(self) -> None:
        """Tell the disk tier which records the host tier has evicted: there they count as used now.
        Records of a foreseen eviction were told before, and are left out."""
        for key in () if self.tier is None else self.tier.take_evicted():
            if self.disk is not None and key not in self._leaving:
                self.disk.touch(key)

    def retire(self, keys: Sequence[bytes]) -> None:
        """Let the host tier and the disk evict these records first, the last of them first: they are unlikely
        to be wanted again."""
        if self.tier is not None:
            here = self.tier.here
            self.tier.evict_first(here[key] for key in keys if key in here)
        if self.disk is not None:
            self.disk.evict_first(reversed(keys))

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Drop a record from all tiers below the device; with ``erase`` its bytes leave the disk soon."""
        self._wanted.pop(key, None)
        self._staying.pop(key, None)
        if self.tier is not None:
            self.tier.drop(key)
        if self.disk is not None:
            (self.disk.drop if erase else self.disk.supersede)(key)

    def emit(self, *, rows: int, draws: bool) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """The saves and loads for the plan that goes out now: they leave the queues here. A save for which the
        host tier has no slot is dropped. ``rows``: how many it has; ``draws``: one of them draws a token."""
        if not self.waiting:
            return (), ()
        due = [(key, *save, key in self._spare) for key, save in self._wanted.items()]
        due += [(key, block, self._block_tokens, True) for key, block in self._in_time(rows, draws)]
        saves = []
        for key, block, tokens, spare in due:
            tenant = self._tenants.get(block, 0)
            slot = None if self.tier is None else self.tier.reserve(key, tokens, tenant, spare=spare)
            if slot is not None:
                saves.append(BlockSave(block, slot, tokens, spare))
        self._note_evicted()
        loads = tuple(self._loads)
        self._wanted.clear()
        self._spare.clear()
        self._loads.clear()
        return tuple(saves), loads

    def _in_time(self, rows: int, draws: bool) -> Iterator[tuple[bytes, int]]:
        """Yield pairs (key, block): the blocks that stay on the device and are saved with a plan of so many
        ``rows``, the longest waiting first; how many depends on what they would delay.

        A block that holds something else by now is left out.
        """
        left = len(self._staying)
        if self._beside:
            left = AT_ONCE
        elif not rows:
            left = ALONE
        elif draws:
            left = min(max(FEW, -(-left // PART)), MANY)
        while self._staying and left:
            key, block = self._staying.popitem(last=False)
            if self._block_of(key) == block:
                left -= 1
                yield key, block

    def finish(self, plan: Plan) -> None:
        """Note that the plan's saves and loads are made: records that it saved can be found from now on, and
        slots that it loaded may be evicted."""
        if self.tier is None:
            return
        for save in plan.saves:
            self.tier.filled(save.slot)
        self._loading -= Counter(load.block for load in plan.loads)
        self.tier.release(*(load.slot for load in plan.loads), above=True)
        self.tier.evict_first(save.slot for save in plan.saves if save.spare)
        self.saved += len(plan.saves)
        self.loaded += len(plan.loads)

    def revoke(self, plan: Plan) -> None:
        """Give up the slots of the plan's saves, and release those of its loads: its step failed, so it is
        not known which copies were made."""
        if self.tier is None:
            return
        for save in plan.saves:
            self.tier.abandon(save.slot)
        self._loading -= Counter(load.block for load in plan.loads)
        self.tier.release(*(load.slot for load in plan.loads))

    def statistics(self) -> dict[str, float]:
        """The statistics of the host tier (`HostTier.statistics`), and how many blocks were saved to it and
        loaded from it since the start; empty without a tier."""
        if self.tier is None:
            return {}
        tier = {f"host_{name}": value for name, value in self.tier.statistics().items()}
        return {**tier, "host_saved": self.saved, "host_loaded": self.loaded}

    def audit_in_slices(self) -> Iterator[None]:
        """Check the host tier's state, a slice at a time (`HostTier.audit_in_slices`). Raises `LeakFound`."""
        if self.tier is not None:
            yield from self.tier.audit_in_slices()
