"""Free-running answers on a tiny model: where they part, what an upgrade changes, and which answers are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.core import SamplingParams
from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.studies.prefill_free import FreeRunning, common_prefix, free_answers, free_record, together
from forerun_research.studies.prefill_free_code import FreeCode
from forerun_research.studies.prefill_measure import Record
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import EXACT, Setting, options
from tests.research.studies.common import make_study, write_data, write_profile

DRAFT = Setting("draft", Prefill("speculative", source="draft"), share=0.0, deepen=False)
FREE = FreeRunning(prompts=2, length=1700, tokens=24, upgrade=8, marks=(1, 8, 24), texts=("essays",))
NAMES = [EXACT, "exact, continued after 8", "draft", "draft, upgraded after 8"]


@pytest.fixture(scope="module")
def subject(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudySubject]:
    folder, data = tiny_folder("qwen2"), write_data(tmp_path_factory.mktemp("data"))
    tasks = [
        {"task_id": f"T/{i}", "prompt": f"def f{i}(x):\n", "test": "def check(f):\n    pass", "entry_point": f"f{i}"}
        for i in range(2)
    ]
    (data / "tasks.jsonl").write_text("\n".join(json.dumps(task) for task in tasks))
    # noise that is large enough for a tiny model to say something else
    study = make_study(folder, data, ["free-running"], write_profile(folder, data / "tiny.safetensors", noise=3.0))
    with StudySubject(study, study.variants[0]) as subject:
        yield subject


def run(measure: Any, subject: StudySubject, settings: list[Setting]) -> dict[str, dict[str, Record]]:
    found: dict[str, dict[str, Record]] = {}
    for case in measure.cases(subject):
        for name, record in measure.run(subject, case, settings, measure.conditions(settings, subject.layers), {}):
            found.setdefault(name, {})[case.id] = record
    return found


def test_answers_part_where_their_tokens_do(subject: StudySubject) -> None:
    found = run(FREE, subject, [DRAFT])
    assert list(found) == FREE.conditions([DRAFT], subject.layers) == NAMES
    for case, exact in found[EXACT].items():
        drafted, upgraded, again = (found[name][case] for name in (NAMES[2], NAMES[3], NAMES[1]))
        assert exact["score"] == 1.0 and exact["parted"] is None and exact["answer tokens"] == 24
        assert again["answer ids"] == exact["answer ids"]  # float32 on a CPU: rounding decides nothing
        assert upgraded["answer ids"][:8] == drafted["answer ids"][:8] and upgraded["answer tokens"] == 24
        assert drafted["source"] == "draft" and not drafted["fell_back"] and drafted["parted"] is not None
        at = drafted["parted"]
        assert drafted["answer ids"][:at] == exact["answer ids"][:at]
        assert drafted["answer ids"][at] != exact["answer ids"][at] and drafted["score"] == at / 24
    assert subject.engine.pool.used == 0
    rows = {(row["setting"], row["after tokens"]): row for row in FREE.summary(found)}
    assert rows[EXACT, 24]["score"] == 1.0 and rows["draft", 24]["the same"] == 0
    assert [line.name for line in FREE.figures(found)[0].lines] == NAMES[1:]


def test_after_an_upgrade_an_answer_goes_on_as_the_exact_model_would(subject: StudySubject) -> None:
    ids, params = FREE.cases(subject)[0].ids, SamplingParams(max_tokens=24, ignore_eos=True)
    drafted, upgraded = free_answers(subject, ids, DRAFT, params, 8)
    assert drafted.token_ids[:8] == upgraded.token_ids[:8] and drafted.token_ids != upgraded.token_ids
    subject.llm.clear_cache()
    rest = subject.llm.generate(ids + drafted.token_ids[:8], SamplingParams(max_tokens=16, ignore_eos=True))[0]
    assert upgraded.token_ids[8:] == rest.token_ids
    assert upgraded.text == subject.tokenizer.decode(upgraded.token_ids)


def test_a_study_goes_on_from_exact_prefills_record(subject: StudySubject) -> None:
    case = FREE.cases(subject)[0]
    record = {"answer": "?", "answer ids": [511] * 24}
    found = dict(FREE.run(subject, case, [DRAFT], ["draft"], {EXACT: {case.id: record}}))
    assert list(found) == ["draft"] and found["draft"]["parted"] == 0


def test_survivors_are_counted() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2 and common_prefix([1, 2], [1, 2, 3]) == 2
    parted = free_record(StudyAnswer("b", [1, 2, 9], {}), StudyAnswer("a", [1, 2, 3], {}))
    assert parted["parted"] == 2 and together(parted, 2) and not together(parted, 3)
    ended = free_record(StudyAnswer("a", [1], {}), StudyAnswer("a", [1], {}))
    assert ended["parted"] is None and together(ended, 256)
    shorter = free_record(StudyAnswer("a", [1], {}), StudyAnswer("a", [1, 2], {}))
    assert shorter["parted"] == 1
    found = {"draft": {str(i): {"score": at / 24, "parted": at} for i, at in enumerate((0, 8, 12))}}
    rows = {row["after tokens"]: row for row in FREE.summary(found)}
    assert [rows[mark]["the same"] for mark in (1, 8, 24)] == [2, 2, 0]
    assert rows[1]["tokens before parting"] == pytest.approx(20 / 3)


def test_code_is_grouped_by_the_length_of_exact_prefills_answer(subject: StudySubject) -> None:
    measure = FreeCode(prompts=2, context=1600, tokens=12, upgrade=4, text="essays", file="tasks.jsonl", ends=(6,))
    found = run(measure, subject, [DRAFT])
    assert set(found) == set(measure.conditions([DRAFT], subject.layers)) and all(len(c) == 2 for c in found.values())
    for case, exact in found[EXACT].items():
        groups = {cases[case]["group"] for cases in found.values()}
        assert groups == {"up to 6" if exact["exact tokens"] <= 6 else "over 6"}
    rows = [row for row in measure.summary(found) if row["setting"] == EXACT]
    assert sum(row["the same"] for row in rows if row.get("group", "all") != "all" or len(rows) == 1) == 2
    assert [measure.group(n) for n in (6, 7)] == ["up to 6", "over 6"]


def test_what_cannot_be_measured_is_refused(subject: StudySubject) -> None:
    for kind in (FreeRunning, FreeCode):
        with pytest.raises(BadRequest, match="within the 32 tokens"):
            options(kind, {"tokens": 32, "upgrade": 32}, "free")
        with pytest.raises(BadRequest, match="unknown 'upgrades'"):
            options(kind, {"upgrades": [8]}, "free")
    dropping = Setting("drop", Prefill("speculative", source="drop"), share=0.3)
    with pytest.raises(BadRequest, match="nothing is there to upgrade"):
        free_answers(subject, [1, 2, 3], dropping, SamplingParams(max_tokens=8), 4)
