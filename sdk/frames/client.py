"""Events that a client sends, a class for each. "Ours" marks what OpenAI's Realtime standard does not have."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .items import AdapterName, AnyItem, Given, Identifier, MessageItem
from .response import ResponseParams
from .session import SessionPatch

EventId: TypeAlias = Annotated[str, Meta(max_length=512)]
Handle: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class ClientFrame(Given, kw_only=True, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of client events. `event_id`: chosen by the client; an `error` about the event repeats it.
    `session_id` (ours): which of the socket's sessions the event is for; null: the socket's own, which it was
    opened for or resumed last."""

    event_id: EventId | None = None
    session_id: Identifier | None = None

    @property
    def type(self) -> str:
        """The event's name on the wire, such as `session.update`."""
        return str(self.__struct_config__.tag)


class SessionUpdate(ClientFrame, frozen=True, tag="session.update"):
    """Change the session's configuration, for later responses: each field that is present in `session` gets its
    value, or for null the value that the session began with. Answered by `session.updated`."""

    session: SessionPatch


class ItemCreate(ClientFrame, frozen=True, tag="conversation.item.create"):
    """Add an item to the conversation: after the item `previous_item_id`, at the beginning if that is `root`,
    at the end if it is absent. While a reply runs, an item at the end stands after it, and so does one after
    the item that the reply began last. Answered by `conversation.item.added` and `.done`."""

    item: AnyItem
    previous_item_id: Identifier | None = None


class ItemRetrieve(ClientFrame, frozen=True, tag="conversation.item.retrieve"):
    """Ask for an item of the conversation, as the server has it: the last one if `item_id` is absent (ours). An
    item that a running reply still writes is `in_progress`, and has what was said so far. Answered by
    `conversation.item.retrieved`."""

    item_id: Identifier | None = None


class ItemDelete(ClientFrame, frozen=True, tag="conversation.item.delete"):
    """Remove an item from the conversation: later responses do not see it. An item of a running reply cannot be
    removed. Answered by `conversation.item.deleted`."""

    item_id: Identifier


class ResponseCreate(ClientFrame, frozen=True, tag="response.create"):
    """Ask the model for a response. `response`: fields that replace the session's configuration for this
    response alone. Answered by `response.created`, or by an `error`.

    `items` (ours) are first added at the conversation's end; if one of them is refused, none is added and no
    response begins. For a response out of band (`response.conversation` is "none") they are not added: it alone
    reads them, after the conversation's items.
    """

    items: Annotated[list[AnyItem], Meta(max_length=512)] = msgspec.field(default_factory=list)
    response: ResponseParams | None = None


class ResponseCancel(ClientFrame, frozen=True, tag="response.cancel"):
    """End a running response early; what it has said stays. `response_id`: which one; null: the one that writes
    the conversation, not one out of band. Its `response.done` follows, with the status `cancelled`; if no such
    response runs, an `error` does."""

    response_id: Identifier | None = None


# --- streamed text: ours, not in the standard ---

TypedRole: TypeAlias = Literal["user", "system"]


class TextAppend(ClientFrame, frozen=True, tag="input_text_buffer.append"):
    """Append `text` to the session's input buffer: text that is not an item yet, and that is prefilled as it
    comes.

    The first piece says what the buffer becomes: a message of its `role` (default: `user`), or with `call_id`
    the output of that tool call; then its `text` may be empty. Later pieces need neither field.
    """

    text: str
    role: TypedRole | None = None
    call_id: Identifier | None = None


class TextReplace(ClientFrame, frozen=True, tag="input_text_buffer.replace"):
    """Replace the input buffer's text by `text`, from character `start` (`from` on the wire; Unicode code
    points, from 0) to the end. Refused if the buffer has fewer characters."""

    start: Annotated[int, Meta(ge=0)] = msgspec.field(name="from")
    text: str = ""


class TextClear(ClientFrame, frozen=True, tag="input_text_buffer.clear"):
    """Empty the input buffer: its text becomes no item. Answered by `input_text_buffer.cleared`."""


