"""A disk on which the k-th write fails, for every k, under the journal and the KV store; in a process of its
own.

``python -m holdfast.benchmarks.faults.badio WHAT FIRST TRIES`` with ``badio.c`` preloaded, which makes write,
sync and truncate of the store's files fail, half done. Prints a line of JSON for each k from FIRST; the process
ends after TRIES, or at the first k that is never reached. ``library`` compiles the C; ``worked`` runs the
process.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .crowd import FaultTally

MODULE = "holdfast.benchmarks.faults.badio"
WAYS = tuple((error, times) for error in (errno.EIO, errno.ENOSPC) for times in (1, 5))
"""How calls fail: each k is tried with each of these errnos, for one call and for five in a row."""
STUCK_SECONDS = 60.0


def library(folder: Path, name: str = "badio.c") -> Path | None:
    """Compile the library ``name`` that is preloaded into ``folder``. Returns its path; None if there is no
    compiler."""
    target, source = folder / f"{name}.so", Path(__file__).with_name(name)
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return target


async def worked(what: str, tries: int) -> FaultTally:
    """Try every k from 1, up to ``tries`` of them, or until no call fails any more. ``what``: the workload,
    ``journal`` or ``kv``."""
    tally = FaultTally(f"write error at call k: {what}")
    with tempfile.TemporaryDirectory() as folder:
        preloaded = await asyncio.to_thread(library, Path(folder))
        if preloaded is None:
            tally.notes.append("no C compiler: nothing tried")
            return tally
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, what, "1", str(tries)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": str(preloaded)},
        )
        out, _ = await process.communicate()
    for line in out.decode().splitlines():
        found = json.loads(line)
        tally.tries += 1
        tally.replies += found["acknowledged"]
        tally.lost += found["lost"]
        tally.wrong += found["wrong"]
        tally.gap = max(tally.gap, found["gap"])
        tally.notes += [f"k {found['k']}: {note}" for note in found["notes"]]
    if process.returncode:
        tally.wrong += 1
        tally.notes.append(f"the process ended with {process.returncode} after {tally.tries} tries")
    return tally


class BadDisk:
    """The functions of the preloaded library, by which calls are made to fail."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def arm(self, k: int, error: int = 0, times: int = 0) -> None:
        """Count calls from now on, and let ``times`` calls from the k-th on fail with the errno ``error``. k =
        0: none fails."""
        self._library.badio_arm(ctypes.c_long(k), ctypes.c_long(error), ctypes.c_long(times))

    @property
    def calls(self) -> int:
        self._library.badio_calls.restype = ctypes.c_long
        return int(self._library.badio_calls())


def main(what: str, first: int, tries: int) -> int:
    disk, work = BadDisk(), {"journal": journal, "kv": kv}[what]
    for k in range(first, first + tries):
        found: dict[str, Any] = {"k": k, "acknowledged": 0, "lost": 0, "wrong": 0, "gap": 0.0, "notes": []}
        reached = False
        for error, times in WAYS:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                reached |= work(Path(folder), disk, lambda: disk.arm(k, error, times), found) >= k  # noqa: B023
        print(json.dumps(found), flush=True)
        if not reached:
            return 0
    return 0


# --- the journal --------------------------------------------------------------------------------------------


def journal(folder: Path, disk: BadDisk, arm: Callable[[], None], found: dict[str, Any]) -> int:
    """The workload on the journal: sessions begin, grow and are forgotten, logs are merged; everything
    acknowledged must be there. ``arm`` makes the calls fail that are to fail. Adds what came of it to
    ``found``. Returns how many calls there were."""
    return asyncio.run(_journal(folder, disk, arm, found))


