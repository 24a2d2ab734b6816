"""Events that the server sends, a class for each. "Ours" marks what OpenAI's Realtime standard does not
have."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from .items import AnyItem
from .response import Response
from .sampling import TokenLogprob
from .session import SessionResource


class ServerFrame(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Base of server events. `event_id`: unique in its session; `session.resume` names the last one that was
    received. `session_id` (ours): the session that the event is of; absent until a further session is attached
    to the socket."""

    event_id: str
    session_id: str | UnsetType = UNSET

    @property
    def type(self) -> str:
        """The event's name on the wire, such as `response.done`."""
        return str(self.__struct_config__.tag)


class OwnFrame(ServerFrame, frozen=True):
    """Base of events that are ours: the standard does not have them, and a client that knows the standard alone
    skips them."""


# --- session and conversation ---


class SessionCreated(ServerFrame, frozen=True, tag="session.created"):
    """The first event on a connection with a new session, which needs no request. `session`: its configuration.
    `handle` (ours): a secret with which `session.resume` opens the session again."""

    session: SessionResource
    handle: str | UnsetType = UNSET


class SessionResumed(OwnFrame, frozen=True, tag="session.resumed"):
    """Answers `session.resume` and `session.attach` (ours): the session's configuration, and a new `handle` for
    the next time.

    `last_client_event`: the `event_id` of the last client event that the server has (null: none); the client
    has to send those after it again. `reopened`: since the client was here, the session was closed and read
    again from the journal, for example by a new server process. Answers that were on their way are lost then;
    an event that got no answer is answered if the client sends it again. `running`: ids of the responses that
    have not ended.
    """

    session: SessionResource
    handle: str
    last_client_event: str | None = None
    reopened: bool = False
    running: list[str] = msgspec.field(default_factory=list)


class SessionUpdated(ServerFrame, frozen=True, tag="session.updated"):
    """Answers `session.update`: the whole configuration, as it is in force now."""

    session: SessionResource


class ConversationResource(msgspec.Struct, kw_only=True, frozen=True):
    """The one conversation of a session; `id` is its id."""

    id: str
    object: Literal["realtime.conversation"] = "realtime.conversation"


class ConversationCreated(ServerFrame, frozen=True, tag="conversation.created"):
    """The second event on a connection with a new session: names the conversation that the session has."""

    conversation: ConversationResource


class ItemAdded(ServerFrame, frozen=True, tag="conversation.item.added"):
    """An item was added to the conversation, after the item `previous_item_id` (null: it is the first). An item
    of a reply has no content yet, and the status `in_progress`."""

    item: AnyItem
    previous_item_id: str | None


class ItemDone(ServerFrame, frozen=True, tag="conversation.item.done"):
    """The item is complete, with all its content. `previous_item_id`: the item before it in the conversation
    (null: it is the first)."""

    item: AnyItem
    previous_item_id: str | None


class ItemRetrieved(ServerFrame, frozen=True, tag="conversation.item.retrieved"):
    """Answers `conversation.item.retrieve`: the item, as the server has it. `previous_item_id` (ours): the item
    before it in the conversation (null: it is the first)."""

    item: AnyItem
    previous_item_id: str | None = None


class ItemDeleted(ServerFrame, frozen=True, tag="conversation.item.deleted"):
    """The item `item_id` is no longer in the conversation. Answers `conversation.item.delete`; it is also sent
    for each item of a response that failed, because those are taken back."""

    item_id: str


# --- streamed text: ours, not in the standard ---


class TextCommitted(OwnFrame, frozen=True, tag="input_text_buffer.committed"):
    """Answers `input_text_buffer.commit`: the text became the item `item_id`, which follows as
    `conversation.item.added` and `.done`.

    `prefilled_tokens`: how many of its tokens the engine was given before the commit, while the text came.
    `left_tokens`: the others, with those that the template puts before the reply. `call_id`: the tool call that
    it is the output of; absent for a message.
    """

    item_id: str
    prefilled_tokens: int
    left_tokens: int
    call_id: str | UnsetType = UNSET


