"""The tree of turns: immutable nodes and a moving head; and what the next turn puts before the model.

A node holds a turn's items and the exact token ids the model saw, as a span on its parent. Rewriting history
makes new nodes beside the old ones. A `Script` is a prompt in items, a `Draft` the same in tokens. Plain data,
fit for a journal. Knows nothing of templates or of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, new_id
from .token_ids import Ids, frozen
from .turn.events import MissReason


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply:
    """What the model produced in one turn: its exact ids, and the items they were read as.

    ``ended``: the last id is an end-of-turn token that the model sampled; otherwise the reply was cut.
    ``respelled``: a cut went through a token, and this many ids at the end spell the part that is left.
    """

    items: tuple[Item, ...]
    ids: Ids
    ended: bool
    respelled: int = 0

    def up_to(self, keep: int, tail: Ids, items: tuple[Item, ...]) -> TurnReply:
        """The reply cut to its first ``keep`` ids and ``tail``, which say ``items``."""
        return TurnReply(items, frozen(np.concatenate([self.ids[:keep], tail])), False, len(tail))


@dataclass(frozen=True, slots=True, eq=False)
class TurnNode:
    """One turn.

    ``[0, keep)`` tokens of the parent's path | ``[keep, start)`` ``prompt`` | ``[start, length)``
    ``reply.ids``. ``keep`` is the parent's length, or one less where its reply's own end token gave way
    to the template's.
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

    def cut(self, reply: TurnReply, node_id: str) -> TurnNode:
        """A node beside this one: the same turn with a shortened reply."""
        return TurnNode(self.parent, self.inputs, self.keep, self.prompt, reply, node_id)

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
            # a descendant keeps [0, end) of this path: place what falls into this node's span
            reply_end, prompt_end = min(end, node.length), min(end, node.start)
            ids[node.start : reply_end] = node.reply.ids[: max(0, reply_end - node.start)]
            ids[node.keep : prompt_end] = node.prompt[: max(0, prompt_end - node.keep)]
            end = min(end, node.keep)
        return frozen(ids)


class Paths:
    """Token ids of paths; caches the last path, so that its child's costs one step."""

    def __init__(self) -> None:
        self._last: tuple[TurnNode, Ids] | None = None

    def tokens(self, node: TurnNode) -> Ids:
        """All token ids from the root to the node's end, as `TurnNode.tokens`; cheap if it or its parent was
        asked for last."""
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
"""A template writes at least this many characters in the time that tokenizing one takes."""

Segment: TypeAlias = Item | TurnReply


@dataclass(frozen=True, slots=True)
class Script:
    """What a turn puts before the model: ``segments`` in order.

    ``base``: the last turn that keeps its tokens; it and its ancestors are the first ``shared``
    segments. With None everything is rendered. ``miss``: why ``base`` is not the head. ``heading``: roughly the
    number of characters of the preamble.
    """

    preamble: Preamble
    segments: tuple[Segment, ...]
    base: TurnNode | None = None
    miss: MissReason | None = None
    shared: int = 0
    heading: int = 0

    def characters(self) -> int:
        """Roughly how many characters must be tokenized. Text before ``base`` is only rendered, which is many
        times faster, and counts as less."""
        new, old = self.segments[self.shared :], self.segments[: self.shared]
        heading = 0 if old else self.heading
        before = (sum(map(_length, old)) + self.heading - heading) // WRITTEN
        return sum(map(_length, new)) + before + heading


@dataclass(frozen=True, slots=True)
class Draft:
    """A script in tokens, before its reply: ``prompt`` behind the first ``keep`` tokens of ``parent``'s path.

    ``inputs``: the items since ``parent``, which ``prompt`` writes out. ``miss`` as in the script. ``path``:
    the tokens of ``parent``'s path, if they are known.
    """

    parent: TurnNode | None
    inputs: tuple[Item, ...]
    keep: int
    prompt: Ids
    miss: MissReason | None = None
    path: Ids | None = None

    def node(self, reply: TurnReply, node_id: str | None = None) -> TurnNode:
        """The node of this turn with its reply."""
        return TurnNode(self.parent, self.inputs, self.keep, self.prompt, reply, node_id or new_id("turn"))

    def tokens(self) -> Ids:
        """The whole prompt from the root, ``[keep + len(prompt)]``."""
        if self.parent is None:
            return self.prompt
        path = self.parent.tokens() if self.path is None else self.path
        return frozen(np.concatenate([path[: self.keep], self.prompt]))


def turns_of(segments: tuple[Segment, ...]) -> Iterator[tuple[tuple[Item, ...], TurnReply | None]]:
    """The inputs and the reply of each turn; the last turn has no reply yet."""
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
