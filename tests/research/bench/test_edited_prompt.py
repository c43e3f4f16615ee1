"""The bench of one changed line: the edits, the figures, the table, and the sides it asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.bench import edited_prompt as bench
from forerun_research.bench.common import Setup
from forerun_research.bench.ours import ForerunSide
from forerun_research.bench.sides import SideSpec

BODY = [20 + (7 * i + i // 13) % 400 for i in range(900)]
LINES = [[3, 4, 5], [6, 7, 8, 9]]


def test_one_line_differs() -> None:
    assert bench.edit("top", BODY, LINES) == ([3, 4, 5, *BODY], [6, 7, 8, 9, *BODY])
    old, new = bench.edit("middle", BODY, LINES)
    assert old[:450] == new[:450] == BODY[:450] and old[453:] == new[454:] == BODY[450:]
    assert bench.edit("inserted", BODY, LINES)[0] == BODY


def sample(first: float | None, confirmed: float, ids: list[int], **more: Any) -> dict[str, Any]:
    found = {"provisional_s": first, "confirmed_s": confirmed, "token_ids": ids, "cached_tokens": 0, "report": None}
    return {**found, "shown": 0, "kept": 0, **more}


def test_figures_and_table() -> None:
    report = {"predicted_kl": 0.004, "cost": 0.1, "fell_back": "too far from it"}
    drafted = sample(0.5, 2.5, [1, 2], shown=4, kept=3, report=report)
    other = sample(None, 2.0, [9], report=None)
    samples = [
        {"exact": sample(None, 2.0, [1, 2]), "provisional": drafted},
        {"exact": sample(None, 2.0, [1, 2]), "provisional": other},
    ]
    found = bench.figures(samples)
    assert found["exact"]["ratio"] == 1.0 and found["provisional"]["ratio"] == 1.6
    assert found["provisional"]["same_answers"] == 1 and found["provisional"]["kept"] == 3
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bench.table({"model": "m", "runs": 2, "figures": {"1000 top": found}}))
    text = console.export_text()
    for part in ("1000 top", "1.60x", "1 of 2", "3 of 4", "too far from it"):
        assert part in text


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(BadRequest, match="--edited is 'bottom'"):
        bench.run(Setup("m"), [512], ["bottom"], False)
    with pytest.raises(BadRequest, match="random-shape"):
        bench.run(Setup("m", shape="tiny"), [512], ["top"], False)


def test_a_side_answers_after_another_prompt(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_folder("qwen2"))
    side = ForerunSide(SideSpec("forerun", model, "float32", "cpu", 1, 950, 4, disk=str(tmp_path)))
    old, new = bench.edit("top", BODY, LINES)
    try:
        exact = side.provisional(new, Prefill(), 4)
        drafted = side.after(old, new, bench.CHUNK, 4)
        assert exact["provisional_s"] is None and exact["report"] is None
        assert 0 < drafted["provisional_s"] < drafted["confirmed_s"] and drafted["report"]["source"] == "chunk"
        assert drafted["token_ids"] == exact["token_ids"]
        assert side.after(old, old, Prefill(), 4)["cached_tokens"] > 800
    finally:
        side.close()
    assert list(tmp_path.rglob("*.tokens"))
