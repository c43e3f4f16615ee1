"""Sessions: turns read what earlier ones left, misuse is said clearly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from forerun import LLM, Completion, SamplingParams
from forerun.errors import BadRequest
from forerun.sharing import session_registry
from tests.sharing.common import LONG, PARAMS, USER


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as made:
        yield made


def test_a_text_goes_on_as_if_it_had_been_one_prompt(llm: LLM):
    session = llm.session("text")
    session.append(LONG)
    first = session.answer(PARAMS)
    session.append(" And then?")
    second = session.answer(PARAMS)
    prompt = [*first.prompt_ids, *first.token_ids, *llm.tokenizer.encode(" And then?")]
    assert second.prompt_ids == prompt and second.token_ids == llm.generate(prompt, PARAMS)[0].token_ids
    assert second.usage.served["pool"] >= (len(first.prompt_ids) + 12) // 16 * 16 - 16
    assert session.tokens == [*prompt, *second.token_ids] and session.turns == 2
    assert repr(session) == f"Session('text', turns=2, tokens={len(session.tokens)})"
    assert session.stats().answers == 2 and llm.stats().sessions["text"] == session.stats()


def test_a_conversation_keeps_its_answers_token_by_token(llm: LLM):
    session = llm.session("chat")
    session.append(USER)
    first = session.answer(PARAMS)
    assert first.prompt_ids == llm.encode([USER]) and session.messages[-1]["content"] == first.text
    session.append([{"role": "user", "content": "Why?"}])
    second = session.answer(PARAMS)
    told = [*first.prompt_ids, *first.token_ids]
    assert second.prompt_ids[: len(told)] == told
    tail = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids[len(told) :] == llm.tokenizer.encode(tail, parse_special=True)
    with pytest.raises(BadRequest, match="is answered"):
        session.answer(PARAMS)


def test_an_answer_that_ended_by_itself_is_not_ended_twice(llm: LLM):
    session = llm.session("ends")
    session.append(USER)
    end = llm.tokenizer.encode("<|im_end|>", parse_special=True)[0]
    ends = SamplingParams(max_tokens=12, logit_bias={end: 100.0})
    first = session.answer(ends)
    assert first.token_ids == [end] and first.finish_reason == "stop"
    session.append({"role": "user", "content": "Why?"})
    assert session.answer(PARAMS).prompt_ids.count(end) == 3


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_stop_string_that_was_cut_from_the_answer_is_not_part_of_the_session(llm: LLM, width: int):
    session = llm.session(f"stops {width}")
    session.append(USER)
    text = session.answer(PARAMS).text
    session.rewind(turns=1)
    session.append(USER)
    stop = text[len(text) // 2 :][:width]
    cut = session.answer(replace(PARAMS, stop=(stop,)))
    assert cut.finish_reason == "stop" and stop in llm.tokenizer.decode(cut.token_ids)
    assert cut.text == text[: text.index(stop)] == session.messages[-1]["content"]
    session.append({"role": "user", "content": "Why?"})
    written = llm.tokenizer.decode(llm.encode(session.messages), skip_special=False)
    assert llm.tokenizer.decode(session.answer(PARAMS).prompt_ids, skip_special=False) == written


def test_a_text_goes_on_after_what_is_left_of_an_answer(llm: LLM):
    session = llm.session("stops text")
    session.append(LONG)
    text = session.answer(PARAMS).text
    session.rewind(tokens=12)
    stop = text[len(text) // 2 :][:2]
    cut = session.answer(replace(PARAMS, stop=(stop,)))
    assert llm.tokenizer.decode(session.tokens) == LONG + cut.text


def test_streaming_is_the_same_and_leaving_early_changes_nothing(llm: LLM):
    session = llm.session("stream")
    session.append(LONG)
    before = session.tokens
    for _ in session.stream(PARAMS):
        break
    assert session.tokens == before and session.turns == 0
    events = list(session.stream(PARAMS))
    assert session.tokens == before + [t for e in events for t in e.token_ids]


def test_forks_go_their_own_ways_from_one_cache(llm: LLM):
    session = llm.session("trunk")
    session.append(LONG)
    session.answer(PARAMS)
    fork = session.fork("branch")
    session.append(" One.")
    fork.append(" Two.")
    a, b = session.answer(PARAMS), fork.answer(PARAMS)
    assert a.prompt_ids != b.prompt_ids and min(a.usage.served["pool"], b.usage.served["pool"]) > 80
    with pytest.raises(BadRequest, match="already"):
        session.fork("branch")


def test_rewinding_by_turns_and_tokens(llm: LLM):
    session = llm.session("rewind")
    session.append(LONG)
    first = session.answer(PARAMS)
    after = session.tokens
    session.append(" One.")
    session.answer(PARAMS)
    session.append(" Two.")
    session.rewind(turns=2)  # what waits, and one answer with what led to it
    assert session.tokens == after and session.turns == 1
    session.rewind(tokens=12)
    assert session.tokens == first.prompt_ids and session.answer(PARAMS).token_ids == first.token_ids
    session.rewind(turns=session.turns)
    assert session.tokens == [] and session.turns == 0
    chat = llm.session("rewind chat")
    chat.append(USER)
    said = chat.answer(PARAMS)
    chat.append({"role": "user", "content": "Why?"})
    chat.answer(PARAMS)
    chat.rewind(turns=1)
    assert len(chat.messages) == 2 and chat.tokens == [*said.prompt_ids, *said.token_ids]
    for wrong in ({"turns": 5}, {"turns": 0}, {"tokens": 1}, {}, {"turns": 1, "tokens": 1}, {"turns": True}):
        with pytest.raises(BadRequest):
            chat.rewind(**wrong)
    assert chat.turns == 1


def test_misuse_is_said_clearly_and_harms_nothing(llm: LLM):
    session = llm.session("misuse")
    with pytest.raises(BadRequest, match="is empty"):
        session.answer(PARAMS)
    with pytest.raises(BadRequest, match="empty"):
        session.append("")
    session.append(LONG)
    with pytest.raises(BadRequest, match="plain text"):
        session.append(USER)
    with pytest.raises(BadRequest, match="n is 2"):
        session.answer(SamplingParams(n=2))
    running = session.stream(PARAMS)
    next(running)
    for use in (session.answer, lambda: session.append("x"), lambda: session.fork("y"), session.close):
        with pytest.raises(BadRequest, match="a turn of it is running"):
            use()
    assert len(list(running)) == 11 and session.turns == 1
    session.close()
    for use in (session.answer, lambda: session.append("x"), lambda: session.fork("y")):
        with pytest.raises(BadRequest, match="it is closed"):
            use()
    session.close()
    with pytest.raises(BadRequest, match="no session 'misuse'"):
        llm.session("misuse", create=False)
    for ttl in (0, -1.0, True, float("nan"), "long", float("inf")):
        with pytest.raises(BadRequest, match="ttl is"):
            llm.session("other", ttl=ttl)  # type: ignore[arg-type]
    for name in ("", "  ", 3, "x" * 201):
        with pytest.raises(BadRequest, match="name"):
            llm.session(name)  # type: ignore[arg-type]
    chat = llm.session("misuse chat")
    chat.append(USER)
    with pytest.raises(BadRequest, match="conversation"):
        chat.append("text")
    with pytest.raises(BadRequest, match="role"):
        chat.append([{"content": "x"}])
    assert chat.messages == [USER]


def test_the_same_name_is_the_same_session_and_its_pages_are_pinned(llm: LLM):
    session = llm.session("pinned", ttl=60)
    assert llm.session("pinned") is session and "pinned" in llm.sessions.names()
    session.append(LONG)
    session.answer(PARAMS)
    pins = llm.engine.scheduler.pins
    held = pins.num_pages
    llm.engine.tree.evict(10_000)
    assert len(llm.engine.tree.match(session.tokens)) * 16 >= len(session.tokens) - 17
    session.close()
    assert pins.num_pages < held


def test_sessions_go_on_side_by_side_in_asyncio(llm: LLM):
    names = [f"async {i}" for i in range(4)]

    async def one(name: str) -> tuple[list[int], list[int]]:
        session = llm.session(name)
        session.append(f"{LONG} {name}")
        first = await session.aanswer(PARAMS)
        both = await asyncio.gather(session.aanswer(PARAMS), session.aanswer(PARAMS), return_exceptions=True)
        assert isinstance(both[0], Completion)  # the first of the two goes on
        assert isinstance(both[1], BadRequest) and "a turn of it is running" in str(both[1])
        said = [token async for event in session.astream(PARAMS) for token in event.token_ids]
        assert session.turns == 3 and session.tokens[-12:] == said
        return first.prompt_ids, first.token_ids

    async def all_of_them() -> list[tuple[list[int], list[int]]]:
        return await asyncio.gather(*map(one, names))

    for prompt, told in asyncio.run(all_of_them()):
        assert told == llm.generate(prompt, PARAMS)[0].token_ids
    assert llm.stats().sessions["async 0"].answers == 3


def test_a_cancelled_task_leaves_the_session_as_it_was(llm: LLM):
    session = llm.session("cancelled task")
    session.append(LONG)
    before = session.tokens

    async def leave() -> None:
        slow = SamplingParams(max_tokens=400, ignore_eos=True, speculation="off")  # not done before it is left
        task = asyncio.create_task(session.aanswer(slow))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert session.tokens == before and session.turns == 0
    assert session.answer(PARAMS).prompt_ids == before


def test_threads_that_open_one_session_at_once_get_the_same_one(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
):

    together = threading.Barrier(4)

    class Slow(session_registry.SessionRegistry):
        def __init__(self, *given: object) -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)  # where one registry is made for each thread, they meet here
            super().__init__(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(session_registry, "SessionRegistry", Slow)
    with make() as llm, ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: llm.session("shared"), range(4)))
    assert len({id(session) for session in opened}) == 1


def test_options_of_one_turn(llm: LLM):
    session = llm.session("options")
    session.append(LONG)
    assert len(session.answer(PARAMS, max_tokens=3).token_ids) == 3
    assert len([t for event in session.stream(PARAMS, max_tokens=2) for t in event.token_ids]) == 2
    assert len(asyncio.run(session.aanswer(PARAMS, max_tokens=4)).token_ids) == 4
    with pytest.raises(BadRequest, match="called 'max_token'"):
        session.answer(max_token=3)  # type: ignore[call-arg]


def test_a_message_that_cannot_be_answered_is_not_appended(llm: LLM):
    chat = llm.session("roles")
    with pytest.raises(BadRequest, match="the role 'wizard'"):
        chat.append([USER, {"role": "wizard", "content": "x"}])
    with pytest.raises(BadRequest, match="a part of a message"):
        chat.append({"role": "user", "content": [{"type": "image_url"}]})
    assert chat.messages == [] and not chat.pending
    chat.append({"role": "user", "content": [{"type": "text", "text": "Why "}, {"type": "text", "text": "fog?"}]})
    assert chat.messages == [{"role": "user", "content": "Why fog?"}] and chat.answer(PARAMS).text is not None
