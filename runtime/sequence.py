"""A sequence: token ids, the blocks that hold their KV, and three scalars that express everything.

::

    [0, sealed blocks)   full, named by `keys`, shared, read-only
    [.., computed)       KV committed
    [computed, planned)  KV being written by steps in flight
    [planned, total)     to do; the last `pending_samples` of these are being sampled, their ids not yet known

Prefill, decode and chunking raise `planned`, then `computed`; a prefix hit raises both; preemption and
truncation lower them; streamed input raises `total`. Knows no pool, no queue and no device.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kvstore.block_table import BlockTable
from ..kvstore.keys import KeyChain
from .adapters import Adapter
from .columns import Columns
from .tokens import TokenList
from .verbs import Finish, Sampling, SequenceState, TokenLimits, TokenLogprob, Work


@dataclass(slots=True)
class Turn:
    """One generation. ``prompt``: the sequence's length when it began.

    ``allowed``: the most tokens that it may sample; ``exhausted``: the reason that is given when it has
    sampled so many. ``resident``: tokens with KV that its first admission found. ``generated_from``: how many
    tokens at the prompt's end this generation had sampled before it was interrupted and begun again.
    ``grammar``: the number of its matcher, once the grammar is compiled. ``scores``: log probabilities of
    tokens that were not sent to the gateway yet, as ``TokenLimits.gather`` joins several. ``scored``: how
    many tokens of the prompt have their log probabilities, where ``sampling.prompt_logprobs`` asks for them;
    ``prompt_scores``: those that were not sent yet.
    """

    sampling: Sampling
    limits: TokenLimits
    prompt: int
    allowed: int
    exhausted: Finish
    resident: int | None = None
    generated_from: int = 0
    grammar: int | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    scored: int = 0
    prompt_scores: list[TokenLogprob] = field(default_factory=list)

    @property
    def to_score(self) -> int:
        """How many tokens of the prompt are still without a log probability that is wanted. The first one has
        none."""
        return 0 if self.sampling.prompt_logprobs is None else max(0, self.output_from - 1 - self.scored)

    @property
    def output_from(self) -> int:
        """Position in the sequence of the generation's first token, also of those sampled before an
        interruption."""
        return max(0, self.prompt - self.generated_from)

    @property
    def goes_on(self) -> bool:
        """Whether tokens that the grammar forces are appended without a step. Not with log probabilities,
        which only a step gives, nor with bad words, which only a step checks."""
        return self.grammar is not None and self.sampling.logprobs is None and not self.sampling.bad_words

    def forbidden(self, position: int) -> tuple[int, ...]:
        """Ids that may not be sampled at this position of the sequence: the stop ids, while there are fewer
        than ``min_tokens`` tokens."""
        early = self.generated_from + position - self.prompt < self.limits.min_tokens
        return self.limits.stop_ids if early else ()


class TurnAge(NamedTuple):
    """A turn's age, a sort key: the smallest is the oldest. ``rank``: ``number`` less 32 for each
    point of its lease's priority. ``number``: counts the turns in the order in which they were queued.
    ``step``: how many steps had been planned when it was queued."""

    rank: int = 0
    number: int = 0
    step: int = 0


class Status(Enum):
    """What a sequence does now. `Queues` alone changes it, and knows which moves there are."""

    NEW = "new"
    """It is not open yet."""
    IDLE = "idle"
    """It is open, without a turn."""
    STAGED = "staged"
    """It is idle, and its KV comes up from disk."""
    COMPILING = "compiling"
    """Its turn waits for its grammar to be compiled. It keeps its blocks unless other turns need them."""
    RESTORING = "restoring"
    """Its turn waits for KV from disk."""
    WAITING = "waiting"
    """Its turn waits to be admitted."""
    RUNNING = "running"
    """Its turn runs: it gets rows of steps."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A sequence's lease. It covers the first ``blocks`` blocks on the device, and the first ``records``
    records in the host tier. ``priority``: of the sequence's turns. ``returns``: when the sequence is expected
    back, in seconds by the engine's clock."""

    priority: int
    returns: float
    blocks: int
    records: int


