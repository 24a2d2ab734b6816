"""Administration of a journal for the command line: stat, verify, repair, backup, gc, erase a tenant.

Each function yields lines to print. None loads a model. `stat`, `verify` and `backup` only read, and may run
beside a server; the others hold the store's lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from ..errors import RecordDamaged, SessionError, StorageUnavailable, StoreUnusable
from ..settings import JournalSettings
from .backup import MODELS, NEXT, commit, copy_logs, current, finish
from .folder import FOLDER, Disk, Identity, named, read_identity, refuse_lmdb, write_identity
from .lock import FILE as LOCK
from .lock import StoreLock
from .logs import Findings, LogFolder
from .model_store import ASIDE, REPAIRED, awaits_repair, exchange, finish_repair
from .records import AnyOperation, Keyring, append, drop, extra_of, put
from .replay import MANY_ITEMS, quiet, replay
from .segment import Fresh, Kind
from .session_states import SessionState
from .state import DIGEST_BYTES
from .store import JournalStore

SETTINGS = JournalSettings(max_bytes=1 << 62)
LOCK_SECONDS = 1.0
EMPTY = frozenset({LOCK, NEXT, "lost+found"})
"""Names in a folder that is as good as empty, for a backup."""


def journals(root: Path) -> list[Path]:
    """The folders that have a journal: ``root``, the store's folder, and those of other models below it. Of a
    backup that is whole and not in place yet, it is those of that one. Raises ``StoreUnusable``."""
    root = current(root)
    found = [root, *sorted(root.glob(MODELS))]
    for folder in found:
        refuse_lmdb(folder)
    return [folder for folder in found if (folder / FOLDER).is_dir() or awaits_repair(folder, SETTINGS)]


@contextmanager
def _held(root: Path) -> Iterator[None]:
    """Hold the lock of the store in ``root`` to change it. Raises ``StoreHeld``, ``StoreUnusable``."""
    with StoreLock(root).acquire(LOCK_SECONDS):
        try:
            finish(root, Disk())
        except OSError as fault:
            raise StoreUnusable(f"the backup in {root} cannot be put in place: {fault}") from None
        yield


def opened(folder: Path, *, write: bool = False, whole: bool = True) -> JournalStore:
    """Open the journal in ``folder``, of any model, and return its store; the caller closes it.
    ``write``: it is to be changed, and the caller holds the lock. ``whole``: read every log, not only the
    indexes. Raises ``StoreUnusable``."""
    _check_repaired(folder)
    return JournalStore(folder, b"", SETTINGS, known=_known(folder), write=write, whole=whole)


def _check_repaired(folder: Path) -> None:
    if awaits_repair(folder, SETTINGS):
        raise StoreUnusable(f"{folder}: a repair did not end: repair it again, or start a server with it")


@contextmanager
def locked(root: Path) -> Iterator[list[JournalStore]]:
    """Lock the store in ``root``, and open its journals to read them in the block, of every model. Raises
    ``StoreUnusable``, ``StoreHeld`` if a server runs on it."""
    with ExitStack() as stack:
        stack.enter_context(StoreLock(root).acquire(LOCK_SECONDS))
        yield [stack.enter_context(closing(opened(folder, whole=False))) for folder in journals(root)]


def stat(root: Path) -> Iterator[str]:
    """Yield a line for each journal below ``root``: its sessions and its bytes. Changes nothing. Raises
    ``StoreUnusable``."""
    for folder in journals(root):
        with closing(opened(folder, whole=False)) as store:
            yield _account(folder, store)


def verify(root: Path, damage: list[str]) -> Iterator[str]:
    """Read and check every record, and yield lines to print. A line for each damage is added to ``damage``,
    too. Raises ``StoreUnusable``."""
    for folder in journals(root):
        known = _known(folder)
        with closing(opened(folder)) as store:
            found = [*_damage(store), *_differs(known and known.without_removed(_known(folder)), store)]
            yield f"{_account(folder, store)}, {len(found)} damaged"
            yield from (f"  damaged: {line}" for line in found)
            damage += found


def _known(folder: Path) -> Identity | None:
    """The journal's identity; None if it is absent or cannot be read."""
    with suppress(ValueError):
        return read_identity(folder)
    return None


