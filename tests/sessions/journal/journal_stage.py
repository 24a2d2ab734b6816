"""The stage of the journal's tests: a store in memory-backed files, and a registry of sessions on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace as replaced

from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import Keyring, Origin, SessionRecord, put
from holdfast.sessions.journal.segment import Fresh
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.registry import SessionRegistry, local_time
from holdfast.sessions.settings import JournalSettings

from ..scripted_link import ScriptedLink
from ..session_stage import LANGUAGE

SMALL = JournalSettings(max_bytes=32 << 20, reserve_bytes=0, retry_seconds=0.01)
MODEL = b"model"


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder, on a file system where a sync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@contextmanager
def started(path: Path, model: bytes = MODEL, settings: JournalSettings = SMALL) -> Iterator[JournalStore]:
    """A server has the store."""
    store = open_for(path, model, settings)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def store_in(path: Path, settings: JournalSettings = SMALL, model: bytes = MODEL) -> Iterator[JournalStore]:
    store = JournalStore(path, model, settings)
    try:
        yield store
    finally:
        store.close()


def birth(
    number: int, owner: bytes = b"me", *, salt: bytes = b"", origin: Origin | None = None
) -> list[Fresh]:
    """What makes a session known."""
    record = replaced(record_of(number), salt=salt, origin=origin)
    digest = bytes([number % 256]) * 32
    return [
        put(number, record),
        put(number, Keyring(fresh=(digest,))),
    ]


def unused(store: JournalStore) -> int:
    """The number of a session that the store does not have yet."""
    return max(store.sessions.states, default=0) + 1


def record_of(number: int) -> SessionRecord:
    return SessionRecord(id=f"sess_{number}", owner=b"me", salt=b"", clock="2025-03-01T00:00:00+00:00")


@asynccontextmanager
async def registry_in(
    path: Path,
    link: ScriptedLink,
    now: Callable[[], datetime] = local_time,
    reclaimable: Callable[[], int] = lambda: 0,
    **changes: object,
) -> AsyncIterator[SessionRegistry]:
    """A registry on the store; at the end everything is closed as by a server that leaves."""
    journal = await Journal.open(path, MODEL, replace(SMALL, **changes), reclaimable=reclaimable)
    registry = SessionRegistry(link, LANGUAGE, journal=journal, now=now)
    try:
        yield registry
    finally:
        await registry.aclose()
        await journal.aclose()
