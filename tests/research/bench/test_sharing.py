"""`forerun bench sharing` in small: every part runs, figures follow from what was measured, bad sizes stop it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.cli import main
from forerun.errors import BadRequest, ForerunError
from forerun_research.bench import sharing, sharing_branches, sharing_plan, sharing_restart, sharing_table
from forerun_research.bench.sharing import PARTS, Sizes
from tests import tiny

SMALL = ["--prompt", "100", "--branches", "3", "--tokens", "4", "--questions", "1", "--budget", "300"]
SMALL += ["--tasks", "1", "--nodes", "20", "--tree-tokens", "640", "--steps", "200", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its context holds what tiny vocabularies make of English text."""
    return str(tiny.write_folder(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=8192))


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["bench", "sharing", *args])
    return left.value.code or 0  # type: ignore[return-value]


def test_every_part_runs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, trace = tmp_path / "q.jsonl", tmp_path / "t.jsonl"
    questions.write_text(json.dumps({"question": "How many ships passed?", "answer": "#### 3"}))
    turn = {"session": "main", "role": "user", "content": "A ship passes.", "max_tokens": 3}
    trace.write_text("\n".join(json.dumps(x) for x in [{"system": "You count."}, turn, turn, turn]))
    args = ["-m", model, *SMALL, "--data", str(questions), "--trace", str(trace), "--turns", "2"]
    assert run(*args) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert set(PARTS) <= set(result) and set(result["goals"]) == set(PARTS) - {"plan"}
    shown = "\n".join(lines[:-1])
    for name in (*PARTS, "missed", "reached"):
        assert name in shown
    branches = result["branches"]
    assert set(branches["seconds"]) == {"shared", "prefix_cache_only", "independent", "one_by_one"}
    assert 100 <= branches["computed_prompt_tokens"] < 100 + 3 * 16  # the prompt was computed once
    assert result["trace"]["speculation_off"]["turns"] == 2
    assert result["rollouts"]["questions"] == 1 and result["tree"]["nodes"] == 20
    assert result["operations"]["steps"] == 200 and result["goals"]["operations"]
    assert result["restart"]["disk_tokens"] >= 80 and result["restart"]["ratio"] > 0
    for way in ("plan", "interleaved"):
        assert result["plan"]["own_calls"][way]["requests"] >= 1
        assert result["plan"]["same_calls"][way]["calls"] == 3


def test_both_ways_make_the_same_calls(model: str) -> None:
    own, task = sharing_plan.tools(0.0), sharing_plan.TASKS[:1]
    with LLM(model, threads=1, quiet=True, dtype="float32") as llm:
        found = {way: sharing_plan._tasks(way, llm, task, own, led=True) for way in ("plan", "interleaved")}
    assert found["plan"]["calls"] == found["interleaved"]["calls"] == 3
    assert found["plan"]["requests"] == 2 and found["interleaved"]["requests"] == 4
    assert sharing_plan._ratios(found)["tokens_ratio"] > 1.2  # the loop reads its prompt again and again


def test_the_tasks_are_right() -> None:
    from forerun.recipes import plan

    for task in sharing_plan.TASKS:
        calls = plan.run_plan(plan.parse(task.plan), sharing_plan.tools(0.0))
        assert calls[-1].result == task.right and not any(call.failed for call in calls)
    for example in sharing_plan.EXAMPLES:
        calls = plan.run_plan(plan.parse(example.plan), sharing_plan.tools(0.0))
        assert {call.name: call.result for call in calls} == example.results
    (failed,) = plan.run_plan(plan.parse("#E1 = Reckon[__import__('os')]"), sharing_plan.tools(0.0))
    assert failed.failed and "only numbers" in failed.result


@pytest.mark.parametrize(
    ("seconds", "computed", "reached"),
    [
        ({"shared": [1.0], "prefix_cache_only": [1.3], "independent": [6.0], "one_by_one": [9.0]}, 2040, True),
        ({"shared": [1.0], "prefix_cache_only": [1.2], "independent": [6.0], "one_by_one": [9.0]}, 2040, False),
        ({"shared": [1.0], "prefix_cache_only": [1.3], "independent": [5.9], "one_by_one": [9.0]}, 2040, False),
        ({"shared": [1.0], "prefix_cache_only": [1.3], "independent": [6.0], "one_by_one": [9.0]}, 4000, False),
    ],
)
def test_the_goal_of_branches(seconds: dict[str, list[float]], computed: int, reached: bool) -> None:
    found = sharing_branches.figures(Sizes(), seconds, computed)
    assert found["goal"]["reached"] is reached and found["ratios"]["one_by_one"] == 9.0
    assert "reached_not_batch_invariant" not in found["goal"]


