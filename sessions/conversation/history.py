"""A conversation's history: its entries in order, the tree of turns beside them, and edits. Pure.

An entry is an item of the client, a reply of the model, or the slot of a running turn. A reply's ids are used
again and never made from its text. Entries that no longer match the tree's path are rendered again at the next
turn.

Entries leave the context, as a *gap*, when a turn finds the context full, or when a summary replaces them
(`compact`). They stay in the history, where they can be read, edited and rewound to, but later turns leave them
out of the prompt. They come back if the history is rewound to a point before they left. Knows nothing of
tokenizers, links or event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias, cast

import msgspec

from ..errors import ConversationBusy, ItemExists, ItemInvalid, ItemUnknown
from ..journal.records import AnyOperation, Compacted, Deleted, Inserted, Rewound, Truncated
from ..token_ids import ids_from
from ..turn.events import MissReason
from ..turn.request import TurnRequest
from .items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    ToolCalls,
    checked_item,
    checked_preamble,
    new_id,
    reads_alike,
    size_of,
)
from .tree import Draft, Script, Segment, TurnNode, TurnReply, matched

ROOT = "root"
"""Stands for the beginning of the conversation, where an item's id is expected."""
REPLY = ""
"""Stands for the reply that runs, where the id of the item before a new one is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningTurn:
    """A running turn: its ``slot`` in the history, where the reply will stand, and its prompt as items.

    ``left_out``: the segments (items and replies) that leave the context when the turn is committed, because
    the prompt was too long; empty if it fits. ``on``: the last segment of the prompt, which stays: a rewind
    to before it brings them back. None if none are left out. ``rewritten``: the replies that are replaced by
    their items when the turn is committed, because the prompt has those.
    """

    slot: ReplySlot
    script: Script
    left_out: tuple[Segment, ...] = ()
    on: Segment | None = None
    rewritten: tuple[TurnReply, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request with its prompt, and its slot in the history: what its response runs on.

    ``turn``: the running turn that its reply will end; None if the reply does not join the history. ``script``:
    its prompt, as items. ``aside``: it runs on a sequence of its own in the engine, because it is out of band
    or has instructions, tools or input of its own.
    """

    turn: RunningTurn | None
    script: Script
    aside: bool

    def without(self, indexes: Collection[int]) -> Prepared:
        """The same request with a shorter prompt: without the segments (items and replies) at
        ``indexes`` of the script. Later turns leave these out, too, unless this turn runs aside."""
        script, turn = self.script.without(indexes), self.turn
        if turn is not None and not self.aside:
            segments = self.script.segments
            left_out = tuple(segments[index] for index in sorted(indexes))
            turn = replace(turn, script=script, left_out=left_out, on=segments[-1])
        return replace(self, script=script, turn=turn)

    def rewritten(self, shared: int) -> Prepared:
        """The same request with a prompt in which only the first ``shared`` segments of the script are as
        they were. The replies behind them are replaced by their items, in later turns too."""
        script, turn = self.script.rewritten(shared), self.turn
        if turn is not None:
            replies = (one for one in self.script.segments[shared:] if isinstance(one, TurnReply))
            turn = replace(turn, script=script, rewritten=tuple(replies))
        return replace(self, script=script, turn=turn)


class ReplySlot:
    """Stands for the running turn's reply. Items that are added during the turn come behind it."""


_Entry: TypeAlias = Item | TurnReply | ReplySlot


@dataclass(frozen=True, slots=True, eq=False)
class ContextGap:
    """Entries that are out of the context: in the history, but not in prompts. They come back if the history is
    rewound to a point before the entry ``since``. If that entry is not in the history, they come back at any
    rewind."""

    since: _Entry | None
    entries: tuple[_Entry, ...]


