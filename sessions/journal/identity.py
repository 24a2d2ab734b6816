"""What the journal was at the last start, in a second place: so that one that is gone does not start in
silence.

The file `identity` in the store's folder, beside the folder of logs. The logs say the same of themselves;
where the two differ, the journal was emptied, exchanged or rolled back. The server starts all the same, as a
restored backup is such a case, too, and says what it has found. Knows no sessions.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from xxhash import xxh3_64_digest

from .disk import Disk
from .segment import FORMAT, SegmentHeader

FILE = "identity"
CHECK_BYTES = 8
MOST_BYTES = 1 << 20
NAMED = 20  # logs in one line


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The store's random name and the secrets of its logs, its model; how often a server began with it.

    ``sequence``: the number of the next record, when this was written. ``logs``: the numbers of the logs.
    """

    format: int
    store: bytes
    seed: int
    sync: bytes
    model: bytes
    generation: int
    sequence: int
    logs: tuple[int, ...] = ()

    def header(self) -> SegmentHeader:
        """As the logs have it."""
        return SegmentHeader(
            format=self.format, store=self.store, seed=self.seed, sync=self.sync, model=self.model, number=0
        )


def identity_of(header: SegmentHeader, generation: int, sequence: int, logs: Iterable[int] = ()) -> Identity:
    """Of the store whose logs have this header."""
    return Identity(
        format=FORMAT,
        store=header.store,
        seed=header.seed,
        sync=header.sync,
        model=header.model,
        generation=generation,
        sequence=sequence,
        logs=tuple(sorted(logs)),
    )


def read(folder: Path) -> Identity | None:
    """As it was written last; None where there is none. Raises ``ValueError`` where it cannot be read."""
    try:
        data = (folder / FILE).read_bytes()
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


def write(folder: Path, identity: Identity, disk: Disk) -> None:
    """In the place of the one before, whole or not at all. Raises ``OSError``."""
    payload = msgspec.msgpack.encode(identity)
    fresh = folder / f"{FILE}.new"
    fd = disk.create(fresh)
    try:
        disk.write(fd, xxh3_64_digest(payload) + payload, 0)
        disk.sync(fd)
    finally:
        with suppress(OSError):
            os.close(fd)
    disk.rename(fresh, folder / FILE)
    disk.sync_folder(folder)


def lasting(before: Identity | None, after: Identity | None) -> Identity | None:
    """``before`` without the logs that a server beside us has removed since: ``after`` has them no more."""
    if before is None or after is None:
        return before
    return msgspec.structs.replace(before, logs=tuple(sorted({*before.logs} & {*after.logs})))


def mismatch(known: Identity | None, found: Identity, *, fresh: bool, explained: Container[int] = ()) -> str:
    """What differs between the second place and the journal, and what that means; "" where nothing does.

    ``fresh``: there was no journal, and ``found`` is of the new one. ``explained``: numbers of logs that are
    not there for a known reason.
    """
    if known is None:
        if fresh or not found.generation:
            return ""
        return f"{FILE} is gone: nobody can tell whether this is the journal of the last start"
    starts = known.generation
    if fresh:
        return (
            f"the journal is gone or empty, after {starts} starts: a new one begins, "
            "and no session of before can be resumed"
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
            "and what was said since is not there"
        )
    if found.generation > starts + 1:  # one more is a server that died between the two
        return f"{FILE} is older than the journal (start {starts} of {found.generation}): it was rolled back"
    gone = [number for number in known.logs if number not in found.logs and number not in explained]
    if gone:
        names = ", ".join(f"{number:08}.log" for number in gone[:NAMED])
        more = f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
        return f"logs of the last start are gone: {names}{more}: sessions that have records in them are lost"
    return ""
