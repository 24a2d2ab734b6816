"""Plans a step: rows in the order of turns, within the budgets of tokens and blocks.

Each running turn that decodes has one token of the budget. What is left goes to prompts in chunks, in the
order of turns and within the policy's limits for tenants. What is still left goes to the prefill of idle
sequences, but only while no turn waits, and beside running turns only as far as `idle_prefill` allows. A turn
stalls for one step if there is no block for it because the blocks taken for it are behind the step fence, still
in use by a step in flight. It has no row while its KV comes up beside the steps. A sequence suspected of having
killed an engine comes before all others and shares no step until it has sampled a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeAlias

import numpy as np

from ..adapters import AdapterTable
from ..columns import NO_ADAPTER, NO_GRAMMAR
from ..kv_placement.block_manager import BlockManager
from ..order.policy import Policy
from ..order.queues import Queues
from ..plan import NO_BOOLS, NO_INTS, BlockCopy, Bools, Ints, Plan, RowAsks
from ..sequence import Sequence, Status
from ..settings import SchedulerSettings
from ..stats import Counters
from .idle_prefill import IdlePrefill
from .preemption import Preemption
from .slots import Slots


class Drafter(Protocol):
    """Guesses the next tokens of a turn, for a step that then checks several at once."""

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """At most ``most`` tokens that may follow those of the sequence; any, and any number of them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """The running turns with slots for their adapters, as long as none comes, goes or changes its kind.
    ``plain``: those of which each row
    merely decodes, ``slots``: their slots; ``others``: the others; ``suspect``: the first one that shares no
    step. ``version``: of queues and columns."""

    version: tuple[int, int]
    plain: list[Sequence]
    slots: Ints
    others: list[Sequence]
    suspect: Sequence | None


_Rows: TypeAlias = tuple[Ints, Ints, Ints, Ints, Ints, Bools, Bools]
"""Columns of rows: sequence numbers, slots, marks, first positions, counts, whether they draw, whether fed."""

NO_ROWS: _Rows = NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_BOOLS, NO_BOOLS


@dataclass(slots=True)
class _Draft:
    """A plan that is being made. ``chunk``: prompt tokens that may still be added. ``limits``: the same for
    each tenant; empty if the prompts are of one tenant. ``plain``: the rows that merely decode, which come
    first; ``rows``: the others, each with a number for each of the same columns. The rest as in `Plan`."""

    step: int
    chunk: int
    plain: _Rows = NO_ROWS
    rows: list[tuple[int, int, int, int, int, bool, bool]] = field(default_factory=list)
    tokens: list[Ints] = field(default_factory=list)
    asks: dict[int, RowAsks] = field(default_factory=dict)
    drafts: dict[int, int] = field(default_factory=dict)
    copies: list[BlockCopy] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)

    @property
    def decoding(self) -> int:
        """How many rows compute one token and draw the next."""
        return len(self.plain[0]) + sum(row[4] == 1 and row[5] for row in self.rows)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.plain[0]) + len(self.rows)

    def columns(self) -> _Rows:
        """The columns of all rows."""
        if not self.rows:
            return self.plain
        table = np.array(self.rows, dtype=np.int64)
        seqs, slots, marks, firsts, counts, draws, fed = table.T.copy()
        others = seqs, slots, marks, firsts, counts, draws > 0, fed > 0
        if not len(self.plain[0]):
            return others
        joined = (np.concatenate(pair) for pair in zip(self.plain, others, strict=True))
        return tuple(joined)  # type: ignore[return-value]