class TextCleared(OwnFrame, frozen=True, tag="input_text_buffer.cleared"):
    """Answers `input_text_buffer.clear`: the input buffer is empty."""


# --- a response ---


class ResponseCreated(ServerFrame, frozen=True, tag="response.created"):
    """A response began: answers `response.create`, and comes after `response.steer.accepted`. A `response.done`
    always follows."""

    response: Response


class ResponseDone(ServerFrame, frozen=True, tag="response.done"):
    """The end of a response, in whatever way it ended (`response.status`): its whole output (none if `events`
    is "brief"), its usage, and how much KV it computed and found.

    `handle` (ours): a secret with which `session.resume` opens the session again.
    """

    response: Response
    handle: str | UnsetType = UNSET


class OutputFrame(ServerFrame, frozen=True):
    """Base of events about one output item of the response `response_id`. `output_index`: the item's index in
    the output, from 0."""

    response_id: str
    output_index: int


class OutputItemAdded(OutputFrame, frozen=True, tag="response.output_item.added"):
    """The response begins a new item. It has no content yet, and the status `in_progress`."""

    item: AnyItem


class OutputItemDone(OutputFrame, frozen=True, tag="response.output_item.done"):
    """Nothing more comes of the item, which is whole in here. Its status is `completed`, or `incomplete` if the
    response was cut in it."""

    item: AnyItem


class ContentPart(msgspec.Struct, kw_only=True, frozen=True):
    """A part of an output message, as the `response.content_part` events show it."""

    text: str
    type: Literal["text"] = "text"


class ContentFrame(OutputFrame, frozen=True):
    """Base of events about one part of the output message `item_id`. `content_index`: the part's index in the
    message, 0."""

    item_id: str
    content_index: int


class ContentPartAdded(ContentFrame, frozen=True, tag="response.content_part.added"):
    """The message's part begins: its text is empty, and `response.output_text.delta` events follow."""

    part: ContentPart


class ContentPartDone(ContentFrame, frozen=True, tag="response.content_part.done"):
    """The message's part is complete: `part` has its whole text."""

    part: ContentPart


class TextDelta(ContentFrame, frozen=True, tag="response.output_text.delta"):
    """More text of a message: `delta` comes behind what came before. `logprobs`: of the tokens since the last
    delta; absent unless `top_logprobs` asks for them."""

    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class TextDone(ContentFrame, frozen=True, tag="response.output_text.done"):
    """The text of a message's part is complete. `text`: all of it. `logprobs`: those of all its deltas; absent
    unless `top_logprobs` asks for them."""

    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ReasoningDelta(OwnFrame, frozen=True, tag="response.reasoning_text.delta"):
    """More of the text in which the model reasons before it answers (of the Responses API; ours in Realtime).
    It belongs to no output item."""

    response_id: str
    delta: str


class ArgumentsFrame(OutputFrame, frozen=True):
    """Base of events about the arguments of one tool call. `item_id`: the call's item; `call_id`: the id that
    its output has to name."""

    item_id: str
    call_id: str


class ArgumentsDelta(ArgumentsFrame, frozen=True, tag="response.function_call_arguments.delta"):
    """More of the JSON text of a call's arguments: `delta` comes behind what came before."""

    delta: str


class ArgumentsDone(ArgumentsFrame, frozen=True, tag="response.function_call_arguments.done"):
    """No more of a call comes: the `name` of the tool, and all of its `arguments` as JSON text. The text breaks
    off if the response was cut in the call."""

    name: str
    arguments: str


# --- errors ---


class ErrorDetails(msgspec.Struct, kw_only=True, frozen=True):
    """What went wrong. `type` and `code`: for programs; `message`: for people; `param`: the path of the field
    at fault; `event_id`: of the client event at fault; `retry_after` (ours): seconds after which the same event
    may be served. The last three are null if there is none."""

    type: str
    code: str | None
    message: str
    param: str | None = None
    event_id: str | None = None
    retry_after: float | UnsetType = UNSET


