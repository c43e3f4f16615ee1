"""How many threads compute, and work in a thread that ends with it."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from forerun.errors import BadRequest
from forerun.runtime.driver import MAX_STEPS_BEFORE, StepLock
from forerun.runtime.threads import choose_threads, run_in_thread


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), (" 2,1", 2), ("0", None), ("many", None), ("", None)])
def test_the_environment_decides_how_many_there_are(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for auto in (None, "auto"):
        assert choose_threads(auto) == ((threads, "OMP_NUM_THREADS") if threads else (5, "one for each core"))
    assert choose_threads(7) == (7, "as asked")


def test_more_threads_than_make_sense_are_refused_and_those_of_the_environment_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(BadRequest, match="threads is 65, at most 64"):
        choose_threads(65)
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert choose_threads("auto") == (64, "OMP_NUM_THREADS, at most 64")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    assert choose_threads(768) == (768, "as asked")


def test_cores_that_a_process_may_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    count, why = choose_threads("auto")
    assert count == 2 and "2 cores that this process may use, of 5" in why


def test_results_and_errors_come_back_and_the_thread_is_gone() -> None:
    names = []
    assert run_in_thread(lambda: names.append(threading.current_thread().name) or 3) == 3
    assert names == ["forerun-work"]
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "forerun-work"]


def test_an_exclusive_use_waits_for_a_few_steps_at_most() -> None:
    lock, steps, waited, stop = StepLock(), list[float](), list[int](), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with lock.step():
                time.sleep(0.001)
                steps.append(time.perf_counter())

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(150):
            before = len(steps)
            with lock.exclusive():
                waited.append(len(steps) - before)
                with lock.at_once() as held:
                    assert not held
            done = len(steps)
            while len(steps) == done:  # steps go on
                time.sleep(0.0005)
    finally:
        stop.set()
        thread.join()
    # Two more: one that ran, and one that had looked whether any use waits just before
    assert max(waited) <= MAX_STEPS_BEFORE + 2
    with lock.at_once() as held:
        assert held


def test_an_exclusive_use_that_gives_up_waiting_holds_up_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = StepLock()

    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *failure: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(lock, "_lock", Interrupted())
        with pytest.raises(KeyboardInterrupt), lock.exclusive():
            pass
    with lock.step(), lock.at_once() as held:
        assert not held
