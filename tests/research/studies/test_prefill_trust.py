"""The gate on trial, first tokens and changed lines on a tiny model, and several studies with one opening."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.prefill.gate import DamageGate, GateLevel
from forerun.prefill.profile import Profile
from forerun_research.scripts import prefill_evidence, prefill_variants
from forerun_research.studies import execute, prefill_bins
from forerun_research.studies.prefill_edited import PROVISIONAL, EditedPrompts
from forerun_research.studies.prefill_gate_trial import GateTrial
from forerun_research.studies.prefill_measure import StudyCase
from forerun_research.studies.study import EXACT
from tests.research.studies.common import make_study, write_data, write_profile

LEVELS = tuple(GateLevel(share, 0.5 - share, share, 0.9, 0.1) for share in (0.0, 0.1, 0.3))
GATE = DamageGate((0.0, 1.0), (0.5, 5.0), 3.0, 50, LEVELS)
TEXT = ["essays"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def profile(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_profile(tiny_folder("qwen2"), tmp_path_factory.mktemp("profile") / "tiny.safetensors")
    found = Profile.load(path)
    found.gate = GATE
    found.save(path)
    return path


def test_the_gate_first_tokens_and_changed_lines_are_measured(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path
) -> None:
    measures: list[Any] = [
        {"gate-trial": {"prompts": 3, "length": 1700, "continuation": 8, "texts": TEXT}},
        {"first-token": {"prompts": 2, "lengths": [1650, 1700], "texts": TEXT}},
        {"edited": {"prompts": 2, "length": 1500, "tokens": 6, "texts": TEXT}},
    ]
    settings = [
        {"name": "10%", "source": "draft", "share": 0.1, "deepen": False},
        {"name": "gate 10%", "source": "draft", "share": 0.1},
    ]
    study = make_study(tiny_folder("qwen2"), data, measures, profile, settings=settings)
    tables = {table["measure"]: table["rows"] for table in execute.run(study, tmp_path)["tables"]}
    fixed, gated = [next(r for r in tables["gate-trial"] if r["setting"] == s["name"]) for s in settings]
    assert fixed["prompts"] == gated["prompts"] == gated["bounded"] == 3 and "kept" not in fixed
    assert 0.0 <= gated["kept"] <= 1.0 and 1.5 <= gated["bound"] <= 15.0 and 0.0 <= fixed["auc"] <= 1.0
    assert gated["cost"] > fixed["cost"]  # attention of random weights is spread: the gate takes all it may
    groups = {row["group"] for row in tables["first-token"]}
    assert groups == {"1650 essays", "1700 essays", "1650 all", "1700 all"}
    assert all(row["sooner"] == 1.0 for row in tables["first-token"] if row["setting"] == EXACT)
    assert all(row["seconds"] > 0 for row in tables["first-token"])
    row = next(r for r in tables["edited"] if r["setting"] == PROVISIONAL and r["group"] == "all")
    assert row["prompts"] == 2 and row["exact answers"] == 1.0 and row["fell back"] == 0
    assert row["shown"] > 0 and 0.0 <= row["stood"] <= 1.0 and row["confirmed of exact"] > 0


def test_bins_and_baselines_are_measured(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path
) -> None:
    about = {"prompts": 2, "length": 1700, "continuation": 8, "texts": TEXT}
    measures: list[Any] = [{"failure-bins": about}, {"baselines": about | {"windows": [64, 4096]}}]
    settings = [{"name": "5%", "source": "draft", "share": 0.05, "deepen": False}]
    study = make_study(tiny_folder("qwen2"), data, measures, profile, settings=settings)
    tables = {table["measure"]: table["rows"] for table in execute.run(study, tmp_path)["tables"]}
    for kind in prefill_bins.BINS:
        own = [row for row in tables["failure-bins"] if row["group"] == kind]
        assert sum(row["tokens"] for row in own) == 16 and sum(row["of damage"] for row in own) == pytest.approx(1.0)
    rows = {row["setting"]: row for row in tables["baselines"]}
    assert set(rows) == {EXACT, "5%", "draft alone", "float8", "window 64", "window 4096"}
    assert rows["float8"]["kl"] < 1e-6 and rows["window 4096"]["kl"] < 1e-6  # on a CPU, and wider than the prompt
    assert rows["window 64"]["kl"] > 1e-3 and rows["draft alone"]["top1"] <= 1.0


def test_variants_are_timed_and_judged(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path
) -> None:
    folder, out = str(tiny_folder("qwen2")), tmp_path / "variants.jsonl"
    given = ["--model", folder, "--draft-model", folder, "--prefill-profile", str(profile), "--data", str(data)]
    given += ["--lengths", "1800", "--prompts", "2", "--judged", "1", "--variants", "0,64:0", "--out", str(out)]
    assert prefill_variants.main([*given, "--device", "cpu", "--texts", "essays"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    first = [(r["case"], r["variant"]) for r in records if r["measure"] == "first token"]
    assert len(first) == 6 and {variant for _, variant in first} == {EXACT, "0", "64:0"}
    plain, narrow = (r for r in records if r["measure"] == "agreement")
    assert plain["kl"] != narrow["kl"] and min(plain["drafted"], narrow["drafted"]) > 1500


def test_tokens_are_known_by_their_prompt() -> None:
    found = prefill_bins.seen_tokens([5, 7, 5, 9], [5, 8, 9], lambda ids: {5: "12", 8: " so", 9: "x"}[ids[0]])
    assert [(t["class"], t["count"], t["distance"], t["place"]) for t in found] == [
        ("digits", 2, 2, 0),
        ("word start", 0, prefill_bins.NEVER, 1),
        ("inside a word", 1, 3, 2),
    ]
    labels = [prefill_bins.BINS["distance"](token) for token in found]
    assert labels == ["up to 64", "not before", "up to 64"]


def test_coverage_counts_what_kept_its_bound() -> None:
    def record(kl: float, seen: float, bound: float | None = None, fell_back: str = "") -> dict[str, Any]:
        about = {"group": "a", "kl": kl, "top1": 1.0, "uncovered": seen, "kl_bound": bound, "covered": True}
        return about | {"cost": 0.5, "seconds": 1.0, "fell_back": fell_back}

    cases = {
        "1": record(0.1, 0.1, 0.2),
        "2": record(0.3, 0.4, 0.2),
        "3": record(0.2, 0.3, 0.2),
        "4": record(0.05, 0.2, 0.2),
        "5": record(9.0, 0.0, 0.1, "too dear"),
    }
    row = GateTrial().summary({EXACT: cases, "gate": cases})[0]
    assert row["bounded"] == 4 and row["kept"] == 0.75 and row["fell back"] == 1
    assert row["auc"] == 1.0 and row["covered"] == 4


def test_old_and_new_prompts_differ_in_their_first_line_alone(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path
) -> None:
    study = make_study(tiny_folder("qwen2"), data, ["edited"], profile)
    with prefill_evidence.opened({"a": study}) as subject:
        for case in EditedPrompts(prompts=2, length=1500, texts=("essays",)).cases(subject):
            old, new = (subject.tokenizer.decode(ids).split("\n") for ids in (case.more["old"], case.ids))
            assert [a == b for a, b in zip(old, new, strict=True)].count(False) == 1
            assert abs(len(case.ids) - 1500) < 100


def test_studies_share_an_opening_and_go_on_where_they_stopped(
    tiny_folder: Callable[[str], Path], data: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_folder("qwen2")
    for name, options in (("a", "prompts: 3, length: 1700, continuation: 4, texts: [essays]"), ("b", "")):
        measure = f"gate-trial: {{{options}}}" if name == "a" else "first-token: {lengths: [1650], texts: [essays]}"
        head = f"title: {name}\nmodel: {model}\ndraft: {model}\nweights: float32\nthreads: 1\n"
        (tmp_path / f"{name}.yaml").write_text(f"{head}settings: [{{name: default}}]\nmeasures:\n  - {measure}\n")
    names = [str(tmp_path / "a.yaml"), f"{tmp_path / 'b.yaml'}:100"]
    common = ["--prefill-profile", str(profile), "--data", str(data), "--device", "cpu", "--prompts", "2"]
    cases = tmp_path / "cases.json.gz"
    assert prefill_evidence.main([*names, *common, "--prepare", str(cases)]) == 0
    found = prefill_evidence.read_cases(cases)
    assert {name.split()[-1]: len(own) for name, own in found.items()} == {"gate-trial": 2, "first-token": 2}
    out = ["--out", str(tmp_path), "--cases", str(cases)]
    capsys.readouterr()
    assert prefill_evidence.main([*names, *common, *out, "--seconds", "0"]) == 0
    assert "gate-trial: {}" in capsys.readouterr().out  # the time was up before the first case
    assert prefill_evidence.main([*names, *common, *out]) == 0
    said = capsys.readouterr().out
    assert "gate-trial: {'exact': 2, 'default': 2}" in said and "first-token: {'exact': 2, 'default': 2}" in said
    parts = [prefill_evidence.drawn([StudyCase(str(i), []) for i in range(5)], (k, 2)) for k in (1, 2)]
    assert sorted(case.id for part in parts for case in part) == list("01234") and len(parts[0]) == 3
    assert prefill_evidence.main([*names, *common, *out, "--part", "3/2"]) == 2
    (tmp_path / "b.yaml").write_text(
        (tmp_path / "b.yaml").read_text().replace(f"model: {model}\n", "model: other\n", 1)
    )
    assert prefill_evidence.main([*names, *common, *out]) == 2