class ErrorEvent(ServerFrame, frozen=True, tag="error"):
    """A client event was refused and changed nothing, or the server failed. The session goes on unless the
    socket closes."""

    error: ErrorDetails


class RateLimit(msgspec.Struct, kw_only=True, frozen=True):
    """One limit of the client's API key per minute: how much is left of it, and in how many seconds all is
    there again if nothing is used."""

    name: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_seconds: float


class RateLimitsUpdated(ServerFrame, frozen=True, tag="rate_limits.updated"):
    """The limits of the client's API key, when a response begins and when it has ended. A key without limits
    gets none of these."""

    rate_limits: list[RateLimit]


# --- ours, not in the standard ---


class SessionRecovered(OwnFrame, frozen=True, tag="session.recovered"):
    """The engine was restarted, and the session and its running responses go on. `lost_ms`: for how many
    milliseconds there was no engine."""

    lost_ms: float


class ServerGoingAway(OwnFrame, frozen=True, tag="server.going_away", omit_defaults=True):
    """The server shuts down and takes no new responses. Running ones have `seconds` to end, then the socket
    closes with the code 1012.

    `handle`: a secret with which `session.resume` opens the session again; null if it cannot be resumed.
    """

    seconds: float
    handle: str | None = None


class SessionLeased(OwnFrame, frozen=True, tag="session.leased"):
    """Answers `session.lease`: what is granted. KV of the session's first `tokens` tokens is kept on the
    device, of its first `host_tokens` in the host tier. `priority`, `ttl` and `returns_in` (seconds from now)
    are the values in force.

    `status` `clipped`: a value is lower than asked for, or the budget does not cover the whole session.
    `denied`: there is no lease, and only `returns_in` counts, as a hint.
    """

    status: Literal["granted", "clipped", "denied"]
    priority: int
    ttl: float
    returns_in: float
    tokens: int
    host_tokens: int


class SessionStaged(OwnFrame, frozen=True, tag="session.staged"):
    """Answers `session.stage`: KV of `tokens` tokens is on the device now. `ms`: milliseconds that it took.

    `source` (`from` on the wire): `disk` if some of it came from the disk tier, else `host` if some came from
    the host tier, else `recomputed` if some had to be computed again, else `device`: all of it was there.
    """

    source: Literal["device", "host", "disk", "recomputed"] = msgspec.field(name="from")
    tokens: int
    ms: float


class SessionSettled(OwnFrame, frozen=True, tag="session.settled"):
    """Answers `session.settle`. `tier`: the lowest tier that holds some of the session's KV now. `tokens`: how
    many tokens have KV in all tiers together. `ms`: milliseconds that it took."""

    tier: Literal["device", "host", "disk"]
    tokens: int
    ms: float


class BlockCounts(msgspec.Struct, kw_only=True, frozen=True):
    """Blocks by the fastest tier that has them; `none`: in no tier. These four make up `total`.

    `shared`: how many of them another open session holds too.
    """

    device: int
    host: int
    disk: int
    shared: int
    none: int
    total: int


class BlockRun(msgspec.Struct, kw_only=True, frozen=True):
    """`count` consecutive blocks in one tier. `shared`: another open session holds the same blocks on the
    device, by a fork or because it begins with the same text."""

    tier: Literal["device", "host", "disk", "none"]
    shared: bool
    count: int


class SessionBlocksListed(OwnFrame, frozen=True, tag="session.blocks.listed"):
    """Answers `session.blocks`: where the blocks of the session's `tokens` tokens lie, `block_tokens` in each.

    `runs`: all blocks, in the order of their tokens. The KV of blocks in no tier is computed when it is needed.
    """

    blocks: BlockCounts
    runs: list[BlockRun]
    tokens: int
    block_tokens: int


