"""Edits of a history: cut a reply, rewind to an item or a token. What is left of a reply keeps its exact ids,
so that its KV stays valid. Knows a history and the tokenizer, not the engine."""

from __future__ import annotations

import msgspec

from .errors import ConversationBusy, CutInvalid
from .history import ROOT, History
from .items import Message, new_id
from .journal.records import Truncated
from .text.tokenizer import ChatTokenizer
from .tree import TurnNode, TurnReply
from .turn.kept_ids import checked_end, cut_after, cut_message, cut_tokens


def shorten(history: History, item_id: str, end: int, tokenizer: ChatTokenizer) -> None:
    """Cut the message ``item_id``, and the reply that holds it, after ``end`` characters. Raises
    ``ItemUnknown`` or ``CutInvalid``."""
    checked_end(history.get(item_id), end)
    end_with(history, item_id, end, tokenizer)


def rewind(history: History, to: str | int, tokenizer: ChatTokenizer) -> None:
    """Remove everything behind an item (``"root"``: everything), or behind the first ``to`` tokens. Raises
    ``ItemUnknown``, ``CutInvalid``, and ``ConversationBusy`` while a turn runs; then nothing changed."""
    if history.busy:
        raise ConversationBusy("A response writes this conversation: cancel it before going back")
    if isinstance(to, int):
        to = _cut_at(history, to, tokenizer)
    elif to != ROOT:
        end_with(history, to, None, tokenizer)
    history.rewind(None if to == ROOT else to)


def end_with(history: History, item_id: str, end: int | None, tokenizer: ChatTokenizer) -> None:
    """Cut the reply that holds the item behind it, or after ``end`` of its characters."""
    item, reply = history.get(item_id), history.reply_of(item_id)
    kept = cut_message(item, end) if isinstance(item, Message) and end is not None else item
    if kept is item and (reply is None or reply.items[-1] is item):
        return
    cut = None if reply is None else cut_after(reply, item_id, end, tokenizer)
    if cut is None:
        before = [] if reply is None else list(reply.items[: reply.items.index(item)])
        cut = Truncated(item=item_id, items=(*before, kept), loose=True)
    history.cut(msgspec.structs.replace(cut, node=new_id("turn")))


def _cut_at(history: History, tokens: int, tokenizer: ChatTokenizer) -> str:
    """Cut the reply in which the first ``tokens`` tokens end, if in one. Returns the last item left."""
    head = history.told
    if head is None and history.head is not None:
        raise CutInvalid(
            "The conversation was edited: its tokens are counted again in the next turn", param="to"
        )
    if not 0 <= tokens <= (0 if head is None else head.length):
        length = 0 if head is None else head.length
        raise CutInvalid(f"The conversation has {length} tokens, not {tokens}", param="to")
    node = head
    while node is not None and tokens <= node.keep:
        node = node.parent
    if node is None:
        return ROOT
    if tokens < node.start:
        raise CutInvalid("The token is inside the model's input: name an item", param="to")
    inside = tokens - node.start
    if inside and inside >= len(node.reply.ids):
        return node.reply.items[-1].id if node.reply.items else _before(node)
    cut = cut_tokens(node.reply, inside, tokenizer) if inside else None
    if cut is None or not cut.items:
        return _before(node)
    history.cut(msgspec.structs.replace(cut, node=new_id("turn")))
    return cut.items[-1].id


def _before(node: TurnNode) -> str:
    """The last item before the turn's reply."""
    if node.inputs:
        return node.inputs[-1].id
    return ROOT if node.parent is None else _last(node.parent)


def _last(node: TurnNode) -> str:
    reply: TurnReply = node.reply
    return reply.items[-1].id if reply.items else _before(node)
