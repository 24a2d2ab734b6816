"""Faults of the store as a whole: two servers on one, stores that move, clocks that step, kills in a
merge, and everything deleted on a full disk.

One function per row of the table of `bench`. The servers are journals in processes of their own
(`store_child`), which write all the time. Lost: an acknowledged text that is not there, or a deleted one that
is. Wrong: a text in another session, out of order or twice; a server that said nothing of what was done to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.sessions.errors import RecordDamaged
from holdfast.sessions.journal.records import EventReceived, SessionSnapshot
from holdfast.sessions.settings import DAY

from .badio import library
from .crowd import WEDGED_SECONDS, FaultTally
from .file_faults import SETTINGS, fill, memory_folder, mounted, opened, small_disk

MODULE = "holdfast.benchmarks.faults.store_child"
SMALL: dict[str, Any] = {
    "segment_bytes": 48 << 10,
    "max_bytes": 64 << 20,
    "reserve_bytes": 0,
    "retry_seconds": 0.01,
    "lock_seconds": 0.3,
    "snapshot_operations": 24,
    "erase_seconds": 0.1,
}
"""Settings of a journal with small logs, which merges all the time."""


@dataclass
class StoreServer:
    """One server. ``said``: by session, the acknowledged texts in order; ``deleted``: sessions; ``deleting``:
    those, and others that may be gone; ``faults``: why it refused turns, "" when it did not any more;
    ``refused``: why it did not start."""

    name: str
    process: asyncio.subprocess.Process
    said: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    deleted: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    refused: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Condition = field(default_factory=asyncio.Condition)
    emptied: bool = False
    reading: asyncio.Task[None] | None = None

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            with suppress(ValueError):  # of a line that was cut off
                self._heard(*json.loads(line))
                async with self.told:
                    self.told.notify_all()
        self.ready.set()
        async with self.told:
            self.told.notify_all()

    def _heard(self, what: str, *words: Any) -> None:
        match what:
            case "ready":
                self.mismatches = words[1]
                self.ready.set()
            case "refused":
                self.refused = words[0]
                self.ready.set()
            case "said":
                self.said[words[0]].append(words[1])
            case "deleting":
                self.deleting.add(words[0])
            case "deleted":
                self.deleted.add(words[0])
            case "fault":
                self.faults.append(words[0])
            case "emptied":
                self.emptied = True

    async def until(self, holds: Callable[[], bool]) -> bool:
        """Wait until ``holds``. Returns whether it does, `WEDGED_SECONDS` later at the latest."""
        async with self.told:
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self.told.wait_for(lambda: holds() or self.process.returncode is not None), WEDGED_SECONDS
                )
        return holds()

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def work(self, rng: random.Random) -> None:
        """Let it write for a while."""
        count = sum(map(len, self.said.values())) + rng.randrange(20, 120)
        await self.until(lambda: sum(map(len, self.said.values())) >= count)

    async def end(self, *, kill: bool) -> None:
        if self.process.returncode is None:
            if kill:
                self.process.kill()
            elif self.process.stdin is not None:
                self.process.stdin.close()
            await self.process.wait()
        if self.reading is not None:
            await self.reading

    @property
    def texts(self) -> int:
        return sum(map(len, self.said.values()))


@asynccontextmanager
async def server(
    folder: Path,
    name: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[StoreServer]:
    """A server on the store, from its start on; killed at the end if it still runs. ``settings``: what differs
    from `SMALL`. ``environment``: more of it."""
    told = json.dumps({**SMALL, **settings})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", MODULE, str(folder), name, told),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        limit=1 << 20,
    )
    one = StoreServer(name, process)
    one.reading = asyncio.create_task(one.read())
    try:
        await one.ready.wait()
        yield one
    finally:
        await one.end(kill=True)


def check(path: Path, servers: list[StoreServer], tally: FaultTally) -> None:
    """Open the store as the next server does, and compare it with what these servers have acknowledged."""
    deleted = set[int]().union(*(one.deleted for one in servers))
    deleting = set[int]().union(*(one.deleting for one in servers))
    with opened(path, SETTINGS) as store:
        tally.wrong += bool(store.damaged()) + bool(store.logs.findings.lost)
        tally.notes += [f"damaged: {number:x}" for number in store.damaged()]
        there = {number for number in store.sessions.states if store.sessions.states.keeps(number)}
        for number in there & deleted:
            tally.lost += 1
            tally.notes.append(f"{number:x} was deleted, and is there")
        for one in servers:
            for number, said in one.said.items():
                tally.replies += len(said)
                if number in there:
                    _compare(number, said, heard(store, number), tally)
                elif number not in deleting:
                    tally.lost += len(said)
                    tally.notes.append(f"{number:x}: {len(said)} texts of {one.name} are gone")


def heard(store: Any, number: int) -> list[str]:
    """The texts of a session in the store."""
    found: list[str] = []
    with suppress(RecordDamaged):
        for operation in store.session(number).operations:
            found += [operation.event] if isinstance(operation, EventReceived) else ()
            found += operation.heard if isinstance(operation, SessionSnapshot) else ()
    return found


def _compare(number: int, said: list[str], found: list[str], tally: FaultTally) -> None:
    strange = [text for text in found if not text.startswith(f"{number:x} ")]
    tally.wrong += len(strange) + len(found) - len(set(found))
    index_of = {text: at for at, text in enumerate(found)}
    at = [index_of[text] for text in said if text in index_of]
    tally.wrong += at != sorted(at)
    if len(at) < len(said):
        tally.lost += len(said) - len(at)
        gone = [text for text in said if text not in index_of]
        tally.notes.append(
            f"{number:x}: {len(gone)} of {len(said)} texts are gone: {gone[0][:60]!r} at {said.index(gone[0])}"
        )
    if strange:
        tally.notes.append(f"{number:x} has {strange[0][:60]!r}")


@contextmanager
def lying(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a process for which the system lies (`badsystem.c`); empty without a C compiler."""
    preloaded = library(folder, "badsystem.c")
    yield {} if preloaded is None else {"LD_PRELOAD": str(preloaded)}


