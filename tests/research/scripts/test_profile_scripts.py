"""Texts to calibrate on, and what a profile's own windows say about its gate."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.prefill.calibration.quality import CURVE_SHARES
from forerun.prefill.calibration.run import calibrate
from forerun.prefill.calibration.setup import FitSettings
from forerun.prefill.calibration.windows import WindowSettings
from forerun.prefill.profile import Profile
from forerun_research.scripts import (
    drafted_signals,
    gate_windows,
    other_tokenizer,
    profile_answers,
    profile_matrix,
    profile_texts,
)
from tests.prefill.calibration.common import write_pair, write_text
from tests.prefill.fakes import make_profile


def made_windows(count: int = 120) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    left = draw.uniform(0.1, 0.8, (count, 1)) * np.exp(-6 * np.array(CURVE_SHARES))
    kl = 0.3 * left**1.5 * draw.lognormal(0.0, 0.3, (count, 1))
    return {"uncovered": left, "kl": kl, "top1": 1.0 - kl}


def test_a_profiles_windows_tell_what_its_gate_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    windows = made_windows()
    kinds = ["plain code" if number % 2 else "copy prose" for number in range(120)]
    profile = make_profile(facts={"windows": {name: own.tolist() for name, own in windows.items()} | {"kinds": kinds}})
    profile.save(tmp_path / "a")
    assert gate_windows.main([str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "120 windows: code 60, prose 60" in said
    values = [float(line.split(": ")[1].split()[0]) for line in said.splitlines() if line.startswith("AUC")]
    assert len(values) == len(CURVE_SHARES) and min(values) > 0.85
    assert "bound kept by code, which the fit did not see" in said
    for line in said.splitlines():
        if line.startswith("KL at"):
            fixed, gate, oracle = (float(part.split()[1]) for part in line.partition("mean: ")[2].split(", "))
            assert oracle <= gate + 1e-6 and oracle <= fixed + 1e-6
    make_profile().save(tmp_path / "b")
    assert gate_windows.main([str(tmp_path / "b")]) == 1 and Profile.load(tmp_path / "b").gate is None


def test_an_oracle_costs_as_much_and_loses_least() -> None:
    kl = made_windows()["kl"]
    shares = gate_windows.oracle(kl, 0.1)
    assert shares.mean() <= 0.1 + 1e-9
    assert gate_windows.at_share(kl, shares).mean() < kl[:, CURVE_SHARES.index(0.1)].mean()


def test_texts_have_their_size_and_come_again_from_a_seed(tmp_path: Path) -> None:
    for kind in ("logs", "tables"):
        written = profile_texts.write_kind(kind, tmp_path / "a", 300_000, tmp_path, 0)
        files = sorted((tmp_path / "a" / kind).iterdir())
        sizes = [path.stat().st_size for path in files]
        assert written == sum(sizes) >= 300_000 > written - sizes[-1]
        assert max(sizes) <= profile_texts.MAX_FILE_BYTES and min(sizes) >= profile_texts.MIN_FILE_BYTES
    profile_texts.write_kind("logs", tmp_path / "b", 300_000, tmp_path, 0)
    assert [p.read_bytes() for p in sorted((tmp_path / "b" / "logs").iterdir())] == [
        p.read_bytes() for p in sorted((tmp_path / "a" / "logs").iterdir())
    ]


def test_code_leaves_out_what_studies_measure_on(tmp_path: Path) -> None:
    found = list(islice(profile_texts.code(tmp_path, random.Random(0)), 40))
    assert all(suffix in profile_texts.CODE_SUFFIXES for suffix, _ in found)
    kept = [path for path in Path(random.__file__).parent.glob("*.py") if profile_texts.held_out(path)]
    texts = {text for _, text in found}
    assert kept and not any(profile_texts.plain_text(path) in texts for path in kept)


def test_html_becomes_text(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text("<html><p>One &amp; two.</p><ul><li>three</li></ul></html>")
    assert profile_texts.plain_text(page).split() == ["One", "&", "two.", "three"]
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    assert profile_texts.plain_text(tmp_path / "b.bin") == ""


def test_signals_of_drafted_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted_signals, "WIDE_LAYERS", 0)  # the draft has two layers
    target, draft = map(str, write_pair(tmp_path / "models"))
    text, profile, out = write_text(tmp_path / "text"), tmp_path / "profile", tmp_path / "signals.npz"
    settings, recipe = FitSettings(rank=16, distill=False), WindowSettings(prompt=300, continuation=16, tokens=8000)
    calibrate(target, draft, [text], profile, settings, recipe, torch.device("cpu"), quiet=True, force=True)
    given = [str(profile), "--target", target, "--draft-model", draft, "--text", str(text), "--out", str(out)]
    given += ["--window", "300", "--ahead", "16", "--windows", "3", "--shares", "0,0.5,1", "--read", "0,32"]
    assert drafted_signals.main([*given, "--device", "cpu"]) == 0
    found = np.load(out)
    assert found["kl"].shape == found["left 64"].shape == (3, 2, 3) and found["read"].tolist() == [0, 32]
    assert np.abs(found["kl"][:, 0, 2]).max() < 1e-4 < found["kl"][:, 0, 0].min()  # all recomputed: exact prefill
    assert (np.diff(found["left 64"], axis=2) < 0).all() and np.abs(found["left 64"][..., 2]).max() < 1e-6
    assert (found["change"][..., 0] == 0).all() and (found["change"][:, 0, 1] > 0).all()
    assert not np.allclose(found["kl"][:, 0, 0], found["kl"][:, 1, 0])  # a window is another way of reading


def test_answers_about_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = write_pair(tmp_path / "models")
    write_text(tmp_path / "texts" / "prose", files=2)
    for name, value in (("WINDOW_TOKENS", 200), ("ANSWER_TOKENS", 8), ("MAX_ANSWER_TOKENS", 12), ("KV_TOKENS", 4096)):
        monkeypatch.setattr(profile_answers, name, value)
    monkeypatch.setattr(profile_answers, "CONVERSATIONS_PER_FILE", 2)
    given = [str(tmp_path / "texts"), "--model", str(target), "--count", "4", "--device", "cpu"]
    assert profile_answers.main(given) == 0
    files = sorted((tmp_path / "texts" / "answers").iterdir())
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(files) == 2 and len(lines) == 4
    for line in lines:
        user, assistant = line["messages"]
        assert user["role"] == "user" and user["content"].endswith(profile_answers.QUESTIONS) and assistant["content"]


def test_a_matrix_of_kinds(tmp_path: Path) -> None:
    target, draft = map(str, write_pair(tmp_path / "models"))
    for seed, kind in enumerate(("code", "prose")):
        write_text(tmp_path / "texts" / kind, seed=seed)
    out = tmp_path / "matrix.jsonl"
    given = [str(tmp_path / "texts"), "--target", target, "--draft-model", draft, "--out", str(out), "--device", "cpu"]
    assert profile_matrix.main([*given, "--window", "300", "--ahead", "16", "--windows", "8", "--held", "2"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = [(row["calibrated on"], row["asked about"]) for row in rows]
    assert pairs == [(x, y) for x in ("code", "prose", "all") for y in ("code", "prose")]
    assert all(row["windows"] == 2 and 0 <= row["kl low"] <= row["kl"] <= row["kl high"] for row in rows)


def test_a_draft_that_reads_the_text(tmp_path: Path) -> None:
    target, draft = map(str, write_pair(tmp_path / "models"))
    out = tmp_path / "rows.jsonl"
    given = [str(write_text(tmp_path / "text")), "--target", target, "--drafts", f"{target},{draft}", "--out", str(out)]
    given += ["--window", "300", "--ahead", "16", "--windows", "16", "--held", "4", "--share", "0,1", "--device", "cpu"]
    assert other_tokenizer.main(given) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["draft"], row["share"]) for row in rows] == [
        (name, share) for name in (target, draft, "none") for share in (0.0, 1.0)
    ]
    assert all(abs(row["kl"]) < 1e-4 for row in rows if row["share"] == 1.0)
    own, _, none = (row["kl"] for row in rows if row["share"] == 0.0)
    assert own < none  # the target's own lower layers know more than its embedding