@dataclass(slots=True)
class ComputedTokens:
    """Tokens computed for a sequence since its last turn ended: ``prefilled`` for the first time,
    ``recomputed`` again. ``retracted``: those prefilled that were removed since."""

    prefilled: int = 0
    recomputed: int = 0
    retracted: int = 0

    @property
    def total(self) -> int:
        """Tokens prefilled and recomputed together."""
        return self.prefilled + self.recomputed


@dataclass(slots=True)
class FromTiers:
    """KV of a sequence that came up from lower tiers since its last turn ended, and what still comes.

    ``host``: tokens that came by way of the host tier, or directly from disk; ``disk``: those of them that
    came from disk; ``from_disk``: the keys of their records. ``seconds``: how long the turn waited for them.
    ``chosen``: tokens that the turn computes although a lower tier holds them, because that is cheaper.
    ``compute_until``: a position behind which KV is on its way, so that nothing is computed there; None:
    none. The block manager counts ``host`` and ``disk``, restore writes the others.
    """

    host: int = 0
    disk: int = 0
    from_disk: set[bytes] = field(default_factory=set)
    seconds: float = 0.0
    chosen: int = 0
    compute_until: int | None = None


class InColumn:
    """A number of a sequence that stands in the column of the same name while the sequence has a slot, else
    in an attribute with an underscore before it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._own = name, f"_{name}"

    def __get__(self, sequence: Sequence, owner: type) -> int:
        if sequence.columns is None:
            return int(getattr(sequence, self._own))
        return int(getattr(sequence.columns, self._name)[sequence.slot])

    def __set__(self, sequence: Sequence, value: int) -> None:
        if sequence.columns is None:
            setattr(sequence, self._own, value)
        else:
            getattr(sequence.columns, self._name)[sequence.slot] = value
            sequence.touched()


@dataclass(slots=True, eq=False)
class Sequence:
    """Everything the engine knows of one sequence. Three scalars say how far it is: ``computed``, ``planned``
    and ``total``.

    Each of its fields, and of those of its records, is written by one module: most by this one, ``table`` and
    ``tail`` by the block manager, ``lease`` by the leases, ``status``, ``age`` and ``used`` by the queues,
    ``adapter`` by the scheduler.

    ``root``: the block key before the first; ``adapter``: the one that computes it; None: none.
    ``tenant``: the number of the tenant that it belongs to (`tenant_of` what ``root`` would be without an
    adapter). ``keys``: of the leading full blocks, at least the sealed ones.
    ``shared_tail``: the partial last block belongs to others too, and is copied before it is written. ``tail``:
    key and end of the partial last block that was saved last. ``marks``: positions from which others may go on,
    where KV groups have windows; they rise. ``needs_lookup``: tokens came or KV went since
    the prefix cache was asked. ``in_flight``: steps in flight have rows for it. ``mark``: counts how often what
    is planned was taken back: a row that was planned at another mark is discarded. ``drafts``: how many tokens
    of its row in flight are guessed. ``last_step``: the last step with a row for it that is no plain decode.
    ``told``: how many tokens the gateway was told of, in a turn. ``slot``: its slot in the runner's batch;
    while it has one, what changes in each step stands in ``columns``. ``isolated``: suspected of having killed
    an engine; shares no step until it has sampled a token. ``turn_expected``: a turn is about to begin.
    ``age``: the turn's. ``lease``: its lease, if it has one. ``used``: when it was used last;
    ``returns``: when it is expected back, in seconds of the engine's clock; None: that is not known, or it is
    back.
    """

    id: int
    root: bytes
    _tokens: TokenList
    status: Status = Status.NEW
    epoch: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    keys: KeyChain = field(default_factory=KeyChain)
    sealed: int = 0
    shared_tail: bool = False
    tail: tuple[bytes, int] | None = None
    marks: list[int] = field(default_factory=list)
    needs_lookup: bool = True
    turn: Turn | None = None
    last_step: int = 0
    drafts: int = 0
    slot: int | None = None
    columns: Columns | None = None
    isolated: bool = False
    turn_expected: bool = False
    age: TurnAge = TurnAge()
    lease: GrantedLease | None = None
    used: float = 0.0
    returns: float | None = None
    work: ComputedTokens = field(default_factory=ComputedTokens)
    from_tiers: FromTiers = field(default_factory=FromTiers)
    adapter: Adapter | None = None
    tenant: int = 0
    _computed: int = 0
    _planned: int = 0
    _pending_samples: int = 0
    _told: int = 0
    _high_water: int = 0

    computed = InColumn()
    planned = InColumn()
    pending_samples = InColumn()
    told = InColumn()

    @property
    def tokens(self) -> TokenList:
        """The token ids."""
        if self.columns is not None and self.slot is not None:
            fresh = self.columns.take_fresh(self.slot)
            if len(fresh):
                self._tokens.extend(fresh)
        return self._tokens

    @property
    def length(self) -> int:
        """The number of tokens, without those that steps in flight are sampling."""
        if self.columns is None or self.slot is None:
            return len(self._tokens)
        return len(self._tokens) + int(self.columns.fresh_count[self.slot])

    @property
    def total(self) -> int:
        """The number of tokens, with those that steps in flight are sampling."""
        return self.length + self.pending_samples

    @property
    def sampled(self) -> int:
        """How many tokens the turn has committed so far, with those that its grammar forced; 0 without one."""
        return 0 if self.turn is None else self.length - self.turn.prompt

    @property
    def in_flight(self) -> bool:
        """Whether steps in flight have rows for the sequence."""
        return self.planned > self.computed

    @property
    def high_water(self) -> int:
        """How many tokens have had KV at some time; computing below it is work done again."""
        return max(self._high_water, self.computed)

    @property
    def state(self) -> SequenceState:
        """What the gateway is told of the sequence. Tokens that are being sampled do not count: they can
        still be taken back."""
        return SequenceState(self.id, self.length, self.computed, self.epoch)

    @property
    def target(self) -> int:
        """Position up to which KV is wanted now.

        With a turn that is all tokens, as the last token's logits are wanted, or those before KV that is
        being restored. Without a turn the last token stays pending, so that a turn has something to compute.
        When every allowed token is being sampled there is nothing left to ask for. With tokens that are
        guessed, one draw in flight is enough: what follows it is not known before.
        """
        turn = self.turn
        if turn is None:
            return max(self.total - 1, self.planned)
        if self.total - turn.prompt >= turn.allowed:
            return self.planned
        if self.pending_samples and self.drafts:
            return self.planned
        until = self.from_tiers.compute_until
        return self.total if until is None else max(self.planned, min(self.total, until))

    @property
    def to_do(self) -> int:
        """How many tokens behind the planned ones can be computed in the next steps: up to `target`."""
        return self.target - self.planned

    @property
    def remaining(self) -> int:
        """The most tokens that are left to do: those without KV, of the prompt or sampled, and those that the
        turn may still sample, if there is a turn."""
        left = 0 if self.turn is None else self.turn.allowed - self.sampled
        return self.length - self.computed + left

    @property
    def priority(self) -> int:
        """The priority of the sequence's turns, from its lease; 0 without one."""
        return 0 if self.lease is None else self.lease.priority

    # --- tokens and blocks ------------------------------------------------------------------------------

    def extend(self, tokens: NDArray[np.int32], *, turn_expected: bool = False) -> None:
        """Append tokens with known ids. The prefix cache is to be asked again before the next step, and a
        time when the sequence was expected back is forgotten. ``turn_expected``: a turn on them will begin
        soon."""
        assert not self.pending_samples, "tokens behind ones that are not known yet"
        self.tokens.extend(tokens)
        self.turn_expected = turn_expected
        self.needs_lookup, self.returns = True, None

    def forget(self, length: int, blocks: int) -> None:
        """Drop the tokens from position ``length`` on, and the keys from block ``blocks`` on."""
        self.tokens.truncate(length)
        self.keys.truncate(blocks)
        self.marks = [mark for mark in self.marks if mark <= length]
        self.work.retracted = min(self.work.prefilled, self.work.retracted + max(0, self.high_water - length))
        self._high_water = min(self.high_water, length)

    def name(self, keys: list[bytes]) -> None:
        """Append the keys of the next full blocks to the sequence's list of keys."""
        self.keys.extend(keys)

    def found(self, end: int, sealed: int) -> None:
        """Note that the KV up to position ``end`` is there: it was found in the prefix cache or restored.
        ``sealed``: how many of the table's first blocks are full."""
        self._high_water = max(self.high_water, end)
        self.computed = self.planned = end
        self.sealed, self.shared_tail = sealed, False

    def mark(self, position: int) -> None:
        """Note that others may go on from ``position``: a turn ends there, or a prefix that others have."""
        at = bisect_left(self.marks, position)
        if position and self.marks[at : at + 1] != [position]:
            self.marks.insert(at, position)

    def fall_back(self, length: int) -> None:
        """Note that the KV of the first ``length`` tokens alone counts from now on; the other tokens are
        computed again."""
        self._high_water = self.high_water
        self.computed = self.planned = length

    def surrendered(self) -> None:
        """Note that the sequence holds no block any more: no token counts as computed, and the prefix cache
        is asked again."""
        self._high_water = self.high_water
        self.computed = self.planned = self.sealed = 0
        self.shared_tail = False
        self.look_up()

    def inherit(self, parent: Sequence, computed: int, block_tokens: int) -> None:
        """Begin a fork with the parent's KV of the first ``computed`` tokens. The block manager adds the
        table."""
        length = len(self.tokens)
        self.computed = self.planned = computed
        self._high_water = min(parent.high_water, length)
        self.keys = parent.keys.copy(length // block_tokens)
        self.marks = [mark for mark in parent.marks if mark <= length]
        self.sealed = min(parent.sealed, computed // block_tokens)
        self.shared_tail = computed % block_tokens != 0

    def seal(self, blocks: int) -> None:
        """Note that exactly the first ``blocks`` blocks are full and named by their keys, read-only from now
        on."""
        self.sealed = blocks

    def share_tail(self, shared: bool) -> None:
        """Set whether the partial last block must be copied before it is written, because others hold it too
        or it is sealed."""
        self.shared_tail = shared

    def look_up(self) -> None:
        """Have the prefix cache and the host tier asked before the next step."""
        self.needs_lookup = True
        self.touched()

    def looked_up(self) -> None:
        """Note that the prefix cache and the host tier were asked."""
        self.needs_lookup = False

    def expect_return(self, returns: float | None) -> None:
        """Set when the sequence is expected back: ``returns``, seconds by the engine's clock; None: that is
        not known."""
        self.returns = returns

    # --- the slot ---------------------------------------------------------------------------------------

    def take_slot(self, columns: Columns, slot: int) -> None:
        """Keep what changes in each step in ``columns`` from now on, at ``slot``."""
        numbers = self.computed, self.planned, self.pending_samples, self.told
        columns.begin(slot, self.id, self.tenant)
        self.columns, self.slot = columns, slot
        self.computed, self.planned, self.pending_samples, self.told = numbers

    def leave_slot(self) -> None:
        """Keep it here again."""
        assert self.columns is not None and self.slot is not None
        self._tokens = self.tokens  # with those that stand in the columns
        numbers = self.computed, self.planned, self.pending_samples, self.told
        self.columns.end(self.slot)
        self.columns = self.slot = None
        self.computed, self.planned, self.pending_samples, self.told = numbers

    def touched(self) -> None:
        """Note that something changed otherwise than by a plain decode: the next row goes through Python."""
        if self.columns is not None and self.slot is not None:
            self.columns.not_plain(self.slot)

    # --- steps ------------------------------------------------------------------------------------------

    def advance(self, step: int, end: int, *, draws: bool, drafts: int = 0) -> None:
        """Note a row of the step that is being planned: ``planned`` rises to ``end``, and if it ``draws``, one
        more token is being sampled. ``drafts``: how many guessed tokens stand behind ``end`` in the row."""
        assert self.planned < end <= self.total
        self.planned, self.last_step, self.drafts = end, step, drafts
        if draws:
            assert end == self.total
            self.pending_samples += 1

    def land(self, first: int, end: int) -> tuple[int, int]:
        """Note that the row of a step that computed ``[first, end)`` is done: its tokens count as computed,
        and guessed ones among them that were right. Returns how many of them are of the prompt and computed
        for the first time, and how many were computed again; the others were decoded."""
        assert self.computed == first
        high_water = self.high_water
        self.computed, self.planned, self.drafts = end, max(self.planned, end), 0
        prompt_end = end if self.turn is None else min(end, self.turn.prompt)
        prefilled = max(0, prompt_end - max(first, high_water))
        recomputed = max(0, min(end, high_water) - first)
        self.work.prefilled += prefilled
        self.work.recomputed += recomputed
        self._high_water = max(high_water, end)
        return prefilled, recomputed

    def keep(self, tokens: list[int]) -> None:
        """Append the ``tokens`` that a step has sampled for the turn, and count them. An isolated sequence is
        isolated no longer."""
        assert self.pending_samples and self.turn
        self.pending_samples -= 1
        self.isolated = False
        self.tokens.extend(tokens)

    def force(self, tokens: list[int]) -> None:
        """Append the ``tokens`` that the turn's grammar forces, which no step has to sample. What a step in
        flight draws for one of their positions does not count."""
        assert self.turn
        if tokens:
            self.pending_samples = 0
            self.tokens.extend(tokens)

    def recall(self) -> None:
        """Take back what is planned: rows in flight will be discarded when their step ends, and only computed
        tokens count."""
        if self.columns is not None and self.slot is not None:
            self.columns.take_back(self.slot)
        self.planned = self.computed
        self.pending_samples = 0

    # --- turns ------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        """Begin ``turn``: raise the epoch, and forget when the sequence was expected back. The sequence must
        be idle."""
        assert self.turn is None and self.planned < self.total
        self.epoch += 1
        self.turn, self.turn_expected, self.returns = turn, False, None
        self.told = self.length

    def halt(self) -> None:
        """Raise the epoch, because a verb stopped or cut the sequence: the gateway then drops rows that were
        sent before."""
        self.epoch += 1

    def admit(self) -> None:
        """Note that the turn starts to run. At its first start, KV that is there and was not computed or
        restored for it is counted as resident."""
        assert self.turn
        if self.turn.resident is None:
            made = self.work.total - self.work.retracted
            self.turn.resident = max(0, self.computed - made - self.from_tiers.host)

    def count_found(self, tokens: int) -> None:
        """Count as resident ``tokens`` more, which the prefix cache gave after the turn had started, because
        other turns have just computed them; or, if it is negative, so many less: their KV was found, but the
        sequence cannot go on from it. Does nothing before the turn has started: its start counts what is
        there."""
        if self.turn is not None and self.turn.resident is not None:
            self.turn.resident = max(0, self.turn.resident + tokens)

    def end(self) -> Work:
        """End the turn and take back what is planned. Returns what the turn cost, and sets the counts for
        that to zero."""
        self.recall()
        turn, self.turn = self.turn, None
        assert turn is not None
        made, came = self.work, self.from_tiers
        self.work, self.from_tiers = ComputedTokens(), FromTiers()
        # What was found or brought up twice, or computed and then found, counts once; what the sequence had
        # before it lay idle, gave up and found again was there.
        others = max(0, min(self.high_water, turn.prompt) - made.prefilled + made.retracted)
        resident = min(turn.resident or 0, others)
        host = min(came.host, others - resident)
        resident = max(resident, others - host - made.recomputed)
        disk = min(came.disk, host)
        return Work(
            made.prefilled,
            made.recomputed,
            resident,
            self.length - turn.prompt,
            host - disk,
            disk,
            came.seconds,
            min(came.chosen, made.total),
            pending=len(self.tokens) - self.computed,
        )
