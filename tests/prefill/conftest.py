"""A workshop whose pool is as new for every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun.decode.workshop import Workshop
from tests.prefill.fakes import make_workshop


@pytest.fixture(scope="module")
def _workshop(tiny_folder: Callable[[str], Path]) -> Workshop:
    return make_workshop(tiny_folder("qwen2"))


@pytest.fixture
def workshop(_workshop: Workshop) -> Iterator[Workshop]:
    yield _workshop
    _workshop.pool.refs[:] = 0
    _workshop.pool.free = _workshop.pool.num_pages
