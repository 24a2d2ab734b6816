"""Faults of the files of KV records and of the journal: flipped bits, truncation, a full disk, a reader that
never ends.

One function per row of the table of `bench`; on the stores themselves, without a server. Lost: acknowledged
data that is gone without a report (in a cache only data that no fault hit). Wrong: bytes or words that differ
from those stored.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

from xxhash import xxh3_64_intdigest

from holdfast.kvstore.disk import index
from holdfast.kvstore.disk.index import StoreFailed
from holdfast.kvstore.disk.messages import Begin
from holdfast.kvstore.disk.payload_file import FILE
from holdfast.kvstore.disk.store import RecordStore
from holdfast.kvstore.errors import RecordUnavailable
from holdfast.kvstore.tier import Record
from holdfast.sessions.errors import RecordDamaged, StorageUnavailable
from holdfast.sessions.journal.model_store import open_for
from holdfast.sessions.journal.records import (
    EventReceived,
    Keyring,
    SessionRecord,
    append,
    drop,
    put,
)
from holdfast.sessions.journal.segment import Fresh, offset_of, slot_of
from holdfast.sessions.journal.store import JournalStore
from holdfast.sessions.settings import JournalSettings

from .crowd import FaultTally

SIZE = 20_000
SPACE = bytes(range(16))
RECORDS = 40
SESSIONS = 20
WORDS = 12
SETTINGS = JournalSettings(max_bytes=64 << 20, reserve_bytes=0)
SMALL_LOGS = replace(SETTINGS, segment_bytes=16 << 10)
PAGE = 4096
MODEL = b"model"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A fresh folder, for the block, on a file system in memory if there is one, where a sync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


# --- records ------------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def given(number: int) -> tuple[Record, memoryview]:
    data = payload(number)
    return Record(key(number), 4, xxh3_64_intdigest(data)), memoryview(data)


def records(folder: Path, count: int = RECORDS) -> RecordStore:
    store = RecordStore(Begin(str(folder), SPACE, SIZE, 1 << 30))
    store.put([given(number) for number in range(count)])
    store.sync()
    return store


def read(store: RecordStore, number: int, tally: FaultTally) -> bool:
    """Read a record. Returns whether it is there; wrong bytes are counted in ``tally``."""
    into = memoryview(bytearray(SIZE))
    tally.replies += 1
    try:
        store.get(key(number), into)
    except (RecordUnavailable, StoreFailed):
        return False
    tally.wrong += bytes(into) != payload(number)
    return True


def flipped_records(tries: int, seed: int) -> FaultTally:
    """Flip one bit of a record's bytes in the KV file, then read records, so many times: only the damaged one
    may be gone."""
    tally, rng = FaultTally("bit flipped in the KV file"), Random(seed)
    with memory_folder() as folder:
        records(folder).close()
        path, listed = folder / FILE, folder / index.FILE
        whole, entries = path.read_bytes(), listed.read_bytes()
        offsets = [whole.find(payload(number)[:64]) for number in range(RECORDS)]
        for _ in range(tries):
            hit = rng.randrange(RECORDS)
            data = bytearray(whole)
            data[offsets[hit] + rng.randrange(SIZE)] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            listed.write_bytes(entries)
            store = RecordStore(Begin(str(folder), SPACE, SIZE, 1 << 30))
            found = [read(store, number, tally) for number in {hit, *rng.sample(range(RECORDS), 3)}]
            tally.wrong += read(store, hit, tally)
            tally.lost += found.count(False) - 1
            store.close()
            tally.tries += 1
    return tally


def truncated_records(tries: int, seed: int) -> FaultTally:
    """Truncate the file of payloads or the index at a random length, so many times: the store must open,
    empty or with whole records, and work."""
    tally, rng = FaultTally("KV file cut short"), Random(seed)
    for _ in range(tries):
        with memory_folder() as folder:
            records(folder, 10).close()
            path = folder / rng.choice((FILE, index.FILE))
            os.truncate(path, rng.randrange(path.stat().st_size))
            store = RecordStore(Begin(str(folder), SPACE, SIZE, 1 << 30))
            for number in range(10):
                read(store, number, tally)
            store.put([given(50)])
            tally.lost += not read(store, 50, tally)
            store.close()
            tally.tries += 1
    return tally


# --- the journal --------------------------------------------------------------------------------------------


def session(number: int) -> list[Fresh]:
    digest = bytes([number]) * 32
    record = SessionRecord(id=f"s{number}", owner=b"", salt=b"", clock="2025-03-01T00:00:00+00:00")
    return [
        put(number, record),
        put(number, Keyring(fresh=(digest,))),
        *(append(number, at, EventReceived(event=word(number, at))) for at in range(WORDS)),
    ]


def word(number: int, at: int) -> str:
    return f"<{number}-{at}>{'word' * 20}"


def told(store: JournalStore, number: int) -> list[str]:
    """The texts that a session in the journal has. Raises ``RecordDamaged``, ``StorageUnavailable``."""
    operations = store.session(number).operations
    return [operation.event for operation in operations if isinstance(operation, EventReceived)]


def kept(folder: Path, count: int = SESSIONS) -> None:
    """Write a journal of several log files, with ``count`` sessions that write alternately."""
    with opened(folder, SMALL_LOGS) as store:
        groups = [session(number) for number in range(1, count + 1)]
        for group in groups:
            store.write(group[:2])
        for at in range(WORDS):
            for group in groups:
                store.write([group[2 + at]])


@contextmanager
def opened(folder: Path, settings: JournalSettings = SETTINGS) -> Iterator[JournalStore]:
    """Open the journal in ``folder`` as a server does, for the block. Reports of damage are not printed."""
    speaking = logging.getLogger("holdfast.sessions.journal")
    speaking.setLevel(logging.CRITICAL)
    try:
        store = open_for(folder, MODEL, settings)
        try:
            yield store
        finally:
            store.close()
    finally:
        speaking.setLevel(logging.NOTSET)


def locations(folder: Path) -> dict[int, list[tuple[Path, int, int]]]:
    """For each session, by number, where its records lie in the journal: log file, offset, length in bytes."""
    store = JournalStore(folder, MODEL, SMALL_LOGS, write=False)
    found = {
        state.number: [
            (store.logs.logs[slot_of(location)].path, offset_of(location), store.logs.size(location))
            for location in state.locations()
            if location
        ]
        for state in store.sessions.states.values()
    }
    store.close()
    return found


def looked_at(store: JournalStore, hit: set[int], tally: FaultTally, *, short: bool = False) -> set[int]:
    """Read all sessions, and check that each one is unchanged, or refused by name because the fault hit it.
    ``hit``: the numbers of the sessions that were hit. ``short``: a log file lost its end, so a hit session may
    have an earlier state. Returns the refused ones."""
    refused = set()
    for number in range(1, SESSIONS + 1):
        tally.replies += 1
        whole = [word(number, at) for at in range(WORDS)]
        try:
            found = told(store, number)
        except RecordDamaged:
            refused.add(number)
            tally.lost += number not in hit
        else:
            tally.wrong += found != (whole[: len(found)] if short and number in hit else whole)
    tally.wrong += not refused <= set(store.damaged())
    tally.wrong += not short and refused != hit
    return refused


def flipped_journal(tries: int, seed: int) -> FaultTally:
    """Flip one bit of a record in the journal, so many times: its session must be refused by name, and the
    others unchanged."""
    tally, rng = FaultTally("bit flipped in the journal"), Random(seed)
    with memory_folder() as folder:
        kept(folder)
        held = locations(folder)
        whole = {path: path.read_bytes() for path in (folder / "journal").iterdir()}  # the indexes, too
        for _ in range(tries):
            hit = rng.randrange(1, SESSIONS + 1)
            path, offset, _ = rng.choice(held[hit])
            data = bytearray(whole[path])
            data[offset + rng.randrange(48)] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with opened(folder, SMALL_LOGS) as store:
                looked_at(store, {hit}, tally)
            for stray in (folder / "journal").iterdir():
                stray.unlink()
            for path, content in whole.items():
                path.write_bytes(content)
            tally.tries += 1
    return tally


def damaged_pages(tries: int, seed: int) -> FaultTally:
    """Zero pages, flip bits, swap pages or cut the end of a log file, half of the time while the journal is
    open; then open it again. Only sessions with a damaged record may be lost, and they must be named."""
    tally, rng = FaultTally("journal's pages damaged"), Random(seed)
    for attempt in range(tries):
        with memory_folder() as folder:
            kept(folder)
            held = locations(folder)
            log = rng.choice(sorted((folder / "journal").glob("*.log")))
            before = log.read_bytes()
            after = spoilt(before, attempt, rng)
            hit = {
                number
                for number, records_ in held.items()
                for path, at, size in records_
                if path == log and before[at : at + size] != after[at : at + size]
            }
            with ExitStack() as stack:
                short, is_open = len(after) < len(before), attempt % 8 >= 4
                store = stack.enter_context(opened(folder, SMALL_LOGS)) if is_open else None
                with log.open("r+b") as file:
                    file.write(after)
                    file.truncate(len(after))
                if store is not None:
                    looked_at(store, hit, tally, short=short)
            with opened(folder, SMALL_LOGS) as store:
                looked_at(store, hit, tally, short=short)
                store.write(session(100))
                tally.lost += told(store, 100)[-1] != word(100, WORDS - 1)
            tally.tries += 1
    return tally


def spoilt(data: bytes, way: int, rng: Random) -> bytes:
    """A copy of the data with one of four kinds of damage, chosen by ``way``: a zeroed page, a flipped bit, two
    pages swapped, the end cut off."""
    spoilt, pages = bytearray(data), len(data) // PAGE
    one, other = (PAGE * rng.randrange(pages) for _ in range(2))
    match way % 4:
        case 0:
            spoilt[one : one + PAGE] = bytes(PAGE)
        case 1:
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        case 2:
            spoilt[one : one + PAGE], spoilt[other : other + PAGE] = (
                spoilt[other : other + PAGE],
                spoilt[one : one + PAGE],
            )
        case _:
            del spoilt[rng.randrange(len(spoilt)) :]
    return bytes(spoilt)


def vanished_journal(tries: int, seed: int) -> FaultTally:
    """Delete, empty, exchange or roll back the journal, or delete its identity file, so many times.

    The next start must report it, the one after it must not, and both must work.
    """
    tally, rng = FaultTally("journal gone or exchanged"), Random(seed)
    for attempt in range(tries):
        with memory_folder() as folder, memory_folder() as other:
            kept(folder, 3)
            shutil.copytree(folder / "journal", other / "before")
            for _ in range(rng.randrange(1, 3)):
                with opened(folder, SMALL_LOGS) as store:
                    tally.wrong += bool(store.mismatches)
                    store.write([append(1, WORDS, EventReceived(event="later"))])
            kept(other, 2)
            logs, files = folder / "journal", list((folder / "journal").iterdir())
            match attempt % 5:
                case 0:
                    shutil.rmtree(logs)
                case 1:
                    for file in files:
                        file.write_bytes(b"")
                case 2:
                    shutil.rmtree(logs)
                    shutil.copytree(other / "journal", logs)
                case 3:
                    shutil.rmtree(logs)
                    shutil.copytree(other / "before", logs)
                case _:
                    (folder / "identity").unlink()
            for start in range(2):
                with opened(folder, SMALL_LOGS) as store:
                    tally.lost += bool(store.mismatches) != (start == 0)  # a silent start, or a false alarm
                    store.write(session(100 + start))
                    tally.wrong += told(store, 100 + start)[-1] != word(100 + start, WORDS - 1)
                    if attempt % 5 >= 2:
                        tally.wrong += told(store, 2) != [word(2, at) for at in range(WORDS)]
            tally.tries += 1
            tally.replies += 2
    return tally


def truncated_journal(tries: int, seed: int) -> FaultTally:
    """Truncate the journal at a random length, so many times: it must be valid up to there, and the start must
    report it."""
    tally, rng = FaultTally("journal cut short"), Random(seed)
    for _ in range(tries):
        with memory_folder() as folder:
            with opened(folder) as store:
                ends = []
                for number in range(1, SESSIONS + 1):
                    store.write(session(number))
                    ends.append(store.logs.bytes and next(iter(store.logs.logs.values())).end)
            (path,) = (folder / "journal").glob("*.log")
            length = rng.randrange(path.stat().st_size)
            os.truncate(path, length)
            tally.tries += 1
            tally.replies += 1
            with opened(folder) as store:
                there = [number for number, end in enumerate(ends, 1) if end <= length]
                tally.wrong += sorted(store.sessions.states) != there or not store.logs.findings.lines
                for number in there:
                    tally.lost += told(store, number) != [word(number, at) for at in range(WORDS)]
                store.write(session(100))
    return tally


# --- a full disk --------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[bool]:
    """Mount a tmpfs of this size, such as ``4m``, on the folder, for the block. Yields whether that works."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    may = not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield may
    finally:
        if may:  # lazy: a process may be looking at a path in it
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(size: str) -> Iterator[Path | None]:
    """A tmpfs of this size, such as ``4m``, for the block: its folder; None if this user may not mount."""
    with tempfile.TemporaryDirectory() as name, mounted(Path(name), size) as may:
        yield Path(name) if may else None


