"""Puts sessions on an engine: the model's language and a book of sessions, for the server and the embedded
engine.

Knows where a model's files are; nothing of sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from ..runtime.link.client import EngineLink
from ..runtime.model.folder import find_model
from ..sessions.book import SessionBook
from ..sessions.language import Language
from .service import Service


def model_name(model: str) -> str:
    """What a served model is called: a folder by its last name, anything else as it was given."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


@asynccontextmanager
async def opened(
    service: Service, model: str, engine: AbstractAsyncContextManager[EngineLink]
) -> AsyncIterator[None]:
    """Loads engine and language side by side, then lets sessions in until the end of the block.

    Raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed``,
    ``EngineDied``.
    """
    folder = await asyncio.to_thread(find_model, model)
    speaking = asyncio.create_task(asyncio.to_thread(Language.load, folder))
    try:
        async with engine as link:
            service.open(SessionBook(link, await speaking))
            try:
                yield
            finally:
                await service.close()
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