class History:
    """The entries of one conversation, in order. A turn begins on them, and then is committed or aborted.

    ``record`` is called with the operation of each edit, for the journal. ``max_items``: the most items.
    ``head``: the node of the last turn that belongs to the conversation; None before the first one.
    ``rendered``: the preamble in the prompts that led to ``head``.
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
        self._gaps: tuple[ContextGap, ...] = ()
        self._outside: dict[int, _Entry] = {}  # the entries of all gaps, by their `id()`
        self._shared = False  # another history shares `_entries` and `_home`: copy before a change
        self._slot: ReplySlot | None = None
        self._matched = 0  # how many of the first segments are known to match the tree's path
        self._appended = True  # since the running turn began, items were only added at the end

    def restore(
        self,
        preamble: Preamble,
        rendered: Preamble,
        entries: Sequence[Segment],
        head: TurnNode | None,
        gaps: Sequence[ContextGap] = (),
    ) -> None:
        """Fill a new, empty history with what the journal kept. ``entries``: all items and replies, in order,
        also those out of the context, which ``gaps`` names. ``preamble``: the current one; ``rendered``: the
        one in the prompts that led to ``head``, the last turn's node."""
        assert not self._entries, "it has items already"
        self._preamble, self.rendered = preamble, rendered
        self._heading = size_of(preamble)
        self._entries = list(entries)
        self._home = {item.id: entry for entry in entries for item in _items_of(entry)}
        self.head = head
        self._set_gaps(gaps)

    @property
    def preamble(self) -> Preamble:
        """Instructions and tools. If they change, the next turn renders everything again."""
        return self._preamble

    @preamble.setter
    def preamble(self, preamble: Preamble) -> None:
        self._preamble = checked_preamble(preamble)
        self._heading = size_of(self._preamble)

    def share_preamble(self, other: History) -> None:
        """Take the preamble of another history, without checking it again."""
        self._preamble, self._heading = other._preamble, other._heading

    @property
    def busy(self) -> bool:
        """Whether a turn runs."""
        return self._slot is not None

    def __len__(self) -> int:
        return len(self._home)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._home

    @property
    def turns(self) -> int:
        """How many replies of the model it holds, without one that runs."""
        return sum(isinstance(entry, TurnReply) for entry in self._entries)

    def items(self) -> tuple[Item, ...]:
        """All items in order, those of the replies included."""
        return tuple(self.forwards())

    def forwards(self) -> Iterator[Item]:
        """All items from the first to the last."""
        return (item for entry in self._entries for item in _items_of(entry))

    def before_reply(self) -> Iterator[Item]:
        """The items before the reply that runs; all items if none runs."""
        before = takewhile(lambda entry: entry is not self._slot, self._entries)
        return (item for entry in before for item in _items_of(entry))

    def adopt(self, items: Sequence[Item]) -> None:
        """Take the text of its first items from ``items``, which a client sent for them. A reply keeps its
        tokens, which a prompt that is ``verbatim`` compares with this text."""
        at = 0
        for entry in tuple(self._entries):
            own = _items_of(entry)
            given = items[at : at + len(own)]
            at += len(own)
            if len(given) < len(own) or all(map(reads_alike, own, given)):
                continue
            pairs = zip(own, given, strict=True)
            taken = tuple(msgspec.structs.replace(new, id=old.id) for old, new in pairs)
            keep = len(entry.ids) if isinstance(entry, TurnReply) else 0
            self.cut(Truncated(item=own[0].id, items=taken, keep=keep, node=new_id("turn")))

    def is_worth(self, items: int) -> bool:
        """Whether its first ``items`` items, at least one, have tokens to go on from. They do if they hold a
        whole turn, or all items before the reply that runs."""
        left = items
        for entry in self._entries:
            left -= len(_items_of(entry))
            if isinstance(entry, ReplySlot) or left < 0:
                return left >= 0
            if isinstance(entry, TurnReply):
                return True
        return left == 0

    def backwards(self) -> Iterator[Item]:
        """All items from the last to the first."""
        return (item for entry in reversed(self._entries) for item in reversed(_items_of(entry)))

    def backwards_with_reply(self) -> Iterator[Item | None]:
        """All items from the last to the first; None instead of the reply that runs."""
        for entry in reversed(self._entries):
            yield from (None,) if isinstance(entry, ReplySlot) else reversed(_items_of(entry))

    def get(self, item_id: str) -> Item:
        """The item with this id. Raises ``ItemUnknown``."""
        return next(item for item in _items_of(self._entry(item_id, "item_id")) if item.id == item_id)

    def insert(self, item: Item, previous_item_id: str | None = None) -> None:
        """Put an item after ``previous_item_id``: None appends, ``ROOT`` puts it first, ``REPLY`` behind the
        reply that runs. Raises ``ItemInvalid``, also if the history is full; ``ItemExists``; or ``ItemUnknown``
        for the previous id."""
        checked_item(item)
        self._check_new(item)
        self._make_room()
        if len(self._home) >= self._max_items:
            raise ItemInvalid(f"A conversation holds at most {self._max_items} items", param="item")
        if previous_item_id is None:
            index = len(self._entries)
        elif previous_item_id == ROOT:
            index = 0
        elif previous_item_id == REPLY and self._slot is not None:
            index = self._index(self._slot) + 1
        else:
            index = self._after(previous_item_id)
        self._edited(index)
        calls = self._calls
        self._own()
        self._entries.insert(index, item)
        self._home[item.id] = item
        if calls is not None:
            calls.add(item)
            self._calls = calls
        self.record(Inserted(item=item, previous=previous_item_id))

    def _check_new(self, item: Item) -> None:
        if item.id in self._home or item.id == ROOT:
            raise ItemExists(f"An item with id {item.id!r} is already there", param="item.id")

    def _make_room(self) -> None:
        """If the history is full, delete the oldest items that are out of the context."""
        while self._outside and len(self._home) >= self._max_items:
            outside = (entry for entry in self._entries if id(entry) in self._outside)
            oldest = next((entry for entry in outside if _items_of(entry)), None)
            if oldest is None:
                return
            for item in _items_of(oldest):
                self.delete(item.id)

    def delete(self, item_id: str) -> None:
        """Remove an item. If it was part of a reply, the reply is replaced by its other items, and its token
        ids are lost. Raises ``ItemUnknown``."""
        self._loosen(item_id, "item_id")
        self._swap(self._home[item_id], ())
        self.record(Deleted(item=item_id))

    def drop_silent(self) -> None:
        """Remove replies without items, which earlier versions kept: their tokens were in later prompts, and no
        client could see or delete them."""
        silent = [one for one in self._entries if isinstance(one, TurnReply) and not one.items]
        for reply in silent:
            self._swap(reply, ())
        if silent:
            self.record(Deleted(item=""))

    def reply_of(self, item_id: str) -> TurnReply | None:
        """The reply that holds this item; None if the item is not part of a reply. Raises ``ItemUnknown``."""
        entry = self._entry(item_id, "item_id")
        return entry if isinstance(entry, TurnReply) else None

    def cut(self, cut: Truncated) -> None:
        """Shorten a reply, or an item that is not part of one, as the operation ``cut`` says; `edits.cut_after`
        and `edits.cut_tokens` make it. Raises ``ItemUnknown``."""
        entry = self._entry(cut.item, "item_id")
        left = list[_Entry](cut.items)
        if isinstance(entry, TurnReply) and not cut.loose:
            rest = entry.up_to(cut.keep, ids_from(cut.tail), cut.items)
            self._split(entry, rest, cut.node)
            left = [rest]
        self._swap(entry, left)
        self._matched = 0  # the head may have changed
        self.record(cut)

    def rewind(self, item_id: str | None) -> None:
        """Remove everything behind the item ``item_id``; None: all items. Entries that left the context later
        than that come back into it. Raises ``ItemUnknown``, and ``ConversationBusy`` while a turn runs."""
        if self._slot is not None:
            raise ConversationBusy("A response writes this conversation: cancel it before going back")
        index = 0 if item_id is None else self._after(item_id)
        self._own()
        for entry in self._entries[index:]:
            for item in _items_of(entry):
                del self._home[item.id]
        del self._entries[index:]
        self._matched = 0
        self._close_gaps()
        self.head = self._found(self.segments())[0]
        self.record(Rewound(item=item_id))

    def compact(self, item: Message, indexes: Collection[int]) -> None:
        """Insert ``item``, a summary, before the segments that stay. The segments at
        ``indexes`` leave the context. Raises ``ItemInvalid``, ``ItemExists``, and ``ConversationBusy``
        while a turn runs."""
        if self._slot is not None:
            raise ConversationBusy("A response writes this conversation")
        segments = self.segments()
        gone = tuple(segments[index] for index in sorted(indexes))
        left = frozenset(indexes)
        kept = [segment for index, segment in enumerate(segments) if index not in left]
        index = self._index(kept[0]) if kept else len(self._entries)
        self._check_new(checked_item(item))
        self._own()
        self._entries.insert(index, item)
        self._home[item.id] = item
        self._matched = 0
        self._set_gaps((*self._gaps, ContextGap(item, gone)))
        self.head = self._found(self.segments())[0]
        self.record(Compacted(item=item, indexes=tuple(sorted(indexes))))

    def branch(self, record: Callable[[AnyOperation], None] = lambda operation: None) -> History:
        """A second history that begins as a copy of this one. The two share their entries until one of them
        changes. ``record`` is called with the operation of each edit of the new one."""
        other = History(max_items=self._max_items, record=record)
        other.share_preamble(self)
        other.head, other.rendered, other._slot = self.head, self.rendered, self._slot
        other._matched, other._appended = self._matched, self._appended
        other._gaps, other._outside = self._gaps, self._outside
        other._entries, other._home = self._entries, self._home
        self._shared = other._shared = True
        return other

    @property
    def told(self) -> TurnNode | None:
        """The node of the last turn, if the entries in the context are still those that the model saw up to its
        end; None if they were edited since, or if there is no turn."""
        base, _, edited = self._found(self.segments())
        return None if edited else base

    def script(
        self,
        preamble: Preamble | None = None,
        items: tuple[Item, ...] | None = None,
        more: tuple[Item, ...] = (),
        *,
        verbatim: bool = False,
    ) -> Script:
        """The prompt, as items, of a turn that would begin now. Changes nothing.

        ``preamble`` and ``items`` stand instead of the conversation's own (None: those are used);
        ``more`` items follow them. ``verbatim``: as in `TurnRequest`.
        """
        heading = self._heading if preamble is None else size_of(preamble)
        if items is not None:
            segments: tuple[Segment, ...] = (*items, *more)
            return Script(preamble or self._preamble, segments, miss=MissReason.OVERRIDDEN, heading=heading)
        segments = self.segments()
        if preamble is not None and preamble != self._preamble:
            return Script(preamble, (*segments, *more), miss=MissReason.OVERRIDDEN, heading=heading)
        base, miss, shared = self._base(segments)
        return Script(self._preamble, (*segments, *more), base, miss, shared, self._heading, verbatim)

    def prepare(self, request: TurnRequest) -> Prepared:
        """Begin the requested turn: make its prompt, and hold a slot at the history's end if its reply is to
        join the history. Raises ``ConversationBusy`` if it is and another turn runs."""
        preamble = request.preamble(self._preamble)
        plain = preamble == self._preamble and request.input is None
        self.check_free(request)
        items = () if request.prompt is not None else request.input
        script = self.script(None if plain else preamble, items, request.more, verbatim=request.verbatim)
        if request.out_of_band:
            return Prepared(None, script, aside=True)
        turn = self._hold(script if plain else self.script())  # nothing after this may raise
        return Prepared(turn, script, aside=not plain)

    def check_free(self, request: TurnRequest) -> None:
        """Raises ``ConversationBusy`` if the request's reply would join the history and another turn runs. A
        request out of band never does."""
        if self._slot is not None and not request.out_of_band:
            raise ConversationBusy("A response already writes this conversation")

    def _hold(self, script: Script) -> RunningTurn:
        self._slot, self._appended = ReplySlot(), True
        self._own()
        self._entries.append(self._slot)
        return RunningTurn(self._slot, script)

    def commit_turn(
        self,
        turn: RunningTurn,
        draft: Draft,
        reply: TurnReply,
        node_id: str | None = None,
        *,
        loose: bool = False,
    ) -> TurnNode:
        """End the turn with its reply, which takes the turn's slot. A new node of the tree becomes the head
        and is returned. ``draft``: the prompt in tokens. ``node_id``: the node's id; None makes a new one.
        ``loose``: the reply's items take the slot instead, because its ids say more than they do."""
        index = self._close(turn)
        for rewritten in turn.rewritten:
            if self._home.get(rewritten.items[0].id) is rewritten:
                index += self._rewrite(rewritten)
        node = draft.node(reply, node_id)
        self._entries.insert(index, reply)
        self._home.update((item.id, reply) for item in reply.items)
        self.head = node
        self.rendered = turn.script.preamble
        self._leave_out(turn, index)
        if loose:
            self._rewrite(reply)
        return node

    def _leave_out(self, turn: RunningTurn, index: int) -> None:
        """Take out of the context what the ended turn left out of its prompt, as far as it is still in the
        history, with outputs of its calls that came while the turn ran. ``index``: the index of the turn's
        reply."""
        there = {id(entry) for entry in self._entries}
        gone = [entry for entry in turn.left_out if id(entry) in there]
        outside = len(self._outside) + len(gone)
        self._matched = index + 1 - outside if self._appended else 0
        if gone:
            calls = {
                item.call_id for entry in gone for item in _items_of(entry) if isinstance(item, FunctionCall)
            }
            late = (entry for entry in self._entries[index + 1 :] if isinstance(entry, FunctionCallOutput))
            gone += [
                entry for entry in late if entry.call_id in calls
            ]  # outputs that came while the turn ran
            since = turn.on if id(turn.on) in there else self._entries[index]
            self._set_gaps((*self._gaps, ContextGap(since, tuple(gone))))

    def abort_turn(self, turn: RunningTurn) -> None:
        """End the turn without a reply. The items before it stay."""
        self._close(turn)

    def _close(self, turn: RunningTurn) -> int:
        assert self._slot is turn.slot, "only the running turn can end"
        index = self._index(turn.slot)
        self._own()
        del self._entries[index]
        self._slot = None
        return index

    def calls(self) -> ToolCalls:
        """The tool calls of all entries in the context, and which of them have outputs."""
        if self._calls is None:
            inside = (entry for entry in self._entries if id(entry) not in self._outside)
            self._calls = ToolCalls(item for entry in inside for item in _items_of(entry))
        return self._calls

    def _own(self) -> None:
        """Call this before a change of the entries: it copies them if another history shares them, and drops
        the cached tool calls."""
        self._calls = None
        if self._shared:
            self._entries, self._home, self._shared = list(self._entries), dict(self._home), False

    def segments(self) -> tuple[Segment, ...]:
        """The entries in the context, in order, up to the slot of a running turn if there is one. Entries
        that were left out are not among them."""
        end = len(self._entries) if self._slot is None else self._index(self._slot)
        inside: list[_Entry] = self._entries[:end]
        if self._outside:
            inside = [entry for entry in inside if id(entry) not in self._outside]
        return cast(tuple[Segment, ...], tuple(inside))

    @property
    def entries(self) -> tuple[Segment, ...]:
        """All entries, in the context or not. Raises ``AssertionError`` while a turn runs."""
        assert self._slot is None, "a turn runs"
        return cast(tuple[Segment, ...], tuple(self._entries))

    @property
    def gaps(self) -> tuple[ContextGap, ...]:
        """The entries out of the context, in the order in which they left it."""
        return self._gaps

    def _set_gaps(self, gaps: Sequence[ContextGap]) -> None:
        self._gaps = tuple(gap for gap in gaps if gap.entries)
        self._outside = {id(entry): entry for gap in self._gaps for entry in gap.entries}
        self._calls = None

    def _close_gaps(self) -> None:
        """After a rewind: bring a gap's entries into the context again if its entry ``since`` is gone or not
        known, or if the gap holds the history's last entry."""
        there = {id(entry) for entry in self._entries}
        last = self._entries[-1] if self._entries else None
        self._set_gaps(
            [
                gap
                for gap in self._gaps
                if id(gap.since) in there and all(entry is not last for entry in gap.entries)
            ]
        )

    def _edited(self, index: int) -> None:
        """Call this when an entry is inserted, removed or replaced at ``index``. It notes whether the
        prompt so far changes with it (`_matched` is set to 0), and whether the index is before the slot of the
        running turn (`_appended` is set to False)."""
        if index < self._matched + len(self._outside):
            self._matched = 0
        if self._slot is not None and index <= self._index(self._slot):
            self._appended = False

    def _base(self, segments: tuple[Segment, ...]) -> tuple[TurnNode | None, MissReason | None, int]:
        """What the next prompt, made of these ``segments``, can use again.

        Returns the last turn with tokens that can be used again, or None; why it is not the head, or None if it
        is; and how many of the first segments that turn and those before it cover.
        """
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
        """Compare the segments with the turns on the path to the head.

        Returns the last turn such that they are the same up to its end, or None; how many segments that covers;
        and whether the history was edited behind that turn.
        """
        base, at = matched(self.head, segments)
        edited = base is not self.head or any(isinstance(segment, TurnReply) for segment in segments[at:])
        return base, at, edited

    def _split(self, reply: TurnReply, rest: TurnReply, node_id: str) -> None:
        """If the reply belongs to a turn on the path to the head, make a new node of that turn, with ``rest``
        as its reply and the id ``node_id``, and move the head there."""
        for node in () if self.head is None else self.head.ancestry():
            if node.reply is reply:
                self.head = replace(node, reply=rest, id=node_id)
                return

    def _entry(self, item_id: str, param: str) -> _Entry:
        entry = self._home.get(item_id)
        if entry is None:
            raise ItemUnknown(f"The conversation has no item {item_id!r}", param=param)
        return entry

    def _index(self, entry: _Entry) -> int:
        last = len(self._entries) - 1  # search from the end: the entry is mostly near it
        return next(at for at in range(last, -1, -1) if self._entries[at] is entry)

    def _after(self, item_id: str) -> int:
        entry = self._entry(item_id, "previous_item_id")
        if isinstance(entry, TurnReply) and entry.items[-1].id != item_id:
            self._loosen(item_id, "previous_item_id")
        return self._index(self._home[item_id]) + 1

    def _loosen(self, item_id: str, param: str) -> None:
        """If the item is part of a reply, replace the reply by its items, so that one of them can be changed
        alone. The reply's token ids are lost. ``param``: the field that an ``ItemUnknown`` names."""
        entry = self._entry(item_id, param)
        if isinstance(entry, TurnReply):
            self._rewrite(entry)

    def _rewrite(self, reply: TurnReply) -> int:
        """Replace the reply by its items. Returns by how many entries the history grows."""
        self._swap(reply, reply.items)
        return len(reply.items) - 1

    def _swap(self, entry: _Entry, left: Sequence[_Entry]) -> None:
        """Replace ``entry`` by the entries ``left``, in the history and in its gap; empty: remove
        it."""
        index = self._index(entry)
        self._edited(index)
        self._own()
        self._entries[index : index + 1] = left
        for item in _items_of(entry):
            del self._home[item.id]
        self._home.update((item.id, other) for other in left for item in _items_of(other))
        if self._gaps:
            near = self._entries[index : index + 1] or self._entries[-1:]
            heir = left[-1] if left else near[0] if near else None

            def follow(gap: ContextGap) -> ContextGap:
                entries = (new for old in gap.entries for new in (left if old is entry else (old,)))
                return ContextGap(heir if gap.since is entry else gap.since, tuple(entries))

            self._set_gaps([follow(gap) for gap in self._gaps])


def _items_of(entry: _Entry) -> tuple[Item, ...]:
    if isinstance(entry, ReplySlot):
        return ()
    return entry.items if isinstance(entry, TurnReply) else (entry,)