def fill(disk: Path, leave: int) -> Path:
    """Write a file that leaves so many bytes of the disk free. Returns its path."""
    ballast, found = disk / "ballast", os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
    return ballast


def full_records(tries: int, seed: int) -> FaultTally:
    """Fill the disk of the KV store so many times, leaving a page more each time: writes may be refused, reads
    must work, and the store must recover when there is room."""
    tally = FaultTally("full disk: KV file")
    with small_disk("6m") as disk:
        if disk is None:
            tally.notes.append("may not mount a tmpfs: nothing tried")
            return tally
        store = RecordStore(Begin(str(disk / "kv"), SPACE, SIZE, 1 << 30))
        kept = [number for number in range(20) if store.put([given(number)]) == []]
        for attempt in range(tries):
            ballast = fill(disk, 4096 * (attempt % 24))
            began, fresh = time.monotonic(), [100 + 30 * attempt + at for at in range(30)]
            for number in fresh:
                with suppress(StoreFailed):
                    store.put([given(number)])
                    tally.replies += 1
            tally.lost += sum(not read(store, number, tally) for number in kept)
            ballast.unlink()
            with suppress(StoreFailed):
                store.put([given(90)], [key(number) for number in fresh])
            store.put([given(91)], [key(90)])
            tally.lost += not read(store, 91, tally)
            store.put([], [key(91)])
            tally.gap = max(tally.gap, time.monotonic() - began)
            tally.tries += 1
        store.close()
    return tally