# --- two servers --------------------------------------------------------------------------------------------

Way = Callable[[Path, Path], Path]
"""Does something to a store at a path, while a server has it, with a free path beside it. Returns the path at
which a second server is started."""


def untouched(path: Path, aside: Path) -> Path:
    return path


def lock_removed(path: Path, aside: Path) -> Path:
    (path / "lock").unlink()
    return path


def lock_replaced(path: Path, aside: Path) -> Path:
    (path / "lock.new").write_bytes(b"12345")
    (path / "lock.new").rename(path / "lock")
    return path


def lock_linked(path: Path, aside: Path) -> Path:
    os.link(path / "lock", aside)
    (path / "lock").unlink()
    return path


def copied(path: Path, aside: Path) -> Path:
    copy(path, aside)
    return aside


def linked(path: Path, aside: Path) -> Path:
    """A copy that shares the files: ``cp -al``."""
    copy(path, aside, os.link)
    return aside


def through_a_link(path: Path, aside: Path) -> Path:
    aside.symlink_to(path)
    return aside


def renamed_and_replaced(path: Path, aside: Path) -> Path:
    path.rename(aside)
    copy(aside, path)
    return path


def journal_replaced(path: Path, aside: Path) -> Path:
    (path / "journal").rename(aside)
    copy(aside, path / "journal")
    return path


def renamed_and_served_there(path: Path, aside: Path) -> Path:
    path.rename(aside)
    return aside


def log_removed(path: Path, aside: Path) -> Path:
    """The log that is being written is replaced by a copy."""
    log = max((path / "journal").glob("*.log"))
    shutil.copyfile(log, aside)
    aside.rename(log)
    return path


def copy(source: Path, target: Path, how: Callable[[str, str], object] = shutil.copy2) -> None:
    """Copy a folder in which files come and go."""
    target.mkdir(parents=True)
    for one in sorted(source.iterdir()):
        if one.is_dir():
            copy(one, target / one.name, how)
        else:
            with suppress(FileNotFoundError):
                how(str(one), str(target / one.name))


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(lock_removed, lock_replaced, lock_linked, copied, linked, through_a_link),
        *(renamed_and_replaced, journal_replaced, renamed_and_served_there, log_removed),
    )
}


