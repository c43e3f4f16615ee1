"""Seconds to the first token, as a request has them: exact prefill beside a drafted prompt, both from cold caches.

Nothing is adjusted for the study: a text that is unlike the profile's and a length at which drafts do not pay are
computed exactly, as for any request, and count with what that took. The first prompt of each length is measured like
the others; whether it was the first is in its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from forerun.core import SamplingParams
from forerun.params import Prefill
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting


@dataclass(frozen=True)
class FirstToken(Measure):
    name: ClassVar[str] = "first-token"
    score: ClassVar[str] = "sooner"

    prompts: int = 24  # of each length, the texts taking turns
    lengths: tuple[int, ...] = (8192, 16384)
    texts: tuple[str, ...] = ("stdlib", "essays", "gsm8k_test_half.jsonl", "tables")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        cases = []
        for length in self.lengths:
            pieces = subject.texts.mixed(self.texts, length, self.prompts, self.seed)
            cases += [
                StudyCase(f"{length} {name}", ids, {"length": length, "first": number == 0})
                for number, (name, ids) in enumerate(pieces)
            ]
        return cases

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        text = case.id.split(" ", 1)[1].rpartition(" ")[0]
        about = {"group": f"{case.more['length']} {text}", "first": case.more["first"], "tokens": len(case.ids)}
        for name, prefill in ((EXACT, Prefill()), *((setting.name, setting.prefill) for setting in settings)):
            if name in wanted:
                yield name, about | first_token(subject, case.ids, prefill)

    def summary(self, found: Found) -> list[Row]:
        exact, table = found.get(EXACT, {}), list[Row]()
        for name, cases in found.items():
            groups = dict.fromkeys(r["group"] for r in cases.values())
            for group in (*groups, *dict.fromkeys(f"{g.split()[0]} all" for g in groups)):
                lengths, _, text = group.partition(" ")
                own = {
                    k: r
                    for k, r in cases.items()
                    if k in exact and (r["group"] == group or (text == "all" and r["group"].split()[0] == lengths))
                }
                if not own:
                    continue
                sooner = [exact[k]["ttft_s"] / r["ttft_s"] for k, r in own.items()]
                times = sorted(r["ttft_s"] for r in own.values())
                row: Row = {"group": group, "setting": name, "prompts": len(own), "seconds": median(times)}
                row |= {"seconds low": times[0], "seconds high": times[-1], "sooner": fmean(sooner)}
                row["sooner low"], row["sooner high"] = bootstrap([sooner])
                row["least sooner"] = min(sooner)
                row["cost"] = fmean(float(r["cost"]) for r in own.values())
                row["fell back"] = sum(bool(r.get("fell_back")) for r in own.values())
                table.append(row)
        return table

    def figures(self, found: Found) -> list[Figure]:
        return []


def first_token(subject: StudySubject, ids: list[int], prefill: Prefill) -> dict[str, Any]:
    """One greedy token after a prompt, from cold caches."""
    subject.llm.clear_cache()
    usage = subject.llm.generate(ids, SamplingParams(max_tokens=1, prefill=prefill))[0].usage
    subject.llm.clear_cache()  # drops the drafted prompt: an upgrade of it would run into the next measurement
    return {"ttft_s": usage.ttft_s, **figures(usage.prefill, usage.ttft_s)}
