"""Whether free-running answers are right for as long as they are: HumanEval behind other code, by length of the answer.

Tasks, prompts and tests are those of `humaneval-long`; conditions and the place where answers part are those of
`free-running`. Groups are lengths of exact prefill's answer, which a task is in whatever the setting answers: longer
functions are also harder ones, so only settings within a group compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.core import SamplingParams
from forerun_research.studies.prefill_code import STOPS, HumanEvalLong
from forerun_research.studies.prefill_free import free_conditions, free_record, free_run, together
from forerun_research.studies.prefill_measure import Found, Record, Row, StudyCase, rows
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting


@dataclass(frozen=True)
class FreeCode(HumanEvalLong):
    name: ClassVar[str] = "free-code"

    prompts: int = 64
    tokens: int = 256  # of the answer
    upgrade: int = 32
    ends: tuple[int, ...] = (32, 64, 128)  # tokens of exact prefill's answer at which groups end

    def __post_init__(self) -> None:
        if not 0 < self.upgrade < self.tokens:
            raise ValueError(f"upgrade {self.upgrade} must lie within the {self.tokens} tokens of the answer")

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return free_conditions(settings, self.upgrade)

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        params = SamplingParams(max_tokens=self.tokens, stop=STOPS)
        before = done.get(EXACT, {}).get(case.id)
        judged: dict[str, Record] = {}  # by answer: most are the same under several conditions
        for name, answer, exact in free_run(subject, case, settings, wanted, before, params, self.upgrade):
            if answer.text not in judged:
                judged[answer.text] = self.judge(case, answer.text, exact.text)
            about = {"group": self.group(len(exact.token_ids)), **judged[answer.text], "tokens": len(case.ids)}
            yield name, about | free_record(answer, exact)

    def group(self, tokens: int) -> str:
        for end in self.ends:
            if tokens <= end:
                return f"up to {end}"
        return f"over {self.ends[-1]}" if self.ends else "any length"

    def summary(self, found: Found) -> list[Row]:
        """Passed tests by length of exact prefill's answer, shortest first, and how many answers never part."""
        ordered = {
            name: dict(sorted(cases.items(), key=lambda entry: int(entry[1]["exact tokens"])))
            for name, cases in found.items()
        }
        table = rows(ordered)
        for row in table:
            own = [r for r in found[row["setting"]].values() if row.get("group", "all") in ("all", r["group"])]
            row["the same"] = sum(r["parted"] is None for r in own)
            row[f"the same after {self.upgrade}"] = sum(together(r, self.upgrade) for r in own)
        return table