@dataclass(eq=False)
class Planner:
    """Makes plans, and notes in each sequence what is in flight for it."""

    _settings: SchedulerSettings
    _queues: Queues
    _block_manager: BlockManager
    _policy: Policy
    _preemption: Preemption
    _idle_prefill: IdlePrefill
    _counters: Counters
    _slots: Slots
    _adapters: AdapterTable
    _drafter: Drafter | None = None
    _seen: _Running | None = None

    def plan(self, now: float) -> Plan | None:
        """The next step; None if nothing can be computed before a commit or a verb."""
        queues = self._queues
        queues.arrange()
        self._bring_up(now)
        self._preemption.admit()
        seen = self._running()
        if (suspect := seen.suspect) is not None:
            if self._block_manager.pool.in_flight and not suspect.in_flight:
                return None  # wait for the steps in flight: the suspect shares no step
            plan = self.plan_alone(suspect, now)
            if plan is not None or suspect.in_flight:
                return plan
        draft = _Draft(self._counters.steps + 1, self._settings.max_step_tokens)
        running = seen.others
        if not self._add_plain(draft, seen):  # too few blocks for all: the order of turns decides
            serves = self._adapters.serves
            running = [one for one in queues.running.values() if not one.isolated and serves(one.adapter)]
        ready = {sequence.id for sequence in running if self._ready(sequence, now)}
        # With guesses, a turn waits for what it draws: the next guesses stand behind that.
        waits = self._drafter is not None
        to_do = [0 if waits and sequence.pending_samples else sequence.to_do for sequence in running]
        draft.chunk -= len(draft) + to_do.count(1)
        draft.limits = self._limits(running, to_do, ready, draft.chunk)
        for sequence, tokens in zip(running, to_do, strict=True):
            # Skipped: a turn that was just preempted for an earlier one, or waits for its KV or for blocks.
            if sequence.status is Status.RUNNING and sequence.id in ready:
                self._add(draft, sequence, tokens, now, reserved=tokens == 1)
        draft.limits = {}
        # Otherwise idle sequences would take, a little in each step, the blocks that a turn waits for.
        if not queues.waiting and len(ready) == len(running):
            self._add_idle(draft, now)
        return self._emit(draft)

    def _running(self) -> _Running:
        """The running turns, by kind."""
        columns, seen = self._slots.columns, self._seen
        version = self._queues.version, columns.version
        if seen is None or seen.version != version:
            plain, others, suspect = list[Sequence](), list[Sequence](), None
            if self._adapters.in_use:
                self._adapters.serve(one.adapter for one in self._queues.running.values() if not one.isolated)
            for sequence in self._queues.running.values():
                if sequence.isolated:
                    suspect = suspect or sequence
                elif not self._adapters.serves(sequence.adapter):
                    continue
                elif self._drafter is None and sequence.slot is not None and columns.plain[sequence.slot]:
                    self._note_adapter(sequence, sequence.slot)
                    plain.append(sequence)
                else:
                    others.append(sequence)
            slots = np.array([sequence.slot for sequence in plain], dtype=np.int64)
            self._seen = seen = _Running(version, plain, slots, others, suspect)
        return seen

    def _note_adapter(self, sequence: Sequence, slot: int) -> None:
        adapter = sequence.adapter
        held = NO_ADAPTER if adapter is None or adapter.slot_number is None else adapter.slot_number
        self._slots.columns.adapters[slot] = held

    def _add_plain(self, draft: _Draft, seen: _Running) -> bool:
        """Give each turn that merely decodes its row, but those with enough tokens being sampled. Returns
        whether there are blocks for these and for all other turns. If not, nothing is done: an earlier turn may
        take the blocks of a later one, which must not have a row by then."""
        columns, slots = self._slots.columns, seen.slots
        if not slots.size:
            return True
        due = columns.lengths[slots] + columns.pending_samples[slots] < columns.ends[slots]
        sequences = seen.plain
        if not due.all():
            slots, sequences = slots[due], [sequences[at] for at in np.flatnonzero(due).tolist()]
        short = np.flatnonzero(columns.planned[slots] >= columns.rooms[slots]).tolist()
        needed = len(short) * self._block_manager.groups + sum(
            self._needed(sequence) for sequence in seen.others
        )
        if needed > self._block_manager.pool.available:
            return False
        if short:
            self._block_manager.allocate_each([sequences[at] for at in short])
            columns.rooms[slots[short]] += self._settings.block_tokens
            columns.rewired[slots[short]] = True
        self._slots.enter_plain(slots)
        fed, firsts, one = columns.pending_samples[slots] > 0, columns.planned[slots], np.ones_like(slots)
        draft.plain = columns.seqs[slots], slots, columns.mark[slots], firsts, one, one > 0, fed
        draft.tokens.append(columns.last[slots[~fed]])
        grammars = columns.grammars[slots]
        for at in np.flatnonzero(grammars != NO_GRAMMAR).tolist():
            draft.asks[at] = RowAsks(grammar=int(grammars[at]))
        columns.planned[slots] = firsts + 1
        columns.pending_samples[slots] += 1
        return True

    def _needed(self, sequence: Sequence) -> int:
        """The most blocks that a row of the sequence may need."""
        most = sequence.to_do
        if not sequence.needs_lookup:  # else all of it may be restored
            most = min(most, self._settings.max_step_tokens)
        return self._block_manager.shortfall(sequence, sequence.planned + most)

    def _limits(
        self, running: list[Sequence], to_do: list[int], ready: set[int], chunk: int
    ) -> dict[int, int]:
        """The most prompt tokens of each tenant in this step; empty if all prompts are of one tenant.
        ``to_do``: tokens that each of ``running`` could compute; ``ready``: ids of those that may have a row;
        ``chunk``: the most for all together."""
        wanted: dict[int, int] = {}
        for sequence, tokens in zip(running, to_do, strict=True):
            if tokens > 1 and sequence.id in ready:
                wanted[sequence.tenant] = wanted.get(sequence.tenant, 0) + tokens
        return dict(self._policy.limits(wanted, chunk)) if len(wanted) > 1 else {}

    def plan_alone(self, sequence: Sequence, now: float) -> Plan | None:
        """Plan a step for one sequence alone; None if it has nothing to do or finds no blocks."""
        draft = _Draft(self._counters.steps + 1, self._settings.max_step_tokens)
        if self._adapters.in_use:
            self._adapters.serve([sequence.adapter])
            self._seen = None  # the other turns get their slots again
        if self._adopt(sequence, now):
            self._block_manager.fall_back(sequence)
            self._add(draft, sequence, sequence.to_do, now, reserved=False)
        return self._emit(draft)

    def _emit(self, draft: _Draft) -> Plan | None:
        if not len(draft) and not self._block_manager.transfers.waiting:
            self._adapters.take_back()
            return None
        self._block_manager.launched(draft.step)
        columns = draft.columns()
        saves, loads = self._block_manager.transfers.emit(rows=len(draft), draws=bool(columns[5].any()))
        adapters = self._slots.columns.adapters[columns[1]] if self._adapters.in_use else NO_INTS
        plan = Plan(
            draft.step,
            *columns,
            np.concatenate(draft.tokens) if draft.tokens else NO_INTS,
            draft.asks,
            draft.drafts,
            adapters if adapters.max(initial=NO_ADAPTER) != NO_ADAPTER else None,
            self._adapters.fills() if self._adapters.in_use else (),
            self._slots.emit() if len(draft) else None,
            tuple(draft.copies),
            saves,
            loads,
        )
        self._counters.steps = draft.step
        self._counters.rows += len(plan)
        self._counters.copies += len(plan.copies)
        return plan

    def _ready(self, sequence: Sequence, now: float) -> bool:
        """Take over what is there of a sequence's KV (`_adopt`). Returns whether it may have a row in this
        step: not while its blocks are loaded beside the steps, as all other rows would wait with it."""
        if not self._adopt(sequence, now):
            return False
        self._block_manager.fall_back(sequence)
        return not self._block_manager.transfers.delays(sequence.table.view)

    def _adopt(self, sequence: Sequence, now: float) -> bool:
        """Take over what the prefix cache and the host tier hold of a sequence's KV, if it needs a lookup.

        Returns False if the sequence has no row in this step: the blocks to restore into are behind the step
        fence, or the rest of its KV is restored in the next step.
        """
        if not sequence.needs_lookup or sequence.planned != sequence.computed:
            return True
        sequence.looked_up()
        if sequence.turn is not None and sequence.turn.to_score:
            return True  # its whole prompt is computed
        sequence.count_found(self._block_manager.adopt(sequence))
        located = self._block_manager.locate(sequence)
        found = located.at_hand()
        # Without what the next token sees a beginning is of no use, unless the rest is on its way.
        whole = self._block_manager.windows.narrow and sequence.status not in (
            Status.RESTORING,
            Status.STAGED,
        )
        if not found.keys or (whole and len(found) < len(located)):
            return True
        if len(found) > self._block_manager.pool.available:
            self._preemption.relieve(len(found), sequence, now)
        room, coming = self._block_manager.pool.available, self._block_manager.pool.fenced
        if room < len(found):
            comes = bool(coming) and room + coming >= len(found)
            if whole and not comes:
                return True
            sequence.look_up()  # the rest in a later step
            if comes:
                self._counters.stalls += 1
                return False
        least = self._settings.blocks_for(self._settings.least_chunk) * self._block_manager.groups
        most = self._block_manager.transfers.at_once(len(found), least)
        self._block_manager.restore(sequence, found.beginning(min(room, most)))
        if most < len(found):
            sequence.look_up()
        # False: the rest comes in the next step. If nothing moves in this one (damaged records), do not wait.
        return most >= min(room, len(found)) or not self._block_manager.transfers.waiting

    def _bring_up(self, now: float) -> None:
        """Restore to the device what has come from disk so far, for sequences that wait for the rest."""
        for sequence in (*self._queues.restoring.values(), *self._queues.staged.values()):
            if sequence.needs_lookup:
                self._adopt(sequence, now)
                if sequence.turn is None:
                    self._queues.idle.put(sequence)

    def _add_idle(self, draft: _Draft, now: float) -> None:
        waiting = list(islice(self._queues.prefill.values(), self._settings.max_sequences))
        self._add_all(draft, [sequence for sequence in waiting if sequence.turn_expected], now)
        others = [sequence for sequence in waiting if not sequence.turn_expected]
        if others:
            tokens = sum(sequence.to_do for sequence in others)
            more = len(self._queues.sequences) > len(waiting)
            decoding, rows = draft.decoding, len(draft)
            draft.chunk = self._idle_prefill.limit(draft.chunk, rows, decoding, tokens, others=more)
            self._add_all(draft, others, now)

    def _add_all(self, draft: _Draft, sequences: list[Sequence], now: float) -> None:
        for sequence in sequences:
            if draft.chunk <= 0 or len(draft) >= self._settings.max_sequences:
                return
            # Skip a sequence that lost its KV meanwhile, and a suspect: it is computed in its turn only.
            if sequence.id in self._queues.prefill and not sequence.isolated:
                if sequence.adapter is not None and not sequence.adapter.names:
                    self._queues.defer(sequence)  # its adapter was unloaded
                    continue
                if not self._adapters.lend(sequence.adapter) or not self._ready(sequence, now):
                    continue
                self._add(draft, sequence, sequence.to_do, now, reserved=False)
                if not sequence.to_do:
                    self._queues.defer(sequence)

    def _add(self, draft: _Draft, sequence: Sequence, to_do: int, now: float, *, reserved: bool) -> None:
        """Give the sequence a row in the step, within the budgets of tokens and blocks; none if these are
        used up. ``to_do``: tokens that it could compute. ``reserved``: one token of the budget was set aside
        for it."""
        limit = draft.chunk
        if draft.limits and not reserved:
            limit = min(limit, draft.limits.get(sequence.tenant, 0))
        most = min(to_do, max(limit, reserved))
        if most <= 0:
            return
        end = self._secure(sequence, most, now)
        count = end - sequence.planned
        if count <= 0:
            self._counters.stalls += 1
            return
        draft.chunk -= count - reserved
        if draft.limits and not reserved:
            draft.limits[sequence.tenant] -= count
        guesses = self._guesses(draft, sequence, end)
        draft.copies += self._block_manager.allocate(sequence, end + len(guesses))
        self._add_row(draft, sequence, end, guesses)

    def _secure(self, sequence: Sequence, most: int, now: float) -> int:
        """The position, at most ``most`` tokens ahead, up to which the sequence has blocks or can get them
        now; others are evicted for that. If there is no block to copy its shared partial last block to, that
        block's tokens are dropped and computed again."""
        end = self._find_room(sequence, most, now)
        if end > sequence.planned or not sequence.shared_tail or self._block_manager.pool.fenced:
            return end
        # No block for the copy of the shared tail, and none will come: compute the tail's tokens again instead.
        self._block_manager.drop_tail(sequence)
        self._block_manager.fall_back(sequence)
        return self._find_room(sequence, most, now)

    def _find_room(self, sequence: Sequence, most: int, now: float) -> int:
        end = sequence.planned + most
        short = self._block_manager.shortfall(sequence, end)
        if not short:
            return end
        if short > self._block_manager.pool.available:
            self._preemption.relieve(short, sequence, now)
            least = self._block_manager.shortfall(sequence, sequence.planned + 1)
            if sequence.turn is not None and least > self._block_manager.pool.available:
                self._preemption.preempt(least, sequence)
        return min(end, self._block_manager.reach(sequence, self._block_manager.pool.available))

    def _guesses(self, draft: _Draft, sequence: Sequence, end: int) -> list[int]:
        """Tokens to guess behind ``end`` for a row of a turn that merely decodes, within the budgets of tokens
        and blocks; without preempting for them."""
        columns, turn, slot = self._slots.columns, sequence.turn, sequence.slot
        if self._drafter is None or turn is None or slot is None or not columns.plain[slot]:
            return []
        decodes = end == sequence.length and end - sequence.planned == 1
        if columns.reads[slot] or turn.grammar is not None or not decodes:
            return []
        most = min(draft.chunk, turn.allowed - sequence.sampled - 1)
        reach = self._block_manager.reach(sequence, self._block_manager.pool.available) - end
        guesses = self._drafter.guess(sequence, max(0, min(most, reach)))
        draft.chunk -= len(guesses)
        return guesses

    def _add_row(self, draft: _Draft, sequence: Sequence, end: int, guesses: list[int]) -> None:
        """Append the row that computes a sequence up to position ``end``, and ``guesses`` behind that, and note
        it in the sequence."""
        first, turn, number = sequence.planned, sequence.turn, len(draft)
        draws = turn is not None and end == sequence.total
        fed = end > sequence.length
        if fed:
            assert sequence.pending_samples and end - first == 1
        else:
            draft.tokens.append(sequence.tokens.span(first, end))
        if guesses:
            draft.tokens.append(np.array(guesses, dtype=np.int64))
            draft.drafts[number] = len(guesses)
        if turn is not None:
            forbidden = turn.forbidden(end) if draws else ()
            grammar = turn.grammar if draws else None
            scored, scored_from = None, first
            if turn.to_score:
                scored_from = max(first, turn.scored)
                if (scored_to := min(end, turn.output_from - 1)) > scored_from:
                    scored = sequence.tokens.span(scored_from + 1, scored_to + 1)
            if forbidden or grammar is not None or scored is not None:
                most = turn.sampling.prompt_logprobs or 0
                draft.asks[number] = RowAsks(forbidden, grammar, scored, scored_from, most)
        slot = self._slots.enter(sequence, end, draft.step)
        self._note_adapter(sequence, slot)
        mark = int(self._slots.columns.mark[slot])
        draft.rows.append((sequence.id, slot, mark, first, end - first + len(guesses), draws, fed))
        sequence.advance(draft.step, end, draws=draws, drafts=len(guesses))
        if draws:
            self._slots.qualify(sequence)
            self._slots.columns.rooms[slot] = len(sequence.table) * self._settings.block_tokens
