"""A device without tensors, on a virtual clock: what the scheduler's policies and races are tested on.

KV memory is an array ``[block, slot]`` of (position, digest). A row reads its context back through
its block table; what it writes, and the token it samples, are a digest of all it read. So a wrong block, a
stale epoch, a wrong tail or an off-by-one anywhere gives another token than `Shadow`, a list of tokens, says.
The context is of all that the widest KV group sees. Of the other groups it reads what each token sees, which
must be the same, or the token is another one.

Rows do not run when they are launched. Each waits for what it must wait for on any device (earlier rows of
its sequence, the row that feeds it, its step's copies, which run in order), and beyond that runs at any
moment between its launch and its step's ``tokens()``, before or after rows of other sequences and steps, as
``chance`` decides. So a block that is leased again before the step that may still use it has finished shows
as a wrong token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from xxhash import xxh3_64_intdigest

from holdfast.kvstore.host.slots import SlotMemory, make_memory
from holdfast.kvstore.host.tier import HostTier
from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.kvstore.tier import MoveEnd, Presence, Record, Tier
from holdfast.kvstore.tiers import Tiers
from holdfast.runtime.adapters import AdapterTable
from holdfast.runtime.columns import NO_ADAPTER
from holdfast.runtime.engine import Engine
from holdfast.runtime.errors import AdapterInvalid, GrammarStuck, RuntimeFault
from holdfast.runtime.execution.batch import Batch, Capacity
from holdfast.runtime.grammar.llguidance import Compiler, Matchers
from holdfast.runtime.plan import (
    NOTHING_MORE,
    BlockCopy,
    BlockLoad,
    BlockSave,
    Outcome,
    Outcomes,
    Plan,
    PlanRow,
    RowFault,
)
from holdfast.runtime.scheduler.planner import Drafter
from holdfast.runtime.scheduler.scheduler import Scheduler
from holdfast.runtime.sequence import Sequence as Spoken
from holdfast.runtime.settings import SchedulerSettings
from holdfast.runtime.verbs import LoadAdapter, LoadedAdapter, Sampling

MASK = (1 << 64) - 1
GREEDY = Sampling()


def in_slots(plan: Plan, slots: Sequence[int]) -> Plan:
    """A plan that `plan_of` has made, with these ``slots`` for its rows."""
    if plan.changes is None:
        return plan
    whole = tuple(replace(one, number=slot) for one, slot in zip(plan.changes.whole, slots, strict=True))
    return replace(plan, slots=np.array(slots, dtype=np.int64), changes=replace(plan.changes, whole=whole))


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele et al., 2014): a 64-bit hash of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def weigh(position: int) -> int:
    """What a cell's digest counts by: so that exchanged cells do not cancel out."""
    return (2 * position + 1) * 0xD1342543DE82EF95 & MASK


def draw(context: int, position: int, sampling: Sampling, vocab_size: int) -> int:
    """The token at ``position`` after ``context``: greedy has one answer, a temperature one for each seed."""
    seed = mix(sampling.seed & MASK) if sampling.temperature else 0
    return mix(context ^ mix(position) ^ seed) % vocab_size


def take_in(context: int, position: int, token: int) -> tuple[int, int]:
    """The digest of one token's KV after ``context``, and the context with it."""
    digest = mix(context ^ mix(position) ^ mix(token << 20))
    return digest, (context + (digest ^ mix(position)) * weigh(position)) & MASK


def leave_out(context: int, position: int, digest: int) -> int:
    """``context`` without the token at ``position``. ``digest``: of the token's KV."""
    return (context - (digest ^ mix(position)) * weigh(position)) & MASK


def widest(windows: Sequence[int | None]) -> tuple[int, int]:
    """The group that sees most, and how many tokens it sees, with a token's own."""
    seen = [MASK if window is None else window for window in windows]
    return seen.index(max(seen)), max(seen)


def passing(position: int, window: int) -> range:
    """The positions that a token at ``position`` sees in a ``window``, and the next one does not."""
    return range(max(0, position + 1 - window), max(0, position + 2 - window))


