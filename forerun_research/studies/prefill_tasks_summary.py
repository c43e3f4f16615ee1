"""Summaries of one document among others, by ROUGE-L to a reference and to the words after exact prefill.

Documents and references are the news articles of Spec-Bench's category `summarization` and the highlights that their
editors wrote (CNN/DailyMail); around the one that is asked for stand others, up to the prompt's length, of which
one may be cut. There are fewer articles than prompts: one comes again at another length, among others. ROUGE-L says how
many words two texts share in order, not whether a summary is true.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from forerun.errors import BadRequest
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.prefill_measure import Found, Record, Row, StudyCase, TaskMeasure, rows
from forerun_research.studies.prefill_needle import Haystack
from forerun_research.studies.prefill_ruler import fitting_lengths
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.rouge import rouge_l
from forerun_research.studies.study import Setting

CATEGORY, ASKED = "summarization", "Summarize: "  # of Spec-Bench, and what its questions begin with
TITLE_TOKENS = 6  # about what a document's number takes; prompts that come out too long are made again
_QUESTION = "Summarize document {} of those above in three sentences. Write about this document only."


@dataclass(frozen=True)
class SummaryLong(TaskMeasure):
    name: ClassVar[str] = "summary-long"

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    prompts: int = 64  # the lengths taking turns
    tokens: int = 96  # of the answer
    file: str = "spec_bench_half.jsonl"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        records = subject.texts.records(self.file, ("question_id", "category", "turns"))
        articles = [r for r in records if r["category"] == CATEGORY and r.get("reference")]
        if not articles:
            raise BadRequest(f"{self.file} has no {CATEGORY} with a reference", "see its `category` and `reference`")
        lengths = fitting_lengths(subject, self.lengths, self.tokens)
        random.Random(self.seed).shuffle(articles)
        hays = [Haystack.of([_text(article)], subject.tokenizer) for article in articles]
        cases = []
        for number in range(self.prompts):
            round_, at = divmod(number, len(articles))
            length = lengths[(at + round_) % len(lengths)]  # another one when articles come again
            cases.append(self.case(subject, articles[at], hays[:at] + hays[at + 1 :], length, number))
        return cases

    def case(
        self, subject: StudySubject, article: dict[str, Any], others: list[Haystack], length: int, number: int
    ) -> StudyCase:
        draw = random.Random(f"{self.seed} {length} {number}")
        others, depth, own = draw.sample(others, len(others)), draw.random(), _text(article)
        ids = _prompt(subject, [own], 1)
        if len(ids) > length:
            raise BadRequest(f"a document with its question takes {len(ids)} tokens of {length}", "allow more of them")
        room, texts = length - len(ids), [own]
        there = sum(TITLE_TOKENS + sum(other.sizes) for other in others)
        if there < room:
            raise BadRequest(
                f"prompts of {length} tokens need {room} of other documents, {self.file} has {there}",
                "allow fewer tokens, or give a file with more articles",
            )
        while room > 0:
            before = _documents(others, room)
            place = round(depth * len(before))
            texts = [*before[:place], own, *before[place:]]
            longer = _prompt(subject, texts, place + 1)
            if len(longer) <= length:
                ids = longer
                break
            room -= len(longer) - length
        more = {"group": f"{length} tokens", "reference": _reference(article), "documents": len(texts)}
        return StudyCase(f"{article['question_id']} {length} {number}", ids, more)

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        return {
            "score": rouge_l(answer, case.more["reference"]),
            "to exact": rouge_l(answer, exact),
            "same": answer == exact,
            "documents": case.more["documents"],
        }

    def summary(self, found: Found) -> list[Row]:
        """ROUGE-L to the reference, and beside it to the answer after exact prefill."""
        table = rows(found)
        for row in table:
            records = found[row["setting"]].values()
            own = [float(r["to exact"]) for r in records if row.get("group", "all") in ("all", r["group"])]
            row["to exact"] = fmean(own)
            row["to exact low"], row["to exact high"] = bootstrap([own])
        return table


def _text(article: dict[str, Any]) -> str:
    return str(article["turns"][0]).removeprefix(ASKED)


def _documents(others: list[Haystack], room: int) -> list[str]:
    """As many as fit into so many tokens; the last one is cut at the end of a sentence."""
    found: list[str] = []
    for other in others:
        room -= TITLE_TOKENS
        size = sum(other.sizes)
        parts = other.parts if size <= room else [part for part, _ in other.cut(room, 0)]
        found += [" ".join(parts)] if parts else []
        if size > room:
            break
        room -= size
    return found


def _prompt(subject: StudySubject, texts: list[str], wanted: int) -> list[int]:
    parts = [f"Document {number}:\n{text}" for number, text in enumerate(texts, 1)]
    return subject.ask("\n\n".join((*parts, _QUESTION.format(wanted))))


def _reference(article: dict[str, Any]) -> str:
    given = article["reference"]
    return str(given[0] if isinstance(given, list) else given)
