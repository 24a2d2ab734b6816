"""The operator's commands for records on disk while no server holds them: stat, verify, gc, clear.

A store's ``kv`` folder has one folder per record space (model, KV type, block size, layout), named by it.
A damaged file can kill the process that maps it, so each is opened in a process of its own: ``python -m
holdfast.kvstore.disk.admin ACT FOLDER FLOOR`` does one act and prints an `Account`, or an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..errors import FolderHeld, KVStoreError
from .index import FILE, StoreFailed, StoreTorn, named
from .payload_file import FILE as PAYLOADS
from .process import CRASHES
from .store import RecordStore, clear, held, hold, throw_away

ABOUT = "about.json"
MOST_BLOCK_BYTES = 1 << 32
REFUSED = 2  # exit code of the process that opens a file, with the error on its stdout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Account:
    """What one record space's folder holds. ``name``: of the folder. ``records`` and their ``bytes``;
    ``file_bytes``: bytes of the disk that its file takes.

    ``damaged``: records that failed their check and were dropped. ``tenants``: numbers of records by the
    tenants' numbers.
    """

    name: str
    records: int
    bytes: int
    file_bytes: int
    damaged: int = 0
    tenants: Mapping[int, int] = field(default_factory=dict)


def write_about(folder: Path, block_bytes: int) -> None:
    """Write the bytes of a record's payload (``block_bytes``) into the file `about.json` in ``folder``, so
    that the records can be opened without a model.

    A file that says so already is not written: on a full disk that would leave it empty.
    """
    path, about = folder / ABOUT, json.dumps({"block_bytes": block_bytes}).encode()
    if not path.exists() or path.read_bytes() != about:
        path.write_bytes(about)
        path.chmod(0o600)


def spaces(kv: Path) -> list[Path]:
    """The folders of records directly below ``kv``, one per record space, sorted."""
    return sorted(path.parent for path in kv.glob(f"*/{ABOUT}"))


def others(folder: Path) -> int:
    """How many other record spaces have folders of records beside ``folder``."""
    return sum(beside != folder for beside in spaces(folder.parent))


def clear_unreadable(folder: Path) -> None:
    """Remove folders of KV beside ``folder`` that are of an older form, which no server can read: they have an
    index but no file of payloads. One that a process holds stays."""
    for path in folder.parent.glob(f"*/{FILE}"):
        if path.parent != folder and not (path.parent / PAYLOADS).exists():
            with contextlib.suppress(OSError, FolderHeld):
                clear(path.parent)
                log.warning("KV in %s is of an older form, and removed", path.parent)


def clear_others(folder: Path, wanted: int) -> int:
    """Remove folders of other models and settings beside ``folder``, the longest unused first, until
    ``wanted`` bytes are given back. Returns the bytes given back. A folder that a process holds stays."""
    freed = 0
    for path in sorted(folder.parent.glob(f"*/{FILE}"), key=_last_use):
        if path.parent == folder or freed >= wanted:
            continue
        with contextlib.suppress(OSError, FolderHeld):
            taken = held(path.parent)
            clear(path.parent)
            freed += taken
            log.warning("KV in %s is of another model, and removed for its space", path.parent)
    return freed


def file_bytes(kv: Path) -> int:
    """Bytes of the disk that all KV files in the folders directly below ``kv`` take, and could give back."""
    return sum(held(path.parent) for path in kv.glob(f"*/{FILE}"))


def stat(kv: Path) -> Iterator[Account]:
    """Yield an account of each record space below ``kv``. Raises `FolderHeld`: a process holds a folder;
    `StoreFailed`: one cannot be read; `StoreTorn`: one is damaged, or of another form."""
    return _each(kv, "stat")


def verify(kv: Path) -> Iterator[Account]:
    """Read and check every byte of each record space below ``kv``, drop damaged records, and yield its account.
    Raises `FolderHeld`: a process holds a folder; `StoreFailed`: one cannot be read; `StoreTorn`: a file is
    damaged and was thrown away, raised only after all others were read."""
    return _each(kv, "verify")


def gc(kv: Path) -> Iterator[Account]:
    """Read and check every byte of each record space below ``kv``, drop damaged records, and remove the folders
    in which no record is left. Yields the account of each. Raises `FolderHeld`: a process holds a folder;
    `StoreFailed`: one cannot be read; `StoreTorn`: a file is damaged and was thrown away, raised only after
    all others were read."""
    for account in verify(kv):
        if not account.records:
            clear(kv / account.name)
        yield account


def give_back(kv: Path, floor: int) -> None:
    """Evict records of all files below ``kv``, from the longest unused file on, until ``floor`` bytes of its
    disk are free.

    For a start on a full disk, while no disk process runs. Raises nothing: what is held or damaged is left
    alone.
    """
    for path in sorted(kv.glob(f"*/{FILE}"), key=_last_use):
        if shutil.disk_usage(kv).free >= floor:
            return
        with contextlib.suppress(KVStoreError, OSError):
            log.warning("the disk of %s is full: KV gives way", kv)
            _apart("give-back", path.parent, floor)


def remove(kv: Path) -> int:
    """Remove the folder ``kv``, all records in it and the secret that names them; returns how many folders it
    held.

    If ``kv`` is a link to another disk, its content is removed and the link stays.

    Raises `FolderHeld` if a process holds one of them, or `OSError`.
    """
    folders = [path for path in kv.iterdir() if path.is_dir()]  # also those without `ABOUT`
    locks = [hold(folder) for folder in folders]
    for path in list(kv.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not kv.is_symlink():
        kv.rmdir()
    for lock in locks:
        lock.release()
    return len(folders)


def _opened(folder: Path, floor: int | None = None) -> RecordStore:
    """Open the store in ``folder``, of any model. ``floor``: bytes of the disk that stay free; None: no
    floor, and `StoreTorn` is raised for a damaged index. Raises `StoreFailed` also if `about.json` does not
    give the length of a record: with a guess all records would be dropped."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        block_bytes, space = int(about["block_bytes"]), bytes.fromhex(folder.name)
        if not 0 < block_bytes <= MOST_BLOCK_BYTES:
            raise ValueError(block_bytes)
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError):
        raise StoreFailed(f"{folder / ABOUT} cannot be read: `holdfast store clear` removes all KV") from None
    return RecordStore(folder, space, block_bytes, 1 << 62, floor=floor, keep=floor is None)


