"""``holdfast store``: maintains the sessions and the KV of a store while no server runs on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...runtime.errors import RuntimeFault, SettingsInvalid
from ...runtime.kv_placement.store_admin import tend
from ...sdk.errors import SDKError
from ...sessions.errors import SessionError
from ...sessions.journal import admin
from ..access.auth import salt_of
from ..access.tenants import Tenants
from ..errors import KeysUnusable
from ..settings import GatewaySettings
from .options import refused

DAMAGED = 1


def keep(act: str, folder: Path, target: Path | None, tenant: str | None, keys: Path | None) -> int:
    """Run the action ``act`` of ``holdfast store`` on the store in ``folder``, and print its lines. ``target``:
    for ``backup``, the folder of the copy, new or with an earlier one. ``tenant``: for ``erase``, the tenant's
    name. ``keys``: for ``erase``, a keys file that must have that tenant; None: not checked. Returns the exit
    code: 0, 1 if something is damaged, 2 if it cannot be done."""

    damage: list[str] = []
    return code_of(lambda: _lines(act, folder, target, tenant, keys, damage)) or (DAMAGED if damage else 0)


def code_of(lines: Callable[[], Iterable[str]]) -> int:
    """Print the ``lines`` of a command. Returns its exit code: 0, or 2 with the cause on stderr if it cannot be
    done."""
    logging.disable(logging.ERROR)  # the printed lines say it
    try:
        for line in lines():
            print(line)
        return 0
    except (RuntimeFault, SDKError, SessionError, KeysUnusable) as fault:
        return refused(fault.message)
    except OSError as fault:
        return refused(str(fault))
    finally:
        logging.disable(logging.NOTSET)


def _lines(
    act: str, folder: Path, target: Path | None, tenant: str | None, keys: Path | None, damage: list[str]
) -> Iterator[str]:
    """The lines of an action, as `keep` has it. ``damage`` gets what is damaged."""
    if tenant == "":
        raise SettingsInvalid("--tenant is empty")
    if tenant is not None and keys is not None:
        found = Tenants.of(GatewaySettings(keys=keys))
        if found.keys is None or tenant not in found.keys.tenants.values():
            raise SettingsInvalid(f"{keys} has no tenant {tenant!r}")
    kv, journal = (folder / "kv").is_dir(), bool(admin.journals(folder))
    if not journal and (not kv or act in ("repair", "backup", "erase")):
        raise SettingsInvalid(f"{folder}: " + ("no store" if folder.is_dir() else "no such folder"))
    sessions: dict[str, Callable[[], Iterator[str]]] = {
        "stat": lambda: admin.stat(folder),
        "verify": lambda: admin.verify(folder, damage),
        "gc": lambda: admin.gc(folder),
        "repair": lambda: admin.repair(folder),
        "backup": lambda: admin.backup(folder, target or folder, damage),
        "erase": lambda: admin.erase(folder, admin.of_tenant(salt_of(tenant or ""))),
    }
    if journal and act in sessions:
        yield from sessions[act]()
    if kv and act in ("stat", "verify", "gc", "clear"):
        yield from tend(act, folder)
    if kv and act == "erase":  # only a server's secret tells which KV is a tenant's: all is computed again
        yield from tend("clear", folder)
    if not kv and act == "clear":
        raise SettingsInvalid(f"{folder}: no KV")