def _differs(known: Identity | None, store: JournalStore) -> list[str]:
    """One line that says how the journal differs from the identity ``known``, in a list; an empty list if it
    does not, or if there is no identity."""
    return [line] if known is not None and (line := store.logs.mismatch(known)) else []


def _account(folder: Path, store: JournalStore) -> str:
    told = store.statistics()
    kept = sum(state.kept for state in store.sessions.states.values())
    return (
        f"{folder / FOLDER}: {kept} sessions, {int(told['journal_live_bytes'])} bytes"
        f" in {int(told['journal_logs'])} logs of {int(told['journal_bytes'])}"
    )


def _damage(store: JournalStore) -> list[str]:
    """Read every session that is kept. Returns a line for each damaged session and log, and one with the
    number of lost records of unknown sessions."""
    for state in list(store.sessions.states.values()):
        if state.kept:
            with suppress(RecordDamaged):
                store.session(state.number)
    sessions = [f"session {store.name_of(number)}" for number in store.damaged()]
    logs = [f"log {path}" for path in dict.fromkeys(store.logs.findings.damaged)]
    lost = store.logs.findings.lost
    return [*sessions, *logs, *([f"{lost} records of unknown sessions"] if lost else [])]


def repair(root: Path) -> Iterator[str]:
    """Rewrite damaged journals with everything that can be read; the damaged one is kept under another name.

    A damaged session is cut back to the last point before the damage where no response ran, or is lost. Raises
    ``StoreUnusable``.
    """
    with _held(root):
        for folder in journals(root):
            if finish_repair(folder, SETTINGS):
                yield f"{folder / FOLDER}: an earlier repair has ended now"
            with closing(opened(folder)) as store:
                if not _damage(store):
                    yield f"{folder / FOLDER}: nothing is damaged"
                    continue
                yield from _repaired(folder, store)


def _repaired(folder: Path, store: JournalStore) -> Iterator[str]:
    fresh = folder / REPAIRED
    shutil.rmtree(fresh, ignore_errors=True)
    model = store.logs.header.model
    logs = LogFolder(fresh, model, SETTINGS.log_bytes, Disk())
    logs.generation = store.logs.generation
    told: list[str] = []
    damaged = set(store.damaged())
    try:
        states = store.sessions.states.values()
        gone = {state.number for state in states if not state.kept and not _is_whole(store, state)}
        alone = damaged | store.sessions.descendants(*damaged, *gone)
        for state in sorted(store.sessions.states.values(), key=lambda state: state.last):
            if state.number in alone:
                told += _copy_alone(store, logs, state, state.number in damaged)
            elif state.number not in gone:
                _copy(store, logs, state)
        logs.append([Fresh(0, logs.generation, Kind.START, b"")])
        write_identity(folder, logs.identity(), Disk())
    except StorageUnavailable as fault:
        raise StoreUnusable(f"{folder / FOLDER} cannot be repaired: {fault.message}") from None
    finally:
        logs.close()
    aside = exchange(folder)
    yield f"{folder / FOLDER}: rewritten; the damaged one is {aside}"
    yield from (f"  {line}" for line in told)
    if lost := store.logs.findings.lost:
        yield f"  lost: {lost} records of unknown sessions"


def _is_whole(store: JournalStore, state: SessionState) -> bool:
    try:
        store.record(state.number)
        store._operations(state)
    except RecordDamaged:
        return False
    return True


def _copy(store: JournalStore, logs: LogFolder, state: SessionState) -> None:
    """Copy a session's records from ``store`` into ``logs``, the repaired ones, as they are; a fork stays a
    fork. Raises ``RecordDamaged``."""
    record = store.record(state.number)
    group = [put(state.number, record)]
    if state.kept and state.ring:
        payload = store.logs.read(state.ring).payload
        group.append(Fresh(state.number, 0, Kind.KEYRING, payload, extra_of(Kind.KEYRING, payload)))
    for index, location in enumerate(state.operations, state.first):
        group.append(Fresh(state.number, index, state.kind_at(index), store.logs.read(location).payload))
    if not state.kept:
        group.append(drop(state.number))
    logs.append(group, state.used)


