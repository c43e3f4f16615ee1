"""Free answers to long prompts, compared with the answer after exact prefill.

`rag` and `summarization` of Spec-Bench: ROUGE-L against the exact answer, 1 where both say the same, whatever the right
answer is. `identical`: whether both are the same to the letter, as provisional answers must be in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.errors import BadRequest
from forerun_research.studies.prefill_measure import Record, StudyCase, TaskMeasure
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.rouge import rouge_l
from forerun_research.studies.study import Setting


@dataclass(frozen=True)
class _Questions(TaskMeasure):
    category: ClassVar[str]

    prompts: int = 40
    tokens: int = 128  # of the answer
    least: int = 0  # leave out prompts of fewer tokens
    file: str = "spec_bench_half.jsonl"

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        records = subject.texts.records(self.file, ("question_id", "category", "turns"))
        cases = [
            StudyCase(str(record["question_id"]), subject.ask(str(record["turns"][0])))
            for record in records
            if record["category"] == self.category
        ]
        fitting = [c for c in cases if len(c.ids) >= self.least and subject.fits(len(c.ids) + self.tokens)]
        if not fitting:
            raise BadRequest(f"{self.file} has no question of category {self.category} that fits", "see its `category`")
        return fitting[: self.prompts]

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        return {"score": rouge_l(answer, exact), "same": answer == exact}


@dataclass(frozen=True)
class Identical(TaskMeasure):
    name: ClassVar[str] = "identical"

    prompts: int = 100
    length: int = 2048
    tokens: int = 64  # of the answer
    question: str = "Say in a few sentences what the text above is about."
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length - 64, self.prompts, self.seed)  # room for the question
        decode = subject.tokenizer.decode
        return [StudyCase(name, subject.ask(f"{decode(ids)}\n\n{self.question}")) for name, ids in pieces]

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        return {"score": float(answer == exact)}


@dataclass(frozen=True)
class Rag(_Questions):
    name: ClassVar[str] = "rag"
    category: ClassVar[str] = "rag"


@dataclass(frozen=True)
class Summarization(_Questions):
    name: ClassVar[str] = "summarization"
    category: ClassVar[str] = "summarization"
