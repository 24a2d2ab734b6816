"""What crosses the link: verbs down, replies, step rows and heartbeats up; token ids only.

One definition shared by both ends. A frame is a 4-byte little-endian length and one MessagePack object. Every
verb has a request id and exactly one ``VerbReply`` or ``Refusal``. Knows nothing of text, sockets or tensors.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec


class GrammarKind(StrEnum):
    """What a grammar is written in: JSON Schema, a regular expression, a JSON array of strings, or llguidance's
    Lark."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a reply may say, from its first token on. The end tokens may come exactly where ``text`` accepts."""

    kind: GrammarKind
    text: str


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence's next token is drawn. ``temperature`` 0 is greedy.

    ``seed`` and the position of the drawn token alone decide the draw, so it repeats after a crash or
    preemption. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``typical_p`` 1 keep everything.

    ``repetition_penalty`` (1: none) regards all tokens of the sequence; ``presence_penalty`` and
    ``frequency_penalty`` (0: none) what this generation has sampled, before ``generated_from`` too.
    ``logit_bias``: (id, addend). ``bad_words``: token sequences that are never completed, wherever they
    began. ``logprobs``: how many alternatives are told with each token's log probability, which is that of
    the model, before all of this; None: none is told. ``grammar``: no token comes that it does not allow; where
    nothing but an end may follow, the reply has ended.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalizes(self) -> bool:
        """Whether what was said changes the logits of its tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_past(self) -> bool:
        """Whether the draw needs to know what was said."""
        return self.penalizes or bool(self.bad_words)


class TokenLimits(msgspec.Struct, frozen=True, array_like=True):
    """When a generation ends: after ``max_tokens`` tokens, or at a stop id, which stays in the sequence.

    No stop id is sampled before ``min_tokens`` tokens were. ``generated_from`` counts in both. ``gather``: a
    row that ends nothing is told with those after it, once they have so many tokens.
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
    """A command to the engine; ``request`` is echoed by its one reply."""

    request: int


class Open(Verb, frozen=True, tag="open"):
    """Begin a sequence with ``tokens``. ``salt`` separates tenants' cached blocks.

    ``alone``: it may be what killed the engine before, so its steps hold nobody else until it has sampled.
    """

    seq: int
    salt: bytes
    tokens: list[int]
    alone: bool = False


class Extend(Verb, frozen=True, tag="extend"):
    """Append tokens. Refused while the sequence generates. ``due``: a turn on them is about to begin.

    ``expect_length``: refused if the sequence has another: a verb before this one was.
    """

    seq: int
    tokens: list[int]
    due: bool = False
    expect_length: int | None = None


class Truncate(Verb, frozen=True, tag="truncate"):
    """Keep the first ``length`` tokens. Refused if the sequence's epoch is not ``expect_epoch``."""

    seq: int
    length: int
    expect_epoch: int


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence is before the first verb on it: empty, with ``salt`` and ``alone`` as in `Open`; or, of a
    ``parent``, its first ``at`` tokens, as `Fork` makes a child.
    """

    salt: bytes = b""
    alone: bool = False
    parent: int | None = None
    at: int = 0


class Generate(Verb, frozen=True, tag="generate"):
    """Append ``tokens``, then sample until a limit. Of all ``generated_from`` were generated before.

    ``opening``: the sequence begins with this verb, so that no step comes between its prompt and its turn.
    ``expect_length``: as of `Extend`; of a sequence that is there.
    """

    seq: int
    sampling: Sampling
    limits: TokenLimits
    generated_from: int = 0
    tokens: list[int] = []
    opening: Opening | None = None
    expect_length: int | None = None


class Stop(Verb, frozen=True, tag="stop"):
    """End the running generation, if any; the reply's length is the authoritative one.

    ``keep``: so many tokens stay at most; None: all that are committed.
    """

    seq: int
    keep: int | None = None


class Fork(Verb, frozen=True, tag="fork"):
    """Make ``children`` sequences that share the first ``at`` tokens (None: all committed ones)."""

    seq: int
    children: list[int]
    at: int | None = None


class Close(Verb, frozen=True, tag="close"):
    """Forget a sequence; with ``keep_kv`` its sealed blocks stay in the prefix cache until evicted."""

    seq: int
    keep_kv: bool = True


class Lease(Verb, frozen=True, tag="lease"):
    """Keep a sequence's KV first and bring it back first, within the budget, for ``ttl`` seconds.

    ``priority``: of its turns while the lease lasts, higher goes first. ``returns_in``: seconds until it is
    wanted again. None: the engine's default. A ``ttl`` of 0 gives the lease back, and promises nothing; what
    ``returns_in`` says then is foresight all the same: who stays away longest loses KV first.
    """

    seq: int
    priority: int | None = None
    ttl: float | None = None
    returns_in: float | None = None


class Stage(Verb, frozen=True, tag="stage"):
    """An idle sequence will be wanted: bring its KV up. With ``wait`` the reply comes when it is there."""

    seq: int
    wait: bool = False


class Settle(Verb, frozen=True, tag="settle"):
    """Nobody will want an idle sequence for a while: its KV leaves the device, to ``disk`` also the host.

    With ``wait`` the reply comes when it is there.
    """

    seq: int
    disk: bool = False
    wait: bool = False


class Statistics(Verb, frozen=True, tag="statistics"):
    """Ask for the engine's counters."""


