"""Tenants as the keys file has them: the keys of each, and how much each may take.

The file has one of two forms. Lines of ``KEY TENANT`` set no limits. A file named ``*.toml`` may::

    [operators]           # they see all tenants' numbers in /metrics
    keys = ["…"]

    [limits]              # of each tenant without limits of its own
    sessions = 100

    [tenants.acme]
    keys = ["…", "…"]
    turns = 16
    leased = "512MiB"

`Tenants` gives each part of the server its part of the limits; `quotas` says which module enforces what.
`check` compares the limits with what the server has. The sum of all tenants' sessions or bytes must fit,
because all may use theirs at once. Replies wait for one another, so only each tenant's own number must fit.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ...kvstore.options import bytes_of, expanded
from ...runtime.kv_placement.sizing import shown
from ...runtime.link.messages import Hello
from ...runtime.settings import EngineSettings, TenantBudget
from ...sessions.settings import UNLIMITED, JournalShare, SessionSettings, TenantLimits
from ..errors import KeysUnusable, LimitsTooLarge
from ..settings import GatewaySettings
from .auth import NAME, Keys, add_key, read_text, salt_of
from .quotas import TENANT_QUOTAS
from .rate_limits import KeyRates


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of one tenant. None: no limit. It has a field for each row of `TENANT_QUOTAS`. Raises
    ``KeysUnusable`` if a value is too small."""

    sessions: int | None = None
    """Sessions open at once."""
    kept: int | None = None
    """Sessions in the journal, open ones among them. The longest unused are forgotten first."""
    turns: int | None = None
    """Replies of the tenant that run at once."""
    journal: int | None = None
    """Bytes of its sessions in the journal."""
    leased: int | None = None
    """Bytes of KV that its leases cover on the device; as many again in the host tier."""
    disk: int | None = None
    """Bytes of its KV on disk."""
    requests_per_minute: int | None = None
    """Turns that each of its keys may begin in a minute."""
    tokens_per_minute: int | None = None
    """New tokens of prompts, and tokens of replies, that each of its keys may have in a minute."""

    def __post_init__(self) -> None:
        for quota in TENANT_QUOTAS:
            value = getattr(self, quota.name)
            if value is not None and value < quota.least:
                raise KeysUnusable(f"{quota.name} = {value} is less than {quota.least}")
        if self.sessions is not None and self.kept is not None and self.kept < self.sessions:
            raise KeysUnusable(
                f"kept = {self.kept} is less than sessions = {self.sessions}, which are kept too"
            )


NOTHING_SET = Allowance()


