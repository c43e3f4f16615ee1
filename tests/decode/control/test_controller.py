"""When drafters that do not pay are considered again."""

from __future__ import annotations

import pytest

from forerun.core import Draft
from forerun.decode.control.controller import (
    ASKED_SEQUENCES,
    PAID_PAUSE_SHARE,
    PAID_PAUSE_TOKENS,
    Controller,
    DraftedBatch,
)
from forerun.decode.control.cost import CostCurve

TARGET = {1: 0.001, 64: 0.002}


@pytest.mark.parametrize(("tokens", "pause"), [(8, PAID_PAUSE_TOKENS), (100, int(100 * PAID_PAUSE_SHARE))])
def test_a_paid_drafter_that_does_not_pay_pauses_for_some_tokens(tokens: int, pause: int) -> None:
    controller = Controller(CostCurve(TARGET), {"model": CostCurve({1: 10.0})})
    controller.host.observe(1, drafted=False, seconds=0.0)
    stats = controller.new_request("text", prompt_tokens=8)
    controller.record_tokens(stats, tokens)
    assert controller.should_draft([stats], [["model"]], 0)
    assert controller.plan_rounds(DraftedBatch([stats], [Draft()], [8], 0), "model", [0.0]) is None
    for _ in range(pause):
        assert not controller.should_draft([stats], [["model"]], 0)
        controller.record_tokens(stats, 1)
    assert controller.should_draft([stats], [["model"]], 0)


def test_a_large_batch_for_which_no_drafter_pays_is_not_asked_in_every_step() -> None:
    controller = Controller(CostCurve(TARGET), {})
    controller.acceptance.records["lookup"].run_s = 10.0
    batch = [controller.new_request() for _ in range(2 * ASKED_SEQUENCES)]
    controller.host.observe(len(batch), drafted=False, seconds=0.0)
    reasons = []
    for _ in range(6):
        assert not controller.should_draft(batch, [["lookup"]] * len(batch), 0)
        reasons.append(controller.last_why)
    asked, skipped = "no drafter is expected to pay", "no drafter was expected to pay a few steps ago"
    assert reasons == [asked, skipped, skipped] * 2
    controller.new_request()  # of which nothing is known yet
    assert not controller.should_draft(batch, [["lookup"]] * len(batch), 0) and controller.last_why == asked
