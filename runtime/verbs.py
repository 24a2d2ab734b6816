"""What an engine is told and what it tells: verbs, replies and the rows of steps, as plain data. Text is token
ids.

A verb is a command. It has a request id and gets exactly one ``VerbReply`` or ``Refusal``. How these cross to
another process is the link's.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TypeAlias

import msgspec


class GrammarKind(StrEnum):
    """A grammar's language: JSON Schema, regular expression, JSON array of strings, or llguidance's Lark."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that a generation follows from its first token on. ``text``: the grammar in the language
    ``kind``. An end token is allowed where ``text`` accepts.

    ``string_bytes``: for a grammar that allows only JSON, the most bytes of one string; 0: no bound.
    """

    kind: GrammarKind
    text: str
    string_bytes: int = 0


MAX_LOGPROBS = 20
LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0
"""The bounds of ``Sampling.repetition_penalty``. ``MAX_LOGPROBS`` is the most that ``Sampling.logprobs`` may
be."""


class SamplingDefaults(msgspec.Struct, frozen=True, array_like=True):
    """What a model may have defaults of its own for, with the values that change nothing. ``temperature`` 0 is
    greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``typical_p`` 1 keep all tokens. ``repetition_penalty``
    (1: none) counts all tokens of the sequence."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


class Sampling(SamplingDefaults, frozen=True, array_like=True):
    """The sampling parameters of one generation.

    A sampled token depends on ``seed`` and its position only, so sampling repeats after a crash or a
    preemption.

    ``presence_penalty`` and ``frequency_penalty`` (0: none) count what this generation has sampled, with the
    ``generated_from`` tokens. ``logit_bias``: pairs (token id, addend). ``bad_words``: token sequences that are
    never completed. ``logprobs``: how many alternatives are reported beside each token's log probability; None
    reports nothing. Log probabilities are those of the model, before any of the other fields apply.
    ``grammar``: only tokens that it allows are sampled; the generation ends where only an end token may
    follow. ``prompt_logprobs``: as ``logprobs``, for the tokens of the prompt behind the first one; the whole
    prompt is computed for them. For a sequence that begins with the generation and is no fork.
    """

    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is set, so that earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_past(self) -> bool:
        """Whether sampling needs the earlier tokens."""
        return self.penalizes or any(len(word) > 1 for word in self.bad_words)


class TokenLimits(msgspec.Struct, frozen=True, array_like=True):
    """When a generation ends, and how its tokens are sent. It ends after ``max_tokens`` tokens, or at a stop
    id, which stays in the sequence.

    No stop id is sampled before there are ``min_tokens`` tokens. For both limits, tokens generated before an
    interruption count, too (`Generate.generated_from`). ``gather``: tokens are collected and sent in one row
    once there are this many, or when the generation ends.
    """

    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    gather: int = 1


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ERROR = "error"


# --- verbs, down --------------------------------------------------------------------------------------------


