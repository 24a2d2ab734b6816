"""The command line's actions on the KV of a store: stat, verify, gc, clear. Loads no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...kvstore.disk import admin
from ...kvstore.errors import KVStoreError
from ...kvstore.options import expanded
from ..errors import SettingsInvalid


def tend(act: str, store: Path) -> Iterator[str]:
    """Do ``act`` (stat, verify, gc or clear) to the KV in the folder ``store``. Yields lines to print: one
    for each kind of records (model and settings), and one for each tenant in it.

    Raises `SettingsInvalid`: it is no store, a server holds it, or it cannot be read.
    """
    kv = expanded(store) / "kv"
    if not kv.is_dir():
        raise SettingsInvalid(f"{store}: " + ("no store" if expanded(store).is_dir() else "no such folder"))
    try:
        if act == "clear":
            yield f"{admin.remove(kv)} kinds of records removed"
            return
        if not admin.spaces(kv):
            yield f"{kv}: no records"
        for account in admin.accounts(kv, act):
            checked = "" if act == "stat" else f", {account.damaged} damaged and dropped"
            yield (
                f"{account.name}: {account.records} records, {account.bytes} bytes"
                f" in a file of {account.file_bytes}{checked}"
            )
            for tenant, records in sorted(account.tenants.items(), key=lambda held: -held[1]):
                share = records * account.bytes // max(1, account.records)
                yield f"  tenant {tenant:016x}: {records} records, {share} bytes"
    except (KVStoreError, OSError, ValueError) as error:
        raise SettingsInvalid(str(error)) from error
