"""A conversation's history: the tree of turns, what stands beside it, and how it may be edited. Pure.

Entries are what the client gave (items), what the model said (replies, opaque: their ids are spliced, never
tokenized again) and the slot of a turn that runs. Whatever the tree's path no longer matches is rendered
anew at the next turn. Knows nothing of tokenizers, links or event loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from .errors import ConversationBusy, ItemExists, ItemInvalid, ItemUnknown
from .items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    checked_item,
    checked_preamble,
    new_id,
    size_of,
)
from .journal.records import Deleted, Inserted, Record, Rewound, Truncated, forget
from .token_ids import Ids, frozen, ids_from
from .tools.answers import Calls
from .tree import Tree, TurnNode, TurnReply
from .turn.events import MissReason
from .turn.request import TurnRequest

ROOT = "root"
"""As ``previous_item_id``: before the first item."""

WRITTEN = 16
"""Characters that a template writes in the time in which one is tokenized, or more."""

Segment: TypeAlias = Item | TurnReply


@dataclass(frozen=True, slots=True)
class Script:
    """What to put before the model: ``segments`` in order.

    ``base``: the last turn whose tokens stay as they are; it and its ancestors are the first ``shared``
    segments. None renders from the beginning. ``miss``: why ``base`` is not the head. ``heading``: roughly the
    characters of the preamble.
    """

    preamble: Preamble
    segments: tuple[Segment, ...]
    base: TurnNode | None = None
    miss: MissReason | None = None
    shared: int = 0
    heading: int = 0

    def characters(self) -> int:
        """How much text has to be written and tokenized, roughly: that of the items. What was before is only
        written, which is many times as fast."""
        new, old = self.segments[self.shared :], self.segments[: self.shared]
        heading = 0 if old else self.heading
        before = (sum(map(_length, old)) + self.heading - heading) // WRITTEN
        return sum(map(_length, new)) + before + heading


@dataclass(frozen=True, slots=True)
class Draft:
    """A script in tokens, without its reply yet: ``prompt`` on the first ``keep`` tokens of ``parent``'s
    path.

    ``inputs``: the items since ``parent``, which ``prompt`` writes out. ``miss`` as in the script. ``path``:
    the tokens of ``parent``'s, where they are known.
    """

    parent: TurnNode | None
    inputs: tuple[Item, ...]
    keep: int
    prompt: Ids
    miss: MissReason | None = None
    path: Ids | None = None

    def node(self, reply: TurnReply, node_id: str | None = None) -> TurnNode:
        """The turn with its reply."""
        return TurnNode(self.parent, self.inputs, self.keep, self.prompt, reply, node_id or new_id("turn"))

    def tokens(self) -> Ids:
        """The whole prompt from the root, ``[keep + len(prompt)]``."""
        if self.parent is None:
            return self.prompt
        path = self.parent.tokens() if self.path is None else self.path
        return frozen(np.concatenate([path[: self.keep], self.prompt]))


@dataclass(frozen=True, slots=True, eq=False)
class RunningTurn:
    """A turn that runs: its place in the history, and what it puts before the model."""

    slot: ReplySlot
    script: Script


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What a request puts before the model, settled: ``turn`` where its reply joins the history.

    ``aside``: on a sequence of its own, since it is out of band or overrides what the branch holds.
    """

    turn: RunningTurn | None
    script: Script
    aside: bool


@dataclass(frozen=True, slots=True, eq=False)
class HistoryState:
    """All of a history in which no turn runs. ``rendered``: the preamble that the path was written with."""

    preamble: Preamble
    rendered: Preamble
    entries: tuple[Segment, ...]
    head: TurnNode | None


class ReplySlot:
    """Where the reply of the running turn will stand; what is appended meanwhile comes after it."""


_Entry: TypeAlias = Item | TurnReply | ReplySlot


