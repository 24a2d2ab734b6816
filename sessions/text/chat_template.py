"""Renders a conversation with the model's chat template, as transformers does, at a fixed time.

A sentinel stands for each reply of the model. The text around it is the template's; the renderer puts the ids
that the model sampled there.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from os.path import commonprefix
from typing import Any

from jinja2.exceptions import TemplateError

from ..conversation.items import FunctionCall, FunctionCallOutput, Message, Preamble, Tool
from ..conversation.tree import Segment, TurnReply
from ..errors import TemplateFailed
from .call_frame import CallFrame, CallName
from .template_sandbox import SandboxedTemplate, compiled
from .tokenizer import ChatTokenizer

MAX_DEPTH = 64
"""A template gets a call's arguments as an object if they have at most this many levels, else as text."""
_NONCE = secrets.token_hex(8)
"""Random, so that text from outside cannot contain a sentinel."""
_OPEN = "\U000f0002"
_SENTINEL = re.compile(f"{_OPEN}{_NONCE}\\.([0-9]+)\U000f0003")
_MARK = re.compile(f"{_OPEN}{_NONCE}\\.([0-9]+)([ab])\U000f0003")
"""Finds the two marks that stand for a call's arguments in a rendered text: ``a`` instead of an argument's
name, and ``b`` instead of its value; the number is the reply's."""

NO_TEMPLATE = (
    "The model has no chat template, so it has no conversations: use `/v1/completions` or `generate`, or put a "
    "template into its folder as chat_template.jinja (in a GGUF file: tokenizer.chat_template)"
)
JOINT = "\n\n"
"""Stands between two messages that are joined into one."""
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501 - the model's text
"""Tools in the instructions, for a template that does not show tools: the text of Qwen 2.5 and Hermes. The
model is told to write calls in the form `CallForm.HERMES`."""


class CallIds(StrEnum):
    """The ids of calls that a template needs. The values are the forms of calls that have ids of their own."""

    ANY = "any"
    SHORT = "mistral"
    """9 letters and digits."""
    NUMBERED = "kimi_k2"
    """``functions.NAME:NUMBER``, and the number counts the calls of the conversation."""


