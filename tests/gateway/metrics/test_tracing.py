"""Spans of turns: their attributes, their parents, their ends, and that no text is in them."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import opentelemetry.sdk.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.testclient import TestClient

from holdfast.gateway.app import build_app
from holdfast.gateway.cli.serve import run
from holdfast.gateway.errors import OptionInvalid
from holdfast.gateway.metrics import tracing
from holdfast.gateway.metrics.tracing import TurnTracer
from holdfast.gateway.service import Service
from holdfast.gateway.settings import GatewaySettings
from holdfast.runtime.settings import EngineSettings
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.text.language import Language
from holdfast.tests.gateway.keyed_service import keyed, said
from holdfast.tests.gateway.scripted_service import END, Scripted, spoken
from holdfast.tests.sessions.text.chat_languages import ours

pytestmark = pytest.mark.anyio
KEYS = '[tenants.acme]\nkeys = ["alpha"]\n'
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


class Spans:
    """A tracer, and the spans that it has ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = TurnTracer(provider, "pocket")

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def shown(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_turn_is_a_span_with_the_attributes_of_the_conventions(tmp_path: Path) -> None:
    spans = Spans()
    async with keyed(tmp_path, KEYS, tracer=spans.tracer) as served, served.wire("alpha") as wire:
        responses = [await wire.say("begin"), await wire.say("go on")]
        (live,) = served.service.sessions()
        await live.idle()
        assert len(spans.ended) == 2
        for span, response in zip(spans.ended, responses, strict=True):
            assert span.name == "chat pocket" and span.kind is SpanKind.SERVER and span.parent is None
            found, usage = shown(span), response["usage"]
            assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.provider.name"] == "holdfast"
            assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "pocket"
            assert found["gen_ai.response.id"] == response["id"]
            assert found["gen_ai.conversation.id"] == live.id
            assert found["gen_ai.usage.input_tokens"] == usage["input_tokens"]
            assert found["gen_ai.usage.output_tokens"] == usage["output_tokens"]
            cached = usage["input_token_details"]["cached_tokens"]
            assert found["gen_ai.usage.cache_read.input_tokens"] == cached
            assert found["gen_ai.response.finish_reasons"] == ("stop",)
            assert span.status.status_code is StatusCode.UNSET and "error.type" not in found
        assert shown(spans.ended[1])["gen_ai.usage.cache_read.input_tokens"] > 0


async def test_a_step_of_the_time_of_day_changes_no_spans_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, steps = Spans(), itertools.count(time.time_ns(), -86_400_000_000_000)
    for where in (time, opentelemetry.sdk.trace):
        monkeypatch.setattr(where, "time_ns", lambda: next(steps))
    async with keyed(tmp_path, KEYS, tracer=spans.tracer) as served, served.wire("alpha") as wire:
        await wire.say("begin")
        (live,) = served.service.sessions()
        await live.idle()
    (span,) = spans.ended
    assert span.start_time is not None and span.end_time is not None
    assert 0 < span.end_time - span.start_time < 86_400_000_000_000


async def test_no_text_is_in_a_span(tmp_path: Path) -> None:
    spans = Spans()
    async with keyed(tmp_path, KEYS, tracer=spans.tracer) as served, served.wire("alpha") as wire:
        response = await wire.say("xylophone")
        (live,) = served.service.sessions()
        await live.idle()
    text = "".join(part["text"] for item in response["output"] for part in item["content"])
    told = json.dumps([json.loads(span.to_json()) for span in spans.ended])
    assert spans.ended and "xylophone" not in told and (not text or text not in told)


async def test_the_ends_of_turns_are_told(tmp_path: Path) -> None:
    spans = Spans()
    async with keyed(tmp_path, KEYS, tracer=spans.tracer) as served, served.wire("alpha") as wire:
        await wire.send("response.create", items=[said("begin")], response={"max_output_tokens": 1})
        await wire.until("response.done")
        served.link.flowing = False
        await wire.send("response.create", items=[said("begin")])
        await wire.until("response.created")
        await wire.send("response.cancel")
        await wire.until("response.done")
        await wire.send("response.create", items=[said("x " * 9000)])
        error = (await wire.until("error"))[-1]["error"]
        assert error["code"] == "context_length_exceeded"
        (live,) = served.service.sessions()
        await live.idle()
        await wire.send("response.create", items=[said("begin")])
        await wire.until("response.created")
    reasons = [shown(span).get("gen_ai.response.finish_reasons") for span in spans.ended]
    assert reasons[:3] == [("length",), ("abort",), None] and len(reasons) == 4, "the last one was cut off"
    failed = spans.ended[2]
    assert failed.status.status_code is StatusCode.ERROR and failed.status.description is None
    assert shown(failed)["error.type"] == "context_length_exceeded" and not failed.events


async def test_a_span_is_a_child_of_the_clients_span_whatever_socket_the_session_is_on(
    tmp_path: Path,
) -> None:
    spans = Spans()
    async with keyed(tmp_path, KEYS, tracer=spans.tracer) as served:
        async with served.wire("alpha", trace=PARENT) as wire:
            await wire.say()
        async with served.wire("alpha", trace={"traceparent": "rubbish"}) as wire:
            await wire.say()
        async with served.wire("alpha", trace={"traceparent": PARENT["traceparent"][:-1] + "0"}) as wire:
            await wire.say()
    first, second = spans.ended
    assert first.parent is not None and f"{first.parent.span_id:016x}" == SPAN
    assert f"{first.context.trace_id:032x}" == TRACE and first.context.trace_state.get("vendor") == "1"
    assert second.parent is None, "what is no trace context is ignored; one that is not sampled, too"


def test_the_headers_of_a_socket_are_honoured() -> None:
    spans = Spans()
    link = Scripted(spoken, END, ahead=1)
    service = Service(GatewaySettings(), "pocket", link, tracer=spans.tracer)
    with TestClient(build_app(service), base_url="http://localhost") as client:
        service.open(SessionRegistry(link, Language.of(ours("chatml"))))
        with client.websocket_connect("/v1/realtime", headers={**PARENT, "host": "localhost"}) as socket:
            socket.send_json({"type": "response.create", "items": [said("begin")]})
            while socket.receive_json()["type"] != "response.done":
                pass
    (span,) = spans.ended
    assert span.parent is not None and f"{span.parent.span_id:016x}" == SPAN


async def test_without_a_tracer_turns_run_without_spans(tmp_path: Path) -> None:
    async with keyed(tmp_path, KEYS) as served, served.wire("alpha") as wire:
        assert (await wire.say())["status"] == "completed"
        assert served.service.turns.tracer is None


def test_an_endpoint_that_is_no_url_and_a_missing_extra_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionInvalid, match="'localhost:4318' is no URL"):
        GatewaySettings(traces_endpoint="localhost:4318")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter", None)
    settings = GatewaySettings(port=0, traces_endpoint="http://localhost:4318")
    assert run(settings, EngineSettings(model="pocket", device="cpu")) == 2
    assert "--otlp-traces-endpoint needs the extra otel" in capsys.readouterr().err


def test_the_service_has_a_name_that_the_environment_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert tracing._resource().attributes["service.name"] == "holdfast"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    assert tracing._resource().attributes["service.name"] == "chat-eu"
