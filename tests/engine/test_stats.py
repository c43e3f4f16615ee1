"""How prompt tokens were served adds up."""

from __future__ import annotations

import json

import pytest

from forerun.core import Usage
from forerun.engine.sequence import complete_served
from forerun.engine.stats import Stats


def used(reached: int = 100, approximate: int = 0, **served: int) -> Usage:
    usage = Usage(prompt_tokens=100, completion_tokens=10, total_s=2.0, written=32, served=served)
    complete_served(usage, approximate, reached)
    return usage


def test_the_parts_add_up_to_the_prompt():
    assert used(pool=16, disk=32).served == {
        "pool": 16,
        "host": 0,
        "disk": 32,
        "store": 0,
        "approximate": 0,
        "computed": 52,
    }
    drafted = used(approximate=500, pool=16).served
    assert drafted["approximate"] == 84 and drafted["computed"] == 0
    assert sum(used(reached=40, pool=16).served.values()) == 40  # cancelled on the way
    assert sum(used(reached=0).served.values()) == 0


def test_totals_are_per_session_and_per_finished_answer():
    stats = Stats()
    stats.book("a", used(pool=80), finished=True)
    stats.book("a", used(pool=90), finished=True)
    stats.book(None, used(), finished=True)
    stats.book(None, used(reached=50), finished=False)
    before = stats.snapshot({"disk": {"tokens": 3}})
    stats.book("a", used(), finished=True)
    assert (before.answers, before.requests, before.prompt_tokens, before.computed) == (3, 4, 350, 180)
    assert before.cached_share == pytest.approx(170 / 350)
    assert before.computed_per_answer == pytest.approx((180 + 40) / 3) and before.seconds_per_answer == pytest.approx(
        8 / 3
    )
    assert before.sessions["a"].cached_share == 0.85 and before.sessions["a"].computed_per_answer == 25
    record = json.loads(json.dumps(before.record()))
    assert record["sessions"]["a"]["served"]["pool"] == 170 and record["tiers"]["disk"]["tokens"] == 3
    assert Stats().cached_share == Stats().computed_per_answer == Stats().seconds_per_answer == 0.0
