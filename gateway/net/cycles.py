"""Breaks the cycles of references that asyncio leaves behind: what has ended is freed at once, not by a garbage
collection."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TaskGroup(asyncio.TaskGroup):
    """`asyncio.TaskGroup`, without the cycle that it makes of each exception group that it raises: the group,
    its traceback, and the frame in which it was made. Such a cycle would keep all that the frames below it
    refer to, such as a connection and its sessions."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            group.__traceback__ = None
            raise


def let_go(transport: asyncio.BaseTransport) -> None:
    """Called when the connection is gone. Breaks the cycle that the standard library's transport of a socket is
    left with: an attribute of its own is one of its own methods. Does nothing to other transports."""
    vars(transport).pop("_read_ready_cb", None)
