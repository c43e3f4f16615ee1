"""What Prometheus reads, against the statistics in the responses."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forerun import LLM
from tests.serve.common import ASKED, CHAT, ENDLESS, NAME, Running, running, slowed, wait_for

Figures = dict[str, float]
FORCED = {"drafter": "lookup", "depth": 4}  # drafts at every step, whatever it costs


def read(made: Running) -> Figures:
    """Every sample by its name and labels, as Prometheus' own parser sees them."""
    response = made.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: Figures = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def grown(before: Figures, after: Figures, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def by_label(before: Figures, after: Figures, name: str) -> dict[str, float]:
    """What has grown, by the value of the one label."""
    keys = [key for key in after if key.startswith(f"{name}{{")]
    return {key.split("=")[1].rstrip("}"): grown(before, after, key) for key in keys}


def asked(made: Running, **more: Any) -> dict[str, Any]:
    body = ASKED | {"forerun": {"statistics": True, "ignore_eos": True, "speculation": FORCED}} | more
    return made.post(CHAT, body).json()["forerun"]["statistics"]


def test_tokens_are_those_of_the_answers(llm: LLM, served: Running):
    llm.clear_cache()
    before = read(served)
    question = "Say it again: one two three one two three one two three. " * 4
    messages = [{"role": "user", "content": question}]
    usages = [asked(served, messages=messages, max_tokens=60), asked(served, messages=messages, max_tokens=30)]
    after = read(served)
    assert grown(before, after, "forerun_answers_total") == 2
    assert grown(before, after, "forerun_completion_tokens_total") == 90
    sources = by_label(before, after, "forerun_prompt_tokens_total")
    assert set(sources) == {"pool", "host", "disk", "store", "approximate", "computed"}
    for source, tokens in sources.items():
        assert tokens == sum(usage["served"].get(source, 0) for usage in usages), source
    assert sources["pool"] > 0 < sources["computed"]
    for kind in ("drafted", "accepted"):
        counted = by_label(before, after, f"forerun_{kind}_tokens_total")
        told = sum(usage["drafters"].get("lookup", {}).get(kind, 0) for usage in usages)
        assert counted["lookup"] == told and sum(counted.values()) == told
    assert by_label(before, after, "forerun_drafted_tokens_total")["lookup"] > 0


def test_times_are_observed_once_for_each_answer(served: Running):
    before = read(served)
    usages = [asked(served), asked(served)]
    after = read(served)
    for name in ("ttft", "time_per_token", "queue_wait", "request_duration"):
        assert grown(before, after, f"forerun_{name}_seconds_count") == 2, name
    waited = grown(before, after, "forerun_queue_wait_seconds_sum")
    assert waited == pytest.approx(sum(usage["queued_s"] for usage in usages))
    ttft = grown(before, after, "forerun_ttft_seconds_sum")
    assert (
        sum(usage["ttft_s"] for usage in usages) < ttft < grown(before, after, "forerun_request_duration_seconds_sum")
    )
    per_token = grown(before, after, "forerun_time_per_token_seconds_sum")
    assert per_token == pytest.approx(sum(1 / usage["tokens_per_second"] for usage in usages))


def test_pages_are_the_pools(llm: LLM, served: Running):
    asked(served)
    found = read(served)
    pool = llm.engine.pool
    assert found["forerun_pages"] == pool.num_pages == found["forerun_pages_used"] + found["forerun_pages_free"]
    assert 0 < found["forerun_pages_cached"] == llm.engine.tree.num_pages
    assert found["forerun_pages_pinned"] == 0
    with llm.session("pinning") as session:
        session.append("word " * 100)
        session.answer()
        pinned = read(served)["forerun_pages_pinned"]
        assert pinned == len(llm.engine.scheduler.pins._pins["pinning"].pages) > 0
    assert read(served)["forerun_pages_pinned"] == 0


def test_running_and_waiting_sequences(tiny_folder: Any):
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, max_num_seqs=1) as narrow:
        patch, _ = slowed(narrow)
        with running(narrow, max_queue=1) as made, contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(httpx.stream("POST", made.url + CHAT, json=ENDLESS, timeout=30))
            assert made.post(CHAT, ASKED).status_code == 429
            wait_for(lambda: bool(narrow.engine.scheduler.running))
            found = read(made)
            assert found["forerun_answers_open"] == 2 == found["forerun_answers_limit"]
            assert found["forerun_sequences_running"] == 1 == found["forerun_sequences_waiting"]
            assert found["forerun_requests_total{path=/v1/chat/completions,status=429}"] == 1
        patch.undo()


