"""A task group that leaves no cycle of references behind when one of its tasks fails."""

from __future__ import annotations

import asyncio
from types import TracebackType


class TaskGroup(asyncio.TaskGroup):
    """`asyncio.TaskGroup`, without the cycle that it makes of each exception group that it raises: the group,
    its traceback, and the frame in which it was made. Such a cycle would keep all that the frames below it
    refer to, such as a connection and its sessions, until a full garbage collection."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            group.__traceback__ = None
            raise
