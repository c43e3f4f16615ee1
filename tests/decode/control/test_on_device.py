"""Free drafts beside steps that draft on a device: when the host takes over, and what is learnt where it does not."""

from __future__ import annotations

from array import array

import pytest

from forerun.core import Draft
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.decision import DraftedBatch, PaidPlan
from forerun.decode.control.gain import DOUBTED_RATIO
from forerun.decode.control.host import HostTime
from forerun.decode.drafter_pool import DraftTask
from tests.decode.simulator import CATEGORIES, H200, Text, World


def asked(prob: float, nodes: int, start_s: float, rate: float = 2000.0) -> tuple[bool, float]:
    """Whether a free draft of so many nodes is better than steps on the device, and what is expected of it beside
    them."""
    controller = Controller(CostCurve({1: 1.2e-3, 32: 1.9e-3}), {"parallel": CostCurve({1: 5e-4, 32: 8e-4})})
    stats = controller.new_request("code")
    batch = DraftedBatch([stats], [Draft.chain([*range(nodes)], [prob] * nodes, "lookup")], [31], 100)
    found = controller.free_is_better(batch, PaidPlan("parallel", [12], rate, [], "", start_s=[start_s]))
    return found, stats.gain.beside


def test_before_the_draft_model_has_read_reading_counts_against_the_tokens_surely_to_come() -> None:
    assert asked(0.8, 8, 4e-3) == (True, 0.0)  # 4.3 tokens in 1.4 ms
    assert not asked(0.4, 8, 4e-3)[0] and asked(0.4, 8, 200e-3)[0]  # less is enough where reading takes longer
    assert not asked(0.8, 8, 4e-3, rate=9000.0)[0]


def test_in_between_a_lower_bound_pays_for_going_back() -> None:
    assert not asked(0.8, 8, 0.0)[0]
    assert asked(0.97, 30, 0.0)[0]


def test_what_would_be_verified_but_for_doubt_is_compared_with_what_comes() -> None:
    doubted, beside = asked(0.85, 12, 0.0)
    assert not doubted and beside == pytest.approx(sum(0.85**n for n in range(1, 13)), rel=0.1)
    assert asked(0.3, 8, 0.0)[1] == 0.0  # these would not have been verified


def test_drafts_that_turn_out_right_beside_steps_are_believed() -> None:
    world = World(H200, ("lookup",))
    state = world.open(Text(CATEGORIES["edits"], 1))
    gains, stats, tokens = world.controller.acceptance.gains, state.stats, state.context.tokens
    assert gains.ratio(stats.kind, stats.gain, doubt=True) == DOUBTED_RATIO
    for right in (True, True, True, False, False, False, False):
        next_token = tokens[-1] + 1
        state.beside = [Draft.chain([next_token, 7] if right else [7, 8], [0.9, 0.9], "lookup")]
        state.beside_at, stats.gain.beside = len(tokens), 1.0
        before = gains.ratio(stats.kind, stats.gain, doubt=True)
        tokens += [next_token, next_token + 1]
        world.spec.resolve_beside(state, 2)
        after = gains.ratio(stats.kind, stats.gain, doubt=True)
        assert (after > before) == right


def test_drafts_of_which_nothing_was_verified_are_compared_too_where_the_step_was_launched() -> None:
    world = World(H200, ("lookup",))
    state = world.open(Text(CATEGORIES["edits"], 1))
    draft = Draft.chain([7, 8], [0.9, 0.9], "lookup")
    state.drafts = [draft]
    world.spec.draft_beside([DraftTask(state, array("i"), 0)])
    assert state.followed == [draft] and not state.drafts
    state.context.tokens.append(9)
    world.spec.resolve_beside(state, 1)
    assert not state.followed and world.controller.acceptance.records["lookup"].observations == 1


def test_a_plain_step_is_asked_for_once() -> None:
    host = HostTime()
    assert host.is_asked_for(1) and not host.is_asked_for(1)
    assert host.is_asked_for(4)
    host.observe_ahead(16, 1e-4, 1e-3)
    assert not host.is_asked_for(16)
