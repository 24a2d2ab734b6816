"""A sequence: token ids, the blocks that hold their KV, and three scalars that express everything.

::

    [0, sealed blocks)   full, named by `keys`, shared, read-only
    [.., computed)       KV committed
    [computed, planned)  KV being written by steps in flight
    [planned, total)     to do; the last `promised` of these are being sampled, their ids not yet known

Prefill, decode and chunking raise `planned`, then `computed`; a prefix hit raises both; preemption and
truncation lower them; streamed input raises `total`. Knows no pool, no queue and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..kvstore.block_table import BlockTable
from ..kvstore.keychain import KeyChain
from ..kvstore.quotas import tenant_of
from .grammar.matcher import Matcher
from .link.messages import Finish, Limits, Sampling, State, TokenLogprob, Work
from .tokens import TokenList


@dataclass(slots=True)
class Turn:
    """One generation. ``prompt``: tokens when it began. ``sampled``: tokens it has committed so far, with those
    that its grammar left no choice about.

    ``allowed``: tokens it may sample in all, ``exhausted``: why no more. ``resident``: computed tokens that
    its first admission found. ``generated_from``: tokens at the prompt's end that this generation had sampled
    before it was begun again. ``matcher``: where it stands in its grammar, once that is compiled. ``untold``:
    committed tokens that wait for more to be told with, and their log probabilities.
    """

    sampling: Sampling
    limits: Limits
    prompt: int
    allowed: int
    exhausted: Finish
    sampled: int = 0
    resident: int | None = None
    generated_from: int = 0
    matcher: Matcher | None = None
    untold: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)

    @property
    def output_from(self) -> int:
        """Position of the generation's first token."""
        return max(0, self.prompt - self.generated_from)

    @property
    def goes_on(self) -> bool:
        """Whether tokens that its grammar leaves no choice about are taken without a step.

        Nobody knows how likely they were; and one that may not come is for the step to find.
        """
        return self.matcher is not None and self.sampling.logprobs is None and not self.sampling.bad_words

    def forbidden(self, promised: int) -> tuple[int, ...]:
        """Ids that may not come next, with ``promised`` tokens on their way: the end, while it is too soon."""
        early = self.generated_from + self.sampled + promised < self.limits.min_tokens
        return self.limits.stop_ids if early else ()


