"""Events the server sends; each has an `event_id` of its own. Their order is the gateway's to keep."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from .events import OwnFrame, ServerFrame
from .items import AnyItem
from .response import Response
from .sampling import TokenLogprob
from .session import SessionResource

# --- session and conversation ---


class SessionCreated(ServerFrame, frozen=True, tag="session.created"):
    """The first event on every connection. `handle` opens the session again (ours)."""

    session: SessionResource
    handle: str | UnsetType = UNSET


class SessionResumed(OwnFrame, frozen=True, tag="session.resumed"):
    """Answers `session.resume` (ours): the session as it is, and a new handle for the next time.

    `last_client_event` is the `event_id` of the last client event that was received: what was sent after it
    has to be sent again. `reopened`: the session comes from the journal, and acknowledgements that were on
    their way are lost: events without an answer are answered again when they are sent again. `running`: ids of
    the responses whose end is still to come.
    """

    session: SessionResource
    handle: str
    last_client_event: str | None = None
    reopened: bool = False
    running: list[str] = msgspec.field(default_factory=list)


class SessionUpdated(ServerFrame, frozen=True, tag="session.updated"):
    """The whole configuration after a `session.update`."""

    session: SessionResource


class ConversationResource(msgspec.Struct, kw_only=True, frozen=True):
    """The default conversation."""

    id: str
    object: Literal["realtime.conversation"] = "realtime.conversation"


class ConversationCreated(ServerFrame, frozen=True, tag="conversation.created"):
    """The second event on every connection."""

    conversation: ConversationResource


class ItemAdded(ServerFrame, frozen=True, tag="conversation.item.added"):
    """An item stands in the conversation, after `previous_item_id` (null: it is the first)."""

    item: AnyItem
    previous_item_id: str | None


class ItemDone(ServerFrame, frozen=True, tag="conversation.item.done"):
    """The item is final."""

    item: AnyItem
    previous_item_id: str | None


class ItemRetrieved(ServerFrame, frozen=True, tag="conversation.item.retrieved"):
    """Answers `conversation.item.retrieve`."""

    item: AnyItem


class ItemDeleted(ServerFrame, frozen=True, tag="conversation.item.deleted"):
    """Answers `conversation.item.delete`."""

    item_id: str


# --- text on its way: ours, no standard has it ---


class TextCommitted(OwnFrame, frozen=True, tag="input_text_buffer.committed"):
    """Answers `input_text_buffer.commit`; the item follows as `conversation.item.added` and `.done`.

    `prefilled_tokens`: tokens of it that were computed, or handed over to be, while it came. `left_tokens`: the
    others, with what the template puts before the reply. `call_id`: of the call, where it is a tool's output.
    """

    item_id: str
    prefilled_tokens: int
    left_tokens: int
    call_id: str | UnsetType = UNSET


class TextCleared(OwnFrame, frozen=True, tag="input_text_buffer.cleared"):
    """Answers `input_text_buffer.clear`."""


# --- a response ---


class ResponseCreated(ServerFrame, frozen=True, tag="response.created"):
    """A response began; `response.done` always follows."""

    response: Response


class ResponseDone(ServerFrame, frozen=True, tag="response.done"):
    """The response's end, whatever it was, with all its output, its usage and what its KV cost.

    `handle` is the session's current one (ours).
    """

    response: Response
    handle: str | UnsetType = UNSET


class OutputFrame(ServerFrame, frozen=True):
    """An event about one output item of a response."""

    response_id: str
    output_index: int


class OutputItemAdded(OutputFrame, frozen=True, tag="response.output_item.added"):
    """The response has a new item, in progress."""

    item: AnyItem


class OutputItemDone(OutputFrame, frozen=True, tag="response.output_item.done"):
    """The item is final: completed, or incomplete when the response was cut."""

    item: AnyItem


class ContentPart(msgspec.Struct, kw_only=True, frozen=True):
    """A part of an output message."""

    text: str
    type: Literal["text"] = "text"


class ContentFrame(OutputFrame, frozen=True):
    """An event about one part of one output message."""

    item_id: str
    content_index: int


class ContentPartAdded(ContentFrame, frozen=True, tag="response.content_part.added"):
    """An empty part; deltas follow."""

    part: ContentPart


class ContentPartDone(ContentFrame, frozen=True, tag="response.content_part.done"):
    """The part is final."""

    part: ContentPart


class TextDelta(ContentFrame, frozen=True, tag="response.output_text.delta"):
    """More text. `logprobs`, where `top_logprobs` asks for them, of the tokens read since the last delta."""

    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class TextDone(ContentFrame, frozen=True, tag="response.output_text.done"):
    """The part's whole text, and the `logprobs` of all its deltas."""

    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ReasoningDelta(OwnFrame, frozen=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks before it speaks (ours in Realtime): it is part of no item."""

    response_id: str
    delta: str


class ArgumentsFrame(OutputFrame, frozen=True):
    """An event about one tool call."""

    item_id: str
    call_id: str


class ArgumentsDelta(ArgumentsFrame, frozen=True, tag="response.function_call_arguments.delta"):
    """More of the arguments' JSON text."""

    delta: str


class ArgumentsDone(ArgumentsFrame, frozen=True, tag="response.function_call_arguments.done"):
    """The whole call."""

    name: str
    arguments: str


# --- errors ---


class ErrorDetails(msgspec.Struct, kw_only=True, frozen=True):
    """What went wrong; `event_id` is that of the client event at fault, where it had one."""

    type: str
    code: str | None
    message: str
    param: str | None = None
    event_id: str | None = None


class ErrorEvent(ServerFrame, frozen=True, tag="error"):
    """A client event was refused, or the server failed; the session goes on unless the socket closes."""

    error: ErrorDetails


# --- our own: no standard has them ---


class SessionRecovered(OwnFrame, frozen=True, tag="session.recovered"):
    """The engine was restarted under the session, which goes on; `lost_ms` passed without one."""

    lost_ms: float


class ServerGoingAway(OwnFrame, frozen=True, tag="server.going_away", omit_defaults=True):
    """The server takes no new work; replies have `seconds` to end, then the socket closes with 1012.

    `handle`: to come back with, where the session can be resumed.
    """

    seconds: float
    handle: str | None = None


class SessionLeased(OwnFrame, frozen=True, tag="session.leased"):
    """Answers `session.lease`: what is really promised. `tokens` of KV are kept on the device, `host_tokens`
    below it; `priority`, `ttl` and `returns_in` (seconds from now) are those that count.

    `clipped`: some number is less than was asked for, or the budget does not cover the whole session;
    `denied`: nothing is promised.
    """

    status: Literal["granted", "clipped", "denied"]
    priority: int
    ttl: float
    returns_in: float
    tokens: int
    host_tokens: int


class SessionStaged(OwnFrame, frozen=True, tag="session.staged"):
    """Answers `session.stage`: KV of so many `tokens` is on the device, after `ms`.

    `source` (`from` on the wire): the slowest place some of it came from.
    """

    source: Literal["device", "host", "disk", "recomputed"] = msgspec.field(name="from")
    tokens: int
    ms: float


class SessionSettled(OwnFrame, frozen=True, tag="session.settled"):
    """Answers `session.settle`: KV of so many `tokens` is kept, the lowest of it in `tier`, after `ms`."""

    tier: Literal["device", "host", "disk"]
    tokens: int
    ms: float


# --- answers to what only a session can do ---


class ItemTruncated(ServerFrame, frozen=True, tag="conversation.item.truncated"):
    """Answers `conversation.item.truncate`, after the reply's `response.done` where that ran.

    `text_end`: the characters that are left (ours).
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int = 0
    text_end: int | UnsetType = UNSET


class SessionRewound(OwnFrame, frozen=True, tag="session.rewound"):
    """Answers `session.rewind`: `item_id` is the last item now (null: there is none), and what stays of the
    turns is `tokens` long."""

    item_id: str | None
    tokens: int


class Fork(msgspec.Struct, kw_only=True, frozen=True):
    """A session that was forked off, and the handle that opens it."""

    id: str
    handle: str


class SessionForked(OwnFrame, frozen=True, tag="session.forked"):
    """Answers `session.fork`."""

    sessions: list[Fork]


class Relative(msgspec.Struct, kw_only=True, frozen=True):
    """A session of a tree. `parent`: whom it was forked from (null: it is the first), who may be pruned by now.

    `open`: the server has it in memory, where it has so many `items` and `tokens`; else these are null.
    """

    id: str
    parent: str | None
    name: str = ""
    open: bool = False
    items: int | None = None
    tokens: int | None = None


class SessionTreeListed(OwnFrame, frozen=True, tag="session.tree.listed"):
    """Answers `session.tree`: parents stand before their children.

    `has_more`: there are more, which come `after` the session `next`.
    """

    sessions: list[Relative]
    has_more: bool = False
    next: str | None = None


class SessionNamed(OwnFrame, frozen=True, tag="session.named"):
    """Answers `session.name`: the name as it is kept."""

    name: str


class SessionPruned(OwnFrame, frozen=True, tag="session.pruned"):
    """Answers `session.prune`: `session` is gone."""

    session: str


class SteerAccepted(OwnFrame, frozen=True, tag="response.steer.accepted"):
    """Answers `response.steer`: `response_id` has been ended for it (null: none ran)."""

    response_id: str | None


class SessionDetached(OwnFrame, frozen=True, tag="session.detached"):
    """The session `session_id` is on this socket no more: it was detached, or goes on on a newer one."""


ServerEvent: TypeAlias = (
    SessionCreated
    | SessionResumed
    | SessionUpdated
    | ConversationCreated
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | TextCommitted
    | TextCleared
    | ResponseCreated
    | ResponseDone
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
    | SessionRecovered
    | ServerGoingAway
    | SessionLeased
    | SessionStaged
    | SessionSettled
    | ItemTruncated
    | SessionRewound
    | SessionForked
    | SessionTreeListed
    | SessionNamed
    | SessionPruned
    | SteerAccepted
    | SessionDetached
)