async def two_servers(tries: int, seed: int) -> FaultTally:
    """Start a second server beside one that writes, so many times: on its store after something was done to
    that (`WAYS`), or with locks that keep no server out. The first one may be stopped meanwhile, for long."""
    tally, rng = FaultTally("two servers on one store"), random.Random(seed)
    names = [*WAYS, "no locks"]
    for attempt in range(tries):
        name = names[attempt % len(names)]
        with memory_folder() as base, lying(base) as lies:
            path, aside = base / "store", base / "aside"
            nolock = {**lies, "BADLOCK": "1"} if name == "no locks" else {}
            if name == "no locks" and not lies:
                tally.notes.append("no C compiler: servers with locks alone")
                continue
            async with server(path, "first", environment=nolock) as first:
                await first.work(rng)
                asleep = rng.random() < 0.4
                if asleep:
                    first.process.send_signal(signal.SIGSTOP)
                way = WAYS.get(name, untouched)
                async with server(way(path, aside), "second", environment=nolock) as second:
                    if not second.refused:
                        await second.work(rng)
                    if asleep:
                        first.process.send_signal(signal.SIGCONT)
                    await _both(first, second, path, rng, tally)
                    await second.end(kill=rng.random() < 0.5)
                await first.end(kill=rng.random() < 0.5)
            _settle(name, base, first, second, tally)
            tally.tries += 1
    return tally


async def _both(
    first: StoreServer, second: StoreServer, path: Path, rng: random.Random, tally: FaultTally
) -> None:
    """Let both go on: each writes where it has a store, or says why it does not."""
    for one in (first, second):
        if one.refused:
            continue
        count = one.texts + rng.randrange(10, 60)
        moved = await one.until(lambda: one.texts >= count or bool(one.faults and one.faults[-1]))  # noqa: B023
        if not moved and one.process.returncode is None:
            tally.wrong += 1
            tally.notes.append(f"{one.name} writes nothing, and says nothing")


def _settle(name: str, base: Path, first: StoreServer, second: StoreServer, tally: FaultTally) -> None:
    """Compare each store there is now with what was acknowledged in it."""
    path, aside = base / "store", base / "aside"
    before = tally.lost, tally.wrong
    match name:
        case "copied" | "linked":  # two stores from then on
            check(path, [first], tally)
            check(aside, [second], tally)
        case "renamed_and_replaced":
            check(aside, [first], tally)
            check(path, [second], tally)
            tally.wrong += not first.faults
        case "renamed_and_served_there":
            check(aside, [first, second], tally)
            tally.wrong += not (first.faults or second.refused)
        case "journal_replaced":
            shutil.rmtree(path / "journal")
            aside.rename(path / "journal")
            check(path, [first, second], tally)
            tally.wrong += not (first.faults and second.refused)
        case "log_removed":
            tally.wrong += not second.refused  # what was written to it in between is not in the copy
        case "no locks":
            check(path, [first, second], tally)
            tally.wrong += not first.faults
        case _:
            check(path, [first, second], tally)
            tally.wrong += not second.refused
    if before != (tally.lost, tally.wrong):
        tally.notes.append(f"{name}: first {first.faults}, second {second.refused or second.faults}")


# --- stores that move ---------------------------------------------------------------------------------------


async def moved(tries: int, seed: int) -> FaultTally:
    """Take the store away from a server that writes, so many times, and give it back: renamed, replaced by an
    empty folder, or covered by another file system. It says so within a second and acknowledges nothing; then
    it goes on."""
    tally, rng = FaultTally("store moved away and back"), random.Random(seed)
    loop = asyncio.get_running_loop()
    for attempt in range(tries):
        with memory_folder() as base:
            path, aside = base / "store", base / "aside"
            async with server(path, "first") as first:
                for _ in range(3):
                    await first.work(rng)
                    how = rng.choice(["renamed", "replaced", "covered"])
                    faults, began = len(first.faults), loop.time()
                    with mounted(path, "1m") if how == "covered" else nullcontext(False) as covered:
                        if not covered:
                            path.rename(aside)
                        if how == "replaced":
                            path.mkdir()
                        tally.wrong += not await first.until(lambda: len(first.faults) > faults)  # noqa: B023
                        tally.gap = max(tally.gap, loop.time() - began)
                    if not covered:
                        shutil.rmtree(path, ignore_errors=True)
                        aside.rename(path)
                    tally.wrong += not await first.until(lambda: len(first.faults) > faults + 1)  # noqa: B023
                await first.work(rng)
                await first.end(kill=attempt % 2 == 0)
            check(path, [first], tally)
            tally.tries += 1
    return tally


# --- clocks -------------------------------------------------------------------------------------------------

STEPS = (31 * DAY, 400 * DAY, -40 * DAY, -20_000 * DAY)