def full_journal(tries: int, seed: int) -> FaultTally:
    """Fill the disk of the journal so many times, leaving a page more each time: acknowledged data must be
    there, and what was refused must be written when there is room."""
    tally = FaultTally("full disk: journal")
    with small_disk("4m") as disk:
        if disk is None:
            tally.notes.append("may not mount a tmpfs: nothing tried")
            return tally
        folder = disk / "journal"
        folder.mkdir()
        store, written = JournalStore(folder, MODEL, SETTINGS), 0
        store.write(session(1))
        for attempt in range(tries):
            ballast, began = fill(disk, 4096 * (attempt % 24)), time.monotonic()
            refused: list[Fresh] = []
            for at in range(40):
                group: list[Fresh] = [
                    append(1, WORDS + written, EventReceived(event=f"{written}" + "x" * 2000))
                ]
                try:
                    store.write(group)
                except StorageUnavailable:
                    refused = group
                    break
                written += 1
                tally.replies += at >= 0
            tally.lost += len(told(store, 1)) != WORDS + written
            ballast.unlink()
            if refused:
                store.write(refused)
                written += 1
            tally.lost += len(told(store, 1)) != WORDS + written
            tally.gap = max(tally.gap, time.monotonic() - began)
            store.write([drop(2 + attempt)])
            if written > 600:
                break
            tally.tries += 1
        store.close()
        store = JournalStore(folder, MODEL, SETTINGS)
        tally.lost += len(told(store, 1)) != WORDS + written
        store.close()
    return tally
