"""A server's journal in a process of its own, without an engine: it writes as fast as it can, and tells each
acknowledgement.

``python -m holdfast.benchmarks.faults.store_child FOLDER NAME SETTINGS`` begins sessions and goes on with those
that are there, a few at a time; it writes to them, and deletes one now and then. NAME stands in each text.
SETTINGS: a JSON object of `JournalSettings`. Lines of JSON on stdout: ``["ready", n]`` sessions are there;
``["said", number, text]``, ``["deleted", number]``, each acknowledged, and ``["deleting", number]`` before;
``["fault", text]``: why it refuses turns, or "" when it does not any more. On stdin: ``pause`` and ``go``;
``delete``: everything. It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.sessions.errors import RecordDamaged, StorageUnavailable, StoreUnusable
from holdfast.sessions.journal.journal import Journal
from holdfast.sessions.journal.records import EventReceived, Keyring, SessionRecord
from holdfast.sessions.journal.session_log import SessionLog
from holdfast.sessions.settings import JournalSettings

AT_ONCE = 6  # sessions that are written to at the same time
BIG = 3000  # characters of one text in eight: small logs are full soon
CLOSE_AFTER = 12  # texts, then another session


def tell(*words: object) -> None:
    print(json.dumps(words), flush=True)


class StoreWriter:
    """Writes to the journal until it is ``over``."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal = journal
        self._name = name
        self._rng = random.Random(name)
        self._texts = 0
        self.going = asyncio.Event()
        self.going.set()
        self._visits = 0
        self._rests = asyncio.Condition()
        self.fault = ""

    async def write(self) -> None:
        """Begin a session or go on with one, and write to it; again and again."""
        while True:
            await self.going.wait()
            self._visits += 1
            try:
                await self._visit()
            except (StorageUnavailable, RecordDamaged):
                await asyncio.sleep(0.005)
            finally:
                self._visits -= 1
                async with self._rests:
                    self._rests.notify_all()

    async def _visit(self) -> None:
        journal, rng = self._journal, self._rng
        if journal.fault is not None:
            raise journal.fault
        number = await self._another() if rng.random() < 0.5 else 0
        if not number:
            record = SessionRecord(id=f"{self._name}-{self._texts}", owner=b"", salt=b"", clock="2025-03-01")
            log = SessionLog.begin(journal, record)
            log.keep(Keyring(fresh=(log.number.to_bytes(32, "big"),)))
        else:
            try:
                stored = await journal.read(lambda store: store.session(number))
                log = SessionLog(journal, number, stored.written)
            finally:
                journal.leave(number)  # the log holds it
        try:
            for _ in range(rng.randrange(1, CLOSE_AFTER)):
                self._texts += 1
                text = f"{log.number:x} {self._name} {self._texts} " + "x" * (BIG * (rng.random() < 0.125))
                log.append(EventReceived(event=text))
                journal.put(log.taken())
                await journal.sync()
                tell("said", log.number, text)
        finally:
            log.close()
        if rng.random() < 0.1:
            await self.delete([log.number])

    async def _another(self) -> int:
        def choose(store: Any) -> int:
            kept = [one for one in store.sessions.states if store.sessions.states.keeps(one)]
            free = [one for one in kept if one not in self._journal.live]
            return self._rng.choice(free) if free else 0

        number = await self._journal.read(choose)
        if number in self._journal.live:
            return 0
        self._journal.hold(number)  # before another task goes on with it
        return number

    async def delete(self, numbers: list[int]) -> None:
        for number in numbers:
            tell("deleting", number)
            self._journal.delete(number)
        await self._journal.sync()
        for number in numbers:
            tell("deleted", number)

    async def rest(self) -> None:
        """Wait until nothing is written any more."""
        self.going.clear()
        async with self._rests:
            await self._rests.wait_for(lambda: not self._visits)

    async def watch(self) -> None:
        """Tell when turns are refused, and when not any more."""
        while True:
            fault = self._journal.fault
            told = "" if fault is None else fault.message
            if bool(told) != bool(self.fault):
                self.fault = told
                tell("fault", told)
            await asyncio.sleep(0.02)


async def serve(folder: Path, name: str, settings: JournalSettings) -> int:
    try:
        journal = await Journal.open(folder, b"model", settings)
    except StoreUnusable as fault:
        tell("refused", fault.message)
        return 2
    writer = StoreWriter(journal, name)
    tell("ready", await journal.read(lambda store: len(store.sessions.states)), list(journal.mismatches))
    tasks = [asyncio.create_task(writer.write()) for _ in range(AT_ONCE)]
    tasks.append(asyncio.create_task(writer.watch()))
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := (await reader.readline()).decode().strip():
        match line:
            case "pause":
                writer.going.clear()
            case "go":
                writer.going.set()
            case "delete":
                await writer.rest()
                await writer.delete(await journal.read(lambda store: list(store.sessions.states)))
                tell("emptied")
    for task in tasks:
        task.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            await journal.aclose()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], JournalSettings(**json.loads(sys.argv[3])))))
