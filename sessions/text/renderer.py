"""Turns a prompt from items (a `Script`) into the token ids that the model sees (a `Draft`). It tokenizes only
what is new.

The template renders the whole conversation, with a sentinel for each reply. Only the text behind the last turn
that keeps its tokens is tokenized; the replies' own ids replace the sentinels. So an earlier turn stays as the
model saw it, even if the template would now write it differently. A prompt that is ``verbatim`` has no
sentinels: the template writes the items of the replies, too.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from os.path import commonprefix

import msgspec
import numpy as np

from ..conversation.items import FunctionCall, FunctionCallOutput, Growing, Item, Message, Preamble
from ..conversation.tree import (
    Draft,
    Paths,
    Script,
    Segment,
    TurnNode,
    TurnReply,
    items_of,
    matched,
    turns_of,
)
from ..errors import PromptTooLong
from ..token_ids import NONE, Ids, frozen
from ..workers import Stopped
from .chat_template import ChatTemplate, RoleRules
from .prompt_reuse import PromptReuse
from .streaming_tokenizer import GrowingPrefix, StablePrefixRule
from .tokenizer import ChatTokenizer

SHARED = 4
"""The most tokens at the end of a reply that the template writes once more."""
_END = f"\U000f0004{secrets.token_hex(8)}\U000f0005"
"""Marks the end of text that is still being written. Random, so that text from outside does not hold it."""

AROUND_MESSAGE = 4
"""Roughly the tokens that a template writes around one message."""


class Renderer:
    """Renders and tokenizes the prompts of one session. ``now``: the time that the template may show; it is
    fixed, so that the first tokens stay the same on another day. ``prefix_rule``: which tokens later text
    cannot change. ``rules``: what the template accepts and writes."""

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
        self._reuse = PromptReuse(tokenizer)
        self._heading: tuple[Preamble, int] | None = None

    def heading(self, preamble: Preamble, most: int) -> int:
        """How many tokens the prompt has before the first item, for the instructions and tools. If that is
        ``most`` or more, the result is a lower bound of at least ``most``. Raises ``TemplateFailed``."""
        if self._heading is None or self._heading[0] is not preamble:
            asked = Message(id="asked", role="user", text=_END)
            piece = self._template.pieces(preamble, (asked,))[0]
            self._heading = (preamble, self._count(piece.split(_END)[0], most, leads=True))
        return self._heading[1]

    def size(self, segment: Segment, most: int) -> int:
        """Roughly how many tokens an item or a reply takes in a prompt. If that is ``most`` or more, the result
        is a lower bound."""
        match segment:
            case TurnReply():
                return len(segment.ids)
            case FunctionCall():
                text = segment.name + segment.arguments
            case Message() | FunctionCallOutput():
                text = text_of(segment)
        return AROUND_MESSAGE + self._count(text, most, leads=False)

    def _count(self, text: str, most: int, *, leads: bool) -> int:
        least = self._tokenizer.least(text)
        return least if least >= most else len(self._rule.encode(text, leads=leads, most=most))

    def draft(self, script: Script, most: int | None = None, stopped: Stopped = bool) -> Draft:
        """Render and tokenize the prompt ``script``.

        Turns behind ``script.base`` are rendered again, with their replies' own ids. When ``stopped()`` becomes
        true, tokenizing ends early and the result is incomplete. ``most``: the length of the context in tokens;
        None: any. Raises ``TemplateFailed``, and ``PromptTooLong`` for a prompt of more than ``most`` tokens:
        before tokenizing if the text is too long, or as soon as that many tokens are made.
        """
        self._growing = GrowingPrefix(self._rule)  # the item that grew is complete: free what was kept for it
        if script.verbatim:
            return self._verbatim(script, most, stopped)
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

    def _verbatim(self, script: Script, most: int | None, stopped: Stopped) -> Draft:
        """The prompt that the template writes for the items of ``script``, as `draft` gives it. It goes on
        from the last turn that it contains, and copies what it contains of the next turn's prompt."""
        (text,) = self._template.pieces(script.preamble, tuple(items_of(script.segments)))
        found = self._reuse.find(script.base, text)
        _, shared = matched(found.base, script.segments)
        inputs = tuple(items_of(script.segments[shared:]))
        piece = text[found.end :]
        if not len(found.copied):
            return self._join(found.base, inputs, piece, script, most, stopped)
        before = found.keep + len(found.copied)
        ids = self._encoded(piece, before, most, stopped, leads=False)
        prompt = frozen(np.concatenate([found.copied, ids]))
        return _checked(Draft(found.base, inputs, found.keep, prompt, script.miss), most)

    def stable_tokens(self, script: Script) -> Ids:
        """The part of the prompt's tokens, from the root, that stays the same however the script's last item
        grows.

        Empty if a turn before that item must be rendered again, or if the template does not write the item's
        text in one piece. Raises ``TemplateFailed``.
        """
        *before, last = script.segments
        assert isinstance(last, Growing), "an item that is being written"
        if sum(isinstance(segment, TurnReply) for segment in before) != _turns_on(script.base):
            return NONE
        text = self._before_end(script, before, last)
        ids = self._growing.ids(text, leads=script.base is None)
        return self._joined(script.base, (), ids, script).tokens() if len(ids) else NONE

    def _before_end(self, script: Script, before: list[Segment], last: Growing) -> str:
        """The rendered text between the last reply and the end of ``last``, the item that still grows. Empty if
        that cannot be found.

        The item's end is held back from the template if it might be stripped or become part of a control token.
        If nothing of the item is left then, its text is empty. A template may write other things around an
        empty text, so only the text that it writes in both cases counts.
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
        return self._template.pieces(script.preamble, (*before, last), growing=True)[-1]

    def _join(
        self,
        parent: TurnNode | None,
        inputs: tuple[Item, ...],
        piece: str,
        script: Script,
        most: int | None,
        stopped: Stopped,
    ) -> Draft:
        """The prompt of one turn, in tokens: those of the text ``piece``, behind the reply of the turn
        ``parent``.

        ``inputs``: the items that ``piece`` writes. ``most``: the length of the context in tokens; None: any.
        ``stopped``: once it returns true, tokenizing ends early. Raises ``PromptTooLong`` beyond ``most``.
        """
        kept = 0 if parent is None else parent.length
        ids = self._encoded(piece, kept, most, stopped, leads=parent is None)
        return _checked(self._joined(parent, inputs, ids, script), most)

    def _encoded(self, piece: str, before: int, most: int | None, stopped: Stopped, *, leads: bool) -> Ids:
        """The ids of the text ``piece`` behind ``before`` tokens. Raises ``PromptTooLong`` before tokenizing
        if all cannot be ``most`` tokens or fewer; stops early once they are more."""
        least = before + self._tokenizer.least(piece)
        if most is not None and least > most:
            raise _too_long(least, most)
        room = None if most is None else most - before + 1 + SHARED  # the end of a reply may be in both
        return self._rule.encode(piece, leads=leads, most=room, stopped=stopped)

    def _joined(self, parent: TurnNode | None, inputs: tuple[Item, ...], ids: Ids, script: Script) -> Draft:
        """The prompt of one turn, in tokens: ``ids`` behind the reply of the turn ``parent``, so that this
        reply ends with exactly one end token.

        The sampled end token stays if the template writes the same one. If it writes another, that one
        replaces the sampled token. No KV is lost, because the last sampled token has none. If the reply was
        cut, the template's end token closes it.
        """
        keep = 0 if parent is None else parent.length
        if parent is not None and parent.reply.ended:
            said, most = parent.reply.ids[-SHARED:].tolist(), 1 if script.verbatim else SHARED
            shared = next((n for n in range(1, most + 1) if said[-n:] == ids[:n].tolist()), 0)
            ids, keep = ids[shared:], keep - (not shared)
        kept = parent if script.verbatim or parent is script.base else None
        path = None if kept is None else self._paths.tokens(kept)
        return Draft(parent, inputs, keep, ids, script.miss, path)


def _checked(draft: Draft, most: int | None) -> Draft:
    """The draft. Raises ``PromptTooLong`` if it has more than ``most`` tokens."""
    tokens = draft.keep + len(draft.prompt)
    if most is not None and tokens > most:
        raise _too_long(tokens, most)
    return draft


def _too_long(least: int, most: int) -> PromptTooLong:
    return PromptTooLong.of(f"it has at least {least} tokens", most, least)


def text_of(item: Growing) -> str:
    """The text of ``item``: of a message its text, of a tool's output the output."""
    return item.output if isinstance(item, FunctionCallOutput) else item.text


def _with_text(item: Growing, text: str) -> Growing:
    named = {"output": text} if isinstance(item, FunctionCallOutput) else {"text": text}
    return msgspec.structs.replace(item, **named)


def _turns_on(node: TurnNode | None) -> int:
    return 0 if node is None else sum(1 for _ in node.ancestry())
