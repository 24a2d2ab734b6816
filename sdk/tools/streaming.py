"""What a callable yields, written as the pieces of a call's output. Knows nothing of tools."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from .context import ToolContext
from .threads import in_thread

TURN_SECONDS = 0.05
"""So often a generator that yields and never waits leaves all others, its own timeout too, their turn."""


async def drained(result: Any, context: ToolContext) -> bool:
    """Whether the result was a generator, sync (it runs in a thread) or async: then all it yields is written.

    Raises what it raises, and `ToolFailed` for what is no piece of an output.
    """
    if inspect.isasyncgen(result):
        stream: AsyncGenerator[Any, Any] = result
        async with aclosing(stream) as pieces:
            since = time.perf_counter()
            async for piece in pieces:
                context.write(piece)
                if time.perf_counter() - since > TURN_SECONDS:
                    await asyncio.sleep(0)
                    since = time.perf_counter()
    elif inspect.isgenerator(result):
        await in_thread(lambda: _drain(result, context))
    else:
        return False
    return True


def _drain(pieces: Generator[Any, Any, Any], context: ToolContext) -> None:
    """Up to its end, or until nobody waits for it any more."""
    with closing(pieces):
        for piece in pieces:
            context.write(piece)
            if context.cancelled:
                return
