"""What was asked before, by any client and any face, changes no prompt: a fresh server would make the same
text.

Random conversations go on by any face, with replies that are empty, cut, refused, thought alone or broken off,
with clients that leave, edit what they were told or ask again, and with servers that are restarted. Each
request is also sent to a server that has seen nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.gateway.app import build_app
from holdfast.gateway.net.channel import memory_pair
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.link.generation import Generation
from holdfast.runtime.verbs import TokenLimits
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.settings import JournalSettings
from holdfast.sessions.text.language import Language
from holdfast.sessions.tools.forms import ReasoningForm
from holdfast.tests.gateway.keyed_service import MemoryWire
from holdfast.tests.gateway.responses.stage import Stage
from holdfast.tests.gateway.scripted_service import Scripted
from holdfast.tests.sessions.text.chat_languages import end_id, ids, ours, reference

Json = dict[str, Any]
NOW = datetime(2026, 5, 4, 3, 2, tzinfo=UTC)
THINKING = ("chatml", "qwen3")
MOVING = ("mistral-v3",)
"""Their templates move instructions and tools to the last message. A session keeps them where they were."""
LANGUAGES = ("chatml", "qwen3", "llama3", "thinks-open", "mistral-v3", "gemma-3")
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@cache
def language(name: str) -> Language:
    reasoning = ReasoningForm.THINK if name in THINKING else ReasoningForm.NONE
    return Language.of(ours(name), reasoning=reasoning)


FACES: dict[str, Callable[[str], Json]] = {
    "/v1/chat/completions": lambda said: {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Again"},
        ]
    },
    "/v1/responses": lambda said: {
        "input": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": said}]},
            {"role": "user", "content": "Again"},
        ]
    },
    "/v1/messages": lambda said: {
        "model": "scripted",
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": said}]},
            {"role": "user", "content": "Again"},
        ],
    },
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", FACES)
@pytest.mark.parametrize(
    "said", ["<think>\nWhy\n</think>\n\nHello", "<think>Why</think>Hello", "Hello\n</think>"]
)
async def test_reasoning_in_a_sent_history_is_written_as_transformers_does(path: str, said: str) -> None:
    actor = Actor("qwen3")
    service = Service(GatewaySettings(), "scripted", actor)
    service.open(SessionRegistry(actor, language("qwen3")))
    transport = httpx2.ASGITransport(app=build_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.post(path, json=FACES[path](said))
        assert answer.status_code == 200, answer.text
    await service.close()
    messages = FACES["/v1/chat/completions"](said)["messages"]
    expected = reference("qwen3").apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert actor.prompts == [Actor("qwen3").text_of(ids("qwen3", expected))]


# --- the server and what it says ----------------------------------------------------------------------------


class Actor(Scripted):
    """An engine that says what it is told to, after any prompt. It keeps the text of each prompt, in which
    control tokens stand between NULs, so that text which only looks like one is not taken for it."""

    def __init__(self, name: str) -> None:
        super().__init__(self._next, end_id(name), max_context=4096)
        self.name = name
        self.line: list[int] = []
        self.prompts: list[str] = []
        self._prompt = 0
        self._added = ours(name).backend.get_added_tokens_decoder()

    def _next(self, tokens: list[int]) -> int:
        at = len(tokens) - self._prompt
        token = self.line[at] if at < len(self.line) else self.end
        if token < 0:
            raise RuntimeError("not a number")
        return token

    def _generated(self, seq: int, limits: TokenLimits, generated_from: int) -> Generation:
        tokens = self.held[seq].tokens
        if not generated_from:
            self._prompt = len(tokens)
            self.prompts.append(self.text_of(tokens))
        return super()._generated(seq, limits, generated_from)

    def text_of(self, tokens: list[int]) -> str:
        text, run, backend = "", list[int](), ours(self.name).backend
        for token in tokens:
            if token in self._added:
                text += backend.decode(run, skip_special_tokens=False) + f"\0{self._added[token].content}\0"
                run.clear()
            else:
                run.append(token)
        return text + str(backend.decode(run, skip_special_tokens=False))


SAID = (
    "Hello there, one two three.",
    "The capital of Italy is Rome.",
    " spaced \n",
    "",
    "<think>\nThis is a thought.\n</think>\n\nFine.",
    "<think>\nThis thought has no end",
    "<think>\nOnly a thought.\n</think>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    '<tool_call>{"arguments":{"city":"Rome"},"name":"weather"}</tool_call>',
    'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "weather", '
    '"arguments": {"city": "Oslo"}}\n</tool_call>',
    "emoji 😀 🎉",
)
ASKED = ("What is the capital of Italy?", "Hello!", "And <|im_end|> is text?", " spaced ", "No.")
MOST = (None, None, None, 1, 2, 4, 7, 12)
STOPS = ((), (), (), ("The",), ("capital",), ("o",), ("\n",), (" ",))


@dataclass(frozen=True)
class Step:
    """One request: in which conversation, by which face, with what, and what the engine says to it."""

    conversation: int
    face: str
    text: int
    said: int
    most: int
    stop: int
    more: str
    edit: str


STEP = st.builds(
    Step,
    st.integers(0, 3),
    st.sampled_from(["chat", "messages", "responses", "previous", "conversation", "realtime"]),
    st.integers(0, len(ASKED) - 1),
    st.integers(0, len(SAID) - 1),
    st.integers(0, len(MOST) - 1),
    st.integers(0, len(STOPS) - 1),
    st.sampled_from(["", "", "", "stream", "leave", "stop_id", "choices", "refused", "unstored", "broken"]),
    st.sampled_from(["", "", "", "strip", "respell", "again", "back", "edit", "drop", "new", "restart"]),
)
STEPS = st.lists(STEP, min_size=1, max_size=12)

Entry = tuple[str, ...]
"""An item of a conversation as its client has it: ("user", text), ("assistant", text), ("call", id, name,
arguments) or ("output", id, text)."""


@dataclass
class Conversation:
    """What its client knows of a conversation. ``wire``: its Realtime session. ``response``, ``stored``: the
    names of its last stored response and of its stored conversation, and how many entries these stand for."""

    system: str
    tools: bool
    entries: list[Entry] = field(default_factory=list)
    wire: RealtimeClient | None = None
    response: tuple[str, int] | None = None
    stored: tuple[str, int] | None = None


class Server(Stage):
    """A service over an actor, at one date."""

    def __init__(self, service: Service, link: Actor, journal: Journal | None) -> None:
        super().__init__(service, link, build_app(service))
        self.actor = link
        self._journal = journal
        self._wires: list[RealtimeClient] = []

    @classmethod
    async def begin(cls, name: str, store: Path | None = None) -> Server:
        link = Actor(name)
        service = Service(GatewaySettings(), "fake", link)
        journal = None
        if store is not None:
            journal = await Journal.open(store, b"model", JournalSettings(reserve_bytes=0))
        registry = SessionRegistry(link, language(name), journal=journal, now=lambda: NOW)
        service.open(registry, journal)
        return cls(service, link, journal)

    async def wire(self) -> RealtimeClient:
        self._wires.append(await RealtimeClient.connect(self.service))
        return self._wires[-1]

    async def end(self) -> None:
        for wire in self._wires:
            await wire.close()
        await self.service.close()
        if self._journal is not None:
            await self._journal.aclose()


class RealtimeClient:
    """A Realtime connection with one session. ``handle`` resumes it. ``order``: the ids of its items."""

    def __init__(self, wire: MemoryWire, close: Callable[[], Any]) -> None:
        self.wire = wire
        self.close = close
        self.handle = ""
        self.order: list[str] = []

    @classmethod
    async def connect(cls, service: Service) -> RealtimeClient:
        ours, theirs = memory_pair(4096)
        serving = asyncio.ensure_future(service.converse(theirs))
        wire = MemoryWire(ours)
        greeted = await wire.until("conversation.created")

        async def close() -> None:
            await ours.close(1000, "")
            await serving
            await theirs.close(1000, "")

        client = cls(wire, close)
        (client.handle,) = [event["handle"] for event in greeted if "handle" in event]
        return client

    async def resume(self, before: RealtimeClient, handle: str | None = None) -> None:
        """Go on in a session that another connection had, or in a fork of it."""
        await self.wire.send("session.resume", handle=handle or before.handle)
        self.handle = (await self.wire.until("session.resumed"))[-1]["handle"]
        self.order = list(before.order)

    async def edit(self, kind: str) -> None:
        """One of the edits that a session allows, or none if there is nothing to edit."""
        entries = await self.entries()
        said = [item for item, entry in zip(self.order, entries, strict=True) if entry[0] == "assistant"]
        match kind:
            case "strip" | "edit" if said:
                await self.wire.send("conversation.item.truncate", item_id=said[-1], text_end=1)
                await self.wire.until("conversation.item.truncated", "error")
                behind = entries[self.order.index(said[-1]) + 1 :]
                calls = [entry for entry in behind if entry[0] == "call"]
                self.order = [item for item in self.order if await self.has(item)] if calls else self.order
            case "again" | "back" if said:
                await self.wire.send("session.rewind", to=said[0])
                await self.wire.until("session.rewound")
                del self.order[self.order.index(said[0]) + 1 :]
            case "drop" if said:
                await self.wire.send("conversation.item.delete", item_id=said[-1])
                await self.wire.until("conversation.item.deleted")
                self.order.remove(said[-1])

    async def has(self, item: str) -> bool:
        await self.wire.send("conversation.item.retrieve", item_id=item)
        return bool((await self.wire.until("conversation.item.retrieved", "error"))[-1]["type"] != "error")

    async def fork(self) -> str:
        """The handle of a session that begins with this one's history."""
        await self.wire.send("session.fork")
        handle: str = (await self.wire.until("session.forked"))[-1]["sessions"][0]["handle"]
        return handle

    async def configure(self, system: str, tools: bool) -> bool:
        """Whether the model takes these instructions and tools."""
        session = {
            "type": "realtime",
            "instructions": system,
            "tools": [{"type": "function", **TOOL}] * tools,
        }
        await self.wire.send("session.update", session=session)
        return bool((await self.wire.until("session.updated", "error"))[-1]["type"] == "session.updated")

    async def add(self, entry: Entry) -> None:
        await self.wire.send("conversation.item.create", item=item_of(entry))
        (*_, added) = await self.wire.until("conversation.item.done", "error")
        assert added["type"] != "error", added
        self.order.append(added["item"]["id"])

    async def entries(self) -> list[Entry]:
        """The items that the session has, as it tells them now."""
        found = []
        for item in self.order:
            await self.wire.send("conversation.item.retrieve", item_id=item)
            (*_, told) = await self.wire.until("conversation.item.retrieved")
            found.append(entry_of(told["item"]))
        return found

    async def without_cut_calls(self) -> list[Entry]:
        """The items after the client has deleted calls that were cut: a template has its own text for these."""
        for item, entry in zip(list(self.order), await self.entries(), strict=True):
            if entry[0] == "call" and not valid(entry[3]):
                await self.wire.send("conversation.item.delete", item_id=item)
                await self.wire.until("conversation.item.deleted")
                self.order.remove(item)
        return await self.entries()

    async def respond(self, leave: bool = False, **fields: Any) -> None:
        await self.wire.send("response.create", response=fields)
        events = await self.wire.until("response.done", "error", *["response.output_text.delta"] * leave)
        if events[-1]["type"] == "response.output_text.delta":
            await self.wire.send("response.cancel")
            events += await self.wire.until("response.done")
        if events[-1]["type"] == "response.done" and events[-1]["response"]["status"] != "failed":
            self.order += [item["id"] for item in events[-1]["response"]["output"]]


