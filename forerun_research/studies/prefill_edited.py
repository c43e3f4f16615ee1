"""One changed line: a prompt met before comes again with another first line, and its answer begins provisionally.

The draft is the old prompt's K/V, moved to its new place (source `chunk`). Beside it exact prefill from nothing, and
with the old prompt in the cache, of which a few first tokens are shared: plain prefix caching. A record has the seconds
to the first word that is shown and to the first that stands, what was shown and stood, and whether the final answer is
exact prefill's with the same cache, token for token: on a GPU long prompts have other bits from nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from forerun.core import SamplingParams
from forerun.params import Prefill
from forerun_research.studies.intervals import bootstrap, wilson
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting

CACHED, PROVISIONAL = "prefix caching", "provisional"
_QUESTION = "\n\nSay in a few sentences what the text above is about."


@dataclass(frozen=True)
class EditedPrompts(Measure):
    name: ClassVar[str] = "edited"

    prompts: int = 100
    length: int = 8192
    tokens: int = 32  # of the answer
    texts: tuple[str, ...] = ("stdlib", "essays", "tables", "logs", "gsm8k_test_half.jsonl")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length - 96, self.prompts, self.seed)  # room for lines around it
        cases = []
        for number, (name, ids) in enumerate(pieces):
            text = subject.tokenizer.decode(ids)
            old, new = (
                subject.ask(f"Turn {n} at 09:{n % 60:02}, checksum {97 * n + 13:05}.\n{text}{_QUESTION}")
                for n in (number, number + 31)
            )
            cases.append(StudyCase(name, new, {"old": old}))
        return cases

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [EXACT, CACHED, PROVISIONAL]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        about = {"group": case.id.rpartition(" ")[0], "tokens": len(case.ids)}
        if EXACT in wanted:
            subject.llm.clear_cache()
            yield EXACT, about | self._answer(subject, case.ids, Prefill()) | {"score": 1.0}
        exact = done.get(CACHED, {}).get(case.id)
        if exact is None:
            exact = about | self._after_old(subject, case, Prefill()) | {"score": 1.0}
            yield CACHED, exact
        if PROVISIONAL in wanted:
            found = self._after_old(subject, case, Prefill("provisional", source="chunk", allow_exact=True))
            yield PROVISIONAL, about | found | {"score": float(found["ids"] == exact["ids"])}

    def _after_old(self, subject: StudySubject, case: StudyCase, prefill: Prefill) -> dict[str, Any]:
        """The answer where the prompt was met before its line changed."""
        subject.llm.clear_cache()
        subject.llm.generate(case.more["old"], SamplingParams(max_tokens=1))
        found = self._answer(subject, case.ids, prefill)
        subject.llm.clear_cache()
        return found

    def _answer(self, subject: StudySubject, ids: list[int], prefill: Prefill) -> dict[str, Any]:
        answer = subject.llm.generate(ids, SamplingParams(max_tokens=self.tokens, prefill=prefill))[0]
        usage = answer.usage
        shown = {"first_s": usage.provisional_s if usage.provisional else usage.ttft_s, "confirmed_s": usage.ttft_s}
        shown |= {"shown": usage.provisional, "stood": usage.confirmed}
        return {"ids": answer.token_ids, "answer": answer.text, **shown, **figures(usage.prefill, usage.ttft_s)}

    def summary(self, found: Found) -> list[Row]:
        exact, table = found.get(EXACT, {}), list[Row]()
        for name, cases in found.items():
            for group in (*dict.fromkeys(r["group"] for r in cases.values()), ""):
                own = {k: r for k, r in cases.items() if k in exact and group in ("", r["group"])}
                if own:
                    table.append({"group": group or "all", "setting": name, **_row(own, exact)})
        return table

    def figures(self, found: Found) -> list[Figure]:
        return []


def _row(own: dict[str, Record], exact: Any) -> Row:
    same = sum(r["score"] for r in own.values())
    sooner = [exact[k]["first_s"] / r["first_s"] for k, r in own.items()]
    later = [r["confirmed_s"] / exact[k]["first_s"] for k, r in own.items()]
    shown = sum(r["shown"] for r in own.values())
    row: Row = {"prompts": len(own), "exact answers": same / len(own)}
    row["exact answers low"], row["exact answers high"] = wilson(same, len(own))
    row |= {"first": median(r["first_s"] for r in own.values()), "sooner": fmean(sooner)}
    row["sooner low"], row["sooner high"] = bootstrap([sooner])
    row |= {"confirmed of exact": fmean(later), "shown": shown}
    row["stood"] = sum(r["stood"] for r in own.values()) / shown if shown else None
    row["fell back"] = sum(bool(r.get("fell_back")) for r in own.values())
    return row
