"""Where a model's store is: in its folder, or beside what another model or a later version left there."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import StoreForeign, StoreNewer
from .legacy import migrate
from .segment import FORMAT
from .settings import JournalSettings
from .store import JournalStore

log = logging.getLogger(__name__)


def open_for(folder: Path, model: bytes, settings: JournalSettings) -> JournalStore:
    """The store of ``model``: in ``folder``, or in one below it where another model's or a later version's
    is.

    That one is ignored with one line, and left as it is: its sessions come back under what wrote them. One of
    an earlier format is moved to this one's. Hold the folder's lock. Raises ``StoreUnusable``.
    """
    own = folder / f"model-{model.hex()[:16]}"
    places = [folder, own, own.with_name(f"{own.name}-format-{FORMAT}")]
    for at, place in enumerate(places):
        try:
            migrate(place, model, settings)
            return JournalStore.open(place, model, settings)
        except (StoreForeign, StoreNewer) as other:
            if at + 1 == len(places):
                raise
            log.warning("%s: it is ignored; sessions are kept in %s", other.message, places[at + 1])
    raise AssertionError("the last place was tried")
