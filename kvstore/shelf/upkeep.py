"""What an operator does with records on disk while no server holds them: look, verify, tidy, remove.

A store's ``kv`` folder has one folder per namespace (model, KV type, block size, layout), named by its digest,
so that records of another model lie beside each other and are never mistaken. Knows files and headers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from .lock import clear, hold
from .places import FILE
from .store import RecordStore, StoreFailed

ABOUT = "about.json"
MOST_BLOCK_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Account:
    """One namespace's records: how many, their bytes, the file's; ``damaged``, ``ignored`` of them.

    ``tenants``: how many are whose, by the tenants' numbers.
    """

    name: str
    records: int
    bytes: int
    file_bytes: int
    damaged: int = 0
    ignored: int = 0
    tenants: Mapping[int, int] = field(default_factory=dict)


def write_about(folder: Path, block_bytes: int) -> None:
    """Say beside the records how long one is, for who opens them without a model.

    Where it is said already nothing is written: on a full disk that would leave the file empty.
    """
    path, about = folder / ABOUT, json.dumps({"block_bytes": block_bytes}).encode()
    if not path.exists() or path.read_bytes() != about:
        path.write_bytes(about)


def spaces(kv: Path) -> list[Path]:
    """The folders of records below ``kv``."""
    return sorted(path.parent for path in kv.glob(f"*/{ABOUT}"))


def others(folder: Path) -> int:
    """How many namespaces' records lie beside those in ``folder``."""
    return sum(beside != folder for beside in spaces(folder.parent))


def stat(kv: Path) -> Iterator[Account]:
    """How much there is of each namespace. Raises `StoreHeld`, `StoreFailed`."""
    for folder in spaces(kv):
        with closing(_opened(folder)) as store:
            account = _account(folder, store)
        yield account


def verify(kv: Path) -> Iterator[Account]:
    """Read and check every byte; what is damaged is dropped. Raises `StoreHeld`, `StoreFailed`."""
    for folder in spaces(kv):
        with closing(_opened(folder)) as store:
            damaged = sum(1 for _ in store.damaged())
            account = _account(folder, store, damaged)
        yield account


def gc(kv: Path) -> Iterator[Account]:
    """Drop what is damaged, and folders without any record. Raises `StoreHeld`, `StoreFailed`."""
    for account in verify(kv):
        if not account.records:
            clear(kv / account.name)
        yield account


def remove(kv: Path) -> int:
    """Remove all records and the secret that names them; how many folders. Raises `StoreHeld`, ``OSError``.

    Of a link to another disk what lies there goes, and the link stays.
    """
    folders = [path for path in kv.iterdir() if path.is_dir()]  # those too that tell nothing of themselves
    locks = [hold(folder) for folder in folders]
    for path in list(kv.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not kv.is_symlink():
        kv.rmdir()
    for lock in locks:
        os.close(lock)
    return len(folders)


def _opened(folder: Path) -> RecordStore:
    """Raises ``StoreFailed`` too where nobody can say how long a record is: to guess would drop them all."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        block_bytes, space = int(about["block_bytes"]), bytes.fromhex(folder.name)
        if not 0 < block_bytes <= MOST_BLOCK_BYTES:
            raise ValueError(block_bytes)
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError):
        raise StoreFailed(f"{folder / ABOUT} cannot be read: `holdfast store clear` removes all KV") from None
    return RecordStore(folder, space, block_bytes, 1 << 62)


def _account(folder: Path, store: RecordStore, damaged: int = 0) -> Account:
    path = folder / FILE
    size = path.stat().st_blocks * 512 if path.exists() else 0
    return Account(folder.name, len(store), store.size, size, damaged, store.ignored, store.held())
