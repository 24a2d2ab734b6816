"""Translates bodies of Messages into transcripts and requests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...runtime.verbs import Grammar
from ...sdk.errors import FieldInvalid, FieldUnsupported
from ...sdk.frames.formats import MAX_DEPTH, too_deep
from ...sessions.conversation.items import (
    Message,
    Preamble,
    Role,
)
from ...sessions.errors import GrammarInvalid
from ...sessions.tools.grammar import json_format
from ...sessions.turn.request import RequestBounds, TurnRequest
from ..live.requests import CallChoice, SentConversation, names_in, renaming, sampling_of, tools_of
from ..live.sessions import Transcript
from ..live.transcripts import Ask
from . import frames


def ask_of(
    body: frames.MessagesRequest,
    bounds: RequestBounds,
    sampling: Mapping[str, Any],
    prompt: tuple[int, ...] | None = None,
) -> Ask:
    """The turn that a body asks for. ``bounds``: what the model allows. ``sampling``: the model's defaults, for
    fields that the body leaves out. ``prompt``: the whole prompt's token ids, if the reply continues the last
    message, which is then part of it; no session keeps such a turn. None: the conversation is the prompt.

    Raises ``FieldInvalid``, and what `TurnRequest.checked` raises.
    """
    transcript = transcript_of(body)
    choice = body.tool_choice
    if choice is not None and not transcript.preamble.tools and not isinstance(choice, frames.NoChoice):
        raise FieldInvalid("`tool_choice` is only allowed with `tools`", "tool_choice")
    if body.output_format is not None and body.output_config is not None and body.output_config.format:
        raise GrammarInvalid(
            "`output_format` and `output_config.format` are the same: give one", param="output_format"
        )
    with renaming({**names_in(type(body)), "tools[].parameters": "tools[].input_schema"}):
        request = TurnRequest.checked(
            **{**sampling, **sampling_of(body), "max_output_tokens": body.max_output_tokens or 1},
            **choice_of(choice).fields(),
            bounds=bounds,
            offered=transcript.preamble.tools,
            format=format_of(body),
            out_of_band=prompt is not None,
            prompt=prompt,
            parallel_calls=not getattr(choice, "disable_parallel_tool_use", False),
        )
    prompts = () if prompt is None else (prompt,)
    ask = Ask(transcript, request, whole_calls=not body.stream, prompts=prompts)
    return ask if body.max_output_tokens else ask.prefilling()


def choice_of(choice: frames.ToolChoice | None) -> CallChoice:
    """Which tools may be called."""
    match choice:
        case None | frames.AutoChoice():
            return CallChoice()
        case frames.NoChoice():
            return CallChoice("none")
        case frames.AnyChoice():
            return CallChoice("required")
        case frames.NamedChoice(name=name):
            return CallChoice("required", name)


def format_of(body: frames.MessagesRequest) -> Grammar | None:
    """The grammar that the reply's text must follow; None: any text. Raises ``GrammarInvalid``."""
    config = body.output_config
    for name, form in (
        ("output_config.format", None if config is None else config.format),
        ("output_format", body.output_format),
    ):
        if form is not None:
            return json_format(form.schema, strict=True, param=f"{name}.schema")
    return None


def transcript_of(body: frames.MessagesRequest | frames.CountRequest) -> Transcript:
    """The conversation of a body. A last message of the assistant is left out, because the reply continues it
    (`begun`). Raises ``FieldInvalid`` for a message without content, a block in a message of the wrong role, or
    an output without a call before it."""
    made = SentConversation()
    last = len(body.messages) - isinstance(body.messages[-1], frames.FromAssistant)
    for at, message in enumerate(body.messages[:last]):
        _add(made, message, f"messages[{at}].content")
    instructions = "" if body.system is None else text_of(body.system)
    preamble = Preamble(instructions=instructions, tools=tools_of(body.tools))
    return Transcript(preamble, tuple(made.items))


def begun(body: frames.MessagesRequest | frames.CountRequest) -> str:
    """The text of the body's last message if that is the assistant's, so that the reply continues it; empty
    otherwise.

    Raises ``FieldInvalid`` if the text ends with white space or the message calls tools. Raises
    ``FieldUnsupported`` if the body also has tools or a format, because a reply that begins in its middle is
    not searched for calls, and follows no grammar.
    """
    at, message = len(body.messages) - 1, body.messages[-1]
    if not isinstance(message, frames.FromAssistant):
        return ""
    made = SentConversation()
    _add(made, message, f"messages[{at}].content")
    text = "".join(item.text for item in made.items if isinstance(item, Message))
    if not all(isinstance(item, Message) for item in made.items):
        raise FieldInvalid("The last message calls tools, and no output follows", f"messages[{at}].content")
    if text != text.rstrip():
        told = "The assistant's last message, which the reply continues, may not end with white space"
        raise FieldInvalid(told, f"messages[{at}].content")
    formed = body.output_format is not None or (body.output_config and body.output_config.format)
    if text and (formed or (body.tools and not isinstance(body.tool_choice, frames.NoChoice))):
        told = "A reply that continues the assistant's last message is not served with tools or a format"
        raise FieldUnsupported(told, f"messages[{at}].role")
    return text


def _add(made: SentConversation, message: frames.AnyMessage, path: str) -> None:
    """Add the items of one message, in order: one for each stretch of text, each tool call and each output.
    ``path``: where its content is in the body, for errors. Raises ``FieldInvalid``."""
    content, role = message.content, _role(message)
    if not content and role != "assistant":
        raise FieldInvalid("A message must have content", path)
    blocks = [frames.TextBlock(text=content)] if isinstance(content, str) else content
    text: list[str] = []

    def end_text() -> None:
        if any(text):
            made.message(role, "".join(text))
        text.clear()

    for at, block in enumerate(blocks):
        match block:
            case frames.TextBlock():
                text.append(block.text)
            case frames.ThinkingBlock() | frames.RedactedThinkingBlock():
                if role != "assistant":
                    raise FieldInvalid("Only messages of the assistant have thinking", f"{path}[{at}].type")
            case frames.ToolUseBlock():
                if role != "assistant":
                    raise FieldInvalid("Only messages of the assistant have tool calls", f"{path}[{at}].type")
                end_text()
                made.call(block.id, block.name, _arguments(block.input, f"{path}[{at}].input"))
            case frames.ToolResultBlock():
                if role != "user":
                    raise FieldInvalid(
                        "Only messages of the user have outputs of tools", f"{path}[{at}].type"
                    )
                end_text()
                made.output(block.tool_use_id, output_of(block), f"{path}[{at}].tool_use_id")
    end_text()


def _role(message: frames.AnyMessage) -> Role:
    match message:
        case frames.FromUser():
            return "user"
        case frames.FromAssistant():
            return "assistant"
        case frames.FromSystem():
            return "system"


def _arguments(given: msgspec.Raw, path: str) -> str:
    """A tool call's arguments, as JSON text, from its ``input``. ``path``: where that is in the body, for the
    error. Raises ``FieldInvalid`` unless it is an object of a bounded depth."""
    text = bytes(given)
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FieldInvalid("A call's input must be an object", path)
    if too_deep(value):
        raise FieldInvalid(f"A call's input nests deeper than {MAX_DEPTH} levels", path)
    return text.decode()


def text_of(content: frames.Text) -> str:
    """The text of a message's content. Its blocks are joined without a separator."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def output_of(block: frames.ToolResultBlock) -> str:
    """A tool's output as the model reads it. That of a tool that failed begins with ``Error:``."""
    text = "" if block.content is None else text_of(block.content)
    return f"Error: {text}" if block.is_error else text
