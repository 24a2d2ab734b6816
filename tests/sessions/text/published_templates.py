"""Published chat templates, and how our prompts compare with those that transformers makes of them.

``tests/sessions/templates/published.toml`` names each template's model, source and licence, and holds the
results: ``python -m holdfast.tests.sessions.text.published_templates`` writes them anew. Each template gets a
small tokenizer with the control tokens that it names.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from jinja2.exceptions import SecurityError
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from holdfast.sessions.conversation.history import History
from holdfast.sessions.conversation.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Preamble,
    Tool,
    new_id,
)
from holdfast.sessions.conversation.tree import TurnReply
from holdfast.sessions.errors import TemplateFailed
from holdfast.sessions.text.chat_template import CallIds, answered, called, instructions_with
from holdfast.sessions.text.language import Language
from holdfast.sessions.text.renderer import Renderer
from holdfast.sessions.text.tokenizer import ChatTokenizer
from holdfast.sessions.token_ids import ids_of
from holdfast.sessions.tools.formats import REASONING
from holdfast.sessions.turn.reply_reader import ReplyReader
from holdfast.sessions.turn.request import TurnRequest

from .chat_languages import backend

NOON = datetime(2025, 3, 1, 12)
FOLDER = Path(__file__).parents[1] / "templates"
INDEX = FOLDER / "published.toml"
CONTROL = re.compile(
    r"<\|[^|<>'\"{}\s]+\|>|<｜[^｜<>'\"{}\s]+｜>|\[/?[A-Z][A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>"
    r"|\[\|[a-z]+\|\]|</?seed:[a-z_:]+>|<SPECIAL_[0-9]+>|<\|[a-z_]+>|<[a-z_]+\|>|\]~!b\[|\]~b\]|\[e~\["
)
"""Texts in a template that look like special tokens."""
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<tools>",
)
"""Added tokens that are not special."""
COLUMNS = ("plain", "system", "tools", "calls", "second_turn")

EQUAL, KEPT = "equal", "equal behind the tokens kept"
"""The prompt has the ids of transformers; or it has what the model saw up to the end of its reply, which the
template now writes in another way, and then the ids of transformers."""
FOLDED = "equal, instructions in the first user message"
AS_USER = "equal, output as a user message"
AS_TEXT = "equal, the call as text"
"""transformers refuses the template's own form of a past call."""
NOT_SHOWN = "not shown: refused, or the fallback"
FALLBACK = "fallback: equal"
UNKNOWN = "unknown form"
UNWRITTEN = "the template writes no calls"
REFUSED = "refused: "
ALLOWED = (EQUAL, KEPT, FOLDED, AS_USER, AS_TEXT, NOT_SHOWN, FALLBACK, UNKNOWN, UNWRITTEN)


@dataclass(frozen=True)
class Published:
    """One template of the index. ``ends``: the tokens that end a reply of the model. ``default``: the template
    of the same model for conversations without tools, if there are two."""

    name: str
    model: str
    source: str
    licence: str
    bos: str
    ends: tuple[str, ...]
    results: dict[str, str]
    default: str = ""

    @property
    def template(self) -> str:
        return (FOLDER / "published" / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def named(self) -> dict[str, str]:
        found = (("bos_token", self.bos), ("eos_token", self.ends[0]))
        return {key: text for key, text in found if text}


def read_index() -> dict[str, Published]:
    index = tomllib.loads(INDEX.read_text(encoding="utf-8"))
    found = {}
    for name, entry in index.items():
        results = {column: entry.pop(column, "") for column in COLUMNS}
        found[name] = Published(name, results=results, ends=tuple(entry.pop("ends")), **entry)
    return found


def write_index() -> None:
    lines = [
        "# Published chat templates. The last five keys of each are the results: see published_templates.py."
    ]
    for one in PUBLISHED.values():
        fields = {"model": one.model, "source": one.source, "licence": one.licence, "bos": one.bos}
        fields |= {"ends": list(one.ends)} | ({"default": one.default} if one.default else {})
        fields |= {column: compared(one.name, column) for column in COLUMNS}
        lines += ["", f'["{one.name}"]']
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    INDEX.write_text("\n".join(lines) + "\n", encoding="utf-8")


PUBLISHED = read_index()


@cache
def tokenizer_of(name: str) -> Tokenizer:
    found = PUBLISHED[name]
    templates = found.template + (PUBLISHED[found.default].template if found.default else "")
    tokenizer = Tokenizer.from_str(backend("tools-last").to_str())
    controls = dict.fromkeys([*found.ends, found.bos, *CONTROL.findall(templates)])
    special = [text for text in controls if text and text not in MARKS]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    return tokenizer


@cache
def language(name: str, tool_fallback: bool = False) -> Language:
    found = PUBLISHED[name]
    templates = [found.template]
    if found.default:
        templates.insert(0, PUBLISHED[found.default].template)
    tool_template = templates[1] if found.default else None
    tokenizer = ChatTokenizer(tokenizer_of(name), templates[0], found.named, None, tool_template)
    return Language.of(tokenizer, tool_fallback=tool_fallback)


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    found = PUBLISHED[name]
    template: Any = found.template
    if found.default:
        template = {"default": PUBLISHED[found.default].template, "tool_use": template}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(name),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **found.named,
    )