class Shadow:
    """What a sequence ought to be: its tokens, and the next one. ``context`` folds in all of them that the
    widest ``window`` has, from ``start`` on: what its adapter adds (`FakeAdapters`)."""

    def __init__(
        self, tokens: Iterable[int] = (), vocab_size: int = 256, start: int = 0, window: int = MASK
    ) -> None:
        self.vocab_size = vocab_size
        self.window = window
        self.tokens: list[int] = []
        self._contexts = [start]
        self._digests: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append."""
        for token in tokens:
            position = len(self.tokens)
            digest, context = take_in(self._contexts[-1], position, token)
            self.tokens.append(token)
            self._digests.append(digest)
            for gone in passing(position, self.window):
                context = leave_out(context, gone, self._digests[gone])
            self._contexts.append(context)

    def truncate(self, length: int) -> None:
        """Keep the first ``length``."""
        del self.tokens[length:]
        del self._contexts[length + 1 :], self._digests[length:]

    def copy(self, length: int) -> Shadow:
        """Another with the first ``length``."""
        twin = Shadow((), self.vocab_size, window=self.window)
        twin.tokens, twin._contexts = self.tokens[:length], self._contexts[: length + 1]
        twin._digests = self._digests[:length]
        return twin

    def next(self, sampling: Sampling = GREEDY) -> int:
        """The token that follows."""
        return draw(self._contexts[-1], len(self.tokens), sampling, self.vocab_size)


NO_FOLDER = "none"
"""A path at which `FakeAdapters` finds nothing."""


def fake_adapter(path: str) -> tuple[bytes, int]:
    """The digest of the adapter at a path, and what it adds to the context of each token, of 15 bits."""
    digest = path.encode()
    return digest, 1 + xxh3_64_intdigest(digest) % 0x7FFF


class FakeAdapters:
    """An `AdapterStore` without files, and the model's slots: each adds a number to contexts. ``slots``: so
    many; ``chance``: decides when one has been read; None: at once."""

    def __init__(self, slots: int = 0, chance: Random | None = None) -> None:
        self.slots = np.zeros(slots + 1, dtype=np.int64)  # the last: of rows without an adapter
        self._chance = chance
        self._reading: list[LoadAdapter] = []
        self._held: dict[int, int] = {}

    def begin(self, verb: LoadAdapter) -> None:
        self._reading.append(verb)

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    def done(self) -> list[tuple[LoadAdapter, tuple[bytes, int] | RuntimeFault]]:
        done = [one for one in self._reading if self._chance is None or self._chance.random() < 0.5]
        self._reading = [one for one in self._reading if one not in done]
        return [(one, self._read(one.path)) for one in done]

    def _read(self, path: str) -> tuple[bytes, int] | RuntimeFault:
        return AdapterInvalid(f"{path}: not a folder") if path == NO_FOLDER else fake_adapter(path)

    def add(self, table: AdapterTable, name: str, path: str, read: tuple[bytes, int]) -> LoadedAdapter:
        digest, adds = read
        self._held[table.add(name, digest, SPACE + digest).number] = adds
        return LoadedAdapter(name, path, digest, 4, 100)

    def drop(self, number: int) -> None:
        del self._held[number]

    def fill(self, slot: int, number: int) -> None:
        self.slots[slot] = self._held[number]

    def spoil(self) -> None:
        """A step has failed: the slots hold garbage."""
        self.slots[:-1] = 0x8000


@dataclass(eq=False)
class _Task:
    """What a step does at some moment. ``after``: what must be done before. ``seq``: its row's sequence."""

    act: Callable[[], None]
    after: list[_Task]
    seq: int | None = None
    done: bool = False
    moves: bool = False  # a load or a copy: these run in order

    @property
    def ready(self) -> bool:
        return not self.done and all(task.done for task in self.after)


@dataclass(eq=False)
class _Launched:
    """A step in flight: its tasks, and where its outcomes go."""

    rows: list[PlanRow]
    outcomes: list[Outcome]
    ends_at: float
    masks: list[np.ndarray | None] = field(default_factory=list)
    late: dict[int, int | None] = field(default_factory=dict)  # by row: its draw, which waits for a mask
    tasks: list[_Task] = field(default_factory=list)
    row_tasks: list[_Task] = field(default_factory=list)


