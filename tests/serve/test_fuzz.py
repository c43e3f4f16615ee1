"""Made-up schemas, grammars, parameters and bodies beside streams: each is answered or refused, no stream changes."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forerun_research.scripts.fuzz_requests import any_request, any_session, mutated
from tests.serve.common import NAME, Running, wait_for
from tests.serve.test_isolation import streams

REQUESTS = 60  # of one seed


@pytest.mark.parametrize("seed", [1, 2])
def test_made_up_requests_beside_streams(served: Running, seed: int):
    draws = random.Random(seed)
    kinds = [any_request] * 4 + [mutated, any_session]
    asked = [draws.choice(kinds)(draws, NAME) for _ in range(REQUESTS)]

    def ask(request: tuple[str, dict[str, Any]]) -> int:
        path, body = request
        text = json.dumps(body)  # lone surrogates as escapes
        response = served.post(path, content=text, headers={"content-type": "application/json"})
        assert response.status_code < 500, (path, text[:600], response.text)
        assert "server_error" not in response.text, (path, text[:600], response.text)
        return response.status_code

    with streams(served), ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(ask, asked))
    assert {200, 400} <= set(statuses) <= {200, 400, 404}
    wait_for(lambda: served.llm.engine.idle)
    assert not served.app.state.admission.num_open and not served.llm.engine.leases
    assert served.llm.engine.output.open_texts == 0
