"""Parts of the studies of drafts, grammars and GSM8K that run no model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.core import Draft
from forerun.decode.control.cost import CostCurve
from forerun_research.bench.agent_trace import read_trace
from forerun_research.bench.gsm8k import final_number, read_questions
from forerun_research.scripts import agent_log, draft_trees
from forerun_research.scripts.conditional_grammars import p_values, power

TREE = {"follows": [1, 4, 9, 7], "tokens": [1, 2, 3, 4], "parents": [-1, -1, 0, 0], "probs": [0.7, 0.2, 0.6, 0.3]}


def draft() -> Draft:
    return Draft(TREE["tokens"], TREE["parents"], TREE["probs"], ["model"] * 4)  # type: ignore[arg-type]


def test_tokens_of_a_logged_tree() -> None:
    assert draft_trees.chain_hits(TREE) == [True, False]  # the most probable child of 1 is 3, and 4 follows
    counts = [draft_trees.accepted(draft(), nodes, [1, 4, 9, 7]) for nodes in ([], [0], [0, 2], [0, 3], [3])]
    assert counts == [1, 2, 2, 3, 1]  # a node without its parent is of no use
    assert draft_trees.chain_of(8)(draft(), []) == [0, 2]
    assert draft_trees.most_probable(2)(draft(), [0.7, 0.2, 0.42, 0.21]) == [0, 2]
    assert draft_trees.at_least(0.21)(draft(), [0.7, 0.2, 0.42, 0.21]) == [0, 2, 3]


@pytest.mark.parametrize(("seconds", "nodes"), [({1: 1.0, 5: 1.001}, [0, 1, 2, 3]), ({1: 1.0, 2: 9.0, 5: 36.0}, [])])
def test_gain_verifies_what_pays(seconds: dict[int, float], nodes: list[int]) -> None:
    assert draft_trees.by_gain(CostCurve(seconds))(draft(), [0.7, 0.2, 0.42, 0.21]) == nodes


def test_the_test_of_a_law_is_exact_for_rare_answers_too() -> None:
    law = np.array([0.999, 0.001])
    right, wrong = p_values(law, np.array([[100, 0], [90, 10]]))
    assert right == pytest.approx(1.0, abs=1e-3) and wrong < 1e-3
    assert power(law, np.array([0.8, 0.2]), 100) > 0.99
    assert power(law, law, 100) < 0.02


@pytest.mark.parametrize(
    ("text", "number"),
    [("3 * 6 = 18.\n#### 1,250", 1250.0), ("It costs 3 and 4.5 dollars", 4.5), ("none", None), ("#### -7 pages", -7.0)],
)
def test_final_numbers(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_questions_are_read_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "2 * 600 = 1200\n#### 1,200"}) + "\n")
    (question,) = read_questions(path)
    assert question.answer == 1200.0 and question.messages[-1] == {"role": "user", "content": "How many?"}


def test_an_agents_log_becomes_a_trace(tmp_path: Path) -> None:
    for name, rest in (("a", "Tools: ls."), ("b", "Tools: cat.")):
        history = [
            {"role": "system", "content": f"You are an agent. {rest}"},
            {"role": "user", "content": f"Task {name}"},
            {"role": "assistant", "content": "ls"},
            {"role": "user", "content": [{"type": "text", "text": "x" * 100}]},
            {"role": "assistant", "content": "one two three four"},
        ]
        (tmp_path / f"{name}.traj").write_text(json.dumps({"history": history}))
    system, turns = agent_log.read_log([tmp_path], chars=50)
    out = tmp_path / "trace.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in ({"system": system}, *turns)))
    trace = read_trace(out)
    assert trace.system == "You are an agent. Tools: "
    assert [(t.session, t.role, t.content, t.max_tokens) for t in trace.turns] == [
        ("a", "user", "ls.\nTask a", 2),
        ("a", "tool", "x" * 50, 6),
        ("b", "user", "cat.\nTask b", 2),
        ("b", "tool", "x" * 50, 6),
    ]
