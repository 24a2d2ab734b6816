"""Counts and times of turns, under our names and vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast.gateway.access.attribution import Attribution
from holdfast.gateway.access.auth import TurnCaller
from holdfast.gateway.live.turns import Turns
from holdfast.gateway.metrics.prometheus import MetricsSnapshot, exposition
from holdfast.gateway.metrics.turns import FINISHED, Histogram, TurnMetrics
from holdfast.sessions.errors import EngineUnavailable, GrammarRefused, PromptTooLong
from holdfast.sessions.turn.events import EndReason, ReplyDone, ReplyStatus, TurnUsage
from holdfast.tests.gateway.keyed_service import FILE, keyed

pytestmark = pytest.mark.anyio
ENGINE = {"running": 2, "waiting": 5, "running_blocks": 25, "pool_blocks": 100, "preempted": 3}


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def told(snapshot: MetricsSnapshot) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition(snapshot).decode())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample of this name with these labels."""
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def one_turn(metrics: TurnMetrics, clock: Clock, reason: EndReason = EndReason.STOP) -> None:
    """A turn of 2 s: its first token after 0.5 s, then two more, 0.25 s apart."""
    times = metrics.begin()
    clock.now += 0.5
    times.output()
    for _ in range(2):
        clock.now += 0.25
        times.output()
    clock.now += 1.0
    usage = TurnUsage(input_tokens=100, output_tokens=3, cached_tokens=90, host_tokens=20, disk_tokens=5)
    metrics.end(times, ReplyDone(ReplyStatus.COMPLETED, reason, (), usage))


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for one in (0.5, 1.0, 1.5, 2.5, 99.0):
        histogram.observe(one)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 3), ("+Inf", 5)] and histogram.total == 104.5


