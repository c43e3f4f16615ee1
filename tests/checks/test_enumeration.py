"""The exact check itself: it must pass what is right and catch what is planted."""

import pytest
import torch

from forerun.checks.enumeration import (
    MAX_DIFFERENCE,
    VOCAB,
    difference,
    outcomes,
    output_distribution,
    target_distribution,
    tiny_logits,
)
from forerun.core import ROOT, Draft, Verdict
from forerun.decode.verifiers.base import MatchVerifier, Verifier
from forerun.decode.verifiers.lossless import RejectionVerifier, TransportVerifier, TraversalVerifier
from forerun.decode.verifiers.residual import Residual
from forerun.params import SamplingParams
from tests.checks.pairs import check_pairs, drafts_of, tiny_drafters, tiny_targets, tiny_tree

PLAIN = tiny_targets()[0]


def gap(make_draft, verifier, target=PLAIN, **options) -> float:
    law = output_distribution(make_draft, target, verifier, 3, **options)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return difference(law, target_distribution(target, 3))


def test_every_outcome_comes_once_with_its_chance():
    def run(rng):
        if rng.flip(0.25):
            return "heads"
        return rng.pick(torch.tensor([1.0, 0.0, 3.0])), rng.flip(1.0), rng.flip(0.0)

    found = list(outcomes(run))
    assert [value for _, value in found] == [(0, True, False), (2, True, False), "heads"]
    assert [prob for prob, _ in found] == pytest.approx([0.1875, 0.5625, 0.25])


def test_targets_are_shaped_as_they_say():
    targets = {target.name: target for target in tiny_targets()}
    assert sorted(targets["greedy"].probs(()).tolist()) == [0.0, 0.0, 0.0, 1.0]
    assert int((targets["top-k 2"].probs((1,)) > 0).sum()) == 2
    assert targets["grammar"].probs(())[[1, 3]].tolist() == [0.0, 0.0]
    assert targets["grammar"].probs((0,))[1] > 0.0
    penalised = targets["penalties"]
    plain = torch.softmax(penalised.logits((*penalised.prompt, 2, 2)), -1)
    assert penalised.probs((2, 2))[2] < 0.6 * plain[2]
    for target in targets.values():
        assert sum(target_distribution(target, 3).values()) == pytest.approx(1.0, abs=1e-12)


def test_check_pairs_reports_each_pair():
    drafters = {name: make for name, make in tiny_drafters().items() if name in ("certain tree", "drawn chain")}
    results = list(check_pairs([MatchVerifier(), RejectionVerifier()], drafters))
    assert [(r.drafter, r.verifier) for r in results] == [
        ("certain tree", "match"),
        ("certain tree", "rejection"),
        ("drawn chain", "match"),
        ("drawn chain", "rejection"),
    ]
    assert all(r.passed and r.worst_difference < MAX_DIFFERENCE for r in results)


def test_several_steps_in_a_row():
    assert gap(tiny_tree([1]), RejectionVerifier(), steps=3) < MAX_DIFFERENCE


def test_drafters_of_the_engine_are_asked_as_the_engine_asks():
    class Echo:
        def propose(self, requests):
            assert requests[0].context.num_prompt == 2
            return [
                Draft.chain(
                    request.tokens[: request.max_nodes], [0.5] * min(len(request.tokens), request.max_nodes), "echo"
                )
                for request in requests
            ]

    assert gap(drafts_of(Echo(), SamplingParams(temperature=0.8)), TraversalVerifier()) < MAX_DIFFERENCE


# ---- planted faults ----


class WithoutResidual(RejectionVerifier):
    """Draws what follows a rejection from the target itself, so tokens that were turned down come back."""

    name = "no residual"

    def verify(self, draft, target, rng):
        verdict = super().verify(draft, target, rng)
        node = verdict.path[-1] if verdict.path else ROOT
        return Verdict(verdict.path, rng.pick(target.probs(node)))


class WrongShare(Residual):
    """Forgets that turning down a child makes its parent less likely."""

    def reject(self, tokens):
        share = self.share
        prob = super().reject(tokens)
        self.share = share
        return prob


def colder_than_drawn(tokens, rng):
    """A draft drawn at one temperature that claims another."""
    draft = tiny_tree([1, 1])(tokens, rng)
    draft.proposals = {node: torch.softmax(q.log() / 0.5, -1) for node, q in draft.proposals.items()}
    return draft


def second_if_first_is_unlikely(tokens, rng):
    """How many children there are depends on what was drawn."""
    q = torch.softmax(tiny_logits(1.7)(tuple(tokens)), -1)
    draft = Draft(proposals={ROOT: q.clone()})
    first = rng.pick(q)
    draft.add(first, ROOT, 0.5, "tiny")
    if q[first] < q.max():
        q[first] = 0.0
        draft.add(rng.pick(q), ROOT, 0.5, "tiny")
    return draft


@pytest.mark.parametrize("make_draft", [tiny_tree([1, 1]), tiny_tree([2, 1], certain=(0, 1))])
def test_missing_residual_correction_is_caught(make_draft):
    assert gap(make_draft, WithoutResidual()) > 1e-3


@pytest.mark.parametrize("verifier", [RejectionVerifier(), TraversalVerifier(), TransportVerifier()])
def test_draft_that_ignores_temperature_is_caught(verifier: Verifier):
    assert gap(colder_than_drawn, verifier) > 1e-3
    assert gap(colder_than_drawn, MatchVerifier()) < MAX_DIFFERENCE  # which asks for no proposal


def test_wrong_residual_in_traversal_is_caught(monkeypatch):
    make_draft = tiny_tree([1, 1])
    assert gap(make_draft, TraversalVerifier()) < MAX_DIFFERENCE
    monkeypatch.setattr("forerun.decode.verifiers.lossless.Residual", WrongShare)
    assert gap(make_draft, TraversalVerifier()) > 1e-3


def test_number_of_children_that_depends_on_them_is_caught_where_it_matters():
    assert gap(second_if_first_is_unlikely, TransportVerifier()) > 1e-3
    assert gap(second_if_first_is_unlikely, TraversalVerifier()) < MAX_DIFFERENCE
    assert gap(second_if_first_is_unlikely, RejectionVerifier()) < MAX_DIFFERENCE


def test_replacement_that_is_not_declared_is_caught():
    def make(tokens, rng):
        """The second child is drawn from another distribution than the first."""
        draft = tiny_tree([2])(tokens, rng)
        first, second = draft.tokens
        draft.tokens = [first, next(t for t in range(VOCAB) if t != first)]
        return draft

    assert gap(make, RejectionVerifier()) > 1e-3
