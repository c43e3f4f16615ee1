"""Log records can be read by programs."""

from __future__ import annotations

import json
import logging

import pytest

from forerun import LLM
from forerun.errors import BadRequest
from forerun.serve.logs import JsonFormatter, configure_logs
from tests.serve.common import ASKED, CHAT, NAME, running


def test_records_as_json(llm: LLM, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "forerun.serve")
    with running(llm) as made:
        made.post(CHAT, ASKED, headers={"x-request-id": "ann-9"})
    record = next(record for record in caplog.records if "ann-9" in record.getMessage())
    found = json.loads(JsonFormatter().format(record))
    assert (found["request_id"], found["path"], found["status"], found["level"]) == ("ann-9", CHAT, 200, "INFO")
    assert (
        found["completion"] == 8 and found["seconds"] > 0 and found["key"] == "-" and found["id"].startswith("chatcmpl")
    )
    assert ASKED["messages"][0]["content"] not in json.dumps(found) and NAME not in found["message"]
    with pytest.raises(BadRequest, match="log-format"):
        configure_logs("xml")
