"""The plan: what one step computes, as plain data that could cross a process.

Scheduler and runner share nothing else: no tensors, no policy, no live objects. The runner keeps the rows: of
each sequence that steps compute it knows the block table and the sampling parameters, in a *slot* of its
batch. A plan names slots, and says what changed in them since the plan before. The runner asks nothing back
but the masks of grammars, by the numbers in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .adapters import SlotFill
from .columns import NO_ADAPTER
from .verbs import Sampling, TokenLogprob

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

NO_SEQUENCE = -1
"""The sequence number of a row that warms up kernels: it belongs to no sequence."""

NO_TOKEN = -1
"""In `Outcomes.ids`: there is no token."""

NO_BLOCKS = np.empty((0, 4), dtype=np.int32)
NO_PAST = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """All that the batch keeps of a sequence: sent when the sequence gets the slot ``number``, when its epoch
    is another one, and after a step has failed.

    ``table``: block ids, int32 ``[groups, blocks]``, less than 0 where a group has none; ``[blocks]``: the same
    for all groups. ``sampling``: of its turn; None: it has none. ``past``, where
    ``sampling.reads_past``: ids of all tokens before the last one of the row that comes with this, int32; from
    position ``output_from`` on they were generated.
    """

    number: int
    seq: int
    epoch: int
    table: NDArray[np.int32]
    sampling: Sampling | None = None
    past: NDArray[np.int32] | None = None
    output_from: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What changed in the batch since the plan with the ``number`` before; number 0: the batch forgets all
    slots first.

    ``whole``: slots that are sent whole. ``blocks``: new and replaced blocks, int32 ``[n, 4]``: KV group, slot,
    column in the table, block id. ``past``: for rows that draw and read the past, the tokens before their last
    one that the batch does not have yet, in order, int32 ``[n, 2]``: slot, token id.
    """

    number: int
    whole: tuple[Slot, ...] = ()
    blocks: NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    past: NDArray[np.int32] = field(default_factory=lambda: NO_PAST)


@dataclass(frozen=True, slots=True, eq=False)
class RowAsks:
    """What a row asks for beside the sampling of its slot.

    ``forbidden``: ids that may not be drawn now. ``grammar``: the number of the grammar that the draw follows;
    its owner makes the mask (`Matchers`) while the device computes: in ``launch``, or in `Handle.draw` for a
    row that is fed. ``scored``: ids of the tokens behind the positions from ``scored_from`` on, of which log
    probabilities are wanted, with ``scored_top`` alternatives; int64; None where none are."""

    forbidden: tuple[int, ...] = ()
    grammar: int | None = None
    scored: Ints | None = None
    scored_from: int = 0
    scored_top: int = 0


NOTHING_MORE = RowAsks()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a whole block to another one, before the step's rows. A plan's copies are made in the order
    given."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Copy a block into a host slot; the part behind its first ``tokens`` tokens becomes zeros.

    It may run beside the rows, but reads what stood there before this plan: it comes after the loads and
    copies of earlier plans to ``block``, and before any load, copy or row of this plan or a later one that
    writes it. Its tokens were computed by finished steps. It is done when ``Handle.moved`` says so.
    ``spare``: the slot is the first to be evicted, as the block has a copy or is not wanted; the runner
    ignores it.
    """

    block: int
    slot: int
    tokens: int
    spare: bool = False


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Copy a host slot into a block that no step in flight uses.

    It may run beside the rows, but comes before the block copies and rows of this plan or a later one that
    read or write the block. It is done when ``Handle.moved`` says so.
    """

    slot: int
    block: int