class Verb(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command to the engine. ``request``: the number of the request, which its one reply repeats."""

    request: int


class Open(Verb, frozen=True, tag="open"):
    """Begin the sequence ``seq`` (a new id) with ``tokens``. ``salt`` separates the tenants' cached blocks.
    ``adapter``: the digest of the one that computes it; empty: none.

    ``isolated``: the sequence may have killed an earlier engine, so no other sequence shares its steps until
    it has sampled a token.
    """

    seq: int
    salt: bytes
    tokens: list[int]
    isolated: bool = False
    adapter: bytes = b""


class Extend(Verb, frozen=True, tag="extend"):
    """Append tokens to a sequence. Refused while it generates. ``turn_expected``: a turn on them will begin
    soon.

    ``expect_length``: refused if the sequence has another length, as when an earlier verb was refused; None:
    any length.
    """

    seq: int
    tokens: list[int]
    turn_expected: bool = False
    expect_length: int | None = None


class Truncate(Verb, frozen=True, tag="truncate"):
    """End a running generation, and keep the sequence's first ``length`` tokens. Refused if its epoch is not
    ``expect_epoch``."""

    seq: int
    length: int
    expect_epoch: int


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """How a new sequence begins. Without ``parent``: empty; ``salt`` separates the tenants' cached blocks, with
    ``isolated`` it shares no step until it has sampled a token, and ``adapter`` is the digest of the one that
    computes it. Else: as a fork that shares the first ``at`` tokens, and the adapter, of the sequence
    ``parent``."""

    salt: bytes = b""
    isolated: bool = False
    parent: int | None = None
    at: int = 0
    adapter: bytes = b""


class Generate(Verb, frozen=True, tag="generate"):
    """Append ``tokens`` to a sequence, then sample until a limit. The last ``generated_from`` tokens of the
    prompt were generated before: this verb continues a generation that was interrupted, for example by a
    crash.

    ``opening``: the sequence begins with this verb, so that no step runs between its prompt and its turn;
    None: it exists. ``expect_length``: refused if an existing sequence has another length; None: any length.
    """

    seq: int
    sampling: Sampling
    limits: TokenLimits
    generated_from: int = 0
    tokens: list[int] = []
    opening: Opening | None = None
    expect_length: int | None = None


class Stop(Verb, frozen=True, tag="stop"):
    """End the sequence's running generation, if any. The reply has the sequence's true length.

    ``keep``: at most this many tokens of the sequence stay; None: all committed ones.
    """

    seq: int
    keep: int | None = None


class Fork(Verb, frozen=True, tag="fork"):
    """Make new sequences, with the ids ``children``, that share the first ``at`` tokens of the sequence
    ``seq`` (None: all committed ones)."""

    seq: int
    children: list[int]
    at: int | None = None


class Close(Verb, frozen=True, tag="close"):
    """Remove a sequence. With ``keep_kv`` its full blocks stay in the prefix cache until they are evicted."""

    seq: int
    keep_kv: bool = True


class Lease(Verb, frozen=True, tag="lease"):
    """Ask for a lease: evict a sequence's KV last and restore it first, within the budget, for ``ttl``
    seconds.

    ``priority``: of its turns while the lease lasts; higher goes first. ``returns_in``: seconds until the
    next turn is expected. None means the engine's default. A ``ttl`` of 0 ends the lease; ``returns_in``
    still counts then, as sequences that return last are evicted first.
    """

    seq: int
    priority: int | None = None
    ttl: float | None = None
    returns_in: float | None = None


class Stage(Verb, frozen=True, tag="stage"):
    """Restore an idle sequence's KV to the device. The reply comes when it is there, and says where it came
    from."""

    seq: int


class Settle(Verb, frozen=True, tag="settle"):
    """Offload an idle sequence's KV to the host tier, or with ``disk`` to the disk tier. The reply comes when
    it is there, and says where all of it is."""

    seq: int
    disk: bool = False


class Locate(Verb, frozen=True, tag="locate"):
    """Ask where the blocks of a sequence lie. Nothing moves, also while it generates.

    ``seq`` None: where a sequence of these ``tokens``, under this ``salt`` and computed by this ``adapter``,
    would find its blocks.
    """

    seq: int | None
    salt: bytes = b""
    tokens: list[int] = []
    adapter: bytes = b""


class LoadAdapter(Verb, frozen=True, tag="load_adapter"):
    """Load the adapter in the folder ``path`` under this ``name``. The reply comes when it is read."""

    name: str
    path: str


class UnloadAdapter(Verb, frozen=True, tag="unload_adapter"):
    """Unload an adapter. Turns that run with it go on; no other one begins."""

    name: str


class Statistics(Verb, frozen=True, tag="statistics"):
    """Ask for the engine's counters."""


SequenceVerb = Open | Extend | Truncate | Generate | Stop | Fork | Close | Lease | Stage | Settle | Locate
AnyVerb: TypeAlias = SequenceVerb | LoadAdapter | UnloadAdapter | Statistics


# --- up -----------------------------------------------------------------------------------------------------


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence in the engine after a verb: ``length``, how many tokens it has; ``computed``, how many of
    them have KV on the device; and its ``epoch``.

    The epoch is a counter. It rises when a generation begins, and when a verb stops or cuts the sequence.
    """

    seq: int
    length: int
    computed: int
    epoch: int


class Grant(StrEnum):
    """How a request for a lease was answered: all of it, a part of it, or nothing was granted."""

    GRANTED = "granted"
    CLIPPED = "clipped"
    DENIED = "denied"


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What a lease promises: to keep the KV of ``tokens`` tokens on the device, and of ``host_tokens`` tokens
    in the host tier, for ``ttl`` seconds. ``returns_in``: when the sequence is expected back, in seconds.

    Seconds count from the reply. *Clipped*: some number is less than was asked for, or the budget covers only
    the beginning of the sequence. *Denied*: nothing is promised, but ``returns_in`` still counts.
    """

    grant: Grant
    priority: int
    ttl: float
    returns_in: float
    tokens: int
    host_tokens: int


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """The result of ``stage`` or ``settle`` in tokens, and the seconds it took.

    ``host``, ``disk``: tokens with KV that came from this tier (``stage``), or that is in it now (``settle``).
    ``device``: tokens with KV on the device before and after. ``recomputed``: tokens with KV in no tier, which
    are computed again.
    """

    device: int
    host: int
    disk: int
    recomputed: int
    seconds: float


class KVTier(StrEnum):
    """Where a block lies: the fastest tier that has it. NONE: its KV is computed when it is needed."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    NONE = "none"


class TierRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` consecutive blocks of a sequence in one tier. ``shared``: another open sequence holds the same
    blocks on the device."""

    tier: KVTier
    shared: bool
    count: int


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """Which tier each block of a sequence of ``tokens`` tokens lies in. ``block_tokens``: tokens in a block.
    ``runs``: blocks in the same tier, from the first block on."""

    tokens: int
    block_tokens: int
    runs: list[TierRun]


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that is loaded under ``name``, from the folder ``path``. ``digest``: of its configuration and
    weights, 32 bytes. ``rank``: its highest. ``size``: bytes that it takes in host memory."""

    name: str
    path: str
    digest: bytes
    rank: int
    size: int


class VerbReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The reply to the verb ``request``, which took effect. Every verb on a sequence but ``close`` and
    ``locate`` gets a ``state``.

    ``statistics`` answers ``statistics``, ``receipt`` a ``lease``, ``moved`` a ``stage`` or ``settle``,
    ``blocks`` a ``locate``, ``adapter`` a ``load_adapter``.
    """

    request: int
    state: SequenceState | None = None
    statistics: dict[str, float] | None = None
    receipt: Receipt | None = None
    moved: Moved | None = None
    blocks: BlockMap | None = None
    adapter: LoadedAdapter | None = None


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The verb ``request`` failed and changed nothing. ``code`` names a class of ``runtime.errors``."""

    request: int
    code: str
    message: str


class Work(msgspec.Struct, frozen=True, array_like=True):
    """What one generation cost, in tokens. Verbs since the generation before are included.

    ``prefilled``: computed for the first time. ``recomputed``: computed again, after their KV was lost.
    ``resident``: had KV when the turn began, from earlier turns or by a prefix cache hit. ``decoded``:
    sampled, or forced by a grammar. ``host``, ``disk``: prompt tokens restored from that tier.
    ``restore_seconds``: seconds spent waiting for the disk. ``chosen``: computed although a tier had their
    KV, as that was cheaper. ``pending``: tokens at the end without KV: the last sampled one, and those that a
    grammar forced after it.
    """

    prefilled: int
    recomputed: int
    resident: int
    decoded: int
    host: int = 0
    disk: int = 0
    restore_seconds: float = 0.0
    chosen: int = 0
    pending: int = 1


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token, sampled or of the prompt, and the likeliest ``(id, logprob)`` pairs, best
    first."""

    logprob: float
    top: list[tuple[int, float]]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one generating sequence in one step, or in several where ``TokenLimits.gather`` joins
    them.

    ``epoch``: that of the sequence, see `SequenceState`; the gateway drops rows of an older epoch. ``finish``:
    why the generation ended; None: it goes on. ``length``: the sequence's length. ``work``: at the end, what
    the generation cost. With ``Finish.ERROR``, ``error`` says what went wrong and ``code`` names a class of
    ``runtime.errors``, or is empty. ``logprobs``, where requested, has one entry per token.
    ``prompt_logprobs``, where requested: those of the prompt's next tokens; a row may have nothing else.
    """

    seq: int
    epoch: int
    tokens: list[int]
    length: int
    finish: Finish | None = None
    work: Work | None = None
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    code: str = ""
    prompt_logprobs: list[TokenLogprob] | None = None


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """Rows of sequences that have one token more and go on, as columns: 64-bit little-endian integers, one for
    each row. Fields as in `Row`."""

    seqs: bytes
    epochs: bytes
    tokens: bytes
    lengths: bytes

    def rows(self) -> Iterator[Row]:
        """The rows, one by one."""
        columns = (
            memoryview(column).cast("q") for column in (self.seqs, self.epochs, self.tokens, self.lengths)
        )
        for seq, epoch, token, length in zip(*columns, strict=True):
            yield Row(seq, epoch, [token], length)


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All rows of one step, number ``step``, in one message: those that merely decode as ``decoded``, the
    others as ``others``."""

    step: int
    others: list[Row] = []
    decoded: Decoded | None = None

    @property
    def rows(self) -> list[Row]:
        """All rows, the others first."""
        return self.others if self.decoded is None else [*self.others, *self.decoded.rows()]
