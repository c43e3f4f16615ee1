"""Ruler: several facts in a long text that have to be found, put together or counted to answer a question.

The kinds are those of `prefill_ruler_tasks.py`. The text around the facts is cut from a collection at the ends of
sentences, as `needle` does it; `text: shipped` needs no data folder and reaches to about 4,000 tokens. The score is the
share of the expected strings that the answer has; naming others besides costs nothing and is counted (`unwanted`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.errors import BadRequest
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Record, Row, StudyCase, TaskMeasure, bars, rows
from forerun_research.studies.prefill_needle import Haystack, place
from forerun_research.studies.prefill_ruler_tasks import KINDS, RulerTask, found
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import Setting


def fitting_lengths(subject: StudySubject, lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths of prompts that leave the model room for an answer of so many tokens."""
    fitting = [length for length in lengths if subject.fits(length + tokens)]
    if not fitting:
        raise BadRequest(f"no prompt of {tuple(lengths)} tokens fits into the model's context", "ask for shorter ones")
    return fitting


def by_length(measured: Found) -> list[Row]:
    """The same records in groups of the prompts' intended lengths, without a row for all."""
    regrouped = {
        name: {case: record | {"group": f"{record['length']} tokens"} for case, record in cases.items()}
        for name, cases in measured.items()
    }
    return [row for row in rows(regrouped) if row.get("group") not in (None, "all")]


@dataclass(frozen=True)
class Ruler(TaskMeasure):
    name: ClassVar[str] = "ruler"

    kinds: tuple[str, ...] = tuple(KINDS)
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    prompts: int = 64  # of each kind, the lengths taking turns
    tokens: int = 48  # of the answer
    text: str = "essays"
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"no kind is called {unknown[0]!r}: there are {', '.join(KINDS)}")

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        hay = Haystack.of(subject.texts.documents(self.text), subject.tokenizer)
        lengths = fitting_lengths(subject, self.lengths, self.tokens)
        return [
            self.case(subject, hay, kind, lengths[number % len(lengths)], number)
            for kind in self.kinds
            for number in range(self.prompts)
        ]

    def case(self, subject: StudySubject, hay: Haystack, kind: str, length: int, number: int) -> StudyCase:
        draw = random.Random(f"{self.seed} {kind} {length} {number}")
        task = KINDS[kind](draw)
        ids = self._prompt(subject, hay, task, length, draw.randrange(len(hay.parts)))
        more = {"group": kind, "length": length, "wanted": task.wanted, "unwanted": task.unwanted}
        return StudyCase(f"{kind} {length} {number}", ids, more)

    @staticmethod
    def _prompt(subject: StudySubject, hay: Haystack, task: RulerTask, length: int, skip: int) -> list[int]:
        """As much text as the length allows; joined parts take a few tokens more or less than alone."""
        own = subject.ask("\n\n".join((*(fact for _, fact in task.facts), task.question)))
        room = length - len(own)
        while room > 0:
            text = place(hay.cut(room, skip), list(task.facts))
            ids = subject.ask(f"{text}\n\n{task.question}")
            if len(ids) <= length:
                return ids
            room -= len(ids) - length
        raise BadRequest(f"the facts of a prompt alone take {len(own)} tokens of {length}", "ask for longer prompts")

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        wanted = case.more["wanted"]
        return {
            "score": found(answer, wanted) / len(wanted),
            "unwanted": found(answer, case.more["unwanted"]),
            "same": answer == exact,
            "length": case.more["length"],
            "wanted": list(wanted),
        }

    def summary(self, found: Found) -> list[Row]:
        """By kind, all together, and by length."""
        return rows(found) + by_length(found)

    def figures(self, found: Found) -> list[Figure]:
        titled = (("by kind", rows(found)), ("by tokens of the prompt", by_length(found)))
        return [bars(table, f"ruler: share of what was asked for, {title}") for title, table in titled if table]
