"""Work in a thread that ends with it."""

from __future__ import annotations

import threading

import pytest

from forerun.runtime.threads import run_in_thread


def test_results_and_errors_come_back_and_the_thread_is_gone() -> None:
    names = []
    assert run_in_thread(lambda: names.append(threading.current_thread().name) or 3) == 3
    assert names == ["forerun-work"]
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "forerun-work"]
