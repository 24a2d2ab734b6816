"""Edits of a history: cut a reply at a character or a token, rewind to an item or a token.

All ids before a cut stay as the model sampled them, so that their KV stays valid. If the cut goes through a
token, only the part of that token before the cut is tokenized again. Knows a history and the tokenizer, not the
engine.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import zip_longest

import msgspec
import regex

from ..errors import ConversationBusy, CutInvalid
from ..journal.records import Truncated
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import ChatTokenizer
from ..token_ids import Ids, bytes_of, ids_from, ids_of
from ..tools.channels import CHANNEL
from ..tools.formats import CLOSE, OPEN, REASONING
from .history import ROOT, History
from .items import FunctionCall, Item, Message, new_id
from .tree import TurnNode, TurnReply

_FLAG = "[\U0001f1e6-\U0001f1ff]"
_INSIDE_CHARACTER = regex.compile(
    "(?<=\u200d)"  # behind a joiner
    r"|(?=[\p{M}\u200c\u200d\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f])"  # before a mark or modifier
    rf"|(?<=\r)(?=\n)|(?<=(?<!{_FLAG}){_FLAG}(?:{_FLAG}{_FLAG})*)(?={_FLAG})"  # two letters are one flag
)


def shorten(history: History, item_id: str, end: int, tokenizer: ChatTokenizer) -> None:
    """Cut the assistant's message ``item_id`` in the history after its first ``end`` characters. If it is part
    of a reply, the reply's later items go too. Raises ``ItemUnknown``, or ``CutInvalid`` if the item is no
    message of the assistant or cannot be cut there."""
    checked_end(history.get(item_id), end)
    end_with(history, item_id, end, tokenizer)


def rewind(history: History, to: str | int, tokenizer: ChatTokenizer) -> None:
    """Remove everything behind ``to`` from the history: an item's id, ``"root"`` for the beginning, or a
    number of tokens from the beginning; a reply in which that token lies is cut there. Raises
    ``ItemUnknown``, ``CutInvalid``, and ``ConversationBusy`` while a turn runs. After an error nothing has
    changed."""
    if history.busy:
        raise ConversationBusy("A response writes this conversation: cancel it before going back")
    if isinstance(to, int):
        to = _cut_at(history, to, tokenizer)
    elif to != ROOT:
        end_with(history, to, None, tokenizer)
    history.rewind(None if to == ROOT else to)


def end_with(history: History, item_id: str, end: int | None, tokenizer: ChatTokenizer) -> None:
    """Cut the reply that holds ``item_id``, in the history: after the first ``end`` characters of that item, or
    behind the whole item if ``end`` is None.

    An item that is not part of a reply is itself shortened. If the point cannot be found among the reply's
    tokens, the reply is replaced by its items up to there, and its token ids are lost.
    """
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
    """Find the last item that stays if the conversation is to keep its first ``tokens`` tokens. If they end
    inside a reply, that reply is cut there, in the history.

    Returns the item's id, or ``"root"`` if no item stays; the caller removes the items behind it. Raises
    ``CutInvalid``.
    """
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
        return node.reply.items[-1].id
    cut = cut_tokens(node.reply, inside, tokenizer) if inside else None
    if cut is None or not cut.items:
        return _before(node)
    history.cut(msgspec.structs.replace(cut, node=new_id("turn")))
    return cut.items[-1].id


def _before(node: TurnNode) -> str:
    """The id of the last item before the reply of the turn ``node``; ``"root"`` if no item is before it."""
    if node.inputs:
        return node.inputs[-1].id
    return ROOT if node.parent is None else node.parent.reply.items[-1].id


# --- replies -----------------------------------------------------------------------------------------------


def checked_end(item: Item, end: int) -> None:
    """Check that ``item`` is a message of the model, and that it may be cut after ``end`` characters. Raises
    ``CutInvalid``."""
    if not isinstance(item, Message) or item.role != "assistant":
        raise CutInvalid(f"The item {item.id!r} is no message of the assistant", param="item_id")
    check_cut(item.text, end)


def check_cut(text: str, end: int) -> None:
    """Check that ``text`` may be cut after ``end`` characters. Raises ``CutInvalid``."""
    if end > len(text):
        raise CutInvalid(f"The text has {len(text)} characters, none at {end}", param="text_end")
    if inside_character(text, end):
        raise CutInvalid(f"A cut at {end} would take a character apart", param="text_end")


def cut_message(message: Message, end: int) -> Message:
    """A message with the first ``end`` characters; the same message if it has no more than that."""
    if end >= len(message.text):
        return message
    return msgspec.structs.replace(message, text=message.text[:end], complete=False)


def cut_after(reply: TurnReply, item_id: str, end: int | None, tokenizer: ChatTokenizer) -> Truncated | None:
    """The operation that cuts the reply after the first ``end`` characters of its message ``item_id``, or
    behind the whole item if ``end`` is None. Changes nothing: `History.cut` applies the operation.

    Returns None if that point cannot be found among the reply's tokens. Then the reply has to be replaced by
    its items.
    """
    at = [item.id for item in reply.items].index(item_id)
    item = reply.items[at]
    kept = cut_message(item, end) if end is not None and isinstance(item, Message) else item
    said = _ReplyText(reply, tokenizer)
    point = said.spans[at][1] if at < len(said.spans) else None
    if point is None:
        return None
    if isinstance(item, Message) and isinstance(kept, Message):
        point -= len(item.text) - len(kept.text)
    keep, tail = said.ids_up_to(point)
    cut = Truncated(item=item_id, items=(*reply.items[:at], kept), keep=keep, tail=bytes_of(ids_of(tail)))
    return cut if said.decodes(reply.up_to(keep, ids_of(tail), cut.items).ids, point) else None


def cut_tokens(reply: TurnReply, keep: int, tokenizer: ChatTokenizer) -> Truncated:
    """The operation that cuts the reply behind its first ``keep`` tokens. Changes nothing: `History.cut`
    applies the operation.

    Raises ``CutInvalid`` if the point is inside a character or a tool call, or if its tokens cannot be
    matched to its items.
    """
    said = _ReplyText(reply, tokenizer)
    point = said.steps[keep]
    if not said.decodes(reply.ids[:keep], point) or inside_character(said.text, point):
        raise CutInvalid("The cut would take a character apart", param="to")
    items: list[Item] = []
    for item, span in zip_longest(reply.items, said.spans):
        begin, end = span or (-1, None)
        if begin >= point:
            break
        if span is None:
            raise CutInvalid(
                "The tokens of this reply cannot be matched to its items: name an item", param="to"
            )
        if end is None or (point < end and not isinstance(item, Message)):
            raise CutInvalid("A reply cannot be cut inside a tool call", param="to")
        items.append(cut_message(item, point - begin) if isinstance(item, Message) else item)
    return Truncated(item=reply.items[0].id, items=tuple(items), keep=keep)


def trimmed(reply: TurnReply, tokenizer: ChatTokenizer) -> TurnReply | None:
    """The reply without the tokens behind its last item: the rest of a stop string, a stop id, a call that
    was cut before its name. None if that point cannot be found among its tokens: then it has to be replaced
    by its items. A call that was cut keeps its tokens."""
    last = reply.items[-1]
    if isinstance(last, FunctionCall) and not last.complete:
        return reply
    cut = cut_after(reply, last.id, None, tokenizer)
    if cut is None:
        return None
    tail = ids_from(cut.tail)
    return reply if cut.keep == len(reply.ids) and not len(tail) else reply.up_to(cut.keep, tail, reply.items)


class _ReplyText:
    """The whole text of a reply, and where its items are in it.

    ``text``: the decoded text. ``steps[n]``: how many of its characters the first ``n`` tokens make certain;
    they may end in a part of one more.
    ``spans``: for each item, in order, the indexes in ``text`` at which it begins and ends, up to the first
    item that cannot be found. The end of a call is behind its closing tag; None if there is no such tag. A
    reply in the harmony form of gpt-oss has no spans: the tags of its reasoning are not in the text.
    """

    def __init__(self, reply: TurnReply, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        detokenizer, pieces = Detokenizer(tokenizer.backend, tokenizer.texts), list[str]()
        self.steps, self._whole = [0], [True]
        self._ids = ids = reply.ids.tolist()
        for token in ids:
            pieces.append(detokenizer.step(token))
            self.steps.append(self.steps[-1] + len(pieces[-1]))
            self._whole.append(not detokenizer.within)
        self.text = "".join(pieces) + detokenizer.flush()
        self.spans: list[tuple[int, int | None]] = []
        channels = tokenizer.special_ids.get(CHANNEL) in ids
        self._least = 0  # number of ids up to the end of the reasoning, if a special token ends it
        point = self._after_reasoning(reply.items)
        for item in () if channels else reply.items:
            words, close = (item.text, "") if isinstance(item, Message) else (OPEN, CLOSE)
            begin = self.text.find(words, point)
            if begin < 0:
                break
            closed = self.text.find(close, begin + len(words))
            self.spans.append((begin, closed + len(close) if closed >= 0 else None))
            if closed < 0:
                break
            point = closed + len(close)

    def _after_reasoning(self, items: tuple[Item, ...]) -> int:
        """The index in the text at which the first item may begin: behind the reply's reasoning, which may
        contain the item's words. 0 if there is no reasoning. If a special token ends the reasoning, `_least` is
        set to the number of ids up to it."""
        for end in dict.fromkeys(tags.end for tags in REASONING.values()):
            token = self._tokenizer.special_ids.get(end)  # a special token is not in the text
            if token in self._ids:
                self._least = self._ids.index(token) + 1
                return self.steps[self._least]
            found = self.text.find(end)
            if found >= 0 and not (items and end in getattr(items[0], "text", "")):
                return found + len(end)
        return 0

    def ids_up_to(self, point: int) -> tuple[int, list[int]]:
        """The ids for the text before the character ``point``: how many of the reply's ids stay, and new ids
        for the text between them and ``point``."""
        through = bisect_left(self.steps, point)
        if through == len(self.steps):  # the ids behind it are parts of a character
            return through - 1, []
        if self.steps[through] == point and self._whole[through]:
            return max(through, self._least), []
        whole = bisect_left(self.steps, self.steps[through - 1])
        while not self._whole[whole]:
            whole -= 1
        specials = self._tokenizer.special_ids.values()  # they have no text, as the parts of a character
        whole = max((at for at in range(whole, through) if self._ids[at - 1] in specials), default=whole)
        rest = self.text[self.steps[whole] : point]
        return whole, self._tokenizer.encode(rest, leads=False)

    def decodes(self, ids: Ids, end: int) -> bool:
        """Whether these ids decode to the first ``end`` characters of the text."""
        said: str = self._tokenizer.backend.decode(ids.tolist(), skip_special_tokens=True)
        return said == self.text[:end]


def inside_character(text: str, at: int) -> bool:
    """Whether a cut before the code point number ``at`` of the text would split a character that the user sees,
    such as a letter and its accent, or a flag of two code points."""
    return 0 < at < len(text) and _INSIDE_CHARACTER.match(text, at) is not None
