"""Replays a trace through the real scheduler, pool and tiers on a device that computes nothing, on a virtual
clock.

The host tier's slots and the disk's LMDB file are real, with blocks of a few bytes; there is no disk process:
requests to the disk are done at the next poll. Turns run one at a time, so the order of the trace is the order
of the run under any policy. Counts tokens; the only times are those of the trace.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.kvstore.disk.client import STORES_IN_FLIGHT
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.payload_file import PAGE, stride_of
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.errors import KVStoreError
from holdfast.kvstore.host.slots import ENTRY_BYTES, SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.kvstore.tier import MoveEnd, Presence, Record, Tier
from holdfast.kvstore.tiers import Tiers
from holdfast.runtime.engine import Engine
from holdfast.runtime.plan import Outcomes, Plan
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings

from .agents import Scale, TraceTurn
from .talker import Talker, rest

BLOCK = 16
SLOT_BYTES = 64
SECRET = bytes(32)
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class TokenTally:
    """Tokens of a whole trace: those that were prefilled, for the first time or again, and those with KV that
    was restored from the host tier and from disk."""

    prefilled: int
    host: int
    disk: int


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that computes nothing. ``plan``: what it would have computed."""

    plan: Plan

    def draw(self) -> None:
        """Does nothing."""

    def tokens(self) -> Outcomes:
        """A made-up token for each row that draws, different by sequence and position."""
        plan = self.plan
        rows = zip(plan.seqs.tolist(), (plan.firsts + plan.counts).tolist(), plan.draws.tolist(), strict=True)
        return Outcomes.of([[hash((seq, end)) % VOCABULARY] if draws else [] for seq, end, draws in rows])

    def moved(self, *, wait: bool = False) -> bool:
        """Nothing is moved."""
        return True


class _IdleRunner:
    """A `plan.Runner` that computes nothing."""

    def launch(self, plan: Plan) -> ReplayedStep:
        return ReplayedStep(plan)


class InlineDisk(Tier):
    """The disk's records without a process of their own: requests are done at the next `poll`. ``memory``: the
    slots of the host tier; ``store``: the records."""

    name = "disk"
    checks = True

    def __init__(self, memory: SlotMemory, store: RecordStore) -> None:
        self._memory = memory
        self._store = store
        self._storing: dict[int, tuple[Record, int]] = {}
        self._fetching: dict[int, tuple[bytes, int]] = {}
        self._dropped: set[bytes] = set()  # of those that are to be stored
        self._touched: list[bytes] = []
        self._yielding: list[bytes] = []

    def __len__(self) -> int:
        return len(self._store)

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        storing = {record.key for record, _ in self._storing.values()} - self._dropped
        stored = self._store.entries
        return [
            Presence.FOUND if key in stored else Presence.PENDING if key in storing else Presence.ABSENT
            for key in keys
        ]

    @property
    def full(self) -> bool:
        """Whether the disk is so full that each new record replaces another."""
        return self._store.size + STORES_IN_FLIGHT * stride_of(SLOT_BYTES) >= self._store.budget

    @property
    def room(self) -> int:
        return STORES_IN_FLIGHT - len(self._storing)

    @property
    def waiting(self) -> bool:
        return bool(self._storing or self._fetching)

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        if self.lookup((record.key,)) != [Presence.ABSENT]:
            return False
        self._storing[ticket] = record, slot
        self._dropped.discard(record.key)
        return True

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        if slot is None or key not in self._store.entries:
            return False
        self._fetching[ticket] = key, slot
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        self._touched.extend(keys)

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """The store learns it with the next records."""
        self._yielding.extend(reversed(list(keys)))

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        self._store.drop((key,))
        self._dropped.update(record.key for record, _ in self._storing.values() if record.key == key)

    def poll(self, now: float) -> list[MoveEnd]:
        """Do all requests that were begun."""
        payload = self._memory.payload
        given = [
            (record, payload(slot))
            for record, slot in self._storing.values()
            if record.key not in self._dropped
        ]
        if given:
            self._store.evict_first(self._yielding)
            self._yielding.clear()
            self._store.put(given, self._touched)
            self._touched.clear()
        ended = [MoveEnd(ticket, done=True) for ticket in self._storing]
        self._storing.clear()
        self._dropped.clear()
        for ticket, (key, slot) in self._fetching.items():
            record = None
            with contextlib.suppress(KVStoreError):  # it may be evicted meanwhile for a stored one
                entry = self._store.get(key, payload(slot))
                record = Record(key, entry.tokens, entry.digest)
            ended.append(MoveEnd(ticket, record is not None, record))
        self._fetching.clear()
        return ended


