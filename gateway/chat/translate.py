"""Translates bodies of Chat Completions into transcripts and requests. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...runtime.verbs import Grammar, GrammarKind
from ...sdk.errors import FieldInvalid, FieldMissing
from ...sdk.frames.formats import ChatJsonSchema, JsonObject
from ...sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    Role,
    Tool,
    new_id,
)
from ...sessions.errors import GrammarInvalid
from ...sessions.tools.grammar import checked_grammar, json_format
from ...sessions.turn.request import RequestBounds, TurnRequest
from ..live.sessions import Transcript, cache_key
from ..live.transcripts import Ask
from . import frames

MAX_SEED = 2**63


def ask_of(
    body: frames.ChatRequest, bounds: RequestBounds, sampling: Mapping[str, Any], default_tokens: int | None
) -> Ask:
    """The turn that a body asks for. ``bounds``: what the model allows. ``sampling``: the model's defaults, for
    fields that the body leaves out. ``default_tokens``: the most tokens of a reply if its request sets no
    limit; None: as many as the context holds.

    Raises ``FieldInvalid``, ``FieldMissing``, and what `TurnRequest.checked` raises.
    """
    tools = tools_of(body.tools or ())
    transcript = replace(transcript_of(body.messages, tools), keys=cache_key(body.prompt_cache_key))
    choice = body.tool_choice
    if choice is not None and not tools and choice != "none":
        raise FieldInvalid("`tool_choice` is only allowed with `tools`", "tool_choice")
    required, named, allowed = choice if isinstance(choice, str) else "auto", None, list[str]()
    if isinstance(choice, frames.ChosenFunction):
        required, named = "required", choice.function.name
    elif isinstance(choice, frames.ChatAllowedTools):
        required = choice.allowed_tools.mode
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
    logprobs = None
    if body.top_logprobs is not None and not body.logprobs:
        raise FieldInvalid("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    most = body.max_completion_tokens or body.max_tokens or default_tokens
    request = TurnRequest.checked(
        bounds=bounds,
        offered=tools,
        tool_choice=required,
        tool=named,
        allowed=allowed,
        format=format_of(body),
        max_output_tokens=most,
        top_logprobs=logprobs,
        parallel_calls=body.parallel_tool_calls is not False,
        **sampling_of(body, sampling),
    )
    return Ask(transcript, request, body.n or 1, whole_calls=not body.stream)


def sampling_of(body: frames.SamplingBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a body, by their names as arguments of `TurnRequest.checked`. ``defaults``:
    the model's, for those that the body leaves out."""
    names = (
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stop_token_ids",
    )
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)  # -1 means all, as 0
    if body.seed is not None:
        given["seed"] = body.seed % MAX_SEED
    if body.stop is not None:
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.min_tokens is not None:
        given["min_output_tokens"] = body.min_tokens
    if body.ignore_eos:
        given["ignore_eos"] = True
    if body.bad_words is not None:
        given["bad_words"] = body.bad_words
    return {**defaults, **given}


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
    items: list[Item] = []
    open_calls: set[str] = set()
    for at, message in enumerate(messages, offset):
        match message:
            case frames.ToolMessage(tool_call_id=call_id, content=content):
                if call_id not in open_calls:
                    told = f"No call {call_id!r} before this message waits for an output"
                    raise FieldInvalid(told, f"messages[{at}].tool_call_id")
                open_calls.discard(call_id)
                items.append(FunctionCallOutput(id=new_id("item"), call_id=call_id, output=text_of(content)))
            case frames.AssistantMessage():
                for item in assistant_items(message, at):
                    items.append(item)
                    if isinstance(item, FunctionCall):
                        open_calls.add(item.call_id)
            case frames.UserMessage(content=content):
                items.append(_message("user", text_of(content)))
            case frames.SystemMessage(content=content) | frames.DeveloperMessage(content=content):
                items.append(_message("system", text_of(content)))
    return Transcript(Preamble(instructions=instructions, tools=tools), tuple(items))


def assistant_items(message: frames.AssistantMessage, at: int) -> list[Item]:
    """The items of a message of the model: its text, then its calls. ``at``: the message's index in the body,
    for errors. Raises ``FieldMissing`` if it has neither."""
    items: list[Item] = []
    text = text_of(message.content) if message.content else message.refusal or ""
    if text:
        items.append(_message("assistant", text))
    for call in message.tool_calls or ():
        name, arguments = call.function.name, call.function.arguments
        items.append(FunctionCall(id=new_id("item"), call_id=call.id, name=name, arguments=arguments))
    if not items and message.content is None:
        raise FieldMissing(f"Missing required parameter: 'messages[{at}].content'", f"messages[{at}].content")
    return items or [_message("assistant", "")]


def _message(role: Role, text: str) -> Message:
    return Message(id=new_id("item"), role=role, text=text)


def text_of(content: frames.Parts) -> str:
    """The text of a message's content. Its parts are joined with line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, frames.ChatTextPart) else part.refusal for part in content)


def tools_of(tools: Sequence[frames.ChatTool]) -> tuple[Tool, ...]:
    """The tools of a body as tools of `sessions`."""
    return tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters or {},
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )


def format_of(body: frames.ChatRequest) -> Grammar | None:
    """The grammar that the reply's text must follow, from ``response_format`` or vLLM's fields; None: any text.
    Raises ``GrammarInvalid`` if it is not valid, or if there are several."""
    grammars: list[Grammar] = []
    match body.response_format:
        case JsonObject():
            grammars.append(json_format({"type": "object"}, strict=True, param="response_format"))
        case ChatJsonSchema(json_schema=named):
            param = "response_format.json_schema.schema"
            grammars.append(json_format(named.schema, strict=named.strict is not False, param=param))
    if (other := structured_of(body)) is not None:
        grammars.append(other)
    if len(grammars) > 1:
        raise GrammarInvalid("Only one format of the reply can be followed", param="response_format")
    return grammars[0] if grammars else None


def structured_of(body: frames.SamplingBody) -> Grammar | None:
    """The grammar that vLLM's fields (``structured_outputs``, ``guided_json`` and so on) give; None: none of
    them is set. Raises ``GrammarInvalid`` if it is not valid, or if there are several."""
    asked = body.structured_outputs or frames.StructuredOutputs()
    found: list[Grammar] = []
    for param, schema in (("structured_outputs.json", asked.json), ("guided_json", body.guided_json)):
        if schema is not None:
            found.append(json_format(_schema(schema, param), strict=True, param=param))
    if asked.json_object:
        found.append(json_format({"type": "object"}, strict=True, param="structured_outputs.json_object"))
    for param, pattern in (("structured_outputs.regex", asked.regex), ("guided_regex", body.guided_regex)):
        if pattern is not None:
            found.append(checked_grammar(Grammar(GrammarKind.REGEX, pattern), param))
    for param, choices in (
        ("structured_outputs.choice", asked.choice),
        ("guided_choice", body.guided_choice),
    ):
        if choices is not None:
            found.append(checked_grammar(Grammar(GrammarKind.CHOICE, json.dumps(choices)), param))
    for param, lark in (
        ("structured_outputs.grammar", asked.grammar),
        ("guided_grammar", body.guided_grammar),
    ):
        if lark is not None:
            found.append(checked_grammar(Grammar(GrammarKind.LARK, lark), param))
    if len(found) > 1:
        raise GrammarInvalid("Only one format of the reply can be followed", param="structured_outputs")
    return found[0] if found else None


def _schema(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, str):
        checked_grammar(Grammar(GrammarKind.JSON, schema), param)  # one that is too long is not read
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise GrammarInvalid("The schema is not a JSON object", param=param)
    return found
