"""Where a reply is cut, in its own tokens: a place in its text or among its tokens, as the ids that remain.

All ids before the cut stay as the model wrote them; only of the one the cut goes through the rest is tokenized
again. Pure. Knows a reply and the tokenizer; nothing of histories or engines.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left

import msgspec

from ..errors import CutInvalid
from ..items import Item, Message
from ..journal.records import Truncated
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import ChatTokenizer
from ..token_ids import Ids, bytes_of, ids_of
from ..tools.formats import CLOSE, OPEN
from ..tools.reasoning import END
from ..tree import TurnReply

_JOINER = "\u200d"
_EXTENDING = frozenset(
    {"\u200c", _JOINER, *map(chr, range(0x1F3FB, 0x1F400)), *map(chr, range(0xE0020, 0xE0080))}
)


def checked_end(item: Item, end: int, param: str = "text_end") -> None:
    """Whether an item may end after ``end`` characters. Raises ``CutInvalid``."""
    if not isinstance(item, Message) or item.role != "assistant":
        raise CutInvalid(f"The item {item.id!r} is no message of the assistant", param="item_id")
    check_place(item.text, end, param)


def check_place(text: str, end: int, param: str = "text_end") -> None:
    """Whether a text may be cut there. Raises ``CutInvalid``."""
    if end > len(text):
        raise CutInvalid(f"The text has {len(text)} characters, none at {end}", param=param)
    if inside_character(text, end):
        raise CutInvalid(f"A cut at {end} would take a character apart", param=param)


def cut_message(message: Message, end: int) -> Message:
    """The message up to there; whole where nothing is cut."""
    if end >= len(message.text):
        return message
    return msgspec.structs.replace(message, text=message.text[:end], complete=False)


def cut_after(reply: TurnReply, item_id: str, end: int | None, tokenizer: ChatTokenizer) -> Truncated | None:
    """The reply up to ``end`` characters of its message ``item_id``, or (None) to the end of that item.

    None where its tokens do not tell where that is: then it has to be taken apart into its items.
    """
    at = [item.id for item in reply.items].index(item_id)
    item = reply.items[at]
    kept = cut_message(item, end) if end is not None and isinstance(item, Message) else item
    told = _Told(reply, tokenizer)
    place = told.end_of(at)
    if place is None:
        return None
    if isinstance(item, Message) and isinstance(kept, Message):
        place -= len(item.text) - len(kept.text)
    keep, tail = told.ids_up_to(place)
    cut = Truncated(item=item_id, items=(*reply.items[:at], kept), keep=keep, tail=bytes_of(ids_of(tail)))
    return cut if told.says(reply.up_to(keep, ids_of(tail), cut.items).ids, place) else None


def cut_tokens(reply: TurnReply, keep: int, tokenizer: ChatTokenizer) -> Truncated:
    """The reply up to its first ``keep`` tokens. Raises ``CutInvalid`` inside a character or a tool call."""
    if not reply.items:  # it was cut while it only thought
        raise CutInvalid("A reply in which nothing was said cannot be cut", param="to")
    told = _Told(reply, tokenizer)
    place = told.steps[keep]
    if not told.says(reply.ids[:keep], place) or inside_character(told.text, place):
        raise CutInvalid("The cut would take a character apart", param="to")
    items: list[Item] = []
    for at, item in enumerate(reply.items):
        begin, end = told.begin_of(at), told.end_of(at)
        if begin is not None and begin >= place:
            break
        if begin is None or end is None or (place < end and not isinstance(item, Message)):
            raise CutInvalid("A reply cannot be cut inside a tool call", param="to")
        items.append(cut_message(item, place - begin) if isinstance(item, Message) else item)
    return Truncated(item=reply.items[0].id, items=tuple(items), keep=keep)


class _Told:
    """A reply's whole text. ``steps[n]``: characters that its first ``n`` tokens made certain."""

    def __init__(self, reply: TurnReply, tokenizer: ChatTokenizer) -> None:
        self._items = reply.items
        self._tokenizer = tokenizer
        reader, pieces = Detokenizer(tokenizer.backend), list[str]()
        self.steps = [0]
        for token in reply.ids.tolist():
            pieces.append(reader.step(token))
            self.steps.append(self.steps[-1] + len(pieces[-1]))
        self.text = "".join(pieces) + reader.flush()

    def begin_of(self, at: int) -> int | None:
        """Where the text of the reply's item ``at`` begins; None where it cannot be found."""
        place = self._after_reasoning() if at == 0 else self.end_of(at - 1)
        if place is None:
            return None
        item = self._items[at]
        found = self.text.find(item.text if isinstance(item, Message) else OPEN, place)
        return None if found < 0 else found

    def _after_reasoning(self) -> int:
        """Where the first item may begin: reasoning that was split off might say the same words."""
        first, end = self._items[0], self.text.find(END)
        return 0 if end < 0 or END in getattr(first, "text", "") else end + len(END)

    def end_of(self, at: int) -> int | None:
        """Where it ends: a call's with its closing tag."""
        begin, item = self.begin_of(at), self._items[at]
        if begin is None or isinstance(item, Message):
            return None if begin is None else begin + len(getattr(item, "text", ""))
        found = self.text.find(CLOSE, begin)
        return None if found < 0 else found + len(CLOSE)

    def ids_up_to(self, place: int) -> tuple[int, list[int]]:
        """How many of the reply's ids stay, and those of the rest of the token that the place is in."""
        through = bisect_left(self.steps, place)
        if through == len(self.steps):  # behind it are pieces of a character
            return through - 1, []
        if self.steps[through] == place:
            return through, []
        whole = bisect_left(self.steps, self.steps[through - 1])
        rest = self.text[self.steps[whole] : place]
        return whole, self._tokenizer.encode(rest, leads=False)

    def says(self, ids: Ids, end: int) -> bool:
        """Whether these ids say precisely the first ``end`` characters."""
        said: str = self._tokenizer.backend.decode(ids.tolist(), skip_special_tokens=True)
        return said == self.text[:end]


# --- characters ---------------------------------------------------------------------------------------------


def inside_character(text: str, at: int) -> bool:
    """Whether a cut before code point ``at`` would take a character apart."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if _extends(after) or before == _JOINER:
        return True
    if before == "\r" and after == "\n":
        return True
    return _is_flag(after) and _flags_before(text, at) % 2 == 1


def _extends(character: str) -> bool:
    return character in _EXTENDING or unicodedata.category(character).startswith("M")


def _is_flag(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"


def _flags_before(text: str, at: int) -> int:
    count = 0
    while count < at and _is_flag(text[at - 1 - count]):
        count += 1
    return count
