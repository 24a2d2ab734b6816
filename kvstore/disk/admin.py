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
from .messages import Begin
from .payload_file import FILE as PAYLOADS
from .process import CRASHES
from .store import RecordStore, clear, held, hold, throw_away

ABOUT = "about.json"
MOST_BLOCK_BYTES = 1 << 32
CODES = {FolderHeld: 2, StoreFailed: 3, StoreTorn: 4}
"""For each error the exit code of the process that opens a file. Its text is the last line on stderr."""

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


def clear_others(folder: Path, wanted: int = 0) -> None:
    """Remove folders of other models and settings beside ``folder``, the longest unused first, until
    ``wanted`` bytes are given back; and all of an older form, which no server can read: they have an index but
    no file of payloads. A folder that a process holds stays."""
    for other in _by_use(folder.parent):
        older = not (other / PAYLOADS).exists()
        if other != folder and (older or wanted > 0):
            with contextlib.suppress(OSError, FolderHeld):
                taken = held(other)
                clear(other)
                wanted -= taken
                why = "an older form" if older else "another model"
                log.warning("KV in %s is of %s, and removed", other, why)


def file_bytes(kv: Path) -> int:
    """Bytes of the disk that all KV files in the folders directly below ``kv`` take, and could give back."""
    return sum(map(held, _by_use(kv)))


def accounts(kv: Path, act: str) -> Iterator[Account]:
    """Do ``act`` to each record space below ``kv``, and yield its account. ``stat`` only looks. ``verify``
    reads and checks every byte, and drops damaged records. ``gc`` does so, too, and removes the folders in
    which no record is left.

    Raises `FolderHeld`: a process holds a folder; `StoreFailed`: one cannot be read; `StoreTorn`: one is
    damaged or of another form. That is raised only after all others were read, and unless ``act`` is stat the
    file was thrown away.
    """
    torn: StoreTorn | None = None
    for folder in spaces(kv):
        try:
            account = _apart(act, folder)
        except StoreTorn as error:
            torn = torn or error
            continue
        if act == "gc" and not account.records:
            clear(folder)
        yield account
    if torn is not None:
        raise torn


def give_back(kv: Path, floor: int) -> None:
    """Evict records of all files below ``kv``, from the longest unused file on, until ``floor`` bytes of its
    disk are free.

    For a start on a full disk, while no disk process runs. Raises nothing: what is held or damaged is left
    alone.
    """
    for folder in _by_use(kv):
        if shutil.disk_usage(kv).free >= floor:
            return
        with contextlib.suppress(KVStoreError, OSError):
            log.warning("the disk of %s is full: KV gives way", kv)
            _apart("give-back", folder, floor)


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
    return RecordStore(Begin(str(folder), space, block_bytes, 1 << 62, floor=floor), keep=floor is None)


def _apart(act: str, folder: Path, floor: int = 0) -> Account:
    """Do ``act`` (stat, verify, gc or give-back) to ``folder`` in a process of its own, which a damaged file
    may kill. Returns its account, or raises what the act raised there. A file that is damaged is thrown away,
    unless ``act`` is stat."""
    command = [sys.executable, "-m", __spec__.name, act, str(folder), str(floor)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with named(f"the process that reads {folder}"):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False
        )
    code, text = done.returncode, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if not code:
        return msgspec.json.decode(done.stdout, type=Account)
    if -code in CRASHES:
        text = f"{folder / FILE} is damaged: the process that read it ended by {signal.Signals(-code).name}"
        code = CODES[StoreTorn]
    if code == CODES[StoreTorn] and act == "stat":
        raise StoreTorn(f"{text}; `holdfast store gc` throws it away")
    if code == CODES[StoreTorn]:
        throw_away(folder)
        raise StoreTorn(f"{text}; it is thrown away")
    if code == CODES[FolderHeld]:
        raise FolderHeld(text)
    if code != CODES[StoreFailed]:
        text = f"{folder / FILE} cannot be read: the process that does ended with {code}: {text}"
    raise StoreFailed(text)


def _act(act: str, folder: Path, floor: int) -> Account:
    with closing(_opened(folder, floor if act == "give-back" else None)) as store:
        damaged = store.verify() if act in ("verify", "gc") else 0
        if act == "give-back":
            store.relieve()
        return Account(folder.name, len(store), store.size, store.file_bytes, damaged, store.order.held())


def main(words: Sequence[str]) -> int:
    """Do one act to one folder in this process, and print its account as JSON, or its error. ``words``: act,
    folder and floor. Returns the exit code."""
    act, folder, floor = words
    try:
        account = _act(act, Path(folder), int(floor))
    except (FolderHeld, StoreFailed, StoreTorn) as error:
        print(error, file=sys.stderr)
        return CODES[type(error)]
    print(msgspec.json.encode(account).decode())
    return 0


def _by_use(kv: Path) -> list[Path]:
    """The folders with an index directly below ``kv``, the longest unused first."""
    used: dict[Path, float] = {}
    for path in kv.glob(f"*/{FILE}"):
        with contextlib.suppress(OSError):
            used[path.parent] = path.stat().st_mtime
    return sorted(used, key=used.__getitem__)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
