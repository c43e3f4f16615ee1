"""Measures of next-token distributions: `agreement` with exact prefill on held-out text, and `copy` of a span of code.

Teacher-forced: the continuation is given, and the distributions for each of its tokens are looked at.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from torch import Tensor

from forerun.core import PrefillReport
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_drop import holding
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase, bars, costs
from forerun_research.studies.prefill_score import agreement, divergence, figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting


@dataclass(frozen=True)
class Agreement(Measure):
    """KL and top-1 agreement with exact prefill over the tokens that follow a prompt of held-out text."""

    name: ClassVar[str] = "agreement"
    score: ClassVar[str] = "top1"

    prompts: int = 40
    length: int = 2048
    continuation: int = 64
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        return [StudyCase(name, ids[: self.length], {"follow": ids[self.length :]}) for name, ids in pieces]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            reference = held.logits(follow)
            if EXACT in wanted:
                # again, from the same K/V: what this machine's own noise is
                yield EXACT, self._record(case, held.seconds, None, reference, held.logits(follow))
        for setting in settings:
            if setting.name in wanted:
                with holding(subject.scorer, case.ids, setting, len(follow)) as held:
                    yield setting.name, self._record(case, held.seconds, held.report, reference, held.logits(follow))

    @staticmethod
    def _record(
        case: StudyCase, seconds: float, report: PrefillReport | None, reference: Tensor, logits: Tensor
    ) -> Record:
        kl, same = divergence(reference, logits), agreement(reference, logits)
        return {
            "group": case.id.rpartition(" ")[0],
            "kl": float(kl.mean()),
            "kl_max": float(kl.max()),
            "top1": float(same.float().mean()),
            **figures(report, seconds),
        }

    def summary(self, found: Found) -> list[Row]:
        groups = list(dict.fromkeys(r["group"] for cases in found.values() for r in cases.values()))
        table = []
        for group in [*groups, ""] if len(groups) > 1 else groups:
            for name, cases in found.items():
                own = [r for r in cases.values() if group in ("", r["group"])]
                if own:
                    table.append({"group": group or "all", "setting": name, **_row(own)})
        return table

    def figures(self, found: Found) -> list[Figure]:
        table = self.summary(found)
        kl = bars(table, "KL against exact prefill", "kl", "kl low", "kl high")
        return [bars(table, "top-1 agreement with exact prefill", "top1", "top1 low", "top1 high"), kl]


def _row(records: Sequence[Record]) -> Row:
    row: Row = {"prompts": len(records)}
    for key in ("kl", "top1"):
        values = [float(r[key]) for r in records]
        low, high = bootstrap([values])
        row |= {key: fmean(values), f"{key} low": low, f"{key} high": high}
    return row | costs(records)


@dataclass(frozen=True)
class CopyMeasure(Measure):
    """Code that ends by repeating a span of itself: after the first tokens of the repeat, is the rest predicted?"""

    name: ClassVar[str] = "copy"

    prompts: int = 20
    length: int = 2048  # with the first tokens of the repeat
    span: int = 128
    shown: int = 16  # tokens of the repeat that the prompt has
    text: str = "stdlib"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        body = self.length - self.shown
        pieces = subject.texts.mixed([self.text], body, self.prompts, self.seed)
        draw = random.Random(self.seed)
        cases = []
        for name, ids in pieces:
            at = draw.randrange(body // 10, body - 2 * self.span)  # neither at the very start nor in the tail
            span = ids[at : at + self.span]
            cases.append(StudyCase(name, ids + span[: self.shown], {"follow": span[self.shown :], "at": at}))
        return cases

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        for setting in (None, *settings):
            name = EXACT if setting is None else setting.name
            if name not in wanted:
                continue
            with holding(subject.scorer, case.ids, setting, len(follow)) as held:
                guessed = held.logits(follow).argmax(-1).tolist()
                right = sum(a == b for a, b in zip(guessed, follow, strict=True))
                about = {"score": right / len(follow), "at": case.more["at"], "tokens": len(case.ids)}
                yield name, {**about, **figures(held.report, held.seconds)}
