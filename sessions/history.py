"""A conversation's history: its entries in order, the tree of turns beside them, and edits. Pure.

An entry is an item of the client, a reply of the model (its ids are reused, never tokenized again), or the slot
of a running turn. Entries that no longer match the tree's path are rendered again at the next turn. Knows
nothing of tokenizers, links or event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from .errors import ConversationBusy, ItemExists, ItemInvalid, ItemUnknown
from .items import (
    Item,
    Preamble,
    ToolCalls,
    checked_item,
    checked_preamble,
    size_of,
)
from .journal.records import AnyOperation, Deleted, Inserted, Rewound, Truncated
from .token_ids import ids_from
from .tree import Draft, Script, Segment, TurnNode, TurnReply
from .turn.events import MissReason
from .turn.request import TurnRequest

ROOT = "root"
"""As ``previous_item_id``: before the first item."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningTurn:
    """A running turn: its slot in the history, and what it puts before the model."""

    slot: ReplySlot
    script: Script


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A request with its place in the history. ``turn`` is None if its reply does not join the history.
    ``aside``: it runs on a sequence of its own, as it is out of band or overrides the conversation."""

    turn: RunningTurn | None
    script: Script
    aside: bool


class ReplySlot:
    """The place of the running turn's reply; items appended meanwhile stand behind it."""


_Entry: TypeAlias = Item | TurnReply | ReplySlot


