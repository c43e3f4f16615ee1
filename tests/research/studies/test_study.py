"""Studies as files: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import BadRequest
from forerun_research.studies.execute import measures
from forerun_research.studies.results import Results
from forerun_research.studies.study import Study, load, narrowed, read

WHOLE = """
title: a study
model: some-model
draft: small
settings:
  - {name: default}
  - {source: drop, share: 0.2}
measures:
  - agreement: {prompts: 2, texts: [shipped]}
  - copy
"""
ROOT = Path(__file__).parents[3]


def write(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def test_a_study_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    study = load(write(tmp_path, WHOLE), {"model": "other", "data": None, "device": "cpu"})
    assert (study.title, study.model, study.device, study.data) == ("a study", "other", "cpu", None)
    assert [s.name for s in study.settings] == ["default", "drop, share 0.2"]
    assert study.settings[0].prefill.mode == "speculative" and study.settings[1].share == 0.2
    agreement, copy = measures(study)
    assert agreement.prompts == 2 and agreement.texts == ("shipped",) and copy.prompts == 20  # type: ignore[attr-defined]
    assert study.variants[0].draft == "small"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("draft: small", "drafft: small", "unknown 'drafft'"),
        ("{name: default}", "{name: default, budgett: 0.4}", "settings: unknown 'budgett'"),
        ("prompts: 2", "promts: 2", "agreement: unknown 'promts'"),
        ("  - copy", "  - copyy", "no measure is called 'copyy'"),
        ("model: some-model", "", "says no `model`"),
        ("name: default", "name: exact", "exact prefill is always measured"),
        ("share: 0.2", "share: 1.2", "share is 1.2"),
        ("share: 0.2", "share: 0.2, budget: 0.4", "beside a budget"),
        ("  - copy", "  - agreement", "'agreement' stands there twice"),
        ("title: a study", "title: [", "is not YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(BadRequest, match=message.replace("(", r"\(")) as caught:
        measures(load(write(tmp_path, WHOLE.replace(old, new))))
    assert caught.value.hint


def test_all_shipped_studies_are_well_formed() -> None:
    files = sorted((ROOT / "forerun_research" / "studies").glob("*.yaml"))
    assert len(files) >= 8
    for file in files:
        assert measures(load(file)), file


def test_variants_take_what_the_study_says_and_some_of_its_settings() -> None:
    values = {
        "model": "m",
        "profile": "p",
        "settings": [{"name": "a"}, {"name": "b"}],
        "variants": [{"name": "x", "draft": "d"}, {"name": "y", "settings": ["b"]}],
        "measures": ["copy"],
    }
    study = read(values, "t", "t")
    x, y = study.variants
    assert (x.draft, x.profile, y.draft, y.profile) == ("d", "p", None, "p")
    assert [s.name for s in study.settings_of(x)] == ["a", "b"] and [s.name for s in study.settings_of(y)] == ["b"]
    values["variants"] = [{"name": "x", "settings": ["c"]}]
    with pytest.raises(BadRequest, match="no setting is called 'c'"):
        read(values, "t", "t")


def test_a_study_is_narrowed_to_some_measures_and_prompts(tmp_path: Path) -> None:
    study = narrowed(load(write(tmp_path, WHOLE)), ["copy"], 3)
    assert [m.prompts for m in measures(study)] == [3]  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="no measure 'needle'"):
        narrowed(study, ["needle"])


def make(**more: object) -> Study:
    return read({"model": "m", "settings": [{"name": "a", "share": 0.1}], "measures": ["copy"], **more}, "t", "t")


def test_results_go_on_where_they_stopped(tmp_path: Path) -> None:
    Results(tmp_path, make()).add("", "copy", "a", "1", {"score": 1.0})
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"variant": "", "measure": "copy", "condi')  # interrupted here
    again = Results(tmp_path, make())
    assert again.of("", "copy") == {"a": {"1": {"score": 1.0}}}
    again.add("", "copy", "a", "2", {"score": 0.5})
    more = make(settings=[{"name": "a", "share": 0.1}, {"name": "b"}], measures=[{"copy": {"prompts": 3}}, "needle"])
    assert Results(tmp_path, more).of("", "copy")["a"] == {"1": {"score": 1.0}, "2": {"score": 0.5}}


def test_results_of_another_study_are_refused(tmp_path: Path) -> None:
    Results(tmp_path / "a", make())
    with pytest.raises(BadRequest, match="differs in setting a"):
        Results(tmp_path / "a", make(settings=[{"name": "a", "share": 0.2}]))
    profile = tmp_path / "p"
    profile.write_text("one")
    Results(tmp_path / "b", make(profile=str(profile)))
    profile.write_text("calibrated anew")
    with pytest.raises(BadRequest, match="differs in variant"):
        Results(tmp_path / "b", make(profile=str(profile)))
    path = tmp_path / "a" / "results.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(BadRequest, match="line 1 is damaged"):
        Results(tmp_path / "a", make())