@dataclass(frozen=True, slots=True)
class Tenants:
    """The valid keys, and the limits of each tenant by its name. ``keys``: None if every client on this machine
    is admitted. ``source``: the name of the keys file; empty if there is none."""

    keys: Keys | None = None
    limits: Mapping[str, Allowance] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def of(cls, settings: GatewaySettings) -> Tenants:
        """The tenants of these settings: from the keys file, from the single API key, or none. Reads the file.
        Raises ``KeysUnusable``."""
        if settings.keys is not None:
            found = cls.read(settings.keys)
        else:
            found = cls(None if settings.api_key is None else Keys.one(settings.api_key))
        if settings.operator_key is None:
            return found
        if found.keys is None:
            raise KeysUnusable(
                "--operator-key needs --keys or --api-key: without keys every client is an operator"
            )
        keys = (
            found.keys if settings.keys is not None else Keys(found.keys.tenants)
        )  # not the single key itself
        return replace(found, keys=keys.with_operators([settings.operator_key], "--operator-key"))

    @classmethod
    def read(cls, path: Path) -> Tenants:
        """Read a keys file in either form. Raises ``KeysUnusable``, which names the file and the table in it,
        never a key."""
        if path.suffix != ".toml":
            return cls(Keys.read(path), source=str(path))
        text = read_text(path)
        try:
            return _from_toml(text, str(path))
        except KeysUnusable as fault:
            raise KeysUnusable(f"{path}: {fault.message}") from None

    def name(self, salt: bytes) -> str:
        """The name of the tenant with this salt; empty if no tenant has it."""
        return self.names().get(salt, "")

    def names(self) -> dict[bytes, str]:
        """The names of all tenants, by salt, in the order of the keys file."""
        known = dict.fromkeys([*(() if self.keys is None else self.keys.tenants.values()), *self.limits])
        return {salt_of(name): name for name in known}

    def sessions(self) -> dict[bytes, TenantLimits]:
        """The limits on open sessions and running turns, by tenant's salt, for the session registry. Tenants
        without limits are in it, too."""
        allowed = {salt: self.limits.get(name, NOTHING_SET) for salt, name in self.names().items()}
        return {salt: TenantLimits(one.sessions, one.turns) for salt, one in allowed.items()}

    def rates(self) -> dict[bytes, KeyRates]:
        """The limits per minute that each key of a tenant has, by the tenant's salt. Only of tenants that have
        any limit."""
        return {
            salt_of(name): KeyRates(one.requests_per_minute, one.tokens_per_minute)
            for name, one in self.limits.items()
        }

    def journal(self) -> dict[bytes, JournalShare]:
        """The limits on sessions and bytes in the journal, by tenant's salt. Only of tenants that have any
        limit."""
        return {
            salt_of(name): JournalShare(one.kept or UNLIMITED, one.journal or UNLIMITED)
            for name, one in self.limits.items()
        }

    def budgets(self) -> tuple[TenantBudget, ...]:
        """The limits on KV that the engine enforces: bytes that leases cover, and bytes on disk. Only of
        tenants that have one of these."""
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
    usual = _allowance("[limits]", file.limits, NOTHING_SET)
    for name, tenant in file.tenants.items():
        if not NAME.fullmatch(name):
            raise KeysUnusable(f"{name!r} is no name of a tenant")
        for key in tenant.keys:
            add_key(keys, key, name, f"a key of [tenants.{name}]")
        limits[name] = _allowance(f"[tenants.{name}]", tenant, usual)
    if not keys:
        raise KeysUnusable("it has no keys")
    held = Keys(keys).with_operators(file.operators.keys, "a key of [operators]")
    return Tenants(held, {name: one for name, one in limits.items() if one != NOTHING_SET}, source)


def _allowance(name: str, table: msgspec.Struct, usual: Allowance) -> Allowance:
    """The limits in one table of the file, with those of ``usual`` where the table sets none. ``name``: the
    table's, for the error. Raises ``KeysUnusable``."""
    given: dict[str, int] = {}
    try:
        for quota in TENANT_QUOTAS:
            if (value := getattr(table, quota.name)) is not None:
                given[quota.name] = bytes_of(str(value)) if quota.in_bytes else value
        return replace(usual, **given)
    except (ValueError, KeysUnusable) as fault:
        raise KeysUnusable(f"{name}: {fault}") from None


# --- whether the limits fit the server ----------------------------------------------------------------------

NAMED = 3  # tenants that an error names
_IN_BYTES = {quota.name for quota in TENANT_QUOTAS if quota.in_bytes}


@dataclass(frozen=True, slots=True)
class ServerBound:
    """How much the server has of what one limit is about. ``limit``: the limit's name. ``there``: the amount,
    in bytes or a count. ``of``: what the amount is of, for the error's text. ``summed``: true if the sum of all
    tenants' limits must fit into it; false if only each tenant's own must."""

    limit: str
    there: int
    of: str
    summed: bool = True


def check(tenants: Tenants, settings: GatewaySettings, engine: EngineSettings) -> None:
    """Check that the tenants' limits fit the server, as far as that is known before the engine is loaded.
    Raises ``LimitsTooLarge``."""
    for bound in _bounds(settings, engine):
        check_bound(tenants, bound)


