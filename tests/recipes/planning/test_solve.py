"""Plan first, or turn by turn: what is asked, what it costs, and every way it can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.params import Grammar
from forerun.recipes import plan
from tests.recipes.planning.fakes import Scripted


def Find(text: str) -> str:
    """looks a number up"""
    return {"a": "3", "b": "4"}[text]


def Add(text: str) -> int:
    return sum(int(part) for part in text.split("+"))


TOOLS = {"Find": Find, "Add": Add}
PLAN = "#E1 = Find[a]\n#E2 = Find[b]\n#E3 = Add[#E1+#E2]"


def test_the_prompt_grows_once() -> None:
    llm = Scripted(PLAN, "It is 7.")
    found = plan.solve(llm, "What is a plus b?", TOOLS)
    assert found.answer == "It is 7." and found.results == {"#E1": "3", "#E2": "4", "#E3": "7"}
    (first, first_params), (second, second_params) = llm.asked
    assert "Find[input]: looks a number up" in first[0]["content"] and first[-1]["content"] == "What is a plus b?"
    assert second[: len(first)] == first and second[len(first)]["content"] == PLAN  # read from the prefix tree
    assert len(second) == len(first) + 2 and "#E3 = 7" in second[-1]["content"]
    assert first_params.grammar is not None and second_params.grammar is None
    assert found.tries == 1 and found.usage.requests == 2
    assert found.usage.prompt_tokens == sum(len(llm.encode(messages)) for messages, _ in llm.asked)
    assert found.usage.computed_tokens == found.usage.tokens - found.usage.cached_tokens > 0
    assert found.usage.total_s >= found.usage.model_s + found.usage.tools_s > 0


def test_a_template_needs_no_second_request() -> None:
    llm = Scripted(PLAN + "\nAnswer: #E1 and #E2 make #E3.")
    found = plan.solve(llm, "What is a plus b?", TOOLS, answer="template")
    assert found.answer == "3 and 4 make 7." and found.usage.requests == 1


def test_a_plan_of_ones_own() -> None:
    llm = Scripted("Seven.")
    found = plan.solve(llm, "What is a plus b?", TOOLS, plan=plan.parse(PLAN))
    assert found.tries == 0 and found.answer == "Seven." and len(llm.asked) == 1
    with pytest.raises(plan.PlanError, match="'Fly'"):
        plan.solve(llm, "Up?", TOOLS, plan="#E1 = Fly[up]")
    with pytest.raises(plan.PlanError, match="no answer line"):
        plan.solve(llm, "Up?", TOOLS, plan=PLAN, answer="template")


def test_a_bad_plan_is_sent_back_with_the_reason() -> None:
    llm = Scripted("#E1 = Fly[a]", PLAN, "Seven.")
    found = plan.solve(llm, "What is a plus b?", TOOLS, constrain=False)
    assert found.tries == 2 and found.answer == "Seven."
    complaint = llm.asked[1][0][-1]["content"]
    assert "'Fly'" in complaint and "Find, Add" in complaint and llm.asked[0][1].grammar is None


@pytest.mark.parametrize("bad", ["#E1 = Fly[a]", "I do not know.", "#E1 = Find[#E1]", "#E1 = Find[a"])
def test_no_valid_plan_after_so_many_tries(bad: str) -> None:
    llm = Scripted(bad, bad)
    with pytest.raises(plan.PlanError, match="no valid plan in 2 tries") as caught:
        plan.solve(llm, "What?", TOOLS, constrain=False, limits=plan.Limits(tries=2))
    assert caught.value.hint and isinstance(caught.value.usage, plan.PlanUsage) and caught.value.usage.requests == 2


def test_a_failing_tool_reaches_the_model_as_text() -> None:
    llm = Scripted("#E1 = Find[z]\n#E2 = Find[a]", "One is missing.")
    found = plan.solve(llm, "z and a?", TOOLS)
    assert [call.failed for call in found.calls] == [True, False]
    assert "#E1 = error: KeyError: 'z'" in llm.asked[1][0][-1]["content"]


def test_a_budget_is_kept() -> None:
    llm = Scripted(PLAN, "Seven.")
    first = len(llm.encode(_asked_first()))
    with pytest.raises(plan.PlanError, match="the budget is") as caught:
        plan.solve(llm, "What is a plus b?", TOOLS, limits=plan.Limits(token_budget=first + 60))
    assert len(llm.asked) == 1 and isinstance(caught.value.usage, plan.PlanUsage)
    assert llm.asked[0][1].max_tokens == 60  # never more than what is left
    with pytest.raises(plan.PlanError, match="budget is 5"):
        plan.interleaved(llm, "What is a plus b?", TOOLS, limits=plan.Limits(token_budget=5))


def _asked_first() -> list[dict[str, Any]]:
    llm = Scripted(PLAN, "Seven.")
    plan.solve(llm, "What is a plus b?", TOOLS)
    return llm.asked[0][0]


def test_the_loop_grows_with_every_call() -> None:
    llm = Scripted("Call: Find[a]", "Call: Find[z]", "Call: Add[3+4]", "Answer: 7.")
    found = plan.interleaved(llm, "What is a plus b?", TOOLS)
    assert found.answer == "7." and [c.result for c in found.calls] == ["3", "error: KeyError: 'z'", "7"]
    assert found.usage.requests == 4 and [len(messages) for messages, _ in llm.asked] == [2, 4, 6, 8]
    assert llm.asked[1][0][-1]["content"] == "Result: 3"


async def test_the_loop_may_call_coroutines_from_a_running_loop_and_gives_up_in_time() -> None:
    async def slow(text: str) -> str:
        if text == "b":
            await asyncio.Event().wait()  # for ever
        return text.upper()

    llm = Scripted("Call: Slow[a]", "Call: Slow[b]", "Answer: A")
    found = plan.interleaved(llm, "What?", {"Slow": slow}, limits=plan.Limits(timeout_s=0.1))
    assert [call.result for call in found.calls] == ["A", "error: no result within 0.1 s"]
    assert found.answer == "A" and found.latency_s >= 0.1


def test_the_loop_ends() -> None:
    llm = Scripted("Call: Find[a]", "Call: Find[b]", "Answer: enough")
    found = plan.interleaved(llm, "What?", TOOLS, limits=plan.Limits(max_calls=1), constrain=False)
    assert len(found.calls) == 1 and found.answer == "enough"
    with pytest.raises(plan.PlanError, match="3 tries: 'Fly' is no tool"):
        plan.interleaved(Scripted(*["Call: Fly[a]"] * 3), "What?", TOOLS, constrain=False)
    with pytest.raises(plan.PlanError, match="neither a call nor an answer"):
        plan.interleaved(Scripted(*["Hm."] * 3), "What?", TOOLS, constrain=False)


def test_examples_are_shown_both_ways() -> None:
    example = plan.Example("a and b?", PLAN, {"#E1": "3", "#E2": "4", "#E3": "7"}, "It is 7.")
    llm = Scripted("#E1 = Find[a]", "3.", "Answer: 3.")
    plan.solve(llm, "a?", TOOLS, examples=[example])
    plan.interleaved(llm, "a?", TOOLS, examples=[example])
    texts = [[message["content"] for message in messages] for messages, _ in llm.asked]
    assert texts[0][1:3] == ["a and b?", PLAN] and texts[0][4] == "It is 7." and texts[0][5] == "a?"
    assert texts[2][6:9] == ["Call: Add[3+4]", "Result: 7", "Answer: It is 7."]
    with pytest.raises(BadRequest, match="no result for #E2, #E3"):
        plan.solve(llm, "a?", TOOLS, examples=[plan.Example("a and b?", PLAN, {"#E1": "3"})])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_calls": 0},
        {"max_calls": 65},
        {"tries": True},
        {"parallel": 1.5},
        {"token_budget": 0},
        {"timeout_s": 0},
        {"timeout_s": "1"},
    ],
    ids=str,
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        plan.Limits(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": " "},
        {"task": 3},
        {"answer": "guess"},
        {"plan": 7},
        {"params": {"temperature": 1}},
        {"params": SamplingParams(n=2)},
        {"params": SamplingParams(grammar=Grammar("regex", "a"))},
    ],
    ids=str,
)
def test_what_is_asked_is_checked(wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"task": "a?", "tools": TOOLS} | wrong
    llm = Scripted()
    with pytest.raises(BadRequest):
        plan.solve(llm, **asked)
    assert not llm.asked


def test_even_a_random_model_writes_a_plan(tiny_folder: Callable[[str], Path]) -> None:
    """The grammar alone makes plans valid; the second request reads what the first one computed."""
    limits = plan.Limits(max_calls=2, plan_tokens=400, answer_tokens=4)
    with LLM(str(tiny_folder("llama")), threads=1, quiet=True, dtype="float32") as llm:
        found = plan.solve(llm, "What is a plus b?", TOOLS, limits=limits)
        assert 1 <= len(found.plan.steps) <= 2 and {step.tool for step in found.plan.steps} <= set(TOOLS)
        assert found.usage.requests == 2 and found.usage.cached_tokens > 100