class TextCommit(ClientFrame, frozen=True, tag="input_text_buffer.commit"):
    """Make the input buffer's text an item at the end of the conversation, and empty the buffer. With `call_id`
    it is refused unless the buffer holds the output of that call. A message without text is refused. Answered
    by `input_text_buffer.committed`."""

    call_id: Identifier | None = None


class SessionResume(ClientFrame, frozen=True, tag="session.resume"):
    """Make the session that `handle` opens this socket's own, instead of any other (ours). Answered by
    `session.resumed`.

    `last_event`: the `event_id` of the last server event that the client received; the server sends those after
    it again, each once. Null: it sends the events of a running response again, from the first.
    """

    handle: Handle
    last_event: EventId | None = None


# --- where KV is: ours, not in the standard ---


class SessionLease(ClientFrame, frozen=True, tag="session.lease"):
    """Ask for a lease (ours): the server keeps this session's KV longer than that of others and restores it
    first, within its budget. A later lease replaces an earlier one. Answered by `session.leased`.

    `ttl`: seconds that the lease lasts (null: 300); 0 ends the lease and makes no new one. `priority`: of the
    session's turns while the lease lasts; higher goes first (null: 0). `returns_in`: seconds until the session
    is needed again (null: when the lease ends); its KV is restored shortly before.

    A `returns_in` with a `ttl` of 0 is a hint without a lease, and costs no budget: of the sessions without a
    lease, the one that is needed last loses its KV first. Values out of range are clipped, and the answer says
    so.
    """

    priority: int | None = None
    ttl: float | None = None
    returns_in: float | None = None


class SessionStage(ClientFrame, frozen=True, tag="session.stage"):
    """Restore the session's KV to the device now, and compute what no tier has, because its next turn comes
    soon (ours). Answered by `session.staged` when that is done, or after 10 seconds with what is there. Refused
    while a response writes the conversation."""


class SessionSettle(ClientFrame, frozen=True, tag="session.settle"):
    """Offload the session's KV to `tier` now and free it on the device, because its next turn is far (ours).
    Answered by `session.settled` when that is done, or after 10 seconds with what is there. Refused while a
    response writes the conversation."""

    tier: Literal["host", "disk"] = "disk"


class SessionBlocks(ClientFrame, frozen=True, tag="session.blocks"):
    """Ask where the blocks of the session's KV lie (ours). Nothing moves; it may be asked while a response
    runs."""


# --- edits of a session, and its fork tree: ours, except for `conversation.item.truncate` ---


class Heard(Given, kw_only=True, frozen=True):
    """A point in a spoken message: at `ms` milliseconds of its audio the first `text_end` characters of its
    text had been spoken."""

    ms: Annotated[int, Meta(ge=0)]
    text_end: Annotated[int, Meta(ge=0)]


class ItemTruncate(ClientFrame, frozen=True, tag="conversation.item.truncate"):
    """Cut a message of the model after what the user has heard of it: its first `text_end` characters stay
    (ours; Unicode code points). If its response still runs, that is cancelled first.

    `audio_end_ms`, the standard's field, says at which millisecond of the audio the user stopped it. As there
    is no audio here, `timing` (ours) has to say what was spoken when; without `timing` no text is cut, and a
    running response is cancelled all the same. `text_end` goes before `audio_end_ms`. The answer,
    `conversation.item.truncated`, says where the message ends.
    """

    item_id: Identifier
    content_index: Annotated[int, Meta(ge=0)] = 0
    text_end: Annotated[int, Meta(ge=0)] | None = None
    audio_end_ms: Annotated[int, Meta(ge=0)] | None = None
    timing: Annotated[list[Heard], Meta(max_length=65536)] | None = None


class SessionRewind(ClientFrame, frozen=True, tag="session.rewind"):
    """Remove the end of the conversation. `to`: the id of the item that becomes the last one; or `root`: all
    items go; or a number of tokens that stay, counted from the beginning as `usage` counts them, which must end
    in a reply or at its beginning or end. Answered by `session.rewound`. Refused while a response writes the
    conversation."""

    to: Identifier | Annotated[int, Meta(ge=0)]


