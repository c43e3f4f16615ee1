import pytest

from forerun.core import Draft
from forerun.decode.control.gain import DOUBTED_RATIO, MAX_TOKENS, Gain, Gains


def run(gains: Gains, own: Gain, expected: float, tokens: int, kind: str = "text") -> None:
    own.open = expected
    gains.record(kind, own, tokens)


def test_a_request_whose_drafts_fail_is_expected_to_gain_less_and_others_of_its_kind_a_little():
    gains, own, other = Gains(), Gain(), Gain()
    for _ in range(3):
        run(gains, own, 2.0, 0)
    assert gains.ratio("text", own) < gains.ratio("text", other) < 1.0
    assert gains.ratio("code", other) == 1.0
    assert gains.ratio("code", other, doubt=True) == pytest.approx(DOUBTED_RATIO)
    for _ in range(20):
        run(gains, own, 2.0, 4)
    assert gains.ratio("text", own) == 1.0  # never more: what was expected is the most that is counted on


def test_one_long_copy_counts_as_a_few_tokens():
    gains, own = Gains(), Gain()
    run(gains, own, 40.0, 60)
    assert own.total == [MAX_TOKENS, MAX_TOKENS]


def test_a_step_that_expected_nothing_shows_nothing():
    gains, own = Gains(), Gain()
    gains.record("text", own, 3)
    assert own.total == [0.0, 0.0]


def test_a_step_that_was_not_launched_counts_when_it_runs():
    gains, own = Gains(), Gain()
    own.left = 2.0
    gains.record("text", own, 0)  # the step in flight
    assert own.total == [0.0, 0.0]
    own.begin_left()
    gains.record("text", own, 0)
    assert own.total == [0.0, 2.0] and own.left == 0.0


def test_drafts_that_were_not_verified_count_once_they_are_followed():
    gains, own = Gains(), Gain(beside=3.0)
    gains.record_followed("text", own, 2)  # the ones before them
    assert own.total == [0.0, 0.0]
    own.follow()
    gains.record_followed("text", own, 2)
    assert own.total == [2.0, 3.0] and not own.followed and not own.beside


def test_only_the_first_tokens_of_free_drafters_are_doubted():
    gains, own = Gains(), Gain()
    run(gains, own, 5.0, 0)
    draft = Draft([1, 2, 3], [-1, 0, -1], [0.8, 0.9, 0.5], ["lookup", "lookup", "model"])
    ratio = gains.ratio("text", own)
    assert gains.expected("text", own, draft, {"model"}) == [0.8 * ratio, 0.9, 0.5]
    assert gains.expected("text", own, draft, {"model"}, share=0.5) == [0.8 * (0.5 * ratio), 0.9, 0.5]
    assert gains.expected("text", Gain(), draft, {"model"}, share=0.5) != draft.probs


def test_what_was_learnt_is_read_again_and_other_files_are_refused():
    gains, again = Gains(), Gains()
    run(gains, Gain(), 5.0, 0)
    again.load(gains.as_json())
    assert again.ratio("text", Gain()) == gains.ratio("text", Gain()) < 1.0
    for wrong in ({"text": [1.0]}, {"text": [-1.0, 2.0]}, {"text": ["x", 1.0]}):
        with pytest.raises((ValueError, TypeError)):
            Gains().load(wrong)


def test_a_paid_drafter_is_judged_by_tokens_in_the_time_that_its_steps_took():
    gains = Gains()
    for _ in range(20):  # three tokens came where the plan had four for that time
        gains.add("text", 3.0, 4.0)
    assert 0.75 < gains.usual("text") < 0.85 and gains.usual("code") == 1.0