def _copy_alone(store: JournalStore, logs: LogFolder, state: SessionState, damaged: bool) -> Iterator[str]:
    """Copy a session from ``store`` into ``logs``, the repaired ones. A fork becomes a session of its own, with
    the operations of its origin. Operations behind damage are left out; if nothing before it is whole, the
    session is not copied. Yields lines to print that say so. ``damaged``: one of the session's own records is
    damaged."""
    name, number = store.name_of(state.number), state.number
    if not state.kept:
        return
    try:
        record = replace(store.record(number), origin=None)
    except RecordDamaged:
        yield f"lost: session {name}: its record is damaged"
        return
    operations, missed = _until_damage(store, state)
    if missed:
        operations = operations[: quiet(operations)]
    if missed and not operations:
        yield f"lost: session {name}: nothing before the damage is whole"
        return
    group = [put(number, record), _ring(store, state)]
    group += [append(number, index, operation) for index, operation in enumerate(operations)]
    logs.append(group, state.used)
    if missed:
        yield f"cut back: session {name}: {len(operations)} operations are whole, {missed} and more are not"
    elif damaged:
        yield f"mended: session {name}: its keyring was damaged, its handles are known"


def _until_damage(store: JournalStore, state: SessionState) -> tuple[list[AnyOperation], int]:
    """The session's operations before the first damaged one, as far as they can be replayed, and how many
    operations are missing then: 0 if none is damaged."""
    found: list[AnyOperation] = []
    try:
        needed = list(store.sessions.needed(state.number))
    except RecordDamaged:
        return [], 1
    for owner, index, location in needed:
        try:
            found.append(store._decoded(location, owner.kind_at(index), owner.number, index, AnyOperation))
        except RecordDamaged:
            return _replayable(found), len(needed) - len(found)
    return found, 0


def _replayable(operations: list[AnyOperation]) -> list[AnyOperation]:
    """The longest beginning of the operations that can be replayed."""
    while operations:
        try:
            replay(operations, max_items=MANY_ITEMS)
        except SessionError:
            operations = operations[:-1]
        else:
            break
    return operations


def _ring(store: JournalStore, state: SessionState) -> Fresh:
    """The change that writes the session's keyring. If the keyring is damaged, it is made from the digests in
    the index."""
    try:
        ring = store._decoded(state.ring, Kind.KEYRING, state.number, 0, Keyring)
    except RecordDamaged:
        torn = store.sessions.torn.get(state.number, b"")
        ring = Keyring(fresh=tuple(torn[at : at + DIGEST_BYTES] for at in range(0, len(torn), DIGEST_BYTES)))
    return put(state.number, ring)


def backup(
    root: Path, target: Path, damage: list[str] | None = None, disk: Disk | None = None
) -> Iterator[str]:
    """Copy the journals to ``target``, up to the last group of records that is whole; a server may run
    meanwhile. KV is not copied: it is recomputed. If ``target`` has a backup of this store, that is brought up
    to date: only logs that are new or not sealed are copied (`backup`). Yields lines to print. A line for each
    damage in the copy is added to ``damage``, too. ``disk``: the calls on files.

    Raises ``StoreUnusable``, also if ``target`` holds anything else, or if journals were lost or rolled back
    since: then it is as it was.
    """
    if target.resolve().is_relative_to(root.resolve()):
        raise StoreUnusable(f"{target} is inside the store {root}: choose a folder outside it")
    if target.exists() and not target.is_dir():
        raise StoreUnusable(f"{target} is not a folder")
    disk = disk or Disk()
    with StoreLock(target).acquire(LOCK_SECONDS):
        try:
            finish(target, disk)
            told = _next(root, target, [] if damage is None else damage, disk)
            commit(target, disk)
        except OSError as fault:
            raise StoreUnusable(f"{root} cannot be copied to {target}: {fault}") from None
        finally:
            with suppress(OSError):  # the next run removes it
                disk.remove_folder(target / NEXT)
    yield from told


