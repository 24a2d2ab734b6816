"""The tree of turns: immutable nodes, a moving head.

A node holds a turn's items and the exact token ids the model saw, as a span on its parent. Rewriting
history makes new nodes beside the old ones; who still wants an old branch keeps a node of it. Plain data,
fit for a journal. Knows nothing of templates or of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .items import Item, new_id
from .token_ids import Ids, frozen


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply:
    """What the model produced in one turn: its exact ids, and the items they were read as.

    ``ended``: the last id is an end-of-turn token that the model sampled; otherwise the reply was cut.
    ``respelled``: so many ids at its end are not the model's: the rest of a token that a cut went through.
    """

    items: tuple[Item, ...]
    ids: Ids
    ended: bool
    respelled: int = 0

    def up_to(self, keep: int, tail: Ids, items: tuple[Item, ...]) -> TurnReply:
        """What a cut leaves of it: the first ``keep`` ids and ``tail``, which say ``items``."""
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
        """The same turn with what is left of its reply, beside this one."""
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
    """Tokens of the paths to nodes: that of the one asked for last is kept, and its child's follow from it."""

    def __init__(self) -> None:
        self._last: tuple[TurnNode, Ids] | None = None

    def tokens(self, node: TurnNode) -> Ids:
        """`TurnNode.tokens`, in one step where that is the last one's child."""
        last = self._last
        if last is None or (last[0] is not node and last[0] is not node.parent):
            ids = node.tokens()
        elif last[0] is node:
            ids = last[1]
        else:
            ids = frozen(np.concatenate([last[1][: node.keep], node.prompt, node.reply.ids]))
        self._last = (node, ids)
        return ids


class Tree:
    """Where a conversation stands in its tree: the head, or None before the first turn."""

    def __init__(self, head: TurnNode | None = None) -> None:
        self._head = head

    @property
    def head(self) -> TurnNode | None:
        """The last turn that belongs to the conversation."""
        return self._head

    def move(self, to: TurnNode | None) -> None:
        """Continue from ``to``: a new turn, an older one (rewind), or the beginning."""
        self._head = to

    def path(self) -> tuple[TurnNode, ...]:
        """The turns from the root to the head."""
        return () if self._head is None else tuple(self._head.ancestry())[::-1]
