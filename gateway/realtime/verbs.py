"""A session's verbs on the wire: client events about the session itself. They truncate and rewind its history,
fork it, list, name and prune its fork tree, move its KV between the tiers, and tell where its blocks lie.

A verb that changes the session is answered when the journal has the change; one that concerns KV, when the
engine has answered. A verb that is refused changes nothing.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

import msgspec
from msgspec import UnsetType

from ...kvstore.log_lines import about_session
from ...runtime.verbs import BlockMap, KVTier, Moved
from ...sdk.errors import FieldMissing
from ...sdk.frames import client, server
from ...sessions.adapters import SessionAdapter
from ...sessions.conversation.edits import checked_end
from ...sessions.conversation.items import Message, new_id
from ...sessions.errors import CutInvalid
from ...sessions.session import ForkSummary
from ..errors import INTERNAL, TooManyMoves, wire_error
from ..live.session import LiveSession, log_refusal
from ..live.sessions import LiveSessions
from .conversation import Conversation
from .event_log import UNSENT, EventLog
from .translate import item_of

log = logging.getLogger(__name__)

KVVerb: TypeAlias = client.SessionLease | client.SessionStage | client.SessionSettle | client.SessionBlocks
Edit: TypeAlias = client.ItemTruncate | client.SessionRewind
TreeVerb: TypeAlias = client.SessionFork | client.SessionTree | client.SessionName | client.SessionPrune
SessionVerb: TypeAlias = Edit | TreeVerb | KVVerb
"""The client events that `SessionVerbs` serves."""


class SessionVerbs:
    """Serves the verbs of one session, and posts their answers to ``event_log``. ``most_moves``: how many verbs
    that ask the engine about KV (lease, stage, settle, block map) may run at once."""

    def __init__(
        self,
        live: LiveSession,
        sessions: LiveSessions,
        conversation: Conversation,
        event_log: EventLog,
        most_moves: int,
    ) -> None:
        self._live = live
        self._session = live.session
        self._sessions = sessions
        self._conversation = conversation
        self._event_log = event_log
        self._most_moves = most_moves
        self._moves = 0

    async def serve(self, event: SessionVerb) -> None:
        """Do what the event asks, and post its answer. The verbs about KV run in the background and are
        answered later. Raises if the event is refused."""
        if isinstance(event, KVVerb):
            self._begin_move(event)
        else:
            self._acknowledge(await self._served(event))

    async def answer_again(self, event: SessionVerb) -> None:
        """Answer a verb that was served before the session was opened from the journal, because the first
        answer may be lost.

        Truncations, rewinds and prunes are only answered, not done again. All others are done again: for
        example a fork, because no client has the handles of the first ones, and a move of KV, because it ended
        with the server.
        """
        match event:
            case client.ItemTruncate(item_id=item_id):
                response = self._session.saying(item_id)
                await self._live.wait_ended(None if response is None else response.id)
                self._acknowledge(self._truncated(event))
            case client.SessionRewind():
                self._acknowledge(self._rewound())
            case client.SessionPrune(session=target):
                self._acknowledge(server.SessionPruned(event_id=UNSENT, session=target))
            case _:
                await self.serve(event)

    async def _served(self, event: Edit | TreeVerb) -> server.ServerEvent:
        match event:
            case client.ItemTruncate():
                return await self._truncate(event)
            case client.SessionRewind(to=to):
                self._conversation.check_free()
                self._session.rewind(to)
                return self._rewound()
            case client.SessionFork(children=children, at=at, compact=compact, adapter=adapter):
                own = self._adapter_of(adapter)
                made = await self._sessions.fork(self._live, children, at, _compaction_of(compact), own)
                forks = [server.Fork(id=child.id, handle=child.session.handles.current) for child in made]
                return server.SessionForked(event_id=UNSENT, sessions=forks)
            case client.SessionTree(limit=limit, after=after):
                page = await self._sessions.forks.page(self._live.id, limit, after)
                members = msgspec.convert(page.members, list[server.Relative], from_attributes=True)
                return server.SessionTreeListed(
                    event_id=UNSENT, sessions=members, has_more=page.after is not None, next=page.after
                )
            case client.SessionName(name=name):
                kept = await self._sessions.forks.name(self._live.id, name)
                return server.SessionNamed(event_id=UNSENT, name=kept)
            case client.SessionPrune(session=target):
                await self._sessions.prune(self._live.id, target)
                return server.SessionPruned(event_id=UNSENT, session=target)

    def _adapter_of(self, asked: str | UnsetType | None) -> SessionAdapter | Literal["parent"] | None:
        """The adapter that a fork asks for. Raises ``AdapterUnavailable``."""
        if isinstance(asked, str):
            return self._sessions.registry.adapter_named(asked)
        return "parent" if isinstance(asked, UnsetType) else None

    def _acknowledge(self, answer: server.ServerEvent) -> None:
        """Post the ``answer`` to a verb. It is sent when the journal has all that the session has done so
        far."""
        self._event_log.post([answer], self._session.log.sync())

    # --- cut and rewind -------------------------------------------------------------------------------------

    async def _truncate(self, event: client.ItemTruncate) -> server.ServerEvent:
        """Cut a message. If its reply still runs, end that first, so that the answer comes behind its
        events."""
        end, item_id = _end_of(event), event.item_id
        response, ending = self._session.saying(item_id), self._conversation.check_message(item_id)
        if end is not None:
            self._session.cut(item_id, end)
        elif response is None:
            checked_end(self._session.history.get(item_id), 0)
        if response is not None:
            ending = response.id
            await response.cancel()
        await self._live.wait_ended(ending)
        return self._truncated(event)

    def _truncated(self, event: client.ItemTruncate) -> server.ServerEvent:
        item = self._session.history.get(event.item_id)  # raises if its reply failed, and was rolled back
        return server.ItemTruncated(
            event_id=UNSENT,
            item_id=item.id,
            content_index=event.content_index,
            audio_end_ms=event.audio_end_ms or 0,
            text_end=len(item.text) if isinstance(item, Message) else 0,
        )

    def _rewound(self) -> server.SessionRewound:
        history = self._session.history
        last, head = next(history.backwards(), None), history.head
        return server.SessionRewound(
            event_id=UNSENT,
            item_id=None if last is None else last.id,
            tokens=0 if head is None else head.length,
        )

    # --- KV -------------------------------------------------------------------------------------------------

    def _begin_move(self, event: KVVerb) -> None:
        """Start a verb about KV in the background; later events do not wait for it. Its answer is posted when
        the engine has answered. Raises ``TooManyMoves``."""
        if self._moves >= self._most_moves:
            most = self._most_moves
            raise TooManyMoves(f"At most {most} leases, stages, settles and maps of blocks run at once")
        self._moves += 1
        self._live.in_background(self._move(event))

    async def _move(self, event: KVVerb) -> None:
        try:
            answer = await self._moved(event)
        except Exception as error:  # it ends this event and nothing else
            if wire_error(error) is INTERNAL:
                log.exception("%s failed", event.type, extra=about_session(self._live.id))
            log_refusal(self._live.id, error)
            answer = self._conversation.refusal(error, event.event_id)
        finally:
            self._moves -= 1
        self._event_log.post([answer])

    async def _moved(self, event: KVVerb) -> server.ServerEvent:
        placement = self._session.placement
        match event:
            case client.SessionLease(priority=priority, ttl=ttl, returns_in=returns_in):
                granted = msgspec.structs.asdict(await placement.lease(priority, ttl, returns_in))
                status = granted.pop("grant").value
                return server.SessionLeased(event_id=UNSENT, status=status, **granted)
            case client.SessionStage():
                return _staged(await placement.stage())
            case client.SessionSettle(tier=tier):
                return _settled(await placement.settle(disk=tier == "disk"))
            case client.SessionBlocks():
                return _listed(await placement.locate())


def _end_of(event: client.ItemTruncate) -> int | None:
    """The number of characters after which a truncation cuts the message. None: no text is cut, because the
    event has a time (``audio_end_ms``), but does not say which text was spoken when.

    Raises ``FieldMissing`` or ``CutInvalid``.
    """
    if event.content_index != 0:
        raise CutInvalid("A message has one part, with the index 0", param="content_index")
    if event.text_end is not None:
        return event.text_end
    if event.audio_end_ms is None:
        raise FieldMissing("Missing required parameter: 'text_end'", "text_end", event.event_id)
    if event.timing is None:
        return None
    return max((heard.text_end for heard in event.timing if heard.ms <= event.audio_end_ms), default=0)


def _compaction_of(compact: client.ForkCompaction | None) -> ForkSummary | None:
    if compact is None:
        return None
    summary = item_of(compact.summary, new_id)
    assert isinstance(summary, Message), "it is a message on the wire"
    return ForkSummary(summary, compact.turns)


def _staged(moved: Moved) -> server.SessionStaged:
    tier = _lowest(moved)
    source = "recomputed" if moved.recomputed and tier == "device" else tier
    tokens = _held(moved) + moved.recomputed
    return server.SessionStaged(event_id=UNSENT, source=source, tokens=tokens, ms=_ms(moved))


def _settled(moved: Moved) -> server.SessionSettled:
    return server.SessionSettled(event_id=UNSENT, tier=_lowest(moved), tokens=_held(moved), ms=_ms(moved))


def _listed(blocks: BlockMap) -> server.SessionBlocksListed:
    runs = [server.BlockRun(tier=run.tier.value, shared=run.shared, count=run.count) for run in blocks.runs]
    counts = {tier.value: sum(run.count for run in blocks.runs if run.tier is tier) for tier in KVTier}
    shared = sum(run.count for run in runs if run.shared)
    return server.SessionBlocksListed(
        event_id=UNSENT,
        blocks=server.BlockCounts(**counts, shared=shared, total=sum(run.count for run in runs)),
        runs=runs,
        tokens=blocks.tokens,
        block_tokens=blocks.block_tokens,
    )


def _lowest(moved: Moved) -> Literal["device", "host", "disk"]:
    return "disk" if moved.disk else "host" if moved.host else "device"


def _held(moved: Moved) -> int:
    return moved.device + moved.host + moved.disk


def _ms(moved: Moved) -> float:
    return round(moved.seconds * 1000, 3)