_WRITTEN_IDS = {
    CallIds.SHORT: re.compile(r"(?:\[CALL_ID\]\s*|\"id\"\s*:\s*\")([A-Za-z0-9]{9})(?![A-Za-z0-9])"),
    CallIds.NUMBERED: re.compile(
        r"<\|tool_call_begin\|>\s*([^\s<]+:[0-9]+)\s*<\|tool_call_argument_begin\|>"
    ),
}
"""The id of a call as the model writes it; its one group is the id."""


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a template accepts and writes. Mistral's and Gemma's templates, for example, refuse two user
    messages in a row.

    It accepts: ``users``, ``assistants``: two messages of that role in a row; ``assistant_first``: a reply as
    the first message; ``system``: a system message at the beginning; ``system_later``: one after other
    messages. Some templates accept things but do not write them. So these are true only if it also writes them:
    ``schemas``: the tools; ``outputs``: outputs of calls; ``calls``: calls that a client inserted.

    It needs or writes: ``frame``: what it writes around a reply's calls, if it must get them as ``tool_calls``;
    ``ids``: which ids calls have; ``text_arguments``: it takes arguments as JSON text; ``object_arguments``: it
    refuses arguments that are no object, so other ones are given as a text in an object;
    ``list_of_tools``: it takes an empty list where there are no tools; ``lead``: text that it writes before
    earlier replies, but not before the next one, because there the model writes it.

    ``reasoning``: tags of reasoning, which stay control tokens in the text of an assistant's message: the model
    wrote them, and templates look for them to leave the reasoning out.
    """

    users: bool = True
    assistants: bool = True
    assistant_first: bool = True
    system: bool = True
    system_later: bool = True
    outputs: bool = True
    calls: bool = True
    schemas: bool = True
    frame: CallFrame | None = None
    ids: CallIds = CallIds.ANY
    text_arguments: bool = False
    object_arguments: bool = False
    list_of_tools: bool = False
    lead: str = ""
    reasoning: frozenset[str] = frozenset()


class _Talk:
    """Builds the list of messages for the template, in an order that it accepts. Two messages in a row that it
    would refuse are joined. An empty user message is added where it needs one.

    ``messages``: those to begin with. ``calls``: the calls of each reply, by its sentinel, the text that stands
    for the reply. Message dicts are replaced, never changed.
    """

    def __init__(
        self,
        rules: RoleRules,
        messages: Sequence[dict[str, Any]],
        calls: Mapping[str, list[dict[str, Any]]] | None = None,
    ) -> None:
        self._rules = rules
        self._messages = list(messages)
        self._calls = {} if calls is None else calls  # the calls of each reply, by its sentinel
        self._joined: list[str] = []  # the contents that are joined in the last message, if there are several

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far, as the template gets them. What still waits to be joined with the last message
        is joined first."""
        if self._joined:
            self._replace_last(content=JOINT.join(filter(None, self._joined)))
            self._joined = []
        return self._messages

    def add(self, message: dict[str, Any]) -> None:
        """Bring ``message`` into a role that the template accepts, and append it, or join it with the last
        message if two of its role in a row would be refused. An empty user message is put before it if
        needed."""
        message = self._taken(message)
        if message["role"] == "user":
            self._leave_calls()
        if self._is_joined(message):
            self._joined = self._joined or [self._last["content"]]
            self._joined.append(message["content"])
        else:
            if message["role"] == "assistant":
                self.open_reply()
            self.messages.append(message)

    def _taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """``message`` as the template accepts it: unchanged; with the role ``user`` instead of ``system`` or
        ``tool``; or with its calls written as text."""
        rules, role = self._rules, message["role"]
        system = rules.system_later if self._messages else rules.system
        if role == "tool" and not (rules.outputs and self._follows_its_call(message)):
            return self._as_user(message)
        if role == "system" and not system:
            return {"role": "user", "content": message["content"]}
        if "tool_calls" in message and not rules.calls:
            return self._as_text(message)
        return message

    def _as_user(self, output: dict[str, Any]) -> dict[str, Any]:
        """A user message with the text of a tool's ``output``; between tags of its own if the
        template does not write tools."""
        content = output["content"]
        return {"role": "user", "content": content if self._rules.schemas else answered(content)}

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        """An assistant message without ``tool_calls``: for a reply of the model its sentinel, for inserted
        calls the calls written as JSON text."""
        for content, calls in self._calls.items():
            if calls is message["tool_calls"]:
                return {"role": "assistant", "content": content}
        texts = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
        texts = texts if self._rules.schemas else list(map(called, texts))
        return {"role": "assistant", "content": JOINT.join(filter(None, [message["content"], *texts]))}

    # --- templates that need `tool_calls` before an output -------------------------------------------------

    def _follows_its_call(self, output: dict[str, Any]) -> bool:
        """Whether a tool message may stand here: the calls before it must include its call. If they are in a
        reply that is still a sentinel, the reply gets its ``tool_calls`` now."""
        if self._rules.frame is None:
            return True
        at = len(self._messages) - 1
        while at >= 0 and self._messages[at]["role"] == "tool":
            at -= 1
        before: dict[str, Any] = self._messages[at] if at >= 0 else {}
        calls = (
            before["tool_calls"]
            if "tool_calls" in before
            else self._calls.get(str(before.get("content")), [])
        )
        if output["tool_call_id"] not in [call["id"] for call in calls]:
            return False
        if "tool_calls" not in before:
            self._messages[at] = {"role": "assistant", "content": "", "tool_calls": calls}
        return True

    def _leave_calls(self) -> None:
        """Called before a user message. If two user messages in a row are refused, and no reply follows the
        last outputs, those outputs become user messages, too. This is for templates that skip calls and outputs
        when they check the order of roles."""
        if self._rules.frame is None or self._rules.users:
            return
        at = self._last_counted()
        if at < len(self._messages) - 1 and (at < 0 or self._messages[at]["role"] != "assistant"):
            behind = self._messages[at + 1 :]
            del self._messages[at + 1 :]
            for message in behind:
                self.add(self._as_user(message) if message["role"] == "tool" else self._as_text(message))

    def _last_counted(self) -> int:
        """The index of the last message that the template looks at when it checks the order of roles; -1 if
        there is none."""
        for at in range(len(self._messages) - 1, -1, -1):
            message = self._messages[at]
            if not (self._rules.frame and (message["role"] == "tool" or "tool_calls" in message)):
                return at
        return -1

    def add_call(self, call: dict[str, Any]) -> None:
        """Append a call that a client inserted. It joins the client's assistant message before it, if there is
        one."""
        last = self._last
        if last.get("role") == "assistant" and not _is_sentinel(last) and self._rules.calls:
            self._replace_last(tool_calls=[*last.get("tool_calls", ()), call])
        else:
            self.add({"role": "assistant", "content": "", "tool_calls": [call]})

    def open_reply(self) -> None:
        """Add an empty user message if the template needs one before the next assistant message."""
        if not self._may_reply():
            self.messages.append({"role": "user", "content": ""})

    @property
    def _last(self) -> dict[str, Any]:
        return self._messages[-1] if self._messages else {}

    def _is_joined(self, message: dict[str, Any]) -> bool:
        """Whether the message has to be joined with the last one. A reply of the model never is."""
        last, role = self._last, message["role"]
        if last.get("role") != role:
            return False
        if role == "user":
            return not self._rules.users or (len(self._messages) == 1 and not self._rules.system)
        words = not ("tool_calls" in message or "tool_calls" in last)
        return role == "assistant" and not self._rules.assistants and words and not _is_sentinel(message)

    def _may_reply(self) -> bool:
        at = self._last_counted()
        last = self._messages[at] if at >= 0 else {}
        if last.get("role", "system") == "system":
            return self._rules.assistant_first
        return last["role"] != "assistant" or self._rules.assistants or "tool_calls" in last

    def _replace_last(self, **changes: Any) -> None:
        self._messages[-1] = {**self._messages[-1], **changes}


