"""The public face, on a tiny model: every way to ask gives the same answer, and leaving early is clean."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest, ForerunError
from forerun.sharing import score_continuations

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = ["The lamp turns", "A keeper counts the ships", "def turn(lamp):", "twelve times"]
MESSAGES = [{"role": "user", "content": "Who counts the ships?"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True) as made:
        yield made


def test_generate_keeps_order_and_repeats_itself(llm: LLM):
    together = llm.generate(PROMPTS, PARAMS)  # type: ignore[arg-type]
    alone = [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert all(c.text == llm.tokenizer.decode(c.token_ids) for c in together)
    assert all(c.finish_reason == "length" and c.usage.completion_tokens == 16 for c in together)


def test_streaming_gives_the_same_text_in_pieces(llm: LLM):
    events = list(llm.stream(PROMPTS[0], replace(PARAMS, speculation="off")))  # one token at a time
    assert "".join(e.text for e in events) == llm.generate(PROMPTS[0], PARAMS)[0].text
    assert [e.finish_reason for e in events] == [None] * 15 + ["length"]
    assert events[-1].usage is not None and events[0].usage is None


def test_messages_go_through_the_chat_template(llm: LLM):
    completion = llm.chat(MESSAGES, PARAMS)[0]
    text = "<|im_start|>user\nWho counts the ships?<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_ids == llm.tokenizer.encode(text, parse_special=True)
    assert [c.text for c in llm.chat([MESSAGES, MESSAGES], PARAMS)] == [completion.text] * 2
    assert "".join(e.text for e in llm.stream(MESSAGES, PARAMS)) == completion.text


def test_async_answers_equal_sync_ones(llm: LLM):
    async def ask() -> list[str]:
        many = asyncio.gather(*(llm.agenerate(prompt, PARAMS) for prompt in PROMPTS))
        chat = llm.achat(MESSAGES, PARAMS)
        streamed = "".join([event.text async for event in llm.astream(PROMPTS[1], PARAMS)])
        together = [c.text for c in await llm.agenerate(PROMPTS, PARAMS)]
        alone = [c.text for (c,) in await many]
        assert together == alone
        return [*alone, (await chat)[0].text, streamed]

    expected = [c.text for c in llm.generate(PROMPTS, PARAMS)]  # type: ignore[arg-type]
    assert asyncio.run(ask()) == [*expected, llm.chat(MESSAGES, PARAMS)[0].text, expected[1]]


def test_several_threads_may_ask_at_once(llm: LLM):
    expected = [llm.generate(prompt, PARAMS)[0].text for prompt in PROMPTS]
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: got.__setitem__(i, llm.generate(p, PARAMS)[0].text))  # type: ignore[misc]
        for i, p in enumerate(PROMPTS * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [got[i] for i in range(12)] == expected * 3


def test_leaving_a_stream_early_frees_its_pages(llm: LLM):
    llm.clear_cache()
    for event in llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True)):
        if event.token_ids:
            break
    assert llm.engine.idle
    llm.clear_cache()
    assert llm.engine.pool.used == 0


def test_an_interrupted_batch_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    original, calls = llm.engine.step, iter(range(100))

    def step() -> bool:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)  # type: ignore[arg-type]
    assert llm.engine.idle


def test_one_bad_prompt_stops_its_call_and_no_other(llm: LLM):
    with pytest.raises(BadRequest, match="empty"):
        llm.generate(["fine", ""], PARAMS)
    with pytest.raises(BadRequest, match="99999"):
        llm.generate([5, 99999], PARAMS)
    assert llm.engine.idle and llm.generate("fine", PARAMS)[0].text


def test_n_answers_come_as_choices(llm: LLM):
    params = SamplingParams(max_tokens=8, temperature=1.2, seed=4, n=3, ignore_eos=True)
    completion = llm.generate(PROMPTS[0], params)[0]
    assert len({tuple(c.token_ids) for c in completion.choices}) == 3
    assert completion.usage.completion_tokens == 24


def test_a_closed_model_says_so(tiny_folder: Callable[[str], Path]):
    closed = LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True)

    async def close_while_running() -> str | None:
        task = asyncio.create_task(closed.agenerate("fog", SamplingParams(max_tokens=900, ignore_eos=True)))
        while closed.engine.idle and not task.done():  # until it runs
            await asyncio.sleep(0.001)
        closed.close()
        return (await asyncio.wait_for(task, 10))[0].finish_reason

    assert asyncio.run(close_while_running()) == "cancelled"
    with pytest.raises(ForerunError, match="closed"):
        closed.generate("fog", PARAMS)
    with pytest.raises(ForerunError, match="closed"):
        next(closed.stream("fog", PARAMS))
    with pytest.raises(ForerunError, match="closed"):
        asyncio.run(asyncio.wait_for(closed.agenerate("fog", PARAMS), 10))
    assert closed.engine.idle


def test_an_error_in_the_background_reaches_those_who_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    def fail(work: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", fail)
        with pytest.raises(RuntimeError, match="boom"):
            asyncio.run(asyncio.wait_for(llm.agenerate("fog", PARAMS), 10))
        with pytest.raises(RuntimeError, match="boom"):
            llm.generate("fog", PARAMS)
    assert llm.engine.idle
    assert asyncio.run(llm.agenerate("fog", PARAMS))[0].text == llm.generate("fog", PARAMS)[0].text


@pytest.mark.parametrize("token", [10**12, -1])
def test_a_prompt_outside_the_vocabulary_has_no_prefixes(llm: LLM, token: int):
    with pytest.raises(BadRequest, match=f"token id {token} is not in the vocabulary") as caught:
        llm.prefixes([5, token])
    assert caught.value.hint


def test_progress_counts_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("forerun.core.progress.LINE_AFTER_S", 0.0)
    monkeypatch.setattr("forerun.core.progress.LINE_INTERVAL_S", 0.002)
    llm.generate(PROMPTS, PARAMS, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert all(" of 4" in line for line in lines) and lines[-1].startswith("answers: 4 of 4 in")
    asyncio.run(llm.agenerate(PROMPTS, PARAMS, progress=True, n=2))
    lines = capsys.readouterr().err.splitlines()
    assert all(" of 8" in line for line in lines) and lines[-1].startswith("answers: 8 of 8 in")
    llm.generate(PROMPTS, PARAMS)
    assert capsys.readouterr().err == ""


def test_a_prediction_may_be_text(llm: LLM) -> None:
    plain = llm.generate("fog", PARAMS)[0]
    for prediction in (plain.text, plain.token_ids):
        found = llm.generate("fog", PARAMS, prediction=prediction, speculation="copy", cache=False)[0]
        assert found.token_ids == plain.token_ids
    assert llm.request([5], SamplingParams(prediction="fog")).params.prediction == tuple(llm.tokenizer.encode("fog"))


def test_the_repr_names_what_runs(llm: LLM) -> None:
    assert repr(llm).startswith(f"LLM({llm.model!r}, dtype='float32', device='cpu', max_model_len=")


def test_requests_of_asyncio_are_encoded_and_checked_in_a_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's own thread does neither, in any of the four ways to ask."""
    threads: list[tuple[str, threading.Thread]] = []

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return real(*args, **more)

        monkeypatch.setattr(owner, name, call)

    watched(llm.tokenizer, "encode")
    watched(llm.engine.intake, "check")
    watched(llm.driver, "prepare")

    async def ask() -> None:
        await llm.agenerate("fog", PARAMS)
        await llm.achat(MESSAGES, PARAMS)
        assert [event async for event in llm.astream("fog", PARAMS)]
        session = llm.session("asyncio")
        session.append(MESSAGES)
        await session.aanswer(PARAMS)
        session.append(MESSAGES)
        assert [event async for event in session.astream(PARAMS)]

    asyncio.run(ask())
    assert [name for name, _ in threads].count("check") == 5 and {name for name, _ in threads} == {
        "encode",
        "check",
        "prepare",
    }
    assert threading.main_thread() not in [thread for _, thread in threads]


