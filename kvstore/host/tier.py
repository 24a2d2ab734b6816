"""The host tier: which record is in which slot of the memory, and which is evicted when there is no room.

Others move the bytes: they ``reserve`` a slot, fill it and report it ``filled``; or they ``find`` one,
``hold`` it while it is read, and ``release`` it. The slots of a process that died are adopted, and their bytes
checked by their xxh3 before their first use. One thread uses it, beside that of `check_adopted`; no torch, no
clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import ceil
from threading import Thread

import numpy as np
from xxhash import xxh3_64_intdigest

from ..errors import LeakFound
from ..quotas import FairOrder
from ..slices import SLICE, sliced
from ..system_limits import roam
from ..tier import MoveEnd, Presence, Record, Tier
from .slots import SlotMemory, SlotState

AHEAD_SHARE, AHEAD_BYTES = 1 / 8, 256 << 20
"""How many free slots have their memory pages in advance: at most this share of all slots, and at most so
many bytes. Taking a page may cost ten times what filling it costs: a virtual machine returns freed pages to
its host."""


class HostTier(Tier):
    """The records in the slots of ``memory``, and the order in which they are evicted. ``recheck``: bytes are
    hashed each time before they are read; for tests and debug.

    A record has a slot from ``reserve`` until it is dropped, and is found while that is READY or READING. If
    it is dropped while its slot is filled or read, it is found no longer, and the slot is free when that
    ends.
    """

    name = "host"
    checks = True
    reads = True

    def __init__(self, memory: SlotMemory, *, recheck: bool = True) -> None:
        self.memory = memory
        self._recheck = recheck
        self._evicted: list[bytes] = []
        self._checked: set[int] = set()  # hashed by this process since they were filled
        self._slot_of: dict[bytes, int] = {}
        self._here: dict[bytes, int] = {}
        self.here: Mapping[bytes, int] = self._here
        """The slot of each record that can be read now, by key; not a copy. Does not count as a use."""
        self._key_of: dict[int, bytes] = {}
        self._tokens = memory.directory["tokens"]  # by slot
        self._filling: set[int] = set()
        self._readers: dict[int, int] = {}
        self._foreseen: dict[int, bytes] = {}  # slots that `foresee` has named, with their keys then
        self._order = FairOrder(max(1, memory.slots))  # of slots that are READY
        self._promised: dict[bytes, dict[int, float]] = {}  # key: sequence with a lease: return
        self._covers: dict[int, list[bytes]] = {}
        self._stamp = 0  # rises with each use
        self._counts = dict.fromkeys(("hits", "misses", "damaged", "refused", "dropped"), 0)
        self._free = self._adopt()
        self._untouched = len(self._free)  # so many at the beginning of the free ones
        self._ahead = min(ceil(AHEAD_SHARE * memory.slots), AHEAD_BYTES // memory.stride)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._here

    def has_slot(self, key: bytes) -> bool:
        """Whether the record is in a slot, or one is being filled with it."""
        return key in self._slot_of

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        """Whether each record can be read; PENDING while its slot is being filled."""
        here, slots = self._here, self._slot_of
        return [
            Presence.FOUND if key in here else Presence.PENDING if key in slots else Presence.ABSENT
            for key in keys
        ]

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        """Note that all bytes of the record are in ``slot``, which was reserved for it: from now on it is
        found, and counts as used now. Returns whether it is: not if it was dropped meanwhile, or if with
        ``recheck`` its bytes have another digest. The slot is free then."""
        return self.filled(slot, record)

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        """False: nothing has to come, as the record's own slot can be read."""
        return False

    def poll(self, now: float) -> list[MoveEnd]:
        """Nothing ends later."""
        return []

    @property
    def waiting(self) -> bool:
        return False

    def readable(self, key: bytes) -> bool:
        return key in self._here

    near = readable

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        """Copy records into memory; they are evicted first then, as the device has them."""
        slots = self.find(keys)
        self.hold(*slots)
        for slot, block in zip(slots, blocks, strict=False):
            block[:] = self.memory.payload(slot)
        self.release(*slots, above=True)
        return [self.tokens_of(slot) for slot in slots]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of the longest beginning of ``keys`` with a record here, which count as hits. Bytes that
        this process has not checked yet are checked; a damaged record is dropped, and ends the list."""
        found: list[int] = []
        for key in keys:
            slot = self._here.get(key)
            if slot is None:
                self._counts["misses"] += 1
                break
            if (self._recheck or slot not in self._checked) and not self._sound(slot):
                self._counts["damaged"] += 1
                self.drop(key)
                break
            found.append(slot)
        self._counts["hits"] += len(found)
        self._order.hit(found)
        return found

    def check_adopted(self) -> Thread:
        """Check the bytes of adopted records in a thread, which is returned, those that would be evicted last
        first: so that `find` need not. It leaves damaged ones to `find`."""
        slots = [*self._order.slots()][::-1]
        thread = Thread(target=self._check_each, args=(slots,), name="check-adopted-kv", daemon=True)
        thread.start()
        return thread

    def tokens_of(self, slot: int) -> int:
        """Tokens of the record in ``slot``."""
        return int(self._tokens[slot])

    @property
    def room(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def in_order(self) -> Iterator[bytes]:
        """Keys of all records in eviction order; nothing may change during the iteration."""
        return (self._key_of[slot] for slot in self._order.slots())

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Let these records be evicted before all others of their tenants, the last of them first: they are
        on the device too. Records outside the eviction order, as those that are read, are left alone.

        That holds until `touch`, which the caller calls when the device evicts them.
        """
        here = self._here
        self._order.put_first(self._order.remove_each(here[key] for key in keys if key in here))

    def foresee(self, share: int, most: int, at_once: int) -> tuple[list[bytes], list[bytes]]:
        """Foresee which records each tenant gives up next, besides those that `evict_first` named: one in
        ``share`` of its others, ``most`` at most. Returns the keys of those that came since the last call,
        about ``at_once`` at most, and of those that went: they were evicted, dropped or used, or others go
        before them. O(changes since the last call).
        """
        came, gone = self._order.foresee(share, most, at_once)
        left = [self._foreseen.pop(slot) for slot in gone]
        self._foreseen.update((slot, self._key_of[slot]) for slot in came)
        return [self._foreseen[slot] for slot in came], left

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count those of these records that are here as used now. ``keys``: in the order of their sequence;
        the end of it is evicted before its beginning, as `eviction` wants it. Records outside the eviction
        order, as those that are read, are left alone."""
        found = self._order.remove_each(self._here[key] for key in keys if key in self._here)
        found.reverse()
        self._rank(found)

    def promise(self, holder: int, keys: Iterable[bytes], returns: float) -> tuple[list[bytes], list[bytes]]:
        """Let the lease of the sequence ``holder`` cover the records ``keys``, here now or later, and no
        others. Returns the keys that leases cover now and did not before, and those that they cover no longer.

        Leased records are evicted after all others, the latest expected return first. ``returns``: that of
        this sequence, in seconds.
        """
        before, now = self._covers.pop(holder, []), list(keys)
        changed = dict.fromkeys((*before, *now))
        covered = {key for key in changed if key in self._promised}
        for key in before:
            holders = self._promised[key]
            del holders[holder]
            if not holders:
                del self._promised[key]
        for key in now:
            self._promised.setdefault(key, {})[holder] = returns
        if now:
            self._covers[holder] = now
        for key in changed:
            slot = self._slot_of.get(key)
            if slot is not None:
                self._order.lease(slot, self._return_of(key))
        fresh = [key for key in changed if key in self._promised and key not in covered]
        return fresh, [key for key in covered if key not in self._promised]

    def promised(self, key: bytes, besides: int | None = None) -> bool:
        """Whether a lease covers the record ``key``; that of the sequence ``besides`` does not count."""
        return any(holder != besides for holder in self._promised.get(key, ()))

    def reserve(self, key: bytes, tokens: int, tenant: int = 0, *, spare: bool = False) -> int | None:
        """Take a slot to fill with the record; it is in state FILLING then. None if the record has a slot
        already, or if no slot can be had. ``tokens``: of the record, 0 if not known yet.

        Where no slot is free a record is evicted as `quotas` says, see `take_evicted`. For a ``spare`` record
        only one that `evict_first` named, and that no lease covers, is evicted.
        """
        if key in self._slot_of:
            return None
        if not self._free and not self._evict(tenant, spare=spare):
            self._counts["refused"] += 1
            return None
        slot = self._free.pop()
        self._untouched = min(self._untouched, len(self._free))
        self.memory.move(slot, SlotState.FILLING)
        self.memory.describe(slot, key, tokens, tenant)
        self._order.take(slot, tenant)
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._filling.add(slot)
        if key in self._promised:
            self._order.lease(slot, self._return_of(key))
        return slot

    def take_evicted(self) -> list[bytes]:
        """The keys of the records that `reserve` evicted since the last call, in order."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def filled(self, slot: int, record: Record | None = None, *, spare: bool = False) -> bool:
        """Note that all bytes are in ``slot``: from now on the record is found, and counts as used now; or,
        if it is ``spare``, is evicted first. Returns whether it is found.

        ``record``: as it came from another tier, its bytes compared with its digest. Without it the digest is
        the one that was written into the directory since `reserve`, or else computed
        here. Bytes with another digest are dropped. The slot of a record that was dropped meanwhile becomes
        free.
        """
        self._filling.remove(slot)
        if slot not in self._key_of:  # dropped meanwhile
            self._free_slot(slot)
            return False
        digest = self.memory.record(slot).digest or None if record is None else record.digest
        seen = digest
        if seen is None or self._recheck:
            seen = xxh3_64_intdigest(self.memory.payload(slot))
        if digest not in (None, seen):
            self._counts["damaged"] += 1
            self._forget(slot)
            self._free_slot(slot)
            return False
        if record is not None:
            self._tokens[slot] = record.tokens
        self.memory.set_digest(slot, seen)
        self._checked.add(slot)
        self._here[self._key_of[slot]] = slot
        self.memory.move(slot, SlotState.READY)
        self._rank([slot], first=spare)
        return True

    def prepare(self) -> bool:
        """In an idle moment: touch the pages of one free slot, which will be filled soon. False if there is
        nothing to do, as enough slots have their pages."""
        if not self._untouched or len(self._free) - self._untouched >= self._ahead:
            return False
        self._untouched -= 1
        self.memory.touch(self._free[self._untouched])
        return True

    def abandon(self, slot: int) -> None:
        """Note that the slot will not be filled: free it, and forget the record that it was reserved for."""
        self._filling.remove(slot)
        self._forget(slot)
        self._free_slot(slot)

    def hold(self, *slots: int, used: bool = True) -> None:
        """Keep the records in these slots until `release`, because they are being read: one hold for each
        time a slot is named.

        Without ``used`` they keep their positions in the eviction order. Otherwise they leave it, and count as
        used when they are released.
        """
        for slot in slots:
            self._readers[slot] = self._readers.get(slot, 0) + 1
        if used:
            self._order.remove_each(slots)
        self.memory.move_each(slots, SlotState.READING)

    def release(self, *slots: int, above: bool = False) -> None:
        """End one `hold` of each slot. ``above``: the records are on the device now, so they are evicted
        first (see `evict_first`). A slot with a record that was dropped meanwhile becomes free."""
        for slot in slots:
            self._readers[slot] -= 1
        over = [slot for slot in dict.fromkeys(slots) if not self._readers[slot]]
        for slot in over:
            del self._readers[slot]
        self.memory.move_each(over, SlotState.READY)
        for slot in over:
            if slot not in self._key_of:
                self._free_slot(slot)
        self._rank([slot for slot in over if slot in self._key_of and slot not in self._order], first=above)

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Forget the record with this key, if there is one. Its slot becomes free at once, or, if it is being
        filled or read, when that ends."""
        slot = self._slot_of.get(key)
        if slot is None:
            return
        self._counts["dropped"] += 1
        self._forget(slot)
        if slot not in self._filling and slot not in self._readers:
            self._free_slot(slot)

    def statistics(self) -> dict[str, int]:
        """``records`` and ``bytes`` now, of ``capacity`` bytes; the others count since the start.

        ``hits``, ``misses``, ``damaged``: how look-ups of `find` ended. ``refused``: records that found no
        slot. ``dropped``: records evicted or dropped.
        """
        size = self.memory.block_bytes
        now = {"records": len(self), "bytes": len(self) * size, "capacity": self.memory.slots * size}
        return {**now, **self._counts}

    def audit_in_slices(self) -> Iterator[None]:
        """Check that the tier's own state and the memory's directory agree, a slice of bounded size at a time:
        yields between two slices, and the tier may change meanwhile. Raises `LeakFound`: they do not."""
        states, known = self.memory.directory["state"], self._key_of.keys()
        for part in sliced(range(self.memory.slots), 16 * SLICE):
            if states[part[0] : part[-1] + 1].any() or not known.isdisjoint(part):
                yield from self._compare(part)
            yield
        yield from self._compare([*self._filling, *self._readers])
        kept = sum(slot not in self._order for slot in self._readers)  # these keep their positions
        counted = len(self._free) + len(self._order) + len(self._filling) + kept
        if counted != self.memory.slots:
            raise LeakFound(f"host tier: {counted} of {self.memory.slots} slots counted")

    def _compare(self, slots: list[int]) -> Iterator[None]:
        states = self.memory.directory["state"]
        for part in sliced(slots):
            pairs = zip(part, states[part].tolist(), strict=True)
            wrong = [
                slot for slot, state in pairs if state != self._state_of(slot) or not self._is_known(slot)
            ]
            if wrong:
                raise LeakFound(f"host tier: the directory differs in {len(wrong)} slots, wrong {wrong[:8]}")
            yield

    def _state_of(self, slot: int) -> SlotState:
        """The state that the directory should have for a slot."""
        if slot in self._filling:
            return SlotState.FILLING
        if slot in self._readers:
            return SlotState.READING
        return SlotState.READY if slot in self._order else SlotState.FREE

    def _is_known(self, slot: int) -> bool:
        """Whether the slot's record is found by its key exactly if it is filled."""
        key = self._key_of.get(slot)
        if key is None:
            return slot not in self._order
        return self._slot_of.get(key) == slot and (self._here.get(key) == slot) is (slot not in self._filling)

    def _adopt(self) -> list[int]:
        """Take over the records that the memory's directory lists, from an earlier process; slots that were
        being filled become free. Returns the free slots, the first to be used last."""
        memory = self.memory
        entries = memory.directory[["state", "stamp"]]
        used = np.nonzero(entries["state"] != SlotState.FREE)[0]
        for slot in used[np.argsort(entries["stamp"][used], kind="stable")].tolist():
            record, state = memory.record(slot), memory.state(slot)
            if state is SlotState.READING:
                memory.move(slot, SlotState.READY)
            if state is SlotState.FILLING or record.key in self._slot_of:
                memory.move(slot, SlotState.FREE)
                continue
            self._slot_of[record.key] = self._here[record.key] = slot
            self._key_of[slot] = record.key
            self._order.take(slot, record.tenant)
            self._rank([slot])
        return [slot for slot in range(memory.slots - 1, -1, -1) if slot not in self._key_of]

    def _check_each(self, slots: list[int]) -> None:
        roam()
        for slot in slots:  # one that is filled again meanwhile counts as checked anyway
            if slot not in self._checked:
                self._sound(slot)

    def _sound(self, slot: int) -> bool:
        memory = self.memory
        if xxh3_64_intdigest(memory.payload(slot)) != memory.record(slot).digest:
            return False
        self._checked.add(slot)
        return True

    def _evict(self, tenant: int, *, spare: bool) -> bool:
        slot = next(self._order.slots([tenant], self._readers), None)
        if slot is None or (spare and not self._order.is_elsewhere(slot)):
            return False
        self._evicted.append(self._key_of[slot])
        self._forget(slot)
        self._free_slot(slot)
        self._counts["dropped"] += 1
        return True

    def _rank(self, slots: list[int], *, first: bool = False) -> None:
        """Count the records in these slots as used now, and put the slots into the eviction order; ``first``:
        before all others of their tenants."""
        self.memory.set_stamps(slots, self._stamp + 1)
        self._stamp += len(slots)
        (self._order.put_first if first else self._order.add)(slots)

    def _return_of(self, key: bytes) -> float | None:
        return min(self._promised.get(key, {}).values(), default=None)

    def _forget(self, slot: int) -> None:
        """Forget the record in the slot: it is found no longer. The slot is not freed here."""
        key = self._key_of.pop(slot, None)
        if key is not None:
            del self._slot_of[key]
            self._here.pop(key, None)
            self._order.forget(slot)

    def _free_slot(self, slot: int) -> None:
        self.memory.move(slot, SlotState.FREE)
        self._order.free(slot)
        self._checked.discard(slot)
        self._free.append(slot)