def item_of(entry: Entry) -> Json:
    """An entry as an item of Realtime, of Responses and of conversations."""
    match entry:
        case ("call", call_id, name, arguments):
            return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        case ("output", call_id, text):
            return {"type": "function_call_output", "call_id": call_id, "output": text}
        case (role, text):
            kind = "output_text" if role == "assistant" else "input_text"
            return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    raise AssertionError(entry)


def entry_of(item: Json) -> Entry:
    match item["type"]:
        case "function_call":
            return ("call", item["call_id"], item["name"], item["arguments"])
        case "function_call_output":
            return ("output", item["call_id"], item["output"])
    return (item["role"], "".join(part["text"] for part in item["content"]))


# --- the faces: bodies, and what a client reads of an answer -----------------------------------------------


def chat_body(one: Conversation, step: Step, stops: Json) -> tuple[str, Json]:
    messages: list[Json] = [{"role": "system", "content": one.system}] * bool(one.system)
    for entry in one.entries:
        match entry:
            case ("call", call_id, name, arguments):
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case ("output", call_id, text):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case (role, text):
                messages.append({"role": role, "content": text})
    body = {"messages": messages, **stops, "n": 2 if step.more == "choices" else 1}
    if MOST[step.most]:
        body["max_tokens"] = MOST[step.most]
    if one.tools:
        body["tools"] = [{"type": "function", "function": TOOL}]
    return "/v1/chat/completions", body