def test_cancelled_answers_are_counted(llm: LLM):
    with running(llm) as made:
        before = read(made)
        patch, _ = slowed(llm)
        body = json.dumps(ENDLESS).encode()
        with socket.create_connection(("127.0.0.1", made.port)) as sock:
            lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
            head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines])
            sock.sendall(head.encode() + b"\r\n\r\n" + body)
            wait_for(lambda: bool(llm.engine.scheduler.running) and llm.engine.scheduler.running[0].num_generated > 5)
        wait_for(lambda: llm.engine.idle and made.app.state.admission.num_open == 0)
        patch.undo()
        gone = "forerun_requests_total{path=/v1/chat/completions,status=499}"
        wait_for(lambda: grown(before, read(made), gone) == 1)
        after = read(made)
        assert grown(before, after, "forerun_completion_tokens_total") > 5
        assert grown(before, after, "forerun_answers_total") == 0


def test_nothing_that_is_sent_adds_a_label(served: Running):
    for path in ("/v1/nothing", "/anything/else", "/v1/models/gpt-9", f"/v1/models/{NAME}"):
        served.get(path)
    served.post(CHAT, ASKED)
    before = set(read(served))
    for number in range(20):
        served.get(f"/page-{number}")
        served.get(f"/v1/models/model-{number}")
        served.post(CHAT, ASKED | {"model": f"model-{number}", "user": f"user-{number}"})
        served.post(CHAT, ASKED | {"forerun": {"speculation": f"drafter-{number}"}})
        served.post(CHAT, {})
    after = read(served)
    new = set(after) - before
    assert new <= {f"forerun_requests_{kind}{{path={CHAT},status={status}}}" for kind in ("total", "created")
                   for status in (400, 404)}  # fmt: skip
    assert after["forerun_requests_total{path=other,status=404}"] >= 22
    assert after["forerun_requests_total{path=/v1/models,status=404}"] >= 21


def test_names_follow_the_conventions(served: Running):
    for family in text_string_to_metric_families(served.get("/metrics").text):
        assert family.name.startswith(("forerun_", "process_")) and family.documentation
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_ratio")), family.name


def test_the_dashboard_asks_for_what_there_is(served: Running):
    served.post(CHAT, ASKED)
    known = set()
    for family in text_string_to_metric_families(served.get("/metrics").text):
        known |= {family.name} | {f"{family.name}_{end}" for end in ("total", "bucket", "sum", "count", "info")}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8"))
    assert {"title", "uid", "panels", "templating", "time", "schemaVersion"} <= set(dashboard)
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers)) > 10
    used = set()
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", []):
            names = names_in(target["expr"])
            assert names and names <= known, (panel["title"], names - known)
            used |= names
    for word in ("ttft", "time_per_token", "queue_wait", "sequences_waiting", "pages_used", "prompt_tokens",
                 "drafted", "accepted", "prefill_cost", "check_failures", "requests_total"):  # fmt: skip
        assert any(word in name for name in used), word


def names_in(expression: str) -> set[str]:
    """Metric names of a PromQL expression: words that are ours, outside labels."""
    return set(re.findall(r"\b(?:forerun|process)_[a-z_]+", expression))
