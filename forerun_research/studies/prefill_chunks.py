"""Whether recomputing a part repairs what chunks did not see of each other: KL against the share that is recomputed.

A text is cut into chunks. Each was met before, alone; now they come one after the other, their K/V is reused, and a
chooser says which tokens are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from forerun.params import Prefill
from forerun.prefill.sources.chunk import ChunkSource
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure, Line
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase, costs
from forerun_research.studies.prefill_score import PromptScorer, agreement, divergence, figures, prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting


@dataclass(frozen=True)
class Chunks(Measure):
    name: ClassVar[str] = "chunks"
    score: ClassVar[str] = "top1"

    prompts: int = 20
    length: int = 2048
    chunk: int = 512
    continuation: int = 64
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)
    choosers: tuple[str, ...] = ("deviation", "start", "random")
    texts: tuple[str, ...] = ("essays", "stdlib")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        return [StudyCase(name, ids[: self.length], {"follow": ids[self.length :]}) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [f"{chooser} {share}" for chooser in self.choosers for share in self.shares]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            reference = held.logits(follow)
        source = prefiller_of(subject.engine).source(Prefill("speculative", source="chunk"))
        assert isinstance(source, ChunkSource)
        try:
            for lo in range(0, len(case.ids), self.chunk):
                meet(subject.scorer, source, case.ids[lo : lo + self.chunk])
            for name in wanted:
                chooser, share = name.split(" ")
                setting = Setting(
                    name, Prefill("speculative", source="chunk", chooser=chooser), float(share), deepen=False
                )
                with subject.scorer.hold(case.ids, setting, len(follow), keep=True) as held:
                    logits = held.logits(follow)
                    kl = float(divergence(reference, logits).mean())
                    top1 = float(agreement(reference, logits).float().mean())
                    about = {"chooser": chooser, "share": float(share), "kl": kl, "top1": top1}
                    yield name, about | figures(held.report, held.seconds)
        finally:
            source.index.clear()

    def summary(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for name, cases in found.items():
            chooser, share = name.split(" ")
            records = list(cases.values())
            row: Row = {"chooser": chooser, "share": float(share), "prompts": len(records)}
            for key in ("kl", "top1"):
                row[key] = fmean(r[key] for r in records)
            row["kl low"], row["kl high"] = bootstrap([[r["kl"] for r in records]])
            table.append(row | costs(records))
        return table

    def figures(self, found: Found) -> list[Figure]:
        table = self.summary(found)
        return [
            Figure(f"chunks met before, {key} after partial recompute", "share recomputed", key, _lines(table, key))
            for key in ("kl", "top1")
        ]


def meet(scorer: PromptScorer, source: ChunkSource, ids: list[int]) -> None:
    """A text alone, exactly, as an earlier request would have left it."""
    with scorer.hold(ids, keep=True) as held:
        held.run(ids[held.end :], held.end)
        source.index.remember(ids, held.pages)


def _lines(table: Sequence[Row], key: str) -> list[Line]:
    lines = []
    for chooser in dict.fromkeys(row["chooser"] for row in table):
        own = sorted((row for row in table if row["chooser"] == chooser), key=lambda row: row["share"])
        low, high = ([row[f"kl {end}"] for row in own] if key == "kl" else [] for end in ("low", "high"))
        lines.append(Line(chooser, [row["share"] for row in own], [row[key] for row in own], low, high))
    return lines
