"""Renders a conversation with the model's chat template, as transformers does, at a fixed time.

A sentinel stands for each reply of the model. The text around it is the template's; the renderer puts the ids
that the model sampled in its place.
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

from ..errors import TemplateFailed
from ..items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from ..tree import Segment, TurnReply
from .template_sandbox import compiled
from .tokenizer import ChatTokenizer
from .tool_fallback import answered, called, instructions_with

MAX_DEPTH = 64
"""A call's arguments are given to a template as an object up to this many levels, as text beyond."""
_NONCE = secrets.token_hex(8)
"""Random, so that text from outside holds no sentinels."""
_OPEN = "\U000f0002"
_SENTINEL = re.compile(f"{_OPEN}{_NONCE}\\.([0-9]+)\U000f0003")


JOINT = "\n\n"
"""Joins two messages that a template gets as one."""


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a template accepts and writes. Mistral's and Gemma's, for example, refuse two users in a row.

    ``users``, ``assistants``: two of that role in a row. ``assistant_first``: a reply as the first message.
    ``system``: a system message at the beginning; ``system_later``: one after other messages. ``outputs``: the
    outputs of calls. ``calls``: calls that a client inserted. ``schemas``: the tools. Some templates accept
    these three and write nothing.
    """

    users: bool = True
    assistants: bool = True
    assistant_first: bool = True
    system: bool = True
    system_later: bool = True
    outputs: bool = True
    calls: bool = True
    schemas: bool = True


class _Talk:
    """Messages in an order that the template accepts. Neighbours that it would refuse become one message; an
    empty user message is put where it needs one. A message in here is replaced, never changed.
    """

    def __init__(self, rules: RoleRules, messages: Sequence[dict[str, Any]]) -> None:
        self._rules = rules
        self._messages = list(messages)
        self._joined: list[str] = []  # the contents that the last message joins, if it joins any

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages."""
        if self._joined:
            self._replace_last(content=JOINT.join(filter(None, self._joined)))
            self._joined = []
        return self._messages

    def add(self, message: dict[str, Any]) -> None:
        """Append a message, or join it with the last one."""
        message = self._taken(message)
        if self._is_joined(message):
            self._joined = self._joined or [self._last["content"]]
            self._joined.append(message["content"])
        else:
            if message["role"] == "assistant":
                self.open_reply()
            self.messages.append(message)

    def _taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message in a role that the template accepts."""
        rules, role = self._rules, message["role"]
        system = rules.system_later if self._messages else rules.system
        if role == "tool" and not rules.outputs:
            return {
                "role": "user",
                "content": message["content"] if rules.schemas else answered(message["content"]),
            }
        if role == "system" and not system:
            return {"role": "user", "content": message["content"]}
        if "tool_calls" in message and not rules.calls:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            calls = calls if rules.schemas else list(map(called, calls))
            return {"role": role, "content": JOINT.join(filter(None, [message["content"], *calls]))}
        return message

    def add_call(self, call: dict[str, Any]) -> None:
        """Append a call that a client inserted; it joins the client's assistant message before it."""
        last = self._last
        if last.get("role") == "assistant" and not _is_sentinel(last) and self._rules.calls:
            self._replace_last(tool_calls=[*last.get("tool_calls", ()), call])
        else:
            self.add({"role": "assistant", "content": "", "tool_calls": [call]})

    def open_reply(self) -> None:
        """Put an empty user message before the assistant's next one, if the template needs it."""
        if not self._may_reply():
            self.messages.append({"role": "user", "content": ""})

    @property
    def _last(self) -> dict[str, Any]:
        return self._messages[-1] if self._messages else {}

    def _is_joined(self, message: dict[str, Any]) -> bool:
        """Whether the message joins the last one. A reply of the model never does."""
        last, role = self._last, message["role"]
        if last.get("role") != role:
            return False
        if role == "user":
            return not self._rules.users or (len(self._messages) == 1 and not self._rules.system)
        words = not ("tool_calls" in message or "tool_calls" in last)
        return role == "assistant" and not self._rules.assistants and words and not _is_sentinel(message)

    def _may_reply(self) -> bool:
        last = self._last
        if last.get("role", "system") == "system":
            return self._rules.assistant_first
        return last["role"] != "assistant" or self._rules.assistants or "tool_calls" in last

    def _replace_last(self, **changes: Any) -> None:
        self._messages[-1] = {**self._messages[-1], **changes}


