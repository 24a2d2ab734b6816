"""A span of OpenTelemetry for each turn, by the semantic conventions for generative AI. Text of prompts and
replies is never part of a span.

This module needs the extra ``otel``; it is imported only where a server exports traces.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ... import __version__
from ...sessions.conversation.items import FunctionCall
from ...sessions.turn.events import ReplyDone
from ...sessions.turn.response import TurnResponse
from ..access.auth import TurnCaller
from ..errors import TracingUnavailable, wire_error
from .turns import FINISHED, TurnTimes

SERVICE = "holdfast"
UNNAMED = "unknown_service"
"""The beginning of the ``service.name`` that OpenTelemetry's SDK sets if none is configured. `SERVICE` replaces
it."""
TRACES = "/v1/traces"
"""The path that is added to an endpoint's URL without a path."""


def otlp_provider(endpoint: str) -> TracerProvider:
    """Make a tracer provider that sends spans to the URL ``endpoint`` by OTLP over HTTP, in batches. Its
    resource (service name and version) and its sampler follow the standard's ``OTEL_`` variables.

    Raises ``TracingUnavailable`` if the exporter's package is not installed.
    """
    parts = urlsplit(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable.without(error) from None
    if parts.path in ("", "/"):
        endpoint = parts._replace(path=TRACES).geturl()
    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _resource() -> Resource:
    found = Resource.create({"service.version": __version__})
    if str(found.attributes.get("service.name", UNNAMED)).startswith(UNNAMED):
        found = found.merge(Resource({"service.name": SERVICE}))
    return found


class TurnTracer:
    """Makes the spans of turns. ``provider``: sends them when they end. ``model``: the name of the served
    model, an attribute of each span."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE, __version__)
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, caller: TurnCaller, session_id: str, response: TurnResponse) -> TurnSpan:
        """Start the span of a turn that begins now, with the turn's parameters as attributes. It is a child of
        the span that the caller's trace headers name, if there are any; otherwise it begins a trace."""
        request, sampling = response.request, response.request.sampling
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": response.id,
            "gen_ai.conversation.id": session_id,
            "gen_ai.output.type": "text" if request.format is None else "json",
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
        }
        if request.max_output_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_output_tokens
        parent = self._propagator.extract(caller.trace)
        begun = time.time_ns()
        span = self._tracer.start_span(
            f"chat {self._model}", parent, kind=SpanKind.SERVER, attributes=attributes, start_time=begun
        )
        return TurnSpan(span, begun)

    def close(self) -> None:
        """Send the spans that have ended and are still unsent, and shut the provider down. It may wait for the
        network: call it from a thread."""
        self._provider.shutdown()


class TurnSpan:
    """The OpenTelemetry span of one turn. `end`, `fail` or `close` ends it. ``begun``: when it began, in
    nanoseconds since 1970. When it ends is told by the monotonic clock: the time of day may be set
    meanwhile."""

    def __init__(self, span: Span, begun: int) -> None:
        self._span = span
        self._before = begun - time.monotonic_ns()
        self._over = False

    def end(self, times: TurnTimes, done: ReplyDone) -> None:
        """End the span of a turn that has ended with its last event ``done``, which may tell of an error. Sets
        the token counts, the finish reason and, from ``times``, the seconds to the first output."""
        usage = done.usage
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.input_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [_finish_reason(done)],
                "holdfast.status": done.status.value,
                "holdfast.prefilled_tokens": usage.prefilled_tokens + usage.recomputed_tokens,
            }
        )
        if times.first_seconds is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", times.first_seconds)
        if done.error is not None:
            self._fail(wire_error(done.error).code)
        self.close()

    def fail(self, error: Exception) -> None:
        """End the span of a turn that raised ``error`` before its last event came. Only the error's wire code
        is recorded: its text may quote the client."""
        self._fail(wire_error(error).code)
        self.close()

    def close(self) -> None:
        """End the span without further attributes. Does nothing if it has ended already."""
        if not self._over:
            self._over = True
            self._span.end(self._before + time.monotonic_ns())

    def _fail(self, code: str) -> None:
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR))


def _finish_reason(done: ReplyDone) -> str:
    """The span's finish reason: ``tool_calls`` for a reply that stopped with a tool call, as in Chat
    Completions; otherwise the word of `FINISHED`, or ``error`` if that has none."""
    word = FINISHED.get(done.reason, "error")
    called = any(isinstance(item, FunctionCall) for item in done.items)
    return "tool_calls" if word == "stop" and called else word
