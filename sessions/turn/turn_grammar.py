"""Prepares a request for the engine: its bad words as token ids, and the grammar that its reply has to
follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...runtime.link.messages import Grammar
from ..errors import GrammarInvalid
from ..items import Tool
from ..text.language import Language
from ..tools.formats import SYNTAXES
from ..tools.grammar import CallWriter
from .request import TurnRequest


class TurnGrammar:
    """The grammars of one session's turns. It caches the last one, because most turns need the same again."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._asked: tuple[Any, ...] = ()
        self._tools: Sequence[Tool] = ()
        self._grammar: Grammar | None = None

    def prepare(self, request: TurnRequest, tools: Sequence[Tool]) -> TurnRequest:
        """The request with its bad words as token ids and the grammar of its reply. ``tools``: those of the
        turn.

        Raises ``GrammarInvalid``.
        """
        request = self.spell(request)
        asked = (request.tool_choice, request.tool, request.format, request.parse_calls)
        if asked != self._asked or tools is not self._tools:  # equal tools may differ: 1 equals true
            self._grammar = self.grammar(request, tools)
            self._asked, self._tools = asked, tools
        if self._grammar is None:
            return request
        sampling = msgspec.structs.replace(request.sampling, grammar=self._grammar)
        return msgspec.structs.replace(request, sampling=sampling)

    def spell(self, request: TurnRequest) -> TurnRequest:
        """The request with its bad words as the tokenizer writes them.

        The model may still write such a word with other tokens, as in other engines.
        """
        if not request.banned:
            return request
        words = {ids for word in request.banned for ids in self._language.tokenizer.spellings(word)}
        banned = (*request.sampling.bad_words, *sorted(words))
        sampling = msgspec.structs.replace(request.sampling, bad_words=banned)
        return msgspec.structs.replace(request, sampling=sampling, banned=())

    def grammar(self, request: TurnRequest, tools: Sequence[Tool]) -> Grammar | None:
        """The grammar that the reply has to follow; None: it is free. Raises ``GrammarInvalid``."""
        if request.tool_choice == "required":
            named = [tool for tool in tools if request.tool in (None, tool.name)]
            return self._calls.forced(named, one=request.tool is not None)
        if request.format is not None:
            joined = request.parse_calls and tools
            return self._calls.answered(request.format, tools) if joined else request.format
        if request.tool_choice == "auto" and any(tool.strict for tool in tools):
            return self._calls.strict(tools)
        return None

    @property
    def _calls(self) -> CallWriter:
        """Writes grammars of calls in the model's form. Raises ``GrammarInvalid`` if there are none for it."""
        form = self._language.forms.calls
        syntax = SYNTAXES.get(form)
        if syntax is None:
            raise GrammarInvalid(
                f"Calls in the {form} form can be neither forced nor strict, nor go with a format",
                param="tool_choice",
            )
        return CallWriter(syntax, self._language.tokenizer)
