"""Replay: a session's history and responses from its operations, and snapshots of many operations in one.

Replaying an operation makes the same edit again, so the same items, replies and nodes are in the same
order, and an interrupted response has its slot. `snapshot_of` makes one record of a session in which no
response runs, and `restore` is the way back. Pure. Knows nothing of stores or of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from ...runtime.verbs import Sampling, TokenLogprob
from .. import errors
from ..conversation.history import ContextGap, History, Prepared, RunningTurn
from ..conversation.input_text_buffer import InputTextBuffer
from ..conversation.items import Item
from ..conversation.tree import Draft, Script, Segment, TurnNode, TurnReply, matched, turns_of
from ..errors import RecordDamaged, SessionError
from ..text.language import Language
from ..token_ids import Ids, bytes_of, ids_from
from ..turn.events import EndReason, LeftOut, ReplyDone, ReplyEvent, ReplyStarted, ReplyStatus
from ..turn.reply_reader import ReplyReader
from ..turn.request import TurnRequest
from . import records
from .records import AnyOperation, Begun, Ended, SessionSnapshot, Span

MANY_ITEMS = 1 << 30
"""Stands for no limit of items. The operations were checked against the limit when they were made."""


@dataclass(slots=True)
class Past:
    """A response as the journal has it, running when the server ended or over.

    ``note``: bytes of the gateway. ``prepared``: its slot in the history, and its prompt as items. ``said``:
    its token ids so far, as bytes of little-endian int32. ``logprobs``: one for each id, if it reports them.
    ``cut``: the id of a message that is to be cut when it ends, and the characters that stay; None: none is.
    ``ended``: how it ended; None if it was interrupted. ``left_out``: what its prompt left out.
    """

    id: str
    request: TurnRequest
    note: bytes
    prepared: Prepared
    said: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cut: tuple[str, int] | None = None
    ended: Ended | None = None
    left_out: LeftOut | None = None

    @property
    def ids(self) -> Ids:
        """The token ids of its reply so far."""
        return ids_from(bytes(self.said))


@dataclass(slots=True)
class Replayed:
    """A session after replay. ``last``: its last response that joins the history; ``responses`` counts these.

    ``orphans``: interrupted responses out of band, by id. ``heard``: ids of the latest client events, in order.
    ``config``: the gateway's latest configuration, None if it was never changed. ``typed``: streamed input that
    is not an item yet.
    """

    history: History
    heard: deque[str]
    responses: int = 0
    last: Past | None = None
    orphans: dict[str, Begun] = field(default_factory=dict)
    config: bytes | None = None
    typed: InputTextBuffer = field(default_factory=InputTextBuffer)


def replay(operations: Iterable[AnyOperation], *, max_items: int, max_events: int = 1024) -> Replayed:
    """Make a session's history and responses again from all its ``operations``, in order. ``max_items``: the
    most items of the history. ``max_events``: how many ids of client events are kept. Raises ``RecordDamaged``
    if an operation does not fit those before it."""
    replayed = Replayed(History(max_items=max_items), deque(maxlen=max_events))
    try:
        for operation in operations:
            if isinstance(operation, records.Branched):
                # events and responses of the session that this one was forked from are not its own
                heard = deque[str](maxlen=max_events)
                replayed = Replayed(replayed.history, heard, config=replayed.config)
            else:
                _step(replayed, operation)
    except SessionError as fault:
        raise RecordDamaged(f"the journal contradicts itself: {fault.message}") from fault
    return replayed


def condensed(
    operations: Sequence[AnyOperation], *, max_events: int = 1024
) -> tuple[int, SessionSnapshot] | None:
    """Make a snapshot that replaces as many of the first operations as possible: those up to the last point
    where no response runs. Returns how many these are, and the snapshot; None if they are fewer than two, or
    for a stored object (`Noted` operations, which a snapshot cannot hold)."""
    if any(isinstance(operation, records.Noted) for operation in operations):
        return None
    until = quiet(operations)
    if until < 2:
        return None
    return until, snapshot_of(replay(operations[:until], max_items=MANY_ITEMS, max_events=max_events))


def _step(replayed: Replayed, operation: AnyOperation) -> None:
    history = replayed.history
    match operation:
        case SessionSnapshot():
            _begin_from(replayed, operation)
        case records.EventReceived(event=event):
            replayed.heard.append(event)
        case records.Inserted(item=item, previous=previous):
            history.insert(item, previous)
        case records.Deleted(item=""):
            history.drop_silent()
        case records.Deleted(item=item_id):
            history.delete(item_id)
        case records.Typed(start=start, text=text, role=role, item=item_id, call=call):
            replayed.typed = InputTextBuffer(replayed.typed.text[:start] + text, role, item_id, call)
        case records.Configured(preamble=preamble, config=config):
            history.preamble = preamble
            replayed.config = config
        case Begun(writes=False):
            replayed.orphans[operation.response] = operation
        case Begun():
            request = request_from(operation.request)
            replayed.responses += 1
            replayed.last = Past(operation.response, request, operation.note, history.prepare(request))
        case records.Emitted(ids=ids, logprobs=logprobs):
            past = _last(replayed, operation.response)
            past.said += ids
            past.logprobs += logprobs
        case records.Interrupted(response=response, item=item_id, end=end):
            _last(replayed, response).cut = (item_id, end)
        case records.Truncated():
            history.cut(operation)
        case records.Rewound(item=item_id):
            history.rewind(item_id)
        case records.ContextCut(response=response, indexes=indexes, told=told):
            past = _last(replayed, response)
            past.prepared, past.left_out = past.prepared.without(indexes), told
        case records.Compacted(item=item, indexes=indexes):
            history.compact(item, indexes)
        case Ended(response=response):
            if replayed.orphans.pop(response, None) is None:
                _end(history, _last(replayed, response), operation)


def _begin_from(replayed: Replayed, snapshot: SessionSnapshot) -> None:
    if len(replayed.history) or replayed.responses:
        raise RecordDamaged("a snapshot of a session that has begun")
    restore(replayed.history, snapshot)
    replayed.heard.extend(snapshot.heard)
    replayed.responses, replayed.config = snapshot.responses, snapshot.config
    if (typed := snapshot.typed) is not None:
        replayed.typed = InputTextBuffer(typed.text, typed.role, typed.item, typed.call)
    if (last := snapshot.last) is not None:
        # it has ended, so it needs no slot in the history
        nowhere = Prepared(None, Script(snapshot.preamble, ()), aside=False)
        replayed.last = Past(last.response, request_from(last.request), last.note, nowhere)
        replayed.last.said += snapshot.said
        replayed.last.logprobs += snapshot.logprobs
        replayed.last.ended = snapshot.ended


def _last(replayed: Replayed, response: str) -> Past:
    past = replayed.last
    if past is None or past.id != response or past.ended is not None:
        raise RecordDamaged(f"response {response!r} does not run")
    return past


def _end(history: History, past: Past, ended: Ended) -> None:
    past.ended = ended
    turn = past.prepared.turn
    if turn is None:
        raise RecordDamaged(f"response {past.id!r} writes nothing")
    if not ended.kept:
        history.abort_turn(turn)
        return
    if ended.shared is not None:
        past.prepared = past.prepared.rewritten(ended.shared)
        turn = past.prepared.turn
        assert turn is not None, "it had one before"
    reply = TurnReply(ended.items, past.ids, ended.ended)
    if ended.cut is not None:
        reply = reply.up_to(ended.cut, ids_from(ended.tail), ended.items)
    node = ended.spans[-1].node
    history.commit_turn(turn, _draft(turn.script, ended.spans), reply, node, loose=ended.loose)


def _draft(script: Script, spans: tuple[Span, ...]) -> Draft:
    """The prompt, in tokens, of a turn that was committed. ``script``: the prompt as items. ``spans``: the
    tokens of each turn of the script that was rendered again, then of the turn itself. Raises ``RecordDamaged``
    if their number is wrong."""
    parent = script.base
    turns = list(turns_of(script.segments[script.shared :]))
    if len(turns) != len(spans):
        raise RecordDamaged(f"{len(spans)} spans for {len(turns)} turns")
    for (inputs, reply), span in zip(turns, spans, strict=True):
        draft = Draft(parent, inputs, span.keep, ids_from(span.prompt), script.miss)
        if reply is None:
            return draft
        parent = draft.node(reply, span.node)
    raise RecordDamaged("a script without a turn")


def spans_of(script: Script, node: TurnNode) -> tuple[Span, ...]:
    """The prompts of the tree nodes that a turn added, as the journal keeps them, the oldest first: of
    ``node``, the turn's own, and of its ancestors up to the script's ``base``, which was there before."""
    spans: list[Span] = []
    for added in node.ancestry():
        if added is script.base:
            break
        spans.append(Span(node=added.id, keep=added.keep, prompt=bytes_of(added.prompt)))
    return tuple(reversed(spans))


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A turn that joins the history: ``turn``, its ``node`` with the reply, and ``said``, how many token ids
    the reply had before those that say more than its items were taken out. ``loose``: the reply's items alone
    join it."""

    turn: RunningTurn
    node: TurnNode
    said: int
    loose: bool