class History:
    """The entries of one conversation, in order. A turn begins on them, then is committed or aborted.

    ``record`` is called with the operation of each edit. ``head``: the last turn that belongs to the
    conversation, None before the first.
    """

    def __init__(
        self,
        preamble: Preamble | None = None,
        *,
        max_items: int = 20_000,
        record: Callable[[AnyOperation], None] = lambda operation: None,
    ) -> None:
        self.record = record
        self._max_items = max_items
        self.head: TurnNode | None = None
        self._preamble = Preamble() if preamble is None else checked_preamble(preamble)
        self._heading = size_of(self._preamble)
        self.rendered = self._preamble
        self._entries: list[_Entry] = []
        self._home: dict[str, _Entry] = {}
        self._calls: ToolCalls | None = None
        self._shared = False  # another history has the same two: copy before a change
        self._slot: ReplySlot | None = None
        self._matched = 0  # so many first entries are known to be the tree's path
        self._appended = True  # the running turn has seen no edit but appends

    def restore(
        self, preamble: Preamble, rendered: Preamble, entries: Sequence[Segment], head: TurnNode | None
    ) -> None:
        """Fill a new history. ``rendered``: the preamble that the path was rendered with."""
        assert not self._entries, "it has items already"
        self._preamble, self.rendered = preamble, rendered
        self._heading = size_of(preamble)
        self._entries = list(entries)
        self._home = {item.id: entry for entry in entries for item in _items_of(entry)}
        self.head = head

    @property
    def preamble(self) -> Preamble:
        """Instructions and tools. Setting others makes the next turn render everything again."""
        return self._preamble

    @preamble.setter
    def preamble(self, preamble: Preamble) -> None:
        self._preamble = checked_preamble(preamble)
        self._heading = size_of(self._preamble)

    def share_preamble(self, other: History) -> None:
        """Take another history's preamble, which was checked there."""
        self._preamble, self._heading = other._preamble, other._heading

    @property
    def busy(self) -> bool:
        """Whether a turn runs."""
        return self._slot is not None

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._home

    def items(self) -> tuple[Item, ...]:
        """All items in order, those of the replies included."""
        return tuple(item for entry in self._entries for item in _items_of(entry))

    def backwards(self) -> Iterator[Item]:
        """All items from the last to the first."""
        return (item for entry in reversed(self._entries) for item in reversed(_items_of(entry)))

    def get(self, item_id: str) -> Item:
        """The item with this id. Raises ``ItemUnknown``."""
        return next(item for item in _items_of(self._entry(item_id, "item_id")) if item.id == item_id)

    def insert(self, item: Item, previous_item_id: str | None = None) -> None:
        """Put an item after ``previous_item_id``: None appends, ``"root"`` puts it first. Raises
        ``ItemInvalid``, ``ItemExists``, or ``ItemUnknown`` for the previous id."""
        checked_item(item)
        if item.id in self._home or item.id == ROOT:
            raise ItemExists(f"An item with id {item.id!r} is already there", param="item.id")
        if len(self._home) >= self._max_items:
            raise ItemInvalid(f"A conversation holds at most {self._max_items} items", param="item")
        if previous_item_id is None:
            place = len(self._entries)
        elif previous_item_id == ROOT:
            place = 0
        else:
            place = self._after(previous_item_id)
        self._edited(place)
        calls = self._calls
        self._own()
        self._entries.insert(place, item)
        self._home[item.id] = item
        if calls is not None:
            calls.add(item)
            self._calls = calls
        self.record(Inserted(item=item, previous=previous_item_id))

    def delete(self, item_id: str) -> None:
        """Remove an item. The other items of its reply stay, as items. Raises ``ItemUnknown``."""
        self._loosen(item_id, "item_id")
        self._own()
        place = self._index(self._home.pop(item_id))
        self._edited(place)
        del self._entries[place]
        self.record(Deleted(item=item_id))

    def reply_of(self, item_id: str) -> TurnReply | None:
        """The reply that holds this item; None for an item of its own. Raises ``ItemUnknown``."""
        entry = self._entry(item_id, "item_id")
        return entry if isinstance(entry, TurnReply) else None

    def cut(self, cut: Truncated) -> None:
        """Shorten a reply, or an item of its own, as ``cut`` says. Raises ``ItemUnknown``."""
        entry = self._entry(cut.item, "item_id")
        place, left = self._index(entry), list[_Entry](cut.items)
        if isinstance(entry, TurnReply) and not cut.loose:
            rest = entry.up_to(cut.keep, ids_from(cut.tail), cut.items)
            self._split(entry, rest, cut.node)
            left = [rest]
        self._own()
        for item in _items_of(entry):
            del self._home[item.id]
        self._edited(place)
        self._matched = 0  # the head may be another
        self._entries[place : place + 1] = left
        self._home.update((item.id, other) for other in left for item in _items_of(other))
        self.record(cut)

    def rewind(self, item_id: str | None) -> None:
        """Remove all behind the item (None: all). Raises ``ItemUnknown``, ``ConversationBusy``."""
        if self._slot is not None:
            raise ConversationBusy("A response writes this conversation: cancel it before going back")
        place = 0 if item_id is None else self._after(item_id)
        self._own()
        for entry in self._entries[place:]:
            for item in _items_of(entry):
                del self._home[item.id]
        del self._entries[place:]
        self._matched = 0
        self.head = self._found(self.segments())[0]
        self.record(Rewound(item=item_id))

    def branch(self, record: Callable[[AnyOperation], None] = lambda operation: None) -> History:
        """A second history that goes on from here and shares what there is; its edits go to ``record``."""
        other = History(max_items=self._max_items, record=record)
        other.share_preamble(self)
        other.head, other.rendered, other._slot = self.head, self.rendered, self._slot
        other._matched, other._appended = self._matched, self._appended
        other._entries, other._home = self._entries, self._home
        self._shared = other._shared = True
        return other

    @property
    def told(self) -> TurnNode | None:
        """The tree's head if the entries are those of its path; None if they were edited since."""
        base, _, edited = self._found(self.segments())
        return None if edited else base

    def script(self, preamble: Preamble | None = None, items: tuple[Item, ...] | None = None) -> Script:
        """What a turn puts before the model now; ``preamble`` and ``items`` override for it alone."""
        heading = self._heading if preamble is None else size_of(preamble)
        if items is not None:
            return Script(preamble or self._preamble, items, miss=MissReason.OVERRIDDEN, heading=heading)
        segments = self.segments()
        if preamble is not None and preamble != self._preamble:
            return Script(preamble, segments, miss=MissReason.OVERRIDDEN, heading=heading)
        base, miss, shared = self._base(segments)
        return Script(self._preamble, segments, base, miss, shared, self._heading)

    def place(self, request: TurnRequest) -> Placed:
        """Begin the requested turn. Raises ``ConversationBusy`` while another one runs."""
        preamble = request.preamble(self._preamble)
        plain = preamble == self._preamble and request.input is None
        self.check_free(request)
        script = self.script() if plain else self.script(preamble, request.input)
        if request.out_of_band:
            return Placed(None, script, aside=True)
        turn = self._hold(script if plain else self.script())  # nothing after this may raise
        return Placed(turn, script, aside=not plain)

    def check_free(self, request: TurnRequest) -> None:
        """Raises ``ConversationBusy`` if the request needs a slot, and another turn has one."""
        if self._slot is not None and not request.out_of_band:
            raise ConversationBusy("A response already writes this conversation")

    def _hold(self, script: Script) -> RunningTurn:
        self._slot, self._appended = ReplySlot(), True
        self._own()
        self._entries.append(self._slot)
        return RunningTurn(self._slot, script)

    def commit_turn(
        self, turn: RunningTurn, draft: Draft, reply: TurnReply, node_id: str | None = None
    ) -> TurnNode:
        """End the turn with its reply: it becomes a node and the tree's head, the reply takes its slot."""
        place = self._close(turn)
        node = draft.node(reply, node_id)
        self._entries.insert(place, reply)
        self._home.update((item.id, reply) for item in reply.items)
        self.head = node
        self.rendered = turn.script.preamble
        self._matched = place + 1 if self._appended else 0
        return node

    def abort_turn(self, turn: RunningTurn) -> None:
        """End the turn without a reply; its input stays."""
        self._close(turn)

    def _close(self, turn: RunningTurn) -> int:
        assert self._slot is turn.slot, "only the running turn can end"
        place = self._index(turn.slot)
        self._own()
        del self._entries[place]
        self._slot = None
        return place

    def calls(self) -> ToolCalls:
        """The tool calls among the items, and which have outputs."""
        if self._calls is None:
            self._calls = ToolCalls(self.items())
        return self._calls

    def _own(self) -> None:
        """Copy shared entries before a change."""
        self._calls = None
        if self._shared:
            self._entries, self._home, self._shared = list(self._entries), dict(self._home), False

    def segments(self) -> tuple[Segment, ...]:
        """The entries up to the slot, or all."""
        end = len(self._entries) if self._slot is None else self._index(self._slot)
        return cast(tuple[Segment, ...], tuple(self._entries[:end]))

    def _edited(self, place: int) -> None:
        """An entry is inserted at ``place``, or removed there."""
        if place < self._matched:
            self._matched = 0
        if self._slot is not None and place <= self._index(self._slot):
            self._appended = False

    def _base(self, segments: tuple[Segment, ...]) -> tuple[TurnNode | None, MissReason | None, int]:
        """The last turn that the entries match with its path, why it is not the head, and its entries."""
        if self.head is not None and self._preamble != self.rendered:
            changed = self._preamble.instructions != self.rendered.instructions
            return None, MissReason.INSTRUCTIONS_CHANGED if changed else MissReason.TOOLS_CHANGED, 0
        if self._matched:
            return self.head, None, self._matched
        base, at, edited = self._found(segments)
        if edited:
            return base, MissReason.HISTORY_EDITED, at
        self._matched = at
        return base, None, at

    def _found(self, segments: tuple[Segment, ...]) -> tuple[TurnNode | None, int, bool]:
        """The last turn on the path that the segments match, how many they are, and whether more was edited."""
        base, at = None, 0
        for node in () if self.head is None else tuple(self.head.ancestry())[::-1]:
            wanted = (*node.inputs, node.reply)
            found = segments[at : at + len(wanted)]
            if len(found) < len(wanted) or any(a is not b for a, b in zip(found, wanted, strict=True)):
                break
            base, at = node, at + len(wanted)
        edited = base is not self.head or any(isinstance(segment, TurnReply) for segment in segments[at:])
        return base, at, edited

    def _split(self, reply: TurnReply, rest: TurnReply, node_id: str) -> None:
        """If the reply is on the path, move the head to a node of that turn with the rest of the reply."""
        for node in () if self.head is None else self.head.ancestry():
            if node.reply is reply:
                self.head = node.cut(rest, node_id)
                return

    def _entry(self, item_id: str, param: str) -> _Entry:
        entry = self._home.get(item_id)
        if entry is None:
            raise ItemUnknown(f"The conversation has no item {item_id!r}", param=param)
        return entry

    def _index(self, entry: _Entry) -> int:
        last = len(self._entries) - 1  # it is mostly near the end
        return next(at for at in range(last, -1, -1) if self._entries[at] is entry)

    def _after(self, item_id: str) -> int:
        entry = self._entry(item_id, "previous_item_id")
        if isinstance(entry, TurnReply) and entry.items[-1].id != item_id:
            self._loosen(item_id, "previous_item_id")
        return self._index(self._home[item_id]) + 1

    def _loosen(self, item_id: str, param: str) -> None:
        """If the item is part of a reply, replace the reply by its items; its ids are lost."""
        entry = self._entry(item_id, param)
        if isinstance(entry, TurnReply):
            place = self._index(entry)
            self._edited(place)
            self._own()
            self._entries[place : place + 1] = entry.items
            self._home.update((item.id, item) for item in entry.items)


def _items_of(entry: _Entry) -> tuple[Item, ...]:
    if isinstance(entry, ReplySlot):
        return ()
    return entry.items if isinstance(entry, TurnReply) else (entry,)
