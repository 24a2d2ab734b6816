"""Events that the server sends; each has an `event_id` of its own."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from .items import AnyItem
from .response import Response
from .sampling import TokenLogprob
from .session import SessionResource


class ServerFrame(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Base of server events. `session_id` (ours): its session, set once a socket has had several."""

    event_id: str
    session_id: str | UnsetType = UNSET

    @property
    def type(self) -> str:
        """The event's name on the wire."""
        return str(self.__struct_config__.tag)


class OwnFrame(ServerFrame, frozen=True):
    """Base of events that are not in the standard. A client of the standard skips them."""


# --- session and conversation ---


class SessionCreated(ServerFrame, frozen=True, tag="session.created"):
    """The first event on each connection. `handle` opens the session again (ours)."""

    session: SessionResource
    handle: str | UnsetType = UNSET


class SessionResumed(OwnFrame, frozen=True, tag="session.resumed"):
    """Answers `session.resume` (ours): the session as it is, and a new handle for the next time.

    `last_client_event` is the `event_id` of the last client event that was received: later ones have to be sent
    again. `reopened`: the session comes from the journal, and answers that were on their way are lost: an event
    without an answer is answered when it is sent again. `running`: ids of the responses that have not ended.
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
    """The second event on each connection."""

    conversation: ConversationResource


class ItemAdded(ServerFrame, frozen=True, tag="conversation.item.added"):
    """An item was added to the conversation, after `previous_item_id` (null: it is the first)."""

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


# --- streamed text: ours, not in the standard ---


class TextCommitted(OwnFrame, frozen=True, tag="input_text_buffer.committed"):
    """Answers `input_text_buffer.commit`; the item follows as `conversation.item.added` and `.done`.

    `prefilled_tokens`: its tokens that were prefilled, or handed to the engine, while it came. `left_tokens`:
    the others, with what the template puts before the reply. `call_id`: set where it is a tool's output.
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
    """The end of a response, with all its output, its usage and its KV receipt.

    `handle` opens the session again (ours).
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
    """The item is final: completed, or incomplete where the response was cut."""

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
    """More text. `logprobs`: of the tokens since the last delta, where `top_logprobs` asks for them."""

    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class TextDone(ContentFrame, frozen=True, tag="response.output_text.done"):
    """The part's whole text, and the `logprobs` of all its deltas."""

    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ReasoningDelta(OwnFrame, frozen=True, tag="response.reasoning_text.delta"):
    """More of the model's reasoning text (ours in Realtime). It belongs to no item."""

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
    """The complete call."""

    name: str
    arguments: str


# --- errors ---


class ErrorDetails(msgspec.Struct, kw_only=True, frozen=True):
    """An error. `event_id` is that of the client event at fault, where it had one."""

    type: str
    code: str | None
    message: str
    param: str | None = None
    event_id: str | None = None


class ErrorEvent(ServerFrame, frozen=True, tag="error"):
    """A client event was refused, or the server failed. The session goes on unless the socket closes."""

    error: ErrorDetails


# --- ours, not in the standard ---


class SessionRecovered(OwnFrame, frozen=True, tag="session.recovered"):
    """The engine was restarted, and the session goes on; for `lost_ms` milliseconds there was no engine."""

    lost_ms: float


class ServerGoingAway(OwnFrame, frozen=True, tag="server.going_away", omit_defaults=True):
    """The server takes no new work. Responses have `seconds` to end, then the socket closes with 1012.

    `handle` opens the session again; null where it cannot be resumed.
    """

    seconds: float
    handle: str | None = None


class SessionLeased(OwnFrame, frozen=True, tag="session.leased"):
    """Answers `session.lease`: what is granted. KV of `tokens` tokens is kept on the device, of `host_tokens`
    in the tiers below; `priority`, `ttl` and `returns_in` (seconds from now) are the values in force.

    `clipped`: a value is lower than asked for, or the budget does not cover the whole session. `denied`:
    nothing is granted.
    """

    status: Literal["granted", "clipped", "denied"]
    priority: int
    ttl: float
    returns_in: float
    tokens: int
    host_tokens: int


