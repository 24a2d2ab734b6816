"""The scheduler: verbs in, plans out, outcomes back in. Pure: no tensors, no clock, no I/O.

::

    verbs ──▶ Scheduler ──▶ Queues ──▶ Planner ──▶ plan ──▶ (runner) ──▶ Committer ──▶ rows
                              ▲         │    ▲                              │
                              │         ▼    └───── BlockManager ◀──────────┤
                              │     Preemption                              │
                              └─────────────────────────────────────────────┘

At depth 2 a plan is made while the step before it is in flight. Its input may include tokens that the step in
flight has still to sample. Plans are committed or revoked in the order in which they were made. A verb takes
effect between a commit and the next plan. It is checked first, so that a refused verb changes nothing. If a
step in flight has a row for the sequence, that row is discarded when the step is done. ``now``: seconds of one
clock, chosen by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from ...kvstore.block_table import BlockTable
from ...kvstore.groups import Windows
from ...kvstore.keys import BlockHasher
from ...kvstore.pool import BlockPool
from ...kvstore.quotas import tenant_of
from ...kvstore.tiers import Tiers
from ..adapters import AdapterTable
from ..errors import (
    ContextExceeded,
    EngineOverloaded,
    EpochStale,
    GrammarFault,
    LengthInvalid,
    SamplingInvalid,
    SequenceBusy,
    SequenceExists,
    SettingsInvalid,
)
from ..grammar.llguidance import Compiler, Matchers
from ..grammar.queue import GrammarQueue
from ..kv_placement.block_manager import BlockManager
from ..kv_placement.costs import CostBook
from ..kv_placement.leases import Leases
from ..kv_placement.placement import POLL_SECONDS, KVPlacement
from ..kv_placement.transfers import Transfers
from ..order.policy import policy_named
from ..order.queues import Queues
from ..plan import Outcomes, Plan, RowFault
from ..sequence import Sequence, Status, Turn
from ..settings import SchedulerSettings
from ..stats import Counters
from ..tokens import TokenList, checked_tokens
from ..verbs import (
    Close,
    Decoded,
    Extend,
    Finish,
    Fork,
    Generate,
    Lease,
    Locate,
    Open,
    Opening,
    Row,
    SequenceState,
    SequenceVerb,
    Settle,
    Stage,
    Stop,
    Truncate,
    VerbReply,
)
from .commit import Committer
from .idle_prefill import IdlePrefill
from .pending_moves import PendingMoves
from .planner import Drafter, Planner
from .preemption import Preemption
from .sampling_limits import check_sampling
from .slots import Slots


class Scheduler:
    """Applies the link's verbs to sequences, plans steps and commits what they computed.

    Args:
        settings: the numbers it works within.
        pool: ``settings.blocks`` blocks that nothing else uses.
        hasher: names blocks of ``settings.block_tokens`` tokens.
        namespace: the digest of all that decides what a block's bytes mean.
        tiers: keep blocks below the device, under the same names; None: there are none.
        costs: measured costs of restoring and computing; None: what a tier holds is always restored.
        compiler: compiles grammars; None: a turn with a grammar is refused.
        matchers: the matchers of running turns, shared with the runner.
        drafter: guesses tokens, which steps check; None: each step gives a turn one token.
        adapters: those that are loaded, and their slots; None: there is no room for any.

    Raises:
        SettingsInvalid: pool or hasher are made for other numbers, or there is no such policy.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        hasher: BlockHasher,
        namespace: bytes = b"",
        tiers: Tiers | None = None,
        costs: CostBook | None = None,
        compiler: Compiler | None = None,
        matchers: Matchers | None = None,
        drafter: Drafter | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        if pool.blocks != settings.blocks or hasher.block_tokens != settings.block_tokens:
            raise SettingsInvalid("the pool or the hasher is made for another number of blocks or block size")
        self.settings = settings
        self.pool = pool
        self.tiers = Tiers() if tiers is None else tiers
        self.counters = Counters()
        policy = policy_named(settings.policy, settings.patience)
        self._queues = queues = Queues(policy, self.counters)
        self._matchers = Matchers() if matchers is None else matchers
        beside = costs is not None and costs.beside
        self._transfers = Transfers(self.tiers, pool.index.here.get, settings.block_tokens, beside)
        windows = Windows(settings.windows, settings.block_tokens)
        self._block_manager = blocks = BlockManager(
            pool, hasher, namespace, self._transfers, self.counters, windows
        )
        preemption = Preemption(settings, policy, queues, blocks, self.counters)
        self._idle_prefill = budget = IdlePrefill(settings.idle_stretch)
        self._slots = slots = Slots(settings.depth * settings.max_sequences)
        self.adapters = AdapterTable() if adapters is None else adapters
        self._planner = Planner(
            settings, queues, blocks, policy, preemption, budget, self.counters, slots, self.adapters, drafter
        )
        self.placement = KVPlacement(queues, blocks, preemption.relieve, costs or CostBook(None))
        self._leases = Leases(settings, queues, blocks, self.placement)
        self._pending_moves = PendingMoves(queues, blocks, self.placement)
        self._committer = Committer(policy, queues, blocks, self._matchers, self.counters, self._slots)
        self._grammar_queue = GrammarQueue(compiler, queues)
        self._rows: list[Row] = []  # of turns that got tokens or ended without a step

    # --- verbs ------------------------------------------------------------------------------------------

    def apply(self, verb: SequenceVerb, now: float) -> VerbReply | None:
        """Apply a verb and return its reply. None: the verb waits for KV to move; `planned` returns the reply
        when that is done.

        Raises `VerbRefused`; then nothing has changed.
        """
        match verb:
            case Open():
                return VerbReply(verb.request, self._open(verb, now))
            case Extend():
                return VerbReply(verb.request, self._extend(verb, now))
            case Truncate():
                return VerbReply(verb.request, self._truncate(verb, now))
            case Generate():
                return VerbReply(verb.request, self._generate(verb, now))
            case Stop():
                return VerbReply(verb.request, self._stop(verb, now))
            case Fork():
                return VerbReply(verb.request, self._fork(verb, now))
            case Close():
                return self._close(verb, now)
            case Lease():
                return self._lease(verb, now)
            case Locate():
                return self._locate(verb)
            case Stage():
                self._stage(verb, now)
                return None
            case Settle():
                self._settle(verb, now)
                return None

    def _open(self, verb: Open, now: float) -> SequenceState:
        """Begin a sequence. Tokens with KV in the prefix cache count as computed from the beginning."""
        self._check_new([verb.seq])
        tokens = checked_tokens(verb.tokens, self.settings.vocab_size)
        self._check_context(len(tokens))
        opening = Opening(verb.salt, verb.isolated, adapter=verb.adapter)
        sequence = self._made(verb.seq, opening, TokenList(tokens))
        self._block_manager.adopt(sequence)
        self._queues.touch(sequence, now)
        self.placement.stage(sequence, now)
        return sequence.state

    def _extend(self, verb: Extend, now: float) -> SequenceState:
        """Append tokens to an idle sequence. All but the last are computed before a turn, if there is room."""
        sequence = self._idle(verb.seq, verb.expect_length)
        tokens = checked_tokens(verb.tokens, self.settings.vocab_size)
        self._check_context(sequence.total + len(tokens))
        sequence.extend(tokens, turn_expected=verb.turn_expected)
        self._queues.touch(sequence, now)
        self.placement.stage(sequence, now)
        return sequence.state

    def _truncate(self, verb: Truncate, now: float) -> SequenceState:
        """Keep the first ``length`` tokens. A running turn ends, as by a stop."""
        sequence = self._queues[verb.seq]
        if verb.expect_epoch != sequence.epoch:
            raise EpochStale(f"sequence {verb.seq} is at epoch {sequence.epoch}, not {verb.expect_epoch}")
        self._check_length(sequence, verb.length)
        self._shorten(sequence, verb.length, now)
        return sequence.state

    def _generate(self, verb: Generate, now: float) -> SequenceState:
        """Append the verb's tokens and begin a turn. With an ``opening`` the sequence begins here, too.
        Returns its state.

        Tokens that the grammar forces at the beginning are not in the returned state; they come in a row.
        """
        opening = verb.opening
        if opening is None:
            sequence = self._idle(verb.seq, verb.expect_length)
            self._check_adapter(sequence)
            length = sequence.total
        else:
            length = self._check_opening(verb.seq, opening)
        tokens = checked_tokens(verb.tokens, self.settings.vocab_size)
        turn = self._checked_turn(verb, length + len(tokens))
        sequence = self._queues[verb.seq] if opening is None else self._begin(verb.seq, opening, now)
        if len(tokens):
            sequence.extend(tokens)
        if opening is not None and opening.parent is None and not turn.to_score:
            self._block_manager.adopt(sequence)
            self.placement.stage(sequence, now)
        if sequence.planned == sequence.total:  # after a truncation: the last token's logits are needed again
            self._block_manager.cut(sequence, sequence.total - 1)
        sequence.begin(turn)
        state = sequence.state
        if verb.sampling.grammar is None:
            self.placement.line_up(sequence, now)
        else:
            self._grammar_queue.begin(sequence, verb.sampling.grammar, now)
            self._take_matchers(now)
        return state

    def _stop(self, verb: Stop, now: float) -> SequenceState:
        """End the turn, if there is one. Committed tokens stay, but at most ``keep`` of them; tokens that steps
        in flight sample are discarded.
        """
        sequence = self._queues[verb.seq]
        if verb.keep is None or verb.keep >= len(sequence.tokens):
            self._halt(sequence, now)
        else:
            self._check_length(sequence, verb.keep)
            self._shorten(sequence, verb.keep, now)
        return sequence.state

    def _fork(self, verb: Fork, now: float) -> SequenceState:
        """Make child sequences of the committed tokens. They share the parent's blocks; a partial last block is
        copied before it is written."""
        parent = self._queues[verb.seq]
        length = len(parent.tokens) if verb.at is None else verb.at
        self._check_length(parent, length)
        self._check_new(verb.children)
        self._children(parent, verb.children, length, now)
        return parent.state

    def _close(self, verb: Close, now: float) -> VerbReply:
        """Close a sequence. If a turn runs, it ends without a row. The blocks are released; with ``keep_kv``
        their KV stays cached, and is sent to disk if there is room."""
        sequence = self._queues[verb.seq]
        self._leases.end(sequence)
        self._block_manager.surrender(sequence, keep=verb.keep_kv)
        if verb.keep_kv:
            self.placement.retire(sequence)
        if sequence.turn is not None:
            self._matchers.drop(sequence.turn.grammar)
        self._queues.close(sequence, now)
        self._slots.release(sequence)
        return VerbReply(verb.request)

    def _lease(self, verb: Lease, now: float) -> VerbReply:
        """Grant as much of the lease as the budget allows. Its priority counts for turns that begin later."""
        sequence = self._queues[verb.seq]
        receipt = self._leases.grant(sequence, verb, now)
        return VerbReply(verb.request, sequence.state, receipt=receipt)

    def _stage(self, verb: Stage, now: float) -> None:
        """Begin to restore what lower tiers hold of an idle sequence's KV, and to compute the rest. The verb
        waits until the KV is on the device."""
        sequence = self._idle(verb.seq)
        self._pending_moves.stage(verb.request, sequence, now)  # before a part is restored at once
        sequence.look_up()
        self._queues.touch(sequence, now)
        self.placement.stage(sequence, now)

    def _settle(self, verb: Settle, now: float) -> None:
        """Give up an idle sequence's blocks, and begin to offload its KV to the host tier or, as far as
        possible, to disk (``verb.disk``). The verb waits until the KV is there."""
        sequence = self._idle(verb.seq)
        self._block_manager.rest(sequence)
        if not verb.disk:
            self._block_manager.lower(sequence)
        self._block_manager.surrender(sequence)
        self._queues.lost(sequence)
        if verb.disk:
            self.placement.leave(sequence)
        self._pending_moves.settle(verb.request, sequence, now, disk=verb.disk)

    def _locate(self, verb: Locate) -> VerbReply:
        """The reply that says which tier each block of a sequence, or of the verb's tokens, lies in. Changes
        nothing."""
        if verb.seq is not None:
            sequence = self._queues[verb.seq]
        else:
            tokens = checked_tokens(verb.tokens, self.settings.vocab_size)
            self._check_context(len(tokens))
            sequence = self._made(0, Opening(verb.salt, adapter=verb.adapter), TokenList(tokens))
        return VerbReply(verb.request, blocks=self._block_manager.residency.map(sequence))

    # --- steps ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due between two steps: end leases, take in what the tiers have told, restore KV of
        sequences that are expected back, send records down, and queue turns with a grammar that is compiled
        now."""
        self._leases.tick(now)
        self.placement.tick(now)
        self._take_matchers(now)

    def unloaded(self) -> list[int]:
        """The numbers of adapters that were unloaded and that no turn uses any more; they are forgotten now."""
        turns = (one for one in self._queues.sequences.values() if one.turn is not None)
        return self.adapters.sweep(one.adapter for one in turns)

    def plan(self, now: float) -> Plan | None:
        """Plan the next step, which counts as launched. None: nothing to do before a commit or a verb."""
        return self._planner.plan(now)

    def plan_alone(self, seq: int, now: float) -> Plan | None:
        """Plan a step for this sequence alone, to find out whether it makes steps fail. None: nothing to do."""
        self._slots.forget()
        self.adapters.forget()
        return self._planner.plan_alone(self._queues[seq], now)

    def planned(self, now: float, *, idle: bool) -> tuple[list[Row], list[VerbReply]]:
        """The rows for the gateway of turns that got tokens or ended without a step; and the replies to stage
        and settle verbs that are done. Call it once nothing more can be planned now. ``idle``: no step is in
        flight.
        """
        rows, self._rows = self._rows, []
        return rows, self._pending_moves.tick(now, idle=idle)

    def took(self, plan: Plan, seconds: float) -> None:
        """Record that the step of ``plan`` took ``seconds`` of device time; later steps are sized by it."""
        self._idle_prefill.took(plan, seconds)

    def commit(
        self, plan: Plan, outcomes: Outcomes, now: float, *, moved: bool = True
    ) -> tuple[list[Row], Decoded | None]:
        """Take over what ``plan`` computed; ``outcomes``: of its rows.

        ``moved``: False if the step failed as a whole, so that its moves of blocks may not have been made, nor
        its copies of adapters.
        Returns rows for the gateway, for each turn that has tokens to send or has ended: those that merely
        decode together.
        """
        if not moved:
            self.adapters.forget()
        told = self._committer.commit(plan, outcomes, now, moved=moved)
        self._rest(now)
        return told

    def moved(self, plan: Plan, now: float, *, made: bool = True) -> None:
        """Note that the saves and loads of ``plan`` are over. Plans with any come in their order, each before
        or after its commit. ``made``: False if they may not have been made."""
        if made:
            self._transfers.finish(plan, made=True)
        else:
            self._committer.distrust(plan, now)

    def revoke(self, plans: Iterable[Plan], now: float) -> list[int]:
        """Undo ``plans``, which are all plans in flight; their steps failed as a whole, and none of their
        saves and loads runs any more. Returns the ids of the sequences that they had rows for."""
        self.counters.isolations += 1
        self._slots.forget()
        self.adapters.forget()
        return list(dict.fromkeys(s.id for plan in plans for s in self._committer.revoke(plan, now)))

    def evict(self, seq: int) -> None:
        """Take a sequence's KV away, as preemption would."""
        sequence = self._queues[seq]
        self._block_manager.surrender(sequence)
        if sequence.turn is None:
            self._queues.lost(sequence)

    def prepare(self) -> bool:
        """In an idle moment, do a part of the work that a later step would wait for. Returns False if there
        is none to do."""
        return self.tiers.host.prepare()

    def due(self, now: float) -> float | None:
        """Seconds until `tick` has something to do if neither a verb nor a commit comes before; None: never."""
        pending_moves = POLL_SECONDS if self._pending_moves.busy else None
        grammars = self._grammar_queue.due() if not self._rows else 0.0
        dues = (self.placement.due(now), self._leases.due(now), pending_moves, grammars)
        return min((due for due in dues if due is not None), default=None)

    # --- what is here -----------------------------------------------------------------------------------

    def state(self, seq: int) -> SequenceState:
        """The state of a sequence. Raises `SequenceUnknown`."""
        return self._queues[seq].state

    def statistics(self) -> dict[str, float]:
        """Lengths of all queues, the pool's figures, and counts since the start."""
        queues = self._queues
        return {
            "sequences": len(queues.sequences),
            "running": len(queues.running),
            "waiting": len(queues.waiting),
            "running_blocks": self._block_manager.count_held(queues.running.values()),
            "idle_holding": len(queues.idle),
            "idle_expected": queues.idle.expected,
            "idle_prefill": len(queues.prefill),
            **{f"pool_{name}": value for name, value in self.pool.statistics().items()},
            **self._transfers.statistics(),
            **self.placement.statistics(),
            **self._leases.statistics(),
            **self._grammar_queue.statistics(),
            **self.adapters.statistics(),
            **asdict(self.counters),
        }

    def audit_in_slices(self) -> Iterator[None]:
        """Check the pool's references against the open sequences, block by block, and the host tier's tables,
        a slice of bounded size at a time: yields between two slices. Drop it if a verb was applied or
        `BlockPool.version` is another one by then. Raises `LeakFound`: they do not agree."""
        tables = (sequence.table.held for sequence in self._queues.sequences.values())
        yield from self.pool.audit_in_slices(tables)
        yield from self.tiers.host.audit_in_slices()

    # --- parts of verbs ---------------------------------------------------------------------------------

    def _begin(self, seq: int, opening: Opening, now: float) -> Sequence:
        """Make the sequence ``seq`` as ``opening`` says, empty or as a fork of its parent, put it among the
        idle ones, and return it. The caller appends the tokens."""
        if opening.parent is not None:
            (child,) = self._children(self._queues[opening.parent], [seq], opening.at, now)
            return child
        sequence = self._made(seq, opening, TokenList())
        self._queues.touch(sequence, now)
        return sequence

    def _made(self, seq: int, how: Opening, tokens: TokenList) -> Sequence:
        """A sequence with these ``tokens`` that is no fork. Raises `AdapterUnknown`."""
        residency, adapter = self._block_manager.residency, self.adapters.find(how.adapter)
        root, tenant = residency.root(how.salt, adapter), tenant_of(residency.root(how.salt))
        table = BlockTable(groups=self._block_manager.groups)
        return Sequence(seq, root, tokens, table=table, isolated=how.isolated, adapter=adapter, tenant=tenant)

    def _children(self, parent: Sequence, seqs: list[int], length: int, now: float) -> list[Sequence]:
        """Make a sequence for each id in ``seqs``, with the parent's first ``length`` tokens and, as far as
        there is any, their KV, in shared blocks. They become idle sequences."""
        root, adapter, tenant = parent.root, parent.adapter, parent.tenant
        children = [
            Sequence(seq, root, parent.tokens.copy(length), adapter=adapter, tenant=tenant) for seq in seqs
        ]
        self._block_manager.fork(parent, children)
        for child in children:
            self._queues.touch(child, now)
            self._queues.defer(child)  # the parent already computes these tokens
        return children

    def _shorten(self, sequence: Sequence, length: int, now: float) -> None:
        self._halt(sequence, now, length)
        if sequence.tail is not None:
            self._block_manager.save_tail(sequence)
        self._queues.touch(sequence, now)

    def _halt(self, sequence: Sequence, now: float, length: int | None = None) -> None:
        """End the sequence's turn, if there is one, and keep the first ``length`` tokens; None: all."""
        waited = sequence.status is Status.RESTORING
        if sequence.turn is not None:
            self._committer.end(sequence, now)
        if length is not None:
            self._block_manager.forget(sequence, length)
        self._rest(now)  # with all of the turn's blocks still there
        if waited:  # else what it waited for would be computed
            self.placement.stage(sequence, now)
        sequence.halt()

    def _rest(self, now: float) -> None:
        """For each turn that has ended: give back what lies behind windows, extend its lease to the new tokens,
        and schedule its KV for disk."""
        for sequence in self._committer.ended():
            self._block_manager.rest(sequence)
            self._leases.cover(sequence)
            self.placement.rest(sequence, now)

    def _take_matchers(self, now: float) -> None:
        """Queue the turns with a grammar that is now compiled, after appending the tokens that it forces at the
        beginning. End the turns with a grammar that could not be compiled."""
        for sequence, matcher in self._grammar_queue.tick(now):
            if isinstance(matcher, GrammarFault):
                fault = RowFault(f"grammar: {matcher.message}", matcher.code)
                row = self._committer.fail(sequence, fault, now)
            else:
                row = self._committer.follow(sequence, matcher, now)
            if row is not None:
                self._rows.append(row)
            if sequence.turn is not None:
                self.placement.line_up(sequence, now)
        self._rest(now)

    # --- checks -----------------------------------------------------------------------------------------

    def _idle(self, seq: int, length: int | None = None) -> Sequence:
        """The sequence ``seq``. Raises `VerbRefused` if it has a turn, or not ``length`` tokens (None: any)."""
        sequence = self._queues[seq]
        if sequence.turn is not None:
            raise SequenceBusy(f"sequence {seq} is generating")
        if length is not None and length != sequence.total:
            raise EpochStale(f"sequence {seq} has {sequence.total} tokens, not {length}")
        return sequence

    def _check_opening(self, seq: int, opening: Opening) -> int:
        """Check that the sequence ``seq`` may be opened as ``opening`` says. Returns the number of tokens
        that it would begin with. Raises `VerbRefused`."""
        at = 0
        if opening.parent is not None:
            at, parent = opening.at, self._queues[opening.parent]
            self._check_length(parent, at)
            self._check_adapter(parent)
        self.adapters.find(opening.adapter)
        self._check_new([seq])
        return at

    def _check_adapter(self, sequence: Sequence) -> None:
        """Raise ``AdapterUnknown`` if the sequence's adapter was unloaded. If it is loaded again, the sequence
        has it again: with the same weights its KV is the same."""
        if sequence.adapter is not None and not sequence.adapter.names:
            sequence.adapter = self.adapters.find(sequence.adapter.digest)

    def _check_new(self, seqs: list[int]) -> None:
        if len(set(seqs)) < len(seqs):
            raise SequenceExists("one number for two sequences")
        for seq in seqs:
            if seq in self._queues.sequences:
                raise SequenceExists(f"sequence {seq} is open already")
        if len(self._queues.sequences) + len(seqs) > self.settings.max_open:
            raise EngineOverloaded(f"{len(self._queues.sequences)} sequences are open")

    def _check_context(self, length: int) -> None:
        if length > self.settings.max_context:
            raise ContextExceeded(f"{length} tokens; the context holds {self.settings.max_context}")

    def _check_length(self, sequence: Sequence, length: int) -> None:
        if not 0 <= length <= len(sequence.tokens):
            raise LengthInvalid(f"length {length}; sequence {sequence.id} has {len(sequence.tokens)} tokens")

    def _checked_turn(self, verb: Generate, prompt: int) -> Turn:
        if not prompt:
            raise LengthInvalid(f"sequence {verb.seq} has no tokens to go on from")
        check_sampling(verb.sampling, verb.limits, self.settings.vocab_size)
        if verb.sampling.grammar is not None:
            self._grammar_queue.check()
        opens = verb.opening is not None and verb.opening.parent is None
        if verb.sampling.prompt_logprobs is not None and not opens:
            raise SamplingInvalid("prompt_logprobs: the sequence must begin with the generation")
        left = verb.limits.max_tokens - verb.generated_from
        if verb.generated_from < 0 or left < 1:
            raise SamplingInvalid(f"{verb.generated_from} of {verb.limits.max_tokens} tokens are generated")
        room = self.settings.max_context - prompt
        if room < 1:
            raise ContextExceeded(f"sequence {verb.seq} fills the context of {self.settings.max_context}")
        return Turn(
            verb.sampling,
            verb.limits,
            prompt=prompt,
            allowed=min(left, room),
            exhausted=Finish.LENGTH if left <= room else Finish.CONTEXT,
            generated_from=verb.generated_from,
        )
