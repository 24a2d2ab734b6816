"""The metrics for Prometheus, made from all ``statistics()`` at the moment of the scrape. This file counts
nothing itself.

Each scrape makes its own registry, so that two servers in one process share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .turns import TurnMetrics
from .vllm import vllm_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTED = frozenset(
    {
        "steps",
        "rows",
        "discarded",
        "faults",
        "turns",
        "preempted",
        "displaced",
        "taken",
        "stalls",
        "copies",
        "isolations",
    }
    | {"grammars_refused", "drafted", "accepted"}
    | {f"host_{name}" for name in ("hits", "misses", "damaged", "refused", "dropped", "saved", "loaded")}
    | {f"disk_{name}" for name in ("stored", "fetched", "failed", "lost")}
    | {"prefilled", "recomputed", "t_plan", "t_launch", "t_device", "t_commit", "t_gap"}
)
"""Statistics of the engine that only grow and so become counters. All others become gauges."""

TOKENS = ("computed", "adopted", "restored", "sampled", "forced")
"""Statistics of the engine in tokens. They become one counter, labelled with the statistic's name."""


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """What one tenant uses now (``used``) and may use (``limits``), each by the name of a limit. A limit of
    None means that there is none."""

    name: str
    used: Mapping[str, float]
    limits: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All statistics at one moment. ``ready``: a turn could run. ``engine_number``: how many engines have been
    loaded so far. ``gateway``, ``engine``: statistics by name; ``engine`` is empty while no engine runs.
    ``tenant``: numbers of the tenant that asks; None if it has no name. ``turns``: counts and times of all
    turns. ``vllm``: the model's name if the metrics are to stand under vLLM's names, too; else None.

    For a tenant that is not an operator, ``gateway`` and ``engine`` are empty, and ``engine_number`` and
    ``turns`` are None.
    """

    ready: bool
    engine_number: int | None
    gateway: Mapping[str, float]
    engine: Mapping[str, float]
    tenant: TenantSnapshot | None = None
    turns: TurnMetrics | None = None
    vllm: str | None = None


def exposition(snapshot: MetricsSnapshot) -> bytes:
    """Write the snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(snapshot))
    return generate_latest(registry)


class _MetricsCollector(Collector):
    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield a metric family for each statistic, and one for all counts of tokens."""
        snapshot = self._snapshot
        yield GaugeMetricFamily("holdfast_ready", "Whether new turns can run now", snapshot.ready)
        if snapshot.engine_number is not None:
            started = snapshot.engine_number
            yield CounterMetricFamily("holdfast_engine_starts", "Engines loaded so far", started)
        for name, value in sorted(snapshot.gateway.items()):
            yield GaugeMetricFamily(f"holdfast_{name}", f"The gateway's {name.replace('_', ' ')}", value)
        if snapshot.tenant is not None:
            yield from _tenant(snapshot.tenant)
        if snapshot.turns is not None:
            yield from _turns(snapshot.turns)
        yield _tokens(snapshot.engine)
        for name, value in sorted(snapshot.engine.items()):
            if name not in TOKENS:
                family = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                yield family(f"holdfast_engine_{name}", f"The engine's {name.replace('_', ' ')}", value)
        if snapshot.turns is not None and snapshot.vllm is not None:
            yield from vllm_families(snapshot.vllm, snapshot.turns, snapshot.engine)


def _turns(turns: TurnMetrics) -> Iterator[Metric]:
    """The metric families of all turns: tokens, ends, refusals and the histograms of times."""
    counted: tuple[tuple[str, str, list[str], Mapping[Any, int]], ...] = (
        ("requests", "Requests that were answered", ["route", "protocol", "status"], turns.requests),
        ("prompt_tokens", "Tokens of prompts", [], turns.prompt),
        ("generation_tokens", "Tokens of replies", [], turns.generated),
        ("prompt_cached_tokens", "Tokens with KV, by tier", ["tier"], turns.cached),
        ("turns", "Turns that ended", ["protocol", "status", "reason"], turns.ended),
        ("turns_refused", "Turns that were not admitted", ["protocol", "code"], turns.refused),
    )
    for name, text, labels, counts in counted:
        family = CounterMetricFamily(f"holdfast_{name}", text, labels=["tenant", *labels])
        for values, count in sorted(counts.items()):
            family.add_metric(values, count)
        yield family
    first = "From a turn's begin to its first output"
    by_tenant = HistogramMetricFamily("holdfast_time_to_first_token_seconds", first, labels=["tenant"])
    for tenant, histogram in sorted(turns.first_token_of.items()):
        by_tenant.add_metric([tenant], histogram.buckets(), histogram.total)
    yield by_tenant
    for name, text, histogram in (
        ("inter_token_latency_seconds", "Between two pieces of a turn's output", turns.inter_token),
        ("time_per_output_token_seconds", "Mean of a turn, without its first token", turns.per_token),
        ("turn_duration_seconds", "From a turn's begin to its end", turns.whole),
    ):
        yield HistogramMetricFamily(f"holdfast_{name}", text, histogram.buckets(), histogram.total)


def _tenant(tenant: TenantSnapshot) -> Iterator[Metric]:
    """Yield two metric families, what is used and what is allowed, each with a sample for every limit."""
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
