"""A dialogue of the pocket model's training as data, and the two ways to write it: messages and ChatML
segments.

How dialogues are made up is in `dialogues`; tokens are in `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from .toolbox import Json, WrittenCall

TOOL_INTRO = "You can call these tools:\n<tools>\n"
TOOL_OUTRO = "</tools>\nCall one with its name and arguments as JSON in <tool_call></tool_call>."


@dataclass(frozen=True)
class Exchange:
    """What the user says and what the model replies; in between may be a tool call and its output. A reply of
    None: the next exchange follows at once, for two messages in a row. ``role``: of the first message,
    ``system`` for a note."""

    user: str
    reply: str | None
    call: WrittenCall | None = None
    output: str = ""
    weight: float = 1.0
    """The weight of the model's words in the loss, against 1 for most; 0 for a reply that was cut short."""
    role: str = "user"


@dataclass
class Dialogue:
    """One conversation from its beginning: instructions (None: there are none), tools and exchanges."""

    system: str | None
    tools: list[Json]
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self) -> list[Json]:
        """The dialogue as messages in OpenAI's form, which chat templates take."""
        system: list[Json] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for exchange in self.exchanges for message in _messages(exchange)]


@dataclass(frozen=True)
class Segment:
    """A part of the ChatML text; `weight` is its weight in the loss if the model wrote it, else None."""

    text: str
    weight: float | None = None


def head(dialogue: Dialogue) -> Segment | None:
    """The system turn, with the instructions and the list of tools; None if the dialogue has neither."""
    if dialogue.system is None and not dialogue.tools:
        return None
    parts = [dialogue.system] if dialogue.system is not None else []
    if dialogue.tools:
        listed = "".join(json.dumps(_listed(tool), ensure_ascii=False) + "\n" for tool in dialogue.tools)
        parts.append(TOOL_INTRO + listed + TOOL_OUTRO)
    return Segment("<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n")


def segments(exchange: Exchange) -> Iterator[Segment]:
    """One exchange as ChatML, in parts; together they are what the chat template renders."""
    yield Segment(f"<|im_start|>{exchange.role}\n{exchange.user}<|im_end|>\n")
    if exchange.reply is None:
        return
    yield Segment("<|im_start|>assistant\n")
    if exchange.call is not None:
        yield Segment(f"{exchange.call.render()}<|im_end|>", exchange.weight)
        response = f"<tool_response>\n{exchange.output}\n</tool_response>"
        yield Segment(f"\n<|im_start|>user\n{response}<|im_end|>\n<|im_start|>assistant\n")
    yield Segment(f"{exchange.reply}<|im_end|>", exchange.weight)
    yield Segment("\n")


def _listed(tool: Json) -> Json:
    return {key: tool[key] for key in ("name", "description", "parameters") if key in tool}


def _messages(exchange: Exchange) -> Iterator[Json]:
    yield {"role": exchange.role, "content": exchange.user}
    if exchange.reply is None:
        return
    if exchange.call is not None:
        function = {"name": exchange.call.name, "arguments": exchange.call.arguments}
        yield {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        yield {"role": "tool", "content": exchange.output}
    yield {"role": "assistant", "content": exchange.reply}