def test_a_stream_that_cannot_start_raises_where_it_is_read(llm: LLM) -> None:
    async def read(prompt: Any) -> None:
        async for _ in llm.astream(prompt, PARAMS):
            pass

    with pytest.raises(BadRequest, match="the prompt is empty"):
        asyncio.run(read(""))
    with pytest.raises(BadRequest, match="the context holds"):
        asyncio.run(read([5] * 5000))
    assert llm.engine.idle


def test_after_close_every_call_says_so(tiny_folder: Callable[[str], Path]) -> None:
    closed = LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True)
    session = closed.session("before")
    session.append("fog and rain")
    closed.close()

    async def read(events: Any) -> None:
        async for _ in events:
            pass

    for use in (
        lambda: closed.generate("fog"),
        lambda: closed.chat(MESSAGES),
        lambda: next(closed.stream("fog")),
        lambda: asyncio.run(closed.achat(MESSAGES)),
        lambda: asyncio.run(read(closed.astream("fog"))),
        lambda: closed.request([5]),
        lambda: closed.session("after"),
        lambda: session.append("x"),
        lambda: session.answer(),
        lambda: asyncio.run(session.aanswer()),
        lambda: next(closed.workers("fog", 2)),
        lambda: closed.rollout("fog", 2, 2, 100),
        lambda: closed.prepare(PARAMS),
        lambda: closed.upgrade(),
        lambda: score_continuations(closed, [5], [[6]]),
    ):
        with pytest.raises(ForerunError, match="this LLM is closed"):
            use()
    assert closed.stats().answers == 0 and "closed" in repr(closed)  # what was measured can still be read
    closed.close()
