"""The verbs of the link, one method each: checked first, so that a refused one changed nothing.

They take effect between a commit and the next plan. If a step in flight holds the sequence, its row of an
older epoch is discarded when it comes. Costs are those of the new tokens, never of the history; a fork copies
arrays.
"""

from __future__ import annotations

from ..counters import Counters
from ..errors import (
    ContextExceeded,
    EngineOverloaded,
    EpochStale,
    LengthInvalid,
    SamplingInvalid,
    SequenceBusy,
    SequenceExists,
)
from ..grammar.queue import GrammarQueue
from ..kv_placement.block_manager import BlockManager
from ..kv_placement.leases import Leases
from ..kv_placement.offload import Offload
from ..link.messages import (
    Close,
    Extend,
    Finish,
    Fork,
    Generate,
    Lease,
    Open,
    Opening,
    Receipt,
    Settle,
    Stage,
    State,
    Stop,
    Truncate,
)
from ..sequence import Sequence, Turn
from ..settings import SchedulerSettings
from ..tokens import TokenList, checked_tokens
from .commit import Committer
from .queues import Queues
from .sampling_limits import check_sampling


class Verbs:
    """Changes sequences as the link asks. Every method raises a `VerbRefused` or does all it says."""

    def __init__(
        self,
        settings: SchedulerSettings,
        queues: Queues,
        block_manager: BlockManager,
        committer: Committer,
        offload: Offload,
        leases: Leases,
        counters: Counters,
        grammar_queue: GrammarQueue,
    ) -> None:
        self._grammar_queue = grammar_queue
        self._offload = offload
        self._leases = leases
        self._settings = settings
        self._queues = queues
        self._block_manager = block_manager
        self._committer = committer
        self._counters = counters

    def open(self, verb: Open) -> State:
        """Begin a sequence; what the prefix cache holds of it is computed at once."""
        self._check_new([verb.seq])
        tokens = checked_tokens(verb.tokens, self._settings.vocab_size)
        self._check_context(len(tokens))
        sequence = Sequence(
            verb.seq, self._block_manager.residency.root(verb.salt), TokenList(tokens), isolated=verb.alone
        )
        self._counters.adopted += self._block_manager.adopt(sequence)
        self._queues.touch(sequence)
        self._offload.restore.stage(sequence, self._queues.idle_eviction.now)
        return sequence.state

    def extend(self, verb: Extend) -> State:
        """Append tokens to an idle sequence; all but the last are computed before a turn, if it fits."""
        sequence = self._idle(verb.seq, verb.expect_length)
        tokens = checked_tokens(verb.tokens, self._settings.vocab_size)
        self._check_context(sequence.total + len(tokens))
        sequence.extend(tokens)
        sequence.turn_expected = verb.due
        self._queues.touch(sequence)
        self._offload.restore.stage(sequence, self._queues.idle_eviction.now)
        return sequence.state

    def truncate(self, verb: Truncate) -> State:
        """Keep the first ``length`` tokens. A running turn is ended, as by `stop`."""
        sequence = self._queues[verb.seq]
        if verb.expect_epoch != sequence.epoch:
            raise EpochStale(f"sequence {verb.seq} is at epoch {sequence.epoch}, not {verb.expect_epoch}")
        self._check_length(sequence, verb.length)
        self._shorten(sequence, verb.length)
        return sequence.state

    def generate(self, verb: Generate) -> State:
        """Begin a turn, on tokens that come with it behind those that are there; with it the sequence, maybe.

        What its grammar has it begin with is told in a row, and not in the state.
        """
        opening = verb.opening
        if opening is None:
            there = self._idle(verb.seq, verb.expect_length).total
        else:
            there = self._check_opening(verb.seq, opening)
        tokens = checked_tokens(verb.tokens, self._settings.vocab_size)
        turn = self._checked_turn(verb, there + len(tokens))
        sequence = self._queues[verb.seq] if opening is None else self._begun(verb.seq, opening)
        if len(tokens):
            sequence.extend(tokens)
        if opening is not None and opening.parent is None:
            self._counters.adopted += self._block_manager.adopt(sequence)
            self._offload.restore.stage(sequence, self._queues.idle_eviction.now)
        if sequence.planned == sequence.total:  # after a truncation; its last token's logits are wanted
            self._block_manager.cut(sequence, sequence.total - 1)
        sequence.begin(turn)
        state = sequence.state
        if verb.sampling.grammar is None:
            self._offload.restore.line_up(sequence, self._queues.idle_eviction.now)
        else:
            self._grammar_queue.begin(sequence, verb.sampling.grammar)
        return state

    def stop(self, verb: Stop) -> State:
        """End the turn, if any; what steps in flight sample is discarded, all that is committed kept.

        But for what is beyond ``keep``: tokens that nobody has read.
        """
        sequence = self._queues[verb.seq]
        if verb.keep is None or verb.keep >= len(sequence.tokens):
            self._halt(sequence)
        else:
            self._check_length(sequence, verb.keep)
            self._shorten(sequence, verb.keep)
        return sequence.state

    def fork(self, verb: Fork) -> State:
        """Make children from what is committed; they share its blocks, and copy a tail to write it."""
        parent = self._queues[verb.seq]
        length = len(parent.tokens) if verb.at is None else verb.at
        self._check_length(parent, length)
        self._check_new(verb.children)
        self._forked(parent, verb.children, length)
        return parent.state

    def close(self, verb: Close) -> None:
        """Forget a sequence."""
        sequence = self._queues[verb.seq]
        self._leases.end(sequence)
        self._block_manager.surrender(sequence, keep=verb.keep_kv)
        if verb.keep_kv:
            self._offload.retire(sequence)
        self._queues.close(sequence)

    def lease(self, verb: Lease, now: float) -> tuple[State, Receipt]:
        """GrantedLease what the budget has room for; at any time, for turns that begin later."""
        sequence = self._queues[verb.seq]
        receipt = self._leases.grant(sequence, verb, now)
        return sequence.state, receipt

    def stage(self, verb: Stage) -> State:
        """An idle sequence comes back soon: what lower tiers hold of it is brought up, the rest computed."""
        sequence = self._idle(verb.seq)
        sequence.needs_lookup = True
        self._queues.touch(sequence)
        self._offload.restore.stage(sequence, self._queues.idle_eviction.now)
        return sequence.state

    def settle(self, verb: Settle) -> State:
        """An idle sequence will not be wanted for a while: its KV leaves the device, what it can for disk."""
        sequence = self._idle(verb.seq)
        self._block_manager.offload_tail(sequence)
        if not verb.disk:
            self._block_manager.lower(sequence)
        self._block_manager.surrender(sequence)
        self._queues.taken(sequence)
        if verb.disk:
            self._offload.leave(sequence)
        return sequence.state

    def _begun(self, seq: int, opening: Opening) -> Sequence:
        """A sequence as its opening has it."""
        if opening.parent is not None:
            (child,) = self._forked(self._queues[opening.parent], [seq], opening.at)
            return child
        sequence = Sequence(
            seq, self._block_manager.residency.root(opening.salt), TokenList(), isolated=opening.alone
        )
        self._queues.touch(sequence)
        return sequence

    def _forked(self, parent: Sequence, seqs: list[int], length: int) -> list[Sequence]:
        children = [Sequence(seq, parent.root, parent.tokens.copy(length)) for seq in seqs]
        self._block_manager.fork(parent, children)
        for child in children:
            self._queues.touch(child)
            self._queues.prefill.pop(
                child.id, None
            )  # what the parent computes need not be computed beside it
        return children

    def _shorten(self, sequence: Sequence, length: int) -> None:
        self._halt(sequence)
        self._block_manager.forget(sequence, length)
        if sequence.tail is not None:
            self._block_manager.save_tail(sequence)
        self._queues.touch(sequence)

    def _halt(self, sequence: Sequence) -> None:
        if sequence.turn is not None:
            self._committer.end(sequence)
        sequence.epoch += 1

    # --- checks -----------------------------------------------------------------------------------------

    def _idle(self, seq: int, length: int | None = None) -> Sequence:
        """The sequence, which has no turn, and ``length`` tokens if one is given."""
        sequence = self._queues[seq]
        if sequence.turn is not None:
            raise SequenceBusy(f"sequence {seq} is generating")
        if length is not None and length != sequence.total:
            raise EpochStale(f"sequence {seq} has {sequence.total} tokens, not {length}")
        return sequence

    def _check_opening(self, seq: int, opening: Opening) -> int:
        """Tokens that the sequence would begin with."""
        at = 0
        if opening.parent is not None:
            at = opening.at
            self._check_length(self._queues[opening.parent], at)
        self._check_new([seq])
        return at

    def _check_new(self, seqs: list[int]) -> None:
        if len(set(seqs)) < len(seqs):
            raise SequenceExists("one number for two sequences")
        for seq in seqs:
            if seq in self._queues.sequences:
                raise SequenceExists(f"sequence {seq} is open already")
        if len(self._queues.sequences) + len(seqs) > self._settings.max_open:
            raise EngineOverloaded(f"{len(self._queues.sequences)} sequences are open")

    def _check_context(self, length: int) -> None:
        if length > self._settings.max_context:
            raise ContextExceeded(f"{length} tokens; the context holds {self._settings.max_context}")

    def _check_length(self, sequence: Sequence, length: int) -> None:
        if not 0 <= length <= len(sequence.tokens):
            raise LengthInvalid(f"length {length}; sequence {sequence.id} has {len(sequence.tokens)} tokens")

    def _checked_turn(self, verb: Generate, prompt: int) -> Turn:
        if not prompt:
            raise LengthInvalid(f"sequence {verb.seq} has no tokens to go on from")
        check_sampling(verb.sampling, verb.limits, self._settings.vocab_size)
        if verb.sampling.grammar is not None:
            self._grammar_queue.check(verb.sampling.grammar)
        left = verb.limits.max_tokens - verb.generated_from
        if verb.generated_from < 0 or left < 1:
            raise SamplingInvalid(f"{verb.generated_from} of {verb.limits.max_tokens} tokens are generated")
        room = self._settings.max_context - prompt
        if room < 1:
            raise ContextExceeded(f"sequence {verb.seq} fills the context of {self._settings.max_context}")
        return Turn(
            verb.sampling,
            verb.limits,
            prompt=prompt,
            allowed=min(left, room),
            exhausted=Finish.LENGTH if left <= room else Finish.CONTEXT,
            generated_from=verb.generated_from,
        )
