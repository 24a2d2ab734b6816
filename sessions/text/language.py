"""The language of one model: its tokenizer, its chat template, and how it writes tool calls and reasoning.

The chat template is tried once, at load, with small conversations. ``doctor`` shows the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from itertools import product
from pathlib import Path

import msgspec

from ..conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from ..conversation.tree import Segment, TurnReply
from ..errors import TemplateFailed
from ..token_ids import ids_of
from ..tools.formats import HERMES, KIMI_SEP, REASONING, Forms, find_forms
from ..tools.forms import CallForm, ReasoningForm
from ..tools.scanner import CallArguments, CallOpened
from .chat_template import CallIds, ChatTemplate, RoleRules
from .streaming_tokenizer import StablePrefixRule
from .template_sandbox import broken_limit
from .tokenizer import ChatTokenizer, template_file

_NOON = datetime(2025, 1, 1, 12)
_THOUGHT, _TOLD = "zqthoughtqz", "zqtoldqz"
_TOOL, _FIELD, _VALUE, _OUTPUT = "zqtoolqz", "zqfieldqz", "zqvalueqz", "zqoutputqz"
_REASONING_TAGS = frozenset(
    tag for tags in REASONING.values() for tag in (tags.begin, tags.end, *tags.around)
)
_CALL_ID = "call_0123456789abcdef01234567"  # as long as the ids of real calls


class TemplateClass(StrEnum):
    """What a template changes in its rendering of earlier turns when another turn is added."""

    APPEND_ONLY = "append-only"
    """Nothing."""
    REWRITES_REASONING = "rewrites reasoning"
    """It drops the reasoning of earlier replies, or an empty pair of reasoning tags that it wrote before a
    reply."""
    REWRITES_MORE = "rewrites more"
    """It changes other text, too."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What was found by trying a template.

    ``kind``: its class. ``tools``: whether prompts show the tools. ``closing``: the id of the special token
    that it writes behind each reply, which also ends generation; None if it writes none. ``opening``: the text
    that it writes before a reply. ``rules``: the conversations that it accepts, and how it writes calls.
    ``call``: a sample reply with one call, as the template writes it; empty if it writes no calls.
    """

    kind: TemplateClass
    tools: bool
    closing: int | None
    opening: str = ""
    rules: RoleRules = RoleRules()
    call: str = ""


NO_TEMPLATE = TemplateReport(TemplateClass.APPEND_ONLY, False, None, rules=RoleRules(schemas=False))
"""The report of a model without a chat template."""


@dataclass(frozen=True, slots=True)
class Language:
    """All that sessions need to know of one model's text. One object serves all sessions.

    ``report``: what trying the chat template showed; of a model without one, that it shows nothing.
    ``prefix_rule``: which tokens of text later text cannot change. ``forms``: how the model writes tool calls
    and reasoning. ``tool_fallback``: tools are written into the instructions if the template does not show
    them.
    """

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
        """Load it from a model's folder. The template is first tried in another process, which takes a moment.

        ``calls`` and ``reasoning``: how the model writes them; None: found from its templates.
        ``tool_fallback``: if the template does not show tools, write them into the instructions. Raises
        ``TokenizerUnreadable`` or ``TemplateFailed``.
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
        """Make it from a loaded tokenizer. Its templates must have been tried by `load` or be trusted.
        ``calls`` and ``reasoning``: how the model writes them; None: found from its templates.
        ``tool_fallback``: if the template does not show tools, write them into the instructions. Raises
        ``TemplateFailed``."""
        report = classify_template(tokenizer) if tokenizer.templates else NO_TEMPLATE
        found = find_forms("\n".join(tokenizer.templates), report.opening, tokenizer.response_template)
        if report.call and tokenizer.response_template is None:
            found = _proven(found, report.call, tokenizer.special_ids)
        told = tool_fallback and not report.tools  # the model is told to write this form
        own = CallForm.HERMES if told else found.calls
        forms = Forms(
            calls or own,
            reasoning or found.reasoning,
            known=found.known or told or calls is not None,
            opened=found.opened and reasoning in (None, found.reasoning),
        )
        return cls(tokenizer, report, StablePrefixRule(tokenizer), forms, tool_fallback)

    @property
    def shows_tools(self) -> bool:
        """Whether prompts show the session's tools to the model."""
        return self.report.tools or self.tool_fallback

    def digest(self) -> bytes:
        """A digest of tokenizer and template, 16 bytes. Stored token ids can be used again only if it is the
        same."""
        text = "\0".join([self.tokenizer.identity(), *reversed(self.tokenizer.templates)])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The ids that end a reply: ``eos_ids``, which are the model's own, the template's closing token, and
        special tokens that end a reply with calls."""
        closing = {self.report.closing} if self.report.closing is not None else set()
        return self.forms.end_ids(frozenset(eos_ids) | closing, self.tokenizer.special_ids)


@lru_cache(maxsize=64)
def _try(template: str, named: tuple[tuple[str, str], ...]) -> None:
    """Try a template once in a process of its own. ``named``: the special tokens that it may use, by name.
    Raises ``TemplateFailed`` if it breaks a limit."""
    broken = broken_limit(template, dict(named))
    if broken:
        raise TemplateFailed(f"The chat template was refused: {broken}")


def _proven(forms: Forms, text: str, specials: Mapping[str, int]) -> Forms:
    """Check the form of tool calls against a call that the template wrote, and choose another form if it does
    not fit.

    ``forms``: what was found so far. ``text``: the template's reply with one call. ``specials``: the ids of the
    special tokens, by their text. Returns the forms with the first form of calls that can read ``text``; if
    none can, the same forms with ``known`` false.

    The detokenizer drops special tokens that do not belong to the chosen form. So each form is tried twice: on
    the text with all special tokens, and then on the text as the detokenizer would give it.
    """
    for hidden, calls in product((False, True), dict.fromkeys((forms.calls, *CallForm))):
        for form in (replace(forms, calls=calls, known=True), Forms(calls)):
            marks = form.marks(specials) if hidden else specials.values()
            seen = text
            for token in (token for token, number in specials.items() if number not in marks):
                seen = seen.replace(token, "")
            if _reads_call(form, seen):
                return replace(forms, calls=calls, known=True)
    return replace(forms, known=False)


def _reads_call(forms: Forms, text: str) -> bool:
    """Whether these forms find exactly the sample call in ``text``."""
    parser = forms.parser()
    pieces = [*parser.feed(text), *parser.finish(cut=False)]
    named = [piece.name for piece in pieces if isinstance(piece, CallOpened)]
    arguments = "".join(piece.delta for piece in pieces if isinstance(piece, CallArguments))
    return named == [_TOOL] and "".join(arguments.split()) == "".join(_call().arguments.split())


# --- classifying a template ----------------------------------------------------------------------------------


def classify_template(tokenizer: ChatTokenizer) -> TemplateReport:
    """Render small conversations with the model's template, and report what it accepts and writes. Raises
    ``TemplateFailed`` if it cannot render two plain turns."""
    rules, call = _rules(tokenizer)
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
    return TemplateReport(max(kinds, key=order.index), rules.schemas, closing, opening, rules, call)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tries a model's template with small conversations that begin with ``preamble``. ``rules``: what is known
    of it so far."""

    tokenizer: ChatTokenizer
    rules: RoleRules
    preamble: Preamble = field(default_factory=Preamble)

    @property
    def template(self) -> ChatTemplate:
        """The template that is tried; it caches nothing of other trials."""
        return ChatTemplate(self.tokenizer, _NOON, self.rules)

    def takes(self, *talks: list[Segment]) -> bool:
        """Whether it accepts all of these conversations, with tools, too, if it has another template for
        them: a session may use both."""
        preambles = [self.preamble]
        if self.tokenizer.tool_template is not None:
            preambles.append(msgspec.structs.replace(_tooled(), instructions=self.preamble.instructions))
        try:
            for preamble, talk in product(preambles, talks):
                self.template.pieces(preamble, talk)
        except TemplateFailed:
            return False
        return True

    def shows(self, talk: list[Segment], *words: str) -> bool:
        """Whether all these words are in the prompt that it renders for ``talk``; some templates leave out what
        they do not know. False if it refuses the conversation."""
        try:
            text = "".join(self.template.pieces(self.preamble, talk))
        except TemplateFailed:
            return False
        return all(word in text for word in words)


