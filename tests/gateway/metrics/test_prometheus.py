"""Metrics are read from statistics: each one there under its name, with its kind and value."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.gateway.metrics.prometheus import TOKENS, MetricsSnapshot, exposition
from holdfast.runtime.stats import Counters

ENGINE = {"steps": 7, "computed": 100, "adopted": 32, "sampled": 9, "running": 2, "pool_free": 500}


def families(snapshot: MetricsSnapshot) -> dict:
    return {family.name: family for family in text_string_to_metric_families(exposition(snapshot).decode())}


def test_every_statistic_is_there_with_its_kind() -> None:
    found = families(MetricsSnapshot(True, 3, {"sessions": 4.0, "outbox_events": 1.0}, ENGINE))
    assert found["holdfast_ready"].samples[0].value == 1.0
    assert found["holdfast_engine_starts"].samples[0].value == 3
    assert (found["holdfast_sessions"].type, found["holdfast_sessions"].samples[0].value) == ("gauge", 4.0)
    assert (found["holdfast_engine_steps"].type, found["holdfast_engine_steps"].samples[0].value) == (
        "counter",
        7,
    )
    assert found["holdfast_engine_running"].type == found["holdfast_engine_pool_free"].type == "gauge"


def test_tokens_are_one_counter_by_class() -> None:
    found = families(MetricsSnapshot(True, 1, {}, ENGINE))
    classes = {sample.labels["class"]: sample.value for sample in found["holdfast_tokens"].samples}
    assert classes == {"computed": 100, "adopted": 32, "sampled": 9}
    assert "holdfast_engine_computed" not in found


def test_without_an_engine_there_are_no_figures_of_it() -> None:
    found = families(MetricsSnapshot(False, 1, {"sessions": 1.0}, {}))
    assert found["holdfast_ready"].samples[0].value == 0.0
    assert not [
        name for name in found if name.startswith("holdfast_engine_") and name != "holdfast_engine_starts"
    ]


def test_what_rises_is_a_counter() -> None:
    """The engine's counters are all told as such, or as tokens."""
    found = families(MetricsSnapshot(True, 1, {}, dict.fromkeys(Counters.__slots__, 1)))
    kinds = {family.type for name, family in found.items() if name != "holdfast_ready"}
    assert kinds == {"counter"} and set(TOKENS) < set(Counters.__slots__)
