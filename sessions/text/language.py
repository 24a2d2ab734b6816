"""The model's language: its tokenizer, and what trying its chat template once has shown. One for all
sessions.

Knows nothing of conversations or of the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import msgspec

from ...runtime.link.messages import Grammar
from ..errors import GrammarInvalid, TemplateFailed
from ..items import Tool
from ..tools.formats import HERMES, SYNTAXES, CallForm, Forms, ReasoningForm, find_forms
from ..tools.grammar import CallWriter
from ..turn.request import TurnRequest
from .renderer import Renderer
from .stable_prefix import StablePrefix
from .template_class import TemplateReport, probe
from .template_sandbox import TemplateTrial
from .tokenizer import ChatTokenizer, template_file


@dataclass(frozen=True, slots=True)
class Language:
    """What a session needs to know to speak with one model."""

    tokenizer: ChatTokenizer
    report: TemplateReport
    settled: StablePrefix
    forms: Forms = HERMES

    @classmethod
    def load(
        cls, folder: Path, calls: CallForm | None = None, reasoning: ReasoningForm | None = None
    ) -> Language:
        """From a model folder; forms that are not given are found out. Blocks for a moment.

        Raises ``TokenizerUnreadable`` or ``TemplateFailed``.
        """
        tokenizer = ChatTokenizer.load(folder)
        try:
            _try(tokenizer.template, tuple(tokenizer.named.items()))
            return cls.of(tokenizer, calls, reasoning)
        except TemplateFailed as fault:
            raise TemplateFailed(f"{template_file(folder)}: {fault.message}") from fault

    @classmethod
    def of(
        cls, tokenizer: ChatTokenizer, calls: CallForm | None = None, reasoning: ReasoningForm | None = None
    ) -> Language:
        """With a tokenizer that is loaded already. Raises ``TemplateFailed``."""
        report = probe(tokenizer)
        found = find_forms(tokenizer.template, report.opening, tokenizer.response_template)
        forms = Forms(calls or found.calls, reasoning or found.reasoning)
        return cls(tokenizer, report, StablePrefix(tokenizer), forms)

    def digest(self) -> bytes:
        """Of tokenizer and template: token ids mean the same only where these are the same."""
        text = self.tokenizer.backend.to_str() + "\0" + self.tokenizer.template
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def renderer(self, now: datetime) -> Renderer:
        """A session's renderer; its clock stands at ``now``."""
        return Renderer(self.tokenizer, now, self.settled, self.report.rules)

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """What ends a reply: the model's end tokens, and the one its template closes a turn with."""
        return frozenset(eos_ids) | (
            {self.report.closing} if self.report.closing is not None else frozenset()
        )

    def spelled(self, request: TurnRequest) -> TurnRequest:
        """The request with the bad words that are text as token ids too: a word is banned by its spellings.

        The model may still write it with other tokens than the tokenizer would, as in other engines.
        """
        if not request.banned:
            return request
        words = {ids for word in request.banned for ids in self.tokenizer.spellings(word)}
        banned = (*request.sampling.bad_words, *sorted(words))
        sampling = msgspec.structs.replace(request.sampling, bad_words=banned)
        return msgspec.structs.replace(request, sampling=sampling, banned=())

    def grammar(self, request: TurnRequest, tools: Sequence[Tool]) -> Grammar | None:
        """What the reply to a request has to follow, if anything; ``tools``: those of the turn.

        Raises ``GrammarInvalid``.
        """
        if request.tool_choice == "required":
            named = [tool for tool in tools if request.tool in (None, tool.name)]
            return self.calls.forced(named, one=request.tool is not None)
        if request.format is not None:
            joined = request.parse_calls and tools
            return self.calls.answered(request.format, tools) if joined else request.format
        if request.tool_choice == "auto" and any(tool.strict for tool in tools):
            return self.calls.strict(tools)
        return None

    @property
    def calls(self) -> CallWriter:
        """Writes grammars of calls as this model makes them. Raises ``GrammarInvalid`` where there are none."""
        syntax = SYNTAXES.get(self.forms.calls)
        if syntax is None:
            raise GrammarInvalid(
                f"Calls in the {self.forms.calls} form can be neither forced nor strict, nor go with a format",
                param="tool_choice",
            )
        return CallWriter(syntax, self.tokenizer)


@lru_cache(maxsize=64)
def _try(template: str, named: tuple[tuple[str, str], ...]) -> None:
    """Try a template where it can harm nobody, once for each. Raises ``TemplateFailed``."""
    broken = TemplateTrial(template, dict(named)).broken()
    if broken:
        raise TemplateFailed(f"The chat template was refused: {broken}")
