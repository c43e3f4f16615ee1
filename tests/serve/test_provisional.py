"""Provisional text goes only to requests that set it, and the answer is the exact one all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core import Usage
from forerun.engine.sequence import Event, Request
from tests.prefill.test_engine_prefill import prompt, random_profile
from tests.serve.common import NAME, Running, running

ASKED: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12, "stream": True}


@pytest.fixture(scope="module")
def drafted(tiny_folder: Callable[[str], Path]) -> Iterator[Running]:
    folder = tiny_folder("qwen2")
    profile = random_profile("self", folder)
    options: Any = {
        "dtype": "float32",
        "threads": 1,
        "quiet": True,
        "kv_cache_tokens": 8192,
        "max_num_batched_tokens": 64,
    }
    with LLM(str(folder), prefill_profile=profile, **options) as llm, running(llm) as made:
        yield made


def ask(made: Running, number: int, **own: Any) -> list[Any]:
    ids = prompt(number, 1750)
    return list(made.client().completions.create(**ASKED, prompt=ids, extra_body={"forerun": own}))


def own(chunks: list[Any]) -> list[dict[str, Any]]:
    return [chunk.forerun for chunk in chunks if hasattr(chunk, "forerun")]


def test_provisional_text_comes_early_and_is_resolved(drafted: Running):
    chunks = ask(drafted, 0, prefill="provisional", statistics=True, ignore_eos=True)
    *events, last = own(chunks)
    shown = [event for event in events if event["event"] == "provisional"]
    settled = [event for event in events if event["event"] != "provisional"]
    assert shown and settled and events == shown + settled
    assert {event["event"] for event in settled} <= {"confirm", "retract"}
    assert "".join(event["text"] for event in shown) == "".join(event["text"] for event in settled)
    figures = last["statistics"]
    assert sum(event["tokens"] for event in settled) == figures["provisional"] > 0
    assert sum(event["tokens"] for event in settled if event["event"] == "confirm") == figures["confirmed"]
    content = [at for at, chunk in enumerate(chunks) if chunk.choices]
    assert content[0] > max(at for at, chunk in enumerate(chunks[:-1]) if hasattr(chunk, "forerun"))
    exact = drafted.llm.generate(prompt(0, 1750), SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == exact.text


def test_confirmed_words_are_the_beginning_of_the_answer(drafted: Running):
    ask(drafted, 1)  # its prompt is read from the cache afterwards
    seen = set()
    for number in range(1, 6):
        chunks = ask(drafted, number, prefill={"mode": "provisional", "allow_exact": True})
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        for event in own(chunks):
            assert event["event"] != "confirm" or text.startswith(event["text"])
            seen.add(event["event"])
    assert "provisional" in seen and seen & {"confirm", "retract"}


@pytest.mark.parametrize("wrong", [None, 5, 7], ids=["all stand", "one is wrong", "the last is wrong"])
def test_words_may_be_confirmed_in_several_steps(drafted: Running, monkeypatch: pytest.MonkeyPatch, wrong: int | None):
    """Also where a character's bytes are confirmed one after the other."""
    tokenizer = drafted.llm.tokenizer
    said = tokenizer.encode("Ah, 🦊!")
    true = said if wrong is None else [*said[:wrong], *tokenizer.encode("bcd")]
    assert len(said) > 7 and len(tokenizer.encode("🦊")) > 1

    async def astream(request: Request) -> AsyncIterator[Event]:
        yield Event(1, 0, tokenizer.decode(said), said, provisional=True)
        text, stood = "", len(said) if wrong is None else wrong
        for at in range(len(true)):
            whole = tokenizer.decode(true[: at + 1]).rstrip("\ufffd")
            event = Event(1, 0, whole[len(text) :], [true[at]], confirmed=at < stood)
            event.retracted = len(said) - stood if at == stood and wrong is not None else 0
            text = whole
            if at == len(true) - 1:
                event.finish_reason, event.usage = "stop", Usage(provisional=len(said), confirmed=stood)
            yield event

    monkeypatch.setattr(drafted.llm, "astream", astream)
    chunks = ask(drafted, 3, prefill="provisional")
    shown, *settled = own(chunks)
    assert shown["text"] == "Ah, 🦊!" and "".join(event["text"] for event in settled) == shown["text"]
    kinds = [event["event"] for event in settled]
    stood = len(said) if wrong is None else wrong
    assert kinds == ["confirm"] * stood + ["retract"] * (wrong is not None)
    assert sum(event["tokens"] for event in settled) == len(said)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == tokenizer.decode(true).rstrip("\ufffd")
    assert text.startswith("".join(event["text"] for event in settled if event["event"] == "confirm"))


@pytest.mark.parametrize("asked", [{}, {"prefill": "speculative"}, {"prefill": {"mode": "exact"}}])
def test_other_requests_get_no_events_of_it(drafted: Running, asked: dict[str, Any]):
    chunks = ask(drafted, 7, **asked)
    assert all(chunk.choices and not hasattr(chunk, "forerun") for chunk in chunks)


def test_an_answer_in_one_piece_is_the_exact_one(drafted: Running):
    body = ASKED | {"stream": False, "prompt": prompt(8, 1750)}
    answer = drafted.post("/v1/completions", body | {"forerun": {"prefill": "provisional"}}).json()
    exact = drafted.llm.generate(prompt(8, 1750), SamplingParams(max_tokens=12))[0]
    assert answer["choices"][0]["text"] == exact.text and "forerun" not in answer


def test_drafted_prompts_are_counted(drafted: Running):
    def read() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in drafted.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    before = read()
    ask(drafted, 9, prefill="speculative")
    *events, last = own(ask(drafted, 10, prefill="provisional", statistics=True, ignore_eos=True))
    after = read()
    grown = {name: after[name] - before[name] for name in before}
    assert grown["forerun_prefill_cost_ratio_count"] == 2 and grown["forerun_prefill_cost_ratio_sum"] > 0
    assert grown["forerun_provisional_tokens_total"] == last["statistics"]["provisional"] > 0
    assert grown["forerun_confirmed_tokens_total"] == last["statistics"]["confirmed"]
    assert grown["forerun_provisional_ttft_seconds_count"] == 1 and events