def ended(response: str, done: ReplyDone, by_itself: bool, kept: KeptTurn | None) -> Ended:
    """The journal's operation for the end of the response with the id ``response``. ``done``: its last event.
    ``by_itself``: its last id is an end token that the model sampled. ``kept``: None if it did not become a
    turn."""
    end = Ended(
        response=response,
        status=done.status,
        reason=done.reason,
        ended=by_itself,
        items=done.items,
        usage=done.usage,
        error=None if done.error is None else fault_of(done.error),
        left_out=done.left_out,
        stopped_by=done.stopped_by,
    )
    if kept is None:
        return end
    turn, reply = kept.turn, kept.node.reply
    sampled = len(reply.ids) - reply.respelled
    return msgspec.structs.replace(
        end,
        kept=True,
        spans=spans_of(turn.script, kept.node),
        shared=turn.script.shared if turn.rewritten else None,
        cut=None if sampled == kept.said else sampled,
        tail=bytes_of(reply.ids[sampled:]),
        loose=kept.loose,
    )


def refused(response: str, fault: BaseException | None) -> Ended:
    """The journal's operation for a response that ended before it began. ``fault``: why it was refused; None:
    it was cancelled."""
    error = fault_of(fault) if isinstance(fault, SessionError) else None
    status = ReplyStatus.CANCELLED if fault is None else ReplyStatus.FAILED
    return Ended(response=response, status=status, reason=EndReason.ERROR, began=False, error=error)


