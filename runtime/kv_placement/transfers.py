"""What goes between device blocks and the host tier, as data: saves and loads of the plan being made.

A save goes out before anything can write its block: taking a block never waits for a slot, and where there is
none the save is dropped. What the device gives up goes with the plan being made; what stays there may wait:
where copies take the step's own time, few go with each that somebody waits for, as what one step computed would
hold the next one up. A slot that is loaded is held from the plan until its commit, a slot being filled is found
only after it. Without a tier every verb does nothing. Knows blocks, slots and keys; no sequences, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice, starmap, takewhile

from ...kvstore.disk.client import DiskTier
from ...kvstore.host.tier import HostTier
from ..plan import BlockLoad, BlockSave, Plan, PlanRow

FEW, PART, MANY = 2, 8, 16
"""Blocks that stay and go with a step that somebody waits for: one in eight of those that wait, 2 to 16."""

ALONE = 8
"""That go in a plan without rows: what comes meanwhile waits for them."""


class Transfers:
    """Between a pool of blocks of ``block_tokens`` tokens and ``tier``; ``disk`` is told what is dropped.

    ``beside``: copies run beside the step, at nobody's expense.
    """

    def __init__(
        self,
        tier: HostTier | None,
        block_of: Callable[[bytes], int | None],
        block_tokens: int,
        disk: DiskTier | None = None,
        *,
        beside: bool = False,
    ) -> None:
        self.tier = tier
        self.disk = disk
        self._block_of = block_of
        self._beside = beside
        self.saved = self.loaded = 0
        self._block_tokens = block_tokens
        self._wanted: dict[bytes, tuple[int, int]] = {}  # key: block, tokens; they go with the next plan
        self._spare: set[bytes] = set()  # of those: only where no other record has to go for them
        self._staying: dict[bytes, int] = {}  # key: full block, above until `evicted`; spare, too
        self._loads: list[BlockLoad] = []
        self._leaving: dict[bytes, None] = {}  # see `foresee_evictions`
        self._tenants: dict[int, int] = {}  # by block, of what it held when it was sealed or loaded

    @property
    def waiting(self) -> bool:
        """Whether a plan has something to carry, rows or not."""
        return bool(self._wanted or self._staying or self._loads)

    def save(self, key: bytes, block: int, tokens: int | None = None, tenant: int = 0) -> None:
        """Keep the first ``tokens`` (all by default) of a tenant's block below; its content is committed.

        A full one stays above meanwhile: below it takes nobody's place, and gives way (see `evicted`).
        """
        self._tenants[block] = tenant
        if self.tier is None or self.tier.has_slot(key):
            return
        if tokens is not None:
            self._wanted[key] = block, tokens
        elif key not in self._wanted:
            self._staying[key] = block

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Bring the bytes of slots into leased blocks (slot, block), before the rows of the plan being made."""
        assert self.tier is not None
        self.tier.hold(*(slot for slot, _ in pairs))
        tenant_of = self.tier.tenant_of
        self._tenants.update((block, tenant_of(slot)) for slot, block in pairs)
        self._loads.extend(starmap(BlockLoad, pairs))

    def read_into(self, blocks: Iterable[int], tenant: int) -> None:
        """A tenant's records were brought into these blocks without a plan."""
        self._tenants.update(dict.fromkeys(blocks, tenant))

    def pending(self) -> set[int]:
        """Blocks to be saved or loaded: nobody may write them without a plan."""
        saved = {block for block, _ in self._wanted.values()} | set(self._staying.values())
        return saved | {load.block for load in self._loads}

    def found(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the longest beginning of ``keys`` that the tier holds; not yet checked or held."""
        if self.tier is None:
            return []
        here = self.tier.here
        return list(map(here.__getitem__, takewhile(here.__contains__, keys)))

    def checked(self, keys: Iterable[bytes]) -> list[int]:
        """As `found`, each one's bytes checked now."""
        return [] if self.tier is None else self.tier.find_beginning(keys)

    def fetching(self, key: bytes) -> bool:
        """Whether it is on its way up to the tier."""
        return self.disk is not None and self.disk.fetching(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A turn used these, in this order."""
        if self.tier is not None:
            self.tier.touch(keys)

    def lease(self, holder: int, keys: Sequence[bytes], returns: float) -> None:
        """A lease of ``holder`` covers these from now on, and no others; it is wanted again at ``returns``."""
        if self.tier is not None:
            self.tier.lease(holder, keys, returns)
        if self.disk is not None:
            self.disk.lease(holder, keys)

    def saving(self, key: bytes) -> bool:
        """Whether it is on its way down to the tier."""
        return (
            key in self._wanted
            or key in self._staying
            or (self.tier is not None and self.tier.has_slot(key) and self.tier.slot_of(key) is None)
        )

    def evicted(self, block: int, key: bytes, wanted: bool = True) -> None:
        """The pool evicted a full block: the record below counts as used now, or the block is saved once more.

        Not ``wanted``: it is saved only where no other record has to go for it.
        """
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
        """As `DiskTier.fetch`; the slot may be taken from another record."""
        assert self.disk is not None
        fetching = self.disk.fetch(key, now, tenant, direct=direct)
        self._note_evicted()
        return fetching

    def foresee_evictions(self, most: int) -> list[bytes]:
        """Keys of up to ``most`` records that the host tier evicts next and that are nowhere else.

        On disk they count as used now, and not again when the host tier evicts them. Those that were foreseen
        before and are no longer go first on disk, if they are above.
        """
        tier, disk = self.tier, self.disk
        assert tier is not None and disk is not None
        alone = (key for key in tier.in_order() if self._block_of(key) is None and not tier.evicts_first(key))
        before, leaving = self._leaving, dict.fromkeys(islice(alone, most))
        kept = (key for key in before if key not in leaving)
        disk.evict_first(key for key in kept if key in tier or self._block_of(key) is not None)
        for key in leaving:
            if key not in before:
                disk.touch(key)
        self._leaving = leaving
        return list(leaving)

    def _note_evicted(self) -> None:
        """On disk what the host tier evicted counts as used when that was foreseen, else now."""
        for key in () if self.tier is None else self.tier.take_evicted():
            if self.disk is not None and key not in self._leaving:
                self.disk.touch(key)

    def retire(self, keys: Sequence[bytes]) -> None:
        """Nobody is likely to want these again: they give way before others, the last of them first."""
        if self.tier is not None:
            here = self.tier.here
            self.tier.evict_first(here[key] for key in keys if key in here)
        if self.disk is not None:
            self.disk.evict_first(reversed(keys))

    def drop(self, key: bytes) -> None:
        """Nobody shall find this again."""
        self._wanted.pop(key, None)
        self._staying.pop(key, None)
        if self.tier is not None:
            self.tier.drop(key)
        if self.disk is not None:
            self.disk.supersede(key)

    # --- with the plan ----------------------------------------------------------------------------------

    def emit(self, rows: Sequence[PlanRow]) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """What waits, for the plan of ``rows`` that goes out now; a save without a slot is dropped."""
        if not self.waiting:
            return (), ()
        due = [(key, *save, key in self._spare) for key, save in self._wanted.items()]
        due += [(key, block, self._block_tokens, True) for key, block in self._in_time(rows)]
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

    def _in_time(self, rows: Sequence[PlanRow]) -> Iterator[tuple[bytes, int]]:
        """Of what stays above that which goes with these, the longest waiting first; what holds something else
        by now is forgotten.
        """
        left = len(self._staying)
        if not self._beside and not rows:
            left = ALONE
        elif not self._beside and any(row.sampling is not None for row in rows):
            left = min(max(FEW, -(-left // PART)), MANY)
        while self._staying and left:
            key = next(iter(self._staying))
            block = self._staying.pop(key)
            if self._block_of(key) == block:
                left -= 1
                yield key, block

    def finish(self, plan: Plan) -> None:
        """The plan is done, its moves are made."""
        if self.tier is None:
            return
        for save in plan.saves:
            self.tier.filled(save.slot)
        self.tier.release(*(load.slot for load in plan.loads), above=True)
        self.tier.evict_first(save.slot for save in plan.saves if save.spare)
        self.saved += len(plan.saves)
        self.loaded += len(plan.loads)

    def revoke(self, plan: Plan) -> None:
        """The plan failed, nobody knows which of its moves were made."""
        if self.tier is None:
            return
        for save in plan.saves:
            self.tier.abandon(save.slot)
        self.tier.release(*(load.slot for load in plan.loads))

    def statistics(self) -> dict[str, float]:
        """The tier's gauges and counters, and blocks moved; empty without a tier."""
        if self.tier is None:
            return {}
        tier = {f"host_{name}": value for name, value in asdict(self.tier.statistics()).items()}
        return {**tier, "host_saved": self.saved, "host_loaded": self.loaded}

    def audit(self) -> None:
        """Check the tier's books. Raises `LeakFound`."""
        if self.tier is not None:
            self.tier.audit()