def _each(kv: Path, act: str) -> Iterator[Account]:
    torn: StoreTorn | None = None
    for folder in spaces(kv):
        try:
            account = _apart(act, folder)
        except StoreTorn as error:
            torn = torn or error
        else:
            yield account
    if torn is not None:
        raise torn


def _apart(act: str, folder: Path, floor: int = 0) -> Account:
    """Do ``act`` (stat, verify or give-back) to ``folder`` in a process of its own, which a damaged file may
    kill. Returns its account, or raises what the act raised there. A file that is damaged is thrown away,
    unless ``act`` is stat."""
    command = [sys.executable, "-m", __spec__.name, act, str(folder), str(floor)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with named(f"the process that reads {folder}"):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False
        )
    torn = ""
    if -done.returncode in CRASHES:
        killer = signal.Signals(-done.returncode).name
        torn = f"{folder / FILE} is damaged: the process that read it ended by {killer}"
    if done.returncode == REFUSED:
        told = json.loads(done.stdout)
        if told["error"] != StoreTorn.__name__:
            raise {kind.__name__: kind for kind in (FolderHeld, StoreFailed)}[told["error"]](told["text"])
        torn = told["text"]
    if torn and act == "stat":
        raise StoreTorn(f"{torn}; `holdfast store gc` throws it away")
    if torn:
        throw_away(folder)
        raise StoreTorn(f"{torn}; it is thrown away")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise StoreFailed(
            f"{folder / FILE} cannot be read: the process that does ended with {done.returncode}: {last}"
        )
    return msgspec.json.decode(done.stdout, type=Account)


def _act(act: str, folder: Path, floor: int) -> Account:
    with closing(_opened(folder, floor if act == "give-back" else None)) as store:
        damaged = sum(1 for _ in store.damaged()) if act == "verify" else 0
        if act == "give-back":
            store.relieve()
        size, file_size = store.size, store.file_bytes
        return Account(folder.name, len(store), size, file_size, damaged, store.held())


def main(words: Sequence[str]) -> int:
    """Do one act to one folder in this process, and print its account or error as JSON. ``words``: act,
    folder and floor. Returns the exit code."""
    act, folder, floor = words
    try:
        account = _act(act, Path(folder), int(floor))
    except (FolderHeld, StoreFailed, StoreTorn) as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        return REFUSED
    print(msgspec.json.encode(account).decode())
    return 0


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