def fault_of(error: SessionError) -> records.Fault:
    """The error as a record for the journal: code, message and field."""
    return records.Fault(code=error.code, message=error.message, param=error.param)


def error_of(fault: records.Fault | None) -> SessionError:
    """The error that the journal keeps as ``fault``. It is a ``TurnFailed`` if the code is unknown or ``fault``
    is None."""
    if fault is None:
        return errors.TurnFailed("The response was cut off")
    kind = SessionError.by_code.get(fault.code, errors.TurnFailed)
    return kind(fault.message, param=fault.param)


def retold(past: Past, language: Language, end_ids: frozenset[int]) -> list[ReplyEvent]:
    """The events of a response that has ended, as they were first sent; empty if it was refused before it
    began. ``end_ids``: the model's end tokens."""
    ended = past.ended
    assert ended is not None, "an interrupted response goes on; its events are not repeated"
    if not ended.began:
        return []
    reader = ReplyReader(language, past.request, end_ids, past.id, past.prepared.script.preamble.tools)
    events = [ReplyStarted(ended.usage.input_tokens), *reader.feed(past.ids.tolist(), past.logprobs)]
    events += reader.finish(cut=ended.status is not ReplyStatus.COMPLETED)
    error = error_of(ended.error) if ended.status is ReplyStatus.FAILED else None
    turn_error = error if isinstance(error, errors.TurnFailed) else None
    done = ReplyDone(
        ended.status,
        ended.reason,
        ended.items,
        ended.usage,
        turn_error,
        ended.left_out,
        ended.stopped_by,
    )
    return [*events, done]


def quiet(operations: Sequence[AnyOperation]) -> int:
    """How many of the first operations there are up to the last point at which no response runs; 0 if there is
    no such point."""
    running: set[str] = set()
    until = 0
    for at, operation in enumerate(operations, 1):
        if isinstance(operation, Begun):
            running.add(operation.response)
        elif isinstance(operation, Ended):
            running.discard(operation.response)
        elif isinstance(operation, records.Branched):
            running.clear()  # they belong to the session it was forked from
        if not running:
            until = at
    return until