def chat_told(told: Json) -> Iterator[Entry]:
    message = told["choices"][0]["message"]
    if message.get("content"):
        yield ("assistant", message["content"])
    for call in message.get("tool_calls") or ():
        yield ("call", call["id"], call["function"]["name"], call["function"]["arguments"])


def messages_body(one: Conversation, step: Step, stops: Json) -> tuple[str, Json]:
    messages: list[Json] = []

    def add(role: str, block: Json) -> None:
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": role, "content": [block]})

    for entry in one.entries:
        match entry:
            case ("call", call_id, name, arguments):
                add(
                    "assistant",
                    {"type": "tool_use", "id": call_id, "name": name, "input": json.loads(arguments)},
                )
            case ("output", call_id, text):
                add("user", {"type": "tool_result", "tool_use_id": call_id, "content": text})
            case (role, text):
                add(role, {"type": "text", "text": text})
    body: Json = {"model": "fake", "max_tokens": MOST[step.most] or 60, "messages": messages}
    if one.system:
        body["system"] = one.system
    if stops.get("stop"):
        body["stop_sequences"] = [stop for stop in stops["stop"] if stop.strip()]
    if one.tools:
        body["tools"] = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
    return "/v1/messages", body


def messages_told(told: Json) -> Iterator[Entry]:
    for block in told["content"]:
        if block["type"] == "text" and block["text"]:
            yield ("assistant", block["text"])
        elif block["type"] == "tool_use":
            yield ("call", block["id"], block["name"], json.dumps(block["input"]))


