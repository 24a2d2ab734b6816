"""What the journal holds: operations on a session and records about it.

Each record is one MessagePack map, so that a version with more fields, which have defaults, reads older
records. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from ...runtime.verbs import TokenLogprob
from ..adapters import SessionAdapter
from ..conversation.items import Item, Message, Preamble, Role
from ..turn.events import EndReason, LeftOut, ReplyStatus, TurnUsage
from .segment import ERASED, HIGH, Fresh, Kind

NOWHERE = -1
"""Stands for the number of the origin session in the index, where a session is not a fork."""
LOW = (1 << HIGH) - 1


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="op"):
    """One operation on a session. Replayed in order, they give its history."""


class EventReceived(Operation, frozen=True, tag="heard"):
    """A client event with the id ``event`` was received. In the commit it comes before the operations that it
    caused."""

    event: str


class Inserted(Operation, frozen=True, tag="inserted"):
    """An item was inserted behind the item with the id ``previous``; "root": first; None: at the end."""

    item: Item
    previous: str | None = None


class Deleted(Operation, frozen=True, tag="deleted"):
    """The item with the id ``item`` was removed; "": all replies without items (`History.drop_silent`)."""

    item: str


class Typed(Operation, frozen=True, tag="typed"):
    """Input that is streamed in and not an item yet: its text from character ``start`` on is now ``text``. It
    will be the item with the id ``item``: a message of ``role``, or the output of the tool call ``call``."""

    start: int
    text: str = ""
    role: Role | None = None
    item: str = ""
    call: str | None = None


class Configured(Operation, frozen=True, tag="configured"):
    """New instructions and tools. ``config``: the gateway's whole configuration, as bytes that only the gateway
    reads."""

    preamble: Preamble
    config: bytes = b""


class Begun(Operation, frozen=True, tag="begun"):
    """The response with the id ``response`` was requested. ``request``: the request as plain data
    (`replay.request_form`); empty out of band. ``writes``: whether the reply joins the history; then it will
    stand here in it. ``note``: bytes that only the gateway reads."""

    response: str
    request: dict[str, Any]
    writes: bool = True
    note: bytes = b""


class Emitted(Operation, frozen=True, tag="said"):
    """The next token ids of a reply, little-endian int32. After a crash the reply goes on behind the last such
    record. ``logprobs``: one for each id, if the reply reports them."""

    response: str
    ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()

    def followed_by(self, more: AnyOperation) -> Emitted | None:
        """One record for this and ``more``, the next operation; None if that is not of the same response."""
        if not isinstance(more, Emitted) or more.response != self.response:
            return None
        return Emitted(
            response=self.response, ids=self.ids + more.ids, logprobs=self.logprobs + more.logprobs
        )


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a new node in the tree of turns: the ids ``prompt`` (little-endian int32), which follow the
    first ``keep`` tokens up to its parent's end. ``node``: its id."""

    node: str
    keep: int
    prompt: bytes


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ``sessions.errors``: its class by ``code``, its text, and the field of the request (None: of
    no field)."""

    code: str
    message: str
    param: str | None = None


class Ended(Operation, frozen=True, tag="ended"):
    """A response ended. Its token ids are in its `Emitted` records; if they say more than its items, ``cut``
    says how many of the first ones stay, and ``tail`` (little-endian int32) follows these. ``loose``: none
    stay, and the history has the items alone.

    ``kept``: it became a turn. ``spans``: the tree nodes that it added; turns that were rendered again come
    first, its own is the last. ``ended``: the last id is an end token. ``began``: false if it was refused
    before its first token. ``left_out``: what its prompt left out. ``stopped_by``: the stop string that ended
    it. ``shared``: only so many of the prompt's first items and replies were as in the history; the replies
    behind them gave way to their items. None: all were.
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
    left_out: LeftOut | None = None
    stopped_by: str | None = None
    shared: int | None = None
    cut: int | None = None
    tail: bytes = b""
    loose: bool = False


class ContextCut(Operation, frozen=True, tag="left_out"):
    """The running response leaves some oldest items and replies out of its prompt, because the context is full:
    those at ``indexes`` of the prompt's items and replies. ``told``: what the client is told of it.

    If the response is kept and has no instructions, tools or input of its own, later turns leave them out, too.
    """

    response: str
    indexes: tuple[int, ...] = msgspec.field(name="places")
    told: LeftOut


