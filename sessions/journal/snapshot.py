"""What a session's operations come to, as one record: a long life costs its length, not its events.

``snapshot_of`` makes it of a session in which no response runs, ``restore`` is the way back. Pure. Knows
nothing of stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..history import History, HistoryState, Segment
from ..items import Item
from ..token_ids import bytes_of, ids_from
from ..tree import TurnNode, TurnReply
from .records import (
    AnyOperation,
    Begun,
    Branched,
    Ended,
    KeptNode,
    KeptReply,
    SessionSnapshot,
    Typed,
    request_form,
)

if TYPE_CHECKING:
    from .replay import Past, Replayed


def quiet(operations: Sequence[AnyOperation]) -> int:
    """How many of the operations there are up to the last of them after which no response runs."""
    running: set[str] = set()
    until = 0
    for at, operation in enumerate(operations, 1):
        if isinstance(operation, Begun):
            running.add(operation.response)
        elif isinstance(operation, Ended):
            running.discard(operation.response)
        elif isinstance(operation, Branched):
            running.clear()  # they were the other session's
        if not running:
            until = at
    return until


class _Places:
    """Tables of items and replies, each once; where in them something stands."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.replies: list[TurnReply] = []
        self._known: dict[int, int] = {}

    def of(self, segment: Segment) -> int:
        """``n`` for item n, ``-1 - n`` for reply n."""
        if id(segment) not in self._known:
            if isinstance(segment, TurnReply):
                self.replies.append(segment)
                self._known[id(segment)] = -len(self.replies)
            else:
                self.items.append(segment)
                self._known[id(segment)] = len(self.items) - 1
        return self._known[id(segment)]


def snapshot_of(replayed: Replayed) -> SessionSnapshot:
    """The session as one record."""
    state, places = replayed.history.state(), _Places()
    entries = tuple(places.of(segment) for segment in state.entries)
    path = () if state.head is None else tuple(state.head.ancestry())[::-1]
    nodes = tuple(
        KeptNode(
            node=node.id,
            keep=node.keep,
            prompt=bytes_of(node.prompt),
            inputs=tuple(places.of(item) for item in node.inputs),
            reply=-1 - places.of(node.reply),
        )
        for node in path
    )
    last, typed = replayed.last, replayed.typed
    return SessionSnapshot(
        preamble=state.preamble,
        rendered=state.rendered,
        items=tuple(places.items),
        replies=tuple(
            KeptReply(items=reply.items, ids=bytes_of(reply.ids), ended=reply.ended)
            for reply in places.replies
        ),
        entries=entries,
        nodes=nodes,
        config=replayed.config,
        heard=tuple(replayed.heard),
        typed=Typed(start=0, text=typed.text, role=typed.role, item=typed.id, call=typed.call_id),
        responses=replayed.responses,
        last=None if last is None else _begun(last),
        said=b"" if last is None else bytes(last.said),
        logprobs=() if last is None else tuple(last.logprobs),
        ended=None if last is None else last.ended,
        after=tuple(replayed.after_reply),
    )


def restore(history: History, snapshot: SessionSnapshot) -> None:
    """Make a new history what the snapshot says."""
    replies = [TurnReply(kept.items, ids_from(kept.ids), kept.ended) for kept in snapshot.replies]
    head: TurnNode | None = None
    for kept in snapshot.nodes:
        inputs = tuple(snapshot.items[place] for place in kept.inputs)
        head = TurnNode(head, inputs, kept.keep, ids_from(kept.prompt), replies[kept.reply], kept.node)
    entries = tuple(_segments(snapshot.entries, snapshot.items, replies))
    history.restore(HistoryState(snapshot.preamble, snapshot.rendered, entries, head))


def _segments(
    places: Iterable[int], items: Sequence[Item], replies: Sequence[TurnReply]
) -> Iterable[Segment]:
    return (items[place] if place >= 0 else replies[-1 - place] for place in places)


def _begun(past: Past) -> Begun:
    return Begun(response=past.id, request=request_form(past.request), note=past.note)
