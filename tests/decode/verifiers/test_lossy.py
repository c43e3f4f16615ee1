"""Lossy rules stay within what they promise, and become lossless where they promise that."""

import math

import pytest
import torch

from forerun.checks.enumeration import (
    EveryOutcome,
    TinyTarget,
    outcomes,
    output_distribution,
    target_distribution,
    tiny_logits,
)
from forerun.core import ROOT, Draft
from forerun.decode.verifiers.lossless import RejectionVerifier
from forerun.decode.verifiers.lossy import BoundedVerifier, DivergenceVerifier, TypicalVerifier
from forerun.errors import BadRequest
from forerun.params import SamplingParams
from tests.checks.pairs import tiny_drafters, tiny_targets, tiny_tree

WARM = TinyTarget("warm", tiny_logits(0.3), SamplingParams(temperature=0.8))


def first_token_distance(make_draft, verifier, target) -> float:
    """Total variation of the first token's distribution."""
    law, plain = output_distribution(make_draft, target, verifier, 1), target_distribution(target, 1)
    return 0.5 * sum(abs(law.get(tokens, 0.0) - plain.get(tokens, 0.0)) for tokens in {*law, *plain})


def accepted(make_draft, verifier, target) -> float:
    def run(rng):
        draft = make_draft(list(target.prompt), rng)
        return len(verifier.verify(draft, target.view((), draft, rng), rng).path)

    return sum(prob * length for prob, length in outcomes(run))


@pytest.mark.parametrize("drafter", ["certain tree", "drawn chain", "drawn siblings"])
def test_bounded_stays_within_its_bound(drafter):
    make_draft = tiny_drafters()[drafter]
    for target in tiny_targets():
        for bound in (0.02, 0.3):
            assert first_token_distance(make_draft, BoundedVerifier(bound), target) <= bound + 1e-12


def divergence(make_draft, verifier, target) -> float:
    """KL divergence of the first token's distribution from the target's."""
    law, plain = output_distribution(make_draft, target, verifier, 1), target_distribution(target, 1)
    return sum(prob * math.log(prob / plain[tokens]) for tokens, prob in law.items() if prob > 0.0)


@pytest.mark.parametrize("drafter", ["certain tree", "drawn chain", "drawn siblings"])
def test_bounded_kl_stays_within_its_bound(drafter):
    make_draft = tiny_drafters()[drafter]
    for target in tiny_targets():
        for bound in (0.01, 0.2):
            assert divergence(make_draft, DivergenceVerifier(bound), target) <= bound + 1e-9


def test_bounded_kl_uses_its_bound_and_reports_it():
    chain, verifier = tiny_tree([1], certain=(0,)), DivergenceVerifier(0.05)
    assert divergence(chain, verifier, WARM) == pytest.approx(0.05, abs=1e-5)
    assert accepted(chain, verifier, WARM) > accepted(chain, RejectionVerifier(), WARM)
    assert accepted(chain, DivergenceVerifier(100.0), WARM) == pytest.approx(1.0)

    def spent(rng, rule, bound):
        once, draft = rule(bound), chain(list(WARM.prompt), rng)
        once.verify(draft, WARM.view((), draft, rng), rng)
        return once.spent

    for rule, bound in ((DivergenceVerifier, 0.05), (BoundedVerifier, 0.1)):
        found = [value for _, value in outcomes(lambda rng, r=rule, b=bound: spent(rng, r, b))]
        assert found == pytest.approx([bound] * len(found), abs=1e-5)


def test_bounded_uses_its_bound():
    chain = tiny_tree([1])
    missing = 1.0 - accepted(chain, RejectionVerifier(), WARM)
    assert missing > 0.1
    assert accepted(chain, BoundedVerifier(0.1), WARM) == pytest.approx(1.0 - missing + 0.1)
    assert first_token_distance(chain, BoundedVerifier(0.1), WARM) == pytest.approx(0.1)
    assert accepted(chain, BoundedVerifier(1.0), WARM) == pytest.approx(1.0)


def test_bound_of_zero_is_rejection_sampling_number_for_number():
    for make_draft in (tiny_tree([2, 1], ruled_out=0), tiny_tree([2, 2], certain=(0, 1))):

        def run(rng, rule, make_draft=make_draft):
            draft = make_draft(list(WARM.prompt), rng)
            return rule.verify(draft, WARM.view((), draft, rng), rng)

        both = zip(
            outcomes(lambda d: run(d, RejectionVerifier())),
            outcomes(lambda d: run(d, BoundedVerifier(0.0))),
            strict=True,
        )  # noqa: B023
        assert all(a == b for a, b in both)


@pytest.mark.parametrize(
    "verifier", [BoundedVerifier(0.5), DivergenceVerifier(0.5), TypicalVerifier(0.99)], ids=lambda v: v.name
)
def test_what_the_target_rules_out_is_never_answered(verifier):
    grammar = next(target for target in tiny_targets() if target.name == "grammar")
    for make_draft in (tiny_tree([3, 1], certain=(0, 1)), tiny_tree([2])):
        law = output_distribution(make_draft, grammar, verifier, 2)
        assert all(a in (0, 2) and b in (0, 1, 2) for a, b in law)


@pytest.mark.parametrize(
    "verifier", [BoundedVerifier(0.5), DivergenceVerifier(0.5), TypicalVerifier(0.99)], ids=lambda v: v.name
)
def test_greedy_stays_greedy(verifier):
    greedy = next(target for target in tiny_targets() if target.name == "greedy")
    law = output_distribution(tiny_tree([3, 2], certain=(0, 1)), greedy, verifier, 3)
    assert dict(law) == target_distribution(greedy, 3)


def probs_target(*rows):
    """A target that has these distributions at the root, then after each node."""

    class View:
        def probs(self, node):
            return torch.tensor(rows[node + 1], dtype=torch.float64)

        def draw(self, node):
            return int(self.probs(node).argmax())

    return View()


def test_typical_takes_the_longest_path_of_likely_tokens():
    draft = Draft([1, 2, 0, 0], [ROOT, ROOT, 1, 2], [0.5] * 4, ["test"] * 4)
    flat, sure = [0.4, 0.3, 0.3], [0.98, 0.01, 0.01]
    target = probs_target(flat, sure, sure, sure, sure)
    verdict = TypicalVerifier(0.91).verify(draft, target, EveryOutcome([]))
    assert verdict.path == [1, 2, 3] and verdict.next_token == 0


def test_typical_asks_more_of_a_token_where_the_target_is_sure():
    draft = Draft([1], [ROOT], [0.5], ["test"])
    unsure, sure = [0.25, 0.05, *[0.07] * 10], [0.949, 0.05, *[0.0001] * 10]
    took = [
        TypicalVerifier(0.91).verify(draft, probs_target(row, row), EveryOutcome([])).path for row in (unsure, sure)
    ]
    assert took == [[0], []]
    took = [TypicalVerifier(b).verify(draft, probs_target(unsure, unsure), EveryOutcome([])).path for b in (0.01, 0.91)]
    assert took == [[], [0]]  # a larger bound takes more


@pytest.mark.parametrize("rule", [TypicalVerifier, BoundedVerifier, DivergenceVerifier])
@pytest.mark.parametrize("bound", [-0.1, 100.5, float("nan")])
def test_bounds_are_shares(rule, bound):
    with pytest.raises(BadRequest, match="from 0 to 1"):
        rule(bound)