class Compacted(Operation, frozen=True, tag="compacted"):
    """``item``, a summary, replaced some items and replies: those at ``indexes`` of the
    context, which later turns leave out of their prompts."""

    item: Message
    indexes: tuple[int, ...] = msgspec.field(name="places")


class KeptReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reply of the model in a snapshot: its items, its token ids (little-endian int32), and whether the last
    id is an end token that the model sampled."""

    items: tuple[Item, ...]
    ids: bytes
    ended: bool = False


class KeptNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node of the tree of turns in a snapshot, with the id ``node``: ``prompt`` (ids, little-endian int32)
    follows the first ``keep`` tokens up to its parent's end. ``inputs`` and ``reply`` are indexes into the
    snapshot's ``items`` and ``replies``."""

    node: str
    keep: int
    prompt: bytes
    inputs: tuple[int, ...]
    reply: int


class KeptGap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entries that later turns leave out of their prompts, as indexes into the snapshot's ``entries``.
    ``since``: the index of the entry behind which they left the context; None if that entry is gone."""

    entries: tuple[int, ...]
    since: int | None = None


class SessionSnapshot(Operation, frozen=True, tag="snapshot"):
    """A session's state at a point where no response runs. It replaces all operations before it.

    ``items`` and ``replies``: each object once, because the history compares them by identity. ``entries``: the
    history in order: ``n`` is item n, ``-1 - n`` is reply n. ``nodes``: the tree's path from the root.
    ``gaps``: entries that later turns leave out.

    ``responses``: the number of responses so far. ``last``: the last of them; ``said``, ``logprobs``,
    ``ended``: its ids, their log probabilities and its end. ``heard``: ids of the latest client events.
    ``typed``: input that was being streamed.
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
    gaps: tuple[KeptGap, ...] = ()


class Interrupted(Operation, frozen=True, tag="interrupted"):
    """A running reply is to be cut, when it ends, after the first ``end`` characters of its message
    ``item``."""

    response: str
    item: str
    end: int


class Truncated(Operation, frozen=True, tag="cut"):
    """A reply was cut. The reply that holds ``item`` is now its first ``keep`` ids followed by ``tail``
    (little-endian int32), and has the items ``items``.

    If ``item`` is not part of a reply, or ``loose`` is true, it is replaced by ``items`` instead, which have no
    ids. ``node``: the id of the new tree node.
    """

    item: str
    items: tuple[Item, ...]
    keep: int = 0
    tail: bytes = b""
    node: str = ""
    loose: bool = False


class Rewound(Operation, frozen=True, tag="rewound"):
    """The history was rewound: everything behind the item with the id ``item`` was removed; None:
    everything."""

    item: str | None = None


class Branched(Operation, frozen=True, tag="branched"):
    """Marks where a fork begins: the operations before it are those of the session that it was forked from."""


class Noted(Operation, frozen=True, tag="noted"):
    """Part of the content of a stored object, which is no session (`sessions.stored`): bytes that only the
    gateway reads. They change no history."""

    note: bytes


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
    | ContextCut
    | Compacted
    | Branched
    | Noted
    | SessionSnapshot
)


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a fork's operations begin: with the first ``operations`` operations of another session.
    ``session``, ``high``: the halves of that one's number, 64 bits each."""

    session: int
    operations: int
    high: int = 0

    @classmethod
    def of(cls, number: int, operations: int) -> Origin:
        """The first ``operations`` operations of the session with this number."""
        return cls(session=number & LOW, operations=operations, high=number >> HIGH)

    @property
    def number(self) -> int:
        """The number of the other session."""
        return self.high << HIGH | self.session


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a session beside its operations.

    ``owner``: the digest of the API key that made it. ``salt``: its tenant's. ``clock``: the date that the chat
    template shows (ISO 8601). ``config``: the gateway's configuration when it began, as bytes. ``origin``: for
    a fork, the operations of another session that its own follow. ``name``: set by the client. ``parent``: the
    id of the session it was forked from; ``root``: the id of the first session of its fork tree; ``tree``: a
    position in that one's operations, for its number (None also in records of earlier versions).
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
    tree: Origin | None = None
    deleted: bool = False
    """A client has deleted it while it was in use: it is forgotten when it is not any more, by the next server
    at the latest."""
    forked: str = ""
    """When it was forked (ISO 8601), as its ``clock`` is that of the session it was forked from; empty for one
    that was not, or by an earlier version."""
    adapter: SessionAdapter | None = None
    """The adapter that its tokens are computed with; None: none."""

    @property
    def is_session(self) -> bool:
        """Whether it is a session's, and not that of a stored object (`sessions.stored`)."""
        return self.id.startswith("sess_")

    @property
    def created(self) -> str:
        """When the session was made (ISO 8601)."""
        return self.forked or self.clock


