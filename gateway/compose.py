"""Puts sessions on an engine: `opened` loads the model's tokenizer and templates, opens the journal and makes
the session registry.

The server and the embedded engine both use it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from ..runtime.kv_placement.tier_setup import file_bytes
from ..runtime.link.client import EngineLink
from ..runtime.model.folder import check_folder, find_model
from ..sessions.journal.journal import Journal
from ..sessions.journal.lock import StoreLock
from ..sessions.registry import SessionRegistry
from ..sessions.settings import SessionSettings
from ..sessions.text.language import Language
from .service import Service

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
    settings = service.settings
    async with AsyncExitStack() as stack:
        stack.callback(service.refuse)  # what waits for an engine that could not be loaded
        folder = await asyncio.to_thread(find_model, model)
        check_folder(folder)  # first, so that no store is made for a model that is not there
        lock = None if settings.store is None else StoreLock(settings.store)
        if lock is not None:
            await asyncio.to_thread(lock.acquire, settings.journal.lock_seconds)
            stack.callback(lock.release)
        load = partial(Language.load, tool_fallback=settings.tool_fallback)
        language = await asyncio.to_thread(load, folder, settings.calls, settings.reasoning)
        link = await stack.enter_async_context(engine)
        for note in link.hello.notes:
            log.warning("%s", note)
        journal = None
        if settings.store is not None:
            shared = replace(settings.journal, tenants=service.tenants.journal())
            reclaimable = partial(file_bytes, settings.store.expanduser())
            journal = await Journal.open(
                settings.store, language.digest(), shared, lock, reclaimable=reclaimable
            )
            stack.push_async_callback(journal.aclose)
        stack.push_async_callback(service.close)
        sessions = SessionSettings(
            recovery_seconds=settings.recovery_seconds,
            cycle_tokens=settings.cycle_tokens,
            tenants=service.tenants.sessions(),
        )
        registry = SessionRegistry(link, language, sessions, journal)
        service.open(registry, journal)
        yield registry