def _rules(tokenizer: ChatTokenizer) -> tuple[RoleRules, str]:
    """Try which orders of roles the template accepts. Failed turns, cut replies and edits can lead to unusual
    ones. Returns the rules, and a sample reply with a call as the template writes it; empty if it writes no
    calls."""
    one, two, reply = _user(1), _user(2), _reply(1)
    told = Message(id="told", role="assistant", text="zq")
    system = Message(id="system", role="system", text=_TOLD)
    plain = _Trial(tokenizer, RoleRules(reasoning=_REASONING_TAGS))
    listed = replace(plain, rules=replace(plain.rules, list_of_tools=True))
    plain = listed if not plain.takes([one]) and listed.takes([one]) else plain
    instructed = replace(plain, preamble=Preamble(instructions=_TOLD))
    rules = replace(
        plain.rules,
        users=plain.takes([one, two], [one, reply, one, two]),
        assistants=plain.takes([one, reply, told, two], [one, reply, reply, two], [one, told, told, two]),
        assistant_first=plain.takes([reply, one], [told, one]),
        system=instructed.takes([one]) and instructed.shows([one], _TOLD),
        system_later=plain.takes([one, reply, system, two], [one, system, reply, two], [one, reply, system])
        and plain.shows([one, reply, system, two], _TOLD),
    )
    rules = replace(rules, lead=_lead(replace(plain, rules=rules).template))
    tooled = _Trial(tokenizer, rules, _tooled())
    instructed = replace(tooled, preamble=msgspec.structs.replace(_tooled(), instructions="zq"))
    schemas = tooled.shows([one], _TOOL, _FIELD) and instructed.shows([one], _TOOL, _FIELD)
    tooled = replace(tooled, rules=replace(rules, schemas=schemas))
    asked, called, output, answered, _ = _tool_talk()
    talks = (
        [asked, called, output],
        [asked, called, output, one],
        [asked, called, output, answered, one, _reply(2), two],
    )

    def takes_outputs(trial: _Trial) -> bool:
        return trial.takes(*talks) and trial.shows(talks[0], _OUTPUT)

    outputs = schemas and takes_outputs(tooled)
    framed = replace(tooled, rules=_framed(tooled)) if schemas else tooled
    call = "" if framed.rules.frame is None else framed.rules.frame.written(_FIELD, _VALUE)
    if call and takes_outputs(framed):
        bare = replace(framed, rules=replace(framed.rules, frame=None))
        same = outputs and all(
            bare.template.pieces(bare.preamble, talk)[1:] == framed.template.pieces(bare.preamble, talk)[1:]
            for talk in talks
        )
        tooled, outputs = (bare if same else framed), True
    tooled = replace(tooled, rules=replace(tooled.rules, outputs=outputs))
    calls = schemas and tooled.shows([asked, _call(), output, answered, two], _TOOL, _VALUE)
    odd = msgspec.structs.replace(_call(), arguments=_VALUE)
    needy = calls and not tooled.takes([asked, odd, output, answered, two])
    return replace(tooled.rules, calls=calls, object_arguments=needy), call


