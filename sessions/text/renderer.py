"""From a script to the ids the model sees: only what is new is tokenized.

The whole conversation is rendered, replies as sentinels; of the text only what follows the last kept turn
becomes ids, and the replies' own ids are spliced in. So a kept turn stays what the model really saw, even
where the template would now write it otherwise. Knows nothing of the engine.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from itertools import takewhile

import msgspec

from ..errors import PromptTooLong
from ..items import FunctionCallOutput, Growing, Item
from ..token_ids import NONE, Ids
from ..tree import Draft, Paths, Script, Segment, TurnNode, TurnReply, turns_of
from ..workers import Stopped
from .chat_template import ChatTemplate, RoleRules
from .stable_prefix import Grown, StablePrefix
from .tokenizer import ChatTokenizer

_END = f"\U000f0004{secrets.token_hex(8)}\U000f0005"
"""Marks where text that is still being written ends; nobody outside this process can write it."""


class Renderer:
    """Makes drafts for one session: its clock stands still, so that a new day does not change the head.

    ``settled``: the rule of the tokenizer. It looks through the whole vocabulary once, for all sessions.
    ``rules``: the orders of roles that the template takes.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, now: datetime, settled: StablePrefix, rules: RoleRules | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, now, rules)
        self._settled = settled
        self._grown = Grown(settled)
        self._paths = Paths()

    def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """The script in tokens. Raises ``TemplateFailed``.

        Turns after ``script.base`` are rendered anew, each keeping its reply's ids. A prompt of ``most`` tokens
        or more is refused with ``PromptTooLong``: at once where the length of its text shows that it is one, or
        when there are as many. Once it is ``stopped`` it goes no further, and returns what there is then.
        """
        self._grown = Grown(self._settled)  # what grew is whole now, and takes no more room
        pieces = self._template.pieces(script.preamble, script.segments)
        kept = _turns_on(script.base)
        turns = list(turns_of(script.segments))
        parent = script.base
        for (inputs, reply), piece in zip(turns[kept:], pieces[kept:], strict=True):
            draft = self._join(parent, inputs, piece, script, most, stopped)
            if reply is None or stopped():
                return draft
            parent = draft.node(reply)
        raise AssertionError("the last turn of a script has no reply")

    def settled(self, script: Script) -> Ids:
        """The tokens from the root that nothing said later can change; the last item still grows.

        No tokens where a turn before it would have to be rendered anew, or the template does not write the
        item's text so that more of it is more of the same: it may escape characters, as JSON does, one by one.
        Raises ``TemplateFailed``.
        """
        *before, last = script.segments
        assert isinstance(last, Growing), "an item that is being written"
        if sum(isinstance(segment, TurnReply) for segment in before) != _turns_on(script.base):
            return NONE
        text = self._before_end(script, before, last)
        ids = self._grown.ids(text, leads=script.base is None)
        return self._joined(script.base, (), ids, script).tokens() if len(ids) else NONE

    def _before_end(self, script: Script, before: list[Segment], last: Growing) -> str:
        """The text after the last reply, up to where ``last`` still grows; empty where that is not known.

        What may yet be stripped, or turn out to be a control token, is held back before the template sees it:
        one that escapes text makes it into something else. Where nothing is left the template may do without
        what it writes around text: what it writes both ways stands.
        """
        said = self._settled.standing(_text_of(last))
        text, *rest = self._last_piece(script, before, _with_text(last, said + _END)).split(_END)
        if len(rest) != 1:
            return ""
        return text if said else _shared(text, self._last_piece(script, before, _with_text(last, "")))

    def _last_piece(self, script: Script, before: list[Segment], last: Growing) -> str:
        return self._template.pieces(script.preamble, (*before, last))[-1]

    def _join(
        self,
        parent: TurnNode | None,
        inputs: tuple[Item, ...],
        piece: str,
        script: Script,
        most: int | None,
        stopped: Stopped,
    ) -> Draft:
        """The piece after ``parent``'s reply. The end of that reply is written once.

        The end token the model sampled is kept if the template begins with the same; another one gives
        way to the template's (it is the pending token: no KV is lost); a reply that was cut is closed by
        the template.
        """
        kept = 0 if parent is None else parent.length
        least = kept + self._tokenizer.least(piece)
        if most is not None and least > most:
            raise _too_long(least, most)
        room = None if most is None else most - kept + 2  # the end of a reply may be written twice
        ids = self._settled.encode(piece, leads=parent is None, most=room, stopped=stopped)
        if room is not None and len(ids) >= room:
            raise _too_long(kept + len(ids) - 1, most)
        return self._joined(parent, inputs, ids, script)

    def _joined(self, parent: TurnNode | None, inputs: tuple[Item, ...], ids: Ids, script: Script) -> Draft:
        keep = 0 if parent is None else parent.length
        if parent is not None and parent.reply.ended:
            if len(ids) and ids[0] == parent.reply.ids[-1]:
                ids = ids[1:]
            else:
                keep -= 1
        path = self._paths.tokens(parent) if parent is not None and parent is script.base else None
        return Draft(parent, inputs, keep, ids, script.miss, path)


def _too_long(least: int, most: int | None) -> PromptTooLong:
    return PromptTooLong(f"The prompt has at least {least} tokens; the model's context holds {most}", least)


def _text_of(item: Growing) -> str:
    return item.output if isinstance(item, FunctionCallOutput) else item.text


def _with_text(item: Growing, text: str) -> Growing:
    named = {"output": text} if isinstance(item, FunctionCallOutput) else {"text": text}
    return msgspec.structs.replace(item, **named)


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return one[: sum(1 for _ in alike)]


def _turns_on(node: TurnNode | None) -> int:
    return 0 if node is None else sum(1 for _ in node.ancestry())
