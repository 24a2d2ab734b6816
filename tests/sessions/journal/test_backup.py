"""A backup that is brought up to date: what is copied, what leaves it, what it refuses, and runs that die."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sessions.errors import RecordDamaged, StoreHeld, StoreUnusable
from holdfast.sessions.journal import admin
from holdfast.sessions.journal.folder import IDENTITY
from holdfast.sessions.journal.lock import StoreLock
from holdfast.sessions.journal.store import JournalStore
from holdfast.tests.stored_files import bytes_below

from .bad_disks import BadDisk, Crash
from .journal_stage import MODEL, SMALL, folder, started
from .test_admin import begun, events, whole

PARTS = replace(SMALL, segment_bytes=1 << 14)
"""Logs that are sealed after some sessions."""
OTHER = b"another model"
OLD = set(range(1, 16))
NEW = OLD - {2, 14} | {16, 17}
BESIDE, AFTER = {101}, {101, 102}
"""The sessions of the other model, before and after."""


def serving(path: Path, model: bytes = MODEL) -> AbstractContextManager[JournalStore]:
    return started(path, model, PARTS)


def filled(path: Path) -> None:
    """A store with the sessions `OLD`, and one beside it of another model."""
    with serving(path) as store:
        for number in sorted(OLD):
            store.write(begun(number))
    with serving(path, OTHER) as store:
        store.write(begun(101))


def changed(path: Path) -> None:
    """The sessions are `NEW`, and those of the other model are two: one was erased from each log that it was
    in."""
    with serving(path) as store:
        store.erase([2, 14], deleted=True)
        store.rewrite()
        for number in sorted(NEW - OLD):
            store.write(begun(number))
    with serving(path, OTHER) as store:
        store.write(begun(102))


def backup(path: Path, target: Path, disk: BadDisk | None = None) -> list[str]:
    return list(admin.backup(path, target, disk=disk))


def verified(target: Path) -> list[str]:
    """What is damaged in a store."""
    damage: list[str] = []
    list(admin.verify(target, damage))
    return damage


def had(target: Path) -> tuple[set[int], ...] | None:
    """The sessions in a backup, of either model; None if there is none."""
    found = []
    for journal in admin.journals(target):
        with closing(admin.opened(journal)) as store:
            found.append({number for number, state in store.sessions.states.items() if state.kept})
    return tuple(found) or None


def restored(target: Path) -> tuple[set[int], set[int]]:
    """The sessions that a server has, of either model, that starts with a copy of the backup."""
    with folder() as path:
        copy = path / "copy"
        shutil.copytree(target, copy)
        found = []
        for model in (MODEL, OTHER):
            with serving(copy, model) as store:
                assert not store.mismatches[model == OTHER :] and not store.damaged()
                numbers = {number for number, state in store.sessions.states.items() if state.kept}
                assert all(events(store, number) == whole(number) for number in numbers)
                found.append(numbers)
        assert not {one.name for one in copy.iterdir()} & {"backup.next", "backup.whole"}
        return found[0], found[1]


def files(target: Path) -> dict[str, int]:
    """The numbers of the files of the logs in a backup, by name."""
    return {str(one.relative_to(target)): one.stat().st_ino for one in target.rglob("*.log")}


def contents(target: Path) -> dict[Path, bytes]:
    """All files, without the one by which a store is locked."""
    found = [target, *target.rglob("*")]
    return {one: one.read_bytes() for one in found if one.is_file() and one.name != "lock"}


def text(number: int) -> bytes:
    return f"<{number}-".encode()


def test_the_next_run_copies_only_what_is_new_and_the_copy_is_whole() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        before = files(target)
        assert restored(target) == (OLD, BESIDE) and len(before) > 2
        with serving(path) as store:
            store.write(begun(16))
            lines = backup(path, target)  # a server runs
        after = files(target)
        same = {name for name, number in after.items() if before.get(name) == number}
        assert len(same) >= len(before) - 2 and len(after) > len(same)
        assert f"{len(after) - len(same) - 1} of {len(after) - 1} logs copied" in lines[0]
        assert restored(target) == (OLD | {16}, BESIDE) and not verified(target)


def test_what_was_erased_leaves_the_backup_with_the_next_run() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        assert text(2) in bytes_below(target)
        changed(path)
        backup(path, target)
        assert restored(target) == (NEW, AFTER) and not verified(target)
        assert text(2) not in bytes_below(target) and text(14) not in bytes_below(target)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        pytest.param(0, False, id="the second dies"),
        pytest.param(errno.ENOSPC, False, id="the second has no room", marks=pytest.mark.slow),
        pytest.param(0, True, id="the first dies", marks=pytest.mark.slow),
        pytest.param(errno.EIO, False, id="the second fails", marks=pytest.mark.slow),
    ],
)
def test_wherever_a_run_ends_it_is_the_backup_of_before_or_the_new_one(error: int, first: bool) -> None:
    with folder() as path, folder() as other:
        filled(path)
        if not first:
            backup(path, other / "before")
            changed(path)
        states = [None, (OLD, BESIDE)] if first else [(OLD, BESIDE), (NEW, AFTER)]
        seen, at, ended = [], 0, False
        while not ended:
            at, target = at + 1, other / "copy"
            shutil.rmtree(target, ignore_errors=True)
            if not first:
                shutil.copytree(other / "before", target)
            disk = BadDisk()
            disk.arm(at, error)
            try:
                backup(path, target, disk)
                ended = True
            except (Crash, StoreUnusable):
                pass
            found = had(target)
            assert found in states and not verified(target), at
            if not first:
                assert restored(target) == found, at
            seen.append(states.index(found))
            backup(path, target)
            assert had(target) == states[1] and not verified(target)
            assert first or text(2) not in bytes_below(target)
        assert at > 20 and sorted(seen) == seen and set(seen) == {0, 1}


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.sessions.journal import admin
from holdfast.tests.sessions.journal.bad_disks import BadDisk

class Killed(BadDisk):
    def _raise(self):
        os.kill(os.getpid(), signal.SIGKILL)

disk = Killed()
disk.arm(int(sys.argv[3]))
list(admin.backup(Path(sys.argv[1]), Path(sys.argv[2]), disk=disk))
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 20, 40])
def test_a_run_that_is_killed_leaves_the_backup_of_before_or_the_new_one(at: int) -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        changed(path)
        words = [sys.executable, "-c", KILLED, str(path), str(target), str(at)]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
        assert not verified(target) and restored(target) in ((OLD, BESIDE), (NEW, AFTER))
        backup(path, target)
        assert restored(target) == (NEW, AFTER)


def test_a_server_that_starts_with_a_backup_puts_in_place_what_a_dead_run_left() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        changed(path)
        at = 0
        while not (target / "backup.whole").exists():
            disk, at = BadDisk(), at + 1
            disk.arm(at)
            with pytest.raises(Crash):
                backup(path, target, disk)
        assert list(admin.gc(target)) and not (target / "backup.whole").exists()
        assert restored(target) == (NEW, AFTER) and text(2) not in bytes_below(target)


def test_a_folder_that_is_no_backup_of_this_store_is_refused_and_stays_as_it_is() -> None:
    with folder() as path, folder() as other:
        filled(path)
        backup(path, other / "served")
        with serving(other / "served") as store:
            store.write(begun(77))
        filled(other / "foreign-store")
        backup(other / "foreign-store", other / "foreign")
        filled(other / "own")
        (other / "papers").mkdir()
        (other / "papers" / "letter.txt").write_text("dear")
        (other / "photos").mkdir()
        (other / "photos" / "kv").mkdir()
        (other / "file").write_text("dear")
        for name, why in (
            ("served", "a store, not a backup"),
            ("foreign", "backup of another store"),
            ("own", "a store, not a backup"),
            ("papers", "letter.txt"),
            ("photos", "holds kv, and no backup"),
            ("file", "not a folder"),
        ):
            before = contents(other / name)
            with pytest.raises(StoreUnusable, match=why):
                backup(path, other / name)
            assert before == contents(other / name)


def test_a_store_that_has_lost_something_does_not_replace_its_backup() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        shutil.copytree(path, other / "earlier")
        changed(path)
        backup(path, target)
        with pytest.raises(StoreUnusable, match="lost or never had"):
            backup(other / "earlier", target)
        min((path / "journal").glob("*.log")).unlink()
        with pytest.raises(StoreUnusable, match=r"stays as it is, because .*gone"):
            backup(path, target)
        (model,) = path.glob("model-*")
        shutil.rmtree(model)
        with pytest.raises(StoreUnusable, match="has no more"):
            backup(path, target)
        assert restored(target) == (NEW, AFTER)
        with StoreLock(target).acquire(0.0), pytest.raises(StoreHeld, match=str(os.getpid())):
            backup(path, target)


Loss = Callable[[Path, Path], None]


def a_log_is_gone(path: Path, earlier: Path) -> None:
    log = min((path / "journal").glob("*.log"))
    log.unlink()
    log.with_suffix(".index").unlink()


def a_log_loses_its_end(path: Path, earlier: Path) -> None:
    log = max((path / "journal").glob("*.log"))
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])


def it_is_an_earlier_copy(path: Path, earlier: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(earlier, path)


@pytest.mark.parametrize("loss", [a_log_is_gone, a_log_loses_its_end, it_is_an_earlier_copy])
def test_a_loss_that_servers_have_started_with_does_not_replace_the_backup(loss: Loss) -> None:
    with folder() as other:
        path, target = other / "store", other / "copy"
        with serving(path) as store:
            for number in range(1, 7):
                store.write(begun(number))
        shutil.copytree(path, other / "earlier")
        with serving(path) as store:
            for number in range(7, 10):
                store.write(begun(number))
        backup(path, target)
        loss(path, other / "earlier")
        for number in (10, 11, 12):
            with serving(path) as store:
                store.write(begun(number))
            with pytest.raises(StoreUnusable, match=r"[1-9] of its 9 sessions .* keep this one"):
                backup(path, target)
        assert had(target) == ({*range(1, 10)},) and not verified(target)
        backup(path, other / "another")
        with serving(path) as store:
            store.write(begun(13))
        backup(path, other / "another")


class Life:
    """A store, its backup, and what the backup has; ``owed``: the store has lost something, and no backup in a
    new folder was begun since a server started with that."""

    def __init__(self, root: Path, dice: Random) -> None:
        self.root, self.dice, self.store = root, dice, root / "store"
        self.names, self.next = (root / str(number) for number in count()), 1
        self.target, self.has = next(self.names), dict[int, list[str]]()
        self.erased, self.earlier = set[int](), list[Path]()
        self.lost = self.owed = False

    def serve(self) -> None:
        """A server runs for a while. It may be killed, and a backup be made while it runs."""
        with serving(self.store) as store:
            self.lost = False
            for _ in range(self.dice.randrange(6)):
                store.write(begun(self.next))
                self.next += 1
                kept = [one.number for one in store.sessions.states.values() if one.kept]
                match self.dice.randrange(8):
                    case 0:
                        self.erased.add(gone := self.dice.choice(kept))
                        store.erase([gone], deleted=self.dice.random() < 0.5)
                    case 1:
                        store.logs.roll()
                    case 2:
                        store.rewrite()
                    case 3:
                        self.backup()
            if self.dice.random() < 0.3:
                shutil.copytree(self.store, killed := next(self.names))
                self.store = killed

    def keep(self) -> None:
        shutil.copytree(self.store, kept := next(self.names))
        self.earlier.append(kept)

    def lose(self) -> None:
        logs = sorted((self.store / "journal").glob("*.log"))
        how = self.dice.choice(["gone", "cut", "flipped", *["back"] * bool(self.earlier)])
        if how == "back":
            shutil.copytree(self.dice.choice(self.earlier), back := next(self.names))
            self.store = back
        elif logs:
            log = self.dice.choice(logs)
            if self.dice.random() < 0.5:
                log.with_suffix(".index").unlink(missing_ok=True)
            data = bytearray(log.read_bytes())
            log.unlink()
            if how == "cut":
                log.write_bytes(data[: self.dice.randrange(len(data))])
            elif how == "flipped":
                data[self.dice.randrange(len(data))] ^= 1
                log.write_bytes(data)
        self.lost = self.owed = True

    def backup(self) -> None:
        """Nothing but what was erased leaves it; and it is refused only if something was lost."""
        try:
            backup(self.store, self.target)
        except StoreUnusable:
            assert self.owed and sessions_in(self.target) == self.has
            return
        found = sessions_in(self.target)
        for number, said in self.has.items():
            if number not in self.erased:
                assert found.get(number) == said, number
        self.has = found

    def begin_another(self) -> None:
        """The operator takes the loss as it is, and begins a new backup."""
        self.target, self.has = next(self.names), {}
        self.owed = self.lost
        self.backup()


STEPS = ("serve", "serve", "keep", "lose", "backup", "backup", "begin_another")


def sessions_in(target: Path) -> dict[int, list[str]]:
    """The sessions in a backup that are whole, with their events."""
    found = dict[int, list[str]]()
    for journal in admin.journals(target):
        with closing(admin.opened(journal)) as store:
            for number, state in store.sessions.states.items():
                with suppress(RecordDamaged):
                    if state.kept:
                        found[number] = events(store, number)
    return found


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(STEPS), max_size=16))
def test_whatever_is_lost_only_what_was_erased_leaves_a_backup(dice: Random, steps: list[str]) -> None:
    with folder() as root:
        life = Life(root, dice)
        for step in ["serve", *steps, "backup"]:
            getattr(life, step)()


def flip(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    log.write_bytes(data)


def test_damage_in_a_backup_is_copied_anew_and_damage_in_the_store_stays_out() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        flip(target / "journal" / "00000001.log")
        assert verified(target)
        backup(path, target)
        assert not verified(target) and restored(target) == (OLD, BESIDE)
        flip(path / "journal" / "00000001.log")
        assert verified(path)
        backup(path, target)
        assert not verified(target) and restored(target) == (OLD, BESIDE)


def test_damage_that_comes_along_is_told() -> None:
    with folder() as path, folder() as other:
        filled(path)
        flip(path / "journal" / "00000001.log")
        damage: list[str] = []
        list(admin.backup(path, other / "copy", damage))
        assert damage and verified(other / "copy")


def test_a_tenant_that_is_erased_from_a_backup_leaves_it_a_backup() -> None:
    with folder() as path, folder() as other:
        filled(path)
        target = other / "copy"
        backup(path, target)
        list(admin.erase(target, admin.of_tenant(b"")))
        assert had(target) == (set(), set())
        backup(path, target)
        assert restored(target) == (OLD, BESIDE)
        changed(path)
        backup(path, target)
        assert restored(target) == (NEW, AFTER) and (target / IDENTITY).exists()
