"""Text that is sent while it is typed or recognised, or told by a tool, and is computed meanwhile.

    async with chat.input() as text:
        await text.append("What is the ")
        await text.append("whether in Oslo?")
        await text.replace(12, "weather in Oslo?")
    async for piece in chat.say():
        ...

Knows nothing of where the text comes from.
"""

from __future__ import annotations

from types import TracebackType

from msgspec import UNSET

from .connection import Connection, server_error
from .errors import InputClosed, ServerError
from .frames.client import TextAppend, TextClear, TextCommit, TextReplace, TypedRole
from .frames.server import TextCleared, TextCommitted


class TextInput:
    """One message on its way, or what a tool answers to the call `call_id`. Leaving ``async with`` commits it,
    or takes it back if the block raised. A tool may answer nothing; a message without text is none.

    ``committed``: what the server said of it: the item's id, tokens prefilled while it came, tokens left.
    Raises `InputClosed` once it was committed or taken back, `ServerError`, `ConnectionLost`. Pieces are sent
    without waiting: that one was refused is raised by what is done next, the commit at the latest, and none of
    the text stays.
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
        """Send more of it."""
        self._check()
        await self._send(TextAppend(text=text, role=self._role, call_id=self._call_id))
        self.text += text

    async def replace(self, start: int, text: str) -> None:
        """Take back what stands from character `start` on, and put `text` there."""
        self._check()
        if not 0 <= start <= len(self.text):
            raise IndexError(f"{len(self.text)} characters were sent, none at {start}")
        await self._send(TextReplace(start=start, text=text))
        self.text = self.text[:start] + text

    async def commit(self) -> TextCommitted:
        """It is whole: it becomes an item of the conversation. The reply is asked for with `chat.say()`."""
        self._check()
        self._check_pieces()
        self._open = False
        self._connection.buffer.release(self)  # what another sends next comes behind the commit
        commit = TextCommit(call_id=self._call_id)
        committed = await self._connection.request(
            commit, TextCommitted, lambda event: event.call_id == (self._call_id or UNSET)
        )
        try:
            self._check_pieces()
        except ServerError:
            await self._connection.delete(committed.item_id)
            raise
        self.committed = committed
        return committed

    async def clear(self) -> None:
        """Take all of it back."""
        self._check()
        self._open = False
        self._connection.buffer.release(self)
        await self._connection.request(TextClear(), TextCleared)

    async def __aenter__(self) -> TextInput:
        if self._call_id is not None:
            await self.append("")  # what stands before the output can be computed
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
        await self._connection.fresh()
        self._pieces.add(await self._connection.send(event))

    def _check_pieces(self) -> None:
        for refusal in self._connection.refusals:
            if refusal.event_id in self._pieces:
                raise server_error(refusal)

    def _check(self) -> None:
        if not self._open:
            raise InputClosed("This text was committed or taken back")