@dataclass(frozen=True, slots=True)
class _Messages:
    """What the template is given for a preamble and its ``segments`` (items and replies): ``tools`` and
    ``messages``. Never changed.

    ``names``: by call id, the id as the template gets it, and the tool's name. ``called``: the calls of each
    reply, by the reply's sentinel. ``replies``: the number of replies.
    """

    preamble: Preamble
    tools: Any
    segments: tuple[Segment, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    names: dict[str, CallName] = field(default_factory=dict)
    called: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    replies: int = 0


class ChatTemplate:
    """Renders conversations with one model's chat template. ``now``: the time that the template may show.
    ``rules``: what it accepts and writes.

    It caches the messages of the last conversation, because most conversations extend the one before.
    """

    def __init__(self, tokenizer: ChatTokenizer, now: datetime, rules: RoleRules | None = None) -> None:
        self._tokenizer = tokenizer
        self._now = now
        self._rules = rules or RoleRules()
        self._cached = _Messages(Preamble(), None)
        self._template: SandboxedTemplate | None = None
        self._tool_template: SandboxedTemplate | None = None
        if tokenizer.template is None:
            return
        try:
            self._template = self._tool_template = compiled(tokenizer.template)
            if tokenizer.tool_template is not None:
                self._tool_template = compiled(tokenizer.tool_template)
        except (TemplateError, RecursionError, MemoryError) as fault:
            raise TemplateFailed(f"The chat template does not compile: {fault}") from None

    def pieces(
        self,
        preamble: Preamble,
        segments: Sequence[Segment],
        *,
        open_reply: bool = True,
        growing: bool = False,
    ) -> list[str]:
        """The rendered text before, between and behind the replies: one piece more than there are replies.

        Control tokens in text from outside are marked (``ChatTokenizer.mark``). ``open_reply``: end with what
        the template writes before a reply. ``growing``: the last segment will be another one next time. Raises
        ``TemplateFailed``.
        """
        if self._template is None:
            raise TemplateFailed(NO_TEMPLATE)
        try:
            said = self._messages(preamble, tuple(segments), growing)
            talk = _Talk(self._rules, said.messages, said.called)
            if open_reply:
                talk.open_reply()
            text = self._written(said.tools, talk.messages, open_reply)
        except Exception as fault:  # a template is code from outside and may raise anything
            raise TemplateFailed(f"The chat template refused the conversation: {fault}") from fault
        # [text, number, text, number, ..., text]
        parts = _SENTINEL.split(self._unframed(text, said))
        if parts[1::2] != [str(number) for number in range(said.replies)]:
            raise TemplateFailed("The chat template lost, doubled or moved a reply")
        *before, last = parts[0::2]
        return [*(piece.removesuffix(self._rules.lead) for piece in before), last]

    def call_frame(self, preamble: Preamble, asked: Message, call: FunctionCall) -> CallFrame | None:
        """What the template writes around the calls of a reply; None if it writes no calls. ``preamble``,
        ``asked``, ``call``: a sample conversation: tools, a user message and a call. The id and tool of
        ``call`` must not occur anywhere else in it."""
        said = self._opened(preamble)
        marks = _marks(_sentinel(0))
        reply = {"role": "assistant", "content": "", "tool_calls": [self._marked_call(call, marks)]}
        user = {"role": "user", "content": asked.text}
        try:
            opened = self._written(said.tools, [*said.messages, user], True)
            text = self._written(said.tools, [*said.messages, user, reply], False)
            plain = {"role": "assistant", "content": _sentinel(0)}
            closed = self._written(said.tools, [*said.messages, user, plain, user], True)
        except Exception:  # a template is code from outside and may raise anything
            return None
        behind = text[text.rfind(marks[1]) :]
        after = closed.partition(_sentinel(0))[2]
        after_text = self._tokenizer.specials_in(after)
        specials = self._tokenizer.specials_in(behind)
        closing = next((one for one in after_text if one in specials), specials[-1] if specials else "")
        if not closing:  # the end of a reply is plain text: what stands behind a reply without calls as well
            ends = (after[:count] for count in range(min(len(after), len(behind)), 0, -1))
            text = text.removesuffix(next((end for end in ends if end.strip() and behind.endswith(end)), ""))
        start = len(opened)
        if not text.startswith(opened):
            common = commonprefix([text, opened])  # noqa: RUF071 - by characters is what is wanted
            start = max(common.rfind("\n") + 1, self._tokenizer.last_control(common))
        sample = CallName(self._id_of(call.call_id, call.name), call.name)
        return CallFrame.found(sample, text, start, marks, closing)

    def _unframed(self, text: str, said: _Messages) -> str:
        """``text`` with each reply that was rendered with its calls replaced by its sentinel."""
        frame = self._rules.frame
        if frame is None:
            return text
        begins: dict[str, int] = {}
        ends: dict[str, int] = {}
        for found in _MARK.finditer(text):
            if found[2] == "a":
                begins.setdefault(found[1], found.start())
            else:
                ends[found[1]] = found.end()
        pieces, at = [], 0
        for number, begin in begins.items():
            sentinel = _sentinel(int(number))
            calls = [CallName(call["id"], call["function"]["name"]) for call in said.called[sentinel]]
            span = frame.span(text, begin, ends.get(number, begin), calls[0], calls[-1])
            if span is None:
                raise TemplateFailed(
                    "The chat template writes a reply with calls in another way than when tried"
                )
            pieces += [text[at : span[0]], sentinel]
            at = span[1]
        return "".join([*pieces, text[at:]])

    def _written(self, tools: Any, messages: list[dict[str, Any]], open_reply: bool) -> str:
        """What the template writes for the messages. If there is a second template, for tools, it is also used
        for messages with calls of tools that are gone."""
        template = self._template if tools is None else self._tool_template
        if template is not self._tool_template and any(message["role"] == "tool" for message in messages):
            template, tools = self._tool_template, []
        elif tools is None and self._rules.list_of_tools:
            tools = []
        assert template is not None, "`pieces` has checked it"
        return template.render(
            messages,
            tools=tools,
            documents=None,
            add_generation_prompt=open_reply,
            strftime_now=self._now.strftime,
            **self._tokenizer.named,
        )

    def _messages(self, preamble: Preamble, segments: tuple[Segment, ...], growing: bool) -> _Messages:
        """The template's arguments. They are cached for all segments; without the last one if it is
        ``growing``."""
        known = self._cached
        if known.preamble != preamble or known.segments != segments[: len(known.segments)]:
            known = self._opened(preamble)
        before = max(len(known.segments), len(segments) - growing)
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
        mark, replies = self._tokenizer.mark, known.replies
        names, called = dict(known.names), dict(known.called)
        talk = _Talk(self._rules, known.messages, called)
        for segment in segments:
            items = segment.items if isinstance(segment, TurnReply) else (segment,)
            names.update(self._names_in(segment, len(names)))
            match segment:
                case TurnReply():
                    sentinel = _sentinel(replies)
                    made = [item for item in items if isinstance(item, FunctionCall)]
                    if made and self._rules.frame is not None:
                        marks = _marks(sentinel)
                        called[sentinel] = [
                            self._marked_call(call, marks, names[call.call_id].id) for call in made
                        ]
                    talk.add({"role": "assistant", "content": sentinel})
                    replies += 1
                case FunctionCall():
                    call = mark(_call_form(segment, names[segment.call_id].id))
                    if self._rules.text_arguments:
                        call["function"]["arguments"] = mark(segment.arguments)
                    elif self._rules.object_arguments and isinstance(call["function"]["arguments"], str):
                        call["function"]["arguments"] = {"arguments": call["function"]["arguments"]}
                    talk.add_call(call)
                case Message(role="assistant"):
                    talk.add(mark(self._message_form(segment, names), self._rules.reasoning))
                case _:
                    talk.add(mark(self._message_form(segment, names)))
        together = known.segments + segments
        return _Messages(known.preamble, known.tools, together, tuple(talk.messages), names, called, replies)

    def _names_in(self, segment: Segment, known: int) -> Iterator[tuple[str, CallName]]:
        """For each call of a segment: its id, and its name as the template gets it. If the model wrote ids of
        its own (Mistral, Kimi), the template gets those. ``known``: the number of calls before."""
        items = segment.items if isinstance(segment, TurnReply) else (segment,)
        calls = [item for item in items if isinstance(item, FunctionCall)]
        written: list[str] = []
        if calls and self._rules.ids in _WRITTEN_IDS and isinstance(segment, TurnReply):
            text = self._tokenizer.backend.decode(segment.ids.tolist(), skip_special_tokens=False)
            written = _WRITTEN_IDS[self._rules.ids].findall(text)
        if len(written) != len(calls):
            written = [self._id_of(call.call_id, call.name, known + at) for at, call in enumerate(calls)]
        for call, its_id in zip(calls, written, strict=True):
            yield call.call_id, CallName(its_id, call.name)

    def _id_of(self, call_id: str, tool: str = "", number: int = 0) -> str:
        """The id to give to the template for the call ``call_id`` of ``tool``, which is call ``number`` of the
        conversation: unchanged if the template can have it."""
        match self._rules.ids:
            case CallIds.SHORT if not re.fullmatch("[^\\W_]{9}", call_id):
                return hashlib.blake2b(call_id.encode()).hexdigest()[:9]
            case CallIds.NUMBERED if tool and not re.fullmatch(r"functions\..+:[0-9]+", call_id):
                return f"functions.{tool}:{number}"
        return call_id

    def _marked_call(
        self, call: FunctionCall, marks: tuple[str, str], its_id: str | None = None
    ) -> dict[str, Any]:
        """A call of a reply as the template gets it, with two marks instead of its arguments. ``its_id``: its
        id there."""
        given: Any = {marks[0]: marks[1]}
        if self._rules.text_arguments:
            given = json.dumps(given, ensure_ascii=False)
        function = {"name": self._tokenizer.mark(call.name), "arguments": given}
        return {
            "type": "function",
            "id": its_id or self._id_of(call.call_id, call.name),
            "function": function,
        }

    def _message_form(self, item: Message | FunctionCallOutput, names: dict[str, CallName]) -> dict[str, Any]:
        match item:
            case Message():
                return {"role": item.role, "content": item.text}
            case FunctionCallOutput():
                call = names.get(item.call_id)
                its_id = self._id_of(item.call_id) if call is None else call.id
                name = {} if call is None else {"name": call.tool}
                return {"role": "tool", "content": item.output, "tool_call_id": its_id} | name


def _sentinel(number: int) -> str:
    """The text that stands for reply number ``number``."""
    return f"{_OPEN}{_NONCE}.{number}\U000f0003"


def _marks(sentinel: str) -> tuple[str, str]:
    """The two marks that stand for the arguments of a reply's calls. They do not contain the sentinel."""
    return f"{sentinel[:-1]}a{sentinel[-1]}", f"{sentinel[:-1]}b{sentinel[-1]}"


def _is_sentinel(message: dict[str, Any]) -> bool:
    return str(message["content"]).startswith(_OPEN)


def _call_form(call: FunctionCall, its_id: str) -> dict[str, Any]:
    """A call as templates get it. The arguments are an object, or text if they are not valid JSON; without any
    text, an empty object. ``its_id``: its id there."""
    try:
        arguments = json.loads(call.arguments if call.arguments.strip() else "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # no character is a lone surrogate
    except (ValueError, RecursionError):
        arguments = call.arguments
    if not isinstance(arguments, dict) or _too_deep(arguments):
        arguments = call.arguments
    return {"type": "function", "id": its_id, "function": {"name": call.name, "arguments": arguments}}


def _too_deep(value: Any) -> bool:
    """Whether the value has more than `MAX_DEPTH` levels of objects and lists. Deeper arguments go to the
    template as text, because a template may write objects with a macro that calls itself."""
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


def instructions_with(instructions: str, tools: Iterable[dict[str, Any]]) -> str:
    """The instructions, and behind them the tools' schemas and how to call them."""
    told = _TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{instructions}\n\n{told}" if instructions else told


def called(function: str) -> str:
    """A call as the model is told to write it. ``function``: its name and arguments as a JSON object."""
    return f"<tool_call>\n{function}\n</tool_call>"


def answered(output: str) -> str:
    """A tool's output as the text of a user message: between ``<tool_response>`` tags."""
    return f"<tool_response>\n{output}\n</tool_response>"


def _tool_form(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {
        "type": "function",
        "function": {"name": tool.name, **described, "parameters": tool.parameters},
    }