def _framed(trial: _Trial) -> RoleRules:
    """The rules of ``trial`` with three more found by trying: what the template writes around a reply's calls
    (``frame``), whether it takes their arguments as text, and the ids that it needs. Unchanged if it writes no
    calls."""
    for text, ids in product((False, True), (CallIds.NUMBERED, CallIds.ANY, CallIds.SHORT)):
        found = replace(trial.rules, text_arguments=text, ids=ids)
        frame = replace(trial, rules=found).template.call_frame(trial.preamble, _user(1), _call())
        if frame is not None and (ids is not CallIds.NUMBERED or KIMI_SEP in frame.head):
            return replace(found, frame=frame)
    return trial.rules


def _lead(template: ChatTemplate) -> str:
    """The text that the template writes before an earlier reply, but not before the reply that comes next.
    Empty if it writes the same before both."""
    past = template.pieces(Preamble(), [_user(1), _reply(1), _user(2)])[0]
    new = template.pieces(Preamble(), [_user(1)])[0]
    return past.removeprefix(new) if past.startswith(new) else ""


def _kind(template: ChatTemplate, preamble: Preamble, talk: list[Segment]) -> TemplateClass:
    """What the template changes in earlier turns: found by comparing its rendering of ``talk`` up to each reply
    with its rendering of all of it."""
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
    """Whether the template drops the reasoning in the text of an earlier assistant message, as a class:
    REWRITES_REASONING, or else APPEND_ONLY."""
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
