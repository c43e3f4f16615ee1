"""A prompt that is drafted before the first request leaves nothing behind."""

from __future__ import annotations

import pytest

from forerun.decode.draft_context import DraftContext
from forerun.prefill import rehearsal
from forerun.prefill.rehearsal import TIMED_TOKENS, draft, exact_seconds, rehearse
from forerun.prefill.state import PrefillStage
from tests.prefill.fakes import IDS, Fake, drive, make_prefiller, start


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "REHEARSED_TOKENS", len(IDS))


def test_a_prompt_is_drafted_and_nothing_is_kept(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx))
    free, before = ctx.pool.free, prefiller.forecast
    state = draft(prefiller, ctx, len(IDS))
    assert state is not None and state.finished and not state.opened
    assert ctx.pool.free == free
    rehearse(prefiller, ctx)
    assert prefiller.forecast is not before and not prefiller.forecast._factors and not prefiller.forecast._outcomes
    assert prefiller.forecast.exact_s(TIMED_TOKENS[0]) is not None and ctx.pool.free == free
    assert drive(prefiller, start(prefiller, ctx)).stage is PrefillStage.DONE


def test_where_there_is_no_room_nothing_runs(ctx: DraftContext):
    prefiller = make_prefiller(ctx, Fake(ctx))
    with ctx.pool.borrow(ctx.pool.free * ctx.pool.page_size):
        assert draft(prefiller, ctx, len(IDS)) is None
        assert exact_seconds(ctx.runner, len(IDS)) is None
        rehearse(prefiller, ctx)
    assert prefiller.forecast.exact_s(TIMED_TOKENS[0]) is None
