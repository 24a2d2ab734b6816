"""Renders the model's chat template as transformers does, replies as opaque sentinels, the clock frozen.

A sentinel stands where the model's own words stand: the text around it is the template's, the ids in its
place are those the model sampled. Knows nothing of ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError

from .errors import TemplateFailed
from .history import Segment
from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool
from .tokenizer import ChatTokenizer
from .tree import Reply

MAX_DEPTH = 64
"""Levels of a call's arguments that are given as an object."""
_NONCE = secrets.token_hex(8)
"""Makes sentinels that nobody outside this process can write."""
_SENTINEL = re.compile(f"\U000f0002{_NONCE}\\.([0-9]+)\U000f0003")


@dataclass(frozen=True, slots=True)
class _Messages:
    """What a template is given of a preamble and of segments; ``names``: those of the tools, by call.

    Nobody changes a message that is in here.
    """

    preamble: Preamble
    tools: Any
    segments: tuple[Segment, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    replies: int = 0


class ChatTemplate:
    """One model's chat template. ``now`` is what it takes for the present, for as long as this lives.

    Most scripts are the one before and a few segments more: what was made of that is kept.
    """

    def __init__(self, tokenizer: ChatTokenizer, now: datetime) -> None:
        # As much to import as all else of a gateway: done while the engine loads, not before it is started.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._tokenizer = tokenizer
        self._now = now
        self._kept = _Messages(Preamble(), None)
        try:
            self._template = _compile_jinja_template(tokenizer.template)
        except TemplateError as fault:
            raise TemplateFailed(f"The chat template does not compile: {fault}") from None

    def pieces(
        self, preamble: Preamble, segments: Sequence[Segment], *, open_reply: bool = True
    ) -> list[str]:
        """The rendered text before, between and after the replies: one piece more than there are replies.

        Control tokens in what came from outside are marked (``ChatTokenizer.mark``). ``open_reply``: end
        with what stands before the next reply. Raises ``TemplateFailed``.
        """
        try:
            said = self._messages(preamble, tuple(segments))
            text = self._render(said, open_reply)
        except Exception as fault:  # a template is code from outside: whatever it raises is its refusal
            raise TemplateFailed(f"The chat template refused the conversation: {fault}") from fault
        # [text, number, text, number, ..., text]
        parts = _SENTINEL.split(text)
        if parts[1::2] != [str(number) for number in range(said.replies)]:
            raise TemplateFailed("The chat template lost, doubled or moved a reply")
        return parts[0::2]

    def _render(self, said: _Messages, open_reply: bool) -> str:
        rendered: str = self._template.render(
            messages=list(said.messages),
            tools=said.tools,
            documents=None,
            add_generation_prompt=open_reply,
            strftime_now=self._now.strftime,
            **self._tokenizer.named,
        )
        return rendered

    def _messages(self, preamble: Preamble, segments: tuple[Segment, ...]) -> _Messages:
        """All of it; what comes before the last segment is kept, since that one may still grow."""
        known = self._kept
        if known.preamble != preamble or known.segments != segments[: len(known.segments)]:
            known = self._opened(preamble)
        before = max(len(known.segments), len(segments) - 1)
        self._kept = known = self._and(known, segments[len(known.segments) : before])
        return self._and(known, segments[before:])

    def _opened(self, preamble: Preamble) -> _Messages:
        mark = self._tokenizer.mark
        tools = mark([_tool_form(tool) for tool in preamble.tools]) or None
        told = {"role": "system", "content": mark(preamble.instructions)}
        return _Messages(preamble, tools, messages=(told,) if preamble.instructions else ())

    def _and(self, known: _Messages, segments: tuple[Segment, ...]) -> _Messages:
        """What is known, and ``segments`` after it."""
        if not segments:
            return known
        mark = self._tokenizer.mark
        messages, names, replies = list(known.messages), dict(known.names), known.replies
        for segment in segments:
            if isinstance(segment, Reply):
                messages.append({"role": "assistant", "content": _sentinel(replies)})
                replies += 1
            names.update(
                (item.call_id, item.name) for item in _items(segment) if isinstance(item, FunctionCall)
            )
            if isinstance(segment, FunctionCall) and _takes_calls(messages):
                last = messages[-1]
                messages[-1] = {
                    **last,
                    "tool_calls": [*last.get("tool_calls", ()), mark(_call_form(segment))],
                }
            elif not isinstance(segment, Reply):
                messages.append(mark(_message_form(segment, names)))
        together = known.segments + segments
        return _Messages(known.preamble, known.tools, together, tuple(messages), names, replies)


def _sentinel(number: int) -> str:
    return f"\U000f0002{_NONCE}.{number}\U000f0003"


def _items(segment: Segment) -> tuple[Item, ...]:
    return segment.items if isinstance(segment, Reply) else (segment,)


def _takes_calls(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message is an assistant's in words: a call given after it belongs to it."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and not str(last["content"]).startswith("\U000f0002")


def _message_form(item: Item, names: dict[str, str]) -> dict[str, Any]:
    match item:
        case Message():
            return {"role": item.role, "content": item.text}
        case FunctionCall():
            return {"role": "assistant", "content": "", "tool_calls": [_call_form(item)]}
        case FunctionCallOutput():
            name = {"name": names[item.call_id]} if item.call_id in names else {}
            return {"role": "tool", "content": item.output, "tool_call_id": item.call_id} | name


def _call_form(call: FunctionCall) -> dict[str, Any]:
    """A call as templates take it: arguments as an object where they are one that can be written."""
    try:
        arguments = json.loads(call.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # no character is a lone surrogate
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict) or _too_deep(arguments):
        arguments = call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def _too_deep(value: Any) -> bool:
    """Whether it nests deeper than a template, which writes it by calling itself, may be trusted to go."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [
            node.values() if isinstance(node, dict) else node
            for node in level
            if isinstance(node, dict | list)
        ]
        level = [child for children in inner for child in children]
        if not level:
            return False
    return True


def _tool_form(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {
        "type": "function",
        "function": {"name": tool.name, **described, "parameters": tool.parameters},
    }
