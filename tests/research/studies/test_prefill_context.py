"""Tasks where the context matters, on a tiny model: prompts hold what is asked for, and only right answers score."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.studies import execute
from forerun_research.studies.prefill_measure import StudyCase
from forerun_research.studies.prefill_needle import Haystack
from forerun_research.studies.prefill_ruler import Ruler
from forerun_research.studies.prefill_ruler_tasks import FREQUENT, KINDS, OFTEN, SELDOM, found
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.prefill_tasks_call import (
    MAX_FUNCTION_TOKENS,
    CallAbove,
    call_keywords,
    functions,
    literal,
)
from forerun_research.studies.prefill_tasks_summary import SummaryLong
from forerun_research.studies.study import EXACT, Setting, options
from tests.research.studies.common import make_study, write_data, write_profile

LENGTH = 1900  # tokens: the tiny model has 2,048, and prompts of fewer than 1,536 are not drafted


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_data(tmp_path_factory.mktemp("data"))
    articles = [
        {
            "question_id": number,
            "category": "summarization",
            "turns": [f"Summarize: Ship {number} came in. " + f"The crew of ship {number} slept. " * 14],
            "reference": [f"Ship {number} came in and its crew slept."],
        }
        for number in range(9)
    ]
    other = {"question_id": 99, "category": "qa", "turns": ["Which port?"], "reference": ["Skagen."]}
    (folder / "bench.jsonl").write_text("\n".join(json.dumps(record) for record in [*articles, other]))
    return folder


@pytest.fixture(scope="module")
def profile(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tiny_folder("qwen2"), tmp_path_factory.mktemp("profile") / "tiny.safetensors")


@pytest.fixture(scope="module")
def subject(tiny_folder: Callable[[str], Path], data: Path, profile: Path) -> Iterator[StudySubject]:
    study = make_study(tiny_folder("qwen2"), data, ["ruler"], profile)
    with StudySubject(study, study.variants[0]) as subject:
        yield subject


@pytest.fixture(scope="module")
def hay(subject: StudySubject) -> Haystack:
    return Haystack.of(subject.texts.documents("essays"), subject.tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ruler_prompt_has_its_length_and_every_fact_once(subject: StudySubject, hay: Haystack, kind: str) -> None:
    measure = Ruler(lengths=(LENGTH,))
    case = measure.case(subject, hay, kind, LENGTH, 3)
    text = subject.tokenizer.decode(case.ids)
    assert LENGTH - 2 * max(hay.sizes) <= len(case.ids) <= LENGTH
    task = KINDS[kind](random.Random(f"0 {kind} {LENGTH} 3"))
    facts = [fact.strip() for _, fact in task.facts]
    assert all(text.count(fact) == facts.count(fact) for fact in facts)
    assert text.index(task.question) > max(text.rindex(fact) for fact in facts)
    assert case == measure.case(subject, hay, kind, LENGTH, 3)
    assert case.ids != measure.case(subject, hay, kind, LENGTH, 4).ids
    assert case.ids != Ruler(lengths=(LENGTH,), seed=1).case(subject, hay, kind, LENGTH, 3).ids


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_asked_for_scores(kind: str) -> None:
    task = KINDS[kind](random.Random(5))
    more = {"wanted": task.wanted, "unwanted": task.unwanted, "length": LENGTH}
    case, measure = StudyCase("1", [1], more), Ruler()
    assert measure.judge(case, "Answer: " + ", ".join(task.wanted) + ".", "")["score"] == 1.0
    wrong = measure.judge(case, " and ".join(task.unwanted), "")
    assert wrong["score"] == 0.0 and wrong["unwanted"] == len(task.unwanted)
    assert measure.judge(case, task.wanted[0], "")["score"] == 1 / len(task.wanted)
    assert measure.judge(case, "".join(f"1{text}1 x{text}x " for text in task.wanted), "")["score"] == 0.0


def test_strings_are_found_as_words_of_their_own() -> None:
    assert found("It is 48,213.", ("48213",)) == 1 and found("148213 482131", ("48213",)) == 0
    assert found("48213, 55555,66666", ("48213", "55555", "66666")) == 3
    assert found("Mango and PEPPERS", ("mango", "pepper")) == 1


def test_the_answers_follow_from_the_facts() -> None:
    for seed in range(20):
        task = KINDS["two-hop"](random.Random(seed))
        facts = [fact for _, fact in task.facts]
        station = task.question.split("station ")[1].split(" born")[0]
        keeper = next(f for f in facts if f.startswith(f"The keeper of station {station} is ")).split(" is ")[1][:-1]
        assert f"{keeper} was born in {task.wanted[0]}." in facts
        task = KINDS["table"](random.Random(seed))
        head, *rows = task.facts[0][1].strip().splitlines()
        column, row = task.question.split("column ")[1].split(" of row ")
        values = next(line for line in rows if line.startswith(row.split("?")[0] + ","))
        assert values.split(",")[head.split(",").index(column)] == task.wanted[0]
        task = KINDS["variables"](random.Random(seed))
        holds: dict[str, str] = {}
        for _, fact in sorted(task.facts):  # a name is handed on only after it was assigned
            name, _, value = fact.removeprefix("VAR ").removesuffix(".").partition(" = ")
            holds[name] = holds[value.removeprefix("VAR ")] if value.startswith("VAR ") else value
        asked = task.question.split("the value ")[1].split(",")[0]
        assert {name for name, value in holds.items() if value == asked} == set(task.wanted)
        task = KINDS["aggregation"](random.Random(seed))
        facts = [fact for _, fact in task.facts]
        assert len(task.wanted) == FREQUENT
        assert all(facts.count(f"The log notes: {word}.") == OFTEN for word in task.wanted)
        assert all(facts.count(f"The log notes: {word}.") == SELDOM for word in task.unwanted)


def test_a_ruler_spreads_prompts_over_lengths_and_refuses_what_it_does_not_know(subject: StudySubject) -> None:
    cases = Ruler(kinds=("two-hop", "multi-key"), lengths=(1000, 1700, 9000), prompts=4).cases(subject)
    assert [case.id for case in cases[:4]] == [f"two-hop {(1000, 1700)[i % 2]} {i}" for i in range(4)]
    assert len(cases) == 8 and {case.more["group"] for case in cases} == {"two-hop", "multi-key"}
    with pytest.raises(BadRequest, match="unknown 'length'"):
        options(Ruler, {"length": 100}, "ruler")
    with pytest.raises(BadRequest, match="no kind is called 'three-hop'"):
        options(Ruler, {"kinds": ["three-hop"]}, "ruler")
    with pytest.raises(BadRequest, match="fits into the model's context"):
        Ruler(lengths=(9000,)).cases(subject)
    with pytest.raises(BadRequest, match="the facts of a prompt alone"):
        Ruler(kinds=("table",), lengths=(200,), prompts=1).cases(subject)


def test_a_definition_lies_its_distance_above_the_call(subject: StudySubject) -> None:
    measure = CallAbove(prompts=4, distance=1000, before=300)
    for case in measure.cases(subject):
        text, definition = subject.tokenizer.decode(case.ids), case.more["definition"]
        assert text.count(definition) == 1
        above, _, below = text.partition(definition)
        distance = len(subject.tokenizer.encode(below))
        assert 1000 - MAX_FUNCTION_TOKENS < distance < 1000 + 64 and 0 < len(subject.tokenizer.encode(above)) <= 300
        wanted = case.more["wanted"]
        names = wanted if case.more["group"] == "keywords" else [str(wanted)]
        assert all(name not in above + below for name in names)
    with pytest.raises(BadRequest, match="no Python function"):
        CallAbove(text="essays").cases(subject)
    with pytest.raises(BadRequest, match="unknown 'distances'"):
        options(CallAbove, {"distances": 4096}, "call-above")


def test_completions_are_right_by_what_the_definition_says(subject: StudySubject) -> None:
    measure = CallAbove(prompts=2, distance=600, before=200)
    call, constant = measure.cases(subject)
    first, second = call.more["wanted"]
    assert measure.judge(call, f" {first}=3, {second}=(1 + 2))\n    assert total", "")["score"] == 1.0
    assert measure.judge(call, f" {second}=rate,\n        {first}=3)", "")["score"] == 1.0
    for wrong in (" 3, 4)", f" {first}=3)", f" {first}=3, {second}=4, x=5)", f" {first}=3, {second}", ""):
        assert measure.judge(call, wrong, "")["score"] == 0.0, wrong
    number = constant.more["wanted"]
    assert measure.judge(constant, f" {number}  # as above\n", "")["score"] == 1.0
    assert measure.judge(constant, f" {number + 1}", "")["score"] == measure.judge(constant, "", "")["score"] == 0.0


def test_completions_are_parsed() -> None:
    assert call_keywords(" a=(1), b=f(2)))") == {"a", "b"} and call_keywords(" a=1") is None
    assert literal(' 12, "why"') == 12 and literal("12 +") is None and literal("__import__('os')") is None
    assert functions("import os\n\n\ndef f():\n    return 1\n\n\nclass A:\n    pass\n") == ["def f():\n    return 1"]
    assert functions("no code at all") == []


def test_a_summary_is_asked_of_one_document_among_others(subject: StudySubject) -> None:
    measure = SummaryLong(lengths=(1000, LENGTH), prompts=11, tokens=8, file="bench.jsonl")
    cases = measure.cases(subject)
    assert len({case.id for case in cases}) == 11 and {c.more["group"] for c in cases} == {"1000 tokens", "1900 tokens"}
    groups: dict[str, set[str]] = {}
    for case in cases:
        text = subject.tokenizer.decode(case.ids)
        length = int(case.more["group"].split()[0])
        assert length - 64 < len(case.ids) <= length and text.count("Document ") == case.more["documents"] > 1
        number = text.split("Summarize document ")[1].split()[0]
        ship = text.split(f"Document {number}:\nShip ")[1].split()[0]
        assert case.more["reference"] == f"Ship {ship} came in and its crew slept." and case.id.startswith(ship)
        assert text.count(f"Ship {ship} came in") == 1
        groups.setdefault(ship, set()).add(case.more["group"])
    assert max(len(found) for found in groups.values()) == 2  # articles that come again have another length
    judged = measure.judge(cases[0], cases[0].more["reference"], "something else")
    assert judged["score"] == 1.0 and judged["to exact"] == 0.0
    judged = measure.judge(cases[0], "something else", "something else")
    assert judged["score"] == 0.0 and judged["to exact"] == 1.0
    with pytest.raises(BadRequest, match="takes .* tokens of 100"):
        SummaryLong(lengths=(100,), prompts=1, file="bench.jsonl").cases(subject)
    few = subject.texts.records("bench.jsonl", ())[:2]
    hay = Haystack.of([few[1]["turns"][0]], subject.tokenizer)
    with pytest.raises(BadRequest, match="prompts of 1900 tokens need .* of other documents"):
        measure.case(subject, few[0], [hay], LENGTH, 0)


def test_the_tasks_run_and_are_reported(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path
) -> None:
    measures: list[Any] = [
        {"ruler": {"kinds": ["multi-value", "two-hop"], "lengths": [1700, LENGTH], "prompts": 2, "tokens": 4}},
        {"call-above": {"prompts": 2, "distance": 1300, "before": 300, "tokens": 4}},
        {"summary-long": {"prompts": 2, "lengths": [LENGTH], "tokens": 4, "file": "bench.jsonl"}},
    ]
    settings = [{"name": "draft", "source": "draft", "share": 0.0, "deepen": False}]
    study = make_study(tiny_folder("qwen2"), data, measures, profile, settings=settings)
    report = execute.run(study, tmp_path)
    tables = {table["measure"]: table["rows"] for table in report["tables"]}
    groups = [row["group"] for row in tables["ruler"] if row["setting"] == "draft"]
    assert groups == ["multi-value", "two-hop", "all", "1700 tokens", f"{LENGTH} tokens"]
    assert all(row["cost"] < 1.0 and not row["fell back"] for row in tables["ruler"] if row["setting"] == "draft")
    assert {row["group"] for row in tables["call-above"]} == {"keywords", "constant", "all"}
    assert [row["to exact"] for row in tables["summary-long"] if row["setting"] == EXACT] == [1.0]
    assert (tmp_path / "ruler-1.png").exists()
    said: list[str] = []
    assert execute.run(study, tmp_path, said.append) == report and not said


def test_drafted_answers_are_judged_beside_exact_ones(subject: StudySubject, hay: Haystack) -> None:
    measure = Ruler(tokens=4)
    case = measure.case(subject, hay, "multi-key", LENGTH, 0)
    draft = Setting("draft", Prefill("speculative", source="draft"), share=0.0)
    records = dict(measure.run(subject, case, [draft], [EXACT, "draft"], {}))
    assert list(records) == [EXACT, "draft"] and records[EXACT]["same"] and records["draft"]["accepted"] > 400
    assert records["draft"]["wanted"] == list(case.more["wanted"]) and records["draft"]["length"] == LENGTH
