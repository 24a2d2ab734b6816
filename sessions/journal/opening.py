"""Where a model's store is: in its folder, or beside what another model or a later version left there."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import StorageUnavailable, StoreForeign, StoreNewer, StoreUnusable
from . import identity
from .legacy import migrate
from .segment import FORMAT
from .settings import JournalSettings
from .store import JournalStore

log = logging.getLogger(__name__)


def open_for(folder: Path, model: bytes, settings: JournalSettings) -> JournalStore:
    """The store of ``model``: in ``folder``, or in one below it where another model's or a later version's
    is. A server begins with it.

    That one is ignored with one line, and left as it is: its sessions come back under what wrote them. One of
    an earlier format is moved to this one's. Hold the folder's lock. Raises ``StoreUnusable``.
    """
    own = folder / f"model-{model.hex()[:16]}"
    places = [folder, own, own.with_name(f"{own.name}-format-{FORMAT}")]
    mismatches: list[str] = []
    for at, place in enumerate(places):
        try:
            migrate(place, model, settings)
            store = _begun(place, model, settings)
        except (StoreForeign, StoreNewer) as other:
            if at + 1 == len(places):
                raise
            mismatches.append(f"{other.message}: it is ignored; sessions are kept in {places[at + 1]}")
            log.warning("%s", mismatches[-1])
            continue
        store.mismatches[:0] = mismatches
        return store
    raise AssertionError("the last place was tried")


def _begun(folder: Path, model: bytes, settings: JournalSettings) -> JournalStore:
    """The store in ``folder``, compared with what the second place says of it, and begun."""
    unreadable = ""
    known: identity.Identity | None = None
    try:
        known = identity.read(folder)
    except ValueError as fault:
        unreadable = (
            f"{identity.FILE} cannot be read ({fault}): nobody can tell whether this is the journal of the "
            "last start"
        )
    if known is not None and known.model != model:
        known = None  # of another model's journal, which was here once
    store = JournalStore.open(folder, model, settings, known=None if known is None else known.header())
    try:
        if line := unreadable or identity.mismatch(known, store.identity(), fresh=store.fresh):
            store.mismatches.append(f"{folder}: {line}")
            log.warning("%s", store.mismatches[-1])
        store.begin(max(store.generation, 0 if known is None else known.generation) + 1)
    except StorageUnavailable as fault:
        store.close()
        raise StoreUnusable(f"the store {folder} cannot be opened: {fault.message}") from None
    except BaseException:
        store.close()
        raise
    return store
