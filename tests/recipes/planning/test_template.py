"""Plans as text: what is read, what is refused, what waits for what, and what the grammars allow."""

from __future__ import annotations

import re

import pytest

from forerun.recipes.planning.template import Plan, PlanError, Step, fill, parse, plan_grammar, references, turn_grammar

TEXT = """Plan: look both up first.
#E1 = Search[the Severn]
 #E2=Search[ list[0] of rivers ]
#E3 = Compare[#E1, #E2 and #E1]
Answer: it is #E3"""


def test_a_plan_is_read_and_written() -> None:
    plan = parse(TEXT)
    assert plan.steps == (
        Step("#E1", "Search", "the Severn"),
        Step("#E2", "Search", "list[0] of rivers"),
        Step("#E3", "Compare", "#E1, #E2 and #E1"),
    )
    assert plan.answer == "it is #E3" and plan.steps[2].needs == ("#E1", "#E2")
    assert parse(plan.text) == plan
    plan.check(["Search", "Compare"], 3)
    assert [[step.name for step in stage] for stage in plan.stages()] == [["#E1", "#E2"], ["#E3"]]


def test_ten_is_not_one() -> None:
    assert references("#E10 #E1") == ("#E10", "#E1")
    assert fill("#E10-#E1-#E2", {"#E1": "one", "#E10": "#E1"}) == "#E1-one-#E2"  # a result is not filled in again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no step at all", "no step"),
        ("#E1 = Search[a]\n#E1 = Search[b]", "two steps are called #E1"),
        ("#E1 = Fly[a]", "'Fly'"),
        ("#E1 = Search[#E3]", "#E3, which no step gives"),
        ("#E1 = Search[a]\nAnswer: #E2", "the answer uses #E2"),
        ("#E1 = Search[#E2]\n#E2 = Search[#E1]\n#E3 = Search[x]", "#E1, #E2 need each other"),
        ("#E1 = Search[#E1]", "#E1 need"),
        ("\n".join(f"#E{i} = Search[x]" for i in range(1, 6)), "5 steps, allowed are 4"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_carried_out(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        parse(text).check(["Search"], 4)
    assert caught.value.hint


@pytest.mark.parametrize("line", ["#E1 = Search", "#E1 = Search[a", "#E = Search[a]", "#E1: Search[a]"])
def test_a_broken_step_is_named(line: str) -> None:
    with pytest.raises(PlanError, match="not a step"):
        parse(line)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("#E1 = Search[a b]", True),
        ("#E1 = Search[a]\n#E2 = Add[#E1 + 2]", True),
        ("#E1 = Search[a]\n#E2 = Add[#E2]", False),
        ("#E2 = Search[a]", False),
        ("#E1 = Fly[a]", False),
        ("#E1 = Search[]", False),
        ("#E1 = Search[a]\n#E2 = Add[b]\n#E3 = Add[c]", False),
        ("#E1 = Search[a]\n", False),
    ],
    ids=str,
)
def test_the_grammar_allows_valid_plans_only(text: str, fits: bool) -> None:
    pattern = plan_grammar(["Search", "Add"], 2, answer=False).source
    assert bool(re.fullmatch(pattern, text)) is fits
    if fits:
        parse(text).check(["Search", "Add"], 2)


def test_an_answer_template_may_only_name_steps_that_are_there() -> None:
    pattern = plan_grammar(["Search"], 3, answer=True).source
    assert re.fullmatch(pattern, "#E1 = Search[a]\nAnswer: it is #E1.")
    assert not re.fullmatch(pattern, "#E1 = Search[a]\nAnswer: it is #E2.")
    assert not re.fullmatch(pattern, "#E1 = Search[a]")


def test_a_turn_is_a_call_or_the_answer() -> None:
    free, last = (turn_grammar(["Search"], may_call).source for may_call in (True, False))
    for pattern, call, answer in ((free, True, True), (last, False, True)):
        assert bool(re.fullmatch(pattern, "Call: Search[a]")) is call
        assert bool(re.fullmatch(pattern, "Answer: a.")) is answer
    assert not re.fullmatch(free, "Call: Fly[a]")


def test_an_empty_plan_has_no_stage() -> None:
    assert Plan(()).stages() == []
