"""Events that a client sends. Each may have an `event_id`, which errors about it repeat."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .items import AnyItem, Identifier
from .response import ResponseParams
from .session import SessionPatch

EventId: TypeAlias = Annotated[str, Meta(max_length=512)]
Handle: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ClientFrame(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    """Base of client events. `session_id` (ours): the session of the socket it is for; null: the first."""

    event_id: EventId | None = None
    session_id: Identifier | None = None

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class SessionUpdate(ClientFrame, frozen=True, tag="session.update"):
    """Change the fields that are present in `session`."""

    session: SessionPatch


class ItemCreate(ClientFrame, frozen=True, tag="conversation.item.create"):
    """Add an item: at the end (absent), at the beginning (`root`), or after the item named."""

    item: AnyItem
    previous_item_id: Identifier | None = None


class ItemRetrieve(ClientFrame, frozen=True, tag="conversation.item.retrieve"):
    """Ask for an item, as the server has it."""

    item_id: Identifier


class ItemDelete(ClientFrame, frozen=True, tag="conversation.item.delete"):
    """Take an item out of the conversation."""

    item_id: Identifier


class ResponseCreate(ClientFrame, frozen=True, tag="response.create"):
    """Ask the model for a response.

    `items` (ours) are added at the conversation's end first: all of them, or none where one is refused.
    """

    items: Annotated[list[AnyItem], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    response: ResponseParams | None = None


class ResponseCancel(ClientFrame, frozen=True, tag="response.cancel"):
    """Cut a running response; without an id that of the default conversation."""

    response_id: Identifier | None = None


# --- streamed text: ours, not in the standard ---

TypedRole: TypeAlias = Literal["user", "system"]


class TextAppend(ClientFrame, frozen=True, tag="input_text_buffer.append"):
    """A piece of a message while it is typed or recognised; the first piece has its `role` (default: `user`).
    Or a piece of a tool's output; the first piece has the `call_id`, and its text may be empty."""

    text: str
    role: TypedRole | None = None
    call_id: Identifier | None = None


class TextReplace(ClientFrame, frozen=True, tag="input_text_buffer.replace"):
    """Replace uncommitted text from character `start` (`from` on the wire) on by `text`."""

    start: Annotated[int, Meta(ge=0)] = msgspec.field(name="from")
    text: str = ""


class TextClear(ClientFrame, frozen=True, tag="input_text_buffer.clear"):
    """Remove all uncommitted text."""


class TextCommit(ClientFrame, frozen=True, tag="input_text_buffer.commit"):
    """Make the uncommitted text an item at the end of the conversation; with `call_id` only if it is the output
    of that call."""

    call_id: Identifier | None = None


class SessionResume(ClientFrame, frozen=True, tag="session.resume"):
    """Resume the session that `handle` opens (ours).

    `last_event` is the `event_id` of the last server event that was received: those after it are sent again,
    once. Without it the events of a running response are sent from the first.
    """

    handle: Handle
    last_event: EventId | None = None


# --- the place of KV: ours, not in the standard ---


class SessionLease(ClientFrame, frozen=True, tag="session.lease"):
    """Keep the session's KV before that of others, and restore it first, within the server's budget (ours).

    `priority` of its turns: higher goes first. `ttl`: seconds that the lease lasts; 0 ends it. `returns_in`:
    seconds until the session is needed again; it counts without a lease too: of sessions without one, the one
    that is needed last loses KV first. Values out of range are clipped, and the receipt says so.
    """

    priority: int | None = None
    ttl: float | None = None
    returns_in: float | None = None


class SessionStage(ClientFrame, frozen=True, tag="session.stage"):
    """Restore the session's KV to the device: it is needed soon (ours)."""


class SessionSettle(ClientFrame, frozen=True, tag="session.settle"):
    """Offload the session's KV to `tier`: it is not needed for a while (ours)."""

    tier: Literal["host", "disk"] = "disk"


# --- edits of a session, and its fork tree: ours, except for `conversation.item.truncate` ---


class Heard(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`text_end` characters of the text had been spoken at `ms` milliseconds of its audio."""

    ms: Annotated[int, Meta(ge=0)]
    text_end: Annotated[int, Meta(ge=0)]


class ItemTruncate(ClientFrame, frozen=True, tag="conversation.item.truncate"):
    """Cut a message of the model where it was heard: after `text_end` characters (ours; Unicode code points).

    `audio_end_ms`, the standard's field, gives the place in time; as there is no audio here, `timing` (ours)
    has to say what was spoken when. A running response is cancelled first.
    """

    item_id: Identifier
    content_index: Annotated[int, Meta(ge=0)] = 0
    text_end: Annotated[int, Meta(ge=0)] | None = None
    audio_end_ms: Annotated[int, Meta(ge=0)] | None = None
    timing: Annotated[list[Heard], Meta(max_length=65536)] | None = None


class SessionRewind(ClientFrame, frozen=True, tag="session.rewind"):
    """Go back to an item, which becomes the last (`root`: before the first), or to a number of tokens."""

    to: Identifier | Annotated[int, Meta(ge=0)]


class SessionFork(ClientFrame, frozen=True, tag="session.fork"):
    """Make `children` new sessions that go on from here, or from the item `at`.

    While a response runs, they have as much of it as has come; in them it ends there.
    """

    at: Identifier | None = None
    children: Annotated[int, Meta(ge=1, le=64)] = 1


class SessionTree(ClientFrame, frozen=True, tag="session.tree"):
    """List the sessions of this one's fork tree.

    At most `limit` of them, those behind the session `after`, which is the `next` of the page before.
    """

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Identifier | None = None


class SessionName(ClientFrame, frozen=True, tag="session.name"):
    """Name this session in its fork tree; an empty name removes the name.

    The name is kept in Unicode's normal form C. Names in one tree are unique.
    """

    name: Annotated[str, Meta(max_length=128)]


class SessionPrune(ClientFrame, frozen=True, tag="session.prune"):
    """Delete another session of this one's fork tree: what runs in it is cancelled, it is detached from its
    socket, and its handles are no longer valid.

    What other sessions, also its forks, share with it stays.
    """

    session: Identifier


class ResponseSteer(ClientFrame, frozen=True, tag="response.steer"):
    """Add `input` while a response runs: that one ends in order (`incomplete`, `steered`), and the next begins.

    Where none runs, a plain new turn begins. `response` is as in `response.create`.
    """

    input: Annotated[list[AnyItem], Meta(min_length=1, max_length=64)]
    response: ResponseParams | None = None


class SessionAttach(ClientFrame, frozen=True, tag="session.attach"):
    """Add the session that the handle `session` opens to the sessions of this socket.

    The answer is `session.resumed`. From then on each event has its session's id in `session_id`. `last_event`
    is as in `session.resume`.
    """

    session: Handle
    last_event: EventId | None = None


class SessionDetach(ClientFrame, frozen=True, tag="session.detach"):
    """Take the session `session_id` off this socket; it can be resumed."""


_Items: TypeAlias = SessionUpdate | ItemCreate | ItemRetrieve | ItemDelete
_Responses: TypeAlias = ResponseCreate | ResponseCancel
_Text: TypeAlias = TextAppend | TextReplace | TextClear | TextCommit
_KV: TypeAlias = SessionResume | SessionLease | SessionStage | SessionSettle
_Tree: TypeAlias = ItemTruncate | SessionRewind | SessionFork | SessionTree | SessionName | SessionPrune
_Socket: TypeAlias = ResponseSteer | SessionAttach | SessionDetach
ClientEvent: TypeAlias = _Items | _Responses | _Text | _KV | _Tree | _Socket