class Keyring(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The digests by which a session is found.

    ``fresh``: of handles that were issued and not used yet; ``used``: of the handle used last; None: of none.
    ``conversations``: of its history at the ends of some turns (`sessions.continuation`); ``names``: of the
    names that clients have for it. These open nothing.
    """

    fresh: tuple[bytes, ...]
    used: bytes | None = None
    conversations: tuple[bytes, ...] = ()
    names: tuple[bytes, ...] = ()

    def digests(self) -> tuple[bytes, ...]:
        """The digests of all valid handles."""
        return self.fresh if self.used is None else (*self.fresh, self.used)

    def listed(self) -> bytes:
        """All digests, of handles and conversations, joined: the bytes that the log's index has of a
        keyring."""
        return b"".join((*self.digests(), *self.conversations, *self.names))


def extra_of(kind: int, payload: bytes) -> bytes:
    """The part of a record that is also stored in the log's index: a session's tenant and origin, or a
    keyring's digests of all kinds. Empty for other kinds."""
    try:
        if kind == Kind.SESSION:
            return session_extra(msgspec.msgpack.decode(payload, type=SessionRecord))
        if kind == Kind.KEYRING:
            return msgspec.msgpack.decode(payload, type=Keyring).listed()
    except msgspec.MsgspecError:
        return b""
    return b""


def session_extra(record: SessionRecord) -> bytes:
    """What the index has of a session's record: MessagePack of (salt, low half of the number of the origin
    session or `NOWHERE`, its number of operations, the high half, whether a client has deleted the session, the
    number of the first session of its fork tree in low and high half: 0 if it is that one, None if unknown)."""
    origin = record.origin or Origin(session=NOWHERE, operations=0)
    first = record.tree or Origin(session=0, operations=0)
    low = None if record.root and record.tree is None else first.session
    told = (record.salt, origin.session, origin.operations, origin.high, record.deleted, low, first.high)
    return msgspec.msgpack.encode(told)


def told_in(extra: bytes) -> tuple[bytes, tuple[int, int] | None, bool, int | None]:
    """What `session_extra` has encoded: the tenant's salt, for a fork the number of the session that it was
    forked from and how many operations it has of it, whether a client has deleted it, and the number of the
    first session of its fork tree (0: it is that one; None: unknown). Earlier versions had fewer parts."""
    told: list[Any] = msgspec.msgpack.decode(extra)
    told += [0, False, None, 0][len(told) - 3 :]
    salt, low, operations, high, deleted, first, above = told
    origin = None if low == NOWHERE else (high << HIGH | low, operations)
    return salt, origin, deleted, None if first is None else above << HIGH | first


def put(number: int, record: SessionRecord | Keyring) -> Fresh:
    """The change that writes a session's record or its keyring; it replaces the one before. Writes nothing
    itself: hand it to the journal. Raises what encoding raises."""
    payload = msgspec.msgpack.encode(record)
    if isinstance(record, Keyring):
        return Fresh(number, 0, Kind.KEYRING, payload, record.listed())
    return Fresh(number, 0, Kind.SESSION, payload, session_extra(record))


def append(number: int, index: int, operation: AnyOperation) -> Fresh:
    """The record that holds a session's operation number ``index``; a snapshot replaces all before it too.
    Writes nothing itself: hand it to the journal. Raises what encoding raises."""
    kind = Kind.SNAPSHOT if isinstance(operation, SessionSnapshot) else Kind.OPERATION
    flags = ERASED if isinstance(operation, Deleted | Rewound) else 0
    return Fresh(number, index, kind, msgspec.msgpack.encode(operation), flags=flags)


def drop(number: int, *, deleted: bool = False) -> Fresh:
    """The change that forgets a session. Operations that its forks need stay until the last of these is
    forgotten. ``deleted``: a client asked for it, so the session's bytes leave the logs soon. Writes nothing
    itself: hand it to the journal."""
    return Fresh(number, 0, Kind.DROP, b"", flags=ERASED if deleted else 0)
