"""The folder of a store, beside its logs: the calls on files, and the file `identity`.

`identity` repeats what the logs say of themselves. Where the two differ, the journal was
removed, exchanged or rolled back while no server ran. A start takes such a journal as it is; but its list of
runs begins anew then, so that it does not pass for what a backup was copied from (`Identity.follows`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
from xxhash import xxh3_64_digest

from ..errors import StoreUnusable
from .segment import SegmentHeader

FOLDER = "journal"
"""The folder of logs, inside the store's folder."""
IDENTITY = "identity"
LMDB = "data.mdb"
"""The journal of a version that was never released."""
CHECK_BYTES = 8
MOST_BYTES = 1 << 20
RUNS = 1 << 10
"""So many runs `identity` lists. A backup of a run before them is not brought up to date any more."""
NAMED = 20  # names in one line of the log
PAGE = 4096
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
"""The system's errors where a file system gives a file no second name."""


class Disk:
    """The calls that the journal makes on files; tests replace them to fail. All raise ``OSError``."""

    def create(self, path: Path) -> int:
        """Create the file; returns a descriptor to read and write. Raises ``FileExistsError`` if there is
        one."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, *, write: bool = False) -> int:
        """Open an existing file; returns its descriptor."""
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            if not written:
                raise OSError(5, "nothing was written")
            view, offset = view[written:], offset + written

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Read ``length`` bytes from ``offset``, or fewer at the end of the file."""
        pieces: list[bytes] = []
        while length and (piece := os.pread(fd, length, offset)):
            pieces.append(piece)
            length, offset = length - len(piece), offset + len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readable(self, fd: int, length: int, offset: int = 0) -> bytes:
        """Read ``length`` bytes from ``offset``, or fewer at the end of the file. A page that the disk cannot
        read counts as zeros, which the caller takes for damage."""
        try:
            return self.read(fd, length, offset)
        except OSError as fault:
            if fault.errno != errno.EIO:
                raise
            if length <= PAGE:
                return bytes(max(0, min(length, self.size(fd) - offset)))
        pages = range(offset, offset + length, PAGE)
        return b"".join(self.readable(fd, min(PAGE, offset + length - at), at) for at in pages)

    def size(self, fd: int) -> int:
        """The file's length in bytes."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(fd)

    def contents(self, path: Path, most: int | None = None) -> bytes:
        """The file's first ``most`` bytes; None: all. Pages that the disk cannot read are zeros. b"" if there
        is no such file, or if it is a folder."""
        if path.is_file():
            with suppress(FileNotFoundError):
                fd = self.open(path)
                try:
                    return self.readable(fd, self.size(fd) if most is None else most)
                finally:
                    os.close(fd)
        return b""

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file to ``length`` bytes."""
        os.ftruncate(fd, length)

    def replace(self, path: Path, data: bytes) -> None:
        """Write the file anew and sync it; it has all of ``data``, or is as it was."""
        fresh = path.with_name(f"{path.name}.new")
        self.remove(fresh)
        fd = self.create(fresh)
        try:
            self.write(fd, data, 0)
            self.sync(fd)
        finally:
            os.close(fd)
        self.rename(fresh, path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename ``old``; it replaces a file named ``new``."""
        os.rename(old, new)

    def rename_new(self, old: Path, new: Path) -> None:
        """Rename ``old``; raises ``FileExistsError`` if there is a file named ``new``."""
        try:
            os.link(old, new)
        except OSError as fault:
            if fault.errno not in NO_LINKS:
                raise
            if new.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
            os.rename(old, new)
        else:
            with suppress(OSError):  # a start removes it
                os.unlink(old)

    def link(self, old: Path, new: Path) -> None:
        """Give the file ``old`` a second name; where the file system has no such names, copy it."""
        try:
            os.link(old, new)
        except OSError as fault:
            if fault.errno not in NO_LINKS:
                raise
            self.replace(new, old.read_bytes())

    def remove(self, path: Path) -> None:
        """Remove the file, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """Make the folder, and those above it that are not there."""
        path.mkdir(parents=True, mode=0o700)

    def remove_folder(self, path: Path) -> None:
        """Remove the folder with all that is in it, if it exists."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sync_folder(self, folder: Path) -> None:
        """Wait until files that were created, renamed or removed there are so on the disk."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `identity`: what the journal was when the file was written. Compared at the next
    start, it shows whether the journal was exchanged, rolled back or lost logs.

    ``store``, ``seed`` and ``sync`` are random and the same in the headers of all its logs, ``model`` is the
    digest of the model. ``backup``: a backup wrote it, and no server has started with this copy since.
    ``generation`` counts the servers that have started with it. ``sequence`` is the number
    of the next record, ``logs`` the numbers of the logs, ``keys`` the key and ``ends`` the length of each by
    number; ``holed`` are those that have lost records of unknown sessions. ``time``: microseconds of the
    store's clock (`ServedClock`).

    ``runs``: the runs since the store began or something of it was lost, the last `RUNS` of them; each with the
    sequence number that its first record has. Of a backup these are the store's, and ``copied`` is the sequence
    number of the first record that it does not have.
    """

    format: int
    store: bytes
    seed: int
    sync: bytes
    model: bytes
    generation: int
    sequence: int
    logs: tuple[int, ...] = ()
    keys: dict[int, int] = {}
    ends: dict[int, int] = {}
    holed: tuple[int, ...] = ()
    time: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    backup: bool = False
    copied: int = 0

    def header(self) -> SegmentHeader:
        """The header that all logs of the store have in common, with the log number 0."""
        return SegmentHeader(
            format=self.format, store=self.store, seed=self.seed, sync=self.sync, model=self.model, number=0
        )

    def follows(self, backup: Identity) -> bool:
        """Whether the store has lost nothing of what ``backup`` was copied from: the last run that was copied
        is one of its runs, and what that had written then is there."""
        if not backup.runs:
            return False
        ends = {run: end for (run, _), (_, end) in pairwise((*self.runs, (0, self.sequence)))}
        return ends.get(backup.runs[-1][0], 0) >= backup.copied

    def without_removed(self, later: Identity | None) -> Identity:
        """This identity with only those logs that are also in ``later``, the identity that was read some time
        after it: a running server has removed the others meanwhile. Unchanged if ``later`` is None."""
        if later is None:
            return self
        return msgspec.structs.replace(self, logs=tuple(sorted({*self.logs} & {*later.logs})))


def refuse_lmdb(folder: Path) -> None:
    """Raise ``StoreUnusable`` if ``folder`` has a journal in LMDB, which is not read."""
    old = folder / LMDB
    if old.exists() and old.stat().st_size:
        raise StoreUnusable(f"{old} is a journal in LMDB, which this version does not read: move it away")


def read_identity(folder: Path) -> Identity | None:
    """The identity in ``folder``; None if there is none. Raises ``ValueError`` if it cannot be read."""
    try:
        data = (folder / IDENTITY).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise ValueError(fault.strerror) from None
    payload = data[CHECK_BYTES:]
    if len(data) > MOST_BYTES or xxh3_64_digest(payload) != data[:CHECK_BYTES]:
        raise ValueError("its checksum is wrong")
    try:
        return msgspec.msgpack.decode(payload, type=Identity)
    except (msgspec.MsgspecError, RecursionError) as fault:
        raise ValueError(str(fault)) from None


def write_identity(folder: Path, identity: Identity, disk: Disk) -> None:
    """Replace the identity in ``folder``, as a whole or not at all. Raises ``OSError``."""
    payload = msgspec.msgpack.encode(identity)
    disk.replace(folder / IDENTITY, xxh3_64_digest(payload) + payload)
    disk.sync_folder(folder)


def mismatch(
    known: Identity | None,
    found: Identity,
    *,
    fresh: bool,
    absent: Container[int] = (),
    cut: Container[int] = (),
) -> str:
    """How the journal ``found`` differs from the identity ``known``, as a sentence; "" if it does not.

    ``fresh``: there was no journal, and ``found`` is the new one. ``absent``: numbers of logs that are missing
    for a known reason. ``cut``: numbers of logs that are shorter than they were.
    """
    if known is None:
        if fresh or not found.generation:
            return ""
        return f"{IDENTITY} is gone: it cannot be checked that this is the journal of the last start"
    starts = known.generation
    if fresh:
        return (
            f"the journal is gone or empty, after {starts} starts: a new one begins, "
            "and no earlier session can be resumed"
        )
    if known.store != found.store:
        return (
            f"another journal lies here than at the last start ({found.store.hex()[:8]}, "
            f"not {known.store.hex()[:8]}): its sessions can be resumed, those of the other one cannot"
        )
    if found.generation < starts or found.sequence < known.sequence:
        return (
            f"the journal is older than at the last start (start {found.generation} of {starts}, "
            f"record {found.sequence} of {known.sequence}): it was rolled back, "
            "and what was written since is missing"
        )
    if found.generation > starts + 1:  # one more: a server that died before it wrote the identity
        return (
            f"{IDENTITY} is older than the journal (start {starts} of {found.generation}): it was rolled back"
        )
    gone = [f"{number:08}.log" for number in known.logs if number not in found.logs and number not in absent]
    if gone:
        return f"logs of the last start are gone: {named(gone)}: sessions that have records in them are lost"
    if short := [f"{number:08}.log" for number in known.logs if number in cut]:
        return f"logs have lost their end: {named(short)}: what sessions had written there is missing"
    return ""


def named(names: Sequence[str]) -> str:
    """The first `NAMED` names, joined for a line of the server's log, with "and n more" if there are more."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
