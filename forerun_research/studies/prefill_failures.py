"""Where it broke: the prompts that exact prefill answers well and a setting does not, worst first.

Reads the records of any measure; knows which of its figures say how bad a case is, and nothing else of it.
"""

from __future__ import annotations

from typing import Any

from forerun_research.studies.prefill_measure import Found, Row
from forerun_research.studies.study import EXACT

MAX_MEAN_KL = 0.5  # mean over a continuation, from which a prompt counts as broken
MAX_SCORE_LOSS = 0.1  # of a score


def failures(measure: str, found: Found) -> list[Row]:
    """Rows with the prompt's end, both answers and how much was lost, in order of the loss."""
    exact = found.get(EXACT, {})
    rows: list[Row] = []
    for condition, cases in found.items():
        if condition == EXACT:
            continue
        for case, record in cases.items():
            lost = _lost(record, exact.get(case))
            if lost > 0:
                rows.append(_row(measure, condition, case, record, exact.get(case), lost))
    return sorted(rows, key=lambda row: -row["lost"])


def _lost(record: dict[str, Any], exact: dict[str, Any] | None) -> float:
    """How bad a case is, from 0 (not broken) on."""
    if "score" in record and exact is not None:
        lost = float(exact["score"]) - float(record["score"])
        return lost if lost >= MAX_SCORE_LOSS else 0.0
    kl = float(record.get("kl", 0.0))
    return kl if kl >= MAX_MEAN_KL else 0.0


def _row(
    measure: str, condition: str, case: str, record: dict[str, Any], exact: dict[str, Any] | None, lost: float
) -> Row:
    row: Row = {"measure": measure, "setting": condition, "case": case, "lost": round(lost, 4)}
    for key in ("cost", "fell_back", "depth", "at", "error"):
        if key in record:
            row[key] = record[key]
    row["asked"] = record.get("asked", "")
    if "answer" in record:
        row["answer"], row["exact answer"] = record["answer"], (exact or {}).get("answer", "")
    return row
