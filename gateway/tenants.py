"""Tenants as the keys file has them: whose keys they are, and how much each tenant may take.

Two forms. Lines of ``KEY TENANT`` set no limits. A file named ``*.toml`` may::

    [operators]           # they see everybody's numbers in /metrics
    keys = ["…"]

    [limits]              # of every tenant that does not say otherwise
    sessions = 100

    [tenants.acme]
    keys = ["…", "…"]
    turns = 16
    leased = "512MiB"

Gives each room its own part of the limits. Knows nothing of how they are held.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ..runtime.settings import TenantBudget
from ..sessions.settings import UNLIMITED, JournalShare, TenantLimits
from .auth import NAME, Keys, add_key, read_text, salt_of
from .errors import KeysUnusable
from .quotas import TENANT_QUOTAS, bytes_of
from .settings import GatewaySettings

ALLOWED = tuple(quota.name for quota in TENANT_QUOTAS)
"""The names of all limits."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one tenant may take; None: as much as there is."""

    sessions: int | None = None
    """Open at once."""
    kept: int | None = None
    """In the journal, open ones among them: the longest unused are forgotten first."""
    turns: int | None = None
    """Replies that run at once."""
    journal: int | None = None
    """Bytes of its sessions in the journal."""
    leased: int | None = None
    """Bytes of KV that its leases cover on the device, and as many in the host tier."""
    disk: int | None = None
    """Bytes of its KV on disk."""

    def __post_init__(self) -> None:
        for quota in TENANT_QUOTAS:
            value = getattr(self, quota.name)
            if value is not None and value < quota.least:
                raise KeysUnusable(f"{quota.name} = {value} is less than {quota.least}")
        if self.sessions is not None and self.kept is not None and self.kept < self.sessions:
            raise KeysUnusable(
                f"kept = {self.kept} is less than sessions = {self.sessions}, which are kept, too"
            )


NOTHING_SET = Allowance()


@dataclass(frozen=True, slots=True)
class Tenants:
    """Who may come in (``keys`` None: everybody on this machine), and the limits of those that have some.

    ``source``: the file they are from.
    """

    keys: Keys | None = None
    limits: Mapping[str, Allowance] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def of(cls, settings: GatewaySettings) -> Tenants:
        """As the settings say. Raises ``KeysUnusable``."""
        if settings.keys is not None:
            found = cls.read(settings.keys)
        else:
            found = cls(None if settings.api_key is None else Keys.one(settings.api_key))
        if settings.operator_key is None:
            return found
        if found.keys is None:
            raise KeysUnusable(
                "--operator-key needs --keys or --api-key: without keys everybody is an operator"
            )
        return replace(found, keys=found.keys.with_operators([settings.operator_key], "--operator-key"))

    @classmethod
    def read(cls, path: Path) -> Tenants:
        """A keys file in either form. Raises ``KeysUnusable``, which names file and place, never a key."""
        if path.suffix != ".toml":
            return cls(Keys.read(path), source=str(path))
        text = read_text(path)
        try:
            return _from_toml(text, str(path))
        except KeysUnusable as fault:
            raise KeysUnusable(f"{path}: {fault.message}") from None

    def name(self, salt: bytes) -> str:
        """Of the tenant with this salt, if it has one."""
        known = {*self.limits, *(() if self.keys is None else self.keys.tenants.values())}
        return next((name for name in known if salt_of(name) == salt), "")

    def of_salt(self, salt: bytes) -> Allowance:
        """The limits of the tenant with this salt."""
        return self.limits.get(self.name(salt), NOTHING_SET)

    def sessions(self) -> dict[bytes, TenantLimits]:
        """The book's part; also of tenants that have no limits."""
        known = () if self.keys is None else self.keys.tenants.values()
        names = dict.fromkeys((*self.limits, *known))
        allowed = {name: self.limits.get(name, NOTHING_SET) for name in names}
        return {salt_of(name): TenantLimits(one.sessions, one.turns) for name, one in allowed.items()}

    def journal(self) -> dict[bytes, JournalShare]:
        """The journal's part."""
        return {
            salt_of(name): JournalShare(one.kept or UNLIMITED, one.journal or UNLIMITED)
            for name, one in self.limits.items()
        }

    def budgets(self) -> tuple[TenantBudget, ...]:
        """The engine's part."""
        return tuple(
            TenantBudget(salt=salt_of(name), leased_bytes=one.leased, disk_bytes=one.disk)
            for name, one in self.limits.items()
            if (one.leased, one.disk) != (None, None)
        )


# --- the TOML form ------------------------------------------------------------------------------------------

_Count: TypeAlias = int | None
_Size: TypeAlias = int | str | None
_FIELDS: list[Any] = [(quota.name, _Size if quota.in_bytes else _Count, None) for quota in TENANT_QUOTAS]
_KEYS: Any = ("keys", list[str], msgspec.field(default_factory=list))


def _table(name: str, fields: list[Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


_LimitsTable = _table("_LimitsTable", _FIELDS)
_TenantTable = _table("_TenantTable", [*_FIELDS, _KEYS])
_OperatorsTable = _table("_OperatorsTable", [_KEYS])
_File: Any = _table(
    "_File",
    [
        ("operators", _OperatorsTable, msgspec.field(default_factory=_OperatorsTable)),
        ("limits", _LimitsTable, msgspec.field(default_factory=_LimitsTable)),
        ("tenants", dict[str, _TenantTable], msgspec.field(default_factory=dict)),  # type: ignore[valid-type]
    ],
)


def _from_toml(text: str, source: str) -> Tenants:
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise KeysUnusable(str(error)) from None
    keys: dict[bytes, str] = {}
    limits: dict[str, Allowance] = {}
    usual = _placed("[limits]", file.limits, NOTHING_SET)
    for name, tenant in file.tenants.items():
        if not NAME.fullmatch(name):
            raise KeysUnusable(f"{name!r} is no name of a tenant")
        for key in tenant.keys:
            add_key(keys, key, name, f"a key of [tenants.{name}]")
        limits[name] = _placed(f"[tenants.{name}]", tenant, usual)
    if not keys:
        raise KeysUnusable("it has no keys")
    held = Keys(keys).with_operators(file.operators.keys, "a key of [operators]")
    return Tenants(held, {name: one for name, one in limits.items() if one != NOTHING_SET}, source)


def _placed(place: str, table: msgspec.Struct, usual: Allowance) -> Allowance:
    """What a table of the file allows; ``usual`` where it says nothing. Raises ``KeysUnusable``."""
    given = {name: value for name in ALLOWED if (value := getattr(table, name)) is not None}
    try:
        sizes = {
            quota.name: bytes_of(str(given[quota.name]))
            for quota in TENANT_QUOTAS
            if quota.in_bytes and quota.name in given
        }
        return replace(usual, **{**given, **sizes})
    except (ValueError, KeysUnusable) as fault:
        raise KeysUnusable(f"{place}: {fault}") from None
