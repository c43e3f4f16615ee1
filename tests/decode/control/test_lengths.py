"""How long answers are expected to last."""

import pytest

from forerun.decode.control.acceptance import Acceptance, RequestStats
from forerun.decode.control.lengths import PRIOR_ANSWER_TOKENS, PRIOR_FACTOR_ELSEWHERE, QUARTILE


def test_answers_are_expected_to_last_as_others_of_their_kind():
    known, usual = Acceptance(), int(PRIOR_ANSWER_TOKENS * PRIOR_FACTOR_ELSEWHERE**-QUARTILE)
    assert known.expected_remaining(RequestStats()) == usual
    assert known.expected_remaining(RequestStats(max_tokens=10)) == 10
    for _ in range(40):
        known.record_length(RequestStats("text", tokens=12))
        known.record_length(RequestStats("code", tokens=400))
        known.record_length(RequestStats("numbers", tokens=20))
        known.record_length(RequestStats("numbers", tokens=200))
    assert known.expected_remaining(RequestStats("text")) < 24
    assert known.expected_remaining(RequestStats("text", tokens=200)) == 200  # this one is longer than they were
    assert known.expected_remaining(RequestStats("code")) > 240  # all of them are long
    assert known.expected_remaining(RequestStats("numbers")) < 60  # some of them are short


def test_an_answer_that_its_limit_cut_off_counts_as_far_as_it_went():
    """Left out, one short answer among many that were cut off would be all there is to know of their kind."""
    known = Acceptance()
    usual, least = known.min_length("text", 0.0), known.min_length("text", 1.0)
    for _ in range(8):
        known.record_length(RequestStats("text", tokens=96, max_tokens=96))
    assert known.min_length("text", 0.0) == pytest.approx(usual) and known.min_length("text", 1.0) > 1.5 * least
    short = Acceptance()
    short.record_length(RequestStats("text", tokens=16, max_tokens=16))
    assert short.min_length("text", 1.0) < 1.1 * least  # it went not far
    known.record_length(RequestStats("code", tokens=900, max_tokens=900))  # so long at least
    assert known.min_length("code", 0.0) > PRIOR_ANSWER_TOKENS


def test_where_lengths_vary_widely_an_answer_that_has_begun_is_hardly_nearer_its_end():
    known = Acceptance()
    begun = [known.expected_remaining(RequestStats("text", tokens=tokens)) for tokens in (0, 8, 64)]
    assert begun[0] > begun[1] > 0.9 * begun[0] and begun[2] == 64
    assert known.expected_remaining(RequestStats("code", tokens=48)) < 0.7 * known.expected_remaining(
        RequestStats("code")
    )