def _next(root: Path, target: Path, damage: list[str], disk: Disk) -> list[str]:
    """Write the next state of the backup in ``target``. Returns lines to print. Raises ``OSError``,
    ``StoreUnusable``."""
    there = current(root)
    names = [folder.relative_to(there) for folder in journals(root)]
    before = {folder.relative_to(target) for folder in journals(target)}
    if not before and (others := set(os.listdir(target)) - EMPTY):
        raise StoreUnusable(f"{target} holds {named(sorted(others))}, and no backup: choose another folder")
    if gone := sorted(before - {*names}):
        raise StoreUnusable(f"{target} has a journal that {root} has no more: {target / gone[0] / FOLDER}")
    lines: list[str] = []
    for name in names:
        _check_repaired(there / name)
        fresh, damaged, anew = target / NEXT / name, list[str](), set[str]()
        first = name not in before
        while True:
            copied = _copied(there / name, target / name, fresh, anew, disk, first=first)
            with closing(opened(fresh)) as store:
                again = {Path(one).name for one in store.logs.findings.damaged} - anew
                if not again or first:
                    damaged = _damage(store)
                    if damaged and not first:
                        _check_damage(there / name, target / name, store)
                    count = f"{copied} of {len(store.logs.logs)} logs copied"
                    lines.append(f"{_account(target / name, store)}, {count}")
                    break
            anew |= again  # those that were copied now are copied again, too: they are few
            disk.remove_folder(fresh)
        lines += (f"  damaged: {line}" for line in damaged)
        damage += damaged
    return lines


def _copied(folder: Path, had: Path, fresh: Path, anew: set[str], disk: Disk, *, first: bool) -> int:
    """Copy the journal in ``folder`` into the new folder ``fresh``, where its logs are not those of ``had``,
    the backup of before. ``first``: there is none. ``anew``: names of logs that are damaged there. Returns how
    many logs were copied. Raises ``OSError``, ``StoreUnusable``."""
    known = _known(folder)  # first: the logs may be ahead of it, never behind
    logs = LogFolder(folder / FOLDER, b"", SETTINGS.log_bytes, disk, known, write=False)
    with closing(logs):
        if logs.made and logs.findings.damaged:
            raise StoreUnusable(f"{folder / FOLDER}: none of its logs can be read: copy the folder itself")
        later, identity = _known(folder), logs.identity()
        known = known and known.without_removed(later)
        lost = logs.mismatch(known)
        if later is not None and identity.runs:  # with the run of a server that has just started
            begun = identity.generation > later.generation  # or its first record is all that it has
            identity = replace(identity, runs=later.runs, copied=identity.sequence - begun)
        if not first:
            _check_backup(folder, had, identity, next(iter(logs.vanished), lost))
        copied = copy_logs(logs, had / FOLDER, fresh / FOLDER, anew, disk)
        if known is not None and lost:  # so that the copy says it, too
            identity = replace(known, runs=())
        write_identity(fresh, replace(identity, backup=True), disk)
    return copied


def _check_backup(folder: Path, had: Path, identity: Identity, lost: str) -> None:
    """Raise ``StoreUnusable`` unless the folder ``had`` holds a backup that may give way to a copy of the
    journal in ``folder``. ``identity``: of that journal. ``lost``: what it has lost, as a sentence; or ""."""
    before = _known(had)
    why = ""
    if before is None or not before.backup:
        why = "holds a store, not a backup"
    elif before.store != identity.store:
        why = f"is the backup of another store than {folder}"
    elif not before.runs:
        why = f"cannot be compared with {folder}: an earlier version made it, or it was damaged then"
    elif lost:
        why = f"stays as it is, because {lost}{_missing(folder, had)}"
    elif not identity.follows(before):
        why = f"has what {folder} has lost or never had{_missing(folder, had)}"
    if why:
        raise StoreUnusable(f"{had} {why}: choose another folder for this store, and keep this one")


