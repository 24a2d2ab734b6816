"""Changing a session's configuration, and whether the server is known to have it. Knows nothing of turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .connection import Connection
from .errors import FrameError, ServerError
from .frames.client import SessionUpdate
from .frames.server import SessionUpdated
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
        sure, self._sure = self._sure, False
        try:
            updated = await self._connection.request(
                SessionUpdate(session=patch), SessionUpdated, lambda event: _answers(event, tools)
            )
        except FrameError:
            self._sure = sure  # nothing was sent
            raise
        except ServerError:
            self._sure = True  # all is as it was
            raise
        self._sure = True
        return updated.session


def _answers(event: SessionUpdated, tools: Mapping[str, Tool] | None) -> bool:
    """Whether it is not the answer to an earlier change that was not waited for."""
    return tools is None or [tool.name for tool in event.session.tools] == list(tools)
