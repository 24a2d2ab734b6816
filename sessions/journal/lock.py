"""The lock of a store: one server at a time has it, and notices within a second when it has it no longer."""

from __future__ import annotations

from pathlib import Path

from ...kvstore.errors import FolderHeld
from ...kvstore.folder_lock import FolderLock, strangers
from ...kvstore.system_limits import explained
from ..errors import StoreHeld, StoreUnusable

FILE = "lock"


class StoreLock(FolderLock):
    """The lock of the store in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FILE)

    def acquire(self, seconds: float = 0.0) -> StoreLock:
        """As `FolderLock.acquire`. Raises ``StoreHeld`` naming the holder, or ``StoreUnusable``, also for a
        folder with files of others and none of a store, which was given by mistake."""
        if others := strangers(self.folder):
            names = ", ".join([*others[:3], *["…"][: len(others) - 3]])
            raise StoreUnusable(
                f"the folder {self.folder} holds no store, but {names}: give the store a folder of its own"
            )
        try:
            super().acquire(seconds)
        except FolderHeld as held:
            raise StoreHeld(f"the store {held}") from None
        except OSError as fault:
            raise StoreUnusable(explained(fault, f"the store {self.folder}")) from None
        return self

    def lost(self) -> str:
        """Why the store is not this process's any more, as a sentence; "" if it is (`FolderLock.lost`)."""
        why = super().lost()
        return f"the store {self.folder} {why}" if why else ""