class ForkCompaction(Given, kw_only=True, frozen=True, omit_defaults=True):
    """How a fork's context is shortened: `summary` stands for all turns but the last `turns`
    ones."""

    summary: MessageItem
    turns: Annotated[int, Meta(ge=0)] = 0


class SessionFork(ClientFrame, frozen=True, tag="session.fork"):
    """Make `children` new sessions with this one's history, up to now or up to and with the item `at`. This
    session stays as it is. Answered by `session.forked`.

    If a response runs, a child has as much of the reply as has come; for the child it ends there. With
    `compact` a child's context begins with a summary. The items that the summary stands for stay in the child's
    conversation, but its model does not read them.

    `adapter`: the name of the adapter (LoRA) that the children are computed with; null: with none. Absent: with
    that of this session. Children with another one compute the history again.
    """

    at: Identifier | None = None
    children: Annotated[int, Meta(ge=1, le=64)] = 1
    compact: ForkCompaction | None = None
    adapter: AdapterName | UnsetType | None = UNSET


class SessionTree(ClientFrame, frozen=True, tag="session.tree"):
    """List the sessions of this one's fork tree: all that were forked from one first session, directly or
    through other forks. Answered by `session.tree.listed`, with at most `limit` sessions: those behind the
    session `after`, which is the `next` of the page before (null: from the first)."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Identifier | None = None


class SessionName(ClientFrame, frozen=True, tag="session.name"):
    """Name this session in its fork tree (`session.tree`); an empty name removes the name. Answered by
    `session.named`.

    The name is kept in Unicode's normal form C. A name that another session of the tree has is refused.
    """

    name: Annotated[str, Meta(max_length=128)]


class SessionPrune(ClientFrame, frozen=True, tag="session.prune"):
    """Delete another session of this one's fork tree, with the id `session`: what runs in it is cancelled, it
    leaves its socket, and its handles open nothing any more. Answered by `session.pruned`.

    What it shares with other sessions stays, and so do its own forks.
    """

    session: Identifier


class ResponseSteer(ClientFrame, frozen=True, tag="response.steer"):
    """End the running response in order (`incomplete`, for the reason `steered`; its text stays), add the items
    of `input` after it, and begin the next response. `response`: fields that replace the session's
    configuration for that response alone.

    If none runs, the items are added and a response begins. Answered by `response.steer.accepted`; the
    `response.created` of the next response follows.
    """

    input: Annotated[list[AnyItem], Meta(min_length=1, max_length=64)]
    response: ResponseParams | None = None


class SessionAttach(ClientFrame, frozen=True, tag="session.attach"):
    """Add a further session to this socket: the one that the handle `session` opens (ours). Answered by
    `session.resumed`.

    From then on each server event on the socket has the id of its session in `session_id`. `last_event`: the
    `event_id` of the last event of that session that the client received; the server sends those after it
    again. Null: it sends the events of a running response again, from the first.
    """

    session: Handle
    last_event: EventId | None = None


class SessionDetach(ClientFrame, frozen=True, tag="session.detach"):
    """Take the session `session_id` (null: the socket's own) off this socket. It is not deleted: its handle
    resumes it. Answered by `session.detached`."""


_Items: TypeAlias = SessionUpdate | ItemCreate | ItemRetrieve | ItemDelete
_Responses: TypeAlias = ResponseCreate | ResponseCancel
_Text: TypeAlias = TextAppend | TextReplace | TextClear | TextCommit
_KV: TypeAlias = SessionResume | SessionLease | SessionStage | SessionSettle | SessionBlocks
_Tree: TypeAlias = ItemTruncate | SessionRewind | SessionFork | SessionTree | SessionName | SessionPrune
_Socket: TypeAlias = ResponseSteer | SessionAttach | SessionDetach
ClientEvent: TypeAlias = _Items | _Responses | _Text | _KV | _Tree | _Socket
