"""Turns a script into the token ids that the model sees, and tokenizes only what is new.

The template renders the whole conversation, with a sentinel for each reply. Only the text behind the last
kept turn is tokenized; the replies' own ids are put in. So a kept turn stays what the model saw, even if the
template would now write it differently.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from os.path import commonprefix

import msgspec

from ..errors import PromptTooLong
from ..items import FunctionCallOutput, Growing, Item
from ..token_ids import NONE, Ids
from ..tree import Draft, Paths, Script, Segment, TurnNode, TurnReply, turns_of
from ..workers import Stopped
from .chat_template import ChatTemplate, RoleRules
from .stable_prefix import GrowingPrefix, StablePrefixRule
from .tokenizer import ChatTokenizer

_END = f"\U000f0004{secrets.token_hex(8)}\U000f0005"
"""Marks the end of text that is still being written. Random, so that text from outside does not hold it."""


class Renderer:
    """Makes drafts for one session. The time ``now`` is fixed, so that a new day does not change the first
    tokens.

    ``rules``: what the template accepts and writes.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        now: datetime,
        prefix_rule: StablePrefixRule,
        rules: RoleRules | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, now, rules)
        self._rule = prefix_rule
        self._growing = GrowingPrefix(prefix_rule)
        self._paths = Paths()

    def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """The script in tokens.

        Turns behind ``script.base`` are rendered again, and each keeps its reply's ids. When ``stopped``
        turns true, the draft so far is returned. Raises ``TemplateFailed``, and ``PromptTooLong`` for a
        prompt of much more than ``most`` tokens: before tokenizing if the text is too long, or when so many
        tokens are made.
        """
        self._growing = GrowingPrefix(self._rule)  # the text that grew is complete: free its memory
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

    def stable_tokens(self, script: Script) -> Ids:
        """The prompt's tokens that later text cannot change, from the root on; the script's last item still
        grows.

        No tokens if a turn before that item must be rendered again, or if the template does not write the
        item's text in one piece. Raises ``TemplateFailed``.
        """
        *before, last = script.segments
        assert isinstance(last, Growing), "an item that is being written"
        if sum(isinstance(segment, TurnReply) for segment in before) != _turns_on(script.base):
            return NONE
        text = self._before_end(script, before, last)
        ids = self._growing.ids(text, leads=script.base is None)
        return self._joined(script.base, (), ids, script).tokens() if len(ids) else NONE

    def _before_end(self, script: Script, before: list[Segment], last: Growing) -> str:
        """The rendered text behind the last reply, up to the end of ``last``, which grows; empty if it is
        unknown.

        An end that may be stripped or become a control token is held back before the template sees it,
        because the template may escape it. If no text is left, the template may write other things around an
        empty text: only what it writes in both cases counts.
        """
        said = self._rule.stable_text(text_of(last))
        text, *rest = self._last_piece(script, before, _with_text(last, said + _END)).split(_END)
        if len(rest) != 1:
            return ""
        if said:
            return text
        empty = self._last_piece(script, before, _with_text(last, ""))
        return commonprefix([text, empty])  # noqa: RUF071 - by characters is what is wanted

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
        """The draft of one turn: ``piece`` in tokens, behind ``parent``'s reply."""
        kept = 0 if parent is None else parent.length
        least = kept + self._tokenizer.least(piece)
        if most is not None and least > most:
            raise _too_long(least, most)
        room = None if most is None else most - kept + 2  # the end token of a reply may be in both
        ids = self._rule.encode(piece, leads=parent is None, most=room, stopped=stopped)
        if room is not None and len(ids) >= room:
            raise _too_long(kept + len(ids) - 1, most)
        return self._joined(parent, inputs, ids, script)

    def _joined(self, parent: TurnNode | None, inputs: tuple[Item, ...], ids: Ids, script: Script) -> Draft:
        """Put ``ids`` behind ``parent``'s reply, so that the reply ends with one end token.

        The sampled end token stays if the template writes the same. Otherwise the template's replaces it; no
        KV is lost, because the last sampled token has none. The template also closes a reply that was cut.
        """
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


def text_of(item: Growing) -> str:
    """The text of a message or of a tool's output."""
    return item.output if isinstance(item, FunctionCallOutput) else item.text


def _with_text(item: Growing, text: str) -> Growing:
    named = {"output": text} if isinstance(item, FunctionCallOutput) else {"text": text}
    return msgspec.structs.replace(item, **named)


def _turns_on(node: TurnNode | None) -> int:
    return 0 if node is None else sum(1 for _ in node.ancestry())