@dataclass(frozen=True, slots=True)
class Flight:
    """What step ``step`` does for a sequence: its row ``row`` computes ``[first, end)``, samples or not."""

    step: int
    row: int
    first: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Promise:
    """A lease while it lasts: of the sequence's first ``blocks`` blocks on the device, and ``records`` below.

    ``until`` and ``returns`` (when it is wanted again): seconds by the engine's clock.
    """

    priority: int
    until: float
    returns: float
    blocks: int
    records: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Everything the engine knows of one sequence.

    ``root``: the block key before the first. ``keys``: of the leading full blocks, at least the sealed ones.
    ``shared_tail``: the partial last block is not ours to write; copy it first.
    ``unmatched``: the prefix cache has not been asked since tokens came or KV went.
    ``frontier``: tokens that have had KV at some time; computing below it is work done again.
    ``alone``: suspected of having killed an engine; shares no step until it has sampled a token.
    ``tail``: key and end of the partial last block that was saved last. ``host``: tokens brought up from there
    on the account that the next turn settles, ``disk`` those of them whose records, ``from_disk``, came up from
    disk, for which it waited ``restore_seconds``. ``promise``: its lease. ``used``: when it was used
    last, ``returns``: when it is expected back, by the engine's clock; None: nobody said, or it is back.
    ``place``: of its turn in the order, see `queues`.
    ``meets``: computed no further for now, as what follows is on its way up. ``chosen``: tokens that the next
    turn computes though a tier below holds them, as that is cheaper. ``due``: a turn is about to begin.
    """

    id: int
    root: bytes
    tokens: TokenList
    epoch: int = 0
    promised: int = 0
    computed: int = 0
    planned: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    keys: KeyChain = field(default_factory=KeyChain)
    sealed: int = 0
    shared_tail: bool = False
    unmatched: bool = True
    turn: Turn | None = None
    in_flight: dict[int, Flight] = field(default_factory=dict)
    frontier: int = 0
    prefilled: int = 0
    recomputed: int = 0
    alone: bool = False
    tail: tuple[bytes, int] | None = None
    host: int = 0
    disk: int = 0
    from_disk: set[bytes] = field(default_factory=set)
    restore_seconds: float = 0.0
    promise: Promise | None = None
    used: float = 0.0
    returns: float | None = None
    place: tuple[int, int] = (0, 0)
    meets: int | None = None
    chosen: int = 0
    due: bool = False

    @property
    def tenant(self) -> int:
        """The number of who it belongs to."""
        return tenant_of(self.root)

    @property
    def total(self) -> int:
        """Tokens, promised ones among them."""
        return len(self.tokens) + self.promised

    @property
    def state(self) -> State:
        """What the link is told; promised tokens do not count, they can still be taken back."""
        return State(self.id, len(self.tokens), self.computed, self.epoch)

    @property
    def target(self) -> int:
        """Position up to which KV is wanted now.

        A turn wants the last token's logits. Without one the last token stays pending, so that a turn has
        something to compute. With every allowed token promised there is nothing left to ask for; nor, for now,
        with any promised where a grammar says what may follow it.
        """
        turn = self.turn
        if turn is None:
            return max(self.total - 1, self.planned)
        if turn.sampled + self.promised >= turn.allowed or (self.promised and turn.matcher is not None):
            return self.planned  # nothing is left to ask for, or a grammar has to hear the last token first
        return self.total if self.meets is None else max(self.planned, min(self.total, self.meets))

    @property
    def to_do(self) -> int:
        """Tokens that could be planned now."""
        return self.target - self.planned

    @property
    def priority(self) -> int:
        """Of its turns; 0 without a lease."""
        return 0 if self.promise is None else self.promise.priority

    def names(self) -> list[bytes]:
        """Keys of its records, in order."""
        return [*self.keys, self.tail[0]] if self.tail is not None else list(self.keys)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Append known tokens."""
        assert not self.promised, "tokens behind ones that are not known yet"
        self.tokens.extend(tokens)
        self.unmatched, self.returns = True, None

    def advance(self, flight: Flight) -> None:
        """A step was planned that computes ``[planned, flight.end)``."""
        assert self.planned == flight.first < flight.end <= self.total
        self.in_flight[flight.step] = flight
        self.planned = flight.end
        if flight.samples:
            assert flight.end == self.total
            self.promised += 1

    def land(self, flight: Flight) -> tuple[int, int]:
        """The step is done: its KV counts. Gives its tokens prefilled for the first time, and recomputed."""
        assert self.computed == flight.first
        start, frontier, end = flight.first, self.frontier, flight.end
        self.computed = end
        prompt_end = end if self.turn is None else min(end, self.turn.prompt)
        prefilled = max(0, prompt_end - max(start, frontier))
        recomputed = max(0, min(end, frontier) - start)
        self.prefilled += prefilled
        self.recomputed += recomputed
        self.frontier = max(frontier, end)
        return prefilled, recomputed

    def keep(self, token: int) -> None:
        """A promised token is known."""
        assert self.promised and self.turn
        self.promised -= 1
        self.alone = False
        self.tokens.append(token)
        self.turn.sampled += 1
        if self.turn.matcher is not None and token not in self.turn.limits.stop_ids:
            self.turn.matcher.take(token)

    def go_on(self) -> list[int]:
        """Append what the turn's grammar leaves no choice about; its ids, which no step has to draw."""
        turn = self.turn
        assert turn is not None
        if turn.matcher is None or not turn.goes_on:
            return []
        assert not self.promised, "what must follow a token is not known before it"
        ids = turn.matcher.go_on(turn.allowed - turn.sampled)
        self.tokens.extend(np.array(ids, dtype=np.int32))
        turn.sampled += len(ids)
        return ids

    def recall(self) -> None:
        """Take back what is planned: rows in flight are discarded when their step ends."""
        self.in_flight.clear()
        self.planned = self.computed
        self.promised = 0

    def begin(self, turn: Turn) -> None:
        """Start a turn."""
        assert self.turn is None and self.planned < self.total
        self.epoch += 1
        self.turn, self.due, self.returns = turn, False, None

    def admit(self) -> None:
        """The turn starts to run: what is computed now, and was not by work on its account, it found here."""
        assert self.turn
        if self.turn.resident is None:
            counted = self.prefilled + self.recomputed + self.host
            self.turn.resident = max(0, self.computed - counted)

    def found(self, tokens: int) -> None:
        """So many more were found computed since the turn was admitted: others have just computed them."""
        if self.turn is not None and self.turn.resident is not None:
            self.turn.resident += tokens

    def end(self) -> Work | None:
        """End the turn, if any, and settle its account."""
        self.recall()
        turn, self.turn = self.turn, None
        if turn is None:
            return None
        # What was found or brought up twice, or computed and then found, counts once; what the sequence had
        # before it lay idle, gave up and found again was there.
        others = max(0, min(self.frontier, turn.prompt) - self.prefilled)
        resident = min(turn.resident or 0, others)
        host = min(self.host, others - resident)
        resident = max(resident, others - host - self.recomputed)
        disk = min(self.disk, host)
        waited = self.restore_seconds
        chosen = min(self.chosen, self.prefilled + self.recomputed)
        pending = len(self.tokens) - self.computed
        work = Work(
            self.prefilled,
            self.recomputed,
            resident,
            turn.sampled,
            host - disk,
            disk,
            waited,
            chosen,
            pending,
        )
        self.prefilled = self.recomputed = self.host = self.disk = self.chosen = 0
        self.restore_seconds = 0.0
        self.meets = None
        self.from_disk.clear()
        return work
