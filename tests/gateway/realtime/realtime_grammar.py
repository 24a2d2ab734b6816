"""The order of server events as a small checker: what a strict client accepts, and what it then believes.

EventLog it every event of one connection; it raises AssertionError at the first one out of order. It keeps the
client's view of the conversation (`items`), built from the events alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from holdfast.gateway.errors import GatewayError
from holdfast.gateway.realtime.conversation import Conversation, Effect
from holdfast.gateway.realtime.event_log import UNSENT
from holdfast.sdk.errors import FrameError
from holdfast.sdk.frames import client, codec, server
from holdfast.sdk.frames.items import AnyItem, FunctionCallItem, MessageItem
from holdfast.sessions.errors import SessionError


def served(conversation: Conversation, event: client.ClientEvent) -> list[Effect]:
    """What a conversation makes of a client event; a refusal is its `error` event."""
    try:
        return list(conversation.receive(event))
    except (SessionError, FrameError, GatewayError) as error:
        return [conversation.refusal(error, event.event_id)]


@dataclass
class Said:
    """An output item on its way: `stage` counts the events that frame it."""

    item: AnyItem
    index: int
    stage: str
    pieces: list[str] = field(default_factory=list)


@dataclass
class Told:
    """A response on its way."""

    default: bool
    open: Said | None = None
    output: list[AnyItem] = field(default_factory=list)


class Grammar:
    """The state of one connection, as its events tell it."""

    def __init__(self) -> None:
        self.items: list[AnyItem] = []
        self.created: list[str] = []
        self.done: dict[str, str] = {}
        self.errors: list[server.ErrorDetails] = []
        self._seen: set[str] = set()
        self._greeting = 0
        self._live: dict[str, Told] = {}
        self._unfinished: set[str] = set()
        self._conversation_id: str | None = None

    def feed_all(self, events: Iterable[server.ServerEvent]) -> None:
        for event in events:
            self.feed(event)

    def feed(self, event: server.ServerEvent) -> None:
        assert codec.decode_server(codec.encode(event)) == event, "every event survives the wire"
        if event.event_id != UNSENT:
            assert event.event_id not in self._seen, "event ids are unique"
            self._seen.add(event.event_id)
        if self._greeting < 2:
            wanted = (server.SessionCreated, server.ConversationCreated)[self._greeting]
            assert isinstance(event, wanted)
            self._greeting += 1
            if isinstance(event, server.ConversationCreated):
                self._conversation_id = event.conversation.id
            return
        assert not isinstance(event, server.SessionCreated | server.ConversationCreated)
        self._dispatch(event)

    def at_rest(self) -> None:
        """Nothing may be open now."""
        assert not self._live, "every response.created has its response.done"
        assert not self._unfinished, "every item added is done"
        assert sorted(self.created) == sorted(self.done)

    def _dispatch(self, event: server.ServerEvent) -> None:
        match event:
            case server.ResponseCreated(response=response):
                self._created(response)
            case server.ResponseDone(response=response):
                self._done(response)
            case server.OutputFrame():
                assert event.response_id in self._live, f"{event.type} of a response that does not run"
                self._output(self._live[event.response_id], event)
            case server.ItemAdded():
                self._added(event)
            case server.ItemDone():
                self._item_done(event)
            case server.ItemDeleted(item_id=item_id):
                assert item_id not in self._unfinished
                self.items.pop(self._position(item_id))
            case server.ItemTruncated(item_id=item_id, text_end=end):
                assert item_id not in self._unfinished, "a reply ends before it is told that it was cut"
                index = self._position(item_id)
                said = self.items[index]
                assert isinstance(said, MessageItem)
                if end < len(said.text):
                    part = [msgspec.structs.replace(said.content[0], text=said.text[:end])]
                    self.items[index] = msgspec.structs.replace(said, content=part, status="incomplete")
            case server.SessionRewound(item_id=last):
                assert not any(told.default for told in self._live.values())
                del self.items[0 if last is None else self._position(last) + 1 :]
            case server.ErrorEvent(error=error):
                self.errors.append(error)
            case server.ItemRetrieved(item=item):
                assert item.id in {known.id for known in self.items}

    # --- responses ---

    def _created(self, response: server.Response) -> None:
        assert response.id not in self.created
        assert response.status == "in_progress"
        assert not response.output
        default = response.conversation_id is not None
        assert response.conversation_id in (None, self._conversation_id)
        assert not default or not any(told.default for told in self._live.values()), "one writes at a time"
        self.created.append(response.id)
        self._live[response.id] = Told(default)

    def _done(self, response: server.Response) -> None:
        told = self._live.pop(response.id)
        assert told.open is None, "an item was left open"
        assert response.output == told.output
        assert response.status != "in_progress"
        assert (response.status_details is None) == (response.status == "completed")
        self.done[response.id] = response.status

    def _output(self, told: Told, event: server.OutputFrame) -> None:
        if isinstance(event, server.OutputItemAdded):
            assert told.open is None, "one item at a time"
            assert event.output_index == len(told.output)
            assert event.item.status == "in_progress"
            told.open = Said(event.item, event.output_index, "added" if told.default else "shown")
            return
        said = told.open
        assert said is not None, f"{event.type} outside an item"
        assert event.output_index == said.index
        assert getattr(event, "item_id", said.item.id) == said.item.id
        message = isinstance(said.item, MessageItem)
        match event:
            case server.ContentPartAdded():
                assert message and said.stage == "shown" and event.part.text == ""
                said.stage = "speaking"
            case server.TextDelta():
                assert said.stage == "speaking" and event.delta
                said.pieces.append(event.delta)
            case server.TextDone():
                assert said.stage == "speaking" and event.text == "".join(said.pieces)
                said.stage = "said"
            case server.ContentPartDone():
                assert said.stage == "said" and event.part.text == "".join(said.pieces)
                said.stage = "whole"
            case server.ArgumentsDelta():
                assert not message and said.stage == "shown" and event.delta
                said.pieces.append(event.delta)
            case server.ArgumentsDone():
                assert not message and said.stage == "shown"
                assert isinstance(said.item, FunctionCallItem)
                assert event.name == said.item.name and event.call_id == said.item.call_id
                assert event.arguments == "".join(said.pieces)
                said.stage = "whole"
            case server.OutputItemDone():
                assert said.stage == "whole"
                self._check_final(said, event.item)
                told.output.append(event.item)
                said.item = event.item
                said.stage = "last"
                if not told.default:
                    told.open = None

    @staticmethod
    def _check_final(said: Said, item: AnyItem) -> None:
        assert item.id == said.item.id
        assert item.status in ("completed", "incomplete")
        text = item.text if isinstance(item, MessageItem) else getattr(item, "arguments", None)
        assert text == "".join(said.pieces)

    # --- the conversation ---

    def _writing(self) -> Said | None:
        return next((told.open for told in self._live.values() if told.default and told.open), None)

    def _added(self, event: server.ItemAdded) -> None:
        said = self._writing()
        if said is not None and said.stage == "added":
            assert said.item == event.item, "the reply's item is shown before anything else happens"
            said.stage = "shown"
        after = event.previous_item_id
        assert event.item.id not in {item.id for item in self.items}
        self.items.insert(0 if after is None else self._position(after) + 1, event.item)
        self._unfinished.add(event.item.id or "")

    def _item_done(self, event: server.ItemDone) -> None:
        assert event.item.id in self._unfinished
        self._unfinished.discard(event.item.id or "")
        for told in self._live.values():
            if told.default and told.open is not None and told.open.item.id == event.item.id:
                assert told.open.stage == "last" and told.open.item == event.item
                told.open = None
        self.items[self._position(event.item.id or "")] = event.item

    def _position(self, item_id: str) -> int:
        found = [at for at, item in enumerate(self.items) if item.id == item_id]
        assert found, f"the client knows no item {item_id!r}"
        return found[0]
