"""Events a client sends. Each may carry an `event_id`, which errors about it repeat."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .events import ClientFrame, EventId, Handle
from .items import AnyItem, Identifier
from .response import ResponseParams
from .session import SessionPatch


class SessionUpdate(ClientFrame, frozen=True, tag="session.update"):
    """Change the fields that are present in `session`."""

    session: SessionPatch


class ItemCreate(ClientFrame, frozen=True, tag="conversation.item.create"):
    """Add an item: at the end (absent), at the beginning (`root`), or after the item named."""

    item: AnyItem
    previous_item_id: Identifier | None = None


class ItemRetrieve(ClientFrame, frozen=True, tag="conversation.item.retrieve"):
    """Ask for an item as the server has it."""

    item_id: Identifier


class ItemDelete(ClientFrame, frozen=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: Identifier


class ResponseCreate(ClientFrame, frozen=True, tag="response.create"):
    """Ask the model for a reply.

    `items` (ours) are put at the conversation's end first: all of them, or none where one of them is refused.
    """

    items: Annotated[list[AnyItem], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    response: ResponseParams | None = None


class ResponseCancel(ClientFrame, frozen=True, tag="response.cancel"):
    """Cut a running reply short; without an id the default conversation's."""

    response_id: Identifier | None = None


# --- text on its way: ours, no standard has it ---

TypedRole: TypeAlias = Literal["user", "system"]


class TextAppend(ClientFrame, frozen=True, tag="input_text_buffer.append"):
    """Text as it is typed or recognised: `role` comes with the first piece (`user` if not said). Or the output
    of a tool as it comes: `call_id` comes with the first piece, whose text may be empty, and says which call it
    answers."""

    text: str
    role: TypedRole | None = None
    call_id: Identifier | None = None


class TextReplace(ClientFrame, frozen=True, tag="input_text_buffer.replace"):
    """Take back uncommitted text from character `start` (`from` on the wire) on, and put `text` there."""

    start: Annotated[int, Meta(ge=0)] = msgspec.field(name="from")
    text: str = ""


class TextClear(ClientFrame, frozen=True, tag="input_text_buffer.clear"):
    """Take all uncommitted text back."""


class TextCommit(ClientFrame, frozen=True, tag="input_text_buffer.commit"):
    """The text is whole: it becomes an item at the end of the conversation. With `call_id` only if it is the
    output of that call."""

    call_id: Identifier | None = None


class SessionResume(ClientFrame, frozen=True, tag="session.resume"):
    """Come back to the session that `handle` opens (ours).

    `last_event` is the `event_id` of the last server event that was read: those after it are sent again,
    once. Without it a response that runs is told from its beginning.
    """

    handle: Handle
    last_event: EventId | None = None


# --- where KV is to be: ours, no standard has it ---


class SessionLease(ClientFrame, frozen=True, tag="session.lease"):
    """Keep the session's KV first and bring it back first, within the server's budget (ours).

    `priority` of its turns, higher goes first; `ttl` seconds the lease lasts, 0 gives it back; `returns_in`
    seconds until the session is wanted again, which counts without a lease too: of those that have none, who
    stays away longest loses KV first. What is out of range is clipped, and the receipt says so.
    """

    priority: int | None = None
    ttl: float | None = None
    returns_in: float | None = None


class SessionStage(ClientFrame, frozen=True, tag="session.stage"):
    """The session is wanted soon: bring its KV up (ours)."""


class SessionSettle(ClientFrame, frozen=True, tag="session.settle"):
    """The session is not wanted for a while: send its KV down to `tier` (ours)."""

    tier: Literal["host", "disk"] = "disk"


# --- what only a session can do; `conversation.item.truncate` is the standard's, with a field of ours ---


class Heard(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """At `ms` of its audio, so many characters of the text had been spoken."""

    ms: Annotated[int, Meta(ge=0)]
    text_end: Annotated[int, Meta(ge=0)]


class ItemTruncate(ClientFrame, frozen=True, tag="conversation.item.truncate"):
    """End a message of the model where it was heard: after `text_end` characters (ours; Unicode code points).

    `audio_end_ms`, the standard's, says it in time; `timing` (ours) then has to say what was spoken when, since
    there is no audio here. A reply that runs is cancelled first.
    """

    item_id: Identifier
    content_index: Annotated[int, Meta(ge=0)] = 0
    text_end: Annotated[int, Meta(ge=0)] | None = None
    audio_end_ms: Annotated[int, Meta(ge=0)] | None = None
    timing: Annotated[list[Heard], Meta(max_length=65536)] | None = None


class SessionRewind(ClientFrame, frozen=True, tag="session.rewind"):
    """Go back to an item, which becomes the last (`root`: before the first), or to so many tokens."""

    to: Identifier | Annotated[int, Meta(ge=0)]


class SessionFork(ClientFrame, frozen=True, tag="session.fork"):
    """Make `children` sessions that go on from here, or from the item `at`.

    Also while a reply runs: as far as it has come it is theirs, and ends there.
    """

    at: Identifier | None = None
    children: Annotated[int, Meta(ge=1, le=64)] = 1


class SessionTree(ClientFrame, frozen=True, tag="session.tree"):
    """List the session's tree: all that were forked from one another with this one among them.

    At most `limit` of them, those behind the session `after`: the `next` of the page before.
    """

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Identifier | None = None


class SessionName(ClientFrame, frozen=True, tag="session.name"):
    """Name this session, as a branch of its tree; an empty name takes the name back.

    It is kept in Unicode's normal form C. No two of one tree have the same name.
    """

    name: Annotated[str, Meta(max_length=128)]


class SessionPrune(ClientFrame, frozen=True, tag="session.prune"):
    """End another session of this one's tree for good: what runs in it is cancelled, a socket that has it is
    told as when it goes on elsewhere, its handles open nothing any more.

    What it shares with others, forks of it among them, stays theirs.
    """

    session: Identifier


class ResponseSteer(ClientFrame, frozen=True, tag="response.steer"):
    """Say `input` while a reply runs: that ends in order (`incomplete`, `steered`), and the next one begins.

    Where none runs any more it is a plain new turn. `response` is as in `response.create`.
    """

    input: Annotated[list[AnyItem], Meta(min_length=1, max_length=64)]
    response: ResponseParams | None = None


class SessionAttach(ClientFrame, frozen=True, tag="session.attach"):
    """Let this socket have the session that the handle `session` opens, besides those it has.

    Answered by `session.resumed`. From now on every event names its session in `session_id`. `last_event` is as
    in `session.resume`.
    """

    session: Handle
    last_event: EventId | None = None


class SessionDetach(ClientFrame, frozen=True, tag="session.detach"):
    """The session `session_id` leaves this socket; it can be come back to."""


ClientEvent: TypeAlias = (
    SessionUpdate
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ResponseCreate
    | ResponseCancel
    | TextAppend
    | TextReplace
    | TextClear
    | TextCommit
    | SessionResume
    | SessionLease
    | SessionStage
    | SessionSettle
    | ItemTruncate
    | SessionRewind
    | SessionFork
    | SessionTree
    | SessionName
    | SessionPrune
    | ResponseSteer
    | SessionAttach
    | SessionDetach
)
