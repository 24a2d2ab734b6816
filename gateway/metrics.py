"""The metrics for Prometheus: all ``statistics()`` at the moment of the scrape. Nothing is counted here.

Each scrape makes a registry of its own, so two servers in one process do not share anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTED = frozenset(
    {"steps", "rows", "discarded", "faults", "turns", "preempted", "taken", "stalls", "copies", "isolations"}
    | {f"host_{name}" for name in ("hits", "misses", "damaged", "refused", "dropped", "saved", "loaded")}
    | {f"disk_{name}" for name in ("stored", "fetched", "failed", "lost")}
    | {"prefilled", "recomputed", "t_plan", "t_launch", "t_device", "t_commit", "t_gap"}
)
"""Engine statistics that only rise; the others are lengths and levels."""

TOKENS = ("computed", "adopted", "restored", "sampled", "forced")
"""Engine statistics in tokens: one counter with a class each."""


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """What one tenant has ``used`` of its ``limits``, by their names; None: no limit."""

    name: str
    used: Mapping[str, float]
    limits: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All statistics at one moment. ``engine`` is empty while there is none.

    ``tenant``: of the tenant that asks. A tenant that is not an operator gets nothing else: then
    ``gateway`` and ``engine`` are empty and ``engine_number`` is None.
    """

    ready: bool
    engine_number: int | None
    gateway: Mapping[str, float]
    engine: Mapping[str, float]
    tenant: TenantSnapshot | None = None


def exposition(snapshot: MetricsSnapshot) -> bytes:
    """The snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(snapshot))
    return generate_latest(registry)


class _MetricsCollector(Collector):
    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One family per statistic, and one for all tokens by class."""
        snapshot = self._snapshot
        yield GaugeMetricFamily("holdfast_ready", "Whether new turns can run now", snapshot.ready)
        if snapshot.engine_number is not None:
            started = snapshot.engine_number
            yield CounterMetricFamily("holdfast_engine_starts", "Engines loaded so far", started)
        for name, value in sorted(snapshot.gateway.items()):
            yield GaugeMetricFamily(f"holdfast_{name}", f"The gateway's {name.replace('_', ' ')}", value)
        if snapshot.tenant is not None:
            yield from _tenant(snapshot.tenant)
        yield _tokens(snapshot.engine)
        for name, value in sorted(snapshot.engine.items()):
            if name not in TOKENS:
                family = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                yield family(f"holdfast_engine_{name}", f"The engine's {name.replace('_', ' ')}", value)


def _tenant(tenant: TenantSnapshot) -> Iterator[Metric]:
    """Two families, a sample for each limit."""
    told = (("used", "What the tenant has", tenant.used), ("limit", "What it may have", tenant.limits))
    for kind, help_text, values in told:
        family = GaugeMetricFamily(f"holdfast_tenant_{kind}", help_text, labels=["tenant", "of"])
        for name, value in values.items():
            if value is not None:
                family.add_metric([tenant.name, name], value)
        yield family


def _tokens(engine: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(
        "holdfast_tokens", "Tokens by class, since the engine started", labels=["class"]
    )
    for name in TOKENS:
        if name in engine:
            family.add_metric([name], engine[name])
    return family
