"""The tiers below the device, in their order: what they have together, and records on their way between them.

::

    device ◀── plan's copies ──▶ host: slots ◀── store, fetch ──▶ each tier below, the nearest first
       ▲                                                              │
       └───────────────────────── read, without a slot ───────────────┘

A slot is lent to a tier from a `Tier.store` or `Tier.fetch` until the tier tells the end. What a tier tells
twice or of nothing is ignored. A record that one tier does not bring is asked of the next. A tier that let a
turn wait for all of its deadline is left alone for a while. Knows keys, slots and tenants; no sequences.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from .disk.client import DiskTier
from .disk.messages import Begin
from .host.slots import SlotMemory
from .host.tier import HostTier
from .slices import sliced
from .tier import MoveEnd, Presence, Reach, Record, Tier

DEVICE, HOST, BELOW, SAVING, ASKED = 1, 2, 4, 8, 16
"""Flags for where a record is; it may be on the device and in the host tier. BELOW: on a lower tier alone, or
being brought up. SAVING: its copy to the host tier is under way. ASKED: a lower tier does not know yet. Plain
numbers: a long sequence asks for thousands."""

STORING_SHARE = 8  # at most one slot in so many is lent for stores
PRESSED = 8  # the host tier is nearly full with less than one slot in so many free
LEAVING_SHARE = 4  # one in so many of a tenant's records in the host tier is below before it is evicted
MOST_LEAVING = 1024
FORESEEN_AT_ONCE = 64  # records that one `send_down` looks at
READY_SECONDS = 0.002  # between two looks whether a tier answers
REFUSED_SECONDS = 1.0  # after so long a record that a tier below has refused is sent again
AWAY_SECONDS = 30.0  # a tier that let a turn wait in vain is not asked for so long


class _Move(NamedTuple):
    """A record on its way between a tier below and a slot. ``tier``: its number; ``up``: it comes up, past the
    slots if ``slot`` is None."""

    tier: int
    key: bytes
    slot: int | None
    up: bool


class Tiers:
    """``host`` and the tiers ``below`` it. None, with no tiers below: a host tier that has no slots.

    With ``reach`` records are `read` into blocks. ``reading_seconds``: what that has taken so far.
    """

    def __init__(self, host: HostTier | None = None, below: Sequence[Tier] = (), reach: Reach = None) -> None:
        self.host = HostTier(SlotMemory(None, bytes(16), 1)) if host is None else host
        self.below = tuple(below)
        self._all: tuple[Tier, ...] = (self.host, *self.below)
        self._reach = reach
        self._tickets = count(1)
        self._moves: dict[int, _Move] = {}  # by ticket
        self._coming: dict[tuple[bytes, bool], int] = {}  # key, whether past the slots: the ticket
        self._lent = 0  # slots lent for stores
        self._away: dict[int, float] = {}  # until when a tier is not asked
        self._now = 0.0
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # to go down
        self._leaving: OrderedDict[bytes, None] = OrderedDict()  # to go down before they are evicted
        self._foreseen: set[bytes] = set()  # counted as used below, and not again when they are evicted
        self._refused: list[bytes] = []  # to be tried again at `_try_again`
        self._try_again = 0.0
        self.reading_seconds = 0.0

    @classmethod
    def opened(
        cls, memory: SlotMemory, reach: Reach, disk: tuple[socket.socket, Begin] | None, *, recheck: bool
    ) -> Tiers:
        """The host tier in ``memory``, and below it a disk tier with this control socket, over which a disk
        process was asked for, and this first message to it. ``recheck``: see `HostTier`."""
        below = () if disk is None else (DiskTier(*disk),)
        return cls(HostTier(memory, recheck=recheck), below, reach)

    def wait_ready(self, seconds: float) -> None:
        """Wait until all tiers answer, or for so many seconds."""
        deadline = time.monotonic() + seconds
        while not all(tier.ready for tier in self.below) and (now := time.monotonic()) < deadline:
            self.poll(now)
            time.sleep(READY_SECONDS)

    def __bool__(self) -> bool:
        """Whether any tier has a record."""
        return len(self.host) > 0 or self.stocked

    @property
    def stocked(self) -> bool:
        """Whether a tier below the host has a record."""
        return any(len(tier) for tier in self.below)

    @property
    def ready(self) -> bool:
        """Whether a tier below the host answers."""
        return any(tier.ready for tier in self.below)

    @property
    def full(self) -> bool:
        """Whether each tier below the host gives up a record for one that comes."""
        return all(tier.full for tier in self.below)

    @property
    def deadline(self) -> float:
        """After how many seconds without a record a turn waits no longer."""
        return max((tier.deadline for tier in self.below), default=0.0)

    @property
    def slots(self) -> int:
        """How many records the host tier holds at most."""
        return self.host.memory.slots

    @property
    def record_bytes(self) -> int:
        """Bytes of a record's payload."""
        return self.host.memory.block_bytes

    # --- where records are ----------------------------------------------------------------------------------

    def levels(self, keys: Sequence[bytes], device: Container[bytes], *, whole: bool = False) -> list[int]:
        """Where the record of each key is, as the flags above: up to the first that is nowhere, or with
        ``whole`` of all. ``device``: tells of a key whether it names a block there."""
        here, found = self.host.here, list[int]()
        for part in sliced(keys):
            levels = [DEVICE * (key in device) | HOST * (key in here) for key in part]
            if (self.slots or self.below) and not all(levels):
                below = self._below([key for key, level in zip(part, levels, strict=True) if not level])
                levels = [level or below.get(key, 0) for key, level in zip(part, levels, strict=True)]
            if not whole and 0 in levels:
                return found + levels[: levels.index(0)]
            found += levels
        return found

    def _below(self, keys: list[bytes]) -> dict[bytes, int]:
        """Where those of ``keys`` are that may come though neither the device nor the host tier has them."""
        found = dict.fromkeys((key for key in keys if self.fetching(key)), BELOW)
        unsure: dict[bytes, int] = {}
        for _, tier in self._asked() if keys else ():
            for key, presence in zip(keys, tier.lookup(keys), strict=True):
                if presence is not Presence.ABSENT:
                    (found if presence is Presence.FOUND else unsure).setdefault(key, BELOW)
        saving = {key: SAVING for key in keys if self.saving(key)}
        return {**dict.fromkeys(unsure, ASKED), **saving, **found}

    def fetching(self, key: bytes) -> bool:
        """Whether the record is on its way up from a tier that answers."""
        return any(self.below[move.tier].ready for move in self._ups(key))

    def _ups(self, key: bytes) -> Iterator[_Move]:
        tickets = (self._coming.get((key, direct)) for direct in (False, True))
        return (self._moves[ticket] for ticket in tickets if ticket is not None)

    def found_below(self, key: bytes) -> bool:
        """Whether a tier below the host has the record."""
        return any(tier.lookup((key,))[0] is Presence.FOUND for tier in self.below)

    def stored(self, key: bytes) -> bool:
        """Whether a tier below the host has the record, or it is on its way there, as far as is known."""
        return any(tier.lookup((key,))[0] is not Presence.ABSENT for tier in self.below)

    def unsure(self, key: bytes) -> bool:
        """Whether a tier does not know yet if it has the record, or is about to have it."""
        return any(tier.lookup((key,))[0] is Presence.PENDING for _, tier in self._asked())

    def saving(self, key: bytes) -> bool:
        """Whether a slot is being filled with the record."""
        return self.host.has_slot(key) and key not in self.host

    def _asked(self) -> Iterator[tuple[int, Tier]]:
        """The tiers below the host that are asked now, with their numbers, the nearest first."""
        return (one for one in enumerate(self.below) if self._away.get(one[0], 0.0) <= self._now)

    # --- up -------------------------------------------------------------------------------------------------

    def fetch(self, key: bytes, now: float, tenant: int, *, direct: bool = False) -> Presence:
        """Have a record brought up, into a slot that counts as ``tenant``'s, or with ``direct`` to where `read`
        finds it. FOUND: it is on its way; ABSENT: no tier has it; PENDING: ask again, as no slot can be had, or
        a tier does not know yet. A record that gives its slot for it counts as used now below."""
        if (ticket := self._coming.get((key, direct))) is not None:
            return Presence.FOUND if self.below[self._moves[ticket].tier].ready else Presence.ABSENT
        seen = [tier.lookup((key,))[0] for _, tier in self._asked()]
        if Presence.FOUND not in seen:
            return max(seen, default=Presence.ABSENT)
        slot = None if direct else self.host.reserve(key, 0, tenant)
        self.note_evicted()
        if slot is None and not direct:
            return Presence.PENDING
        if self._ask_for(key, slot, now):
            return Presence.FOUND
        if slot is not None:
            self.host.abandon(slot)
        return Presence.ABSENT

    def _ask_for(self, key: bytes, slot: int | None, now: float, behind: int = -1) -> bool:
        """Ask the first tier for the record that has it, of those ``behind`` the one with this number."""
        ticket = next(self._tickets)
        for number, tier in self._asked():
            if number > behind and tier.fetch(key, slot, ticket, now):
                self._moves[ticket] = _Move(number, key, slot, up=True)
                self._coming[key, slot is None] = ticket
                return True
        return False

    def give_up(self, key: bytes, now: float) -> None:
        """Note that a turn waited for the record until the end of the deadline: the tier that was to bring it,
        or does not know of it yet, is not asked for a while."""
        asked = {move.tier for move in self._ups(key)}
        pending = (tier.lookup((key,))[0] is Presence.PENDING for tier in self.below)
        asked.update(number for number, unsure in enumerate(pending) if unsure)
        self._away.update(dict.fromkeys(asked, now + AWAY_SECONDS))

    @property
    def reads(self) -> bool:
        """Whether `read` may bring records into blocks, past the slots."""
        return self._reach is not None and bool(self.below) and all(tier.reads for tier in self.below)

    def readable(self, key: bytes) -> bool:
        """Whether `read` may bring the record from below the host tier."""
        return any(tier.readable(key) for tier in self.below)

    def near(self, key: bytes) -> bool:
        """Whether `read` is likely to bring the record now from below the host tier."""
        return any(tier.near(key) for tier in self.below)

    def read(self, keys: Sequence[bytes], blocks: Sequence[int]) -> list[int]:
        """Fill device blocks with records, in order, and check them: ``keys[i]`` into ``blocks[i]``.

        Returns the number of tokens of each record that came: the longest beginning that is there and sound. No
        step may be in flight, and no move that waits may read or write ``blocks``.
        """
        assert self._reach is not None, "no blocks within reach"
        began, found, keys = time.perf_counter(), list[int](), keys[: len(blocks)]
        memory = [self._reach(block) for block in blocks]
        came = True
        while came and len(found) < len(keys):
            came = False
            for tier in self._all:
                run = list(takewhile(tier.readable, keys[len(found) :]))
                tokens = tier.read(run, memory[len(found) :]) if run else []
                found, came = found + tokens, came or bool(tokens)
        self.reading_seconds += time.perf_counter() - began
        return found

    # --- down -----------------------------------------------------------------------------------------------

    def send(self, keys: Iterable[bytes]) -> None:
        """Queue these records for the tiers below the host; `send_down` sends them. Those that are there are
        left out; those that are queued already keep their positions."""
        for key in keys if self.below else ():
            if not self.stored(key):
                self._queue[key] = None

    def flush(self) -> None:
        """Queue all records of the host tier, those first that it would evict last."""
        self.send(reversed(list(self.host.in_order())))

    def send_down(self, device: Mapping[bytes, int], saving: Callable[[bytes], bool], now: float) -> None:
        """Send queued records from their slots to the tiers below, as many as these take now; before that, if
        the host tier is nearly full, queue those that it evicts next and the device does not have.
        ``device``: the block that each key names there; ``saving``: tells of a key whether its copy is to
        come to the host."""
        if not self.below:
            return
        again: list[bytes] = []
        if now >= self._try_again:
            again, self._refused = self._refused, again
        if self.host.room * PRESSED < self.host.memory.slots:
            self._foresee(device, again)
        late: list[bytes] = []
        while self._queue and self.room > 0:
            key, _ = self._queue.popitem(last=False)
            if not self._store(key, now) and saving(key):
                late.append(key)
        self._queue.update(dict.fromkeys(late))
        while self._leaving and self.room > 0:
            self._store(self._leaving.popitem(last=False)[0], now)

    @property
    def room(self) -> int:
        """How many more records can begin to go down now."""
        lent = max(1, self.slots // STORING_SHARE) - self._lent
        return min(lent, max((tier.room for _, tier in self._asked()), default=0))

    @property
    def to_send(self) -> int:
        """How many records wait to be sent down."""
        return len(self._queue) + len(self._leaving)

    @property
    def busy(self) -> bool:
        """Whether a tier below answers, and owes an end or has records to get."""
        return self.ready and (self.to_send > 0 or any(tier.waiting for tier in self.below))

    def _store(self, key: bytes, now: float) -> bool:
        """Begin to copy a record of the host tier to the nearest tier below that takes it, first to one that is
        not full. Returns whether that has begun."""
        slot = self.host.here.get(key)
        if slot is None or self.stored(key):
            return False
        record, ticket = self.host.memory.record(slot), next(self._tickets)
        for number, tier in sorted(self._asked(), key=lambda one: one[1].full):
            if tier.room > 0 and tier.store(record, slot, ticket, now):
                self.host.hold(slot, used=False)
                self._moves[ticket] = _Move(number, key, slot, up=False)
                self._lent += 1
                return True
        return False

    def _foresee(self, device: Mapping[bytes, int], refused: Iterable[bytes]) -> None:
        """Foresee which records the host tier evicts next that the device does not have: they count as used now
        below, and are queued if no tier there has them. Those that are foreseen no longer are evicted first
        below if a tier above has them. ``refused``: to be queued again if they are foreseen still. O(changes
        since the last call)."""
        came, gone = self.host.foresee(LEAVING_SHARE, MOST_LEAVING, FORESEEN_AT_ONCE)
        self._foreseen.difference_update(gone)
        for key in gone:
            self._leaving.pop(key, None)
        self._evict_first([key for key in gone if key in self.host or key in device][::-1])
        # The others gave way before: they are on the device too, as they were used or computed again there.
        self.host.evict_first(key for key in came if key in device)
        alone = [key for key in came if key not in device]
        for key in alone:
            self._touch((key,))
        again = [key for key in refused if key in self._foreseen]
        self._foreseen.update(alone)
        self._leaving.update(dict.fromkeys(key for key in (*again, *alone) if not self.stored(key)))

    # --- what is used, promised and dropped -----------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether any tier has the record, or it is on its way there."""
        return self.host.has_slot(key) or self.stored(key)

    def touch(self, key: bytes) -> None:
        """Count the record as used now in the first tier that has it."""
        if self.host.has_slot(key):
            self.host.touch((key,))
        else:
            self._touch((key,))

    def note_evicted(self) -> None:
        """Tell the tiers below which records the host tier has evicted: there they count as used now. Records
        of a foreseen eviction were told before, and are left out."""
        for key in self.host.take_evicted():
            if key not in self._foreseen:
                self._touch((key,))

    def lease(self, holder: int, keys: Sequence[bytes], returns: float) -> None:
        """Let the lease of the sequence ``holder`` cover the records ``keys``, and no others, so that all tiers
        evict them last. ``returns``: when it is expected back, in seconds."""
        if self.slots:
            fresh, over = self.host.promise(holder, keys, returns)
            for tier in self.below:
                tier.lease(over, on=False)
                tier.lease(fresh, on=True)

    def retire(self, keys: Sequence[bytes]) -> None:
        """Let all tiers evict these records first, the last of them first: they are unlikely to be wanted
        again."""
        self.host.evict_first(keys)
        self._evict_first(keys)

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        """Drop a record from all tiers; with ``erase`` its bytes leave the lower ones soon."""
        for tier in self._all:
            tier.drop(key, erase=erase)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for tier in self.below:
            tier.touch(keys)

    def _evict_first(self, keys: Sequence[bytes]) -> None:
        for tier in self.below:
            tier.evict_first(keys)

    # --- ends -----------------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Take in what the tiers below have told since the last call."""
        self._now = now
        for number, tier in enumerate(self.below):
            for ended in tier.poll(now):
                move = self._moves.get(ended.ticket)
                if move is not None and move.tier == number:  # else it tells of nothing
                    del self._moves[ended.ticket]
                    self._end(move, ended, tier, now)

    def _end(self, move: _Move, ended: MoveEnd, tier: Tier, now: float) -> None:
        """Take over what has come into its slot, or ask the next tier for it; release the slot of what was
        stored, or was to be."""
        if not move.up and move.slot is not None:
            self._lent -= 1
            self.host.release(move.slot)
            if not ended.done:
                self._try_again = self._try_again if self._refused else now + REFUSED_SECONDS
                self._refused.append(move.key)
            return
        del self._coming[move.key, move.slot is None]
        if move.slot is None:
            return  # `read` finds out whether it came
        record = ended.record if ended.done else None
        if record is not None and record.key == move.key and self._is_sound(record, move.slot, tier):
            self.host.store(record, move.slot, ended.ticket, now)
        elif not self._ask_for(move.key, move.slot, now, behind=move.tier):
            self.host.abandon(move.slot)

    def _is_sound(self, record: Record, slot: int, tier: Tier) -> bool:
        return tier.checks or xxh3_64_intdigest(self.host.memory.payload(slot)) == record.digest

    def statistics(self) -> dict[str, float]:
        """The statistics of each tier, under its name, and how many records wait to go down."""
        told: dict[str, float] = {
            f"{tier.name}_{name}": value for tier in self._all for name, value in tier.statistics().items()
        }
        if self.below:
            told[f"{self.below[0].name}_queue"] = self.to_send
        return told

    def close(self) -> None:
        """Close the tiers below the host."""
        for tier in self.below:
            tier.close()
