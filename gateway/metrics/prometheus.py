"""The metrics for Prometheus, made from all ``statistics()`` at the moment of the scrape. This file counts
nothing itself.

Each scrape makes its own registry, so that two servers in one process share nothing.

Under the names of vLLM, which routers and dashboards read (``--metrics-compat vllm``), each metric has the
labels ``model_name`` and ``engine``. Prompt tokens count as queries of the prefix cache, and those with KV that
was there, in any tier, as hits. KV counts as used where running turns hold it: that of idle sessions gives way
to a turn.
https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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

from .turns import FINISHED, TurnMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTED = frozenset(
    {"steps", "rows", "discarded", "faults", "turns", "preempted", "displaced", "taken", "stalls", "copies"}
    | {"isolations", "grammars_refused", "drafted", "accepted", "adapter_swaps"}
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


@dataclass(frozen=True, slots=True, eq=False)
class MetricsSnapshot(Collector):
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

    def collect(self) -> Iterator[Metric]:
        """Yield a metric family for each statistic, and one for all counts of tokens."""
        yield GaugeMetricFamily("holdfast_ready", "Whether new turns can run now", self.ready)
        if (started := self.engine_number) is not None:
            yield CounterMetricFamily("holdfast_engine_starts", "Engines loaded so far", started)
        for name, value in sorted(self.gateway.items()):
            yield GaugeMetricFamily(f"holdfast_{name}", f"The gateway's {name.replace('_', ' ')}", value)
        if self.tenant is not None:
            yield from _tenant(self.tenant)
        if self.turns is not None:
            yield from _turns(self.turns)
        text = "Tokens by class, since the engine started"
        tokens = [([name], self.engine[name]) for name in TOKENS if name in self.engine]
        yield _filled(CounterMetricFamily("holdfast_tokens", text, labels=["class"]), tokens)
        for name, value in sorted(self.engine.items()):
            if name not in TOKENS:
                kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
                yield kind(f"holdfast_engine_{name}", f"The engine's {name.replace('_', ' ')}", value)
        if self.turns is not None and self.vllm is not None:
            yield from _vllm(self.vllm, self.turns, self.engine)


def exposition(snapshot: MetricsSnapshot) -> bytes:
    """Write the snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(snapshot)
    return generate_latest(registry)


def _filled(family: Any, samples: Iterable[tuple[Any, ...]]) -> Metric:
    """``family``, with these samples: of each the values of its labels, then its value or, of a histogram, its
    buckets and their sum."""
    for sample in samples:
        family.add_metric(*sample)
    filled: Metric = family
    return filled


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
        yield _filled(family, sorted(counts.items()))
    first = "From a turn's begin to its first output"
    yield _filled(
        HistogramMetricFamily("holdfast_time_to_first_token_seconds", first, labels=["tenant"]),
        (([tenant], one.buckets(), one.total) for tenant, one in sorted(turns.first_token_of.items())),
    )
    for name, text, histogram in (
        ("inter_token_latency_seconds", "Between two pieces of a turn's output", turns.inter_token),
        ("time_per_output_token_seconds", "Mean of a turn, without its first token", turns.per_token),
        ("turn_duration_seconds", "From a turn's begin to its end", turns.whole),
    ):
        yield HistogramMetricFamily(f"holdfast_{name}", text, histogram.buckets(), histogram.total)


def _tenant(tenant: TenantSnapshot) -> Iterator[Metric]:
    """Yield two metric families, what is used and what is allowed, each with a sample for every limit."""
    told = (("used", "What the tenant has", tenant.used), ("limit", "What it may have", tenant.limits))
    for kind, text, values in told:
        samples = [([tenant.name, name], value) for name, value in values.items() if value is not None]
        yield _filled(GaugeMetricFamily(f"holdfast_tenant_{kind}", text, labels=["tenant", "of"]), samples)


def _vllm(model: str, turns: TurnMetrics, engine: Mapping[str, float]) -> Iterator[Metric]:
    """All metric families under vLLM's names. ``model``: the served model's name, a label. ``engine``: the
    engine's statistics by name; empty while none runs, then the metrics that come from it are left out."""
    labels, values = ["model_name", "engine"], [model, "0"]
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    numbers: list[tuple[Any, str, str, float]] = []
    if engine:
        usage = engine["running_blocks"] / engine["pool_blocks"]
        numbers += [
            (gauge, "num_requests_running", "Turns that run in the engine", engine["running"]),
            (gauge, "num_requests_waiting", "Turns that wait in the engine", engine["waiting"]),
            (gauge, "kv_cache_usage_perc", "KV that running turns hold, 1 is all", usage),
            (gauge, "gpu_cache_usage_perc", "The same as vllm:kv_cache_usage_perc", usage),
            (counter, "num_preemptions", "Turns that were preempted", engine["preempted"]),
        ]
    numbers += [
        (counter, "prompt_tokens", "Tokens of prompts", turns.prompt.total()),
        (counter, "generation_tokens", "Tokens of replies", turns.generated.total()),
    ]
    for prefix in ("", "gpu_"):
        numbers += [
            (counter, f"{prefix}prefix_cache_queries", "Tokens of prompts", turns.prompt.total()),
            (counter, f"{prefix}prefix_cache_hits", "Those of them that had KV", turns.cached.total()),
        ]
    for kind, name, text, value in numbers:
        yield _filled(kind(f"vllm:{name}", text, labels=labels), [(values, value)])
    ended = Counter(dict.fromkeys(FINISHED.values(), 0))
    for (*_, reason), count in turns.ended.items():
        ended[FINISHED.get(reason, "error")] += count
    yield _filled(
        counter("vllm:request_success", "Turns that ended", labels=[*labels, "finished_reason"]),
        (([*values, word], count) for word, count in ended.items()),
    )
    for name, text, histogram in (
        ("time_to_first_token_seconds", "To the first output of a turn", turns.first_token),
        ("inter_token_latency_seconds", "Between pieces of output", turns.inter_token),
        ("time_per_output_token_seconds", "Between pieces of output", turns.inter_token),
        ("request_time_per_output_token_seconds", "Mean of a turn after its first", turns.per_token),
        ("e2e_request_latency_seconds", "Of whole turns", turns.whole),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
        yield _filled(family, [(values, histogram.buckets(), histogram.total)])
