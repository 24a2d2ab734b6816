"""The tree of turns: immutable nodes and a moving head. Also the prompt of the next turn.

A node holds a turn's items and the exact token ids that the model saw. It stores only what it adds to its
parent's tokens. Changing the history makes new nodes beside the old ones. A `Script` is a prompt as items; a
`Draft` is the same prompt as tokens. All of it is plain data that the journal can store. Knows nothing of
templates or of the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from ..token_ids import Ids, frozen
from ..turn.events import MissReason
from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, new_id


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply:
    """What the model produced in one turn: the items that a client sees, one at least, and the exact token
    ids that say them, with the model's reasoning before them. Nothing else is said by these ids.

    ``ended``: the last id is an end-of-turn token that the model sampled; false if the reply was cut.
    ``respelled``: how many of the last ids the model did not sample: a cut went through a token, and the part
    before the cut was tokenized again.
    """

    items: tuple[Item, ...]
    ids: Ids
    ended: bool
    respelled: int = 0

    def up_to(self, keep: int, tail: Ids, items: tuple[Item, ...]) -> TurnReply:
        """The reply after a cut: its first ``keep`` ids, followed by the ids ``tail``. ``items``: those that
        are left of its items."""
        whole = keep == len(self.ids) and not len(tail)
        ids = self.ids if whole else frozen(np.concatenate([self.ids[:keep], tail]))
        return TurnReply(items, ids, self.ended and whole, len(tail))


@dataclass(frozen=True, slots=True, eq=False)
class TurnNode:
    """One turn. A path is the sequence of all tokens from the root to a node's end.

    ``[0, keep)`` tokens of the parent's path | ``[keep, start)`` ``prompt`` | ``[start, length)``
    ``reply.ids``.

    ``inputs``: the items between the parent's reply and this one. ``prompt``: their tokens, with those that the
    template adds. ``keep`` is the parent's length; it is one less where the template's end token replaced the
    one that the model sampled. A turn without a parent has a ``keep`` of 0.
    """

    parent: TurnNode | None
    inputs: tuple[Item, ...]
    keep: int
    prompt: Ids
    reply: TurnReply
    id: str = field(default_factory=lambda: new_id("turn"))

    @property
    def start(self) -> int:
        """The position of the reply's first token."""
        return self.keep + len(self.prompt)

    @property
    def length(self) -> int:
        """Tokens on the path from the root to this node's end."""
        return self.start + len(self.reply.ids)

    def ancestry(self) -> Iterator[TurnNode]:
        """This node, its parent, and so on to the root."""
        node: TurnNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def tokens(self) -> Ids:
        """All token ids from the root to this node's end, ``[length]``."""
        ids = np.empty(self.length, dtype=np.int32)
        end = self.length
        for node in self.ancestry():
            # a descendant keeps [0, end) of this path: put what falls into this node's span
            reply_end, prompt_end = min(end, node.length), min(end, node.start)
            ids[node.start : reply_end] = node.reply.ids[: max(0, reply_end - node.start)]
            ids[node.keep : prompt_end] = node.prompt[: max(0, prompt_end - node.keep)]
            end = min(end, node.keep)
        return frozen(ids)


class Paths:
    """Gives all token ids up to a turn's end. It caches the last result, so that for that turn's child only the
    child's own tokens are added."""

    def __init__(self) -> None:
        self._last: tuple[TurnNode, Ids] | None = None

    def tokens(self, node: TurnNode) -> Ids:
        """All token ids from the root to the end of ``node``. Cheap if the last call was for this node or for
        its parent."""
        last = self._last
        if last is None or (last[0] is not node and last[0] is not node.parent):
            ids = node.tokens()
        elif last[0] is node:
            ids = last[1]
        else:
            ids = frozen(np.concatenate([last[1][: node.keep], node.prompt, node.reply.ids]))
        self._last = (node, ids)
        return ids


WRITTEN = 16
"""Writing a text with the chat template is at least this many times faster than tokenizing it."""

AROUND = 32
"""The template takes as long to write one message, without its text, as so many characters take to tokenize."""

Segment: TypeAlias = Item | TurnReply


