"""A device without tensors, on a virtual clock: what the scheduler's policies and races are tested on.

KV memory is an array ``[block, slot]`` of (position, digest). A row reads its *whole* context back through
its block table; what it writes, and the token it samples, are a digest of all it read. So a wrong block, a
stale epoch, a wrong tail or an off-by-one anywhere gives another token than `Shadow`, a list of tokens, says.

Rows do not run when they are launched. Each waits for what it must wait for on any device (earlier rows of
its sequence, the row that feeds it, its step's copies, which run in order), and beyond that runs at any
moment between its launch and its step's ``tokens()``, before or after rows of other sequences and steps, as
``chance`` decides. So a block that is leased again before the step that may still use it has finished shows
as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from holdfast.kvstore.keys import BlockHasher
from holdfast.kvstore.pool import BlockPool
from holdfast.runtime.engine import Engine
from holdfast.runtime.link.messages import Sampling
from holdfast.runtime.plan import BlockCopy, Outcome, Plan, RowFault
from holdfast.runtime.scheduler import Scheduler
from holdfast.runtime.settings import SchedulerSettings

MASK = (1 << 64) - 1
GREEDY = Sampling()


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


class Shadow:
    """What a sequence ought to be: its tokens, and the next one. ``context`` folds in all of them."""

    def __init__(self, tokens: Iterable[int] = (), vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size
        self.tokens: list[int] = []
        self._contexts = [0]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append."""
        for token in tokens:
            _, context = take_in(self._contexts[-1], len(self.tokens), token)
            self.tokens.append(token)
            self._contexts.append(context)

    def truncate(self, length: int) -> None:
        """Keep the first ``length``."""
        del self.tokens[length:]
        del self._contexts[length + 1 :]

    def copy(self, length: int) -> Shadow:
        """Another with the first ``length``."""
        twin = Shadow((), self.vocab_size)
        twin.tokens, twin._contexts = self.tokens[:length], self._contexts[: length + 1]
        return twin

    def next(self, sampling: Sampling = GREEDY) -> int:
        """The token that follows."""
        return draw(self._contexts[-1], len(self.tokens), sampling, self.vocab_size)


@dataclass(eq=False)
class _Task:
    """What a step does at some moment. ``after``: what must be done before. ``seq``: whose row it is."""

    act: Callable[[], None]
    after: list[_Task]
    seq: int | None = None
    done: bool = False

    @property
    def ready(self) -> bool:
        return not self.done and all(task.done for task in self.after)


@dataclass(eq=False)
class _Launched:
    """A step in flight: its tasks, and where its outcomes go."""

    plan: Plan
    outcomes: list[Outcome]
    ends_at: float
    previous: _Launched | None
    tables: list[np.ndarray] = field(default_factory=list)
    tasks: list[_Task] = field(default_factory=list)


