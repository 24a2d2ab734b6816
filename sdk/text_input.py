"""Text that is sent while it is typed, recognised or written by a tool; the server prefills it meanwhile.

async with chat.input() as text:
    await text.append("What is the ")
    await text.append("whether in Oslo?")
    await text.replace(12, "weather in Oslo?")
async for piece in chat.say():
    ...
"""

from __future__ import annotations

from types import TracebackType

from msgspec import UNSET

from .connection.connection import Connection, server_error
from .errors import InputClosed, ServerError
from .frames.client import TextAppend, TextClear, TextCommit, TextReplace, TypedRole
from .frames.server import TextCleared, TextCommitted


class TextInput:
    """One message, or the output of the tool call `call_id`, sent in pieces. Made by `Chat.input` and
    `Chat.output`.

    Leaving ``async with`` commits it, or clears it if the block raised. An output may be empty; an empty
    message is cleared instead. ``text``: all of it so far. ``committed``: the server's answer to the commit:
    the item's id, the tokens that were prefilled meanwhile, and those that are left; None before.

    Pieces are sent without waiting for an answer. If the server refuses one, the next call raises it, at the
    latest the commit, and none of the text becomes an item. Raises `InputClosed` after the commit or the clear,
    `ServerError`, `ConnectionLost`.
    """

    def __init__(
        self, connection: Connection, role: TypedRole = "user", *, call_id: str | None = None
    ) -> None:
        self.text = ""
        self.committed: TextCommitted | None = None
        self._connection = connection
        self._role: TypedRole | None = role if call_id is None else None
        self._call_id = call_id
        self._open = True
        self._pieces: set[str] = set()  # ids of the events that brought it

    async def append(self, text: str) -> None:
        """Send `text`, which comes behind what was sent."""
        self._check()
        await self._send(TextAppend(text=text, role=self._role, call_id=self._call_id))
        self.text += text

    async def replace(self, start: int, text: str) -> None:
        """Replace what was sent, from character `start` (Unicode code points) to the end, by `text`. Raises
        `IndexError` if so many characters were not sent."""
        self._check()
        if not 0 <= start <= len(self.text):
            raise IndexError(
                f"The text has {len(self.text)} characters, so none can be replaced from {start} on"
            )
        await self._send(TextReplace(start=start, text=text))
        self.text = self.text[:start] + text

    async def commit(self) -> TextCommitted:
        """Make the text an item at the end of the conversation, and return the server's answer. `chat.say()`
        then asks for the reply."""
        self._check()
        self._check_pieces()
        self._open = False
        self._connection.buffer.release(self)  # what another sends next comes behind the commit
        commit = TextCommit(call_id=self._call_id)
        try:
            committed = await self._connection.request(
                commit, TextCommitted, lambda event: event.call_id == (self._call_id or UNSET)
            )
        except ServerError:
            self._connection.buffer.stale = True  # the server keeps the text for another commit
            raise
        try:
            self._check_pieces()
        except ServerError:
            await self._connection.delete(committed.item_id)
            raise
        self.committed = committed
        return committed

    async def clear(self) -> None:
        """Take all of the text back: it becomes no item."""
        self._check()
        self._open = False
        self._connection.buffer.release(self)
        await self._connection.request(TextClear(), TextCleared)

    async def __aenter__(self) -> TextInput:
        if self._call_id is not None:
            await self.append("")  # lets the server prefill what stands before the output
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            if kind is None and (self.text or self._call_id is not None):
                await self.commit()
        finally:
            if self._open:
                await self.clear()

    async def _send(self, event: TextAppend | TextReplace) -> None:
        self._check_pieces()
        await self._connection.buffer.claim(self)
        await self._connection.clear_leftover()
        self._pieces.add(await self._connection.send(event))

    def _check_pieces(self) -> None:
        for refusal in self._connection.refusals:
            if refusal.event_id in self._pieces:
                raise server_error(refusal)

    def _check(self) -> None:
        if not self._open:
            raise InputClosed("This text was committed or cleared")