async def _journal(folder: Path, disk: BadDisk, arm: Callable[[], None], found: dict[str, Any]) -> int:
    from ...sessions.errors import StoreUnusable
    from ...sessions.journal.journal import Journal
    from ...sessions.journal.records import EventReceived, SessionSnapshot
    from ...sessions.settings import JournalSettings

    settings = JournalSettings(
        segment_bytes=32 << 10,
        max_bytes=64 << 20,
        reserve_bytes=0,
        retry_seconds=0.005,
        snapshot_operations=8,
    )
    arm()
    try:
        book = await Journal.open(folder, b"model", settings)
    except StoreUnusable:  # reported, and the next start may find a better disk
        disk.arm(0)
        book = await Journal.open(folder, b"model", settings)
        arm()
    acknowledged: dict[int, list[str]] = {}
    asked: dict[int, list[str]] = {}
    try:
        for round_ in range(5):
            await _round(book, round_, asked, acknowledged, found)
    except TimeoutError:
        found["lost"] += 1
        found["notes"].append("an acknowledgement never came")
    calls = disk.calls
    disk.arm(0)
    await book.aclose()
    again = await Journal.open(folder, b"model", replace(settings, snapshot_operations=1 << 30))
    for number, events in acknowledged.items():
        stored = await again.read(lambda store: store.session(number))  # noqa: B023
        heard: list[str] = []
        for operation in stored.operations:
            heard += [operation.event] if isinstance(operation, EventReceived) else ()
            heard += operation.heard if isinstance(operation, SessionSnapshot) else ()
        found["acknowledged"] += len(events)
        found["lost"] += heard[: len(events)] != events
        found["wrong"] += heard != asked[number][: len(heard)]
    await again.aclose()
    return calls


async def _round(
    book: Any,
    round_: int,
    asked: dict[int, list[str]],
    acknowledged: dict[int, list[str]],
    found: dict[str, Any],
) -> None:
    from ...sessions.journal.records import EventReceived, Keyring, SessionRecord, drop
    from ...sessions.journal.session_log import SessionLog

    record = SessionRecord(id=f"s{round_}", owner=b"", salt=b"", clock="2025-03-01T00:00:00+00:00")
    log = SessionLog.begin(book, record)
    log.keep(Keyring(fresh=(bytes([round_]) * 32,)))
    events = asked[log.number] = []
    for group in range(3):
        for at in range(6):
            events.append(f"{round_}-{group}-{at}-" + "x" * (30_000 if at == round_ else 10))
            log.append(EventReceived(event=events[-1]))
        began = time.monotonic()
        async with asyncio.timeout(STUCK_SECONDS):
            book.put(log.taken())
            await book.sync()
        found["gap"] = max(found["gap"], time.monotonic() - began)
        acknowledged[log.number] = list(events)
    if round_ == 3:
        gone = min(acknowledged)
        book.leave(gone)
        book.put([drop(gone)])
        async with asyncio.timeout(STUCK_SECONDS):
            await book.sync()
        del acknowledged[gone]


# --- the records --------------------------------------------------------------------------------------------

FILE_ROOM = 20_480  # bytes that one takes, with what is between two


def kv(folder: Path, disk: BadDisk, arm: Callable[[], None], found: dict[str, Any]) -> int:
    """The workload on the KV store: records are put, read, dropped and evicted; reads must give what was
    put, and the store must recover. ``arm`` makes the calls fail that are to fail. Adds what came of it to
    ``found``. Returns how many calls there were."""
    from ...kvstore.disk.index import StoreFailed
    from ...kvstore.disk.messages import Begin
    from ...kvstore.disk.store import RecordStore
    from .file_faults import SIZE, SPACE, given, key, read

    tally = FaultTally("kv")

    def opened() -> Any:
        return RecordStore(Begin(str(folder), SPACE, SIZE, 24 * FILE_ROOM))

    arm()
    try:
        store = opened()
    except StoreFailed:  # the disk process ends, and is started again
        disk.arm(0)
        store = opened()
        arm()
    try:
        for batch in range(8):
            began = time.monotonic()
            numbers = [batch * 5 + at for at in range(5)]
            gone = [key(batch * 5 - 3)] if batch else []
            with suppress(StoreFailed):
                store.drop(gone)
                store.put([given(number) for number in numbers])
                found["acknowledged"] += 5
            with suppress(StoreFailed):
                store.sync()
            for number in range(max(0, batch * 5 - 10), batch * 5 + 5):
                read(store, number, tally)
            found["gap"] = max(found["gap"], time.monotonic() - began)
        calls = disk.calls
        disk.arm(0)
        store.put([given(900)])
        found["lost"] += not read(store, 900, tally)  # it serves again without a restart
        store.close()
        store = opened()
        for number in [*range(40), 900]:
            read(store, number, tally)
        found["lost"] += not read(store, 900, tally)
        found["wrong"] += tally.wrong + (store.size > store.budget)
        store.close()
    except Exception as fault:  # any of these would have ended the disk process
        found["wrong"] += tally.wrong + 1
        found["notes"].append(f"{type(fault).__name__}: {fault}")
        return disk.calls
    return calls


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