def _missing(folder: Path, had: Path) -> str:
    """How many sessions the backup in ``had`` has that the store in ``folder`` does not have, in brackets."""
    with closing(opened(folder, whole=False)) as store, closing(opened(had, whole=False)) as copy:
        kept = [number for number, state in copy.sessions.states.items() if state.kept]
        gone = sum(not store.sessions.states.keeps(number) for number in kept)
    return f" ({gone} of its {len(kept)} sessions and stored objects are not in the store)"


def _check_damage(folder: Path, had: Path, fresh: JournalStore) -> None:
    """Raise ``StoreUnusable`` if the backup in ``had`` has whole what is damaged in the ``fresh`` copy of the
    journal in ``folder``."""
    with closing(opened(had)) as copy:
        _damage(copy)
        lost = {*fresh.damaged()} - {*copy.damaged()}
        whole = [number for number in lost if copy.sessions.states.keeps(number)]
        if not whole and fresh.logs.findings.lost <= copy.logs.findings.lost:
            return
        what = [f"session {fresh.name_of(number)}" for number in sorted(whole)] or [
            "records of unknown sessions"
        ]
    raise StoreUnusable(
        f"{had} stays as it is, because it has whole what is damaged in {folder}: {named(what)}: "
        "choose another folder for this store, and keep this one"
    )


def gc(root: Path) -> Iterator[str]:
    """Rewrite the logs without the records that no session needs. Yields lines to print. Raises
    ``StoreUnusable``."""
    with _held(root):
        for folder in journals(root):
            with closing(opened(folder, write=True)) as store:
                before = store.logs.bytes
                yield from (f"{folder / FOLDER}: {line}" for line in _differs(_known(folder), store))
                _rewrite(store, folder)
                yield f"{_account(folder, store)}, {before - store.logs.bytes} bytes less"


def of_tenant(salt: bytes) -> Callable[[JournalStore], list[int]]:
    """Chooses all sessions and stored objects of a tenant, for `erase`."""

    def chosen(store: JournalStore) -> list[int]:
        states = store.sessions.states.values()
        return [state.number for state in states if state.salt == salt and state.kept]

    return chosen


def erase(root: Path, chosen: Callable[[JournalStore], list[int]]) -> Iterator[str]:
    """Forget the sessions that ``chosen`` chooses, by their numbers, and rewrite every log, so that nothing of
    them is left. Yields lines to print.

    Older copies, such as a damaged journal, are removed. Raises ``StoreUnusable``.
    """
    with _held(root):
        found = 0
        for folder in journals(root):
            with closing(opened(folder, write=True)) as store:
                numbers = chosen(store)
                found += len(numbers)
                yield from (f"{folder / FOLDER}: {line}" for line in _differs(_known(folder), store))
                try:
                    store.erase(numbers)
                except StorageUnavailable as fault:
                    raise StoreUnusable(f"{folder / FOLDER} cannot be written: {fault.message}") from None
                _rewrite(store, folder)
                left = f"{len(numbers)} sessions erased, {len(store.sessions.states)} are left"
                yield f"{folder / FOLDER}: {left}"
            older = {folder / REPAIRED, *folder.glob(f"{ASIDE}*"), *(folder / FOLDER).glob("*.unreadable")}
            for path in sorted(path for path in older if path.exists()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                yield f"{path}: removed"
        if not found:
            yield f"{root} has none of these sessions: is the name right? --keys FILE checks a tenant's"


def _rewrite(store: JournalStore, folder: Path) -> None:
    """Rewrite every log of the ``store`` in ``folder`` with the needed records alone. Raises
    ``StoreUnusable``."""
    store.logs.findings = Findings()
    try:
        store.rewrite()
    except StorageUnavailable as fault:
        raise StoreUnusable(f"{folder / FOLDER} cannot be rewritten: {fault.message}") from None
