"""A draft context whose pool is as new for every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forerun.decode.draft_context import DraftContext
from tests.prefill.fakes import make_draft_context


@pytest.fixture(scope="module")
def _ctx(tiny_folder: Callable[[str], Path]) -> DraftContext:
    return make_draft_context(tiny_folder("qwen2"))


@pytest.fixture
def ctx(_ctx: DraftContext) -> Iterator[DraftContext]:
    yield _ctx
    _ctx.pool.refs[:] = 0
    _ctx.pool.free = _ctx.pool.num_pages