def responses_body(one: Conversation, step: Step, stops: Json, begin: int = 0) -> tuple[str, Json]:
    body: Json = {"input": [item_of(entry) for entry in one.entries[begin:]], **stops}
    if one.system:
        body["instructions"] = one.system
    if MOST[step.most]:
        body["max_output_tokens"] = MOST[step.most]
    if one.tools:
        body["tools"] = [{"type": "function", **TOOL}]
    if step.more == "unstored":
        body["store"] = False
    return "/v1/responses", body


def responses_told(told: Json) -> Iterator[Entry]:
    for item in told["output"]:
        if item["type"] != "reasoning":
            yield entry_of(item)


TOLD: dict[str, Callable[[Json], Iterator[Entry]]] = {"chat": chat_told, "messages": messages_told}


# --- the play -------------------------------------------------------------------------------------------


class Play:
    """A few conversations on one server, and the count of requests that were compared."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.compared = 0
        self.conversations = [
            Conversation("", False),
            Conversation("Be brief.", False),
            Conversation("Use the tool.", True),
            Conversation("", True),
        ]

    async def run(self, steps: list[Step]) -> None:
        self.server = await Server.begin(self.name, self.folder)
        try:
            for step in steps:
                if step.edit == "restart":
                    await self.server.end()
                    self.server = await Server.begin(self.name, self.folder)
                    for one in self.conversations:
                        if one.wire is not None:
                            before, one.wire = one.wire, await self.server.wire()
                            await one.wire.resume(before)
                await self.take(step)
        finally:
            await self.server.end()

    async def take(self, step: Step) -> None:
        one = self.conversations[step.conversation]
        if step.edit == "new" and step.face != "realtime":
            one.entries = []
            one.wire = one.response = one.stored = None
        self.server.actor.line = self.line(step)
        if step.face == "realtime" and self.name not in MOVING:
            await self.by_realtime(one, step)
        else:
            self.edit(one, step)
            self.ask(one.entries, step)
            await self.by_body(one, step)

    def line(self, step: Step) -> list[int]:
        text = SAID[step.said]
        told = ("<think>" not in text or self.name in THINKING) and "<tool_call>{" not in text
        if step.face == "realtime" and not (told and ("<tool_call>" not in text or self.name == "chatml")):
            text = SAID[0]  # a session keeps the model's spelling, where a template has another one
        said = [*ids(self.name, text), end_id(self.name)]
        return [*said[:2], -1] if step.more == "broken" else said

    def edit(self, one: Conversation, step: Step) -> None:
        """What a client may do to a conversation that it sends whole."""
        entries = one.entries
        replies = [at for at, entry in enumerate(entries) if entry[0] in ("assistant", "call")]
        before = list(entries)
        match step.edit:
            case "strip" if replies and entries[replies[-1]][0] == "assistant":
                entries[replies[-1]] = ("assistant", entries[replies[-1]][1].strip())
            case "respell" if replies and entries[replies[-1]][0] == "call":
                with suppress(ValueError):
                    *call, arguments = entries[replies[-1]]
                    entries[replies[-1]] = (*call, json.dumps(json.loads(arguments), indent=1))
            case "again" if replies:
                del entries[replies[-1] :]
            case "back" if len(replies) > 1:
                del entries[replies[-2] :]
            case "edit" if entries and entries[0][0] == "user":
                entries[0] = ("user", entries[0][1] + "?")
            case "drop" if replies and entries[replies[-1]][0] == "assistant":
                del entries[replies[-1]]
        if entries != before:
            one.wire = one.response = one.stored = None

    def ask(self, entries: list[Entry], step: Step) -> list[Entry]:
        """Add what the client says next: outputs for calls that have none, else a message."""
        answered = {entry[1] for entry in entries if entry[0] == "output"}
        waiting = [entry[1] for entry in entries if entry[0] == "call" and entry[1] not in answered]
        added: list[Entry] = [("output", call_id, "21 degrees") for call_id in waiting]
        added = added or [("user", ASKED[step.text])]
        entries += added
        return added

    async def by_body(self, one: Conversation, step: Step) -> None:
        """A request that has the whole conversation, or names what the server has stored of it."""
        for entry in one.entries:
            if entry[0] == "call" and not valid(entry[3]):
                one.entries.clear()  # a client cannot send a broken call to each face
                self.ask(one.entries, step)
                one.response = one.stored = None
                break
        stops: Json = {"stop": list(STOPS[step.stop])} if STOPS[step.stop] else {}
        if step.more == "stop_id" and len(self.server.actor.line) > 2:
            stops["stop_token_ids"] = [self.server.actor.line[1]]
        face = {"previous": "responses", "conversation": "responses", "realtime": "chat"}.get(
            step.face, step.face
        )
        path, body = {"chat": chat_body, "messages": messages_body, "responses": responses_body}[face](
            one, step, stops
        )
        asked = body
        if step.face == "previous" and one.response is not None:
            name, begin = one.response
            asked = {**responses_body(one, step, stops, begin)[1], "previous_response_id": name}
        elif step.face == "conversation":
            asked = await self.in_conversation(one, step, stops)
        if step.more == "refused":
            asked = {**asked, "temperature": 9.0}
        prompts = await self.prompts(path, body, asked, step)
        if prompts is None:
            return
        answer, mine, fresh = prompts
        assert mine and set(mine) == set(fresh), difference(mine[-1], fresh[-1])
        self.compared += 1
        one.response, stored, one.stored = None, one.stored, None
        if answer.status != 200 or step.more in ("leave", "stream"):
            return
        one.entries += TOLD.get(face, responses_told)(answer.json)
        if face == "responses" and step.more != "unstored":
            one.response = (answer.json["id"], len(one.entries))
            if step.face == "conversation" and stored is not None and answer.json["status"] != "failed":
                one.stored = (stored[0], len(one.entries))

    async def in_conversation(self, one: Conversation, step: Step, stops: Json) -> Json:
        """The body of a request in a stored conversation, which begins with the client's entries."""
        if one.stored is None:
            begin = min(20, len(one.entries) - 1)
            items = [item_of(entry) for entry in one.entries[:begin]]
            made = await self.server.ask("POST", "/v1/conversations", {"items": items})
            assert made.status == 200, made.body
            one.stored = (made.json["id"], begin)
        name, begin = one.stored
        _, body = responses_body(one, step, stops, begin)
        body.pop("store", None)
        return {**body, "conversation": name}

    async def prompts(self, path: str, body: Json, asked: Json, step: Step) -> Any:
        """The answer to a request, the prompts that it made, and those that it makes on a fresh server. None if
        it was refused by both."""
        actor, leave = self.server.actor, step.more == "leave"
        actor.prompts.clear()
        if leave or step.more == "stream":
            asked = {**asked, "stream": True}
        ready = (lambda sent: b"delta" in sent) if leave else (lambda sent: False)
        answer = await self.server.ask("POST", path, asked, leave=ready)
        mine = list(actor.prompts)
        assert answer.status < 500 or step.more == "broken", answer.body
        if step.more == "refused":
            assert answer.status == 400 and not mine
            return None
        other = await Server.begin(self.name)
        try:
            other.actor.line = [end_id(self.name)]
            await other.ask("POST", path, body)
            fresh = list(other.actor.prompts)
        finally:
            await other.end()
        if not fresh and not mine:
            return None
        return answer, mine, fresh

    async def by_realtime(self, one: Conversation, step: Step) -> None:
        """A turn of a Realtime session. Its replies have the model's thoughts, and nothing else that its items
        do not say."""
        if one.wire is None:
            one.wire = await self.server.wire()
            if not await one.wire.configure(one.system, one.tools):
                one.wire = None
                return
            if any(entry[0] == "call" for entry in one.entries):
                one.entries = []
            for entry in one.entries:
                await one.wire.add(entry)
        if step.edit == "new" and one.wire.order:
            before, one.wire = one.wire, await self.server.wire()
            await one.wire.resume(before, await before.fork())
        wire, actor = one.wire, self.server.actor
        await wire.edit(step.edit)
        one.entries = await wire.without_cut_calls()
        for entry in self.ask(one.entries, step):
            await wire.add(entry)
        fields: Json = {"stop": list(STOPS[step.stop])} if STOPS[step.stop] else {}
        if MOST[step.most]:
            fields["max_output_tokens"] = MOST[step.most]
        if step.more == "stop_id" and len(actor.line) > 2:
            fields["stop_token_ids"] = [actor.line[1]]
        actor.prompts.clear()
        entries = list(one.entries)
        await wire.respond(leave=step.more == "leave", **fields)
        mine = list(actor.prompts)
        other = await Server.begin(self.name)
        try:
            client = await other.wire()
            await client.configure(one.system, one.tools)
            for entry in entries:
                await client.add(entry)
            other.actor.line = [end_id(self.name)]
            await client.respond()
            fresh = list(other.actor.prompts)
        finally:
            await other.end()
        assert list(map(thoughtless, mine)) == list(map(thoughtless, fresh)), difference(mine[0], fresh[0])
        self.compared += 1
        one.entries = await wire.without_cut_calls()
        one.response = one.stored = None


