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
from typing import TypeAlias

import msgspec
from msgspec.structs import asdict

from ..runtime.settings import TenantBudget
from ..sessions.settings import UNLIMITED, JournalShare, TenantLimits
from .auth import NAME, Keys, add_key, read_text, salt_of
from .cli.sizes import bytes_of
from .errors import KeysUnusable
from .settings import GatewaySettings

SIZES = ("journal", "leased", "disk")
"""Limits in bytes; the others are counts."""


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
        for name in ALLOWED:
            value, least = getattr(self, name), 0 if name == "leased" else 1
            if value is not None and value < least:
                raise KeysUnusable(f"{name} = {value} is less than {least}")
        if self.sessions is not None and self.kept is not None and self.kept < self.sessions:
            raise KeysUnusable(
                f"kept = {self.kept} is less than sessions = {self.sessions}, which are kept, too"
            )


ALLOWED = tuple(Allowance.__dataclass_fields__)
"""The names of all limits."""
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

Size: TypeAlias = int | str | None


class _Limits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    sessions: int | None = None
    kept: int | None = None
    turns: int | None = None
    journal: Size = None
    leased: Size = None
    disk: Size = None

    def allowance(self, usual: Allowance = NOTHING_SET) -> Allowance:
        """Raises ``KeysUnusable``."""
        given = {name: value for name, value in asdict(self).items() if name in ALLOWED and value is not None}
        try:
            sizes = {name: bytes_of(str(given[name])) for name in SIZES if name in given}
        except ValueError as error:
            raise KeysUnusable(str(error)) from None
        return Allowance(**{**{name: getattr(usual, name) for name in ALLOWED}, **given, **sizes})


class _Tenant(_Limits, forbid_unknown_fields=True, kw_only=True):
    keys: list[str] = []


class _Operators(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    operators: _Operators = msgspec.field(default_factory=_Operators)
    limits: _Limits = msgspec.field(default_factory=_Limits)
    tenants: dict[str, _Tenant] = {}


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


def _placed(place: str, limits: _Limits, usual: Allowance) -> Allowance:
    try:
        return limits.allowance(usual)
    except KeysUnusable as fault:
        raise KeysUnusable(f"{place}: {fault.message}") from None
