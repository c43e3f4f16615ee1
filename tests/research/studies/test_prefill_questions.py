"""The research questions on a tiny model: each measures what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.core import PrefillReport
from forerun.params import Prefill
from forerun_research.studies.plots import Figure, Line, draw
from forerun_research.studies.prefill_ablation import DRAFTS, Ablation
from forerun_research.studies.prefill_chunk_facts import ALONE, PERMUTED, PLACES, ChunkFacts
from forerun_research.studies.prefill_chunks import Chunks
from forerun_research.studies.prefill_compounding import Compounding
from forerun_research.studies.prefill_failures import failures
from forerun_research.studies.prefill_gate import CLASSES, Gate, token_class
from forerun_research.studies.prefill_layers import Layers
from forerun_research.studies.prefill_signals import Signals, checkpoint_signals
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting
from tests.research.studies.common import make_study, write_data, write_profile

TEXTS: dict[str, Any] = {"texts": ("essays",), "prompts": 2, "length": 1700}
DRAFT = Setting("draft", Prefill("speculative", source="draft"), share=0.0)


@pytest.fixture(scope="module")
def subject(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudySubject]:
    folder, data = tiny_folder("qwen2"), write_data(tmp_path_factory.mktemp("data"))
    study = make_study(folder, data, ["layers"], write_profile(folder, data / "tiny.safetensors"))
    with StudySubject(study, study.variants[0]) as subject:
        yield subject


def run(measure: Any, subject: StudySubject, settings: list[Setting]) -> dict[str, dict[str, Any]]:
    """All conditions of all cases, as the results of a study hold them."""
    found: dict[str, dict[str, Any]] = {}
    for case in measure.cases(subject):
        for name, record in measure.run(subject, case, settings, measure.conditions(settings, subject.layers), {}):
            found.setdefault(name, {})[case.id] = record
    assert subject.engine.pool.used == 0
    return found


def test_layers_are_drafted_one_at_a_time(subject: StudySubject) -> None:
    measure = Layers(continuation=8, **TEXTS)
    found = run(measure, subject, [DRAFT])
    rows = {(row["part"], row["layer"]): row for row in measure.summary(found)}
    assert len(rows) == 4 * subject.layers
    # layer 0 is the target's own: nothing is wrong with it, and all layers above it are
    assert rows["both", 0]["error"] < 1e-5 and rows["both", 0]["kl"] < 1e-9
    assert rows["key", 2]["error"] > 0.01 and rows["key", 2]["kl"] > 1e-7
    assert rows["above", 1]["kl"] > rows["both", 3]["kl"] > 0
    assert rows["above", 3]["kl"] == pytest.approx(rows["both", 3]["kl"], rel=1e-4)
    assert [line.name for line in measure.figures(found)[0].lines] == ["key", "value", "both", "above"]


def test_signals_are_taken_from_checks_tail_and_truth(subject: StudySubject) -> None:
    measure = Signals(continuation=8, spans=3, span=32, threshold=1e-3, span_threshold=1e-6, **TEXTS)
    found = run(measure, subject, [DRAFT])
    record = next(iter(found["draft"].values()))
    assert record["signals"].keys() >= {"checkpoint key", "checkpoint attention", "tail hidden", "tail kl", "true key"}
    assert 0 < record["signals"]["checkpoint key"] < 1 and 0 < record["signals"]["tail attention"] < 1
    spans = next(iter(found["spans"].values()))["spans"]
    assert len(spans) == 3 and all(0 < span["kl"] < record["kl"] for span in spans)
    rows = measure.summary(found)
    assert {row["setting"] for row in rows} == {"draft", "all", "single spans"}
    assert measure.figures(found)[0].lines


def test_wrong_drafts_are_compared_with_the_right_one_at_equal_recomputing(subject: StudySubject) -> None:
    measure = Ablation(continuation=8, prompts=2, length=1000, shares=(0.0, 0.05), texts=("essays",))
    found = run(measure, subject, [])
    rows = {(row["draft"], row["share"]): row for row in measure.summary(found) if row["group"] == "all"}
    assert {draft for draft, _ in rows} == set(DRAFTS)
    assert len({round(rows[draft, 0.0]["kl"], 12) for draft in DRAFTS}) == len(DRAFTS)  # each is another draft
    assert rows["right", 0.0]["more than right"] == 0.0


def test_the_gates_trial_has_features_and_damage_of_every_token(subject: StudySubject) -> None:
    measure = Gate(continuation=8, prompts=2, length=1000, texts=("essays",))
    found = run(measure, subject, [Setting("10%", Prefill("speculative", source="draft"), share=0.1)])
    record = next(iter(found["10%"].values()))
    assert record["features"].keys() >= {"checkpoint kl", "checkpoint value", "tail entropy", "tail loss"}
    assert record["features"]["checkpoint kl"] > 0 and len(record["tokens"]) == 8
    assert record["kl"] == pytest.approx(sum(kl for kl, _, _ in record["tokens"]) / 8, abs=1e-4)
    assert [token_class(text) for text in (" 12", " the", "ing", "(")] == list(CLASSES)


def test_cosines_count_as_distances() -> None:
    report = PrefillReport(scores={"key": [0.0, 0.2, 0.4], "attention": [1.0, 0.9, 0.7]})
    signals = checkpoint_signals(report)
    assert signals == pytest.approx({"checkpoint key": 0.3, "checkpoint attention": 0.2})
    assert checkpoint_signals(PrefillReport(fell_back="too short")) == {} == checkpoint_signals(None)


def test_chunks_met_alone_are_repaired_by_recomputing_them(subject: StudySubject) -> None:
    measure = Chunks(continuation=8, chunk=160, shares=(0.0, 0.5), choosers=("deviation", "start", "random"), **TEXTS)
    found = run(measure, subject, [])
    rows = {(row["chooser"], row["share"]): row for row in measure.summary(found)}
    assert len(rows) == 6
    assert rows["deviation", 0.0]["kl"] > 1e-5
    assert rows["deviation", 0.5]["kl"] < rows["deviation", 0.0]["kl"]
    assert rows["random", 0.5]["cost"] > rows["random", 0.0]["cost"]


def test_facts_span_chunks(subject: StudySubject) -> None:
    measure = ChunkFacts(prompts=1, chunk=200, pairs=2, shares=(0.0, 1.0), choosers=("deviation",))
    cases = {case.more["group"]: case for case in measure.cases(subject)}
    assert set(cases) == set(PLACES)
    for where, case in cases.items():
        texts = [subject.tokenizer.decode(case.ids[lo:hi]) for lo, hi in case.more["bounds"]]
        station = subject.tokenizer.decode(case.ids).rsplit("station ", 1)[1].split(",")[0]
        defined = next(i for i, text in enumerate(texts) if f"means station {station}." in text)
        office = texts[defined].split(f" office means station {station}.")[0].rsplit(" ", 1)[1]
        told = next(i for i, text in enumerate(texts) if f"code of the {office} office is" in text)
        assert (defined < told, defined > told) == (where == "before", where == "after")
    found = run(measure, subject, [])
    rows = {(row["setting"], row["group"]): row for row in measure.summary(found)}
    for met in (ALONE, PERMUTED):
        assert rows[f"{met} deviation 0.0", "before"]["kl"] > rows[f"{met} deviation 1.0", "before"]["kl"]
        assert rows[f"{met} deviation 1.0", "all"]["kl"] < 1e-4  # all recomputed: exact prefill
    assert rows[EXACT, "all"]["prompts"] == len(PLACES)


def test_errors_are_followed_along_the_exact_answer(subject: StudySubject) -> None:
    measure = Compounding(tokens=24, upgrades=(8,), bin=8, **TEXTS)
    found = run(measure, subject, [DRAFT])
    plain, upgraded = (next(iter(found[name].values())) for name in ("draft", "draft, upgraded after 8"))
    assert len(plain["kls"]) == len(upgraded["kls"]) == 24
    assert upgraded["kls"][:8] == plain["kls"][:8] and sum(upgraded["kls"][8:]) < sum(plain["kls"][8:])
    rows = measure.summary(found)
    assert [row["from token"] for row in rows if row["setting"] == "draft"] == [0, 8, 16]
    with pytest.raises(ValueError, match="within the 24 tokens"):
        Compounding(tokens=24, upgrades=(24,))


def test_failures_are_prompts_that_exact_prefill_gets_right() -> None:
    found: dict[str, dict[str, dict[str, Any]]] = {
        "exact": {"1": {"score": 1.0, "answer": "42"}, "2": {"score": 0.0, "answer": "?"}, "3": {"score": 1.0}},
        "draft": {
            "1": {"score": 0.0, "answer": "41", "asked": "what?"},
            "2": {"score": 0.0, "answer": "?"},
            "3": {"score": 0.95},
        },
    }
    (row,) = failures("needle", found)
    assert (row["case"], row["setting"], row["lost"], row["answer"], row["exact answer"]) == (
        *("1", "draft", 1.0),
        *("41", "42"),
    )
    by_kl = {"exact": {"1": {"kl": 0.0}, "2": {"kl": 0.0}}, "draft": {"1": {"kl": 0.7}, "2": {"kl": 0.1}}}
    assert [row["case"] for row in failures("agreement", by_kl)] == ["1"]


def test_plots_are_written_whatever_the_intervals(tmp_path: Path) -> None:
    line = Line("a", [0.0, 1.0], [0.5, 0.7], [float("nan"), 0.8], [float("nan"), 0.9])
    draw(Figure("t", "x", "y", [line], ticks=["one", "two"]), tmp_path / "deep" / "a.png")
    draw(Figure("t", "x", "y", [Line("b", [0.0, 1.0], [0.0, 0.1])], log_y=True), tmp_path / "b.png")
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / "deep" / "a.png", tmp_path / "b.png"))