@dataclass(frozen=True, slots=True)
class _Messages:
    """The arguments of a template for a preamble and segments. ``names``: of the called tools, by call id.

    A message in here is never changed.
    """

    preamble: Preamble
    tools: Any
    segments: tuple[Segment, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    replies: int = 0


class ChatTemplate:
    """One model's chat template. ``now``: the time it gets. ``rules``: what it accepts and writes.

    It caches the messages of the last conversation, because most extend the one before.
    """

    def __init__(self, tokenizer: ChatTokenizer, now: datetime, rules: RoleRules | None = None) -> None:
        self._tokenizer = tokenizer
        self._now = now
        self._rules = rules or RoleRules()
        self._cached = _Messages(Preamble(), None)
        try:
            self._template = self._tool_template = compiled(tokenizer.template)
            if tokenizer.tool_template is not None:
                self._tool_template = compiled(tokenizer.tool_template)
        except (TemplateError, RecursionError, MemoryError) as fault:
            raise TemplateFailed(f"The chat template does not compile: {fault}") from None

    def pieces(
        self, preamble: Preamble, segments: Sequence[Segment], *, open_reply: bool = True
    ) -> list[str]:
        """The rendered text before, between and behind the replies: one piece more than there are replies.

        Control tokens in text from outside are marked (``ChatTokenizer.mark``). ``open_reply``: end with what
        the template writes before a reply. Raises ``TemplateFailed``.
        """
        try:
            said = self._messages(preamble, tuple(segments))
            text = self._render(said, open_reply)
        except Exception as fault:  # a template is code from outside and may raise anything
            raise TemplateFailed(f"The chat template refused the conversation: {fault}") from fault
        # [text, number, text, number, ..., text]
        parts = _SENTINEL.split(text)
        if parts[1::2] != [str(number) for number in range(said.replies)]:
            raise TemplateFailed("The chat template lost, doubled or moved a reply")
        return parts[0::2]

    def _render(self, said: _Messages, open_reply: bool) -> str:
        talk = _Talk(self._rules, said.messages)
        if open_reply:
            talk.open_reply()
        template = self._template if said.tools is None else self._tool_template
        return template.render(
            talk.messages,
            tools=said.tools,
            documents=None,
            add_generation_prompt=open_reply,
            strftime_now=self._now.strftime,
            **self._tokenizer.named,
        )

    def _messages(self, preamble: Preamble, segments: tuple[Segment, ...]) -> _Messages:
        """The template's arguments. All but the last segment, which may still grow, are cached."""
        known = self._cached
        if known.preamble != preamble or known.segments != segments[: len(known.segments)]:
            known = self._opened(preamble)
        before = max(len(known.segments), len(segments) - 1)
        self._cached = known = self._extended(known, segments[len(known.segments) : before])
        return self._extended(known, segments[before:])

    def _opened(self, preamble: Preamble) -> _Messages:
        mark = self._tokenizer.mark
        tools = mark([_tool_form(tool) for tool in preamble.tools]) or None
        talk, instructions = _Talk(self._rules, ()), mark(preamble.instructions)
        if tools and not self._rules.schemas:
            instructions, tools = instructions_with(instructions, tools), None
        if instructions:
            talk.add({"role": "system", "content": instructions})
        return _Messages(preamble, tools, messages=tuple(talk.messages))

    def _extended(self, known: _Messages, segments: tuple[Segment, ...]) -> _Messages:
        if not segments:
            return known
        mark = self._tokenizer.mark
        talk, names, replies = _Talk(self._rules, known.messages), dict(known.names), known.replies
        for segment in segments:
            items = segment.items if isinstance(segment, TurnReply) else (segment,)
            names.update((item.call_id, item.name) for item in items if isinstance(item, FunctionCall))
            match segment:
                case TurnReply():
                    talk.add({"role": "assistant", "content": f"{_OPEN}{_NONCE}.{replies}\U000f0003"})
                    replies += 1
                case FunctionCall():
                    talk.add_call(mark(_call_form(segment)))
                case _:
                    talk.add(mark(_message_form(segment, names)))
        together = known.segments + segments
        return _Messages(known.preamble, known.tools, together, tuple(talk.messages), names, replies)


def _is_sentinel(message: dict[str, Any]) -> bool:
    return str(message["content"]).startswith(_OPEN)


def _message_form(item: Message | FunctionCallOutput, names: dict[str, str]) -> dict[str, Any]:
    match item:
        case Message():
            return {"role": item.role, "content": item.text}
        case FunctionCallOutput():
            name = {"name": names[item.call_id]} if item.call_id in names else {}
            return {"role": "tool", "content": item.output, "tool_call_id": item.call_id} | name


def _call_form(call: FunctionCall) -> dict[str, Any]:
    """A call as templates get it: with its arguments as an object, or as text if they are not valid JSON."""
    try:
        arguments = json.loads(call.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # no character is a lone surrogate
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict) or _too_deep(arguments):
        arguments = call.arguments
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": arguments}}


def _too_deep(value: Any) -> bool:
    """Whether the value has more than `MAX_DEPTH` levels: a template may write it with a recursive macro."""
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
