"""Renders the model's chat template as transformers does, replies as opaque sentinels, the clock frozen.

A sentinel stands where the model's own words stand: the text around it is the template's, the ids in its
place are those the model sampled. Knows nothing of ids.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from .errors import TemplateFailed
from .history import Segment
from .items import FunctionCall, FunctionCallOutput, Item, Message, Preamble, Tool
from .tokenizer import ChatTokenizer
from .tree import Reply

_NONCE = secrets.token_hex(8)
"""Makes sentinels that nobody outside this process can write."""
_SENTINEL = re.compile(f"\U000f0002{_NONCE}\\.([0-9]+)\U000f0003")


class ChatTemplate:
    """One model's chat template. ``now`` is what it takes for the present, for as long as this lives."""

    def __init__(self, tokenizer: ChatTokenizer, now: datetime) -> None:
        self._tokenizer = tokenizer
        self._now = now
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
            messages, replies = self._messages(preamble, segments)
            text = self._render(messages, [_tool_form(tool) for tool in preamble.tools], open_reply)
        except Exception as fault:  # a template is code from outside: whatever it raises is its refusal
            raise TemplateFailed(f"The chat template refused the conversation: {fault}") from fault
        # [text, number, text, number, ..., text]
        parts = _SENTINEL.split(text)
        if parts[1::2] != [str(number) for number in range(replies)]:
            raise TemplateFailed("The chat template lost, doubled or moved a reply")
        return parts[0::2]

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], open_reply: bool) -> str:
        rendered: str = self._template.render(
            messages=messages,
            tools=self._tokenizer.mark(tools) or None,
            documents=None,
            add_generation_prompt=open_reply,
            strftime_now=self._now.strftime,
            **self._tokenizer.named,
        )
        return rendered

    def _messages(self, preamble: Preamble, segments: Sequence[Segment]) -> tuple[list[dict[str, Any]], int]:
        mark = self._tokenizer.mark
        messages: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        replies = 0
        if preamble.instructions:
            messages.append({"role": "system", "content": mark(preamble.instructions)})
        for segment in segments:
            if isinstance(segment, Reply):
                messages.append({"role": "assistant", "content": _sentinel(replies)})
                replies += 1
            for item in _items(segment):
                if isinstance(item, FunctionCall):
                    names[item.call_id] = item.name
            if isinstance(segment, FunctionCall) and _takes_calls(messages):
                messages[-1].setdefault("tool_calls", []).append(mark(_call_form(segment)))
            elif not isinstance(segment, Reply):
                messages.append(mark(_message_form(segment, names)))
        return messages, replies


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
    """A call as templates take it: arguments as an object where they are one."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict):
        arguments = call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def _tool_form(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {
        "type": "function",
        "function": {"name": tool.name, **described, "parameters": tool.parameters},
    }
