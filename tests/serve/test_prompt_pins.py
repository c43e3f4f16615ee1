"""Prefixes that requests ask to keep stay in the pool while others fill it, until their time is over; in bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import LLM
from forerun.serve import prompt_pins
from forerun.serve.config import ApiKeys
from forerun.serve.prompt_pins import cache_marks
from forerun.serve.schema import ChatRequest
from tests.serve.common import CHAT, NAME, Running, error, running

TEXT = "The keeper of the lamp writes down what he sees from the pier. " * 8
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def clock(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What pins have for a clock."""
    llm.clear_cache()
    now = [0.0]
    monkeypatch.setattr(llm.engine.scheduler.pins, "_clock", lambda: now[0])
    yield now
    now[0] = 1e9
    llm.engine.scheduler.pins.expire()


def ask(made: Running, text: str, more: Any = None, key: str = "", **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": text} | (more or {}), {"type": "text", "text": " What does it say?"}]
    body = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": content}]} | fields
    response = made.post(CHAT, body, headers={"x-api-key": key} if key else {})
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]


def fill(made: Running) -> None:
    """As a request that needs the whole pool would: all that is not pinned goes."""
    with made.llm.driver.exclusive() as engine:
        engine.scheduler.make_room(engine.pool.num_pages)


@pytest.mark.parametrize(("mark", "ttl"), [(MARK, 300), ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600)])
def test_a_marked_prefix_stays_until_its_time_is_over(served: Running, clock: list[float], mark: Any, ttl: float):
    first = ask(served, TEXT, mark)
    assert first["cache_write_tokens"] > 100 and first["cached_tokens"] == 0
    fill(served)
    clock[0] = ttl - 1
    assert ask(served, TEXT)["cached_tokens"] >= first["cache_write_tokens"] - 16
    fill(served)  # reading it without a mark has not prolonged its time
    clock[0] = ttl + 1
    fill(served)
    assert ask(served, TEXT)["cached_tokens"] < 32


def test_a_prompt_without_a_mark_goes(served: Running, clock: list[float]):
    assert ask(served, TEXT)["cache_write_tokens"] == 0
    fill(served)
    assert ask(served, TEXT)["cached_tokens"] < 32


def test_a_cache_key_keeps_its_latest_prompt(served: Running, clock: list[float]):
    for text in (TEXT, f"Then {TEXT}"):
        ask(served, text, prompt_cache_key="ann", forerun={"prefill": "exact"})
        fill(served)
        assert ask(served, text)["cached_tokens"] > 100
    fill(served)
    assert ask(served, TEXT)["cached_tokens"] < 32  # replaced
    responses = {"model": NAME, "input": f"Once {TEXT}", "max_output_tokens": 2, "prompt_cache_key": "bob"}
    made = served.post("/v1/responses", responses).json()
    assert made["usage"]["input_tokens_details"]["cache_write_tokens"] > 100
    wrong = served.post(CHAT, {"model": NAME, "messages": [{"role": "user", "content": "a"}], "prompt_cache_key": 7})
    assert error(wrong, 400)["param"] == "prompt_cache_key"


def test_pins_are_bounded_and_each_key_has_its_own(llm: LLM, clock: list[float], monkeypatch: pytest.MonkeyPatch):
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob")}
    lines = "\n".join(f"{name} {digest}" for name, digest in keys.items())
    monkeypatch.setattr(prompt_pins, "MAX_PINS", 3)
    pins = llm.engine.scheduler.pins
    with running(llm, keys=ApiKeys.parse(lines, "test")) as made:
        ask(made, TEXT, prompt_cache_key="x", key="bob")
        for number in range(5):
            ask(made, f"{number} {TEXT}", prompt_cache_key=f"{number}", key="ann")
        held = [name.split(" ", 2)[2] for name in pins._pins if pins.pages(name)]
        assert sorted(held) == ["2", "3", "4", "x"]
        monkeypatch.setattr(prompt_pins, "MAX_PINNED_SHARE", 40 / llm.engine.pool.num_pages)
        ask(made, f"5 {TEXT}", prompt_cache_key="5", key="ann")
        assert 0 < pins.distinct_pages <= 40
        held = [name.split(" ", 2)[2] for name in pins._pins if pins.pages(name)]
        assert "x" in held  # the key with the most pages has given way


def test_what_is_not_cached_is_not_kept(served: Running, clock: list[float]):
    assert ask(served, TEXT, MARK, prompt_cache_key="no", forerun={"cache": False})["cache_write_tokens"] == 0
    assert served.llm.engine.scheduler.pins.distinct_pages == 0


def test_the_last_mark_of_each_time_counts():
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    function = {"type": "function", "function": {"name": "f"}}
    parts = [{"type": "text", "text": "ab"} | MARK, {"type": "text", "text": "cd"}]
    body = ChatRequest.model_validate(
        {
            "model": NAME,
            "tools": [function | hour],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        }
    )
    marks = [(mark.message, mark.chars, mark.ttl) for mark in cache_marks(body.messages, body.tools or ())]
    assert marks == [(0, None, 3600.0), (1, 2, 300.0)]
