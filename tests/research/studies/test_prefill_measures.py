"""Measures of prefill on a tiny model: exact prefill scores as it must, prompts are what they should be, and drafted
prefill is told apart from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import BadProfile, BadRequest
from forerun.params import Prefill
from forerun_research.studies import execute
from forerun_research.studies.prefill_agreement import Agreement, CopyMeasure
from forerun_research.studies.prefill_answers import Identical
from forerun_research.studies.prefill_needle import Haystack, Needle, place, sentences
from forerun_research.studies.prefill_score import adjusted, prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.prefill_texts import StudyTexts
from forerun_research.studies.study import EXACT, Setting
from tests.research.studies.common import make_study, write_data, write_profile

TEXTS: dict[str, Any] = {"texts": ("essays",), "prompts": 2, "length": 1700, "continuation": 8}
DRAFT = Setting("draft", Prefill("speculative", source="draft"), share=0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def profile(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tiny_folder("qwen2"), tmp_path_factory.mktemp("profile") / "tiny.safetensors")


@pytest.fixture(scope="module")
def subject(tiny_folder: Callable[[str], Path], data: Path, profile: Path) -> Iterator[StudySubject]:
    study = make_study(tiny_folder("qwen2"), data, ["agreement"], profile)
    with StudySubject(study, study.variants[0]) as subject:
        yield subject


def records(found: Any) -> dict[str, Any]:
    return dict(found)


def test_exact_prefill_agrees_with_itself(subject: StudySubject) -> None:
    measure = Agreement(**TEXTS)
    cases = measure.cases(subject)
    assert len(cases) == 2 and all(len(c.ids) == 1700 and len(c.more["follow"]) == 8 for c in cases)
    found = records(measure.run(subject, cases[0], [], [EXACT], {}))[EXACT]
    assert found["kl"] == 0.0 and found["top1"] == 1.0 and found["cost"] == 1.0


def test_exact_prefill_in_pieces_gives_the_logits_of_one_pass(subject: StudySubject) -> None:
    ids, follow = subject.texts.pieces("essays", 1700)[0], [5, 6, 7, 8]
    whole = subject.engine.score(ids + follow[:-1])
    with subject.scorer.hold(ids, None, len(follow)) as held:
        assert (held.logits(follow) - whole[-4:]).abs().max() < 1e-4
        again = held.logits(follow)  # the tail is run anew each time
        assert (again - whole[-4:]).abs().max() < 1e-4
    assert subject.engine.pool.used == 0


def test_drafted_prefill_is_told_apart_and_full_repair_is_exact(subject: StudySubject) -> None:
    measure = Agreement(**TEXTS)
    case = measure.cases(subject)[0]
    all_ = Setting("all", Prefill("speculative", source="draft"), share=1.0)
    found = records(measure.run(subject, case, [DRAFT, all_], [EXACT, "draft", "all"], {}))
    assert found["draft"]["kl"] > 1e-4 and found["draft"]["cost"] < 1.0 and not found["draft"]["fell_back"]
    assert found["draft"]["accepted"] > 400
    assert found["all"]["kl"] < 1e-6 and found["all"]["top1"] == 1.0
    assert subject.engine.pool.used == 0


def test_a_prompt_of_copies_shows_the_span_and_its_beginning(subject: StudySubject) -> None:
    measure = CopyMeasure(prompts=2, length=1700, span=64, shown=16, text="essays")
    for case in measure.cases(subject):
        at = case.more["at"]
        assert len(case.ids) == 1700 and case.ids[-16:] == case.ids[at : at + 16]
        assert case.more["follow"] == case.ids[at + 16 : at + 64] and at + 64 < 1700 - 16
    found = records(measure.run(subject, case, [DRAFT], [EXACT, "draft"], {}))
    assert 0.0 <= found[EXACT]["score"] <= 1.0 and found["draft"]["source"] == "draft"


@pytest.mark.parametrize(("number", "depth"), [(0, 0.125), (1, 0.375), (3, 0.875)])
def test_a_needle_lies_at_its_depth_in_a_prompt_of_its_length(subject: StudySubject, number: int, depth: float) -> None:
    hay = Haystack.of(subject.texts.documents("essays"), subject.tokenizer)
    measure = Needle(lengths=(1750,), prompts=4, text="essays")
    case = measure.case(subject, hay, 800, number)
    text = subject.tokenizer.decode(case.ids)
    assert 800 - 2 * max(hay.sizes) <= len(case.ids) <= 800
    before = text[: text.index(case.more["wanted"])]
    found = len(subject.tokenizer.encode(before)) / len(case.ids)
    assert case.more["depth"] == depth and abs(found - depth) < 0.12
    assert text.count(case.more["wanted"]) == 1 and text.count(case.more["distractor"]) == 1
    city = before.rsplit("number for ", 1)[1].split(" is")[0]
    assert f"number for {city} that is mentioned" in text
    assert measure.judge(case, f"It is {int(case.more['wanted']):,}.", "")["score"] == 1.0
    wrong = measure.judge(case, f"It is {case.more['distractor']}.", "")
    assert wrong["score"] == 0.0 and wrong["distracted"]


def test_inserts_are_counted_in_tokens() -> None:
    assert sentences("One. Two!  Three?\nFour") == ["One.", "Two!", "Three?", "Four"]
    parts = [("a", 10), ("b", 70), ("c", 10), ("d", 10)]
    assert place(parts, [(0.5, "X"), (0.0, "Y"), (1.0, "Z")]) == "Y a b X c d Z"


def test_pieces_do_not_overlap_and_are_asked_for_within_reason(subject: StudySubject, data: Path) -> None:
    texts = StudyTexts(data, subject.tokenizer)
    pieces = texts.pieces("essays", 100)
    assert len({tuple(piece) for piece in pieces}) == len(pieces) > 8
    assert texts.pieces("essays", 100) == pieces != texts.pieces("essays", 100, seed=1)
    with pytest.raises(BadRequest, match="pieces of 100 tokens, 10000 are asked for"):
        texts.mixed(["essays"], 100, 10_000)
    with pytest.raises(BadRequest, match="no .*nowhere"):
        texts.documents("nowhere")


def test_a_study_runs_reports_and_goes_on(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path
) -> None:
    settings = [{"name": "draft", "source": "draft", "share": 0.0}, {"name": "drop", "source": "drop", "share": 0.3}]
    needle = {"needle": {"lengths": [1750], "prompts": 2, "tokens": 4}}
    copy = {"copy": {"text": "essays", "length": 1700, "prompts": 1, "span": 64}}
    study = make_study(tiny_folder("qwen2"), data, [{"agreement": TEXTS}, copy, needle], profile, settings=settings)
    said: list[str] = []
    found = execute.run(study, tmp_path, said.append)
    assert len(said) == 3 * (2 + 1 + 2)
    rows = {(t["measure"], r["setting"]): r for t in found["tables"] for r in t["rows"] if r.get("group") != "all"}
    assert rows["agreement", EXACT]["kl"] == 0.0 < rows["agreement", "draft"]["kl"] < rows["agreement", "drop"]["kl"]
    assert rows["agreement", "draft"]["cost"] < 1 and rows["needle", "draft"]["prompts"] == 2
    assert {p.name for p in tmp_path.glob("*.png")} >= {"agreement.png", "agreement-1.png", "copy.png", "needle.png"}
    assert json.loads((tmp_path / "report.json").read_text())["tables"] == found["tables"]
    said.clear()
    assert execute.run(study, tmp_path, said.append) == found and not said


def test_a_setting_holds_only_while_it_is_measured(subject: StudySubject) -> None:
    prefiller = prefiller_of(subject.engine)
    assert prefiller.profile is not None
    before = prefiller.profile.share, prefiller.policy
    with adjusted(subject.engine, replace(DRAFT, share=0.25, deepen=False)):
        assert prefiller.profile.share == 0.25 and prefiller.policy.deepenings == 0
    assert (prefiller.profile.share, prefiller.policy) == before


def test_provisional_answers_are_those_of_exact_prefill(subject: StudySubject) -> None:
    measure = Identical(prompts=1, length=1750, tokens=6, texts=("essays",))
    setting = Setting("provisional", Prefill("provisional"))
    case = measure.cases(subject)[0]
    found = records(measure.run(subject, case, [setting], [EXACT, "provisional"], {}))
    assert found["provisional"]["score"] == 1.0 == found[EXACT]["score"]
    assert found["provisional"]["provisional"] > 0 and found["provisional"]["provisional_s"] > 0
    assert measure.judge(case, "a", "b")["score"] == 0.0


def test_settings_without_a_profile_are_refused(tiny_folder: Callable[[str], Path], data: Path) -> None:
    study = make_study(tiny_folder("qwen2"), data, ["agreement"])
    with StudySubject(study, study.variants[0]) as bare, pytest.raises(BadProfile):
        case = Agreement(**TEXTS).cases(bare)[0]
        records(Agreement().run(bare, case, [DRAFT], ["draft"], {}))
