"""OpenTelemetry traces: one span for each completion request, with its phases as children.

Spans are recorded when a request has ended, from times that were measured anyway: while the engine works, tracing does
nothing. Spans have counts and times, never text. The packages are an extra, `pip install forerun[otel]`, and are
imported only where tracing is on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

import forerun
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from forerun.core import Usage
    from forerun.serve.response import CompletionResponse

log = logging.getLogger("forerun.serve")

OPERATIONS = dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses"), "chat")
OPERATIONS |= {"/v1/completions": "text_completion"}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NANOSECONDS_PER_S = 1_000_000_000
_HINT = "pip install 'forerun[otel]'"


def open_traces(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> TraceRecorder | None:
    """TraceRecorder sent to `endpoint`, or to that of the OTEL_* variables; None where neither is set."""
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
            raise BadRequest(f"--traces needs a package that is not installed: {error.name}", _HINT) from None
        log.warning("OTEL_* variables turn traces on, but %s is not installed: %s", error.name, _HINT)
        return None
    return TraceRecorder(BatchSpanProcessor(OTLPSpanExporter(endpoint=where)))


def _url(endpoint: str) -> str:
    """OTLP's own path where only a host is given, as its specification has it."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequest(f"traces cannot go to {endpoint!r:.80}", "give a URL such as http://localhost:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class TraceRecorder:
    """Makes spans and hands them to a processor; a request's `traceparent` is honoured, its sampling too."""

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

    def record(self, scope: Scope, status: int, arrived: float, response: CompletionResponse | None) -> None:
        """The spans of a request that has just ended; `arrived` by the clock of `time.perf_counter`.
        `response`: None where the request was refused before there was one."""
        from opentelemetry.trace import SpanKind

        clock, path = _Clock(), scope["path"]
        parent = self._propagator.extract(dict(Headers(scope=scope).items()))
        attributes = {"http.request.method": scope["method"], "http.route": path, "http.response.status_code": status}
        attributes["forerun.request_id"] = scope["state"]["request_id"]
        root = self._tracer.start_span(
            f"{scope['method']} {path}", parent, SpanKind.SERVER, attributes, start_time=clock(arrived)
        )
        if root.is_recording():
            if response is not None:
                self._add_phases(root, path, response, arrived, clock)
            _set_status(root, status)
        root.end()

    def _add_phases(self, root: Span, path: str, response: CompletionResponse, arrived: float, clock: _Clock) -> None:
        from opentelemetry.trace import set_span_in_context

        usage, start, parent_context = response.usage, response.submitted, set_span_in_context(root)
        root.set_attributes(_attributes(path, response))
        if start is None:  # disconnected or refused before it was submitted
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
            span = self._tracer.start_span(name, parent_context, attributes=attributes, start_time=clock(begins))
            span.end(clock(max(begins, ends)))

    def close(self) -> None:
        """Send what is still buffered."""
        self._provider.shutdown()


class _Clock:
    """From `time.perf_counter` to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def __call__(self, moment: float) -> int:
        return int((moment + self._offset) * NANOSECONDS_PER_S)


def _attributes(path: str, response: CompletionResponse) -> dict[str, Any]:
    """Attributes of OpenTelemetry's conventions for generative models; what they lack is under `forerun`."""
    usage = response.usage
    reasons = [part.finish_reason for part in response.choices if part.finish_reason is not None]
    found: dict[str, Any] = {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "forerun",
        "gen_ai.request.model": response.encoder.model,
        "gen_ai.response.model": response.encoder.model,
        "gen_ai.response.id": response.encoder.id,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": response.encoder.written_tokens(usage),
        "gen_ai.request.choice.count": len(response.choices),
        "forerun.stream": bool(response.request_body.stream),
    }
    if response.params is not None:
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty"):
            value = getattr(response.params, name)
            if value is not None:
                found[f"gen_ai.request.{name}"] = value
        found["gen_ai.output.type"] = "text" if response.params.grammar is None else "json"
    if response.session is not None:
        found["gen_ai.conversation.id"] = response.session["name"]
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


def _set_status(root: Span, status: int) -> None:
    """A server's span is an error from 500 on; what clients did wrong is an attribute only."""
    from opentelemetry.trace import Status, StatusCode

    if status >= 400:
        root.set_attribute("error.type", str(status))
    if status >= 500:
        root.set_status(Status(StatusCode.ERROR))
