"""The language of one model: its tokenizer, its chat template and its forms of calls and reasoning.

The chat template is classified once, at load, by rendering small conversations. ``doctor`` shows the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from itertools import product
from pathlib import Path

import msgspec

from ..errors import TemplateFailed
from ..items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from ..token_ids import ids_of
from ..tools.formats import HERMES, CallForm, Forms, ReasoningForm, find_forms
from ..tree import Segment, TurnReply
from .chat_template import ChatTemplate, RoleRules
from .stable_prefix import StablePrefixRule
from .template_sandbox import broken_limit
from .tokenizer import ChatTokenizer, template_file

_NOON = datetime(2025, 1, 1, 12)
_THOUGHT = "zqthoughtqz"
_TOOL, _FIELD, _VALUE, _OUTPUT = "zqtoolqz", "zqfieldqz", "zqvalueqz", "zqoutputqz"
_CALL_ID = "call_0123456789abcdef01234567"  # as long as the ids of real calls


class TemplateClass(StrEnum):
    """How a template changes its rendering of earlier turns when a turn is added."""

    APPEND_ONLY = "append-only"
    REWRITES_REASONING = "rewrites reasoning"
    """It drops only the reasoning of earlier replies, or the empty reasoning that it opens before a reply."""
    REWRITES_MORE = "rewrites more"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The result of trying a template.

    ``tools``: it shows the tools to the model. ``closing``: the special token that it writes behind each
    reply, if there is one; it also ends generation. ``opening``: the text that it writes before a reply.
    """

    kind: TemplateClass
    tools: bool
    closing: int | None
    opening: str = ""
    rules: RoleRules = RoleRules()


