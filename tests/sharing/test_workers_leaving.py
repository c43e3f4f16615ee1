"""Workers that are left early, fail or are forgotten: nothing is left behind however it ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forerun import LLM
from forerun.engine.sequence import Event
from forerun.errors import BadRequest, ForerunError, OutOfPages
from tests.sharing.common import assert_no_page_is_held, open_llm, params
from tests.sharing.reference import PROMPT, tokens_of


@pytest.fixture
def llm(llms: Callable[[str], LLM]) -> LLM:
    return llms("qwen3")


# -- leaving early, and errors -----------------------------------------------------------------------------------------


def test_closing_the_iterator_frees_all_pages(llm: LLM):
    llm.clear_cache()
    running = llm.workers(PROMPT, 4, params(50))
    assert llm.engine.pool.used == 0  # nothing is taken before the first event is asked for
    next(running)
    assert llm.engine.pool.used >= 4 * llm.engine.pool.pages_for(50)
    running.close()  # type: ignore[attr-defined]
    assert_no_page_is_held(llm)


def test_a_failing_forward_frees_all_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    running = llm.workers(PROMPT, 2, params(50))
    next(running)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("forerun.sharing.blocks.BlockAttention.attend", fail)
    with pytest.raises(RuntimeError, match="broken"):
        list(running)
    assert_no_page_is_held(llm)


def test_a_closed_llm_ends_the_workers(tiny_folder: Callable[[str], Path]):
    llm = open_llm(tiny_folder("llama"))
    running = llm.workers(PROMPT, 2, params(50))
    next(running)
    llm.close()
    with pytest.raises(ForerunError, match="closed"):
        list(running)
    assert_no_page_is_held(llm)
    with pytest.raises(ForerunError, match="closed"):
        llm.workers(PROMPT, 2, params(50))


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (0, {}, "n is 0, allowed is from 1 to 16"),
        (17, {}, "n is 17"),
        (True, {}, "n is True"),
        (2, {"params": [params()]}, "params for 1 workers, n is 2"),
        (2, {"params": "fast"}, "must be SamplingParams, got 'fast'"),
        (2, {"params": params(n=3)}, "n=3"),
        (2, {"params": params(prefill="speculative")}, "speculative"),
        (2, {"params": params(speculation="lookup")}, "lookup"),
        (2, {"prefixes": ["a"]}, "prefixes for 1 workers, n is 2"),
        (2, {"prefixes": "ab"}, "must be a list"),
        (2, {"prefixes": [3, 4]}, "cannot be a int"),
        (2, {"prefixes": [[3], [9999]]}, "9999"),
        (4, {"params": params(600), "prefixes": [[3]] * 4}, "up to 2404, the context holds 2048"),
    ],
)
def test_what_cannot_run_is_refused_at_once(llm: LLM, n: int, options: dict, message: str):
    with pytest.raises(BadRequest, match=re.escape(message)) as caught:
        llm.workers(PROMPT, n, **options)
    assert caught.value.hint


def test_too_few_pages_are_named(tiny_folder: Callable[[str], Path]):
    with open_llm(tiny_folder("llama"), kv_cache_tokens=512) as llm:
        with pytest.raises(OutOfPages, match="need 39 pages of 16 tokens, the KV pool has 32"):
            llm.workers([5] * 40, 4, params(140), [[5]] * 4)
        running = llm.workers([5] * 40, 2, params(140), [[5]] * 2)
        next(running)
        with pytest.raises(OutOfPages, match="need 19 more pages of 16 tokens, 11 of 32 are free"):
            next(llm.workers([5] * 40, 2, params(140), [[5]] * 2))
        assert len(tokens_of(list(running), 2)[1]) == 140  # the first group goes on as if nothing had happened
        assert_no_page_is_held(llm)


# -- an iterator that is begun and left --------------------------------------------------------------------------------


def paused(llm: LLM) -> Iterator[Event]:
    """Workers that hold 29 of 32 pages, after their first event."""
    running = llm.workers([5] * 40, 2, params(200), [[5]] * 2)
    next(running)
    return running


def test_a_request_beside_a_paused_iterator_of_its_own_thread_does_not_wait_for_ever(
    tiny_folder: Callable[[str], Path],
):
    with open_llm(tiny_folder("llama"), kv_cache_tokens=512) as llm:
        running = paused(llm)
        with pytest.raises(OutOfPages, match="29 of 32 are leased to an iterator of workers") as caught:
            llm.generate([7] * 100, params(4))
        assert "close it" in caught.value.hint
        with pytest.raises(OutOfPages, match="no pages for this request"):  # admitted, then without a page to go on
            llm.generate([7] * 40, params(40))
        assert len(tokens_of(list(running), 2)[1]) == 200  # the group goes on as if nothing had happened
        assert len(llm.generate([7] * 100, params(4))[0].choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_a_request_elsewhere_waits_for_workers_who_go_on(tiny_folder: Callable[[str], Path]):
    with open_llm(tiny_folder("llama"), kv_cache_tokens=512) as llm:
        running = paused(llm)
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(llm.generate, [7] * 100, params(4))
            assert len(tokens_of(list(running), 2)[1]) == 200
            assert len(answer.result(30)[0].choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_pages_of_an_abandoned_iterator_are_taken_back(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.engine.leases.LEASE_IDLE_S", 0.05)
    with open_llm(tiny_folder("llama"), kv_cache_tokens=512) as llm:
        running = paused(llm)
        with ThreadPoolExecutor(1) as other:
            assert len(other.submit(llm.generate, [7] * 100, params(4)).result(30)[0].choices[0].token_ids) == 4
        with pytest.raises(OutOfPages, match="revoked"):
            list(running)
        running = paused(llm)
        assert len(asyncio.run(llm.agenerate([8] * 100, params(4)))[0].choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_an_iterator_may_end_while_its_thread_has_the_engine(llm: LLM):
    """As when a garbage collector ends it in the middle of a step."""
    running = llm.workers(PROMPT, 2, params(50))
    next(running)
    with llm.driver.exclusive():
        running.close()  # type: ignore[attr-defined]
    llm.generate("twelve", params(2))
    assert_no_page_is_held(llm)