class _Noon:
    """Stands for the class ``datetime`` in transformers."""

    @staticmethod
    def now() -> datetime:
        return NOON


def theirs(name: str, messages: list[dict], tools: list[dict] | None = None) -> str:
    """What transformers makes of a conversation, up to the model's next reply."""
    if tools is None and language(name).report.rules.list_of_tools:
        tools = []
    with patch("transformers.utils.chat_template_utils.datetime", _Noon):
        return reference(name).apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )


def encoded(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name).encode(text, add_special_tokens=False).ids)


class Talk:
    """One conversation of ours."""

    def __init__(self, name: str, preamble: Preamble | None = None, *, tool_fallback: bool = False) -> None:
        found = language(name, tool_fallback)
        self.renderer = Renderer(found.tokenizer, NOON, found.prefix_rule, found.report.rules)
        self.history = History(preamble or Preamble())
        self.ends = [found.tokenizer.backend.token_to_id(end) for end in PUBLISHED[name].ends]

    def say(self, item: Item) -> None:
        self.history.insert(item)

    def prompt(self, *, verbatim: bool = False) -> list[int]:
        """The ids before the model's next reply. ``verbatim``: as of a client that sends all of it again."""
        self.turn = self.history.prepare(TurnRequest(verbatim=verbatim)).turn
        self.draft = self.renderer.draft(self.turn.script)
        return self.draft.tokens().tolist()

    def reply(self, ids: list[int], *items: Item) -> None:
        self.history.commit_turn(self.turn, self.draft, TurnReply(items, ids_of(ids), ids[-1] in self.ends))


def user(text: str) -> Message:
    return Message(id=new_id("item"), role="user", text=text)


TOOL = Tool(
    name="get_weather",
    description="Tells the weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
)
SCHEMA = {
    "type": "function",
    "function": {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters},
}
ARGUMENTS = {"city": "Paris"}
OUTPUT = "21 degrees"
CALL_ID = "call12345"
CALL = FunctionCall(id="call", call_id=CALL_ID, name=TOOL.name, arguments=json.dumps(ARGUMENTS))
ANSWER = FunctionCallOutput(id="output", call_id=CALL_ID, output=OUTPUT)
ASKED = {"role": "user", "content": "Paris?"}
TOLD = {"role": "tool", "content": OUTPUT, "tool_call_id": CALL_ID, "name": TOOL.name}


def compared(name: str, column: str) -> str:
    """The result of one column for one template."""
    try:
        language(name)
    except TemplateFailed as refused:
        return REFUSED + refused.message
    made = {"plain": _plain, "system": _system, "tools": _tools, "calls": _calls, "second_turn": _second_turn}
    return made[column](name)


def _plain(name: str) -> str:
    return _two_turns(name, "")


def _system(name: str) -> str:
    found = _two_turns(name, "Be brief.")
    folded = not language(name).report.rules.system
    return FOLDED if folded and found == EQUAL else found


def _opened(name: str, instructions: str, text: str) -> list[dict]:
    """The first messages of a conversation."""
    if instructions and not language(name).report.rules.system:
        return [{"role": "user", "content": f"{instructions}\n\n{text}"}]
    told = [{"role": "system", "content": instructions}] if instructions else []
    return [*told, {"role": "user", "content": text}]