def _row_of(batch: Batch, plan: Plan, at: int, block_tokens: int) -> PlanRow:
    """A row of ``plan``, whose changes were applied last, with all that the batch knows of it."""
    slot, first, count = (int(array[at]) for array in (plan.slots, plan.firsts, plan.counts))
    starts = np.cumsum(np.where(plan.fed, 0, plan.counts))
    sampling = batch.samplings[slot] if plan.draws[at] else None
    reads = sampling is not None and sampling.reads_past
    return PlanRow(
        int(plan.seqs[at]),
        0,
        first,
        count,
        plan.tokens[starts[at] - (0 if plan.fed[at] else count) : starts[at]],
        batch.tables[slot, :, : -(-(first + count) // block_tokens)].copy(),
        sampling,
        bool(plan.fed[at]),
        batch.past(slot, first + count - 1) if reads else None,
        int(batch.output_from[slot]),
        plan.asks.get(at, NOTHING_MORE),
        plan.drafts.get(at, 0),
        NO_ADAPTER if plan.adapters is None else int(plan.adapters[at]),
    )


def salt_of(group: int) -> int:
    """What a group's cells differ by from those of the first."""
    return mix(group) if group else 0


class FakeRunner:
    """Implements `plan.Runner` on ``blocks`` blocks.

    ``chance``: decides which ready work runs when; None runs each step as it is launched. ``poison``: tokens
    that fail the row they are in; ``bombs``: tokens that fail the whole step, when it is launched or when its
    tokens are fetched. ``clock``: virtual seconds; a step takes ``step_time`` and ``token_time`` a token.
    ``ledger``: the hash of what was moved first under each key; every later move must bring the same
    (``moves`` of them so far). ``adapters``: holds those that plans name. ``windows``: of the KV groups.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int = 16,
        vocab_size: int = 256,
        *,
        chance: Random | None = None,
        late: bool = False,
        poison: frozenset[int] = frozenset(),
        launch_bombs: frozenset[int] = frozenset(),
        late_bombs: frozenset[int] = frozenset(),
        step_time: float = 1e-3,
        token_time: float = 1e-5,
        memory: SlotMemory | None = None,
        ledger: dict[bytes, int] | None = None,
        grammars: Matchers | None = None,
        adapters: FakeAdapters | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self._windows = windows
        self._grammars = grammars or Matchers()
        self._adapters = adapters or FakeAdapters()
        self.block_tokens = block_tokens
        self.vocab_size = vocab_size
        self.chance = chance
        self.late = late
        self.poison = poison
        self.launch_bombs = launch_bombs
        self.late_bombs = late_bombs
        self.step_time = step_time
        self.token_time = token_time
        self.clock = 0.0
        self.plans: list[Plan] = []
        self.keep_plans = False
        rubbish = np.random.default_rng(blocks)
        self._cells = rubbish.integers(0, MASK, (blocks, 2, block_tokens), dtype=np.uint64)
        self._positions, self._digests = self._cells[:, 0].view(np.int64), self._cells[:, 1]
        self._positions[:] = -1
        self._mixed = np.array([mix(i) for i in range(blocks * block_tokens + 1)], dtype=np.uint64)
        self._weights = np.array([weigh(i) for i in range(blocks * block_tokens + 1)], dtype=np.uint64)
        self.memory = memory
        self.moves = 0
        self._ledger = {} if ledger is None else ledger
        self._saves: dict[int, list[_Task]] = {}  # by block: saves that may not have run
        self._writes: dict[int, list[_Task]] = {}  # by block: loads and copies to it
        self._in_flight: list[_Launched] = []
        self._batch = Batch(Capacity(groups=len(windows)))
        self.rows: list[list[PlanRow]] = []
        self._drawn: dict[int, tuple[_Launched, int]] = {}  # by slot: the row that drew last, and its step
        self._ready_at = 0.0

    def launch(self, plan: Plan) -> FakeHandle:
        """Start a step. Raises what a bomb raises."""
        self._batch.apply(plan)
        rows = [_row_of(self._batch, plan, at, self.block_tokens) for at in range(len(plan))]
        if self.keep_plans:
            self.plans.append(plan)
            self.rows.append(rows)
        for fill in plan.fills:
            self._adapters.fill(fill.slot, fill.number)
        self._detonate(rows, self.launch_bombs, "at launch")
        self._ready_at = max(self._ready_at, self.clock) + self.step_time + self.token_time * plan.size
        behind = bool(self._in_flight)
        step = _Launched(rows, [[] for _ in rows], self._ready_at)
        self._add_tasks(step, plan)
        self._in_flight.append(step)
        if self.late:
            self._run_ready(step if behind else None)
        elif self.chance is None:
            self._finish(step)
        else:
            self._run_some(self.chance)
        return FakeHandle(self, step)

    def fetch(self, step: _Launched) -> Outcomes:
        """Wait for a step."""
        if self.chance is not None:
            self._run_some(self.chance)
        self._finish(step)
        self._in_flight.remove(step)
        for pending in (self._saves, self._writes):
            for block in [block for block, tasks in pending.items() if all(task.done for task in tasks)]:
                del pending[block]
        self.clock = max(self.clock, step.ends_at)
        self._detonate(step.rows, self.late_bombs, "in flight")
        return Outcomes.of(step.outcomes)

    def die(self) -> None:
        """With its process: what is in flight never runs."""
        self._in_flight.clear()

    def _detonate(self, rows: list[PlanRow], bombs: frozenset[int], where: str) -> None:
        for row in rows if bombs else ():
            if not bombs.isdisjoint(row.tokens.tolist()):
                self._adapters.spoil()
                raise RuntimeError(f"a bomb {where}")

    # --- the moments ------------------------------------------------------------------------------------

    def _add_tasks(self, step: _Launched, plan: Plan) -> None:
        """A read of a block waits for loads and copies to it, a write for its saves."""
        earlier = [task for launched in self._in_flight for task in launched.tasks]
        moved = [task for task in earlier if task.moves]
        for save in plan.saves:
            task = _Task(lambda save=save: self._save(save), self._pending(self._writes, [save.block]))
            self._saves.setdefault(save.block, []).append(task)
            step.tasks.append(task)
        own: list[_Task] = []
        for load in plan.loads:
            after = moved + own + self._pending(self._saves, [load.block])
            own.append(_Task(lambda load=load: self._load(load), after, moves=True))
            self._writes.setdefault(load.block, []).append(own[-1])
        for copy in plan.copies:
            after = moved + own + self._pending(self._saves, [copy.target])
            own.append(_Task(lambda copy=copy: self._copy(copy), after, moves=True))
            self._writes.setdefault(copy.target, []).append(own[-1])
        for number, (row, slot) in enumerate(zip(step.rows, plan.slots.tolist(), strict=True)):
            late = row.fed and row.asks.grammar is not None
            if late:
                step.late[number] = None
            step.masks.append(None if late else self._mask(row.asks.grammar))
            after = own + [task for task in earlier if task.seq == row.seq]
            after += self._pending(self._writes, row.table.ravel().tolist())
            written = row.table[:, row.first // self.block_tokens :]
            after += self._pending(self._saves, written.ravel().tolist())
            feeder = self._drawn[slot] if row.fed else None
            if feeder is not None:
                after.append(feeder[0].row_tasks[feeder[1]])
            if row.sampling is not None:
                self._drawn[slot] = step, number
            adds = int(self._adapters.slots[row.adapter])  # of the last slot: `NO_ADAPTER` is -1
            act = lambda number=number, feeder=feeder, adds=adds: self._compute(step, number, feeder, adds)
            step.row_tasks.append(_Task(act, after, row.seq))
        step.tasks += own + step.row_tasks

    def _pending(self, moves: dict[int, list[_Task]], blocks: list[int]) -> list[_Task]:
        return [task for block in blocks for task in moves.get(block, ())]

    def _run_ready(self, step: _Launched | None) -> None:
        for task in step.tasks if step is not None else ():
            if task.ready:
                self._run(task)

    def _run_some(self, chance: Random) -> None:
        while chance.random() < 0.7:
            ready = [task for step in self._in_flight for task in step.tasks if task.ready]
            if not ready:
                return
            self._run(chance.choice(ready))

    def _finish(self, step: _Launched) -> None:
        """Run what is left of a step, and of others only what it waits for."""
        for task in reversed(step.tasks) if self.late else step.tasks:
            self._run(task)

    def _run(self, task: _Task) -> None:
        if not task.done:
            for other in task.after:
                self._run(other)
            task.act()
            task.done = True
            task.after.clear()

    # --- the work ---------------------------------------------------------------------------------------

    def _copy(self, copy: BlockCopy) -> None:
        self.moves += 1
        self._positions[copy.target] = self._positions[copy.source]
        self._digests[copy.target] = self._digests[copy.source]

    def _save(self, save: BlockSave) -> None:
        positions, digests = self._slot(save.slot)
        positions[:], digests[:] = self._positions[save.block], self._digests[save.block]
        positions[save.tokens :], digests[save.tokens :] = 0, 0
        self._check_moved(save.slot, save.block, save.tokens)

    def _load(self, load: BlockLoad) -> None:
        self._positions[load.block], self._digests[load.block] = self._slot(load.slot)
        assert self.memory is not None
        self._check_moved(load.slot, load.block, self.memory.record(load.slot).tokens)

    def _check_moved(self, slot: int, block: int, tokens: int) -> None:
        """What block and slot hold now is what was first moved under the slot's key."""
        assert self.memory is not None
        self.moves += 1
        content = self._positions[block, :tokens].tobytes() + self._digests[block, :tokens].tobytes()
        positions, digests = self._slot(slot)
        assert content == positions[:tokens].tobytes() + digests[:tokens].tobytes(), "moved bytes differ"
        seen = xxh3_64_intdigest(content)
        assert self._ledger.setdefault(self.memory.record(slot).key, seen) == seen, "other bytes under a key"

    def reach(self, block: int) -> memoryview:
        """A block's bytes, to be written beside all plans; what stands there is not needed any more."""
        assert not self._in_flight, "a step may read or write the block"
        self.moves += 1
        return self._cells[block].reshape(-1).data.cast("B")

    def _slot(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.memory is not None
        return self._halves(self.memory.payload(slot))

    def _halves(self, payload: bytes | memoryview) -> tuple[np.ndarray, np.ndarray]:
        half = 8 * self.block_tokens
        return np.frombuffer(payload[:half], np.int64), np.frombuffer(payload[half:], np.uint64)

    def _read(self, table: np.ndarray, group: int, first: int, end: int) -> int:
        """Fold a group's cells of positions ``[first, end)``."""
        low, blocks = (
            first // self.block_tokens,
            slice(first // self.block_tokens, -(-end // self.block_tokens)),
        )
        cells = slice(first - low * self.block_tokens, end - low * self.block_tokens)
        positions = self._positions[table[group, blocks]].reshape(-1)[cells]
        digests = self._digests[table[group, blocks]].reshape(-1)[cells] ^ np.uint64(salt_of(group))
        folded = (digests ^ self._mixed[positions]) * self._weights[first:end]
        return int(folded.sum(dtype=np.uint64))

    def _differ(self, table: np.ndarray, position: int, reference: int) -> int:
        """0, if all groups with a window hold for a token at ``position`` what the group ``reference`` does."""
        found = 0
        for group, window in enumerate(self._windows):
            if window is not None:
                first = max(0, position + 1 - window)
                expected = self._read(table, reference, first, position)
                found ^= self._read(table, group, first, position) ^ expected
        return found

    def _compute(self, step: _Launched, number: int, feeder: tuple[_Launched, int] | None, adds: int) -> None:
        row = step.rows[number]
        table = row.table
        reference, window = widest(self._windows)
        tokens = row.tokens.tolist()
        if feeder is not None:
            assert not tokens
            fed = feeder[0].outcomes[feeder[1]]
            if not isinstance(fed, list):
                step.outcomes[number] = RowFault("fed by a row that failed")
                return
            tokens = fed
        assert len(tokens) == row.count
        if not self.poison.isdisjoint(tokens):
            step.outcomes[number] = RowFault("poison")
            return
        seen = max(0, row.first + 1 - window)
        context, drawn = (self._read(table, reference, seen, row.first) + adds) & MASK, list[int]()
        windowed = len(self._windows) > 1
        behind = row.first + row.count - row.drafts - 1  # from this position's token on it draws
        for position, token in enumerate(tokens, row.first):
            context ^= self._differ(table, position, reference) if windowed else 0
            digest, context = take_in(context, position, token)
            slot = position % self.block_tokens
            for group, block in enumerate(table[:, position // self.block_tokens].tolist()):
                self._positions[block, slot] = position
                self._digests[block, slot] = digest ^ salt_of(group)
            for gone in passing(position, window):
                context = (context - self._read(table, reference, gone, gone + 1)) & MASK
            if row.sampling is not None and position >= behind:
                drawn.append(draw(context, position + 1, row.sampling, self.vocab_size))
        if number in step.late:
            step.late[number] = drawn[0]
        elif row.sampling is not None:
            step.outcomes[number] = drawn if row.drafts else followed(drawn[0], step.masks[number])

    def draw(self, step: _Launched) -> None:
        """Make the masks that the step waits for: what was drawn before is known now."""
        for number in list(step.late):
            step.masks[number] = self._mask(step.rows[number].asks.grammar)
            drawn = step.late.pop(number)
            if drawn is not None:
                step.outcomes[number] = followed(drawn, step.masks[number])

    def _mask(self, grammar: int | None) -> np.ndarray | None:
        if grammar is None:
            return None
        words = np.zeros(-(-self.vocab_size // 64), dtype=np.int64)
        self._grammars.fill(grammar, words)
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab_size]


def followed(drawn: int, mask: np.ndarray | None) -> Outcome:
    """The first allowed token from ``drawn`` on, in a ring; `RowFault` where there is none."""
    if mask is None:
        return [drawn]
    allowed = np.flatnonzero(np.roll(mask, -drawn))
    if not len(allowed):
        return RowFault("no token is left", GrammarStuck.code)
    return [int((drawn + allowed[0]) % len(mask))]


@dataclass(frozen=True)
class FakeHandle:
    """A fake step in flight."""

    runner: FakeRunner
    step: _Launched

    def draw(self) -> None:
        """Draw what waits for masks."""
        self.runner.draw(self.step)

    def tokens(self) -> Outcomes:
        """Wait for it, and its moves."""
        return self.runner.fetch(self.step)

    def moved(self, *, wait: bool = False) -> bool:
        """As `tokens` has waited for its moves, too."""
        return True


SECRET = bytes(range(32))
SPACE = b"fake"
"""The namespace of fake engines."""


def fake_engine(
    settings: SchedulerSettings,
    *,
    chance: Random | None = None,
    memory: SlotMemory | None = None,
    disk: FakeDisk | None = None,
    clock: Callable[[], float] = time.monotonic,
    compiler: Compiler | None = None,
    drafter: Drafter | None = None,
    table: AdapterTable | None = None,
    adapters: FakeAdapters | None = None,
    **runner: object,
) -> tuple[Engine, FakeRunner]:
    """An engine in debug on a fake device of the same size; ``runner``: arguments of `FakeRunner`.

    ``memory``: its host tier's, of slots of `slot_bytes`; ``disk``: below that, its clock is the engine's, else
    ``clock``. ``table``, ``adapters``: the scheduler's and the device's side of adapters; None: without any.
    """
    pool = BlockPool(settings.blocks, debug=True)
    hasher = BlockHasher(SECRET, settings.block_tokens)
    runner.setdefault("vocab_size", settings.vocab_size)
    matchers = Matchers()
    device = FakeRunner(
        settings.blocks,
        settings.block_tokens,
        chance=chance,
        memory=memory,
        grammars=matchers,
        adapters=adapters,
        windows=settings.windows,
        **runner,  # type: ignore[arg-type]
    )
    tiers = Tiers()
    if memory is not None:
        near = disk is not None and disk.near_by and settings.depth == 1
        below = () if disk is None else disk.below
        tiers = Tiers(HostTier(memory), below, device.reach if near else None)
        if disk is not None:
            disk.begin(memory, reads=near)
            clock = disk.clock
    parts = {"compiler": compiler, "matchers": matchers, "drafter": drafter, "adapters": table}
    scheduler = Scheduler(settings, pool, hasher, SPACE, tiers, **parts)  # type: ignore[arg-type]
    return Engine(scheduler, device, debug=True, clock=clock, adapters=adapters), device


class Willing(Random):
    """A disk that does all it is asked, at the next look."""

    def random(self) -> float:
        return 0.2


class FakeDisk(Tier):
    """A tier without a process: each request ends when ``chance`` says so, well or badly.

    ``time``: virtual seconds, ``tick`` for each look at the clock. Bytes go to the slot when the request ends.
    ``asked``, ``fetched``: requests that began, and those that ended well.
    ``near_by``: blocks of a device at depth 1 are within reach, and of every four records three lie in memory,
    the fourth once it was fetched direct, most of the time. ``liar``: so does the chance of a `LyingTier`.
    """

    name = "disk"
    checks = True

    def __init__(self, chance: Random, *, near: bool = False, liar: Random | None = None) -> None:
        self.near_by = near
        self.liar = None if liar is None else LyingTier(liar)
        self.records: dict[bytes, tuple[int, bytes]] = {}
        self.time, self.tick = 0.0, 0.5
        self.asked = self.fetched = self.came = 0
        self.chance = chance

    def begin(self, memory: SlotMemory, *, reads: bool = False) -> None:
        """Another engine: requests of the one before are forgotten, as its disk process is dead."""
        self._memory = memory
        self.reads = reads
        self._storing: dict[int, tuple[Record, int]] = {}
        self._fetching: dict[int, tuple[bytes, int | None]] = {}
        self._ended: list[MoveEnd] = []
        self.brought: set[bytes] = set()
        self.dropped: set[bytes] = set()
        if self.liar is not None:
            self.liar.begin(memory)

    @property
    def below(self) -> tuple[Tier, ...]:
        """The tiers below the host: a liar may stand before this one."""
        return (self,) if self.liar is None else (self.liar, self)

    @property
    def room(self) -> int:
        return 4

    @property
    def lent(self) -> int:
        """How many slots it has, and the liar before it, for records that are to come."""
        own = sum(slot is not None for _, slot in self._fetching.values())
        return own + (0 if self.liar is None else self.liar.lent)

    def clock(self) -> float:
        self.time += self.tick
        return self.time

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: bytes) -> bool:
        return key in self.records

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        storing = {record.key for record, _ in self._storing.values()}
        return [
            Presence.FOUND if key in self.records else Presence.PENDING if key in storing else Presence.ABSENT
            for key in keys
        ]

    @property
    def waiting(self) -> bool:
        return bool(self._storing or self._fetching or self._ended)

    def readable(self, key: bytes) -> bool:
        return key in self.records

    def near(self, key: bytes) -> bool:
        return self.readable(key) and (key[0] % 4 > 0 or key in self.brought)

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[int]:
        found: list[int] = []
        for key, block in zip(keys, blocks, strict=False):
            if not self.near(key) or self.chance.random() >= 0.95:
                break
            tokens, block[:] = self.records[key]
            self.came += 1
            found.append(tokens)
        return found

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        if self.lookup((record.key,)) != [Presence.ABSENT]:
            return False
        self._storing[ticket] = record, slot
        return True

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        if key not in self.records:
            return False
        self._fetching[ticket] = key, slot
        self.asked += slot is not None
        return True

    def drop(self, key: bytes, *, erase: bool = False) -> None:
        self.records.pop(key, None)
        if erase:
            self.dropped.add(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Nothing is ever given up here."""

    def evict_first(self, keys: Iterable[bytes]) -> None:
        """Nothing is ever given up here."""

    def poll(self, now: float) -> list[MoveEnd]:
        for ticket in [one for one in self._storing if self.chance.random() < 0.5]:
            record, slot = self._storing.pop(ticket)
            payload = bytes(self._memory.payload(slot))
            done = self.chance.random() < 0.9 and xxh3_64_intdigest(payload) == record.digest
            if done:
                self.records[record.key] = record.tokens, payload
            self._ended.append(MoveEnd(ticket, done))
        for ticket in [one for one in self._fetching if self.chance.random() < 0.3]:
            key, slot = self._fetching.pop(ticket)
            done = key in self.records and self.chance.random() >= 0.1
            record = None
            if done and slot is not None:
                tokens, payload = self.records[key]
                self._memory.payload(slot)[:] = payload
                record = Record(key, tokens, xxh3_64_intdigest(payload))
                self.fetched += 1
            elif done:
                self.brought.add(key)
            self._ended.append(MoveEnd(ticket, done, record))
        ended, self._ended = self._ended, []
        return ended

    def statistics(self) -> dict[str, int]:
        waiting = sum(slot is not None for _, slot in self._fetching.values())
        return {"records": len(self.records), "waiting": waiting, "fetched": self.fetched}


class LyingTier(FakeDisk):
    """A tier that answers late, twice, never and wrongly, as ``chance`` says. It brings other bytes than it
    says, of other keys and other lengths, and tells of what it was never asked."""

    name = "liar"
    checks = False

    def __init__(self, chance: Random) -> None:
        super().__init__(chance)
        self._lost: set[int] = set()  # tickets that it never ends
        self._digests: dict[bytes, int] = {}  # as records had them when they came

    def begin(self, memory: SlotMemory, *, reads: bool = False) -> None:
        super().begin(memory)
        self._lost.clear()

    @property
    def room(self) -> int:
        return self.chance.randrange(4)

    @property
    def full(self) -> bool:
        return self.chance.random() < 0.5

    @property
    def waiting(self) -> bool:
        return any(ticket not in self._lost for ticket in (*self._storing, *self._fetching))

    def lookup(self, keys: Collection[bytes]) -> list[Presence]:
        told = super().lookup(keys)
        return [Presence(self.chance.randrange(3)) if self.chance.random() < 0.1 else one for one in told]

    def store(self, record: Record, slot: int, ticket: int, now: float) -> bool:
        if self.chance.random() < 0.05:
            self._lost.add(ticket)
        self._storing[ticket] = record, slot
        return self.chance.random() < 0.95

    def fetch(self, key: bytes, slot: int | None, ticket: int, now: float) -> bool:
        if slot is None or self.chance.random() < 0.1:
            return False
        if self.chance.random() < 0.05:
            self._lost.add(ticket)
        self._fetching[ticket] = key, slot
        return True

    def poll(self, now: float) -> list[MoveEnd]:
        ended: list[MoveEnd] = []
        for ticket in [one for one in self._storing if one not in self._lost and self.chance.random() < 0.3]:
            record, slot = self._storing.pop(ticket)
            if self.chance.random() < 0.9:
                self.records[record.key] = record.tokens, bytes(self._memory.payload(slot))
                self._digests[record.key] = record.digest
            ended.append(MoveEnd(ticket, self.chance.random() < 0.9))
        for ticket in [one for one in self._fetching if one not in self._lost and self.chance.random() < 0.3]:
            key, slot = self._fetching.pop(ticket)
            ended.append(self._brought(ticket, key, slot))
        ended += [one for one in ended if self.chance.random() < 0.2]
        if (wild := self.chance.randrange(2000)) < 200 and wild not in {*self._storing, *self._fetching}:
            ended.append(MoveEnd(wild, done=True))  # else it would use a slot that it has given back
        self.chance.shuffle(ended)
        return ended

    def _brought(self, ticket: int, key: bytes, slot: int | None) -> MoveEnd:
        """What it says has come into the slot, and perhaps has."""
        tokens, payload = self.records.get(key, (1, bytes(self._memory.block_bytes)))
        digest, done = self._digests.get(key, 1), self.chance.random() < 0.9
        wrong = self.chance.randrange(8)
        if wrong == 0:
            tokens += self.chance.randrange(-3, 4)
        elif wrong == 1:
            payload = payload[1:] + bytes([payload[0] ^ 1])
        elif wrong == 2:
            key = bytes(reversed(key))
        assert slot is not None
        self._memory.payload(slot)[:] = payload
        return MoveEnd(ticket, done, Record(key, max(0, tokens), digest) if done or wrong == 3 else None)


class ChanceDrafter:
    """Guesses that are right, wrong and half right: it knows what follows, but not always says so."""

    def __init__(self, chance: Random, vocab_size: int) -> None:
        self.chance = chance
        self.vocab_size = vocab_size

    def guess(self, sequence: Spoken, most: int) -> list[int]:
        """Of the right tokens some, then perhaps others."""
        assert sequence.turn is not None
        shadow, guesses = Shadow(sequence.tokens.view(sequence.length).tolist(), self.vocab_size), list[int]()
        for _ in range(min(most, self.chance.randint(0, 5))):
            right = shadow.next(sequence.turn.sampling)
            guesses.append(right if self.chance.random() < 0.7 else self.chance.randrange(self.vocab_size))
            shadow.extend(guesses[-1:])
        return guesses


def drafting_engine(settings: SchedulerSettings, **more: object) -> tuple[Engine, FakeRunner]:
    """A fake engine that guesses tokens."""
    vocab_size = int(more.get("vocab_size", settings.vocab_size))  # type: ignore[call-overload]
    drafter = ChanceDrafter(Random(settings.blocks), vocab_size)
    return fake_engine(settings, drafter=drafter, **more)  # type: ignore[arg-type]


def slot_bytes(block_tokens: int) -> int:
    """Bytes of a fake block: a position and a digest for each of its tokens."""
    return 16 * block_tokens


def fake_memory(slots: int, block_tokens: int) -> SlotMemory:
    """A memfd that holds so many of them."""
    stride = -(-slot_bytes(block_tokens) // 64) * 64
    fd = make_memory(2 * 4096 + slots * (stride + 64))
    try:
        return SlotMemory(fd, bytes(16), slot_bytes(block_tokens))
    finally:
        os.close(fd)