NO_INTS = np.empty(0, dtype=np.int64)
NO_BOOLS = np.empty(0, dtype=bool)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step, number ``step``: saves, loads and copies of blocks, in this order, then rows. It may have no
    rows.

    A row computes ``counts`` tokens of one sequence at positions ``[firsts, firsts + counts)``. Arrays have an
    entry for each row, int64: ``seqs``, the sequence's number; ``slots``, its slot in the batch; ``marks``, the
    scheduler's, which tells a row that was taken back; the runner ignores it. ``draws``: the row draws the
    token at position ``firsts + counts``, by the sampling of its slot; ``fed``: its one token is the one that
    the slot drew last, which stays on the device. ``tokens``: the ids of all other rows' tokens, row by row,
    int64. ``asks``: by row number, what few rows ask for besides. ``drafts``: by row number, how many of its
    last tokens are guesses: it draws behind the token before them and behind each of them. ``adapters``: of
    each row the slot of its adapter, int64, `NO_ADAPTER` for none; None: no row has one. ``fills``: what comes
    into slots of adapters before the rows. ``changes``: of the batch, before the rows; None: the plan has no
    rows.
    """

    step: int
    seqs: Ints = field(default_factory=lambda: NO_INTS)
    slots: Ints = field(default_factory=lambda: NO_INTS)
    marks: Ints = field(default_factory=lambda: NO_INTS)
    firsts: Ints = field(default_factory=lambda: NO_INTS)
    counts: Ints = field(default_factory=lambda: NO_INTS)
    draws: Bools = field(default_factory=lambda: NO_BOOLS)
    fed: Bools = field(default_factory=lambda: NO_BOOLS)
    tokens: Ints = field(default_factory=lambda: NO_INTS)
    asks: Mapping[int, RowAsks] = field(default_factory=dict)
    drafts: Mapping[int, int] = field(default_factory=dict)
    adapters: Ints | None = None
    fills: tuple[SlotFill, ...] = ()
    changes: Changes | None = None
    copies: tuple[BlockCopy, ...] = ()
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.slots)

    @property
    def size(self) -> int:
        """Tokens computed by this step."""
        return int(self.counts.sum())

    @property
    def draws_one_each(self) -> bool:
        """Whether each row draws one token: then the draws are numbered as the rows are. Their number does not
        tell that: a row with guesses draws several, beside rows that draw none."""
        return not self.drafts and bool(self.draws.all())

    def guesses(self, row: int) -> list[int]:
        """The guessed tokens at the end of a row."""
        drafts = self.drafts.get(row, 0)
        end = int(np.where(self.fed, 0, self.counts)[: row + 1].sum())
        return self.tokens[end - drafts : end].tolist() if drafts else []

    @property
    def decoding(self) -> int:
        """How many rows compute one token and draw the next."""
        return int(((self.counts == 1) & self.draws).sum())


@dataclass(frozen=True, slots=True, eq=False)
class PlanRow:
    """A row of a plan with all that the batch knows of it. ``table``: block ids of its context, int32
    ``[groups, ceil((first + count) / block_tokens)]``, or one line for all groups; ``past``: as in `Slot`;
    ``tokens``: its ids, int64 ``[count]``, empty if it is ``fed``; ``sampling``: None if it draws nothing;
    ``adapter``: the slot of its adapter."""

    seq: int
    epoch: int
    first: int
    count: int
    tokens: Ints
    table: NDArray[np.int32]
    sampling: Sampling | None = None
    fed: bool = False
    past: NDArray[np.int32] | None = None
    output_from: int = 0
    asks: RowAsks = NOTHING_MORE
    drafts: int = 0
    adapter: int = NO_ADAPTER


def plan_of(
    step: int, rows: Sequence[PlanRow], copies: tuple[BlockCopy, ...] = (), loads: tuple[BlockLoad, ...] = ()
) -> Plan:
    """A plan of whole rows, before which the batch forgets all slots: for what runs without a scheduler. The
    slot of each row is its number."""
    adapters = np.array([row.adapter for row in rows], dtype=np.int64)
    whole = tuple(
        Slot(at, row.seq, row.epoch, row.table, row.sampling, row.past, row.output_from)
        for at, row in enumerate(rows)
    )
    return Plan(
        step,
        np.array([row.seq for row in rows], dtype=np.int64),
        np.arange(len(rows)),
        np.zeros(len(rows), dtype=np.int64),
        np.array([row.first for row in rows], dtype=np.int64),
        np.array([row.count for row in rows], dtype=np.int64),
        np.array([row.sampling is not None for row in rows], dtype=bool),
        np.array([row.fed for row in rows], dtype=bool),
        np.concatenate([row.tokens for row in rows if not row.fed] or [NO_INTS]),
        {at: row.asks for at, row in enumerate(rows) if row.asks is not NOTHING_MORE},
        {at: row.drafts for at, row in enumerate(rows) if row.drafts},
        adapters if adapters.max(initial=NO_ADAPTER) != NO_ADAPTER else None,
        (),
        Changes(0, whole) if rows else None,
        copies,
        loads=loads,
    )


@dataclass(frozen=True, slots=True)
class RowFault:
    """This row alone failed (not-a-number logits, an exception); the other rows are good.

    ``code`` names a class of ``runtime.errors``, if there is one for it.
    """

    message: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """Sampled ids and their log probabilities, one each, where ``sampling.logprobs`` asks for them.
    ``prompt``: the log probabilities of the row's ``scored`` tokens."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob] = field(default_factory=list)


Outcome: TypeAlias = list[int] | Scored | RowFault
"""What a row of a step gave: the sampled ids in order (none, if it was to sample none), with log
probabilities if asked for, or a fault."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """What the rows of a step gave. ``ids``: sampled ids, int64 ``[rows, most of a row]``, `NO_TOKEN` behind
    them. ``others``: by row number, the outcomes that are more than ids."""

    ids: Ints
    others: Mapping[int, Scored | RowFault] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Outcomes:
        """From the outcome of each row."""
        ids = [outcome if isinstance(outcome, list) else [] for outcome in outcomes]
        array = np.full((len(ids), max(map(len, ids), default=0)), NO_TOKEN, dtype=np.int64)
        for at, some in enumerate(ids):
            array[at, : len(some)] = some
        return cls(array, {at: one for at, one in enumerate(outcomes) if not isinstance(one, list)})

    def __getitem__(self, row: int) -> Outcome:
        """The outcome of the row with this number."""
        other = self.others.get(row)
        return [token for token in self.ids[row].tolist() if token != NO_TOKEN] if other is None else other


class Handle(Protocol):
    """A step in flight."""

    def draw(self) -> None:
        """Draw for rows with a grammar that are fed by the step before: what their grammars allow is known now,
        as that step is committed. Called before the next launch; raises nothing."""
        ...

    def tokens(self) -> Outcomes:
        """Wait until the step's copies and rows are done; its saves and loads may still run. Returns the
        outcomes of its rows."""
        ...

    def moved(self, *, wait: bool = False) -> bool:
        """Whether the step's saves and loads are done; with ``wait``, wait until they are. What it raises
        says that they may not have been made, and that none of them runs any more."""
        ...


class Runner(Protocol):
    """Computes plans on a device."""

    def launch(self, plan: Plan) -> Handle:
        """Start a step; on a GPU it returns before the step is done.

        What this or ``Handle.tokens`` raises fails the whole step, of which nothing runs any more then;
        `EngineDied` says that the device is lost. The next plan begins the batch anew.
        """
        ...
