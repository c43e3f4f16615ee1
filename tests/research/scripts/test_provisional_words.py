"""Which provisional words stand: the parts that run no model, on answers whose chances are known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from forerun.engine.provisional import ProvisionalAnswer
from forerun_research.scripts import provisional_words
from forerun_research.scripts.provisional_words import HALVES, KINDS, chance, fit, main, seen_tokens, shown

ODDS, KL = 0.3, 0.04


def made(count: int, kind: str = "essays", half: str = "tune") -> list[dict[str, Any]]:
    draw, words = random.Random(f"{kind} {half}"), list[dict[str, Any]]()
    for _ in range(count):
        margins = [draw.expovariate(0.5) for _ in range(40)]
        stands = [draw.random() < chance(margin, KL, ODDS) for margin in margins]
        stand = stands.index(False) if False in stands else 40
        words.append({"kind": kind, "half": half, "stand": stand, "compared": 40, "margins": margins, "kl": KL})
    return words


def test_the_odds_are_found_again():
    words = made(400)
    assert fit(words) == pytest.approx(ODDS, rel=0.15)
    assert sum(not stands for _, _, stands in seen_tokens(words)) == sum(own["stand"] < 40 for own in words)


def test_fewer_words_are_shown_and_more_of_them_stand_the_likelier_they_must_be():
    rows = [shown(made(300, half="report"), ODDS, least / 10) for least in (0, 3, 6, 9)]
    assert all(a["shown"] > b["shown"] and a["stood"] > b["stood"] for a, b in zip(rows, rows[1:], strict=False))
    assert all(a["share"] < b["share"] for a, b in zip(rows, rows[1:], strict=False))
    assert rows[0]["shown"] == 300 * 40 and rows[-1]["share"] > 0.85


def test_an_answer_holds_back_the_same_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forerun.engine.provisional.ODDS_PER_DEVIATION", ODDS)
    monkeypatch.setattr("forerun.engine.provisional.MIN_STANDING", 0.6)
    for own in made(50):
        (count, answer) = shown([own], ODDS, 0.6)["shown"], ProvisionalAnswer(kl=KL)
        assert answer.sure(own["margins"]) == count
        assert math.isclose(answer.standing, 1.0) or answer.standing < 1.0


def test_tables_are_made_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [own for kind in KINDS for half in HALVES for own in made(20, kind, half)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(own) + "\n" for own in words))
    assert main(["--read", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["prompts"].values()) == len(words) and len(found["report, prose"]) == 10
    assert found["by_margin"][0][2] < found["by_margin"][-2][2]
    assert len(provisional_words.BOUNDS) == len(found["by_margin"]) + 1
