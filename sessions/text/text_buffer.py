"""Text on its way: typed, recognised from speech, or told by a tool, before it becomes an item. Pure; knows no
tokens, nor which calls there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputInvalid
from ..items import FunctionCallOutput, Growing, Message, Role, new_id

MAX_CHARACTERS = 1 << 22


@dataclass(slots=True)
class TextBuffer:
    """What has come since the last commit. ``role`` or ``call_id`` is said with the first piece: the one who
    speaks, or the call that the text answers. ``id`` becomes the item's."""

    text: str = ""
    role: Role | None = None
    id: str = ""
    call_id: str | None = None

    @property
    def begun(self) -> bool:
        """Whether it is known whose text it is."""
        return self.role is not None or self.call_id is not None

    def check(self, role: Role | None = None, call_id: str | None = None) -> None:
        """Whether text of that kind may come now. Raises ``InputInvalid``: both, or another than before."""
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
        """Put ``text`` behind what has come. Raises ``InputInvalid``: as ``check``, or too long."""
        self.check(role, call_id)
        self._fill(self.text + text)
        if not self.begun:
            self.role, self.call_id = (None, call_id) if call_id is not None else (role or "user", None)
        self.id = self.id or new_id("item")

    def replace(self, start: int, text: str) -> None:
        """Take back everything from character ``start`` on and put ``text`` there. Raises ``InputInvalid``."""
        if start > len(self.text):
            raise InputInvalid(
                f"The buffer holds {len(self.text)} uncommitted characters, none at {start}", param="from"
            )
        if self.begun:
            self._fill(self.text[:start] + text)
        else:
            self.append(text)

    def clear(self) -> None:
        """Forget what has come."""
        self.text, self.role, self.id, self.call_id = "", None, "", None

    def item(self) -> Growing | None:
        """What has come, as the item it would become; None while there is nothing. A tool may say nothing."""
        if self.call_id is not None:
            return FunctionCallOutput(id=self.id, call_id=self.call_id, output=self.text)
        if self.role is None or not self.text:
            return None
        return Message(id=self.id, role=self.role, text=self.text)

    def whole(self) -> Growing:
        """The item that it becomes. Raises ``InputInvalid`` where there is no text."""
        item = self.item()
        if item is None:
            raise InputInvalid("The buffer holds no text")
        return item

    def commit(self) -> Growing:
        """The item; the buffer is empty again. Raises ``InputInvalid`` where there is no text."""
        item = self.whole()
        self.clear()
        return item

    def _fill(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise InputInvalid(f"The buffer holds at most {MAX_CHARACTERS} characters", param="text")
        self.text = text
