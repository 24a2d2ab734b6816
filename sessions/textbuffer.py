"""Text on its way: typed, or recognised from speech, before it becomes an item. Pure; knows no tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputInvalid
from .items import Message, Role, new_id

MAX_CHARACTERS = 1 << 22


@dataclass(slots=True)
class TextBuffer:
    """What has come since the last commit. ``role`` is said with the first piece, ``id`` becomes the item's."""

    text: str = ""
    role: Role | None = None
    id: str = ""

    def append(self, text: str, role: Role | None = None) -> None:
        """Put ``text`` behind what has come. Raises ``InputInvalid``: another role than before, or too long."""
        if self.role is not None and role not in (None, self.role):
            raise InputInvalid(f"The buffer holds {self.role} text, not {role} text", param="role")
        self._fill(self.text + text)
        self.role = self.role or role or "user"
        self.id = self.id or new_id("item")

    def replace(self, start: int, text: str) -> None:
        """Take back everything from character ``start`` on and put ``text`` there. Raises ``InputInvalid``."""
        if start > len(self.text):
            raise InputInvalid(
                f"The buffer holds {len(self.text)} uncommitted characters, none at {start}", param="from"
            )
        if self.role is None:
            self.append(text)
        else:
            self._fill(self.text[:start] + text)

    def clear(self) -> None:
        """Forget what has come."""
        self.text, self.role, self.id = "", None, ""

    def message(self) -> Message | None:
        """What has come, as the item it would become; None while there is nothing."""
        if self.role is None or not self.text:
            return None
        return Message(id=self.id, role=self.role, text=self.text)

    def commit(self) -> Message:
        """The item; the buffer is empty again. Raises ``InputInvalid`` where there is no text."""
        message = self.message()
        if message is None:
            raise InputInvalid("The buffer holds no text")
        self.clear()
        return message

    def _fill(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise InputInvalid(f"The buffer holds at most {MAX_CHARACTERS} characters", param="text")
        self.text = text
