"""What every measure of prefill has: cases, conditions, a record for each pair, and a summary against exact prefill.

A measure is a dataclass whose fields are its options in a study's file. It knows neither where records are kept nor
how a table or plot looks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from forerun_research.studies.intervals import bootstrap, relative, wilson
from forerun_research.studies.plots import Figure, Line
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import EXACT, Setting

Record = dict[str, Any]
Found = Mapping[str, Mapping[str, Record]]  # condition -> case -> record
Row = dict[str, Any]  # of a table: column -> value


@dataclass(frozen=True)
class StudyCase:
    """One prompt of a measure."""

    id: str
    ids: list[int]
    more: dict[str, Any] = field(default_factory=dict)  # what the measure needs to judge it


class Measure(ABC):
    name: ClassVar[str]
    score: ClassVar[str] = "score"  # key of a record that tells how good it is: more is better

    @abstractmethod
    def cases(self, subject: StudySubject) -> list[StudyCase]: ...

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        """Under what each case is measured: exact prefill and the study's settings, unless the measure has its own."""
        return [EXACT, *(setting.name for setting in settings)]

    @abstractmethod
    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        """Records of the wanted conditions. `done`: records of this measure from before."""

    def summary(self, found: Found) -> list[Row]:
        return rows(found, self.score)

    def figures(self, found: Found) -> list[Figure]:
        return [bars(self.summary(found), self.name)]


class TaskMeasure(Measure):
    """A measure whose cases are answered in words and judged one by one."""

    @abstractmethod
    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer: ...

    @abstractmethod
    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        """At least a `score`; `exact` is the answer after exact prefill."""

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        before = done.get(EXACT, {}).get(case.id)
        exact = "" if before is None else str(before["answer"])
        if before is None:
            found = self.answer(subject, case, None)
            exact = found.text
            yield EXACT, self._record(case, found, exact)
        for setting in settings:
            if setting.name in wanted:
                yield setting.name, self._record(case, self.answer(subject, case, setting), exact)

    def _record(self, case: StudyCase, found: StudyAnswer, exact: str) -> Record:
        judged = self.judge(case, found.text, exact)
        about = {"group": case.more["group"]} if "group" in case.more else {}
        return {**about, **judged, "tokens": len(case.ids), "answer": found.text, **found.figures}


def rows(found: Found, score: str = "score") -> list[Row]:
    """A row for each group and condition: score with its interval, and as a share of exact prefill's on the same
    prompts."""
    groups = dict.fromkeys(str(r.get("group", "")) for cases in found.values() for r in cases.values())
    wanted = [*groups, ""] if len(groups) > 1 else list(groups)
    return [
        row
        for group in wanted
        for name in found
        if (row := _row(found, name, group, score, len(groups) > 1)) is not None
    ]


def _row(found: Found, name: str, group: str, score: str, grouped: bool) -> Row | None:
    everything = group == "" and grouped
    ours = {k: r for k, r in found[name].items() if everything or str(r.get("group", "")) == group}
    exact = found.get(EXACT, {})
    both = [k for k in ours if k in exact]
    if not both:
        return None
    scores, theirs = [float(ours[k][score]) for k in both], [float(exact[k][score]) for k in both]
    low, high = wilson(sum(scores), len(scores)) if set(scores) <= {0.0, 1.0} else bootstrap([scores])
    share, share_low, share_high = relative(scores, theirs)
    row: Row = {"group": "all" if everything else group} if grouped else {}
    return row | {
        "setting": name,
        "prompts": len(both),
        "score": fmean(scores),
        "low": low,
        "high": high,
        "of exact": share,
        "of exact low": share_low,
        "of exact high": share_high,
        **costs([ours[k] for k in both]),
    }


def costs(records: Sequence[Record]) -> Row:
    """Mean cost and seconds, and how many prompts were computed exactly after all."""
    return {
        "cost": fmean([float(r.get("cost", math.nan)) for r in records]),
        "seconds": fmean([float(r.get("seconds", math.nan)) for r in records]),
        "fell back": sum(bool(r.get("fell_back")) for r in records),
    }


def bars(found: Sequence[Row], title: str, score: str = "score", low: str = "low", high: str = "high") -> Figure:
    """A plot of scores: settings on the x axis, one series for each group."""
    groups = list(dict.fromkeys(str(row.get("group", "")) for row in found))
    names = list(dict.fromkeys(str(row["setting"]) for row in found))
    lines = []
    for group in groups:
        own = {str(row["setting"]): row for row in found if str(row.get("group", "")) == group}
        lines.append(
            Line(
                group,
                [float(i) for i, name in enumerate(names) if name in own],
                *([float(own[name][key]) for name in names if name in own] for key in (score, low, high)),
            )
        )
    return Figure(title, "", score, lines, ticks=names)
