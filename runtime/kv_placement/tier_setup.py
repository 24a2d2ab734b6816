"""Sets up the tiers below the device: their sizes, the host tier's memory, the store's secret.

The process that outlives the engine makes the memory and hands it to each engine, so that the next one
adopts the records of the last. Reads the machine's limits; knows no torch and no device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
from pathlib import Path

import msgspec

from ...kvstore import reserve, system_limits
from ...kvstore.disk import admin
from ...kvstore.disk.client import ask
from ...kvstore.disk.messages import Begin
from ...kvstore.disk.store import clear
from ...kvstore.errors import KVStoreError
from ...kvstore.folder_lock import make_private
from ...kvstore.host.slots import SlotMemory, make_memory
from ...kvstore.keys import BlockHasher
from ...kvstore.options import expanded
from ...kvstore.quotas import tenant_of
from ...kvstore.system_limits import explained
from ...kvstore.tier import Reach
from ...kvstore.tiers import Tiers
from ..errors import SettingsInvalid
from ..settings import SECRET_BYTES, EngineSettings
from .sizing import check_budget, machine_bytes, shown

SHARE = 0.125  # of all memory; pages are taken a little before KV comes
MOST_BYTES = 64 << 30
DISK_SHARE = 0.25  # of what is free; the journal and others need the rest
MOST_DISK_BYTES = 64 << 30
MARGIN_SHARE = 4
"""Of the journal's reserve KV leaves one part in so many more: others may fill the disk quickly."""

log = logging.getLogger(__name__)


def host_bytes(settings: EngineSettings) -> int:
    """How many bytes the host tier gets: as asked, or a share of the machine's memory; 0: there is no host
    tier.

    Raises `SettingsInvalid`: more was asked for than the machine has.
    """
    if settings.host_bytes is not None:
        check_budget("--host-bytes", settings.host_bytes, machine_bytes(), "this machine's memory")
        return settings.host_bytes
    return min(MOST_BYTES, int(SHARE * machine_bytes()), system_limits.file_bytes() or MOST_BYTES)


def host_memory(settings: EngineSettings) -> int | None:
    """Make the memory of the host tier; returns its file descriptor. None where the settings want no host
    tier.

    Raises `SettingsInvalid`: a limit of this process does not allow it.
    """
    size = host_bytes(settings)
    try:
        return make_memory(size) if size else None
    except OSError as error:
        raise SettingsInvalid(explained(error, f"the host tier's memory of {size} bytes")) from error


def host_slots(settings: EngineSettings, fd: int | None, space: bytes, block_bytes: int) -> SlotMemory | None:
    """The slots of the host tier in the memory ``fd`` (None: in memory of its own), with the records that an
    earlier engine left there in the same record ``space`` (`BlockHasher.space`). None where there is no host
    tier, or no room for a block.

    Raises `SettingsInvalid`: a limit of this process does not allow it.
    """
    used = host_memory(settings) if fd is None else fd
    if used is None:
        return None
    try:
        memory = SlotMemory(used, space, block_bytes)
    finally:
        if fd is None:
            os.close(used)
    return memory if memory.slots else None


def kv_folder(settings: EngineSettings) -> Path | None:
    """The folder of KV on disk, ``kv`` in the store; None without a store."""
    return None if settings.store is None else expanded(settings.store) / "kv"


def disk_floor(settings: EngineSettings, folder: Path) -> int:
    """How many bytes KV leaves free on the disk of ``folder``: a margin, and the journal's reserve if the
    journal is on the same disk."""
    margin = settings.disk_reserve // MARGIN_SHARE
    return margin if journal_reserve(folder) is None else settings.disk_reserve + margin


def journal_reserve(folder: Path) -> Path | None:
    """The file of the journal's reserve, of which the bytes count as free; None if the journal is on another
    disk than KV. ``folder``: of KV in the store."""
    shared = folder.stat().st_dev == folder.parent.stat().st_dev
    return folder.parent / reserve.NAME if shared else None


def disk_room(settings: EngineSettings, folder: Path) -> int:
    """How many bytes KV could take under ``folder`` now: those free beyond the floor (`disk_floor`), and
    those it has."""
    held = reserve.held_by(journal_reserve(folder)) + admin.file_bytes(folder)
    return max(0, shutil.disk_usage(folder).free + held - disk_floor(settings, folder))


def clipped(settings: EngineSettings) -> str | None:
    """A line for the operator if the disk has less room for KV than it was given; None if it has enough."""
    folder = kv_folder(settings)
    if folder is None or not folder.is_dir():
        return None
    asked, room = disk_bytes(settings, folder), disk_room(settings, folder)
    if asked <= room:
        return None
    return (
        f"KV on disk is clipped to {shown(room)} of the {shown(asked)} of --disk-bytes:"
        f" the disk of {folder} has {shown(shutil.disk_usage(folder).free)} free,"
        f" of which KV leaves {shown(disk_floor(settings, folder))}; it grows when there is room"
    )


def file_bytes(store: Path) -> int:
    """How many bytes of the store's disk KV has, and gives back when needed; 0 if KV lies on another disk."""
    kv = store / "kv"
    try:
        return admin.file_bytes(kv) if journal_reserve(kv) else 0
    except OSError:
        return 0


