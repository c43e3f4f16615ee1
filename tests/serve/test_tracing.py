"""Spans against the statistics of responses; no text in them, and no spans where tracing is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from forerun import LLM
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.errors import BadRequest
from forerun.serve import ServeConfig, create_app
from forerun.serve.observer import RequestObserver
from forerun.serve.tracing import OPERATIONS, TraceRecorder, _url, open_traces
from tests.serve.common import ASKED, CHAT, NAME, Running, serving, wait_for

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "heliotrope"


@pytest.fixture(scope="module")
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(llm: LLM, exported: InMemorySpanExporter) -> Iterator[Running]:
    config = ServeConfig(NAME)
    app = create_app(llm, config)
    report = TraceRecorder(SimpleSpanProcessor(exported), {}).record
    app.add_middleware(RequestObserver, report=report, paths=OPERATIONS)
    with serving(llm, app, config) as made:
        yield made


def spans(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The spans of the one request that ended, by name."""
    wait_for(lambda: any(span.kind is SpanKind.SERVER for span in exported.get_finished_spans()))
    found = exported.get_finished_spans()
    exported.clear()
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_what_it_went_through(traced: Running, exported: InMemorySpanExporter, stream: bool):
    own = {"statistics": True, "ignore_eos": True, "speculation": {"drafter": "lookup", "depth": 4}}
    messages = [{"role": "user", "content": f"{SECRET} one two {SECRET} one two {SECRET} one two"}]
    body = ASKED | {"stream": stream, "forerun": own, "messages": messages, "max_tokens": 40}
    with all_drafts_verified(traced.llm.engine):
        response = traced.post(CHAT, body)
    found = spans(exported)
    root = found.pop(f"POST {CHAT}")
    assert list(found) == ["prepare", "queue", "prefill", "decode"] and root.parent is None
    assert root.attributes is not None and root.status.status_code is StatusCode.UNSET
    assert root.attributes["gen_ai.usage.output_tokens"] == 40 and root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["forerun.stream"] is stream
    assert root.attributes["gen_ai.response.model"] == NAME and root.attributes["gen_ai.request.temperature"] == 0
    assert root.attributes["forerun.request_id"] == response.headers["x-request-id"]
    for before, after in zip(list(found.values()), list(found.values())[1:], strict=False):
        assert before.end_time == after.start_time
    for span in found.values():
        assert span.parent is not None and span.parent.span_id == root.context.span_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time  # type: ignore[operator]
    assert [event.name for event in root.events] == ["first_token"]
    assert root.events[0].timestamp == found["decode"].start_time
    if not stream:
        usage = response.json()["forerun"]["statistics"]
        assert seconds(found["queue"]) == pytest.approx(usage["queued_s"], abs=1e-6)
        assert seconds(found["decode"]) == pytest.approx(usage["total_s"] - usage["ttft_s"], abs=1e-6)
        assert found["decode"].attributes["forerun.drafted_tokens"] == usage["drafted"] > 0  # type: ignore[index]
        assert found["prefill"].attributes["forerun.prompt_tokens.computed"] == usage["served"]["computed"]  # type: ignore[index]
        assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert all(SECRET not in span.to_json() for span in (root, *found.values()))


def test_a_callers_trace_goes_on_here(traced: Running, exported: InMemorySpanExporter):
    traced.post(CHAT, ASKED, headers={"traceparent": PARENT})
    root = spans(exported)[f"POST {CHAT}"]
    assert root.parent is not None and format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert format(root.context.trace_id, "032x") == PARENT.split("-")[1]
    traced.post(CHAT, ASKED, headers={"traceparent": PARENT[:-1] + "0"})  # not sampled there: not here either
    traced.post(CHAT, ASKED, headers={"traceparent": "00-nonsense-01"})
    assert spans(exported)[f"POST {CHAT}"].parent is None


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_dialects_are_traced(traced: Running, exported: InMemorySpanExporter, path: str):
    asked = {
        "model": NAME,
        "messages": ASKED["messages"],
        "input": "Who counts?",
        "max_tokens": 4,
        "max_output_tokens": 4,
    }
    assert traced.post(path, asked).status_code == 200
    root = spans(exported)[f"POST {path}"]
    assert root.attributes is not None and root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize(("change", "status"), [({"model": "gpt-9"}, 404), ({"temperature": -1}, 400)])
def test_refusals_have_a_span(traced: Running, exported: InMemorySpanExporter, change: dict[str, Any], status: int):
    assert traced.post(CHAT, ASKED | change).status_code == status
    found = spans(exported)
    root = found.pop(f"POST {CHAT}")
    assert not found and root.status.status_code is StatusCode.UNSET
    assert root.attributes is not None and root.attributes["error.type"] == str(status)


def test_failures_are_errors(traced: Running, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **named: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(traced.llm.driver, "request", fail)
    response = traced.post(CHAT, ASKED)
    assert response.status_code == 500 and SECRET not in response.text
    root = spans(exported)[f"POST {CHAT}"]
    assert root.status.status_code is StatusCode.ERROR and SECRET not in root.to_json()


def test_watching_is_not_traced(traced: Running, exported: InMemorySpanExporter):
    for path in ("/metrics", "/health", "/v1/models"):
        assert traced.get(path).status_code == 200
    assert not exported.get_finished_spans()


def test_where_spans_go():
    assert _url("http://localhost:4318") == "http://localhost:4318/v1/traces" == _url("http://localhost:4318/")
    assert _url("https://traces.example/own/path") == "https://traces.example/own/path"
    for wrong in ("localhost:4318", "", "ftp://a"):
        with pytest.raises(BadRequest, match="traces cannot go"):
            open_traces(wrong, {})


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_off_unless_asked_for(environ: dict[str, str]):
    assert open_traces(None, environ) is None


def test_variables_switch_them_on():
    made = open_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"})
    assert made is not None
    made.close()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadRequest, match="needs a package") as caught:
        open_traces("http://localhost:4318", {})
    assert "forerun[otel]" in caught.value.hint
    assert open_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is None
    assert "forerun[otel]" in caplog.text


def test_nothing_is_imported_where_they_are_off():
    code = "import sys, forerun.serve.app; from forerun.serve.tracing import open_traces; open_traces(None, {}); "
    code += "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
