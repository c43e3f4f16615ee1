"""The driver: what may happen while another thread, or the garbage collector, is in the middle of something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, Grammar, Prefill
from forerun.engine.sequence import Request
from forerun.errors import ForerunError, OutOfPages
from tests.sharing.common import open_llm, params


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with open_llm(tiny_folder("qwen3")) as made:
        yield made


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns; an error where it hangs."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    return found[0]


def test_a_stream_may_be_collected_while_its_thread_submits_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    stream, submit = llm.stream("twelve", params(50)), llm.engine.submit
    next(stream)

    def collected(request: Request) -> None:
        stream.close()  # type: ignore[attr-defined]
        submit(request)

    monkeypatch.setattr(llm.engine, "submit", collected)
    answer = within(20, lambda: llm.generate("thirteen", params(4))[0])
    assert len(answer.token_ids) == 4 and llm.engine.idle


def test_requests_are_submitted_while_another_one_compiles_its_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    grammars = llm.engine.intake.grammars
    compiling, answered, compile_grammar = threading.Event(), threading.Event(), grammars.compile

    def slow(grammar: Grammar) -> Any:
        compiling.set()
        assert answered.wait(20)
        return compile_grammar(grammar)

    monkeypatch.setattr(grammars, "compile", slow)
    with ThreadPoolExecutor(1) as other:
        digits = other.submit(llm.generate, "twelve", params(8, grammar=Grammar("regex", "[0-9]{3}")))
        assert compiling.wait(20)
        assert len(within(20, lambda: llm.generate("thirteen", params(4))[0]).token_ids) == 4
        answered.set()
        assert len(digits.result(20)[0].text) == 3


def test_threads_that_need_the_same_prefill_source_make_one(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    prefiller, together = llm.engine.speculative_prefill.prefiller, threading.Barrier(3)
    assert prefiller is not None
    make, made = prefiller._make, list[str]()

    def slow(name: str, *given: Any) -> Any:
        made.append(name)
        with suppress(threading.BrokenBarrierError):
            together.wait(0.3)  # where each thread makes one, they meet here
        return make(name, *given)

    monkeypatch.setattr(prefiller, "_make", slow)
    drafted = params(4, prefill=Prefill("speculative", source="chunk"))
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: llm.prepare(drafted), range(3)))
    assert made == ["chunk"]


def test_a_lease_runs_between_steps_and_releases_its_pages(llm: LLM):
    llm.clear_cache()
    stream = llm.stream("twelve", params(3))
    next(stream)
    with llm.driver.lease() as lease:
        with lease.exclusive() as engine:  # after a step of the engine's own
            (seq,) = engine.scheduler.running
            assert seq.num_generated == 2
            assert lease.pages.extend(lease.pages.hold(), 40)
            used = engine.pool.used
        with lease.exclusive() as engine:
            assert engine.idle and engine.pool.used < used
    assert sum(len(event.token_ids) for event in stream) == 2
    llm.clear_cache()
    assert llm.engine.pool.used == 0


def test_a_revoked_lease_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    with llm.driver.lease() as lease:
        lease.pages.revoked_after_s = 31.0
        with pytest.raises(OutOfPages, match="idle for 31 s"), lease.exclusive():
            pass


def test_a_closed_engine_gives_no_exclusive_use(tiny_folder: Callable[[str], Path]):
    llm = open_llm(tiny_folder("qwen3"))
    with llm.driver.lease() as lease:
        llm.close()
        with pytest.raises(ForerunError, match="closed"), lease.exclusive():
            pass
