"""How many threads compute, and work in a thread that ends with it."""

from __future__ import annotations

import threading

import psutil
import pytest

from forerun.runtime.threads import default_threads, run_in_thread


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), (" 2,1", 2), ("0", None), ("many", None), ("", None)])
def test_the_environment_decides_how_many_there_are(
    asked: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 5)
    assert default_threads() == (threads or 5)


def test_results_and_errors_come_back_and_the_thread_is_gone() -> None:
    names = []
    assert run_in_thread(lambda: names.append(threading.current_thread().name) or 3) == 3
    assert names == ["forerun-work"]
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "forerun-work"]
