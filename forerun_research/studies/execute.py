"""Runs a study: every measure, case and condition that has no record yet, then tables, plots and failures.

Knows the order of things and where they are written; what is measured is each measure's business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.errors import BadRequest
from forerun_research.studies.plots import draw
from forerun_research.studies.prefill_ablation import Ablation
from forerun_research.studies.prefill_agreement import Agreement, CopyMeasure
from forerun_research.studies.prefill_answers import Identical, Rag, Summarization
from forerun_research.studies.prefill_baselines import Baselines
from forerun_research.studies.prefill_bins import FailureBins
from forerun_research.studies.prefill_chunk_facts import ChunkFacts
from forerun_research.studies.prefill_chunks import Chunks
from forerun_research.studies.prefill_code import Edits, HumanEvalLong
from forerun_research.studies.prefill_compounding import Compounding
from forerun_research.studies.prefill_edited import EditedPrompts
from forerun_research.studies.prefill_failures import failures
from forerun_research.studies.prefill_first_token import FirstToken
from forerun_research.studies.prefill_free import FreeRunning
from forerun_research.studies.prefill_free_code import FreeCode
from forerun_research.studies.prefill_gate import Gate
from forerun_research.studies.prefill_gate_trial import GateTrial
from forerun_research.studies.prefill_layers import Layers
from forerun_research.studies.prefill_measure import Found, Measure, Row, StudyCase
from forerun_research.studies.prefill_needle import Needle
from forerun_research.studies.prefill_recall import Recall
from forerun_research.studies.prefill_ruler import Ruler
from forerun_research.studies.prefill_signals import Signals
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.prefill_tasks_call import CallAbove
from forerun_research.studies.prefill_tasks_summary import SummaryLong
from forerun_research.studies.results import Results
from forerun_research.studies.study import Study, Variant, options

MEASURES: dict[str, type[Measure]] = {
    kind.name: kind
    for kind in (
        *(Agreement, CopyMeasure, Needle, HumanEvalLong, Edits, Rag, Summarization, Identical),
        *(Signals, Layers, Chunks, ChunkFacts, Compounding, Ablation, Gate),
        *(Ruler, Recall, CallAbove, SummaryLong, FreeRunning, FreeCode),
        *(GateTrial, FirstToken, EditedPrompts, FailureBins, Baselines),
    )
}
_PROMPT_END_CHARS = 200  # characters of a prompt's end that a record keeps
OnProgress = Callable[[str], None]
Stop = Callable[[], bool]  # asked before each case: whether to leave the rest for another time


def measures(study: Study) -> list[Measure]:
    """The study's measures with their options checked, before any model is opened."""
    found = []
    for name, given in study.measures:
        if name not in MEASURES:
            raise BadRequest(f"no measure is called {name!r}", f"known are {', '.join(MEASURES)}")
        found.append(options(MEASURES[name], given, name))
    return found


def run(study: Study, out: Path, on_progress: OnProgress = lambda text: None) -> dict[str, Any]:
    """All that is missing, then the report; what was measured before is not measured again."""
    asked = measures(study)
    results = Results(out, study)
    for variant in study.variants:
        with StudySubject(study, variant) as subject:
            for measure in asked:
                measure_cases(study, variant, subject, measure, measure.cases(subject), results, on_progress)
    return report(study, out)


def measure_cases(
    study: Study,
    variant: Variant,
    subject: StudySubject,
    measure: Measure,
    cases: list[StudyCase],
    results: Results,
    on_progress: OnProgress,
    stop: Stop = lambda: False,
) -> None:
    """Those of a measure's cases that have no record yet."""
    settings = study.settings_of(variant)
    conditions = measure.conditions(settings, subject.layers)
    done = results.of(variant.name, measure.name)
    for number, case in enumerate(cases, 1):
        wanted = [name for name in conditions if case.id not in done.get(name, {})]
        if not wanted:
            continue
        if stop():
            return
        asked = subject.tokenizer.decode(case.ids[-_PROMPT_END_CHARS:])[-_PROMPT_END_CHARS:]
        for condition, record in measure.run(subject, case, settings, wanted, done):
            results.add(variant.name, measure.name, condition, case.id, record | {"asked": asked})
            label = " ".join(part for part in (variant.name, measure.name) if part)
            on_progress(f"{label}: {number} of {len(cases)}, {condition}")


def known(rows: list[Row]) -> list[Row]:
    """None in place of what is not a number: JSON has no word for it."""
    return [
        {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        for row in rows
    ]


def report(study: Study, out: Path) -> dict[str, Any]:
    """Tables of what was measured so far: returned, written as JSON, and drawn."""
    results = Results(out, study)
    tables: list[dict[str, Any]] = []
    broken: list[Row] = []
    for variant in study.variants:
        for measure in measures(study):
            found: Found = results.of(variant.name, measure.name)
            if not any(found.values()):
                continue
            tables.append({"variant": variant.name, "measure": measure.name, "rows": known(measure.summary(found))})
            broken += [{"variant": variant.name, **row} for row in failures(measure.name, found)]
            for number, figure in enumerate(measure.figures(found)):
                parts = [variant.name, measure.name, str(number) if number else ""]
                draw(figure, out / f"{'-'.join(part.replace(' ', '_') for part in parts if part)}.png")
    whole: dict[str, Any] = {
        "study": study.title,
        "model": study.model,
        "variants": [asdict(v) for v in study.variants],
    }
    whole |= {"tables": tables, "failures": len(broken)}
    (out / "report.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    with (out / "failures.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in broken)
    return whole | {"broken": broken}