@dataclass(frozen=True, slots=True)
class Script:
    """The prompt of a turn, as items: the preamble and ``segments``, in order.

    ``base``: the last turn with tokens that can be used again; None: everything is tokenized. ``shared``: how
    many of the first segments belong to ``base`` and its ancestors. ``miss``: why ``base`` is not the
    conversation's last turn; None if it is. ``heading``: roughly the number of characters of the preamble.

    ``verbatim``: the conversation is its client's own text. The prompt reads as the template writes its
    items, and the tokens of a turn are used again only if they decode to that text.
    """

    preamble: Preamble
    segments: tuple[Segment, ...]
    base: TurnNode | None = None
    miss: MissReason | None = None
    shared: int = 0
    heading: int = 0
    verbatim: bool = False

    def characters(self) -> int:
        """Roughly how many characters must be tokenized, as a measure of the work. The text up to ``base`` is
        only written with the template, so a `WRITTEN`-th of it counts; each segment counts as `AROUND`
        more."""
        new, old = self.segments[self.shared :], self.segments[: self.shared]
        heading = 0 if old else self.heading
        before = (sum(map(_length, old)) + self.heading - heading) // WRITTEN
        return sum(map(_length, new)) + before + heading + AROUND * len(self.segments)

    def without(self, indexes: Collection[int]) -> Script:
        """The same script without the segments at ``indexes``. Turns before the first of them can
        still use their tokens again."""
        gone = frozenset(indexes)
        kept = tuple(segment for index, segment in enumerate(self.segments) if index not in gone)
        base, shared = matched(self.base, kept)
        return replace(self, segments=kept, base=base, shared=shared, miss=MissReason.CONTEXT_TRUNCATED)

    def rewritten(self, shared: int) -> Script:
        """The same script with only its first ``shared`` segments, which must be whole turns, as they were.
        The replies behind them are replaced by their items."""
        base, _ = matched(self.base, self.segments[:shared])
        segments = (*self.segments[:shared], *items_of(self.segments[shared:]))
        miss = self.miss or (None if base is self.base else MissReason.HISTORY_EDITED)
        return replace(self, segments=segments, base=base, shared=shared, miss=miss)


@dataclass(frozen=True, slots=True)
class Draft:
    """The prompt of a turn, as tokens: the first ``keep`` tokens from the root to the end of ``parent``,
    which are used again, and then ``prompt``.

    ``parent``: the turn before; None if there is none. ``inputs``: the items after ``parent``; ``prompt`` is
    their text in tokens. ``miss``: why ``parent`` is not the conversation's last turn; None if it is.
    ``path``: all tokens from the root to the end of ``parent``, if they are at hand; None: they are collected
    from the tree.
    """

    parent: TurnNode | None
    inputs: tuple[Item, ...]
    keep: int
    prompt: Ids
    miss: MissReason | None = None
    path: Ids | None = None

    def node(self, reply: TurnReply, node_id: str | None = None) -> TurnNode:
        """The tree node of the turn with this prompt and ``reply``. ``node_id``: None makes a new id."""
        return TurnNode(self.parent, self.inputs, self.keep, self.prompt, reply, node_id or new_id("turn"))

    def tokens(self) -> Ids:
        """The whole prompt from the root, ``[keep + len(prompt)]``."""
        if self.parent is None:
            return self.prompt
        path = self.parent.tokens() if self.path is None else self.path
        return frozen(np.concatenate([path[: self.keep], self.prompt]))


def matched(head: TurnNode | None, segments: Sequence[Segment]) -> tuple[TurnNode | None, int]:
    """How many of the turns from the root to ``head`` the segments (items and replies) begin with. Returns the
    last turn that they hold completely, or None, and the number of segments up to its end."""
    base, at = None, 0
    for node in () if head is None else tuple(head.ancestry())[::-1]:
        wanted = (*node.inputs, node.reply)
        found = segments[at : at + len(wanted)]
        if len(found) < len(wanted) or any(a is not b for a, b in zip(found, wanted, strict=True)):
            break
        base, at = node, at + len(wanted)
    return base, at


def turns_of(segments: tuple[Segment, ...]) -> Iterator[tuple[tuple[Item, ...], TurnReply | None]]:
    """For each turn, in order: its input items and its reply. The last pair holds the items behind the last
    reply, perhaps none, and None: its turn comes next."""
    inputs: list[Item] = []
    for segment in segments:
        if isinstance(segment, TurnReply):
            yield tuple(inputs), segment
            inputs = []
        else:
            inputs.append(segment)
    yield tuple(inputs), None


def items_of(segments: Iterable[Segment]) -> Iterator[Item]:
    """The items of these segments, in order, those of the replies included."""
    for segment in segments:
        if isinstance(segment, TurnReply):
            yield from segment.items
        else:
            yield segment


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
