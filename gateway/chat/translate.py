"""Translates bodies of Chat Completions into transcripts and requests. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.verbs import Grammar
from ...sdk.errors import FieldInvalid, FieldMissing
from ...sessions.conversation.items import Preamble, Tool
from ...sessions.turn.request import RequestBounds, TurnRequest
from ..live.requests import (
    CallChoice,
    SentConversation,
    grammar_of,
    names_in,
    renaming,
    sampling_of,
    structured_grammar,
    tools_of,
)
from ..live.sessions import Transcript, cache_key
from ..live.transcripts import Ask
from . import frames


def ask_of(
    body: frames.ChatRequest, bounds: RequestBounds, sampling: Mapping[str, Any], default_tokens: int | None
) -> Ask:
    """The turn that a body asks for. ``bounds``: what the model allows. ``sampling``: the model's defaults, for
    fields that the body leaves out. ``default_tokens``: the most tokens of a reply if its request sets no
    limit; None: as many as the context holds.

    Raises ``FieldInvalid``, ``FieldMissing``, and what `TurnRequest.checked` raises.
    """
    tools = tools_of(tool.function for tool in body.tools or ())
    transcript = replace(transcript_of(body.messages, tools), keys=cache_key(body.prompt_cache_key))
    if body.tool_choice is not None and not tools and body.tool_choice != "none":
        raise FieldInvalid("`tool_choice` is only allowed with `tools`", "tool_choice")
    given = sampling_in(body)
    top = given.pop("top_logprobs", None)
    if top is not None and not body.logprobs:
        raise FieldInvalid("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    names = {**names_in(type(body)), "tools[].parameters": "tools[].function.parameters"}
    if body.max_completion_tokens is not None:
        names["max_output_tokens"] = "max_completion_tokens"
        most = body.max_completion_tokens
        given["max_output_tokens"] = None if most == "inf" else most
    with renaming(names):
        request = TurnRequest.checked(
            **{**sampling, "max_output_tokens": default_tokens, **given},
            **choice_of(body.tool_choice).fields(),
            bounds=bounds,
            offered=tools,
            format=grammar_of({"response_format": body.response_format, **structured_of(body)}),
            top_logprobs=(top or 0) if body.logprobs else None,
            ignore_eos=bool(body.ignore_eos),
            parallel_calls=body.parallel_tool_calls is not False,
        )
    return Ask(transcript, request, body.n or 1, whole_calls=not body.stream)


def sampling_in(body: frames.SamplingBody) -> dict[str, Any]:
    """The sampling parameters that a body sets. Clients of vLLM send negative seeds, too."""
    given = sampling_of(body)
    return {**given, "seed": given["seed"] % 2**63} if "seed" in given else given


def choice_of(choice: frames.ChatToolChoice | None) -> CallChoice:
    """Which tools may be called."""
    match choice:
        case frames.ChosenFunction(function=function):
            return CallChoice("required", function.name)
        case frames.ChatAllowedTools(allowed_tools=allowed):
            return CallChoice(allowed.mode, None, tuple(tool.function.name for tool in allowed.tools))
    return CallChoice(choice or "auto")


def transcript_of(messages: Sequence[frames.ChatMessage], tools: tuple[Tool, ...] = ()) -> Transcript:
    """The conversation of a body's messages, with these tools. The first message gives the instructions if it
    is a system or developer message; all others are items. Raises ``FieldInvalid`` for a tool's output without
    a call before it, ``FieldMissing`` for a message of the model without anything in it."""
    first, instructions = messages[0], ""
    if isinstance(first, frames.SystemMessage | frames.DeveloperMessage):
        instructions, messages = text_of(first.content), messages[1:]
        offset = 1
    else:
        offset = 0
    made = SentConversation()
    for at, message in enumerate(messages, offset):
        match message:
            case frames.ToolMessage(tool_call_id=call_id, content=content):
                made.output(call_id, text_of(content), f"messages[{at}].tool_call_id")
            case frames.AssistantMessage():
                _add_reply(made, message, f"messages[{at}].content")
            case frames.UserMessage(content=content):
                made.message("user", text_of(content))
            case frames.SystemMessage(content=content) | frames.DeveloperMessage(content=content):
                made.message("system", text_of(content))
    return Transcript(Preamble(instructions=instructions, tools=tools), tuple(made.items))


def _add_reply(made: SentConversation, message: frames.AssistantMessage, param: str) -> None:
    """Add the items of a message of the model: its text, then its calls. Raises ``FieldMissing`` if it has
    neither; ``param``: the field for that."""
    text = text_of(message.content) if message.content else message.refusal or ""
    if not message.tool_calls and not text and message.content is None:
        raise FieldMissing(f"Missing required parameter: '{param}'", param)
    if text or not message.tool_calls:
        made.message("assistant", text)
    for call in message.tool_calls or ():
        made.call(call.id, call.function.name, call.function.arguments)


def text_of(content: frames.Parts) -> str:
    """The text of a message's content. Its parts are joined with line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, frames.ChatTextPart) else part.refusal for part in content)


def structured_of(body: frames.SamplingBody) -> dict[str, Grammar]:
    """The grammars that vLLM's fields (``structured_outputs``, ``guided_json`` and so on) give, by the name of
    the field. Raises ``GrammarInvalid`` if one is not valid."""
    asked = body.structured_outputs or frames.StructuredOutputs()
    kinds = asked.__struct_fields__
    given = {f"structured_outputs.{kind}": (kind, getattr(asked, kind)) for kind in kinds}
    given |= {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}", None)) for kind in kinds}
    return {
        param: structured_grammar(kind, value, param)
        for param, (kind, value) in given.items()
        if value is not None and value is not False
    }
