"""A dialogue of the pocket world as data, and the two ways to write it: messages and ChatML segments.

It knows nothing of how dialogues come about, nor of tokens.
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
    """What the user says and what the model replies; a tool call and its output may stand between. Without a
    reply the next exchange follows at once: two messages in a row, or a note of the system."""

    user: str
    reply: str | None
    call: WrittenCall | None = None
    output: str = ""
    weight: float = 1.0
    """Of its replies in the loss, against 1 for most; 0 for a reply that was cut short."""
    role: str = "user"


@dataclass
class Dialogue:
    """One conversation from its beginning."""

    system: str | None
    tools: list[Json]
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self) -> list[Json]:
        """The dialogue in the form chat templates take (OpenAI's)."""
        system: list[Json] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [message for exchange in self.exchanges for message in _messages(exchange)]


@dataclass(frozen=True)
class Segment:
    """A piece of ChatML text; `weight` is its weight in the loss where the model wrote it, else None."""

    text: str
    weight: float | None = None


def head(dialogue: Dialogue) -> Segment | None:
    """The system turn: the instructions and the list of tools."""
    if dialogue.system is None and not dialogue.tools:
        return None
    parts = [dialogue.system] if dialogue.system is not None else []
    if dialogue.tools:
        listed = "".join(json.dumps(_listed(tool), ensure_ascii=False) + "\n" for tool in dialogue.tools)
        parts.append(TOOL_INTRO + listed + TOOL_OUTRO)
    return Segment("<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n")


def segments(exchange: Exchange) -> Iterator[Segment]:
    """One exchange as ChatML; equals what the chat template renders."""
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
