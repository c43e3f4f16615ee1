"""OpenTelemetry traces: one span for each request for answers, with what it went through as its children.

Everything is recorded when a request has ended, from times that were taken anyway: while an answer is made, tracing
does nothing. Spans have counts and times, never text. The packages are an extra, `pip install forerun[otel]`, and are
imported only where traces were asked for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Scope

import forerun
from forerun.errors import BadRequest
from forerun.serve.outcome import Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from forerun.core import Usage
    from forerun.serve.answer import Answer

log = logging.getLogger("forerun.serve")

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NANO = 1_000_000_000
_HINT = "pip install 'forerun[otel]'"


def open_traces(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> Traces | None:
    """Traces sent to `endpoint`, or to where OTEL_* variables say; None where neither asks for any."""
    named = any(environ.get(name) for name in ENDPOINTS) or environ.get("OTEL_TRACES_EXPORTER") == "otlp"
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (off or not named):
        return None
    where = None if endpoint is None else _url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        if endpoint is not None:
            raise BadRequest(f"--traces needs a package that is not here: {error.name}", _HINT) from None
        log.warning("OTEL_* variables ask for traces, but %s is not installed: %s", error.name, _HINT)
        return None
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=where)))


def _url(endpoint: str) -> str:
    """OTLP's own path where only a host is given, as its specification has it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest(f"traces cannot go to {endpoint!r:.80}", "give a URL such as http://localhost:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class Traces:
    """Makes spans and hands them to a processor; a caller's `traceparent` is honoured, its sampling too."""

    def __init__(self, processor: SpanProcessor, environ: Mapping[str, str] = os.environ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.version": forerun.__version__}
        if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            about["service.name"] = "forerun"
        self._provider = TracerProvider(resource=Resource.create(about))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("forerun", forerun.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, scope: Scope, status: int, arrived: float, answer: Answer | None) -> None:
        """The spans of a request that has just ended; `arrived` by the clock of `time.perf_counter`. `answer`: None
        where it was refused before there was any."""
        from opentelemetry.trace import SpanKind

        clock, path = _Clock(), scope["path"]
        parent = self._propagator.extract(dict(Headers(scope=scope).items()))
        attributes = {"http.request.method": scope["method"], "http.route": path, "http.response.status_code": status}
        root = self._tracer.start_span(
            f"{scope['method']} {path}", parent, SpanKind.SERVER, attributes, start_time=clock(arrived)
        )
        if root.is_recording():
            if answer is not None:
                self._answered(root, path, answer, arrived, clock)
            _judge(root, status)
        root.end()

    def _answered(self, root: Span, path: str, answer: Answer, arrived: float, clock: _Clock) -> None:
        from opentelemetry.trace import set_span_in_context

        usage, start, inside = answer.usage, answer.submitted, set_span_in_context(root)
        root.set_attributes(_attributes(path, answer))
        if start is None:  # gone or refused while it was read
            return
        queued, first, end = start + usage.queued_s, start + usage.ttft_s, start + usage.total_s
        parts: list[tuple[str, float, float, dict[str, Any]]] = [("prepare", arrived, start, {})]
        if usage.total_s:
            parts.append(("queue", start, queued, {}))
        if usage.ttft_s:
            parts.append(("prefill", queued, first, _prefill(usage)))
            parts.append(("decode", first, end, _decode(usage)))
            root.add_event("first_token", timestamp=clock(first))
        if usage.provisional_s:
            root.add_event("first_provisional_token", timestamp=clock(start + usage.provisional_s))
        for name, begins, ends, attributes in parts:
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=clock(begins))
            span.end(clock(max(begins, ends)))

    def close(self) -> None:
        """Send what is still here."""
        self._provider.shutdown()


class _Clock:
    """From `time.perf_counter` to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def __call__(self, moment: float) -> int:
        return int((moment + self._offset) * NANO)


def _attributes(path: str, answer: Answer) -> dict[str, Any]:
    """Names as OpenTelemetry has them for generative models; what it has no name for is under `forerun`."""
    usage = answer.usage
    reasons = [part.finish_reason for part in answer.collected if part.finish_reason is not None]
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "forerun",
        "gen_ai.request.model": answer.form.model,
        "gen_ai.response.id": answer.form.id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "forerun.outputs": len(answer.collected),
        "forerun.stream": bool(answer.asked.stream),
    }
    if answer.params is not None:
        found["gen_ai.request.max_tokens"] = answer.params.max_tokens
        found["gen_ai.request.temperature"] = float(answer.params.temperature)
    return found


def _prefill(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {f"forerun.prompt_tokens.{name}": tokens for name, tokens in usage.served.items()}
    if usage.prefill is not None:
        report = usage.prefill
        found |= {"forerun.prefill.source": report.source, "forerun.prefill.cost": float(report.cost)}
        found |= {"forerun.prefill.rounds": report.rounds, "forerun.prefill.fell_back": bool(report.fell_back)}
    return found


def _decode(usage: Usage) -> dict[str, Any]:
    seconds = usage.total_s - usage.ttft_s
    found: dict[str, Any] = {
        "forerun.steps": usage.steps,
        "forerun.drafted_tokens": usage.drafted,
        "forerun.accepted_tokens": usage.accepted,
        "forerun.drafting_share": min(1.0, usage.draft_s / seconds) if seconds > 0 else 0.0,
        "forerun.preemptions": usage.preemptions,
    }
    for name, tally in usage.drafters.items():
        found |= {f"forerun.drafted_tokens.{name}": tally.drafted, f"forerun.accepted_tokens.{name}": tally.accepted}
    return found


def _judge(root: Span, status: int) -> None:
    """A server's span has failed where the server has; what clients got wrong is told, but is no failure of its."""
    from opentelemetry.trace import Status, StatusCode

    if status >= 400:
        root.set_attribute("error.type", str(status))
    if status >= 500:
        root.set_status(Status(StatusCode.ERROR))


class Traced(Outcome):
    """Records the spans of every request for answers, when it has ended."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        super().__init__(app)
        self.traces = traces

    def wanted(self, scope: Scope) -> bool:
        return super().wanted(scope) and scope["path"] in OPERATIONS

    def ended(self, scope: Scope, status: int, arrived: float, answer: Answer | None) -> None:
        self.traces.record(scope, status, arrived, answer)
