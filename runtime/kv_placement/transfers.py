"""Copies between device blocks and the host tier, as data: saves and loads for the plan being made.

Evicted blocks are saved by the plan being made; a save that finds no slot is dropped. Saves of blocks that
stay on the device may wait. Where copies make a step longer, a step that samples carries only a few of these,
because turns wait for it. A slot that is loaded is held from the plan until that is done; a slot that is filled
is found after it. Without a host tier nothing is saved, and nothing can be loaded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...kvstore.tiers import Tiers
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

PARTS = 8
"""When the host tier is full, a step loads at most one part in this many of its slots."""


@dataclass(eq=False)
class Transfers:
    """Collects copies between the pool's blocks and the slots of the host tier, the first of ``tiers``, until a
    plan takes them.

    ``block_of``: gives the block that a key names in the pool. ``block_tokens``: tokens in a block.
    ``beside``: copies run beside the step and delay nothing. ``saved``, ``loaded``: blocks copied so far.
    """

    tiers: Tiers
    _block_of: Callable[[bytes], int | None]
    _block_tokens: int
    _beside: bool
    saved: int = 0
    loaded: int = 0
    # To be saved next: block, tokens, and whether it is spare: saved only if no record is evicted for it.
    _wanted: dict[bytes, tuple[int, int, bool]] = field(default_factory=dict)
    # Full blocks, here until `evicted`; spare, too. OrderedDict: its first is O(1) even after deletions.
    _staying: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _loads: list[BlockLoad] = field(default_factory=list)
    _loading: Counter[int] = field(default_factory=Counter)  # loads of each block that are not done
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
        if not self.tiers.slots or self.tiers.host.has_slot(key):
            return
        if tokens is not None:
            self._wanted[key] = block, tokens, False
        elif key not in self._wanted:
            self._staying[key] = block

    def load(self, blocks: Mapping[bytes, int]) -> None:
        """Have records of the host tier copied into allocated ``blocks``, by key, before the rows of the plan
        being made. Their slots are held until that is done."""
        host = self.tiers.host
        loads = [BlockLoad(host.here[key], block) for key, block in blocks.items()]
        host.hold(*(load.slot for load in loads))
        self._loads += loads
        self._loading.update(blocks.values())

    def at_once(self, blocks: int, least: int) -> int:
        """The most blocks that one plan may load for a sequence that has ``blocks`` to load.

        Loaded blocks evict other blocks from the device, and these need slots in the host tier. When it is
        full, only a part is loaded by each plan, so that evicted blocks get the slots that earlier loads
        freed. Otherwise they would push out records that are not below yet. Never less than ``least``: what a
        step can compute.
        """
        most = min(blocks, AT_ONCE) if self._beside else blocks
        if not self.tiers.slots or self.tiers.host.room >= blocks:
            return most
        return min(most, max(least, self.tiers.slots // PARTS))

    def delays(self, table: NDArray[np.int32]) -> bool:
        """Whether loads to these blocks are not done and run beside the steps: then a row that reads the
        blocks now would keep the others in its step waiting. int32 ``[blocks]``."""
        return self._beside and bool(self._loading) and bool(np.isin(table, list(self._loading)).any())

    def holds(self, blocks: Iterable[int], tenant: int) -> None:
        """Note that these blocks hold KV of ``tenant``, so that later saves of them count for this tenant."""
        self._tenants.update(dict.fromkeys(blocks, tenant))

    def pending(self) -> set[int]:
        """The blocks that the plan being made saves or loads: nothing but a plan may write them. Those that
        stay on the device are not among them: they cannot be allocated before `evicted`."""
        return {block for block, *_ in self._wanted.values()} | {load.block for load in self._loads}

    def saving(self, key: bytes) -> bool:
        """Whether the record will be in the host tier soon: its save waits for a plan, or runs."""
        return key in self._wanted or key in self._staying or self.tiers.saving(key)

    def evicted(self, block: int, key: bytes, wanted: bool = True) -> None:
        """Note that the pool evicted a full block. If a tier has its record, count that as used now; else have
        the block saved by the plan being made. If not ``wanted``, it is saved only where no other record has to
        go for it."""
        if not self.tiers.slots:
            return
        self._staying.pop(key, None)
        if not self.tiers.has(key):
            self._wanted[key] = block, self._block_tokens, not wanted
        elif wanted:
            self.tiers.touch(key)

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Drop a record from all tiers below the device; with ``erase`` its bytes are gone soon."""
        self._wanted.pop(key, None)
        self._staying.pop(key, None)
        self.tiers.drop(key, erase=erase)

    def emit(self, *, rows: int, draws: bool) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """The saves and loads for the plan that goes out now: they leave the queues here. A save for which the
        host tier has no slot is dropped. ``rows``: how many it has; ``draws``: one of them draws a token."""
        if not self.waiting:
            return (), ()
        due = [(key, *save) for key, save in self._wanted.items()]
        due += [(key, block, self._block_tokens, True) for key, block in self._in_time(rows, draws)]
        saves = []
        for key, block, tokens, spare in due:
            slot = self.tiers.host.reserve(key, tokens, self._tenants.get(block, 0), spare=spare)
            if slot is not None:
                saves.append(BlockSave(block, slot, tokens, spare))
        self.tiers.note_evicted()
        loads = tuple(self._loads)
        self._wanted.clear()
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

    def finish(self, plan: Plan, *, made: bool) -> None:
        """Note that the plan's saves and loads are over. If they are ``made``, records that it saved can be
        found from now on, and slots that it loaded may be evicted. If its step failed, it is not known which
        were made: the slots of its saves are given up, and those of its loads released."""
        host = self.tiers.host
        for save in plan.saves:
            if made:
                host.filled(save.slot, spare=save.spare)
            else:
                host.abandon(save.slot)
        self._loading -= Counter(load.block for load in plan.loads)
        host.release(*(load.slot for load in plan.loads), above=made)
        if made:
            self.saved += len(plan.saves)
            self.loaded += len(plan.loads)

    def statistics(self) -> dict[str, float]:
        """The statistics of all tiers (`Tiers.statistics`), and how many blocks were saved to the host tier and
        loaded from it since the start; empty without one."""
        if not self.tiers.slots:
            return {}
        return {**self.tiers.statistics(), "host_saved": self.saved, "host_loaded": self.loaded}
