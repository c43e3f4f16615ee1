"""A request is encoded, checked and packed once, in a worker thread: the event loop only queues it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forerun import SamplingParams
from forerun.engine import intake
from forerun.params import Grammar
from tests.serve.common import ASKED, CHAT, NAME, Running

COPY = {"forerun": {"speculation": "copy"}}
ONCE = {"params": 1, "request": 1, "drafters": 1, "pack": 1}


@pytest.fixture
def calls(served: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each part of the way to the engine ran; none of them on a thread that has an event loop."""
    found: Counter[str] = Counter()
    on_loop: list[str] = []

    def counted(owner: Any, name: str, label: str) -> None:
        work: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **more: Any) -> Any:
            found[label] += 1
            try:
                asyncio.get_running_loop()
                on_loop.append(label)
            except RuntimeError:
                pass
            return work(*args, **more)

        monkeypatch.setattr(owner, name, run)

    engine = served.llm.engine
    served.llm.prepare(SamplingParams(grammar=Grammar("json_object")))  # its drafter is made by the first to name it
    counted(served.llm.tokenizer, "apply_chat_template", "template")
    counted(served.llm, "encode", "encode")
    counted(SamplingParams, "__post_init__", "params")
    counted(engine.intake, "check", "request")
    counted(engine.speculator, "check", "drafters")
    counted(engine.intake.grammars, "compile", "grammar")
    counted(intake, "_packed", "pack")
    yield found
    assert on_loop == []


def test_a_chat(served: Running, calls: Counter[str]):
    prediction = {"type": "content", "content": "Nine ships, no more."}
    asked = ASKED | COPY | {"prediction": prediction, "response_format": {"type": "json_object"}}
    assert served.post(CHAT, asked).status_code == 200
    assert calls == ONCE | {"template": 1, "grammar": 1}


def test_a_completion_with_two_prompts(served: Running, calls: Counter[str]):
    asked = {"model": NAME, "prompt": ["The lamp turns", "The lamp stands"], "max_tokens": 2, "stream": True}
    assert served.post("/v1/completions", asked | COPY).status_code == 200
    assert calls == {"encode": 2} | {name: 2 for name in ONCE}


def test_a_turn_of_a_session(served: Running, calls: Counter[str]):
    own = {"forerun": {"session": "counted", "speculation": "copy"}}
    for turn in (1, 2):
        calls.clear()
        assert served.post(CHAT, ASKED | own).status_code == 200
        assert calls == ONCE | {"template": 1}, turn


def test_a_refused_request(served: Running, calls: Counter[str]):
    assert served.post(CHAT, ASKED | {"temperature": -1}).status_code == 400
    assert calls == {"template": 1, "params": 1}
