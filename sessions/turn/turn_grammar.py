"""Prepares a request for the engine: the token ids of its bad words, and the grammar of its reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...runtime.verbs import Grammar, GrammarKind
from ..conversation.items import Tool
from ..errors import GrammarInvalid
from ..text.language import Language
from ..tools.forms import CallForm
from ..tools.grammar import CallWriter
from .request import TurnRequest


class TurnGrammar:
    """Makes the grammars of one session's turns. It caches the last one, because most turns need the same
    again."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._asked: tuple[Any, ...] = ()
        self._tools: Sequence[Tool] = ()
        self._grammar: Grammar | None = None

    def prepare(self, request: TurnRequest, tools: Sequence[Tool]) -> TurnRequest:
        """The request with the token ids of its bad words and the grammar of its reply. ``tools``: the tools of
        the turn. If none may be called, tokens that begin a call are bad words, too. Raises
        ``GrammarInvalid``."""
        request = self.spell(request)
        if request.tool_choice == "none" and tools and request.format is None:
            request = _without(request, self._openings)
        asked = (request.tool_choice, request.tool, request.allowed, request.format, request.parse_calls)
        if asked != self._asked or tools is not self._tools:  # `is`: equal tools may differ, as 1 == True
            self._grammar = self.grammar(request, tools)
            self._asked, self._tools = asked, tools
        if self._grammar is None:
            return request
        sampling = msgspec.structs.replace(request.sampling, grammar=self._grammar)
        return msgspec.structs.replace(request, sampling=sampling)

    def spell(self, request: TurnRequest) -> TurnRequest:
        """The request with token ids instead of its bad words: those with which the tokenizer writes each
        word.

        The model can still write such a word with other tokens. Other engines have the same limit.
        """
        if not request.banned:
            return request
        words = {ids for word in request.banned for ids in self._language.tokenizer.spellings(word)}
        return _without(request, sorted(words))

    def grammar(self, request: TurnRequest, tools: Sequence[Tool]) -> Grammar | None:
        """The grammar of the reply; None if the reply is free. ``tools``: the tools of the turn. Raises
        ``GrammarInvalid``."""
        allowed = request.allowed
        tools = [tool for tool in tools if not allowed or tool.name in allowed]
        if request.tool_choice == "required":
            named = [tool for tool in tools if request.tool in (None, tool.name)]
            return self._calls.forced(named, one=request.tool is not None)
        if request.format is not None:
            joined = tools if request.parse_calls else ()
            channels = self._language.forms.calls is CallForm.HARMONY
            wrapped = joined or (channels and request.format.kind is GrammarKind.JSON)
            return self._calls.answered(request.format, joined) if wrapped else request.format
        if request.tool_choice == "auto" and (allowed or any(tool.strict for tool in tools)):
            return self._calls.strict(tools)
        return None

    @property
    def _openings(self) -> list[tuple[int, ...]]:
        """The tokens of the model that begin a call, each as a bad word."""
        tokenizer = self._language.tokenizer
        ids = map(tokenizer.backend.token_to_id, self._language.forms.openings)
        return [(token,) for token in ids if token in tokenizer.added]

    @property
    def _calls(self) -> CallWriter:
        """The writer that makes grammars of calls in the model's form. Raises ``GrammarInvalid`` if that form
        has none."""
        forms, tokenizer = self._language.forms, self._language.tokenizer
        syntax = forms.syntax(tokenizer.special_ids)
        if syntax is None:
            raise GrammarInvalid(
                f"Calls in the {forms.calls} form can be neither forced nor strict, nor go with a format",
                param="tool_choice",
            )
        marks = frozenset(forms.marks(tokenizer.special_ids, parse_calls=False))
        return CallWriter(syntax, tokenizer, marks)


def _without(request: TurnRequest, words: Sequence[tuple[int, ...]]) -> TurnRequest:
    """The request with more bad words, and none that is still text."""
    sampling = msgspec.structs.replace(request.sampling, bad_words=(*request.sampling.bad_words, *words))
    return msgspec.structs.replace(request, sampling=sampling, banned=())
