"""What a finished step changes: KV that counts now, sampled tokens, turns that end, rows nobody wants."""

from __future__ import annotations

from collections.abc import Sequence as Items

from .counters import Counters
from .link.messages import Finish, Row, TokenLogprob, Work
from .paging import Paging
from .plan import Outcome, Plan, RowFault, Scored
from .roster import Roster
from .sequence import Flight, Sequence, Turn


class Committer:
    """Settles plans, in the order in which they were made."""

    def __init__(self, roster: Roster, paging: Paging, counters: Counters) -> None:
        self._roster = roster
        self._paging = paging
        self._counters = counters

    def commit(self, plan: Plan, outcomes: Items[Outcome]) -> list[Row]:
        """Take over what ``plan`` computed; returns a row for each turn that sampled a token or ended."""
        self._paging.pool.finished(plan.step)
        rows: list[Row] = []
        for planned, outcome in zip(plan.rows, outcomes, strict=True):
            sequence = self._roster.sequences.get(planned.seq)
            flight = sequence.in_flight.pop(plan.step, None) if sequence is not None else None
            if sequence is None or flight is None:  # stopped, cut, preempted, ended or closed since
                self._counters.discarded += 1
                continue
            row = self._land(sequence, flight, outcome)
            if row is not None:
                rows.append(row)
        return rows

    def revoke(self, plan: Plan) -> list[Sequence]:
        """``plan`` failed as a whole: nothing of it counts; returns the sequences that were to go on by it.

        Its copies may not have been made, so blocks that were their targets are not trusted either.
        """
        self._paging.pool.finished(plan.step)
        suspects = []
        for planned in plan.rows:
            sequence = self._roster.sequences.get(planned.seq)
            if sequence is not None and plan.step in sequence.in_flight:
                sequence.recall()
                self._paging.trim(sequence)
                suspects.append(sequence)
                if sequence.turn is None:
                    self._roster.touch(sequence)
        targets = {copy.target for copy in plan.copies}
        if targets:
            for sequence in self._roster.sequences.values():
                tail = sequence.computed // self._paging.block_tokens
                if tail < len(sequence.table) and sequence.table[tail] in targets:
                    self._paging.drop_tail(sequence)
        return suspects

    def end(self, sequence: Sequence) -> Work | None:
        """End a turn, for whatever reason; the sequence keeps what is computed and is idle."""
        work = sequence.end()
        self._paging.trim(sequence)
        self._roster.rest(sequence)
        self._counters.turns += 1
        return work

    def _land(self, sequence: Sequence, flight: Flight, outcome: Outcome) -> Row | None:
        if isinstance(outcome, RowFault):
            return self._fail(sequence, outcome)
        prefilled, recomputed = sequence.land(flight)
        self._counters.computed += flight.end - flight.first
        self._counters.prefilled += prefilled
        self._counters.recomputed += recomputed
        self._paging.seal(sequence)
        if not flight.samples:
            return None
        assert outcome is not None, "a row that samples came back without a token"
        token = outcome.token if isinstance(outcome, Scored) else outcome
        sequence.keep(token)
        self._counters.sampled += 1
        return self._sampled(sequence, token, [outcome.logprob] if isinstance(outcome, Scored) else None)

    def _sampled(self, sequence: Sequence, token: int, logprobs: list[TokenLogprob] | None) -> Row:
        turn = sequence.turn
        assert turn is not None
        finish = _finish(turn, token)
        work = self.end(sequence) if finish is not None else None
        length = len(sequence.tokens)
        return Row(sequence.id, sequence.epoch, [token], length, finish, work, logprobs=logprobs)

    def _fail(self, sequence: Sequence, fault: RowFault) -> Row | None:
        """A turn ends with the error; an idle sequence waits for its turn to meet it again."""
        self._counters.faults += 1
        if sequence.turn is None:
            sequence.recall()
            self._paging.trim(sequence)
            self._roster.prefill.pop(sequence.id, None)
            return None
        work = self.end(sequence)
        self._roster.prefill.pop(sequence.id, None)
        return Row(
            sequence.id,
            sequence.epoch,
            [],
            len(sequence.tokens),
            Finish.ERROR,
            work,
            fault.message,
        )


def _finish(turn: Turn, token: int) -> Finish | None:
    if token in turn.limits.stop_ids:
        return Finish.STOP
    if turn.sampled < turn.allowed:
        return None
    return turn.exhausted