class SessionStaged(OwnFrame, frozen=True, tag="session.staged"):
    """Answers `session.stage`: KV of `tokens` tokens is on the device, after `ms` milliseconds.

    `source` (`from` on the wire): the slowest place that some of it came from.
    """

    source: Literal["device", "host", "disk", "recomputed"] = msgspec.field(name="from")
    tokens: int
    ms: float


class SessionSettled(OwnFrame, frozen=True, tag="session.settled"):
    """Answers `session.settle`: KV of `tokens` tokens is kept, some of it in `tier`, none below it, after `ms`
    milliseconds."""

    tier: Literal["device", "host", "disk"]
    tokens: int
    ms: float


# --- answers to edits of a session, and its fork tree ---


class ItemTruncated(ServerFrame, frozen=True, tag="conversation.item.truncated"):
    """Answers `conversation.item.truncate`, after the `response.done` of a running response.

    `text_end`: the characters that are left (ours).
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int = 0
    text_end: int | UnsetType = UNSET


class SessionRewound(OwnFrame, frozen=True, tag="session.rewound"):
    """Answers `session.rewind`. `item_id`: the last item now (null: there is none). `tokens`: how many tokens
    are left, those of all remaining turns."""

    item_id: str | None
    tokens: int


class Fork(msgspec.Struct, kw_only=True, frozen=True):
    """A new session that was forked, and the handle that opens it."""

    id: str
    handle: str


class SessionForked(OwnFrame, frozen=True, tag="session.forked"):
    """Answers `session.fork`."""

    sessions: list[Fork]


class Relative(msgspec.Struct, kw_only=True, frozen=True):
    """A session of a fork tree. `parent`: the session it was forked from, which may be deleted (null: none).

    `open`: the server has it in memory, with `items` items and `tokens` tokens; else both are null.
    """

    id: str
    parent: str | None
    name: str = ""
    open: bool = False
    items: int | None = None
    tokens: int | None = None


class SessionTreeListed(OwnFrame, frozen=True, tag="session.tree.listed"):
    """Answers `session.tree`: parents stand before their children.

    `has_more`: the next page begins `after` the session `next`.
    """

    sessions: list[Relative]
    has_more: bool = False
    next: str | None = None


class SessionNamed(OwnFrame, frozen=True, tag="session.named"):
    """Answers `session.name`: the name, as it is kept."""

    name: str


class SessionPruned(OwnFrame, frozen=True, tag="session.pruned"):
    """Answers `session.prune`: `session` is deleted."""

    session: str


class SteerAccepted(OwnFrame, frozen=True, tag="response.steer.accepted"):
    """Answers `response.steer`: `response_id` ends for it (null: none ran)."""

    response_id: str | None


class SessionDetached(OwnFrame, frozen=True, tag="session.detached"):
    """The session `session_id` has left this socket: it was detached, or a newer socket has it now."""


_Session: TypeAlias = SessionCreated | SessionResumed | SessionUpdated
_Items: TypeAlias = ConversationCreated | ItemAdded | ItemDone | ItemRetrieved | ItemDeleted
_Text: TypeAlias = TextCommitted | TextCleared
_Response: TypeAlias = ResponseCreated | ResponseDone | OutputItemAdded | OutputItemDone
_Content: TypeAlias = ContentPartAdded | ContentPartDone | TextDelta | TextDone | ReasoningDelta
_Calls: TypeAlias = ArgumentsDelta | ArgumentsDone
_Faults: TypeAlias = ErrorEvent | SessionRecovered | ServerGoingAway
_KV: TypeAlias = SessionLeased | SessionStaged | SessionSettled
_Edits: TypeAlias = ItemTruncated | SessionRewound
_Tree: TypeAlias = SessionForked | SessionTreeListed | SessionNamed | SessionPruned
_Socket: TypeAlias = SteerAccepted | SessionDetached
ServerEvent: TypeAlias = (
    _Session | _Items | _Text | _Response | _Content | _Calls | _Faults | _KV | _Edits | _Tree | _Socket
)
