"""Speculative prefill in the bench: figures of samples, the table, sides with real and with random profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.bench import prefill_table, random_profile
from forerun_research.bench import speculative_prefill as bench
from forerun_research.bench.common import Setup
from forerun_research.bench.ours import ForerunSide
from forerun_research.bench.shapes import SHAPES
from forerun_research.bench.sides import SideSpec
from tests.research.studies.common import write_data, write_profile

IDS = [20 + (7 * i + i // 13) % 400 for i in range(1700)]
DRAFTED = Prefill("speculative")


def report(cost: float, **more: Any) -> dict[str, Any]:
    counts: dict[str, Any] = dict.fromkeys((*bench.COUNTS, *bench.TIMES), 1.0)
    return {**counts, "cost": cost, "fell_back": "", "source": "draft", "chooser": "draft", "layers": 4, **more}


def samples() -> dict[str, list[dict[str, Any]]]:
    return {
        "exact": [{"ttft_s": t, "report": None} for t in (1.0, 2.0, 3.0)],
        "speculative": [
            {"ttft_s": 0.5, "report": report(0.3)},
            {"ttft_s": 1.0, "report": report(0.4)},
            {"ttft_s": 3.0, "report": report(1.1, fell_back="too dear", drafted=0)},
        ],
        "provisional": [
            {"provisional_s": 0.5, "confirmed_s": 2.0, "shown": 10, "kept": 9},
            {"provisional_s": 1.0, "confirmed_s": 3.0, "shown": 30, "kept": 21},
            {"provisional_s": None, "confirmed_s": 2.0, "shown": 0, "kept": 0},
        ],
    }


def test_figures_of_samples() -> None:
    found = bench.figures(samples())
    assert found["ratio"] == 2.0 and found["ratios"] == {"median": 2.0, "min": 1.0, "max": 2.0}
    assert found["speculative"]["cost"]["median"] == 0.4 and found["speculative"]["fallbacks"] == 1
    assert found["speculative"]["fell_back"] == ["too dear"] and found["speculative"]["drafted"] == pytest.approx(2 / 3)
    assert found["provisional"]["provisional_s"]["median"] == 0.75
    assert found["provisional"]["ratio"] == round(2.0 / 0.75, 3) and found["provisional"]["share_confirmed"] == 0.75


def test_the_table_says_what_was_measured() -> None:
    result = {"model": "random 5b", "runs": 3, "random_weights": True, "figures": {"2048": bench.figures(samples())}}
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(prefill_table.table(result, "none"))
    text = console.export_text()
    for part in ("only the times mean anything", "2.00x", "0.400", "2.67x", "75%", "too dear"):
        assert part in text


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BadRequest, match="beside the random shape tiny"):
        bench.PrefillBench().check(Setup("m", shape="tiny"))
    with pytest.raises(BadRequest, match="random profile"):
        bench.PrefillBench(draft_model="tiny", prefill_profile="p").check(Setup("m", shape="tiny"))
    bench.PrefillBench(draft_model="tiny").check(Setup("m", shape="tiny"))
    assert bench.PrefillBench(budget=0.4).prefill("speculative").budget == 0.4
    assert bench.PrefillBench(budget=0.4).prefill("exact") == Prefill()


def test_documents_of_a_folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, folder = str(tiny_folder("qwen2")), write_data(tmp_path)
    whole, shipped = bench.Documents(Setup(model, data=folder)), bench.Documents(Setup(model))
    assert "lighthouse" in whole.tokenizer.decode(whole.cut(60)) and whole.cut(60) != shipped.cut(60)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadRequest, match="has no text file"):
        bench.Documents(Setup(model, data=tmp_path / "empty"))


def test_a_side_drafts_prompts_and_starts_cold(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_folder("qwen2"))
    profile = str(write_profile(tiny_folder("qwen2"), tmp_path / "p.safetensors"))
    side = ForerunSide(SideSpec("forerun", model, "float32", "cpu", 1, 1750, 2, draft=model, profile=profile))
    try:
        exact, first, second = (side.drafted(IDS, prefill) for prefill in (Prefill(), DRAFTED, DRAFTED))
        assert exact["report"] is None and exact["ttft_s"] > 0
        for found in (first, second):
            assert found["report"]["drafted"] > 500 and found["report"]["fell_back"] == ""
        assert first["report"]["token_layers"] == second["report"]["token_layers"]
        shown = side.provisional(IDS, Prefill("provisional"), 8)
        plain = side.decode(IDS, 8)
        assert shown["token_ids"] == plain["token_ids"] and 0 < shown["provisional_s"] < shown["confirmed_s"]
        assert 0 <= shown["kept"] <= min(8, shown["shown"])
    finally:
        side.llm.close()


def test_random_weights_get_a_random_draft_and_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft takes the target's vocabulary."""
    wide = replace(SHAPES["tiny"], hidden_size=256, num_layers=8, num_heads=8, intermediate_size=1024, vocab_size=640)
    monkeypatch.setitem(SHAPES, "wide", wide)
    monkeypatch.setattr(random_profile, "MAX_DEFAULT_RANK", 32)
    side = ForerunSide(SideSpec("forerun", "", "float32", "cpu", 1, 1750, 2, shape="wide", draft="tiny"))
    try:
        assert side.llm.prefill_profile is not None and side.llm.prefill_profile.source_cost < 0.1
        maps, layers = side.llm.prefill_profile.maps, SHAPES["tiny"].num_layers
        assert maps.target_embedding and maps.rank == 32 and maps.taps == tuple(range(round(0.6 * layers) + 1))
        assert maps.down.shape[1] == len(maps.taps) * SHAPES["tiny"].hidden_size + 256
        found = side.drafted([i % 640 for i in range(1700)], DRAFTED)["report"]
        assert found["source"] == "draft" and found["fell_back"] == "" and found["drafted"] > 1600
        assert 0.1 < found["recomputed"] / found["drafted"] < 0.25 and found["cost"] < 0.5
    finally:
        side.llm.close()