# --- answers to edits of a session, and its fork tree ---


class ItemTruncated(ServerFrame, frozen=True, tag="conversation.item.truncated"):
    """Answers `conversation.item.truncate`; if the response of the item ran, after its `response.done`.

    `text_end` (ours): how many characters of the message are left. `content_index` and `audio_end_ms` are those
    of the request.
    """

    item_id: str
    content_index: int = 0
    audio_end_ms: int = 0
    text_end: int | UnsetType = UNSET


class SessionRewound(OwnFrame, frozen=True, tag="session.rewound"):
    """Answers `session.rewind`. `item_id`: the item that is the last one now (null: no item is left). `tokens`:
    how many tokens the remaining turns have together."""

    item_id: str | None
    tokens: int


class Fork(msgspec.Struct, kw_only=True, frozen=True):
    """A session that `session.fork` made: its `id`, and the `handle` with which `session.resume` opens it."""

    id: str
    handle: str


class SessionForked(OwnFrame, frozen=True, tag="session.forked"):
    """Answers `session.fork`: the new sessions, as many as were asked for."""

    sessions: list[Fork]


class Relative(msgspec.Struct, kw_only=True, frozen=True):
    """A session of a fork tree. `parent`: the id of the session that it was forked from, which may be deleted
    (null: it is the first). `name`: empty if it has none.

    `open`: the server has it in memory, with `items` items and `tokens` tokens; if not, both are null.
    """

    id: str
    parent: str | None
    name: str = ""
    open: bool = False
    items: int | None = None
    tokens: int | None = None


class SessionTreeListed(OwnFrame, frozen=True, tag="session.tree.listed"):
    """Answers `session.tree`: a page of the tree's sessions, in which parents stand before their children.

    `has_more`: there is a further page; ask for it with `next` as the `after` of the next `session.tree`.
    """

    sessions: list[Relative]
    has_more: bool = False
    next: str | None = None


class SessionNamed(OwnFrame, frozen=True, tag="session.named"):
    """Answers `session.name`: the name as it is kept, in Unicode's normal form C; empty: it has none."""

    name: str


class SessionPruned(OwnFrame, frozen=True, tag="session.pruned"):
    """Answers `session.prune`: the session with the id `session` is deleted."""

    session: str


class SteerAccepted(OwnFrame, frozen=True, tag="response.steer.accepted"):
    """Answers `response.steer`, before the next response begins: the running response `response_id` ends
    because of it (null: none ran)."""

    response_id: str | None


class SessionDetached(OwnFrame, frozen=True, tag="session.detached"):
    """The session `session_id` has left this socket. `reason`, unless the client detached it: `session_moved`,
    another socket has it now, or `session_deleted`."""

    reason: str | UnsetType = UNSET


_Session: TypeAlias = SessionCreated | SessionResumed | SessionUpdated
_Items: TypeAlias = ConversationCreated | ItemAdded | ItemDone | ItemRetrieved | ItemDeleted
_Text: TypeAlias = TextCommitted | TextCleared
_Response: TypeAlias = ResponseCreated | ResponseDone | OutputItemAdded | OutputItemDone
_Content: TypeAlias = ContentPartAdded | ContentPartDone | TextDelta | TextDone | ReasoningDelta
_Calls: TypeAlias = ArgumentsDelta | ArgumentsDone
_Faults: TypeAlias = ErrorEvent | SessionRecovered | ServerGoingAway | RateLimitsUpdated
_KV: TypeAlias = SessionLeased | SessionStaged | SessionSettled | SessionBlocksListed
_Edits: TypeAlias = ItemTruncated | SessionRewound
_Tree: TypeAlias = SessionForked | SessionTreeListed | SessionNamed | SessionPruned
_Socket: TypeAlias = SteerAccepted | SessionDetached
ServerEvent: TypeAlias = (
    _Session | _Items | _Text | _Response | _Content | _Calls | _Faults | _KV | _Edits | _Tree | _Socket
)
