"""Commits finished steps: KV that counts now, sampled tokens, turns that end, rows to discard."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from ..columns import FRESH, NO_GRAMMAR
from ..errors import GrammarFault, GrammarInvalid, GrammarStuck
from ..grammar.llguidance import Matcher, Matchers
from ..kv_placement.block_manager import BlockManager
from ..order.policy import Policy
from ..order.queues import Queues
from ..plan import NO_INTS, Bools, Ints, Outcome, Outcomes, Plan, RowFault, Scored
from ..sequence import Sequence, Turn
from ..stats import Counters
from ..verbs import Decoded, Finish, Row, TokenLogprob, Work
from .slots import Slots

CLIENTS = frozenset({GrammarFault.code, GrammarInvalid.code, GrammarStuck.code})
"""Codes of faults that the client's own request causes, such as an invalid grammar; they are not counted as
the engine's."""


@dataclass(eq=False)
class Committer:
    """Takes over what plans computed, in the order in which the plans were made."""

    _policy: Policy
    _queues: Queues
    _block_manager: BlockManager
    _matchers: Matchers
    _counters: Counters
    _slots: Slots
    _ended: list[Sequence] = field(default_factory=list)

    def commit(
        self, plan: Plan, outcomes: Outcomes, now: float, *, moved: bool = True
    ) -> tuple[list[Row], Decoded | None]:
        """Take over what ``plan`` computed. Returns rows for the gateway, for each turn that has tokens to send
        or has ended: those that merely decode together.

        ``outcomes``: of the rows of the plan. ``moved``: False if the step failed as a whole, so that its
        copies and loads of blocks may not have been made.
        """
        self._block_manager.pool.finished(plan.step)
        valid = self._valid(plan)
        if not moved:
            self.distrust(plan, now)
        self._counters.discarded += len(plan) - int(valid.sum())
        plain = self._land_plain(plan, outcomes, valid) if len(plan) else NO_INTS
        valid[plain] = False
        rows, plain = self._follow_plain(plan, outcomes, plain, now)
        told, decoded = self._tell_plain(plan, outcomes, plain) if plain.size else ([], None)
        rows += told
        for at in np.flatnonzero(valid).tolist():
            row = self._land(self._queues.sequences[int(plan.seqs[at])], plan, at, outcomes[at], now)
            if row is not None:
                rows.append(row)
        return rows, decoded

    def _valid(self, plan: Plan) -> Bools:
        """Which rows of a plan count: not those of sequences that were stopped, cut, preempted or closed
        since."""
        return np.asarray(self._slots.columns.mark[plan.slots] == plan.marks)

    def _land_plain(self, plan: Plan, outcomes: Outcomes, valid: Bools) -> Ints:
        """Take over the rows of plain sequences that go on: each has computed a token and drawn the next one.
        ``valid``: the rows that count. Returns the numbers of those that are done with."""
        columns, slots = self._slots.columns, plan.slots
        plain = valid & columns.plain[slots] & plan.draws & (plan.counts == 1)
        plain &= (plan.firsts >= columns.prompts[slots]) & (columns.computed[slots] == plan.firsts)
        plain &= columns.lengths[slots] == plan.firsts + 1  # else a grammar has forced what the row drew
        for at in outcomes.others:
            plain[at] = False
        rows = np.flatnonzero(plain)
        if not rows.size:
            return rows
        slots, ids = slots[rows], outcomes.ids[rows, 0]
        lengths = columns.lengths[slots] + 1
        ends = (columns.stops[slots] == ids[:, None]).any(axis=1) | (lengths >= columns.ends[slots])
        if ends.any():
            rows, slots, ids, lengths = (array[~ends] for array in (rows, slots, ids, lengths))
        computed = columns.computed[slots] + 1
        columns.computed[slots] = computed
        columns.pending_samples[slots] -= 1
        columns.before[slots], columns.last[slots] = columns.last[slots], ids
        columns.lengths[slots] = lengths
        counts = columns.fresh_count[slots]
        columns.fresh[slots, counts] = ids
        columns.fresh_count[slots] = counts + 1
        full = (computed % self._block_manager.block_tokens == 0) | (counts + 1 == FRESH)
        columns.rewired[slots[full]] = True  # where a key names another block already, it takes that one
        for at in np.flatnonzero(full).tolist():
            sequence = self._queues.sequences[int(plan.seqs[rows[at]])]
            assert len(sequence.tokens) == lengths[at]
            self._block_manager.seal(sequence)
        self._counters.computed += len(rows)
        self._counters.sampled += len(rows)
        tenants = columns.tenants[slots]
        for tenant in dict.fromkeys(tenants.tolist()):
            self._policy.charge(tenant, int((tenants == tenant).sum()))
        return rows

    def _follow_plain(
        self, plan: Plan, outcomes: Outcomes, plain: Ints, now: float
    ) -> tuple[list[Row], Ints]:
        """Advance the grammars of rows that `_land_plain` has taken over. Returns rows for the gateway of turns
        that this ends, or that got tokens by force; and the numbers of the other rows."""
        if not (plain.size and plan.asks):  # a row with a grammar asks for its mask
            return [], plain
        grammars, rows, done = self._slots.columns.grammars[plan.slots[plain]], list[Row](), list[int]()
        bound = np.flatnonzero(grammars != NO_GRAMMAR)
        seqs, ids = plan.seqs[plain[bound]].tolist(), outcomes.ids[plain[bound], 0].tolist()
        for number, seq, token in zip(bound.tolist(), seqs, ids, strict=True):
            sequence = self._queues.sequences[seq]
            tokens = [token, *self._go_on(sequence, (token,))]
            if len(tokens) > 1 or self._matchers[int(grammars[number])].complete:
                done.append(number)
                row = self._said(sequence, tokens, now)
                rows += [] if row is None else [row]
        return rows, np.delete(plain, done) if done else plain

    def _tell_plain(self, plan: Plan, outcomes: Outcomes, plain: Ints) -> tuple[list[Row], Decoded | None]:
        """Rows for the gateway of those that `_land_plain` has taken over."""
        columns, slots, rows = self._slots.columns, plan.slots[plain], list[Row]()
        lengths = columns.lengths[slots]
        untold = lengths - columns.told[slots]
        alone = columns.gather[slots] == 1
        for at in np.flatnonzero(~alone & (untold >= columns.gather[slots])).tolist():
            sequence = self._queues.sequences[int(plan.seqs[plain[at]])]
            length = int(lengths[at])
            tokens = sequence.tokens.span(length - int(untold[at]), length).tolist()
            rows.append(Row(sequence.id, sequence.epoch, tokens, length))
            columns.told[slots[at]] = length
        if not alone.all():
            slots, plain, lengths = slots[alone], plain[alone], lengths[alone]
        if not slots.size:
            return rows, None
        columns.told[slots] = lengths
        arrays = plan.seqs[plain], columns.epochs[slots], outcomes.ids[plain, 0], lengths
        return rows, Decoded(*(array.tobytes() for array in arrays))

    def revoke(self, plan: Plan, now: float) -> list[Sequence]:
        """Undo a plan that failed as a whole. Returns the sequences that it had rows for.

        Its copies and loads of blocks may not have been made, so their target blocks are dropped too.
        """
        self._block_manager.pool.finished(plan.step)
        suspects = []
        for at in np.flatnonzero(self._valid(plan)).tolist():
            sequence = self._queues.sequences[int(plan.seqs[at])]
            sequence.recall()
            self._block_manager.trim(sequence)
            suspects.append(sequence)
            if sequence.turn is None:
                self._queues.touch(sequence, now)
        self.distrust(plan, now)
        return suspects

    def end(self, sequence: Sequence, now: float) -> Work:
        """End a sequence's turn, for any reason. The sequence becomes idle and keeps its computed KV. Returns
        what the turn cost."""
        assert sequence.turn is not None
        read = sequence.computed >= sequence.turn.prompt
        self._matchers.drop(sequence.turn.grammar)
        work = sequence.end()
        self._block_manager.trim(sequence)
        self._block_manager.save_tail(sequence)
        self._queues.rest(sequence, now)
        if read:
            self._queues.defer(sequence)
        self._ended.append(sequence)
        self._counters.turns += 1
        return work

    def ended(self) -> list[Sequence]:
        """The sequences with a turn that has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def follow(self, sequence: Sequence, matcher: Matcher, now: float) -> Row | None:
        """Give a sequence's turn its compiled grammar, and append the tokens that the grammar forces at the
        beginning.

        Returns the row for the gateway with these tokens; None if none are forced, or if they are not to be
        sent yet.
        """
        assert sequence.turn is not None
        sequence.turn.grammar = self._matchers.add(matcher)
        ids = self._go_on(sequence)
        return self._said(sequence, ids, now) if ids else None

    def fail(self, sequence: Sequence, fault: RowFault, now: float) -> Row | None:
        """End the turn with an error; returns its last row, for the gateway. A sequence without a turn (its
        prefill failed) gets None: what is planned is taken back, it is not prefilled further, and its next
        turn will meet the fault."""
        if fault.code in CLIENTS:
            self._counters.grammars_refused += 1
        else:
            self._counters.faults += 1
        if sequence.turn is None:
            sequence.recall()
            self._block_manager.trim(sequence)
            self._queues.defer(sequence)
            return None
        work = self.end(sequence, now)
        self._queues.defer(sequence)
        length = len(sequence.tokens)
        return Row(
            sequence.id, sequence.epoch, [], length, Finish.ERROR, work, fault.message, code=fault.code
        )

    def distrust(self, plan: Plan, now: float) -> None:
        """Note that the moves of ``plan`` may not have been made: give up its saves. Drop each block that it
        was to fill by a copy or a load, and all later blocks of the sequences that hold it."""
        self._block_manager.transfers.finish(plan, made=False)
        targets = [copy.target for copy in plan.copies] + [load.block for load in plan.loads]
        if not targets:
            return
        for sequence in self._queues.sequences.values():
            if self._block_manager.distrust(sequence, targets) and sequence.turn is None:
                self._queues.touch(sequence, now)
        self._block_manager.pool.distrust(targets)

    def _land(self, sequence: Sequence, plan: Plan, at: int, outcome: Outcome, now: float) -> Row | None:
        """Take over row number ``at`` of a plan."""
        first, drafts = int(plan.firsts[at]), plan.drafts.get(at, 0)
        # A grammar may have forced the token since that the row drew.
        draws = bool(plan.draws[at]) and first + int(plan.counts[at]) - drafts == sequence.length
        if isinstance(outcome, RowFault):
            if draws or outcome.code not in CLIENTS:
                return self.fail(sequence, outcome, now)
            outcome = []
        sampled = outcome.tokens if isinstance(outcome, Scored) else outcome
        logprobs = outcome.logprobs if isinstance(outcome, Scored) else []
        tokens = self._accepted(sequence, plan, at, sampled) if draws else []
        computed = int(plan.counts[at]) - drafts + max(0, len(tokens) - 1)
        prefilled, recomputed = sequence.land(first, first + computed)
        self._policy.charge(sequence.tenant, computed)
        self._counters.landed(computed, prefilled, recomputed)
        self._counters.drafted += drafts
        if drafts:
            self._block_manager.trim(sequence)
        self._block_manager.seal(sequence)
        if isinstance(outcome, Scored) and outcome.prompt and sequence.turn is not None:
            sequence.turn.scored += len(outcome.prompt)
            sequence.turn.prompt_scores += outcome.prompt
        turn = sequence.turn
        if turn is None or not (draws or turn.prompt_scores):
            return None
        if draws and tokens[-1] not in turn.limits.stop_ids:
            tokens = tokens + self._go_on(sequence, tokens)
        return self._said(sequence, tokens, now, logprobs[: len(tokens)])

    def _accepted(self, sequence: Sequence, plan: Plan, at: int, sampled: list[int]) -> list[int]:
        """Append the tokens that a row has drawn, as far as they follow from right guesses, and return them. A
        guess is right if it is what was drawn at its position: then what was drawn behind it counts, too. Up to
        a stop id, or to the number that the turn may still sample."""
        turn = sequence.turn
        assert turn is not None
        guesses = plan.guesses(at)
        right = next((n for n, guess in enumerate(guesses) if guess != sampled[n]), len(guesses))
        tokens = sampled[: min(right + 1, turn.allowed - sequence.sampled)]
        end = next((at for at, token in enumerate(tokens, 1) if token in turn.limits.stop_ids), len(tokens))
        tokens = tokens[:end]
        assert tokens, "a row that samples came back without a token"
        sequence.keep(tokens)
        self._counters.sampled += len(tokens)
        self._counters.accepted += len(tokens) - 1
        return tokens

    def _go_on(self, sequence: Sequence, tokens: Items[int] = ()) -> list[int]:
        """Advance the turn's grammar by ``tokens``, which were sampled, then append the tokens that it forces
        next, and return these. Empty without a grammar, if it forces none, or if `Turn.goes_on` is false."""
        turn = sequence.turn
        assert turn is not None
        if turn.grammar is None:
            return []
        matcher = self._matchers[turn.grammar]
        for token in tokens:
            matcher.take(token)
        if not turn.goes_on:
            return []
        forced = matcher.go_on(turn.allowed - sequence.sampled)
        sequence.force(forced)
        self._counters.forced += len(forced)
        return forced

    def _said(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: Items[TokenLogprob] = ()
    ) -> Row | None:
        """End the turn if ``tokens``, its last ones, end it. Returns the row for the gateway with all tokens
        that it was not told of, or None while there are fewer than ``TokenLimits.gather`` and the turn goes
        on. ``logprobs``: of these tokens, or empty. Without ``tokens`` the row has log probabilities of the
        prompt."""
        turn = sequence.turn
        assert turn is not None
        turn.scores += logprobs
        finish = self._finish(sequence, turn, tokens[-1]) if tokens else None
        length = len(sequence.tokens)
        if tokens and finish is None and length - sequence.told < turn.limits.gather:
            return None
        untold = sequence.tokens.span(sequence.told, length).tolist()
        sequence.told = length
        scores, turn.scores = turn.scores, []
        prompt, turn.prompt_scores = turn.prompt_scores, []
        work = self.end(sequence, now) if finish is not None else None
        return Row(
            sequence.id,
            sequence.epoch,
            untold,
            length,
            finish,
            work,
            logprobs=scores or None,
            prompt_logprobs=prompt or None,
        )

    def _finish(self, sequence: Sequence, turn: Turn, token: int) -> Finish | None:
        if token in turn.limits.stop_ids:
            return Finish.STOP
        if turn.grammar is not None and self._matchers[turn.grammar].complete:
            return Finish.STOP
        return turn.exhausted if sequence.sampled >= turn.allowed else None
