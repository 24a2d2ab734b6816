"""Changing a session's configuration, and whether the server is known to have it. Knows nothing of turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .connection import Connection
from .errors import ServerError
from .frames.client import SessionUpdate
from .frames.server import ServerEvent, SessionUpdated
from .frames.session import SessionPatch, SessionResource
from .params import converted
from .tools.tool import Tool


class Configuration:
    """Of one session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sure = True  # whether the answer to the last change was read

    def offers(self, session: SessionResource, tools: Mapping[str, Tool]) -> bool:
        """Whether the server is known to offer the model precisely these tools."""
        return self._sure and [tool.definition for tool in tools.values()] == session.tools

    async def change(
        self, fields: dict[str, Any], tools: Mapping[str, Tool] | None = None
    ) -> SessionResource:
        """Change the fields that are given, and ``tools``; the whole of it.

        Raises `FrameError`, `ServerError`.
        """
        if tools is not None:
            fields = {**fields, "tools": [tool.definition for tool in tools.values()]}
        patch = converted(fields, SessionPatch, "session")
        try:
            sent = await self._connection.send(SessionUpdate(session=patch))
            self._sure = False
            updated = await self._connection.answer(sent, lambda event: _answers(event, tools))
        except ServerError:
            self._sure = True  # all is as it was
            raise
        assert isinstance(updated, SessionUpdated)
        self._sure = True
        return updated.session


def _answers(event: ServerEvent, tools: Mapping[str, Tool] | None) -> bool:
    """Whether it is no answer to an earlier change that nobody waited for."""
    if not isinstance(event, SessionUpdated):
        return False
    return tools is None or [tool.name for tool in event.session.tools] == list(tools)