class _Tables:
    """Collects a snapshot's tables of items and replies, each object once."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.replies: list[TurnReply] = []
        self._known: dict[int, int] = {}

    def of(self, segment: Segment) -> int:
        """The segment's position in its table: ``n`` for item n, ``-1 - n`` for reply n. A new segment is
        added."""
        if id(segment) not in self._known:
            if isinstance(segment, TurnReply):
                self.replies.append(segment)
                self._known[id(segment)] = -len(self.replies)
            else:
                self.items.append(segment)
                self._known[id(segment)] = len(self.items) - 1
        return self._known[id(segment)]


def snapshot_of(replayed: Replayed) -> SessionSnapshot:
    """One record with the whole state of a session, to replace its operations, and with nothing of what was
    removed from it. Raises ``AssertionError`` if a turn runs."""
    history, tables = replayed.history, _Tables()
    assert not history.busy, "a turn runs"
    entries = tuple(tables.of(segment) for segment in history.entries)
    order = {id(entry): index for index, entry in enumerate(history.entries)}
    head, _ = matched(history.head, history.segments())  # no turn can go on from a later node
    path = () if head is None else tuple(head.ancestry())[::-1]
    nodes = tuple(
        records.KeptNode(
            node=node.id,
            keep=node.keep,
            prompt=bytes_of(node.prompt),
            inputs=tuple(tables.of(item) for item in node.inputs),
            reply=-1 - tables.of(node.reply),
        )
        for node in path
    )
    last, typed = replayed.last, replayed.typed
    begun, ended, said = None, None, b""
    logprobs: tuple[TokenLogprob, ...] = ()
    if last is not None:
        begun = Begun(response=last.id, request=request_form(last.request), note=last.note)
        said, logprobs, ended = bytes(last.said), tuple(last.logprobs), last.ended
    if ended is not None:
        there = {item.id for item in history.items()}
        items = tuple(item for item in ended.items if item.id in there or not ended.kept)
        if len(items) < len(ended.items):
            said, logprobs = b"", ()
        ended = msgspec.structs.replace(ended, items=items, spans=())  # the history has their nodes
    return SessionSnapshot(
        preamble=history.preamble,
        rendered=history.rendered,
        items=tuple(tables.items),
        replies=tuple(
            records.KeptReply(items=reply.items, ids=bytes_of(reply.ids), ended=reply.ended)
            for reply in tables.replies
        ),
        entries=entries,
        nodes=nodes,
        config=replayed.config,
        heard=tuple(replayed.heard),
        typed=records.Typed(start=0, text=typed.text, role=typed.role, item=typed.id, call=typed.call_id),
        responses=replayed.responses,
        last=begun,
        said=said,
        logprobs=logprobs,
        ended=ended,
        gaps=tuple(
            records.KeptGap(
                entries=tuple(order[id(entry)] for entry in gap.entries), since=order.get(id(gap.since))
            )
            for gap in history.gaps
        ),
    )


def restore(history: History, snapshot: SessionSnapshot) -> None:
    """Fill the new, empty ``history`` from a snapshot."""
    replies = [TurnReply(kept.items, ids_from(kept.ids), kept.ended) for kept in snapshot.replies]
    head: TurnNode | None = None
    for kept in snapshot.nodes:
        inputs = tuple(snapshot.items[index] for index in kept.inputs)
        head = TurnNode(head, inputs, kept.keep, ids_from(kept.prompt), replies[kept.reply], kept.node)
    items = snapshot.items
    entries = [items[index] if index >= 0 else replies[-1 - index] for index in snapshot.entries]
    gaps = [
        ContextGap(
            None if gap.since is None else entries[gap.since], tuple(entries[at] for at in gap.entries)
        )
        for gap in snapshot.gaps
    ]
    history.restore(snapshot.preamble, snapshot.rendered, entries, head, gaps)


def request_form(request: TurnRequest) -> dict[str, Any]:
    """A turn's request as plain data for the journal; its sampling parameters are a dict by name, so that later
    versions can add some. `request_from` reads it."""
    form: dict[str, Any] = msgspec.to_builtins(request)
    sampling = request.sampling
    named = {name: msgspec.to_builtins(getattr(sampling, name)) for name in sampling.__struct_fields__}
    return {**form, "sampling": named}


@cache
def _sampling_types() -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(Sampling)}


def request_from(form: dict[str, Any]) -> TurnRequest:
    """The turn's request of which `request_form` made the plain data ``form``. Raises ``RecordDamaged`` if it
    cannot be read."""
    try:
        named = form.get("sampling", {})
        known = _sampling_types()
        sampling = Sampling(
            **{name: msgspec.convert(value, known[name]) for name, value in named.items() if name in known}
        )
        rest = {name: value for name, value in form.items() if name != "sampling"}
        return msgspec.structs.replace(msgspec.convert(rest, TurnRequest), sampling=sampling)
    except (msgspec.MsgspecError, TypeError) as fault:
        raise RecordDamaged(f"a turn's request cannot be read: {fault}") from None