def make_room(settings: EngineSettings) -> None:
    """Evict KV of an earlier start if it leaves the journal no room. Call it before the journal is opened."""
    folder = kv_folder(settings)
    if folder is not None and folder.is_dir():
        floor = disk_floor(settings, folder)
        held = reserve.held_by(journal_reserve(folder))
        if shutil.disk_usage(folder).free + held < min(floor, settings.disk_reserve):
            admin.give_back(folder, floor - held)


def disk_bytes(settings: EngineSettings, folder: Path) -> int:
    """How many bytes records may take under ``folder``, which exists, as long as the disk has room
    (`disk_room`): as asked, or a share of that room.

    Raises `SettingsInvalid`: more was asked for than the disk has.
    """
    if settings.disk_bytes is not None:
        check_budget("--disk-bytes", settings.disk_bytes, shutil.disk_usage(folder).total, "the store's disk")
        return settings.disk_bytes
    return min(MOST_DISK_BYTES, int(DISK_SHARE * disk_room(settings, folder)))


def with_secret(settings: EngineSettings) -> EngineSettings:
    """The settings with a secret, so that all engines give blocks the same keys; with a store, also after a
    restart.

    Raises `SettingsInvalid`: the store cannot be written.
    """
    if settings.secret:
        return settings
    folder = kv_folder(settings)
    secret = secrets.token_bytes(SECRET_BYTES) if folder is None else _kept_secret(folder)
    return msgspec.structs.replace(settings, secret=secret)


def asked_disk(control: int) -> socket.socket:
    """Ask the `DiskProcess` behind the descriptor ``control`` for a disk process, which starts while the engine
    loads. Returns the descriptor's socket."""
    sock = socket.socket(fileno=control)
    sock.set_inheritable(False)
    ask(sock)
    return sock


def open_tiers(
    settings: EngineSettings,
    memory: SlotMemory,
    control: socket.socket | None,
    hasher: BlockHasher,
    namespace: bytes,
    reach: Reach,
) -> Tiers:
    """The host tier in ``memory``, and the disk below it where there is a store. A `DiskProcess` that was asked
    for a disk process (`asked_disk`) is at the other end of the socket ``control``, which is taken over; None:
    there is none. ``reach``: see `Tiers`."""
    folder, disk = kv_folder(settings), None
    if control is not None and folder is not None:
        caps = {
            tenant_of(hasher.root(namespace, one.salt)): one.disk_bytes
            for one in settings.tenants
            if one.disk_bytes is not None
        }
        budget, floor, space = disk_bytes(settings, folder), disk_floor(settings, folder), memory.space
        store = str(folder / space.hex()), space, memory.block_bytes, budget, caps, floor
        disk = control, Begin(*store, reserve=str(journal_reserve(folder) or ""))
    return Tiers.opened(memory, reach, disk, recheck=settings.debug)


def costs_file(settings: EngineSettings, space: bytes) -> Path | None:
    """The path of the file with the measured costs of a record space; None without a store."""
    folder = kv_folder(settings)
    return None if folder is None else folder / space.hex() / "costs.json"


def _kept_secret(folder: Path) -> bytes:
    """The secret in the file in ``folder``; the first call writes a new one. A damaged one is replaced: all
    KV that it named is removed, and has to be computed again.

    Raises `SettingsInvalid`: there is none, and it cannot be written.
    """
    path = folder / "secret"
    try:
        if folder.is_dir():
            make_private(folder)
        if not os.path.lexists(path):
            return _new_secret(path)
    except OSError as error:
        raise SettingsInvalid(explained(error, f"the KV secret {path}")) from error
    try:
        found = path.read_bytes()
        if len(found) == SECRET_BYTES:
            return found
        cause = f"{path} holds {len(found)} bytes, not {SECRET_BYTES}"
    except OSError as error:
        cause = explained(error, f"the KV secret {path}")
    return _another_secret(path, cause)


def _another_secret(path: Path, cause: str) -> bytes:
    """Remove all KV beside ``path``, and write another secret there. Returns it. If the disk refuses to write
    it, a secret is returned all the same, for this start only. ``cause``: what was wrong with the old one,
    for the log."""
    for beside in path.parent.iterdir():
        with contextlib.suppress(OSError, KVStoreError):
            if beside.is_dir():
                clear(beside)  # records that cannot be found any more, or a folder in the secret's place
    try:
        path.unlink(missing_ok=True)
        secret = _new_secret(path)
    except OSError as error:
        log.warning("%s: KV begins anew at each start, as %s", cause, explained(error, "another secret"))
        return secrets.token_bytes(SECRET_BYTES)
    log.warning("%s: KV begins anew, sessions are not touched", cause)
    return secret


def _new_secret(path: Path) -> bytes:
    """Write a new secret to ``path``, whole or not at all. If another process has written one there
    meanwhile, that one stays. Returns the secret that is in the file."""
    make_private(path.parent.parent)
    make_private(path.parent)
    fresh = path.with_name(f"secret.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return path.read_bytes()