class FakeRunner:
    """Implements `plan.Runner` on ``blocks`` blocks.

    ``chance``: decides which ready work runs when; None runs each step as it is launched. ``poison``: tokens
    that fail the row they are in; ``bombs``: tokens that fail the whole step, when it is launched or when its
    tokens are fetched. ``clock``: virtual seconds; a step takes ``step_time`` and ``token_time`` a token.
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
    ) -> None:
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
        self._positions = np.full((blocks, block_tokens), -1, dtype=np.int64)
        self._digests = rubbish.integers(0, MASK, (blocks, block_tokens), dtype=np.uint64)
        self._mixed = np.array([mix(i) for i in range(blocks * block_tokens + 1)], dtype=np.uint64)
        self._weights = np.array([weigh(i) for i in range(blocks * block_tokens + 1)], dtype=np.uint64)
        self._in_flight: list[_Launched] = []
        self._ready_at = 0.0

    def launch(self, plan: Plan) -> FakeHandle:
        """Start a step. Raises what a bomb raises."""
        if self.keep_plans:
            self.plans.append(plan)
        self._detonate(plan, self.launch_bombs, "at launch")
        self._ready_at = max(self._ready_at, self.clock) + self.step_time + self.token_time * plan.tokens
        previous = self._in_flight[-1] if self._in_flight else None
        step = _Launched(plan, [None] * len(plan.rows), self._ready_at, previous)
        self._add_tasks(step)
        self._in_flight.append(step)
        if self.late:
            self._run_ready(step if previous else None)
        elif self.chance is None:
            self._finish(step)
        else:
            self._run_some(self.chance)
        return FakeHandle(self, step)

    def fetch(self, step: _Launched) -> list[Outcome]:
        """Wait for a step."""
        if self.chance is not None:
            self._run_some(self.chance)
        self._finish(step)
        step.previous = None
        self._in_flight.remove(step)
        self.clock = max(self.clock, step.ends_at)
        self._detonate(step.plan, self.late_bombs, "in flight")
        return step.outcomes

    def _detonate(self, plan: Plan, bombs: frozenset[int], where: str) -> None:
        for row in plan.rows if bombs else ():
            if not bombs.isdisjoint(row.tokens.tolist()):
                raise RuntimeError(f"a bomb {where}")

    # --- the moments ------------------------------------------------------------------------------------

    def _add_tasks(self, step: _Launched) -> None:
        earlier = [task for launched in self._in_flight for task in launched.tasks]
        copies = [task for task in earlier if task.seq is None]
        for copy in step.plan.copies:
            step.tasks.append(_Task(lambda copy=copy: self._copy(copy), list(copies)))
            copies.append(step.tasks[-1])
        own = list(step.tasks)
        for number, row in enumerate(step.plan.rows):
            step.tables.append(row.table.copy())  # the plan's is valid until launch returns
            after = own + [task for task in earlier if task.seq == row.seq]
            if row.fed_by is not None and step.previous is not None:
                after.append(step.previous.tasks[len(step.previous.plan.copies) + row.fed_by])
            act = lambda number=number: self._compute(step, number)
            step.tasks.append(_Task(act, after, row.seq))

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
        self._positions[copy.target] = self._positions[copy.source]
        self._digests[copy.target] = self._digests[copy.source]

    def _read(self, table: np.ndarray, length: int) -> int:
        """Fold the cells of positions ``[0, length)``."""
        positions = self._positions[table].reshape(-1)[:length]
        digests = self._digests[table].reshape(-1)[:length]
        folded = (digests ^ self._mixed[positions]) * self._weights[:length]
        return int(folded.sum(dtype=np.uint64))

    def _compute(self, step: _Launched, number: int) -> None:
        row, table = step.plan.rows[number], step.tables[number]
        tokens = row.tokens.tolist()
        if row.fed_by is not None:
            assert step.previous is not None and not tokens
            fed = step.previous.outcomes[row.fed_by]
            if not isinstance(fed, int):
                step.outcomes[number] = RowFault("fed by a row that failed")
                return
            tokens = [fed]
        assert len(tokens) == row.count
        if not self.poison.isdisjoint(tokens):
            step.outcomes[number] = RowFault("poison")
            return
        context = self._read(table, row.first)
        for position, token in enumerate(tokens, row.first):
            digest, context = take_in(context, position, token)
            block, slot = table[position // self.block_tokens], position % self.block_tokens
            self._positions[block, slot] = position
            self._digests[block, slot] = digest
        if row.sampling is not None:
            position = row.first + row.count
            step.outcomes[number] = draw(context, position, row.sampling, self.vocab_size)


@dataclass(frozen=True)
class FakeHandle:
    """A fake step in flight."""

    runner: FakeRunner
    step: _Launched

    def tokens(self) -> list[Outcome]:
        """Wait for it."""
        return self.runner.fetch(self.step)


def fake_engine(
    settings: SchedulerSettings, *, chance: Random | None = None, **runner: object
) -> tuple[Engine, FakeRunner]:
    """An engine in debug on a fake device of the same size; ``runner``: arguments of `FakeRunner`."""
    pool = BlockPool(settings.blocks, settings.block_tokens, debug=True)
    hasher = BlockHasher(bytes(range(32)), settings.block_tokens)
    runner.setdefault("vocab_size", settings.vocab_size)
    device = FakeRunner(settings.blocks, settings.block_tokens, chance=chance, **runner)  # type: ignore[arg-type]
    return Engine(Scheduler(settings, pool, hasher, b"fake"), device, debug=True), device
