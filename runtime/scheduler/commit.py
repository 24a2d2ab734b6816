"""Commits finished steps: KV that counts now, sampled tokens, turns that end, rows to discard."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from ..errors import GrammarFault, GrammarInvalid, GrammarStuck
from ..grammar.llguidance import Matcher, Matchers
from ..kv_placement.block_manager import BlockManager
from ..plan import Outcome, Outcomes, Plan, RowFault, Scored
from ..sequence import Flight, Sequence, Turn
from ..stats import Counters
from ..verbs import Finish, Row, TokenLogprob, Work
from .policy import Policy
from .queues import Queues

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
    _ended: list[Sequence] = field(default_factory=list)

    def commit(self, plan: Plan, outcomes: Outcomes, now: float, *, moved: bool = True) -> list[Row]:
        """Take over what ``plan`` computed. Returns a row for the gateway for each turn that has tokens to
        send or has ended.

        ``outcomes``: of the rows of the plan. ``moved``: False if the step failed as a whole, so that its
        copies and loads of blocks may not have been made.
        """
        self._block_manager.pool.finished(plan.step)
        flights = [self._flight(seq, plan.step) for seq in plan.seqs.tolist()]
        if moved:
            self._block_manager.transfers.finish(plan)
        else:
            self._distrust(plan, now)
        rows: list[Row] = []
        for flight, outcome in zip(flights, outcomes, strict=True):
            row = None if flight is None else self._land(*flight, outcome, now)
            if row is not None:
                rows.append(row)
        return rows

    def revoke(self, plan: Plan, now: float) -> list[Sequence]:
        """Undo a plan that failed as a whole. Returns the sequences that it had rows for.

        Its copies and loads of blocks may not have been made, so their target blocks are dropped too.
        """
        self._block_manager.pool.finished(plan.step)
        suspects = []
        for seq in plan.seqs.tolist():
            sequence = self._queues.sequences.get(seq)
            if sequence is not None and plan.step in sequence.in_flight:
                sequence.recall()
                self._block_manager.trim(sequence)
                suspects.append(sequence)
                if sequence.turn is None:
                    self._queues.touch(sequence, now)
        self._distrust(plan, now)
        return suspects

    def end(self, sequence: Sequence, now: float) -> Work | None:
        """End a sequence's turn, for any reason. The sequence becomes idle and keeps its computed KV.

        Returns what the turn cost; None if there was no turn.
        """
        read = sequence.turn is not None and sequence.computed >= sequence.turn.prompt
        if sequence.turn is not None:
            self._matchers.drop(sequence.turn.grammar)
        work = sequence.end()
        self._block_manager.trim(sequence)
        self._block_manager.offload_tail(sequence)
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

    def _distrust(self, plan: Plan, now: float) -> None:
        """Drop each block that ``plan`` was to fill by a copy or a load, and all later blocks of the sequences
        that hold it."""
        self._block_manager.transfers.revoke(plan)
        targets = [copy.target for copy in plan.copies] + [load.block for load in plan.loads]
        if not targets:
            return
        for sequence in self._queues.sequences.values():
            if self._block_manager.distrust(sequence, targets) and sequence.turn is None:
                self._queues.touch(sequence, now)
        self._block_manager.pool.distrust(targets)

    def _flight(self, seq: int, step: int) -> tuple[Sequence, Flight] | None:
        """The sequence and what step ``step`` did for it; None if it was stopped, cut, preempted or closed."""
        sequence = self._queues.sequences.get(seq)
        flight = sequence.flight_of(step) if sequence is not None else None
        if sequence is None or flight is None:
            self._counters.discarded += 1
            return None
        return sequence, flight

    def _land(self, sequence: Sequence, flight: Flight, outcome: Outcome, now: float) -> Row | None:
        if isinstance(outcome, RowFault):
            return self.fail(sequence, outcome, now)
        prefilled, recomputed = sequence.land(flight)
        computed = flight.end - flight.first
        self._policy.charge(sequence, computed)
        self._counters.landed(computed, prefilled, recomputed)
        self._block_manager.seal(sequence)
        if isinstance(outcome, Scored) and outcome.prompt and sequence.turn is not None:
            sequence.turn.scored += len(outcome.prompt)
            sequence.turn.prompt_scores += outcome.prompt
        if not flight.samples:
            return self._scored(sequence)
        assert sequence.turn is not None
        sampled, logprobs = (
            (outcome.tokens, outcome.logprobs) if isinstance(outcome, Scored) else (outcome, [])
        )
        tokens = _until_end(sequence.turn, sampled)
        assert tokens, "a row that samples came back without a token"
        sequence.keep(tokens)
        self._counters.drawn(len(tokens))
        if tokens[-1] not in sequence.turn.limits.stop_ids:
            tokens = tokens + self._go_on(sequence, tokens)
        return self._said(sequence, tokens, now, logprobs[: len(tokens)])

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
        forced = matcher.go_on(turn.allowed - turn.sampled)
        sequence.force(forced)
        self._counters.forced += len(forced)
        return forced

    def _said(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: Items[TokenLogprob] = ()
    ) -> Row | None:
        """Add ``tokens`` to those that the turn has not sent yet, and end the turn if they end it. Returns
        the row for the gateway with all of them, or None while there are fewer than ``TokenLimits.gather``
        and the turn goes on. ``logprobs``: of these tokens, or empty."""
        turn = sequence.turn
        assert turn is not None
        turn.untold += tokens
        turn.scores += logprobs
        finish = self._finish(turn, tokens[-1])
        if finish is None and len(turn.untold) < turn.limits.gather:
            return None
        told, turn.untold = turn.untold, []
        scores, turn.scores = turn.scores, []
        prompt, turn.prompt_scores = turn.prompt_scores, []
        work = self.end(sequence, now) if finish is not None else None
        length = len(sequence.tokens)
        return Row(
            sequence.id,
            sequence.epoch,
            told,
            length,
            finish,
            work,
            logprobs=scores or None,
            prompt_logprobs=prompt or None,
        )

    @staticmethod
    def _scored(sequence: Sequence) -> Row | None:
        """The row with the log probabilities of a chunk of the prompt; None if there are none to send."""
        turn = sequence.turn
        if turn is None or not turn.prompt_scores:
            return None
        scores, turn.prompt_scores = turn.prompt_scores, []
        length = len(sequence.tokens)
        return Row(sequence.id, sequence.epoch, [], length, prompt_logprobs=scores)

    def _finish(self, turn: Turn, token: int) -> Finish | None:
        if token in turn.limits.stop_ids:
            return Finish.STOP
        if turn.grammar is not None and self._matchers[turn.grammar].complete:
            return Finish.STOP
        return turn.exhausted if turn.sampled >= turn.allowed else None


def _until_end(turn: Turn, tokens: list[int]) -> list[int]:
    """The first of the sampled ``tokens``, up to a stop id or to the number that the turn may still sample."""
    if len(tokens) < 2:
        return tokens
    allowed = tokens[: turn.allowed - turn.sampled]
    end = next((at for at, token in enumerate(allowed, 1) if token in turn.limits.stop_ids), len(allowed))
    return allowed[:end]
