"""Requests made up from the OpenAPI document, right ones and wrong ones: none of them makes the server fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from forerun import LLM
from tests.serve.common import ASKED, CHAT, Running, running

RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ANSWERS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def small(llm: LLM) -> Iterator[Running]:
    """Whatever is asked for, answers are short."""
    with running(llm, max_model_len=48, max_request_s=20.0) as made:
        yield made


def statuses(made: Running, operation: Any, mode: GenerationMode, examples: int) -> Counter[int]:
    """What requests of one kind were answered with, each in a form that clients can read."""
    answered: Counter[int] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=made.url)
        answered[response.status_code] += 1
        case.validate_response(response, checks=[not_a_server_error, status_code_conformance])
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    ask()
    return answered


@pytest.mark.parametrize("mode", [RIGHT, WRONG], ids=["right", "wrong"])
@pytest.mark.parametrize("path", ANSWERS)
def test_requests_for_answers(small: Running, path: str, mode: GenerationMode):
    schema = schemathesis.openapi.from_dict(small.app.openapi())
    answered = statuses(small, schema[path]["POST"], mode, 50)
    assert set(answered) <= ({200, 400, 404, 429} if mode == RIGHT else {200, 400, 404, 405}) and answered[400]
    assert small.post(CHAT, ASKED).status_code == 200
    assert not small.app.state.admission.num_open and not small.app.state.context.sessions.busy


def test_all_others(small: Running):
    schema = schemathesis.openapi.from_dict(small.app.openapi())
    found: list[Any] = [operation.ok() for operation in schema.get_all_operations()]  # type: ignore[union-attr]
    others = [operation for operation in found if operation.path not in ANSWERS]
    assert {"/v1/models", "/v1/models/{model}", "/forerun/sessions/{name}", "/metrics"} <= {o.path for o in others}
    for operation in others:
        assert set(statuses(small, operation, RIGHT, 8)) <= {200, 400, 404}, operation.path
