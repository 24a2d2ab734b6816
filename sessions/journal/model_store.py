"""Opening a model's store at start: finds its folder, ends a repair, compares the identity."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import StoreForeign, StoreNewer, StoreUnusable
from ..settings import JournalSettings
from .backup import finish
from .clock import ServedClock
from .folder import FOLDER, IDENTITY, Disk, read_identity, refuse_lmdb
from .logs import LogFolder
from .segment import FORMAT
from .store import JournalStore

log = logging.getLogger(__name__)

REPAIRED = f"{FOLDER}.new"
ASIDE = f"{FOLDER}.damaged"


def open_for(
    folder: Path,
    model: bytes,
    settings: JournalSettings,
    lost: Callable[[], str] = str,
    clock: ServedClock | None = None,
) -> JournalStore:
    """Open the store of ``model`` (the model's digest) in ``folder``, or in a folder below it if another model
    or a later version has a store there, which is left as it is. Records that a server starts with it.

    A backup that is whole is put in place. Hold the folder's lock; ``lost`` returns why it is lost, "" if it
    is not. ``clock``: gives the time of what is written; None makes one. Raises ``StoreUnusable``.
    """
    try:
        finish(folder, Disk())
    except OSError as fault:
        raise StoreUnusable(f"the backup in {folder} cannot be put in place: {fault}") from None
    own = folder / f"model-{model.hex()[:16]}"
    folders = [folder, own, own.with_name(f"{own.name}-format-{FORMAT}")]
    mismatches: list[str] = []
    for at, path in enumerate(folders):
        try:
            refuse_lmdb(path)
            finish_repair(path, settings)
            store = _begun(path, model, settings, lost, clock)
        except (StoreForeign, StoreNewer) as other:
            if at + 1 == len(folders):
                raise
            mismatches.append(f"{other.message}: it is ignored; sessions are kept in {folders[at + 1]}")
            log.warning("%s", mismatches[-1])
            continue
        store.mismatches[:0] = mismatches
        return store
    raise AssertionError("the last folder was tried")


def finish_repair(folder: Path, settings: JournalSettings) -> bool:
    """If a repair was cut off after the repaired journal was complete, put that in the damaged one's place.
    Returns whether that was done. The caller holds the folder's lock. Raises ``StoreUnusable``."""
    if not awaits_repair(folder, settings):
        return False
    try:
        exchange(folder)
    except OSError as fault:
        raise StoreUnusable(f"{folder / REPAIRED} cannot take its place: {fault.strerror}") from None
    log.warning("%s: a repair was cut off; the repaired journal is in place now", folder)
    return True


def exchange(folder: Path) -> Path:
    """Rename the damaged journal in ``folder``, and put the repaired one there instead. Returns the
    damaged one's new path. Raises ``OSError``."""
    names = (ASIDE if number == 1 else f"{ASIDE}-{number}" for number in range(1, 1 << 20))
    aside = next(folder / name for name in names if not (folder / name).exists())
    if (folder / FOLDER).exists():
        os.rename(folder / FOLDER, aside)
    os.rename(folder / REPAIRED, folder / FOLDER)
    Disk().sync_folder(folder)
    return aside


def awaits_repair(folder: Path, settings: JournalSettings) -> bool:
    """Whether a repaired journal is whole and not in place yet: then `identity` is that of the repaired
    journal. Raises ``StoreUnusable``."""
    if not (folder / REPAIRED).is_dir():
        return False
    try:
        known = read_identity(folder)
    except ValueError:
        return False
    if known is None:
        return False
    stores: list[bytes] = []
    for name in (FOLDER, REPAIRED):
        logs = LogFolder(folder / name, b"", settings.log_bytes, Disk(), write=False)
        logs.close()
        stores.append(logs.header.store)
    return stores[0] != known.store == stores[1]


def _begun(
    folder: Path, model: bytes, settings: JournalSettings, lost: Callable[[], str], clock: ServedClock | None
) -> JournalStore:
    """Open the store in ``folder``, and record that a server starts. If it differs from its identity, that is
    logged and added to the store's ``mismatches``; it is no error. Raises ``StoreUnusable``."""
    known, unreadable = None, ""
    try:
        known = read_identity(folder)
    except ValueError as fault:
        unreadable = f"{IDENTITY} cannot be read ({fault}): "
        unreadable += "it cannot be checked that this is the journal of the last start"
    if known is not None and known.model != model:
        known = None  # left by another model's journal
    store = JournalStore(folder, model, settings, known=known, lost=lost, clock=clock)
    with store.closed_on_failure():
        store.mismatches += store.logs.vanished
        if line := unreadable or store.logs.mismatch(known):
            store.mismatches.append(f"{folder}: {line}")
            log.warning("%s", store.mismatches[-1])
        store.begin(max(store.logs.generation, 0 if known is None else known.generation) + 1)
    return store
