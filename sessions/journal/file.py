"""The journal's LMDB file: how it is opened, and whether it is whole. Knows no records.

Never ``writemap``: a full disk would kill the process.
"""

from __future__ import annotations

from pathlib import Path

import lmdb

from ..errors import StoreUnusable
from .settings import JournalSettings

META_BYTES = 8192  # LMDB's two meta pages: a shorter file cannot even be asked


def environment(folder: Path, settings: JournalSettings, tables: int) -> lmdb.Environment:
    """The file in ``folder``, opened or made, for so many named databases. Raises ``lmdb.Error``."""
    return lmdb.open(str(folder), map_size=settings.map_bytes, max_dbs=tables, max_readers=8, mode=0o600)


def check_length(path: Path, tables: int) -> None:
    """A file cut short would kill its readers. Raises ``StoreUnusable``."""
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        return
    except OSError as fault:
        raise StoreUnusable(f"the store {path} cannot be read: {fault.strerror}") from None
    if length == 0:
        return  # a server died before its first commit
    try:
        pages = _pages(path, tables) if length >= META_BYTES else META_BYTES
    except lmdb.Error as fault:
        raise StoreUnusable(f"the store {path} cannot be opened: {fault}") from None
    if length < pages:
        raise StoreUnusable(f"the store {path} is cut short: {length} bytes of {pages}")


def _pages(path: Path, tables: int) -> int:
    """How many bytes the file must have, by its own account."""
    with lmdb.open(str(path.parent), readonly=True, lock=False, max_dbs=tables) as environment:
        return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])
