"""Lossless rules: exact on every kind of draft, better than each other where they should be, robust to bad drafts."""

import pytest
import torch

from forerun.checks.enumeration import TinyTarget, outcomes, tiny_logits
from forerun.core import ROOT, Draft
from forerun.decode.sampling import DRAFT_STREAM, Context, SeededRng
from forerun.decode.verifiers.base import MatchVerifier
from forerun.decode.verifiers.lossless import BlockVerifier, RejectionVerifier, TransportVerifier, TraversalVerifier
from forerun.decode.verify import Target
from forerun.params import SamplingParams
from tests.checks.pairs import check_pairs, tiny_drafters, tiny_tree

ALL = [MatchVerifier(), RejectionVerifier(), BlockVerifier(), TraversalVerifier(), TransportVerifier()]
WARM = [TinyTarget(f"warm {seed}", tiny_logits(seed), SamplingParams(temperature=0.8)) for seed in (0.3, 0.6, 1.1)]


def accepted(make_draft, verifier, target) -> float:
    """Exact mean length of the accepted path in the first step."""

    def run(rng):
        draft = make_draft(list(target.prompt), rng)
        return len(verifier.verify(draft, target.view((), draft, rng), rng).path)

    return sum(prob * length for prob, length in outcomes(run))


@pytest.mark.parametrize("drafter", [name for name in tiny_drafters() if name not in ("drawn tree", "drawn siblings")])
def test_small_drafts_on_every_target(drafter):
    for result in check_pairs(ALL, {drafter: tiny_drafters()[drafter]}):
        assert result.passed, result


@pytest.mark.parametrize(
    "verifier", [*ALL, TransportVerifier(rare=0.3)], ids=lambda v: f"{v.name} {getattr(v, 'rare', '')}"
)
@pytest.mark.parametrize("drafter", ["drawn tree", "drawn siblings"])
def test_large_drafts(verifier, drafter):
    targets = [TinyTarget("top-k", tiny_logits(0.7), SamplingParams(temperature=1.2, top_k=3))]
    for result in check_pairs([verifier], {drafter: tiny_drafters()[drafter]}, targets):
        assert result.passed, result


@pytest.mark.parametrize("target", WARM, ids=lambda t: t.name)
def test_on_chains_nothing_exceeds_block(target):
    chain = tiny_tree([1, 1, 1], ruled_out=1)
    by_rule = {v.name: accepted(chain, v, target) for v in ALL}
    assert by_rule["block"] == pytest.approx(by_rule["traversal"]) == pytest.approx(by_rule["transport"])
    assert by_rule["block"] > by_rule["rejection"] > by_rule["match"]


@pytest.mark.parametrize("target", WARM, ids=lambda t: t.name)
def test_on_pairs_transport_comes_near_the_best_possible(target):
    q = torch.softmax(tiny_logits(1.7)(target.prompt), -1)
    rejection, transport = (accepted(tiny_tree([2]), v, target) for v in (RejectionVerifier(), TransportVerifier()))
    best = best_for_pairs(target.probs(()), q)
    assert rejection < transport <= best + 1e-12
    assert best - transport < 0.25 * (best - rejection)


def best_for_pairs(p, q) -> float:
    """No rule takes more than the target wants of the tokens it is offered nothing but: the tightest such bound."""
    bound = 1.0
    for mask in range(1, 1 << len(p)):
        inside = [i for i in range(len(p)) if mask >> i & 1]
        both = sum(float(q[x] * q[y] / (1 - q[x])) for x in inside for y in inside if x != y)
        bound = min(bound, 1.0 - both + float(p[inside].sum()))
    return bound


def test_certain_children_are_taken_as_often_as_the_target_wants_them():
    tree = tiny_tree([2, 2], certain=(0, 1))
    lengths = [
        accepted(tree, v, WARM[0])
        for v in (MatchVerifier(), RejectionVerifier(), TraversalVerifier(), TransportVerifier())
    ]
    assert lengths == pytest.approx([lengths[0]] * 4)