def check_loaded(tenants: Tenants, engine: EngineSettings, hello: Hello) -> None:
    """Check that the tenants' turns, and what their leases may cover, fit the engine's rows and KV, of which
    ``hello`` has the size, the message of an engine that was loaded. Raises ``LimitsTooLarge``."""
    check_bound(tenants, runnable(hello.max_sequences))
    check_bound(tenants, leasable(engine, hello.blocks * hello.block_bytes))


def runnable(most: int) -> ServerBound:
    """The bound for each tenant's limit named ``turns``: ``most`` turns may run at once."""
    return ServerBound("turns", most, "--max-sequences", summed=False)


def leasable(engine: EngineSettings, kv_bytes: int) -> ServerBound:
    """The bound for the tenants' limits named ``leased``: the part of ``kv_bytes``, the KV on the device, that
    leases may cover."""
    of = f"what leases may cover, {engine.lease_share:g} × {shown(kv_bytes)} of KV"
    return ServerBound("leased", int(engine.lease_share * kv_bytes), of)


def check_bound(tenants: Tenants, bound: ServerBound) -> None:
    """Check all tenants' limits of the name ``bound.limit``, their sum or each of them, against what the server
    has. Raises ``LimitsTooLarge``."""
    asked = {name: value for name, one in tenants.limits.items() if (value := getattr(one, bound.limit))}
    groups = [asked] if bound.summed else [{name: value} for name, value in asked.items()]
    for group in groups:
        if (total := sum(group.values())) > bound.there:
            tell = amount(bound.limit)
            raise LimitsTooLarge(
                f"{tenants.source}: {bound.limit} of {_sum(group, tell)} is {tell(total - bound.there)} more"
                f" than {bound.of}, {tell(bound.there)}"
            )


def amount(limit: str) -> Callable[[int], str]:
    """A function that writes a value of this limit as text: ``8 GiB`` for bytes, ``1,000`` for a count."""
    return shown if limit in _IN_BYTES else lambda value: f"{value:,}"


def told(allowance: Allowance) -> str:
    """A tenant's limits as one line of text for the operator; ``no limits`` if it has none."""
    values = ((quota, getattr(allowance, quota.name)) for quota in TENANT_QUOTAS)
    set_ = [quota.shown.format(amount(quota.name)(value)) for quota, value in values if value is not None]
    return ", ".join(set_) or "no limits"


def _bounds(settings: GatewaySettings, engine: EngineSettings) -> Iterator[ServerBound]:
    journal = settings.journal
    yield ServerBound("sessions", SessionSettings().max_sessions, "sessions that may be open")
    yield ServerBound("kept", journal.max_sessions, "sessions that the journal keeps")
    if engine.max_sequences is not None:
        yield runnable(engine.max_sequences)
    yield ServerBound("journal", journal.max_bytes, "what the journal may have")
    if engine.kv_bytes is not None:
        yield leasable(engine, engine.kv_bytes)
    if engine.disk_bytes is not None:
        yield ServerBound("disk", engine.disk_bytes, "--disk-bytes")
    if settings.store is not None:
        whole = _disk_of(expanded(settings.store))
        yield ServerBound("journal", whole, "the store's disk")
        yield ServerBound("disk", whole, "the store's disk")


def _disk_of(folder: Path) -> int:
    """The size, in bytes, of the file system on which ``folder`` is, or would be made."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).total


def _sum(parts: Mapping[str, int], tell: Callable[[int], str]) -> str:
    """The tenants' values and their sum as text: ``acme 2 GiB + zenith 1 GiB = 3 GiB``. ``parts``: the values
    by tenant's name. Of many only the largest are named. ``tell`` writes one value."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    written = [f"{name} {tell(value)}" for name, value in largest[:NAMED]]
    if others := largest[NAMED:]:
        written.append(f"{len(others)} others {tell(sum(value for _, value in others))}")
    return " + ".join(written) + (f" = {tell(sum(parts.values()))}" if len(parts) > 1 else "")
