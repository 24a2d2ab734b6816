"""Whether the tenants' limits fit the server and its machine; what does not is refused with the arithmetic.

A limit that is a number of sessions or of bytes is a promise, too: all tenants may use theirs at once, so that
their sum must fit. Replies take turns where there are more than can run: only each tenant's own number must.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..runtime.kv_placement.sizing import shown
from ..runtime.link.messages import Hello
from ..runtime.settings import EngineSettings
from ..sessions.settings import SessionSettings
from .errors import LimitsTooLarge
from .quotas import TENANT_QUOTAS
from .settings import GatewaySettings
from .tenants import Allowance, Tenants

NAMED = 3  # tenants that an arithmetic names
_IN_BYTES = {quota.name for quota in TENANT_QUOTAS if quota.in_bytes}


@dataclass(frozen=True, slots=True)
class Bound:
    """There are ``there`` of ``limit``, which is ``of``; ``summed``: for all tenants together."""

    limit: str
    there: int
    of: str
    summed: bool = True


def check(tenants: Tenants, settings: GatewaySettings, engine: EngineSettings) -> None:
    """What can be known before the engine is loaded. Raises ``LimitsTooLarge``."""
    for bound in _bounds(settings, engine):
        check_bound(tenants, bound)


def check_leases(tenants: Tenants, engine: EngineSettings, hello: Hello) -> None:
    """What only the engine knows: the KV that leases may cover. Raises ``LimitsTooLarge``."""
    check_bound(tenants, leasable(engine, hello.blocks * hello.block_bytes))


def leasable(engine: EngineSettings, kv_bytes: int) -> Bound:
    """What leases may cover of the device's KV."""
    of = f"what leases may cover, {engine.lease_share:g} × {shown(kv_bytes)} of KV"
    return Bound("leased", int(engine.lease_share * kv_bytes), of)


def check_bound(tenants: Tenants, bound: Bound) -> None:
    """Raises ``LimitsTooLarge``."""
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
    """How a value of this limit is told."""
    return shown if limit in _IN_BYTES else lambda value: f"{value:,}"


def told(allowance: Allowance) -> str:
    """A tenant's limits in one line."""
    values = ((quota, getattr(allowance, quota.name)) for quota in TENANT_QUOTAS)
    set_ = [quota.shown.format(amount(quota.name)(value)) for quota, value in values if value is not None]
    return ", ".join(set_) or "no limits"


def _bounds(settings: GatewaySettings, engine: EngineSettings) -> Iterator[Bound]:
    journal = settings.journal
    yield Bound("sessions", SessionSettings().max_sessions, "sessions that may be open")
    yield Bound("kept", journal.max_sessions, "sessions that the journal keeps")
    yield Bound("turns", engine.max_sequences, "--max-sequences", summed=False)
    yield Bound("journal", journal.max_bytes, "what the journal may have")
    if engine.kv_bytes is not None:
        yield leasable(engine, engine.kv_bytes)
    if engine.disk_bytes is not None:
        yield Bound("disk", engine.disk_bytes, "--disk-bytes")
    if settings.store is not None:
        whole = _disk_of(settings.store.expanduser())
        yield Bound("journal", whole, "the store's disk")
        yield Bound("disk", whole, "the store's disk")


def _disk_of(folder: Path) -> int:
    """Bytes of the disk that a folder is on, or will be."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    return shutil.disk_usage(there).total


def _sum(parts: Mapping[str, int], tell: Callable[[int], str]) -> str:
    """``acme 2 GiB + zenith 1 GiB = 3 GiB``; of many the largest are named."""
    largest = sorted(parts.items(), key=lambda part: -part[1])
    written = [f"{name} {tell(value)}" for name, value in largest[:NAMED]]
    if others := largest[NAMED:]:
        written.append(f"{len(others)} others {tell(sum(value for _, value in others))}")
    return " + ".join(written) + (f" = {tell(sum(parts.values()))}" if len(parts) > 1 else "")