def test_block_sees_the_first_children_of_a_tree():
    def first_chain(tokens, rng):
        return tiny_tree([1, 1])(tokens, rng)

    assert accepted(tiny_tree([2, 1]), BlockVerifier(), WARM[0]) == pytest.approx(
        accepted(first_chain, BlockVerifier(), WARM[0])
    )


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: v.name)
@pytest.mark.parametrize("bad", ["nan", "zero", "short"])
def test_children_of_what_is_no_distribution_are_ignored(verifier, bad):
    def make(tokens, rng):
        draft = tiny_tree([2, 1], certain=(0, 1))(tokens, rng)
        draft.proposals[ROOT] = {"nan": torch.full((4,), torch.nan), "zero": torch.zeros(4), "short": torch.ones(3)}[
            bad
        ]
        return draft

    for result in check_pairs([verifier], {bad: make}, WARM[:1]):
        assert result.passed, result


@pytest.mark.parametrize(
    "verifier", [RejectionVerifier(), TraversalVerifier(), TransportVerifier()], ids=lambda v: v.name
)
@pytest.mark.parametrize("rest", [0.05, 1e-20])
@pytest.mark.parametrize("children", [2, 3, 4])
def test_children_after_one_that_is_all_but_sure(verifier, rest, children):
    """What is drawn second may come from the last 1e-20 of the mass: subtracting from one would leave nothing of it."""
    q = torch.tensor([rest, 1.0, 3 * rest, 6 * rest], dtype=torch.float64)

    def make(tokens, rng):
        draft, left = Draft(proposals={ROOT: q}), q.clone()
        for _ in range(children):
            draft.add(rng.pick(left), ROOT, 0.5, "tiny")
            left[draft.tokens] = 0.0
        return draft

    for result in check_pairs([verifier], {"sure": make}, WARM):
        assert result.passed, result


@pytest.mark.parametrize("verifier", ALL, ids=lambda v: v.name)
def test_chains_may_be_as_deep_as_drafts_get(verifier):
    logits = torch.zeros(513, 8)
    logits[:, 3] = 50.0
    draft = Draft.chain([3] * 512, [0.9] * 512, "test")
    target = Target(logits, Context(SamplingParams(temperature=1.0), [1, 2], 1, seed=5), draft)
    verdict = verifier.verify(draft, target, SeededRng(5, 2))
    assert verdict.path == list(range(512)) and verdict.next_token == 3


@pytest.mark.parametrize("verifier", ALL[1:], ids=lambda v: v.name)
def test_float32_of_a_real_size(verifier):
    """The first token of many steps, drawn in single precision, follows the target's distribution."""
    torch.manual_seed(0)
    vocab, rounds = 2000, 600
    p, q = torch.randn(vocab) * 3, torch.randn(vocab)
    q = torch.softmax(p + q, -1)
    counts = torch.zeros(vocab)
    for seed in range(rounds):
        draft, rest, rng = Draft(proposals={ROOT: q}), q.double(), SeededRng(seed, 9, DRAFT_STREAM)
        for _ in range(2):
            rest[draft.tokens] = 0.0
            draft.add(rng.pick(rest), ROOT, 0.5, "test")
        target = Target(p.expand(3, -1), Context(SamplingParams(temperature=1.0), [1], 1, seed), draft)
        verdict = verifier.verify(draft, target, SeededRng(seed, 9))
        counts[draft.tokens[verdict.path[0]] if verdict.path else verdict.next_token] += 1
    wanted = torch.softmax(p, -1)
    top = wanted.topk(8).indices
    deviation = (counts[top] / rounds - wanted[top]) / (wanted[top] * (1 - wanted[top]) / rounds).sqrt()
    assert deviation.abs().max() < 4.0  # one in two thousand for eight tokens
