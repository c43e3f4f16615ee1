"""What a drafter learns of its texts: counts that weigh by how well they did, used only where they help, bounded."""

from __future__ import annotations

import random

import pytest

from forerun import BadDrafter
from forerun.models import online_habits as module
from forerun.models.online_habits import OnlineHabits, Ranked


class Said:
    """A pass that says the same of every position."""

    def __init__(self, ranked: Ranked, depth: int = 3) -> None:
        self.depth, self._ranked = depth, ranked

    def top(self, depth: int, before: int) -> Ranked:
        return self._ranked


WRONG: Ranked = [(900, 0.5), (901, 0.3)]


def drafted(found: OnlineHabits, text: list[int], said: Said, seq_id: int = 0, step: int = 2) -> None:
    """A pass after every second token."""
    for end in range(2, len(text), step):
        found.observe(seq_id, text[:end], said)
    found.finish(seq_id, text)


def test_what_followed_before_is_proposed_once_it_was_right():
    found, text = OnlineHabits(), list(range(40)) * 4
    drafted(found, text[:40], Said(WRONG))
    assert not found.active  # nothing has come twice
    drafted(found, text, Said(WRONG), seq_id=1)
    assert found.active and found.stats["right"] > 50 and found.stats["right_without"] == 0
    ranked = found.mix([6, 7, 8, 9], WRONG)
    assert ranked[0][0] == 10 and ranked[0][1] > 0.7 and ranked[1][0] == 900
    assert sum(prob for _, prob in ranked) <= 1.0


def test_habits_that_mislead_are_not_used():
    """Each token is followed by a random one, and the pass is right every time."""
    draw, found = random.Random(0), OnlineHabits()
    text = [draw.randrange(6) for _ in range(600)]

    class Right(Said):
        at = 0

        def top(self, depth: int, before: int) -> Ranked:
            return [(text[self.at + depth], 0.9)]

    for end in range(2, len(text) - 3):
        said = Right([])
        said.at = end
        found.observe(0, text[:end], said)
    assert not found.active
    weights = [weight for weight, steps in found._weights.values() if steps > 100]
    assert weights and max(weights) < module.FIRST_WEIGHT


def test_a_token_without_counts_is_left_to_the_pass():
    assert OnlineHabits().mix([1, 2, 3], WRONG) is WRONG


def test_contexts_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_CONTEXTS", 50)
    found = OnlineHabits()
    drafted(found, list(range(200)), Said(WRONG))
    assert len(found._followers) == 50
    assert found.mix([5], WRONG) is WRONG and found.mix([198], WRONG)[0][0] != 5
    assert dict(found.mix([198], WRONG)).keys() >= {199}


def test_followers_of_a_context_are_bounded():
    found = OnlineHabits()
    drafted(found, [token for i in range(60) for token in (7, 100 + i)], Said(WRONG))
    assert len(found._followers[(7,)]) == module.MAX_FOLLOWERS and 159 in found._followers[(7,)]


def test_a_sequence_that_ended_leaves_its_counts_alone():
    found = OnlineHabits()
    drafted(found, list(range(30)), Said(WRONG))
    assert not found._passes and not found._read and found._followers


def test_what_was_learnt_is_saved_and_used_without_learning():
    found, text = OnlineHabits(), list(range(40)) * 4
    assert found.tensors() == {}
    drafted(found, text, Said(WRONG))
    saved = found.tensors()
    again = OnlineHabits(learning=False)
    again.load(saved)
    made, wanted = (dict(each.mix([6, 7, 8, 9], WRONG)) for each in (again, found))
    assert again.active and made == pytest.approx(wanted) and max(made, key=made.__getitem__) == 10
    drafted(again, list(range(500, 600)), Said(WRONG))
    assert again.mix([550], WRONG) is WRONG
    with pytest.raises(BadDrafter, match="other shapes"):
        OnlineHabits().load({name: value[1:] for name, value in saved.items()})