def test_times_and_tokens_of_turns_are_told() -> None:
    clock = Clock()
    turns = TurnMetrics(clock)
    one_turn(turns, clock)
    turns.fail(turns.begin(), "engine_unavailable")
    turns.refuse(Attribution(), "rate_limit_exceeded")
    families = told(MetricsSnapshot(True, 1, {}, {}, turns=turns))
    for name, total, count in (
        ("time_to_first_token_seconds", 0.5, 1),
        ("inter_token_latency_seconds", 0.5, 2),
        ("time_per_output_token_seconds", 0.25, 1),
        ("turn_duration_seconds", 2.0, 1),
    ):
        assert families[f"holdfast_{name}"].type == "histogram"
        assert value(families, f"holdfast_{name}_sum") == pytest.approx(total)
        assert value(families, f"holdfast_{name}_count") == count
    assert value(families, "holdfast_time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(families, "holdfast_time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(families, "holdfast_prompt_tokens_total") == 100
    assert value(families, "holdfast_generation_tokens_total") == 3
    cached = {
        tier: value(families, "holdfast_prompt_cached_tokens_total", tier=tier)
        for tier in ("device", "host", "disk")
    }
    assert cached == {"device": 65, "host": 20, "disk": 5}
    assert value(families, "holdfast_turns_total", status="completed", reason="stop") == 1
    assert value(families, "holdfast_turns_total", status="failed", reason="engine_unavailable") == 1
    assert value(families, "holdfast_turns_refused_total", code="rate_limit_exceeded") == 1


def test_what_clients_do_wrong_is_no_failure() -> None:
    turns = Turns()
    response: Any = None
    for error in (GrammarRefused("bad"), EngineUnavailable("gone")):
        failed = ReplyDone(ReplyStatus.FAILED, EndReason.ERROR, (), TurnUsage(), error)
        turns.begin(TurnCaller(), "s", response).end(failed)
    for raised in (PromptTooLong("long"), EngineUnavailable("gone")):
        turns.begin(TurnCaller(), "s", response).fail(raised)
    assert {ended[-2:]: count for ended, count in turns.metrics.ended.items()} == {
        ("refused", "invalid_grammar"): 1,
        ("failed", "error"): 1,
        ("refused", "context_length_exceeded"): 1,
        ("failed", "engine_unavailable"): 1,
    }


def test_a_turn_of_one_token_has_no_time_per_token() -> None:
    clock = Clock()
    turns = TurnMetrics(clock)
    times = turns.begin()
    times.output()
    usage = TurnUsage(input_tokens=1, output_tokens=1)
    turns.end(times, ReplyDone(ReplyStatus.COMPLETED, EndReason.STOP, (), usage))
    assert turns.per_token.buckets()[-1][1] == 0 and turns.whole.buckets()[-1][1] == 1


def test_vllms_names_have_the_same_numbers() -> None:
    clock = Clock()
    turns = TurnMetrics(clock)
    one_turn(turns, clock)
    one_turn(turns, clock, EndReason.MAX_OUTPUT_TOKENS)
    turns.fail(turns.begin(), "engine_unavailable")
    labels = {"model_name": "pocket", "engine": "0"}
    families = told(MetricsSnapshot(True, 1, {}, ENGINE, turns=turns, vllm="pocket"))
    for name, number in (
        ("num_requests_running", 2),
        ("num_requests_waiting", 5),
        ("kv_cache_usage_perc", 0.25),
        ("gpu_cache_usage_perc", 0.25),
        ("num_preemptions_total", 3),
        ("prompt_tokens_total", 200),
        ("generation_tokens_total", 6),
        ("prefix_cache_queries_total", 200),
        ("prefix_cache_hits_total", 180),
        ("gpu_prefix_cache_queries_total", 200),
        ("gpu_prefix_cache_hits_total", 180),
        ("time_to_first_token_seconds_count", 2),
        ("inter_token_latency_seconds_count", 4),
        ("time_per_output_token_seconds_count", 4),
        ("request_time_per_output_token_seconds_count", 2),
        ("e2e_request_latency_seconds_count", 2),
        ("e2e_request_latency_seconds_sum", 4.0),
    ):
        assert value(families, f"vllm:{name}", **labels) == pytest.approx(number), name
    ended = {"stop": 1, "length": 1, "abort": 0, "error": 1}
    assert {
        word: value(families, "vllm:request_success_total", finished_reason=word, **labels) for word in ended
    } == ended


def test_vllms_names_are_there_only_if_asked_for_and_without_an_engine_no_gauges() -> None:
    turns = TurnMetrics()
    plain = told(MetricsSnapshot(True, 1, {}, ENGINE, turns=turns))
    assert not [name for name in plain if name.startswith("vllm:")]
    gone = told(MetricsSnapshot(False, 1, {}, {}, turns=turns, vllm="pocket"))
    assert "vllm:num_requests_running" not in gone and "vllm:prompt_tokens" in gone


def test_each_reason_has_a_word_of_vllms() -> None:
    assert set(FINISHED) == set(EndReason)


async def test_turns_of_a_server_are_counted_and_seen_by_operators_alone(tmp_path: Path) -> None:
    async with keyed(tmp_path, FILE, metrics_compat="vllm") as served, served.wire("alpha") as wire:
        tokens = 0
        for _ in range(3):
            tokens += (await wire.say())["usage"]["output_tokens"]
        assert (await wire.say())["code"] == "rate_limit_exceeded"
        families = told(await served.service.snapshot())
        assert value(families, "holdfast_turns_total", status="completed", reason="stop") == 3
        assert value(families, "holdfast_generation_tokens_total") == tokens
        assert 0 < value(families, "holdfast_time_to_first_token_seconds_count") <= 3
        assert value(families, "holdfast_inter_token_latency_seconds_count") > 0
        assert value(families, "holdfast_turns_refused_total", code="rate_limit_exceeded") == 1
        assert value(families, "vllm:generation_tokens_total", model_name="scripted") == tokens
        tenant = told(await served.service.snapshot(b"", all_tenants=False))
        assert not [name for name in tenant if "turn" in name or name.startswith("vllm:")]