class History:
    """The items of one conversation, in order; begin, commit or abort a turn on them.

    ``record`` hears of items put in and taken out.
    """

    def __init__(
        self, preamble: Preamble | None = None, *, max_items: int = 20_000, record: Record = forget
    ) -> None:
        self.record = record
        self._max_items = max_items
        self.tree = Tree()
        self._preamble = Preamble() if preamble is None else checked_preamble(preamble)
        self._heading = size_of(self._preamble)
        self._rendered = self._preamble
        self._entries: list[_Entry] = []
        self._home: dict[str, _Entry] = {}
        self._calls: Calls | None = None
        self._shared = False  # these two are another history's, too: copy them before a change
        self._slot: ReplySlot | None = None
        self._matched = 0  # so many first entries are the tree's path to its head, if any are known to be
        self._appended = True  # nothing but appending since the running turn began

    def state(self) -> HistoryState:
        """All there is to it; between two turns."""
        assert self._slot is None, "a turn runs"
        return HistoryState(self._preamble, self._rendered, self._segments(), self.tree.head)

    def restore(self, state: HistoryState) -> None:
        """Be what the state says; for a history that is new."""
        assert not self._entries, "it has items already"
        self._preamble, self._rendered = state.preamble, state.rendered
        self._heading = size_of(self._preamble)
        self._entries = list(state.entries)
        self._home = {item.id: entry for entry in state.entries for item in _items_of(entry)}
        self.tree.move(state.head)

    @property
    def preamble(self) -> Preamble:
        """Instructions and tools; assigning others makes the next turn render everything anew."""
        return self._preamble

    @preamble.setter
    def preamble(self, preamble: Preamble) -> None:
        self._preamble = checked_preamble(preamble)
        self._heading = size_of(self._preamble)

    def share_preamble(self, other: History) -> None:
        """Have the preamble of another history, where it was checked."""
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
        """Put an item after ``previous_item_id``: None appends, ``"root"`` puts it first.

        Raises ``ItemInvalid``, ``ItemExists``, or ``ItemUnknown`` for the previous id.
        """
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
        """Take an item out. What else its reply held stays, as items. Raises ``ItemUnknown``."""
        self._loosen(item_id, "item_id")
        self._own()
        place = self._index(self._home.pop(item_id))
        self._edited(place)
        del self._entries[place]
        self.record(Deleted(item=item_id))

    def reply_of(self, item_id: str) -> TurnReply | None:
        """The reply that holds this item; None where it stands for itself. Raises ``ItemUnknown``."""
        entry = self._entry(item_id, "item_id")
        return entry if isinstance(entry, TurnReply) else None

    def cut(self, cut: Truncated) -> None:
        """Shorten a reply, or what stands for itself, as ``cut`` says. Raises ``ItemUnknown``."""
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
        """Take out all behind the item (None: all); the tree's head goes back with it.

        Raises ``ItemUnknown``, and ``ConversationBusy`` while a turn runs.
        """
        if self._slot is not None:
            raise ConversationBusy("A response writes this conversation: cancel it before going back")
        place = 0 if item_id is None else self._after(item_id)
        self._own()
        for entry in self._entries[place:]:
            for item in _items_of(entry):
                del self._home[item.id]
        del self._entries[place:]
        self._matched = 0
        self.tree.move(self._found(self._segments())[0])
        self.record(Rewound(item=item_id))

    def branch(self) -> History:
        """Another history that goes on from here; what both have until now they share."""
        other = History(max_items=self._max_items)
        other.share_preamble(self)
        other.tree.move(self.tree.head)
        other._rendered, other._slot = self._rendered, self._slot
        other._matched, other._appended = self._matched, self._appended
        other._entries, other._home = self._entries, self._home
        self._shared = other._shared = True
        return other

    @property
    def told(self) -> TurnNode | None:
        """The head, where the items are those of its path; None where they were edited since."""
        segments = self._segments()
        node, at = self._found(segments)
        edited = node is not self.tree.head or any(
            isinstance(segment, TurnReply) for segment in segments[at:]
        )
        return None if edited else node

    def script(self, preamble: Preamble | None = None, items: tuple[Item, ...] | None = None) -> Script:
        """What a turn begun now puts before the model; ``preamble`` and ``items`` override for it alone."""
        heading = self._heading if preamble is None else size_of(preamble)
        if items is not None:
            return Script(preamble or self._preamble, items, miss=MissReason.OVERRIDDEN, heading=heading)
        segments = self._segments()
        if preamble is not None and preamble != self._preamble:
            return Script(preamble, segments, miss=MissReason.OVERRIDDEN, heading=heading)
        base, miss, shared = self._base(segments)
        return Script(self._preamble, segments, base, miss, shared, self._heading)

    def place(self, request: TurnRequest) -> Placed:
        """Begin what is asked for. Raises ``ConversationBusy`` while another turn runs."""
        preamble = request.preamble(self._preamble)
        plain = preamble == self._preamble and request.input is None
        self.check_free(request)
        script = self.script() if plain else self.script(preamble, request.input)
        if request.out_of_band:
            return Placed(None, script, aside=True)
        turn = self._hold(script if plain else self.script())  # nothing after this may raise
        return Placed(turn, script, aside=not plain)

    def check_free(self, request: TurnRequest) -> None:
        """Raises ``ConversationBusy`` where the request needs the reply's place, and another turn has it."""
        if self._slot is not None and not request.out_of_band:
            raise ConversationBusy("A response already writes this conversation")

    def begin_turn(self) -> RunningTurn:
        """Hold the place of a reply here. Raises ``ConversationBusy`` while another turn runs."""
        if self._slot is not None:
            raise ConversationBusy("A response already writes this conversation")
        return self._hold(self.script())

    def _hold(self, script: Script) -> RunningTurn:
        self._slot, self._appended = ReplySlot(), True
        self._own()
        self._entries.append(self._slot)
        return RunningTurn(self._slot, script)

    def commit_turn(
        self, turn: RunningTurn, draft: Draft, reply: TurnReply, node_id: str | None = None
    ) -> TurnNode:
        """The turn becomes a node and the tree's head, its reply an entry in its slot."""
        place = self._close(turn)
        node = draft.node(reply, node_id)
        self._entries.insert(place, reply)
        self._home.update((item.id, reply) for item in reply.items)
        self.tree.move(node)
        self._rendered = turn.script.preamble
        self._matched = place + 1 if self._appended else 0
        return node

    def abort_turn(self, turn: RunningTurn) -> None:
        """As if the turn had not begun; its input stays."""
        self._close(turn)

    def _close(self, turn: RunningTurn) -> int:
        assert self._slot is turn.slot, "only the running turn can end"
        place = self._index(turn.slot)
        self._own()
        del self._entries[place]
        self._slot = None
        return place

    def calls(self) -> Calls:
        """The calls among the items."""
        if self._calls is None:
            self._calls = Calls(self.items())
        return self._calls

    def _own(self) -> None:
        """Have entries of one's own, before they change."""
        self._calls = None
        if self._shared:
            self._entries, self._home, self._shared = list(self._entries), dict(self._home), False

    def _segments(self) -> tuple[Segment, ...]:
        """The entries up to the slot; there is never more than one."""
        end = len(self._entries) if self._slot is None else self._index(self._slot)
        return cast(tuple[Segment, ...], tuple(self._entries[:end]))

    def _edited(self, place: int) -> None:
        """Something is put in at ``place``, or taken out there."""
        if place < self._matched:
            self._matched = 0
        if self._slot is not None and place <= self._index(self._slot):
            self._appended = False

    def _base(self, segments: tuple[Segment, ...]) -> tuple[TurnNode | None, MissReason | None, int]:
        """The last turn on the path that the entries still match, why it is not the head, its entries."""
        if self.tree.head is not None and self._preamble != self._rendered:
            changed = self._preamble.instructions != self._rendered.instructions
            return None, MissReason.INSTRUCTIONS_CHANGED if changed else MissReason.TOOLS_CHANGED, 0
        if self._matched:
            return self.tree.head, None, self._matched
        base, at = self._found(segments)
        if base is not self.tree.head or any(isinstance(segment, TurnReply) for segment in segments[at:]):
            return base, MissReason.HISTORY_EDITED, at
        self._matched = at
        return base, None, at

    def _found(self, segments: tuple[Segment, ...]) -> tuple[TurnNode | None, int]:
        """The last turn on the path that these are of, and how many of them."""
        base, at = None, 0
        for node in self.tree.path():
            wanted = (*node.inputs, node.reply)
            found = segments[at : at + len(wanted)]
            if len(found) < len(wanted) or any(a is not b for a, b in zip(found, wanted, strict=True)):
                break
            base, at = node, at + len(wanted)
        return base, at

    def _split(self, reply: TurnReply, rest: TurnReply, node_id: str) -> None:
        """Where the reply is one of the path's, the head is now the turn that ends with its rest."""
        head = self.tree.head
        for node in () if head is None else head.ancestry():
            if node.reply is reply:
                self.tree.move(node.cut(rest, node_id))
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
        """If the item is part of a reply, put the reply's items in its place: its ids are given up."""
        entry = self._entry(item_id, param)
        if isinstance(entry, TurnReply):
            place = self._index(entry)
            self._edited(place)
            self._own()
            self._entries[place : place + 1] = entry.items
            self._home.update((item.id, item) for item in entry.items)


def turns_of(segments: tuple[Segment, ...]) -> Iterator[tuple[tuple[Item, ...], TurnReply | None]]:
    """Inputs and reply of each turn; the last has no reply yet."""
    inputs: list[Item] = []
    for segment in segments:
        if isinstance(segment, TurnReply):
            yield tuple(inputs), segment
            inputs = []
        else:
            inputs.append(segment)
    yield tuple(inputs), None


def _length(segment: Segment) -> int:
    match segment:
        case Message():
            return len(segment.text)
        case FunctionCall():
            return len(segment.arguments)
        case FunctionCallOutput():
            return len(segment.output)
        case TurnReply():
            return 0  # its ids are known


def _items_of(entry: _Entry) -> tuple[Item, ...]:
    if isinstance(entry, ReplySlot):
        return ()
    return entry.items if isinstance(entry, TurnReply) else (entry,)
