"""Text that a client streams in, before it becomes an item: `input_text_buffer.*` events in, effects out. Pure.

It is a user's or system text, or the output of a tool that still runs. In the second case the tool call must be
one that has no output yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
from msgspec import UNSET

from ...sdk.frames import client, server
from ...sessions.conversation.input_text_buffer import InputTextBuffer
from ...sessions.conversation.items import FunctionCallOutput, Item, Role, checked_item
from ...sessions.errors import CallAnswered, CallUnknown, PromptTooLong
from ...sessions.text.eager_prefill import PrefilledInput
from .effects import Effect, PrefillText, Send, TellCommitted

BufferEvent: TypeAlias = client.TextAppend | client.TextReplace | client.TextClear | client.TextCommit


class HistoryEnd(Protocol):
    """The end of the conversation that a text is streamed into: there the text becomes an item."""

    def check_call(self, call_id: str, param: str) -> None:
        """Raise an error that names the field ``param`` if the tool call ``call_id`` cannot be answered now."""

    def insert(self, item: Item, asked: str | None) -> tuple[Send, ...]:
        """Put an item behind the one with the id ``asked``, None: at the end. Returns the events that show it,
        or raises."""


class IncomingText:
    """Serves the events of one conversation's text buffer.

    `event_id` makes an event's id, `ids` an item's from a prefix. Text longer than `most_characters` is
    refused, because the model's context cannot hold it; None: no limit.
    """

    def __init__(
        self,
        event_id: Callable[[], str],
        ids: Callable[[str], str],
        most_characters: int | None = None,
    ) -> None:
        self.buffer = InputTextBuffer()
        """The text that was streamed in since the last commit."""
        self._event_id = event_id
        self._ids = ids
        self._most = most_characters

    def receive(self, event: BufferEvent, history: HistoryEnd) -> list[Effect]:
        """Apply one event to the buffer of a conversation with this ``history``. Returns the effects: what to
        prefill now, and the answer if the event has one. Raises a `SessionError` if the event may not come now;
        then nothing has changed."""
        match event:
            case client.TextAppend(text=text, role=role, call_id=call_id):
                self._check_owner(role, call_id, history)
                self._check_length(len(self.buffer.text) + len(text))
                self.buffer.append(text, role, call_id)
            case client.TextReplace(start=start, text=text):
                self._check_length(start + len(text))
                self.buffer.replace(start, text)
            case client.TextClear():
                self.buffer.clear()
                return [PrefillText(None), Send(server.TextCleared(event_id=self._event_id()))]
            case client.TextCommit(call_id=call_id):
                self._check_owner(None, call_id, history)
                return self._commit(history)
        return [PrefillText(self.buffer.item())]

    def answered(self, items: Sequence[Item]) -> list[Effect]:
        """If the buffer holds a part of a tool call's output, and ``items``, which were just added, have the
        whole output of that call, empty the buffer. Returns the effect that ends the prefill of its text; empty
        if the buffer stays."""
        call_id = self.buffer.call_id
        if call_id is None or not any(
            isinstance(item, FunctionCallOutput) and item.call_id == call_id for item in items
        ):
            return []
        self.buffer.clear()
        return [PrefillText(None)]

    def committed(self, arrival: PrefilledInput, count: TellCommitted) -> list[server.ServerEvent]:
        """The events for committed text: `input_text_buffer.committed`, then those that show the item.
        ``arrival``: how many of the item's tokens are prefilled and how many are left. ``count``: the effect
        that `receive` returned for the commit."""
        return [self.told(count.item, arrival), *(send.event for send in count.added)]

    def told(self, item: Item, arrival: PrefilledInput) -> server.ServerEvent:
        """Make the event `input_text_buffer.committed`: the id of the item that the text became, and how many
        of its tokens are prefilled and how many are left."""
        return server.TextCommitted(
            event_id=self._event_id(),
            item_id=item.id,
            prefilled_tokens=arrival.prefilled,
            left_tokens=arrival.left,
            call_id=item.call_id if isinstance(item, FunctionCallOutput) else UNSET,
        )

    def _check_length(self, characters: int) -> None:
        if self._most is not None and characters > self._most:
            message = f"The model's context holds no text of more than {self._most} characters"
            raise PromptTooLong(message, param="text")

    def _check_owner(self, role: Role | None, call_id: str | None, history: HistoryEnd) -> None:
        self.buffer.check(role, call_id)
        if call_id is not None and not self.buffer.begun:
            history.check_call(call_id, "call_id")

    def _commit(self, history: HistoryEnd) -> list[Effect]:
        """Put the text into the conversation as an item, and empty the buffer. Returns the effects. Raises if
        the text is refused; then it stays in the buffer."""
        item = self.buffer.whole()
        checked_item(item)
        item = msgspec.structs.replace(item, id=self._ids("item"))
        try:
            added = history.insert(item, None)
        except (CallUnknown, CallAnswered) as refused:
            raise type(refused)(refused.message, param="call_id") from None
        self.buffer.clear()
        return [PrefillText(None), TellCommitted(added, item)]