AnyVerb: TypeAlias = (
    Open | Extend | Truncate | Generate | Stop | Fork | Close | Lease | Stage | Settle | Statistics
)


# --- up -----------------------------------------------------------------------------------------------------


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """What the engine holds of a sequence after a verb: tokens, those whose KV is computed, its epoch."""

    seq: int
    length: int
    computed: int
    epoch: int


class Grant(StrEnum):
    """What became of a wish for a lease."""

    GRANTED = "granted"
    CLIPPED = "clipped"
    DENIED = "denied"


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """What a lease really promises: ``tokens`` of KV are kept on the device first, ``host_tokens`` in the host
    tier. Seconds count from the reply. *Clipped*: some number is less than was asked for, or the budget covers
    only the beginning of the sequence; *denied*: nothing is promised. When it comes back is known all the same.
    """

    grant: Grant
    priority: int
    ttl: float
    returns_in: float
    tokens: int
    host_tokens: int


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """Where a sequence's tokens came from (``stage``) or are now (``settle``), and the ``seconds`` it took.

    ``device``: they were there already, or stay there; ``recomputed``: they were nowhere, or are now.
    """

    device: int
    host: int
    disk: int
    recomputed: int
    seconds: float


class VerbReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The verb ``request`` took effect. ``state`` is absent for ``close``, ``statistics`` for the others.

    ``receipt`` answers ``lease``, ``moved`` a ``stage`` or ``settle`` that waited.
    """

    request: int
    state: SequenceState | None = None
    statistics: dict[str, float] | None = None
    receipt: Receipt | None = None
    moved: Moved | None = None


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The verb ``request`` changed nothing. ``code`` names a class of ``runtime.errors``."""

    request: int
    code: str
    message: str


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Tokens one generation cost, counted by the engine's steps, the verbs before ``generate`` included.

    ``prefilled``: computed for the first time; ``recomputed``: computed again after preemption;
    ``resident``: found computed when the turn began (own KV or a prefix hit); ``decoded``: sampled or forced;
    ``host``, ``disk``: of its prompt, brought up from that tier; ``restore_seconds``: waited for the disk.
    ``chosen``: of what was computed, tokens that a tier held and that were cheaper to compute. ``pending``:
    tokens at the end that have no KV yet: the last one, and what a grammar had follow without a draw.
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
    """The log probability of a sampled token, and of the likeliest ``(id, logprob)``, the best first."""

    logprob: float
    top: list[tuple[int, float]]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one generating sequence, or several where its limits gather them. Rows of an older
    epoch are dropped by the reader.

    ``finish`` ends the generation; then ``length`` is the sequence's length, ``work`` is set, and if it is
    ``ERROR``, ``error`` says what went wrong and ``code`` names a class of ``runtime.errors``, if one does.
    ``logprobs``, where asked for, has one for each token.
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


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All rows of one step: one message per step, not per token."""

    step: int
    rows: list[Row]


class Phase(StrEnum):
    """What the engine is doing."""

    LOADING = "loading"
    COMPILING = "compiling"
    CAPTURING = "capturing"
    STEPPING = "stepping"
    IDLE = "idle"


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """The engine is alive in ``phase`` and will say so again within ``deadline`` seconds."""

    phase: Phase
    deadline: float
    detail: str = ""
    fraction: float = 0.0


class SamplingDefaults(msgspec.Struct, frozen=True, array_like=True):
    """How the model's makers want it sampled where nobody says otherwise; fields as in ``Sampling``."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a loaded engine: what it serves. ``kernels``: the backend that computes.

    ``dtype``: of weights and computing; ``kv_dtype``: of what is cached.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int
    block_tokens: int
    blocks: int
    block_bytes: int
    parameters: int
    defaults: SamplingDefaults = SamplingDefaults()
    kernels: str = "reference"
    kv_dtype: str = ""


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The engine could not start or go on, for a reason the operator can mend; the process ends after it."""

    code: str
    message: str


AnyReport: TypeAlias = VerbReply | Refusal | Step | Heartbeat | Hello | Fatal
