"""What the journal holds: operations on a session, and records about it. The schema is the type.

Each is one MessagePack object of maps, so that fields added later with defaults read older records. Knows
nothing of files.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import msgspec

from ...runtime.link.messages import TokenLogprob
from ..errors import StorageUnavailable
from ..items import Item, Preamble, Role
from ..turn.events import EndReason, ReplyStatus, TurnUsage
from .segment import Kind

NOWHERE = -1
"""As the number of the session that one was forked from: none."""


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op"):
    """One step of a session's life; replayed in order they give its history back."""


class EventReceived(Operation, frozen=True, tag="heard"):
    """A client event with this id was received; stands before what it caused, in the same commit."""

    event: str


class Inserted(Operation, frozen=True, tag="inserted"):
    """An item was put after ``previous`` (None: at the end)."""

    item: Item
    previous: str | None = None


class Deleted(Operation, frozen=True, tag="deleted"):
    """An item was taken out."""

    item: str


class Typed(Operation, frozen=True, tag="typed"):
    """Text on its way that is no item yet: from character ``start`` on it is ``text`` now. It is what
    ``role`` says, or what a tool answers to ``call``."""

    start: int
    text: str = ""
    role: Role | None = None
    item: str = ""
    call: str | None = None


class Configured(Operation, frozen=True, tag="configured"):
    """Instructions and tools from now on; ``config`` is the gateway's whole configuration, opaque here."""

    preamble: Preamble
    config: bytes = b""


class Begun(Operation, frozen=True, tag="begun"):
    """A response was asked for. Its place in the history is here. ``note`` is the gateway's, opaque here."""

    response: str
    request: dict[str, Any]
    writes: bool = True
    note: bytes = b""


class Emitted(Operation, frozen=True, tag="said"):
    """The next ids of the reply, little-endian int32; the last of these records is the durable cursor.

    ``logprobs``: where the reply tells them, one for each id.
    """

    response: str
    ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A turn node's own tokens: ``prompt`` (little-endian int32) on the first ``keep`` of its parent's
    path."""

    node: str
    keep: int
    prompt: bytes


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ``sessions.errors``, by its code."""

    code: str
    message: str
    param: str | None = None


class Ended(Operation, frozen=True, tag="ended"):
    """A response ended; its ids are in the ``said`` records.

    ``kept``: it became a turn, whose new nodes are ``spans`` (those rendered anew first, the turn's own
    last). ``ended``: the last id is an end token. ``began`` is false where it was refused before a word.
    """

    response: str
    status: ReplyStatus
    reason: EndReason
    kept: bool = False
    ended: bool = False
    began: bool = True
    items: tuple[Item, ...] = ()
    spans: tuple[Span, ...] = ()
    usage: TurnUsage = TurnUsage()
    error: Fault | None = None


class KeptReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `Reply`, its ids little-endian int32."""

    items: tuple[Item, ...]
    ids: bytes
    ended: bool = False


class KeptNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node on its parent; ``inputs`` and ``reply`` are places in the snapshot's tables."""

    node: str
    keep: int
    prompt: bytes
    inputs: tuple[int, ...]
    reply: int


class SessionSnapshot(Operation, frozen=True, tag="snapshot"):
    """All that the operations before it come to; no response runs. The first of those that are kept.

    ``items`` and ``replies`` are tables, each thing in them once, as the history tells them apart by
    identity. ``entries``: the history in order, ``n`` for item n and ``-1 - n`` for reply n. ``nodes``: the
    tree's path from the root. ``last``, ``said``, ``logprobs``, ``ended``, ``after``: the last response, the
    ``responses``th, and the items appended while it ran.
    """

    preamble: Preamble
    rendered: Preamble
    items: tuple[Item, ...] = ()
    replies: tuple[KeptReply, ...] = ()
    entries: tuple[int, ...] = ()
    nodes: tuple[KeptNode, ...] = ()
    config: bytes | None = None
    heard: tuple[str, ...] = ()
    typed: Typed | None = None
    responses: int = 0
    last: Begun | None = None
    said: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()
    ended: Ended | None = None
    after: tuple[str, ...] = ()


class Interrupted(Operation, frozen=True, tag="interrupted"):
    """A reply that runs is to end where its message ``item`` has ``end`` characters, and be cut there."""

    response: str
    item: str
    end: int


class Truncated(Operation, frozen=True, tag="cut"):
    """The reply that holds ``item`` is now its first ``keep`` ids and ``tail`` (little-endian int32), which
    say ``items``. Where ``item`` stands for itself, or the cut is ``loose``, ``items`` stand in its place."""

    item: str
    items: tuple[Item, ...]
    keep: int = 0
    tail: bytes = b""
    node: str = ""
    loose: bool = False


class Rewound(Operation, frozen=True, tag="rewound"):
    """All behind ``item`` was taken out (None: all)."""

    item: str | None = None


class Branched(Operation, frozen=True, tag="branched"):
    """Here the session left the one it was forked from: what stands before is that one's."""


