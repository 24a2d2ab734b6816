"""Puts sessions on an engine: `opened` loads the model's tokenizer and templates, opens the journal and makes
the session registry.

The server and the embedded engine both use it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..runtime.kv_placement.tier_setup import file_bytes
from ..runtime.link.client import EngineLink
from ..runtime.model.folder import check_folder, find_model
from ..sessions.journal.journal import Journal
from ..sessions.journal.lock import StoreLock
from ..sessions.registry import SessionRegistry
from ..sessions.settings import SessionSettings
from ..sessions.text.language import Language
from .service import Service
from .settings import GatewaySettings

log = logging.getLogger(__name__)


@asynccontextmanager
async def opened(
    service: Service, model: str, engine: AbstractAsyncContextManager[EngineLink]
) -> AsyncIterator[SessionRegistry]:
    """Run ``service`` on an engine during the block: load the model's tokenizer and templates, then, if they
    are sound, the engine; open the journal; let clients open sessions. Yields the session registry. After the
    block, sessions, journal and engine are closed. ``model``: a folder, a file or a name. ``engine``: entering
    it loads the engine.

    Raises ``ModelUnreadable``, ``SettingsInvalid``, ``TokenizerUnreadable``, ``TemplateFailed``,
    ``EngineDied``, and ``StoreUnusable`` (``StoreHeld`` already before loading).
    """
    lock: StoreLock | None = None
    try:
        folder = await asyncio.to_thread(find_model, model)
        check_folder(folder)  # first, so that no store is made for a model that is not there
        lock = await _locked(service.settings)
        async with _on_engine(service, folder, engine, lock) as registry:
            yield registry
    finally:
        service.refuse()  # what waits for an engine that could not be loaded
        if lock is not None:
            lock.release()


@asynccontextmanager
async def _on_engine(
    service: Service, folder: Path, engine: AbstractAsyncContextManager[EngineLink], lock: StoreLock | None
) -> AsyncIterator[SessionRegistry]:
    settings = service.settings
    load = partial(
        Language.load, folder, settings.calls, settings.reasoning, tool_fallback=settings.tool_fallback
    )
    language = await asyncio.to_thread(load)
    async with engine as link:
        for note in link.hello.notes:
            log.warning("%s", note)
        journal = await _journal(service, language, lock)
        try:
            sessions = SessionSettings(
                recovery_seconds=settings.recovery_seconds,
                cycle_tokens=settings.cycle_tokens,
                tenants=service.tenants.sessions(),
            )
            registry = SessionRegistry(link, language, sessions, journal)
            service.open(registry, journal)
            yield registry
        finally:
            await service.close()
            if journal is not None:
                await journal.aclose()


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
