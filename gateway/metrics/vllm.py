"""Metrics under the names of vLLM, which routers and dashboards read (``--metrics-compat vllm``).

Each has the labels ``model_name`` and ``engine``. Prompt tokens count as queries of the prefix cache, and those
with KV that was there, in any tier, as hits. KV counts as used where running turns hold it: that of idle
sessions gives way to a turn.
https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from .turns import FINISHED, TurnMetrics

LABELS = ["model_name", "engine"]
ENGINE = "0"


def vllm_families(model: str, turns: TurnMetrics, engine: Mapping[str, float]) -> Iterator[Metric]:
    """All metric families under vLLM's names. ``model``: the served model's name, a label. ``engine``: the
    engine's statistics by name; empty while none runs, then the metrics that come from it are left out."""
    labels = [model, ENGINE]

    def gauge(name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(labels, value)
        return family

    def counter(name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(labels, value)
        return family

    if engine:
        usage = engine["running_blocks"] / engine["pool_blocks"]
        yield gauge("num_requests_running", "Turns that run in the engine", engine["running"])
        yield gauge("num_requests_waiting", "Turns that wait in the engine", engine["waiting"])
        yield gauge("kv_cache_usage_perc", "KV that running turns hold, 1 is all", usage)
        yield gauge("gpu_cache_usage_perc", "The same as vllm:kv_cache_usage_perc", usage)
        yield counter("num_preemptions", "Turns that were preempted", engine["preempted"])
    yield counter("prompt_tokens", "Tokens of prompts", turns.prompt.total())
    yield counter("generation_tokens", "Tokens of replies", turns.generated.total())
    for prefix in ("", "gpu_"):
        yield counter(f"{prefix}prefix_cache_queries", "Tokens of prompts", turns.prompt.total())
        yield counter(f"{prefix}prefix_cache_hits", "Those of them that had KV", turns.cached.total())
    yield _finished(labels, turns.ended)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "To the first output of a turn", turns.first_token),
        ("inter_token_latency_seconds", "Between pieces of output", turns.inter_token),
        ("time_per_output_token_seconds", "Between pieces of output", turns.inter_token),
        ("request_time_per_output_token_seconds", "Mean of a turn after its first", turns.per_token),
        ("e2e_request_latency_seconds", "Of whole turns", turns.whole),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(labels, histogram.buckets(), histogram.total)
        yield family


def _finished(labels: list[str], ended: Mapping[tuple[str, str, str, str], int]) -> Metric:
    """The counter ``vllm:request_success``: turns by vLLM's word for how they ended. ``labels``: the values of
    `LABELS`. ``ended``: counts of turns by their tenant, protocol, status and reason."""
    counts: Counter[str] = Counter(dict.fromkeys(FINISHED.values(), 0))
    for (*_, reason), count in ended.items():
        counts[FINISHED.get(reason, "error")] += count
    family = CounterMetricFamily(
        "vllm:request_success", "Turns that ended", labels=[*LABELS, "finished_reason"]
    )
    for word, count in counts.items():
        family.add_metric([*labels, word], count)
    return family
