"""The input text buffer: text that a client streams in, before it becomes an item. It is typed, recognised from
speech, or a tool's output. Pure; `text/streaming_tokenizer.py` tokenizes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputInvalid
from .items import FunctionCallOutput, Growing, Message, Role, new_id

MAX_CHARACTERS = 1 << 22


@dataclass(slots=True)
class InputTextBuffer:
    """The text since the last commit. The first piece sets ``role``, or the ``call_id`` that the text answers.
    ``id`` becomes the item's."""

    text: str = ""
    role: Role | None = None
    id: str = ""
    call_id: str | None = None

    @property
    def begun(self) -> bool:
        """Whether the role or the call is known."""
        return self.role is not None or self.call_id is not None

    def check(self, role: Role | None = None, call_id: str | None = None) -> None:
        """Check that text of this ``role``, or for this ``call_id``, may be appended. Raises ``InputInvalid``
        if both are given, or if the buffer was begun with another role or call."""
        if role is not None and call_id is not None:
            raise InputInvalid("Text has a role, or is the output of a call, not both", param="call_id")
        if not self.begun:
            return
        held = f"{self.role} text" if self.role is not None else f"the output of the call {self.call_id!r}"
        if role not in (None, self.role):
            raise InputInvalid(f"The buffer holds {held}, not {role} text", param="role")
        if call_id not in (None, self.call_id):
            raise InputInvalid(f"The buffer holds {held}, not that of the call {call_id!r}", param="call_id")

    def append(self, text: str, role: Role | None = None, call_id: str | None = None) -> None:
        """Append ``text``. Raises ``InputInvalid`` as ``check``, or if the text gets too long."""
        self.check(role, call_id)
        self._fill(self.text + text)
        if not self.begun:
            self.role, self.call_id = (None, call_id) if call_id is not None else (role or "user", None)
        self.id = self.id or new_id("item")

    def replace(self, start: int, text: str) -> None:
        """Replace everything from character ``start`` on by ``text``. Raises ``InputInvalid``."""
        if start > len(self.text):
            raise InputInvalid(
                f"The buffer holds {len(self.text)} uncommitted characters, none at {start}", param="from"
            )
        if self.begun:
            self._fill(self.text[:start] + text)
        else:
            self.append(text)

    def clear(self) -> None:
        """Empty the buffer."""
        self.text, self.role, self.id, self.call_id = "", None, "", None

    def item(self) -> Growing | None:
        """The text as an item; None while there is none. A tool's output may be empty."""
        if self.call_id is not None:
            return FunctionCallOutput(id=self.id, call_id=self.call_id, output=self.text)
        if self.role is None or not self.text:
            return None
        return Message(id=self.id, role=self.role, text=self.text)

    def whole(self) -> Growing:
        """The buffer's text as an item; the buffer keeps it. Raises ``InputInvalid`` if there is none."""
        item = self.item()
        if item is None:
            raise InputInvalid("The buffer holds no text")
        return item

    def commit(self) -> Growing:
        """Empty the buffer and return its item. Raises ``InputInvalid`` if there is no text."""
        item = self.whole()
        self.clear()
        return item

    def _fill(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise InputInvalid(f"The buffer holds at most {MAX_CHARACTERS} characters", param="text")
        self.text = text
