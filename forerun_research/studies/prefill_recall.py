"""Recall of models that were trained on the spot (`small_models`): facts among code, one of which is begun again at the
prompt's end. Right where all tokens of its value are the most likely ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun_research.studies.prefill_drop import holding
from forerun_research.studies.prefill_measure import Found, Measure, Record, StudyCase
from forerun_research.studies.prefill_score import figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting

FIRST = ("amber", "quiet", "northern", "velvet", "hollow", "silver", "crooked", "distant", "golden", "patient")
SECOND = ("harbour", "lantern", "orchard", "falcon", "bridge", "meadow", "archive", "compass", "glacier", "mill")


def facts(draw: random.Random, count: int) -> list[tuple[str, str]]:
    """(what is said of a name, its value): names differ."""
    names = draw.sample([f"{a} {b}" for a in FIRST for b in SECOND], count)
    return [(f"\n# The access code of the {name} is", f" {draw.randrange(10_000, 100_000)}.\n") for name in names]


@dataclass(frozen=True)
class Recall(Measure):
    name: ClassVar[str] = "recall"

    prompts: int = 64
    length: int = 2048
    facts: int = 8
    text: str = "stdlib"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        encode, cases = subject.tokenizer.encode, []
        for name, ids in subject.texts.mixed([self.text], self.length, self.prompts, self.seed):
            draw = random.Random(f"{self.seed} {name}")
            said = facts(draw, self.facts)
            what, value = said[0]
            begun = encode(what)
            inserts = [encode(one + other) for one, other in said]
            body = ids[: self.length - len(begun) - sum(map(len, inserts))]
            places = sorted((draw.randrange(len(body)) for _ in inserts), reverse=True)
            for at, piece in zip(places, inserts, strict=True):  # from the last one on: none splits another
                body[at:at] = piece
            # as it is in training: cut where the words end, whatever the tokens of both together are
            whole = encode(what + value)
            shared = next((i for i, (a, b) in enumerate(zip(whole, begun, strict=False)) if a != b), len(begun))
            cases.append(StudyCase(name, body + whole[:shared], {"follow": whole[shared:-1]}))
        return cases

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        for setting in (None, *settings):
            name = EXACT if setting is None else setting.name
            if name in wanted:
                with holding(subject.scorer, case.ids, setting, len(follow)) as held:
                    right = held.logits(follow).argmax(-1).tolist() == follow
                    yield name, {"score": float(right), "tokens": len(case.ids), **figures(held.report, held.seconds)}
