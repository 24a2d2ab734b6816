"""Puts sessions on an engine: the model's language, the journal and the session registry.

The server and the embedded engine both use `opened`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..runtime.kv_placement.tier_setup import file_bytes
from ..runtime.link.client import EngineLink
from ..runtime.model.folder import find_model
from ..sessions.journal.folder import StoreLock
from ..sessions.journal.journal import Journal
from ..sessions.registry import SessionRegistry
from ..sessions.settings import SessionSettings
from ..sessions.text.language import Language
from .service import Service
from .settings import GatewaySettings


def model_name(model: str) -> str:
    """The name of a served model: of a folder the last part, anything else as it was given."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


@asynccontextmanager
async def opened(
    service: Service, model: str, engine: AbstractAsyncContextManager[EngineLink]
) -> AsyncIterator[None]:
    """Load engine and language side by side, then admit sessions until the end of the block.

    Raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed``,
    ``EngineDied``, ``StoreUnusable`` (``StoreHeld`` before anything is loaded).
    """
    folder = await asyncio.to_thread(find_model, model)
    lock = await _locked(service.settings)
    try:
        async with _on_engine(service, folder, engine, lock):
            yield
    finally:
        if lock is not None:
            lock.release()


@asynccontextmanager
async def _on_engine(
    service: Service, folder: Path, engine: AbstractAsyncContextManager[EngineLink], lock: StoreLock | None
) -> AsyncIterator[None]:
    settings = service.settings
    load = partial(
        Language.load, folder, settings.calls, settings.reasoning, tool_fallback=settings.tool_fallback
    )
    speaking = asyncio.create_task(asyncio.to_thread(load))
    try:
        async with engine as link:
            language = await speaking
            journal = await _journal(service, language, lock)
            try:
                sessions = SessionSettings(
                    recovery_seconds=service.settings.recovery_seconds, tenants=service.tenants.sessions()
                )
                service.open(SessionRegistry(link, language, sessions, journal), journal)
                yield
            finally:
                await service.close()
                if journal is not None:
                    await journal.aclose()
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)


async def _locked(settings: GatewaySettings) -> StoreLock | None:
    if settings.store is None:
        return None
    seconds = settings.journal.lock_seconds
    return await asyncio.to_thread(StoreLock(settings.store).acquire, seconds)


async def _journal(service: Service, language: Language, lock: StoreLock | None) -> Journal | None:
    settings = service.settings
    if settings.store is None:
        return None
    shared = replace(settings.journal, tenants=service.tenants.journal())
    reclaimable = partial(file_bytes, settings.store.expanduser())
    return await Journal.open(settings.store, language.digest(), shared, lock, reclaimable=reclaimable)
