"""How many tokens of earlier turns a rendered prompt can use again: those that decode to the prompt's own
text.

A client that sends its whole conversation decides what the prompt says. The tokens of an earlier turn may say
something else: reasoning, the rest of a stop string, a call that was cut, white space that the client
stripped. They are compared with the new text, and the prompt is tokenized from the first difference on. So a
session gives such a client tokens, and never content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..conversation.tree import TurnNode
from ..token_ids import NONE, Ids
from .detokenizer import BROKEN
from .tokenizer import ChatTokenizer

LONGEST_CONTROL = 256
"""A control token with the white space behind it is looked for in so many characters."""

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ReusedTokens:
    """The tokens that a prompt's text can use again.

    ``base``: the last turn that the text contains up to the end of its reply, without the end token that the
    model sampled; None if there is none. ``copied``: the first tokens of the next turn's prompt, if the text
    contains them, too; they follow the first ``keep`` tokens up to the end of ``base``. ``end``: the
    character of the text behind all of these.
    """

    base: TurnNode | None = None
    end: int = 0
    keep: int = 0
    copied: Ids = field(default_factory=lambda: NONE)


@dataclass(frozen=True, slots=True)
class _Contained:
    """A turn that the last text contained from character ``begin`` to ``end``, and the digest of that
    part."""

    node: TurnNode
    begin: int
    end: int
    digest: bytes

    def is_still(self, node: TurnNode, text: str, begin: int) -> bool:
        """Whether another text contains the turn ``node`` at the same offset."""
        return self.node is node and self.begin == begin and _digest(text[begin : self.end]) == self.digest


@dataclass(frozen=True, slots=True)
class _Followed:
    """How far a text contains the text of some tokens. ``end``: where they end in it; None if it differs.
    ``count``: how many of them come before the last control token that was reached, which begins at
    ``at``."""

    end: int | None
    count: int
    at: int


class PromptReuse:
    """Compares the prompts of one session with its turns. It remembers which turns the last prompt contained,
    so that of a conversation that grows only what is new is decoded."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._newline = tokenizer.encode("\n", leads=True)
        self._contained: list[_Contained] = []

    def find(self, head: TurnNode | None, text: str) -> ReusedTokens:
        """What a prompt with this rendered ``text`` can use again of the turns from the root to ``head``."""
        known, self._contained = self._contained, []
        found = ReusedTokens()
        for depth, node in enumerate(() if head is None else tuple(head.ancestry())[::-1]):
            turn = known[depth] if depth < len(known) else None
            if turn is None or not turn.is_still(node, text, found.end):
                prompt = self._prompt_in(node, text, found.end)
                end = None if prompt.end is None else self._reply_in(node, text, prompt.end)
                if end is None and prompt.count > 0:
                    return ReusedTokens(found.base, prompt.at, node.keep, node.prompt[: prompt.count])
                if end is None:
                    return found
                turn = _Contained(node, found.end, end, _digest(text[found.end : end]))
            self._contained.append(turn)
            found = ReusedTokens(node, turn.end)
        return found

    def _prompt_in(self, node: TurnNode, text: str, at: int) -> _Followed:
        """How far ``text`` contains the prompt of a turn from ``at`` on, where the reply of its parent ends.
        The end token of that reply, if it is kept, comes first and is not counted."""
        parent = node.parent
        kept = 0 if parent is None else node.keep - (parent.length - parent.reply.ended)
        if kept < 0:
            return _Followed(None, 0, at)  # it goes on from within the parent
        ended = [] if parent is None else parent.reply.ids[len(parent.reply.ids) - kept :].tolist()
        found = self._follow([*ended, *node.prompt.tolist()], text, at)
        return _Followed(found.end, found.count - kept, found.at)

    def _reply_in(self, node: TurnNode, text: str, at: int) -> int | None:
        """Where the reply of a turn ends in ``text``, which has to contain it from ``at`` on. None if the
        text differs, or if the reply has bytes that are no character."""
        reply = node.reply
        end = self._follow(reply.ids[: len(reply.ids) - reply.ended].tolist(), text, at).end
        return None if end is None or BROKEN in text[at:end] else end

    def _follow(self, ids: Sequence[int], text: str, at: int) -> _Followed:
        """Compare what the ``ids`` decode to with ``text`` from ``at`` on."""
        controls = self._tokenizer.added
        run, count, point = 0, 0, at
        for index in [index for index, token in enumerate(ids) if token in controls]:
            said = self._said(ids[run:index], text, at)
            if not text.startswith(said, at):
                return _Followed(None, count, point)
            count, point = index, at + len(said)
            control = controls[ids[index]]
            at = _behind_space(text, point) if control.lstrip else point
            if not text.startswith(control.content, at):
                return _Followed(None, count, point)
            at += len(control.content)
            at = _behind_space(text, at) if control.rstrip else at
            run = index + 1
        said = self._said(ids[run:], text, at)
        end = at + len(said) if text.startswith(said, at) else None
        return _Followed(end, count, point)

    def _said(self, ids: Sequence[int], text: str, at: int) -> str:
        """The text of ``ids``, which hold no control token; control tokens that they spell are marked. In the
        prompt's ``text`` they begin at ``at``."""
        if not ids:
            return ""
        tokenizer, before = self._tokenizer, text[max(0, at - LONGEST_CONTROL) : at]
        alone = tokenizer.texts.independent or not before
        if not alone and tokenizer.last_control(before) == len(before):
            alone = tokenizer.leads(before)
        said = tokenizer.backend.decode([*([] if alone else self._newline), *ids], skip_special_tokens=False)
        return str(tokenizer.mark(said if alone else said.removeprefix("\n")))


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