AnyOperation: TypeAlias = (
    EventReceived
    | Inserted
    | Deleted
    | Typed
    | Configured
    | Begun
    | Emitted
    | Ended
    | Interrupted
    | Truncated
    | Rewound
    | Branched
    | SessionSnapshot
)
Record: TypeAlias = Callable[[AnyOperation], None]
"""Where a session's parts put what must be remembered."""


def forget(operation: AnyOperation) -> None:
    """Remembers nothing: for sessions that need not outlive their process."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A session's first ``operations`` are those of session number ``session``."""

    session: int
    operations: int


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is from birth. ``owner`` is whose key made it; ``clock`` the template's today (ISO).

    ``origin``: it was forked, and its own operations follow on those. ``name``: the client's, of the branch
    that it is. ``parent``: the id of the session it was forked from; ``root``: of the first of these.
    """

    id: str
    owner: bytes
    salt: bytes
    clock: str
    config: bytes = b""
    origin: Origin | None = None
    name: str = ""
    parent: str = ""
    root: str = ""


class HandleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which session a handle opens, and for whom. Only the handle's digest is kept; the handle is nowhere."""

    session: int
    owner: bytes


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the handles that are valid: those issued and not used yet, and the one used last."""

    fresh: tuple[bytes, ...]
    used: bytes | None = None

    def digests(self) -> tuple[bytes, ...]:
        """All of them."""
        return self.fresh if self.used is None else (*self.fresh, self.used)


def merged(operations: Iterable[AnyOperation]) -> list[AnyOperation]:
    """The same operations with neighbouring ids of one reply in one record."""
    out: list[AnyOperation] = []
    for operation in operations:
        last = out[-1] if out else None
        if (
            isinstance(operation, Emitted)
            and isinstance(last, Emitted)
            and last.response == operation.response
        ):
            scores = last.logprobs + operation.logprobs
            out[-1] = Emitted(response=last.response, ids=last.ids + operation.ids, logprobs=scores)
        else:
            out.append(operation)
    return out


def extra_of(kind: int, payload: bytes) -> bytes:
    """What the index says of a record besides: of a session its tenant and origin, of a keyring the
    digests."""
    try:
        if kind == Kind.SESSION:
            return session_extra(msgspec.msgpack.decode(payload, type=SessionRecord))
        if kind == Kind.KEYRING:
            return b"".join(msgspec.msgpack.decode(payload, type=Keyring).digests())
    except msgspec.MsgspecError:
        return b""
    return b""


def session_extra(record: SessionRecord) -> bytes:
    """Tenant and origin of a session."""
    origin = record.origin or Origin(session=NOWHERE, operations=0)
    return msgspec.msgpack.encode((record.salt, origin.session, origin.operations))


# --- what is written ---


class Table(StrEnum):
    """What a `Put` may write: a session's record, its keyring, or a handle, which the keyring names
    already."""

    SESSIONS = "sessions"
    KEYRINGS = "keyrings"
    HANDLES = "handles"


def key_of(number: int) -> bytes:
    """A session's, in a table."""
    return struct.pack(">Q", number)


@dataclass(frozen=True, slots=True)
class Put:
    """Write one record. A handle's is in its session's keyring: to put or take out one writes nothing."""

    table: Table
    key: bytes
    record: object | None


@dataclass(frozen=True, slots=True)
class Append:
    """Write a session's next operation."""

    number: int
    index: int
    operation: AnyOperation


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a session: its operations, its handles, everything.

    Operations that forks of it follow on stay until the last of these is forgotten.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Condensed:
    """A session's operations up to ``index`` are in ``snapshot``, which stands there."""

    number: int
    index: int
    snapshot: AnyOperation


Change: TypeAlias = Put | Append | Drop | Condensed


class SessionLog(Protocol):
    """Where a session's operations go. ``durable``: they outlive the process."""

    durable: bool

    def append(self, operation: AnyOperation) -> None:
        """Remember this next."""

    def keep_handles(self, keyring: Keyring, owner: bytes, dropped: Iterable[bytes] = ()) -> None:
        """These handles are valid from now on, the last of the fresh ones is new, ``dropped`` are no more."""

    def rewrite(self, record: SessionRecord) -> None:
        """The session's record is this one from now on."""

    def sync(self) -> asyncio.Future[None] | None:
        """Done when all so far is durable; None where it never waits."""

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why nothing new may be begun."""

    def position(self) -> Origin | None:
        """Here, for a session that is forked off; None where nothing is kept."""

    def close(self) -> None:
        """Take nothing more in; what was appended is still written."""


class EphemeralLog:
    """Remembers nothing, and nobody waits for it."""

    durable = False
    fault: StorageUnavailable | None = None

    def append(self, operation: AnyOperation) -> None:
        """Nothing."""

    def keep_handles(self, keyring: Keyring, owner: bytes, dropped: Iterable[bytes] = ()) -> None:
        """Nothing."""

    def rewrite(self, record: SessionRecord) -> None:
        """Nothing."""

    def sync(self) -> asyncio.Future[None] | None:
        """Nothing waits."""
        return None

    def position(self) -> Origin | None:
        """Nowhere."""
        return None

    def close(self) -> None:
        """Nothing."""
