"""What the journal holds: operations on a session and records about it; and the log that takes them.

Each record is one MessagePack map, so that a version with more fields, which have defaults, reads older
records. Knows nothing of files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from ...runtime.link.messages import TokenLogprob
from ..errors import StorageUnavailable
from ..items import Item, Preamble, Role
from ..turn.events import EndReason, ReplyStatus, TurnUsage
from .segment import Fresh, Kind

NOWHERE = -1
"""As the number of the session that one was forked from: none."""


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op"):
    """One operation on a session. Replayed in order, they give its history."""


class EventReceived(Operation, frozen=True, tag="heard"):
    """A client event with this id was received. It stands before the operations it caused, in one commit."""

    event: str


class Inserted(Operation, frozen=True, tag="inserted"):
    """An item was inserted behind ``previous`` (None: at the end)."""

    item: Item
    previous: str | None = None


class Deleted(Operation, frozen=True, tag="deleted"):
    """An item was removed."""

    item: str


class Typed(Operation, frozen=True, tag="typed"):
    """Streamed input that is not an item yet: from character ``start`` on it is ``text`` now. It is a
    message of ``role``, or a tool's output for ``call``."""

    start: int
    text: str = ""
    role: Role | None = None
    item: str = ""
    call: str | None = None


class Configured(Operation, frozen=True, tag="configured"):
    """New instructions and tools. ``config`` is the gateway's whole configuration, opaque here."""

    preamble: Preamble
    config: bytes = b""


class Begun(Operation, frozen=True, tag="begun"):
    """A response was requested; its slot in the history is here. ``note`` is the gateway's, opaque here."""

    response: str
    request: dict[str, Any]
    writes: bool = True
    note: bytes = b""


class Emitted(Operation, frozen=True, tag="said"):
    """The next token ids of a reply, little-endian int32. The last such record is the durable cursor.
    ``logprobs``: one for each id, if the reply reports them."""

    response: str
    ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A turn node's tokens: ``prompt`` (little-endian int32) behind ``keep`` tokens of its parent's path."""

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

    ``kept``: it became a turn with the new nodes ``spans``: first those that were rendered again, last its own.
    ``ended``: the last id is an end token. ``began``: false if it was refused before its first token.
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
    """A `TurnReply`, its ids little-endian int32."""

    items: tuple[Item, ...]
    ids: bytes
    ended: bool = False


class KeptNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tree node; ``inputs`` and ``reply`` are positions in the snapshot's tables."""

    node: str
    keep: int
    prompt: bytes
    inputs: tuple[int, ...]
    reply: int


class SessionSnapshot(Operation, frozen=True, tag="snapshot"):
    """A session's state in the place of all operations before it, at a point where no response runs.

    ``items`` and ``replies`` are tables with each object once, as the history compares them by identity.
    ``entries``: the history in order, ``n`` for item n and ``-1 - n`` for reply n. ``nodes``: the tree's
    path from the root. ``responses`` counts the responses so far; ``last``, ``said``, ``logprobs``,
    ``ended`` and ``after`` are the last one and the items appended while it ran.
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
    """A running reply is to be cut where its message ``item`` has ``end`` characters."""

    response: str
    item: str
    end: int


class Truncated(Operation, frozen=True, tag="cut"):
    """The reply that holds ``item`` is now its first ``keep`` ids and ``tail`` (little-endian int32), which say
    ``items``. If ``item`` is not in a reply, or the cut is ``loose``, ``items`` replace it."""

    item: str
    items: tuple[Item, ...]
    keep: int = 0
    tail: bytes = b""
    node: str = ""
    loose: bool = False


class Rewound(Operation, frozen=True, tag="rewound"):
    """Everything behind ``item`` was removed (None: everything)."""

    item: str | None = None


class Branched(Operation, frozen=True, tag="branched"):
    """The session was forked here: the operations before are those of the session it was forked from."""


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


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A fork's first ``operations`` operations are those of session number ``session``."""

    session: int
    operations: int


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a session beside its operations.

    ``owner`` names the key that made it, ``salt`` its tenant; ``clock`` is the template's date (ISO).
    ``origin``: for a fork, the operations that its own follow. ``name``: set by the client. ``parent``: the
    id of the session it was forked from; ``root``: the id of the first session of its fork tree.
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


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the valid handles: those issued and not used yet, and the one used last."""

    fresh: tuple[bytes, ...]
    used: bytes | None = None

    def digests(self) -> tuple[bytes, ...]:
        """All digests."""
        return self.fresh if self.used is None else (*self.fresh, self.used)


def merged(operations: Iterable[AnyOperation]) -> list[AnyOperation]:
    """The same operations, with consecutive ids of one reply in one record."""
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
    """What a log's index holds of a record: a session's tenant and origin, or a keyring's digests."""
    try:
        if kind == Kind.SESSION:
            return session_extra(msgspec.msgpack.decode(payload, type=SessionRecord))
        if kind == Kind.KEYRING:
            return b"".join(msgspec.msgpack.decode(payload, type=Keyring).digests())
    except msgspec.MsgspecError:
        return b""
    return b""


def session_extra(record: SessionRecord) -> bytes:
    """A session's tenant and origin, encoded for the index."""
    origin = record.origin or Origin(session=NOWHERE, operations=0)
    return msgspec.msgpack.encode((record.salt, origin.session, origin.operations))


def put(number: int, record: SessionRecord | Keyring) -> Fresh:
    """Write a session's record or its keyring; it replaces the one before. Raises what encoding raises."""
    payload = msgspec.msgpack.encode(record)
    if isinstance(record, Keyring):
        return Fresh(number, 0, Kind.KEYRING, payload, b"".join(record.digests()))
    return Fresh(number, 0, Kind.SESSION, payload, session_extra(record))


def append(number: int, index: int, operation: AnyOperation) -> Fresh:
    """Write a session's operation; a snapshot replaces all before it too. Raises what encoding raises."""
    kind = Kind.SNAPSHOT if isinstance(operation, SessionSnapshot) else Kind.OPERATION
    return Fresh(number, index, kind, msgspec.msgpack.encode(operation))


def drop(number: int) -> Fresh:
    """Forget a session. Operations that its forks need stay until the last of these is forgotten."""
    return Fresh(number, 0, Kind.DROP, b"")


class SessionLog:
    """A session's log: it takes the session's operations. This one keeps nothing: for a session without a
    journal. ``durable``: what it takes outlives the process. ``number``: the session's."""

    durable = False

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def append(self, operation: AnyOperation) -> None:
        """Append an operation."""

    def keep_handles(self, keyring: Keyring) -> None:
        """Replace the keyring."""

    def rewrite(self, record: SessionRecord) -> None:
        """Replace the session's record."""

    def sync(self) -> asyncio.Future[None] | None:
        """A future that is done when everything appended so far is durable; None without a journal."""
        return None

    @property
    def fault(self) -> StorageUnavailable | None:
        """Why no new turn may begin; None if one may."""
        return None

    def position(self) -> Origin | None:
        """The origin of a session that is forked now; None without a journal."""
        return None

    def close(self) -> None:
        """Take no more; what was appended is still written."""

    def forget(self) -> None:
        """Forget the session; call it last."""
