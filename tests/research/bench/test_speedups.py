"""Speedups, bounds and goals from records whose figures are known."""

from __future__ import annotations

from typing import Any

import pytest

from forerun_research.bench.speedups import ALL, copied, goals, speedups, survival


def record(setting: str, seconds: float, **more: Any) -> dict[str, Any]:
    """An answer of 11 tokens: one second to the first, `seconds` for the other ten."""
    values: dict[str, Any] = {
        "run": 0,
        "task": "t",
        "category": "c",
        "setting": setting,
        "token_ids": [1, 2, 3],
        "completion_tokens": 11,
        "copied": 0,
        "decode_s": seconds,
        "total_s": seconds + 1,
        "steps": 10,
        "drafted": 0,
        "accepted": 0,
        "drafters": {},
        "lengths": [0] * 10,
        "draft_s": 0.0,
        "verify_s": seconds,
        "other_s": 0.0,
    }
    return values | more


def tally(drafted: int, accepted: int) -> dict[str, int]:
    return {"drafted": drafted, "accepted": accepted}


def doubling(survival: list[float], drafter: str | None) -> float:
    return 4.0 if drafter is None else 2.0


def test_a_speedup_is_the_time_of_plain_over_the_time_of_the_setting() -> None:
    records = [record("off", 8.0), record("auto", 2.0, steps=4, completion_tokens=11)]
    found = speedups(records, ["auto"], ["model"], doubling)["c"]
    assert found["off"] == {"answer_s": 9.0, "tokens_per_s": 1.25}
    assert found["auto"]["decode"]["median"] == 4.0 and found["auto"]["total"]["median"] == 3.0
    assert found["auto"]["tokens_per_s"] == 5.0 and found["auto"]["accepted_length"] == 2.75
    assert found["tasks"] == 1 and found["auto"]["bound"] == 1.0  # nothing was accepted


def test_runs_give_the_spread_and_tasks_add_up() -> None:
    records = [record("off", 4.0, run=run, task=task) for run in (0, 1, 2) for task in "ab"]
    for run, (a, b) in enumerate([(1.0, 3.0), (2.0, 2.0), (4.0, 4.0)]):
        records += [record("auto", a, run=run, task="a"), record("auto", b, run=run, task="b")]
    found = speedups(records, ["auto"], [], doubling)["c"]["auto"]["decode"]
    assert found == {"min": 1.0, "median": 2.0, "max": 2.0}


def test_answers_of_other_lengths_are_compared_by_token() -> None:
    records = [record("off", 10.0), record("auto", 5.0, completion_tokens=6, token_ids=[1, 2])]
    found = speedups(records, ["auto"], [], doubling)["c"]["auto"]
    assert found["decode"]["median"] == 1.0  # half the time for half the tokens
    assert found["equal"] == 0.0 and found["parted"] == [{"task": "t", "token": 2}]


def test_categories_stay_apart_and_all_joins_them() -> None:
    records = []
    for category, plain, fast in (("slow", 2.0, 2.0), ("quick", 6.0, 2.0)):
        records += [record("off", plain, category=category), record("auto", fast, category=category)]
    found = speedups(records, ["auto"], [], doubling)
    assert [found[name]["auto"]["decode"]["median"] for name in ("slow", "quick", ALL)] == [1.0, 3.0, 2.0]


def test_copied_tokens_stand_in_spans_of_the_prompt() -> None:
    prompt = list(range(20))
    assert copied(prompt, [99, *range(3, 13), 98, *range(5)]) == 10  # the last five are too few to count
    assert copied(prompt, prompt) == 20 and copied(prompt, prompt[::-1]) == 0 and copied([], []) == 0
    records = [record("off", 4.0, copied=11), record("off", 4.0, task="u"), record("auto", 4.0, copied=5)]
    records += [record("auto", 4.0, task="u")]
    assert speedups(records, ["auto"], [], doubling)["c"]["copied"] == 0.5


def test_survival_counts_passes_that_accepted_at_least_so_many() -> None:
    assert survival([{"lengths": [0, 0, 1, 3]}, {"lengths": [0, 3]}]) == [0.75, 0.5, 0.5]  # the first pass is prefill
    assert survival([{"lengths": [0, 0]}, {"lengths": []}]) == [] and survival([]) == []


def test_the_bound_weighs_each_drafters_cost_by_its_share() -> None:
    mixed = {"model": tally(30, 10), "lookup": tally(5, 10), "suffix": tally(5, 20)}
    only = {"model": tally(30, 10), "lookup": tally(9, 0)}
    lengths = [0, *[3] * 9]
    records = [record("off", 4.0), record("auto", 2.0, drafters=mixed, lengths=lengths)]
    records += [record("model", 2.0, drafters=only, lengths=lengths, drafted=39, accepted=10)]
    found = speedups(records, ["auto", "model"], ["model"], doubling)["c"]
    assert found["model"]["bound"] == 2.0 and found["model"]["of_bound"] == 1.0
    assert found["auto"]["bound"] == pytest.approx(1 / (0.25 / 2 + 0.75 / 4), abs=1e-3)  # above what `model` could do
    assert found["auto"]["share"] == {"suffix": 0.5, "model": 0.25, "lookup": 0.25}
    assert found["model"]["share"] == {"model": 1.0} and found["model"]["survival"] == [1.0, 1.0, 1.0]


def test_auto_is_held_to_what_any_drafter_could_do() -> None:
    """One that drafts nothing would else be as good as its bound."""
    records = [record("off", 4.0), record("auto", 4.0)]
    records += [record("lookup", 2.0, drafters={"lookup": tally(9, 9)}, lengths=[0, 9])]
    found = speedups(records, ["auto", "lookup"], [], doubling)
    assert found["c"]["auto"]["bound"] == 4.0 and found["c"]["auto"]["of_bound"] == 0.25
    alone = speedups(records, ["auto"], [], doubling)
    assert alone["c"]["auto"]["bound"] == 1.0
    assert goals(alone, ["auto"], same_bits=False)["of_bound"]["unproven"] == ["c"]


def figures(auto: float, single: float, of_bound: float = 0.95, equal: float = 1.0) -> dict[str, Any]:
    side = {"of_bound": of_bound, "equal": equal, "accepted": 1}
    return {"auto": {"decode": {"median": auto}, **side}, "lookup": {"decode": {"median": single}, **side}}


def test_goals_name_the_categories_that_miss_them() -> None:
    found = {"good": figures(2.0, 2.05), "bad": figures(0.94, 1.0, of_bound=0.5, equal=0.9), ALL: figures(0.1, 9.0)}
    marks = goals(found, ["auto", "lookup"], same_bits=True)
    assert {name: mark["missed"] for name, mark in marks.items()} == {
        "never_slower": ["bad"],
        "of_bound": ["bad"],
        "of_best": ["bad"],
        "same_answers": ["bad"],
    }
    assert marks["of_best"]["worst"] == 0.94 and not marks["of_best"]["pass"]
    del found["bad"]
    assert all(mark["pass"] for mark in goals(found, ["auto", "lookup"], same_bits=True).values())


def test_goals_are_only_those_that_were_measured() -> None:
    found = {"c": figures(2.0, 2.0)}
    assert set(goals(found, ["auto"], same_bits=False)) == {"never_slower", "of_bound"}
    assert goals(found, ["lookup"], same_bits=False) == {}