def _two_turns(name: str, instructions: str) -> str:
    talk, told = Talk(name, Preamble(instructions=instructions)), _opened(name, instructions, "Hi")
    talk.say(user("Hi"))
    before = theirs(name, told)
    if instructions not in before or talk.prompt() != encoded(name, before):
        return "differs in the first turn"
    told += [{"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "Again"}]
    whole = theirs(name, told)
    said = Message(id="reply", role="assistant", text="Hello there")
    return _next_turn(name, talk, before, whole, said.text, said, user("Again"))


def _next_turn(name: str, talk: Talk, before: str, whole: str, said: str, made: Item, item: Item) -> str:
    """Compare the turn behind the reply ``said``, read as ``made``, and behind ``item``."""
    head, found, after = whole.partition(said)
    assert found and said not in after, "the reply is in the conversation once"
    appends = head.startswith(before)
    reply = encoded(name, head[len(before) :] * appends + said)
    behind = encoded(name, after)
    end = next((at for at, token in enumerate(behind[:2]) if token in talk.ends), None)
    closed = [talk.ends[0]] if end is None else behind[: end + 1]
    talk.reply([*reply, *closed], made)
    talk.say(item)
    expected = encoded(name, whole) if appends else [*encoded(name, before), *reply, *behind]
    if talk.prompt() != expected:
        return "differs in the second turn"
    return EQUAL if appends else KEPT


def _tools(name: str) -> str:
    """The first turn of a conversation with a tool."""
    text = theirs(name, [ASKED], [SCHEMA])
    shown = TOOL.name in text and "The city" in text
    if not language(name).report.tools:
        return "shown by transformers only" if shown else NOT_SHOWN
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    return EQUAL if shown and talk.prompt() == encoded(name, text) else "differs"


def id_for(name: str, call: FunctionCall, at: int = 0) -> str:
    """The id that the template gets for call number ``at``."""
    numbered = language(name).report.rules.ids is CallIds.NUMBERED
    return f"functions.{call.name}:{at}" if numbered else call.call_id


def written_call(name: str, *calls: FunctionCall) -> tuple[str, list[int], list[int], bool]:
    """Calls (`CALL`, or others) and their outputs as transformers has the template write them.

    The prompt, the reply with its end token, the ids behind it, and whether the whole begins with the prompt.
    """
    before = theirs(name, [ASKED], [SCHEMA])
    rules, made, told = language(name).report.rules, [], []
    for at, call in enumerate(calls or (CALL,)):
        call = msgspec.structs.replace(call, call_id=id_for(name, call, at))
        arguments = call.arguments if rules.text_arguments else json.loads(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        made.append({"type": "function", "id": call.call_id, "function": function})
        output = {"role": "tool", "content": OUTPUT, "tool_call_id": call.call_id, "name": call.name}
        told.append(output if rules.outputs else {"role": "user", "content": OUTPUT})
    whole = theirs(name, [ASKED, {"role": "assistant", "content": "", "tool_calls": made}, *told], [SCHEMA])
    ids, first = encoded(name, whole), encoded(name, before)
    pairs = enumerate(zip(ids, first, strict=False))
    kept = next((at for at, (one, other) in pairs if one != other), len(first))
    ends = [tokenizer_of(name).token_to_id(end) for end in PUBLISHED[name].ends]
    end = next(at for at in range(kept, len(ids)) if ids[at] in ends)
    reply, after = ids[kept : end + 1], ids[end + 1 :]
    if OUTPUT in tokenizer_of(name).decode(reply, skip_special_tokens=False):  # the call has no end token
        cut = whole.rindex(tail := language(name).report.call[-6:], 0, whole.index(OUTPUT)) + len(tail)
        said = encoded(name, whole[whole.rindex(">", 0, cut) + 1 : cut])
        reply, after = [*said, ends[0]], encoded(name, whole[cut:].lstrip())
    return before, reply, after, kept == len(first)


def _calls(name: str) -> str:
    """The form in which the template's own call is read."""
    found = language(name)
    if not found.report.tools:
        return NOT_SHOWN
    if not found.report.call:
        return UNWRITTEN
    _, reply, _, _ = written_call(name)
    tags = REASONING.get(found.forms.reasoning)
    if found.forms.opened and tags is not None and tags.end not in tokenizer_of(name).decode(reply):
        reply = [*encoded(name, tags.end), *reply]  # the model closes what the prompt has opened
    ends = frozenset(map(found.tokenizer.backend.token_to_id, PUBLISHED[name].ends))
    reader = ReplyReader(found, TurnRequest(), ends, "response")
    reader.feed(reply)
    reader.finish(cut=False)
    calls = [item for item in reader.items() if isinstance(item, FunctionCall)]
    read = [(call.name, json.loads(call.arguments)) for call in calls] == [(TOOL.name, ARGUMENTS)]
    if read != found.forms.known:
        return f"doctor says {found.forms}, but the call is read: {read}"
    return found.forms.calls.value if read else UNKNOWN


def _second_turn(name: str) -> str:
    """The turn behind a call and its output."""
    rules = language(name).report.rules
    if not rules.schemas:
        return _fallback(name)
    talk = Talk(name, Preamble(tools=(TOOL,)))
    talk.say(user("Paris?"))
    first = talk.prompt()
    try:
        before, reply, after, appends = written_call(name)
    except SecurityError:  # transformers does not let the template change a list
        said = "<call/>"
        text = theirs(name, [ASKED, {"role": "assistant", "content": said}, TOLD], [SCHEMA])
        found = _next_turn(name, talk, theirs(name, [ASKED], [SCHEMA]), text, said, CALL, ANSWER)
        return AS_TEXT if found == EQUAL else found
    assert first == encoded(name, before)
    talk.reply(reply, CALL)
    talk.say(ANSWER)
    if talk.prompt() != [*first, *reply, *after]:
        return "differs"
    if not rules.outputs:
        return AS_USER
    return EQUAL if appends else KEPT


def _fallback(name: str) -> str:
    """Two turns with a tool in the instructions."""
    talk = Talk(name, Preamble(tools=(TOOL,)), tool_fallback=True)
    talk.say(user("Paris?"))
    told = _opened(name, instructions_with("", [SCHEMA]), "Paris?")
    before = theirs(name, told)
    if TOOL.name not in before or talk.prompt() != encoded(name, before):
        return "differs in the first turn"
    said = called(json.dumps({"name": TOOL.name, "arguments": {"city": "Oslo"}}))
    told += [{"role": "assistant", "content": said}, {"role": "user", "content": answered(OUTPUT)}]
    found = _next_turn(name, talk, before, theirs(name, told), said, CALL, ANSWER)
    return FALLBACK if found in (EQUAL, KEPT) else found


if __name__ == "__main__":
    write_index()
