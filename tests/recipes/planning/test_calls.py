"""Carrying plans out: side by side, in order of need, with errors as results."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forerun.errors import BadRequest
from forerun.recipes.planning.calls import check_tools, run_plan
from forerun.recipes.planning.template import PlanError, parse


def test_independent_calls_run_at_once_and_results_are_filled_in() -> None:
    meet = threading.Barrier(2, timeout=60)  # broken unless both calls run at the same time

    def find(text: str) -> str:
        meet.wait()
        return text.upper()

    plan = parse("#E3 = Join[#E1+#E2]\n#E1 = Find[a]\n#E2 = Find[b]")
    calls = run_plan(plan, {"Find": find, "Join": lambda text: f"<{text}>"})
    assert [(c.name, c.argument, c.result, c.failed) for c in calls] == [
        ("#E3", "A+B", "<A+B>", False),
        ("#E1", "a", "A", False),
        ("#E2", "b", "B", False),
    ]
    assert calls[0].started_s >= max(c.started_s + c.seconds for c in calls[1:]) - 0.001


def test_no_more_than_allowed_run_at_once() -> None:
    lock, pair, now, peak = threading.Lock(), threading.Barrier(2), 0, 0

    def work(text: str) -> int:
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        pair.wait(60)  # two always run at once
        with lock:
            now -= 1
        return len(text)

    plan = parse("\n".join(f"#E{i} = Work[x]" for i in range(1, 7)))
    assert [c.result for c in run_plan(plan, {"Work": work}, parallel=2)] == ["1"] * 6
    assert peak == 2


def test_a_failing_tool_leaves_an_error_and_the_rest_goes_on() -> None:
    def fail(text: str) -> str:
        raise KeyError(text)

    plan = parse("#E1 = Fail[x]\n#E2 = Say[#E1]\n#E3 = Say[#E2]\n#E4 = Say[fine]")
    calls = run_plan(plan, {"Fail": fail, "Say": lambda text: text})
    assert [c.failed for c in calls] == [True, True, True, False]
    assert calls[0].result == "error: KeyError: 'x'" and calls[3].result == "fine"
    assert calls[1].result == "not run: #E1 failed" and calls[2].result == "not run: #E2 failed"


def test_a_tool_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    plan = parse("#E1 = Hang[x]\n#E2 = Say[y]\n#E3 = Say[#E1]")
    calls = run_plan(plan, {"Hang": lambda _: release.wait(20), "Say": lambda text: text}, timeout_s=0.05)
    release.set()
    assert calls[0].failed and "0.05 s" in calls[0].result
    assert calls[1].result == "y" and calls[2].failed


def test_coroutines_and_long_results() -> None:
    async def slow(text: str) -> str:
        await asyncio.sleep(0)
        return text * 100

    (call,) = run_plan(parse("#E1 = Slow[ab]"), {"Slow": slow}, result_chars=10)
    assert call.result == "ababababab ... (190 more characters)"


def test_a_plan_that_cannot_end_is_not_begun() -> None:
    for text, said in (("#E1 = Say[#E2]", "#E2"), ("#E1 = Say[#E1]", "need each other"), ("#E1 = Fly[x]", "Fly")):
        with pytest.raises(PlanError, match=said):
            run_plan(parse(text), {"Say": str})


@pytest.mark.parametrize("tools", [{}, None, {"a b": len}, {1: len}, {"Say": "text"}, {"": len}], ids=str)
def test_tools_that_are_none(tools: object) -> None:
    with pytest.raises(BadRequest):
        check_tools(tools)  # type: ignore[arg-type]