class Clock:
    """A virtual clock: calling it gives the seconds that were last set as ``now``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def fake_engine(
    device: int, host: int, disk: int, context: int, clock: Clock, windows: tuple[int | None, ...] = (None,)
) -> Iterator[Engine]:
    """An engine that computes nothing, for the block. ``device``, ``host``, ``disk``: the size of each tier in
    blocks; no host or disk tier for 0. ``context``: the most tokens of a sequence; ``windows``: of KV
    groups."""
    settings = SchedulerSettings(
        blocks=device,
        vocab_size=VOCABULARY,
        max_context=context,
        block_tokens=BLOCK,
        max_step_tokens=512,
        windows=windows,
    )
    pool, hasher = BlockPool(device), BlockHasher(SECRET, BLOCK)
    with tempfile.TemporaryDirectory() as folder:
        tier = _tier(host) if host else None
        budget = disk * stride_of(SLOT_BYTES)
        store = RecordStore(Begin(str(Path(folder) / "kv"), bytes(16), SLOT_BYTES, budget)) if disk else None
        below = [InlineDisk(tier.memory, store)] if tier is not None and store is not None else []
        scheduler = Scheduler(settings, pool, hasher, b"replay", Tiers(tier, below))
        yield Engine(scheduler, _IdleRunner(), clock=clock)
        if store is not None:
            store.close()


def _tier(slots: int) -> HostTier:
    fd = make_memory(2 * PAGE + slots * (SLOT_BYTES + ENTRY_BYTES) + PAGE)
    try:
        memory = SlotMemory(fd, bytes(16), SLOT_BYTES)
    finally:
        os.close(fd)
    return HostTier(memory)


def replay(
    trace: Sequence[TraceTurn],
    scale: Scale,
    *,
    device: int,
    host: int = 0,
    disk: int = 0,
    seed: int = 0,
    said: Sequence[float | None] = (),
    windows: tuple[int | None, ...] = (None,),
) -> TokenTally:
    """Replay a trace and count its tokens. ``device``, ``host``, ``disk``: the size of each tier in blocks.
    ``said``: after each turn of the trace, the hint of the seconds until its session comes back, None for no
    hint; empty: no hints at all. ``windows``: of the KV groups."""
    clock = Clock()
    prefilled = up = from_disk = 0
    with fake_engine(device, host, disk, scale.context, clock, windows) as engine:
        talker = Talker(engine, scale, VOCABULARY, seed, wait=lambda: _next(engine, clock))
        for at, turn in enumerate(trace):
            _rest(engine, clock, turn.at)
            work = talker.turn(turn).work
            returns_in = said[at] if said else None
            if returns_in is not None:
                talker.tell(turn, returns_in)
            prefilled += work.prefilled + work.recomputed
            up += work.host
            from_disk += work.disk
    return TokenTally(prefilled, up, from_disk)


def _next(engine: Engine, clock: Clock) -> None:
    clock.now += engine.due() or 0.001


def _rest(engine: Engine, clock: Clock, until: float) -> None:
    """Let the engine do its own work, such as moving KV, until the time at which the next turn begins."""
    while True:
        rest(engine)
        due = engine.due()
        if due is None or clock.now + due >= until:
            break
        clock.now += due
    clock.now = max(clock.now, until)