@dataclass(frozen=True, slots=True)
class Language:
    """All that sessions need to know to write for one model. One object serves all sessions."""

    tokenizer: ChatTokenizer
    report: TemplateReport
    prefix_rule: StablePrefixRule
    forms: Forms = HERMES
    tool_fallback: bool = False

    @classmethod
    def load(
        cls,
        folder: Path,
        calls: CallForm | None = None,
        reasoning: ReasoningForm | None = None,
        *,
        tool_fallback: bool = False,
    ) -> Language:
        """Load it from a model folder, and try its template in another process, which takes a moment.

        Forms that are not given are detected. ``tool_fallback``: if the template does not show tools, write
        them into the instructions. Raises ``TokenizerUnreadable`` or ``TemplateFailed``.
        """
        tokenizer = ChatTokenizer.load(folder)
        try:
            for template in tokenizer.templates:
                _try(template, tuple(tokenizer.named.items()))
            return cls.of(tokenizer, calls, reasoning, tool_fallback=tool_fallback)
        except TemplateFailed as fault:
            raise TemplateFailed(f"{template_file(folder)}: {fault.message}") from fault

    @classmethod
    def of(
        cls,
        tokenizer: ChatTokenizer,
        calls: CallForm | None = None,
        reasoning: ReasoningForm | None = None,
        *,
        tool_fallback: bool = False,
    ) -> Language:
        """Make it from a loaded tokenizer. Raises ``TemplateFailed``."""
        report = classify_template(tokenizer)
        found = find_forms("\n".join(tokenizer.templates), report.opening, tokenizer.response_template)
        told = tool_fallback and not report.tools  # the model is told to write this form
        own = CallForm.HERMES if told else found.calls
        forms = Forms(
            calls or own, reasoning or found.reasoning, known=found.known or told or calls is not None
        )
        return cls(tokenizer, report, StablePrefixRule(tokenizer), forms, tool_fallback)

    @property
    def shows_tools(self) -> bool:
        """Whether prompts show the session's tools to the model."""
        return self.report.tools or self.tool_fallback

    def digest(self) -> bytes:
        """A digest of tokenizer and template: token ids have the same meaning only if it is equal. 16 bytes."""
        text = "\0".join([self.tokenizer.backend.to_str(), *reversed(self.tokenizer.templates)])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end a reply: the model's end tokens, and the template's closing token."""
        return frozenset(eos_ids) | (
            {self.report.closing} if self.report.closing is not None else frozenset()
        )


@lru_cache(maxsize=64)
def _try(template: str, named: tuple[tuple[str, str], ...]) -> None:
    """Try each template once, in a process of its own. Raises ``TemplateFailed``."""
    broken = broken_limit(template, dict(named))
    if broken:
        raise TemplateFailed(f"The chat template was refused: {broken}")


# --- classifying a template ----------------------------------------------------------------------------------


def classify_template(tokenizer: ChatTokenizer) -> TemplateReport:
    """Try the template. Raises ``TemplateFailed`` if it cannot render two plain turns."""
    rules = _rules(tokenizer)
    template = ChatTemplate(tokenizer, _NOON, rules)
    plain = Preamble(instructions="zq")
    talk: list[Segment] = [_user(1), _reply(1), _user(2), _reply(2), _user(3)]
    kinds = [_kind(template, plain, talk), _reasoning(template)]
    if tokenizer.tool_template is not None:
        kinds.append(_kind(template, _tooled(), talk))
    if rules.outputs:
        kinds.append(_kind(template, _tooled(), _tool_talk()))
    order = list(TemplateClass)
    closing, opening = _closing(tokenizer, template, plain, talk), template.pieces(plain, talk)[-1]
    return TemplateReport(max(kinds, key=order.index), rules.schemas, closing, opening, rules)


def _rules(tokenizer: ChatTokenizer) -> RoleRules:
    """Try the orders of roles that conversations may have after failed turns, cut replies and edits."""
    none, one, two, reply = Preamble(), _user(1), _user(2), _reply(1)
    told = Message(id="told", role="assistant", text="zq")
    system = Message(id="system", role="system", text="zq")

    def takes(*talks: list[Segment], preamble: Preamble = none, rules: RoleRules | None = None) -> bool:
        preambles = [preamble]
        if tokenizer.tool_template is not None:  # a session may use both
            preambles.append(msgspec.structs.replace(_tooled(), instructions=preamble.instructions))
        try:
            for each, talk in product(preambles, talks):
                ChatTemplate(tokenizer, _NOON, rules).pieces(each, talk)
        except TemplateFailed:
            return False
        return True

    rules = RoleRules(
        users=takes([one, two], [one, reply, one, two]),
        assistants=takes([one, reply, told, two], [one, reply, reply, two], [one, told, told, two]),
        assistant_first=takes([reply, one], [told, one]),
        system=takes([one], preamble=Preamble(instructions="zq")),
        system_later=takes([one, reply, system, two], [one, system, reply, two], [one, reply, system]),
    )
    tooled, (asked, called, output, answered, _) = _tooled(), _tool_talk()

    def shows(*words: str, talk: list[Segment], rules: RoleRules, preamble: Preamble = tooled) -> bool:
        """Whether these words of tools are in the prompt. Some templates leave out what they do not know."""
        try:
            text = "".join(ChatTemplate(tokenizer, _NOON, rules).pieces(preamble, talk))
        except TemplateFailed:
            return False
        return all(word in text for word in words)

    schemas = all(
        shows(
            _TOOL,
            _FIELD,
            talk=[one],
            rules=rules,
            preamble=msgspec.structs.replace(tooled, instructions=text),
        )
        for text in ("", "zq")
    )
    rules = replace(rules, schemas=schemas)
    talks = (
        [asked, called, output],
        [asked, called, output, one],
        [asked, called, output, answered, one, _reply(2), two],
    )
    outputs = takes(*talks, preamble=tooled, rules=rules) and shows(_OUTPUT, talk=talks[0], rules=rules)
    rules = replace(rules, outputs=outputs)
    inserted: list[Segment] = [asked, _call(), output, answered, two]
    return replace(rules, calls=shows(_TOOL, _VALUE, talk=inserted, rules=rules))


def _kind(template: ChatTemplate, preamble: Preamble, talk: list[Segment]) -> TemplateClass:
    """Compare the rendering of each beginning of the conversation with that of the whole."""
    whole = template.pieces(preamble, talk)
    kind = TemplateClass.APPEND_ONLY
    turns = [at for at, segment in enumerate(talk) if isinstance(segment, TurnReply)]
    for number, at in enumerate(turns):
        if template.pieces(preamble, talk[:at]) == whole[: number + 1]:
            continue
        unopened = template.pieces(preamble, talk[:at], open_reply=False)
        if unopened[:-1] != whole[:number] or not whole[number].startswith(unopened[-1]):
            return TemplateClass.REWRITES_MORE
        kind = TemplateClass.REWRITES_REASONING
    return kind


def _reasoning(template: ChatTemplate) -> TemplateClass:
    """Whether a reply keeps the reasoning in its text when a later turn is added."""
    said = Message(id="said", role="assistant", text=f"<think>\n{_THOUGHT}\n</think>\n\nzq")
    text = "".join(template.pieces(Preamble(), [_user(1), said, _user(2)]))
    return TemplateClass.APPEND_ONLY if _THOUGHT in text else TemplateClass.REWRITES_REASONING


def _closing(
    tokenizer: ChatTokenizer, template: ChatTemplate, preamble: Preamble, talk: list[Segment]
) -> int | None:
    ids = tokenizer.encode(template.pieces(preamble, talk)[-1], leads=False)
    return ids[0] if ids and ids[0] in tokenizer.special_ids.values() else None


def _user(number: int) -> Message:
    return Message(id=f"user_{number}", role="user", text=f"zq{number}")


def _reply(number: int) -> TurnReply:
    return TurnReply((Message(id=f"reply_{number}", role="assistant", text="zq"),), ids_of([0]), ended=True)


def _tooled() -> Preamble:
    parameters = {"type": "object", "properties": {_FIELD: {"type": "string", "description": "zq"}}}
    return Preamble(tools=(Tool(name=_TOOL, description="zq", parameters=parameters),))


def _call() -> FunctionCall:
    return FunctionCall(id="call", call_id=_CALL_ID, name=_TOOL, arguments=f'{{"{_FIELD}": "{_VALUE}"}}')


def _tool_talk() -> list[Segment]:
    output = FunctionCallOutput(id="output", call_id=_CALL_ID, output=_OUTPUT)
    return [_user(1), TurnReply((_call(),), ids_of([0]), ended=True), output, _reply(1), _user(2)]
