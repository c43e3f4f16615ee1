"""A request's id goes through headers, log and traces."""

from __future__ import annotations

import json
import logging

import pytest

from forerun import LLM
from forerun.serve.logs import JsonFormatter
from tests.serve.common import ASKED, CHAT, Running, running


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/health", "/nothing"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_response_has_the_clients_id(served: Running, path: str, stream: bool):
    for body in (ASKED | {"stream": stream}, ASKED | {"temperature": -1}, {}):
        found = served.post(path, body, headers={"x-request-id": "ann-7"}).headers
        assert found["x-request-id"] == found["request-id"] == "ann-7"


def test_other_ids_are_made_here(served: Running):
    ids = [
        served.post(CHAT, ASKED, headers={"x-request-id": given}).headers["x-request-id"] for given in ("", "a b\tc")
    ]
    assert all(found.startswith("req_") for found in ids) and len(set(ids)) == 2
    assert served.client().chat.completions.create(**ASKED)._request_id.startswith("req_")


def test_unexpected_errors_have_it_too(served: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.app.state.context.metrics, "text", lambda: 1 / 0)
    response = served.get("/metrics", headers={"x-request-id": "ann-8"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "ann-8"


def test_a_refused_request_has_one_line_with_its_id(llm: LLM, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "forerun.serve")
    with running(llm) as made:
        for number, (path, body) in enumerate([(CHAT, {}), (CHAT, ASKED | {"n": 0}), ("/a%0Ab?key=secret", {})]):
            made.post(path, body, headers={"x-request-id": f"ann-1{number}"})
        made.get("/health", headers={"x-request-id": "ann-13"})
    for number, (path, status) in enumerate([(CHAT, 400), (CHAT, 400), ("/a%0Ab", 404)]):
        lines = [record for record in caplog.records if f"ann-1{number}" in record.getMessage()]
        assert len(lines) == 1 and "\n" not in lines[0].getMessage() and "secret" not in lines[0].getMessage()
        found = json.loads(JsonFormatter().format(lines[0]))
        assert (found["request_id"], found["path"], found["status"]) == (f"ann-1{number}", path, status)
    assert not any("ann-13" in record.getMessage() for record in caplog.records)
