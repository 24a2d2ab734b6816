"""Which grammar binds each reply of one session. Knows nothing of how grammars are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...runtime.link.messages import Grammar
from ..items import Tool
from ..text.language import Language
from .request import TurnRequest


class TurnGrammar:
    """Most turns are bound as the one before was: what was written for that is kept."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._asked: tuple[Any, ...] = ()
        self._tools: Sequence[Tool] = ()
        self._grammar: Grammar | None = None

    def constrained(self, request: TurnRequest, tools: Sequence[Tool]) -> TurnRequest:
        """The request with the grammar that its reply has to follow, if any; ``tools``: those of the turn.

        Raises ``GrammarInvalid``.
        """
        asked = (request.tool_choice, request.tool, request.format, request.parse_calls)
        if asked != self._asked or tools is not self._tools:  # equal ones may differ: 1 equals true
            self._grammar = self._language.grammar(request, tools)
            self._asked, self._tools = asked, tools
        if self._grammar is None:
            return request
        return msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, grammar=self._grammar)
        )