async def stepped(tries: int, seed: int) -> FaultTally:
    """Set the time of day wrong so many times: while servers run, for ten seconds or for good; or at the boot,
    until it is set right. Retention runs all the time, and must forget nothing."""
    tally, rng = FaultTally("clock set wrong, in service and at boot"), random.Random(seed)
    always = {"sweep_seconds": -1.0, "max_age_seconds": 30 * DAY}
    for _ in range(tries):
        with memory_folder() as base, lying(base) as lies:
            if not lies:
                tally.notes.append("no C compiler: nothing tried")
                return tally
            path, hands = base / "store", base / "clock"
            servers: list[StoreServer] = []
            _set(hands, 0.0)
            for number in range(3):
                at_boot = rng.random() < 0.5
                if at_boot:
                    _set(hands, rng.choice(STEPS))
                clock = {**lies, "BADCLOCK": str(hands)}
                async with server(path, f"server {number}", always, clock) as one:
                    servers.append(one)
                    await one.work(rng)
                    _set(hands, 0.0 if at_boot else rng.choice(STEPS))
                    await one.work(rng)
                    if rng.random() < 0.7:
                        _set(hands, 0.0)
                        await one.work(rng)
                    tally.wrong += bool(one.faults)
                    await one.end(kill=rng.random() < 0.5)
            check(path, servers, tally)
            tally.tries += 1
    return tally


def _set(hands: Path, seconds: float) -> None:
    """Set the clock wrong by so many seconds."""
    hands.touch()
    with hands.open("r+b") as file:
        file.write(int(seconds).to_bytes(8, "little", signed=True))
        file.truncate(4096)


# --- kills --------------------------------------------------------------------------------------------------


async def killed_in_merges(tries: int, seed: int) -> FaultTally:
    """Kill a server (``kill -9``) that merges small logs all the time, so many times, and start the next on
    the store."""
    tally, rng = FaultTally("server killed while it merges logs"), random.Random(seed)
    with memory_folder() as base:
        path, servers = base / "store", list[StoreServer]()
        while tally.tries < tries:
            async with server(path, f"server {tally.tries}") as one:
                servers.append(one)
                tally.wrong += bool(one.mismatches)
                tally.notes += one.mismatches
                await one.work(rng)
                await asyncio.sleep(rng.uniform(0.0, 0.05))
                await one.end(kill=True)
                tally.wrong += bool(one.faults) or bool(one.refused)
            tally.tries += 1
        check(path, servers, tally)
    return tally


# --- a full disk --------------------------------------------------------------------------------------------


async def emptied(tries: int, seed: int) -> FaultTally:
    """Let a server and then something else fill the disk, so many times, and delete everything: it must serve
    again, at once or after a kill, and no deleted text may be left in a file."""
    tally, rng = FaultTally("everything deleted on a full disk"), random.Random(seed)
    for attempt in range(tries):
        with small_disk("6m") as disk:
            if disk is None:
                tally.notes.append("may not mount a tmpfs: nothing tried")
                return tally
            path, tight = disk / "store", {"reserve_bytes": 1 << 20, "segment_bytes": 1 << 20}
            async with server(path, "first", tight) as first:
                tally.wrong += not await first.until(lambda: bool(first.faults))
                first.send("pause")
                if rng.random() < 0.5:
                    with suppress(OSError):
                        fill(disk, 0)
                first.send("delete")
                tally.wrong += not await first.until(lambda: first.emptied)
                killed = rng.random() < 0.5
                if not killed:
                    tally.wrong += not await first.until(lambda: not first.faults[-1])
                await first.end(kill=killed)
            async with server(path, "second", tight) as second:
                await second.work(rng)
                tally.wrong += not second.texts
                await second.end(kill=False)
            async with server(path, "third", tight) as third:
                third.send("pause")
                left = await _erased(path)
                await third.end(kill=False)
            tally.lost += len(left)
            tally.notes += [f"{name} has deleted text" for name in left]
            (disk / "ballast").unlink(missing_ok=True)
            check(path, [second, third], tally)
            tally.tries += 1
            tally.notes += [] if attempt else [f"{first.texts} texts deleted"]
    return tally


async def _erased(path: Path) -> list[str]:
    """Wait until no log has text of the first server any more. Returns those that have it still."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WEDGED_SECONDS / 5
    left = _with_text(path, b" first ")
    while left and loop.time() < deadline:
        left = await asyncio.to_thread(_with_text, path, b" first ")
    return left


def _with_text(path: Path, text: bytes) -> list[str]:
    """The names of the logs in which the text stands."""
    found = []
    for log in path.glob("journal/*.log"):
        with suppress(FileNotFoundError):
            found += [log.name] if text in log.read_bytes() else []
    return found