def valid(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def thoughtless(prompt: str) -> str:
    """A session keeps a reply as the model wrote it: with its thoughts, and with its own white space."""
    said = re.sub("\0<think>\0.*?\0</think>\0", "", prompt, flags=re.DOTALL)
    return "".join(said.replace("\0", "").split())


def difference(mine: str, fresh: str) -> str:
    return f"\nthe prompt\n{mine!r}\nis on a fresh server\n{fresh!r}"


def played(name: str, steps: list[Step]) -> int:
    """Run the steps; returns how many prompts were compared."""
    folder = Path(tempfile.mkdtemp(prefix="prompts-"))
    play = Play(name, folder)
    try:
        asyncio.run(asyncio.wait_for(play.run(steps), 60))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return play.compared


@pytest.mark.parametrize("name", LANGUAGES)
@settings(max_examples=15, deadline=None)
@given(steps=STEPS)
def test_whatever_was_asked_before_a_prompt_is_that_of_a_fresh_server(name: str, steps: list[Step]) -> None:
    played(name, steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_prompts_are_those_of_a_fresh_server() -> None:
    compared = 0

    @settings(max_examples=1500, deadline=None)
    @given(steps=st.lists(STEP, min_size=8, max_size=16), name=st.sampled_from(LANGUAGES))
    def play(steps: list[Step], name: str) -> None:
        nonlocal compared
        compared += played(name, steps)

    while compared < 20_000:
        play()


async def chat(on: Server, messages: list[Json], **fields: Any) -> str:
    """The text of the reply."""
    body = {"messages": messages, "temperature": 0, **fields}
    answer = await on.ask("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["message"]["content"] or ""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("The capital", {"stop": ["T"]}),
        ("The capital", {"stop": ["The"]}),
        ("<tool_call>\n{", {"max_tokens": 2, "tools": [{"type": "function", "function": TOOL}]}),
        ("<think>\nHm", {"max_tokens": 3}),
        ("", {}),
    ],
)
async def test_a_reply_in_which_nothing_was_said_leaves_nothing(said: str, fields: Json) -> None:
    """The conversation does not grow by it, also if it is asked for again and again."""
    on = await Server.begin("chatml")
    begun = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes?"}]
    try:
        for messages in ([begun[0]], [*begun, {"role": "user", "content": "What is the capital?"}]):
            on.actor.prompts.clear()
            on.actor.line = ids("chatml", said)
            for _ in range(3):
                assert await chat(on, messages, **fields) == ""
            on.actor.line = ids("chatml", "Rome")
            assert await chat(on, messages, tools=fields.get("tools")) == "Rome"
            assert len(set(on.actor.prompts)) == 1 and len(on.actor.prompts) == 4
    finally:
        await on.end()


@pytest.mark.anyio
async def test_a_prompt_has_the_text_that_the_client_sends_back() -> None:
    """White space and the spelling of arguments lead to the same session, and are the client's."""
    on = await Server.begin("chatml")
    asked, more = {"role": "user", "content": "Hello!"}, {"role": "user", "content": "And?"}
    try:
        on.actor.line = ids("chatml", " Well, yes. \n")
        said = await chat(on, [asked])
        assert said == " Well, yes. \n"
        for text in (said, said.strip(), said.upper()):
            await chat(on, [asked, {"role": "assistant", "content": text}, more])
            assert f"assistant\n{text}\0<|im_end|>" in on.actor.prompts[-1]
    finally:
        await on.end()


@pytest.mark.anyio
async def test_further_choices_have_the_prompt_of_the_first() -> None:
    """Also if the first has ended, and joined its conversation, before they begin."""
    on = await Server.begin("chatml")
    try:
        on.actor.line = ids("chatml", "Rome")
        await chat(on, [{"role": "user", "content": "Where?"}], n=3, max_tokens=1)
        assert len(on.actor.prompts) == 3 and len(set(on.actor.prompts)) == 1
    finally:
        await on.end()


@pytest.mark.anyio
async def test_what_a_session_has_left_out_comes_back_for_a_request_that_must_have_all() -> None:
    on = await Server.begin("chatml")
    on.actor.max_context = 800
    items = [{"role": "user", "content": f"Number {number}. " + "word " * 20} for number in range(6)]
    try:
        on.actor.line = ids("chatml", "Yes.")
        for truncation, whole in (("auto", False), ("disabled", True), ("auto", False)):
            body = {"input": items, "truncation": truncation, "max_output_tokens": 100}
            answer = await on.ask("POST", "/v1/responses", body)
            assert answer.status == 200, answer.body
            items += [*answer.json["output"], {"role": "user", "content": "More."}]
            assert ("Number 0" in on.actor.prompts[-1]) is whole
    finally:
        await on.end()


@pytest.mark.anyio
async def test_schemas_that_differ_in_the_order_of_their_keys_are_written_as_they_came() -> None:
    on = await Server.begin("chatml")
    schemas: list[Json] = [{"x": {"type": "number", "minimum": 1}, "y": {}}]
    schemas += [
        {"y": {}, "x": {"minimum": 1, "type": "number"}},
        {"y": {}, "x": {"minimum": 1.0, "type": "number"}},
    ]
    messages = [{"role": "user", "content": "Hello!"}]
    try:
        for schema in schemas:
            on.actor.line = ids("chatml", "Well.")
            tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": schema}}}
            said = await chat(on, messages, tools=[tool])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
            assert json.dumps(schema) in on.actor.prompts[-1]
    finally:
        await on.end()