@pytest.mark.parametrize(
    ("loose", "beside", "reached"), [(1.0, 1.3, True), (1.0, 1.2, False), (1.1, 3.0, False)], ids=str
)
def test_branches_that_need_no_bits_are_judged_apart(loose: float, beside: float, reached: bool) -> None:
    seconds = {"shared": [2.0], "prefix_cache_only": [9.0], "independent": [6.0], "one_by_one": [9.0]}
    own = {"shared_not_batch_invariant": [loose], "prefix_cache_only_not_batch_invariant": [beside]}
    found = sharing_branches.figures(Sizes(), seconds | own, 2040)
    assert found["goal"]["reached_not_batch_invariant"] is reached and not found["goal"]["reached"]
    assert found["ratios"]["independent"] == 3.0 and found["ratios"]["prefix_cache_only"] == 4.5
    assert found["ratios"]["one_by_one_not_batch_invariant"] == round(9 / loose, 3)
    assert found["ratios"]["prefix_cache_only_not_batch_invariant"] == round(beside / loose, 3)


def test_the_switch_is_put_back(tiny_folder: Callable[[str], Path]) -> None:
    with LLM(str(tiny_folder("llama")), threads=1, quiet=True, dtype="float32") as llm:
        attention: Any = llm.decoder.attention
        assert attention.share_prefix
        with pytest.raises(ZeroDivisionError), sharing_branches.sharing(llm, False):
            assert not attention.share_prefix
            raise ZeroDivisionError
        assert attention.share_prefix


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--parts", "tree,magic"], "'magic'"),
        (["--random-shape", "tiny", "--parts", "trace,tree"], "trace need a real model"),
        (["--random-shape", "tiny", "--parts", "branches", "--prompt", "5000"], "context holds 2048"),
        (["--parts", "tree", "--nodes", "50", "--tree-tokens", "160"], "at least one page"),
        (["--parts", "branches", "-m", "no-such-model"], "no-such-model"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args, "--threads", "1") == 1
    captured = capsys.readouterr()
    assert said in captured.err and "hint: " in captured.err and captured.out == ""


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_whole_numbers(value: Any) -> None:
    with pytest.raises(BadRequest, match="tokens is"):
        Sizes(tokens=value)


@pytest.mark.parametrize("content", ["", "{", '{"text": "x"}', '{"question": "a"}\n[1]'])
def test_bad_questions_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(content)
    with pytest.raises(BadRequest, match="q.jsonl"):
        sharing._questions(file)
    assert len(sharing._questions(None)) >= 4


def test_int8_branches_run_with_and_without_the_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--random-shape", "tiny", "--parts", "branches", "--dtype", "int8", *SMALL) == 0
    shown, result = capsys.readouterr().out.rsplit("\n{", 1)
    found = json.loads("{" + result)
    ways = {way + ends for way in ("shared", "prefix_cache_only") for ends in ("", "_not_batch_invariant")}
    assert set(found["branches"]["seconds"]) == ways | {"independent", "one_by_one"}
    assert set(found["goals"]) == {"branches", "branches_not_batch_invariant"}
    assert shown.count("batch_invariant=False") == 3 and "not batch invariant" in shown


def test_random_weights_branch_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--random-shape", "tiny", "--parts", "branches", *SMALL, "--json") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 and json.loads(out)["model"] == "random tiny"


def test_quick_is_small_but_for_what_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--quick", "--random-shape", "tiny", "--parts", "branches,restart,tree", "--nodes", "7", "--threads", "1"]
    assert run(*args) == 0
    shown, result = capsys.readouterr().out.rsplit("\n{", 1)
    found = json.loads("{" + result)
    assert found["tree"]["nodes"] == 7 and found["tree"]["tokens"] == 50_000 and found["branches"]["branches"] == 4
    assert found["quick"] and "quick: goals" in shown and "missed" not in shown


def test_a_restart_that_read_nothing_is_no_figure(tiny_folder: Callable[[str], Path]) -> None:
    def opened(**options: Any) -> LLM:
        del options["disk"]
        return LLM(str(tiny_folder("llama")), dtype="float32", threads=1, quiet=True, host_bytes=1 << 20, **options)

    with pytest.raises(ForerunError, match="only 0 of 200 tokens came from disk"):
        sharing_restart.run(opened, [5 + i % 90 for i in range(200)])


def test_a_rollout_without_a_complete_answer_is_said() -> None:
    part = {"trajectories": 0, "distinct": 0, "tokens": 10, "per_thousand": 0.0, "distance": 1.0}
    own = {"tree": part, "independent": part, "gain": None, "goal": {"gain": 1.5, "reached": False}}
    assert list(sharing_table._rollouts(own))[-1][1] == "no answer was complete"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert capsys.readouterr().out.count("forerun bench sharing") >= 2
