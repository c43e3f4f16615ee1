"""Needle: a number hidden in a long text, as a rule with another one beside it that was not asked for.

The text is cut from essays at the ends of sentences; both needles are sentences of their own.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from forerun.errors import BadRequest
from forerun.text.tokenizer import Tokenizer
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Record, StudyCase, TaskMeasure, bars
from forerun_research.studies.prefill_subject import StudyAnswer, StudySubject
from forerun_research.studies.study import Setting

CITIES = (
    "Lisbon",
    "Oslo",
    "Nairobi",
    "Lima",
    "Kyoto",
    "Cairo",
    "Quebec",
    "Tallinn",
    "Dublin",
    "Hanoi",
    "Sofia",
    "Perth",
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NEEDLE = "The special magic number for {} is {}."
_QUESTION = "What is the special magic number for {} that is mentioned in the text above? Answer with the number only."


def sentences(text: str) -> list[str]:
    return [part for part in (" ".join(s.split()) for s in _SENTENCE.split(text)) if part]


@dataclass(frozen=True)
class Haystack:
    """Sentences with their lengths in tokens, to be cut anywhere."""

    parts: list[str]
    sizes: list[int]

    @classmethod
    def of(cls, texts: list[str], tokenizer: Tokenizer) -> Haystack:
        parts = [part for text in texts for part in sentences(text)]
        return cls(parts, [len(tokenizer.encode(" " + part)) for part in parts])

    def cut(self, tokens: int, skip: int) -> list[tuple[str, int]]:
        """Sentences of about so many tokens, from sentence `skip` on, starting over at the end."""
        found: list[tuple[str, int]] = []
        total, at = 0, skip % len(self.parts)
        while total + self.sizes[at] <= tokens:
            if len(found) == len(self.parts):
                raise BadRequest(f"the text has fewer than {tokens} tokens", "use shorter needles, or more text")
            found.append((self.parts[at], self.sizes[at]))
            total, at = total + self.sizes[at], (at + 1) % len(self.parts)
        return found


def place(parts: list[tuple[str, int]], inserts: list[tuple[float, str]]) -> str:
    """The sentences with each insert at its depth (0: first, 1: last), counted in tokens."""
    total = sum(size for _, size in parts)
    found: list[str] = []
    before, waiting = 0, sorted(inserts)
    for text, size in parts:
        while waiting and before >= waiting[0][0] * total:
            found.append(waiting.pop(0)[1])
        found.append(text)
        before += size
    return " ".join(found + [text for _, text in waiting])


@dataclass(frozen=True)
class Needle(TaskMeasure):
    name: ClassVar[str] = "needle"

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    prompts: int = 16  # of each length
    tokens: int = 24  # of the answer
    text: str = "essays"
    digits: int = 7  # of the numbers: what a model cannot repeat says nothing about its prompt
    distractor: bool = True
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        hay = Haystack.of(subject.texts.documents(self.text), subject.tokenizer)
        fitting = [length for length in self.lengths if subject.fits(length + self.tokens)]
        if not fitting:
            raise BadRequest(f"no needle of {self.lengths} fits into the model's context", "ask for shorter ones")
        return [self.case(subject, hay, length, i) for length in fitting for i in range(self.prompts)]

    def case(self, subject: StudySubject, hay: Haystack, length: int, number: int) -> StudyCase:
        draw = random.Random(f"{self.seed} {length} {number}")
        city, other = draw.sample(CITIES, 2)
        wanted, distractor = draw.sample(range(10 ** (self.digits - 1), 10**self.digits), 2)
        depth = (number + 0.5) / self.prompts  # every depth alike, over all prompts
        away = draw.uniform(0.05, 0.95)
        inserts = [(depth, _NEEDLE.format(city, wanted))]
        if self.distractor:
            inserts.append((away, _NEEDLE.format(other, distractor)))
        skip, room = draw.randrange(len(hay.parts)), length
        while True:  # joined sentences take a few tokens more or less than alone
            text = place(hay.cut(room, skip), inserts)
            ids = subject.ask(f"{text}\n\n{_QUESTION.format(city)}")
            if len(ids) <= length:
                break
            room -= len(ids) - length
        more = {"group": str(length), "wanted": str(wanted), "depth": depth, "distractor": str(distractor)}
        return StudyCase(f"{length} {number}/{self.prompts}", ids, more)

    def answer(self, subject: StudySubject, case: StudyCase, setting: Setting | None) -> StudyAnswer:
        return subject.answer(case.ids, setting, self.tokens)

    def judge(self, case: StudyCase, answer: str, exact: str) -> Record:
        plain = answer.replace(",", "")
        return {
            "score": float(case.more["wanted"] in plain),
            "distracted": self.distractor and case.more["distractor"] in plain,
            **{key: case.more[key] for key in ("wanted", "depth")},
        }

    def figures(self, found: Found) -> list[Figure]:
        return [bars(self.summary(found), "needle: right answers, by tokens of the prompt")]
