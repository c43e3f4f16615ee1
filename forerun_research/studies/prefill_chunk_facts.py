"""Facts that span chunks: a question whose answer stands in one chunk under a name that another chunk explains.

`The blue office means station Skua.` stands in one chunk, in another `The access code of the blue office is 48213.`,
and the code of station Skua is asked for; other offices have codes, too. Every chunk was met before, `alone` or in a
prompt that had the chunks in the reverse order (`permuted`); its K/V is reused and a part of it recomputed. The
answer's words up to the number are given: right is an answer whose digits are all the most likely ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from torch import Tensor

from forerun.core import PrefillReport
from forerun.params import Prefill
from forerun.prefill.calibration.windows import Augmenter
from forerun.prefill.sources.chunk import ChunkSource
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.prefill_chunks import meet
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase, rows
from forerun_research.studies.prefill_needle import Haystack, place
from forerun_research.studies.prefill_ruler_tasks import NUMBERS, STATIONS
from forerun_research.studies.prefill_score import divergence, figures, prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting

OFFICES = ("blue", "red", "green", "white", "black", "yellow")
PLACES = ("before", "after", "together")  # of the definition: in a chunk before the fact's, after it, in the same one
ALONE, PERMUTED = "alone", "permuted"
ASKED = "What is the access code of station {}, by the text above?"
ANSWER = "The access code of station {} is "


@dataclass(frozen=True)
class ChunkFacts(Measure):
    name: ClassVar[str] = "chunk-facts"

    prompts: int = 64  # of each place of the definition
    chunks: int = 4
    chunk: int = 512  # tokens of each, about
    pairs: int = 3  # offices that are defined and have a code
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3)
    choosers: tuple[str, ...] = ("deviation", "tail")
    met: tuple[str, ...] = (ALONE, PERMUTED)
    text: str = "essays"
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        hay = Haystack.of(subject.texts.documents(self.text), subject.tokenizer)
        return [self._case(subject, hay, where, number) for where in PLACES for number in range(self.prompts)]

    def _case(self, subject: StudySubject, hay: Haystack, where: str, number: int) -> StudyCase:
        draw = random.Random(f"{self.seed} {where} {number}")
        stations, offices = draw.sample(STATIONS, self.pairs), draw.sample(OFFICES, self.pairs)
        codes = [str(code) for code in draw.sample(NUMBERS, self.pairs)]
        inserts: list[list[tuple[float, str]]] = [[] for _ in range(self.chunks)]
        for station, office, code in zip(stations, offices, codes, strict=True):
            first, second = sorted(draw.sample(range(self.chunks), 2))
            defined, told = {"before": (first, second), "after": (second, first), "together": (first, first)}[where]
            early, late = sorted((draw.random(), draw.random()))
            inserts[defined].append((early, f"The {office} office means station {station}."))
            inserts[told].append((late, f"The access code of the {office} office is {code}."))
        encode = subject.tokenizer.encode
        before, after = Augmenter(subject.tokenizer, 0, 0).frame(ASKED.format(stations[0]))
        ids, bounds = list(before), []
        for facts in inserts:
            text = place(hay.cut(self.chunk, draw.randrange(len(hay.parts))), facts)
            piece = encode(f"{text}\n\n")
            bounds.append((len(ids), len(ids) + len(piece)))
            ids += piece
        said, wanted = encode(ANSWER.format(stations[0])), encode(codes[0])
        more = {"group": where, "bounds": bounds, "follow": said + wanted, "asked": len(wanted)}
        return StudyCase(f"{where} {number}", ids + after, more)

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        ways = [f"{chooser} {share}" for chooser in self.choosers for share in self.shares]
        return [EXACT, *(f"{met} {way}" for met in self.met for way in ways)]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            reference = held.logits(follow)
            if EXACT in wanted:
                yield EXACT, self._record(case, held.seconds, None, reference, reference)
        source = prefiller_of(subject.engine).source(Prefill("speculative", source="chunk"))
        assert isinstance(source, ChunkSource)
        for met in self.met:
            names = [name for name in wanted if name.split(" ")[0] == met]
            if not names:
                continue
            try:
                for ids in self._earlier(case, met):
                    meet(subject.scorer, source, ids)
                for name in names:
                    _, chooser, share = name.split(" ")
                    asked = Prefill("speculative", source="chunk", chooser=chooser)
                    setting = Setting(name, asked, float(share), deepen=False)
                    with subject.scorer.hold(case.ids, setting, len(follow), keep=True) as held:
                        logits = held.logits(follow)
                        yield name, self._record(case, held.seconds, held.report, reference, logits)
            finally:
                source.index.clear()

    @staticmethod
    def _earlier(case: StudyCase, met: str) -> list[list[int]]:
        pieces = [case.ids[lo:hi] for lo, hi in case.more["bounds"]]
        return pieces if met == ALONE else [[token for piece in reversed(pieces) for token in piece]]

    @staticmethod
    def _record(
        case: StudyCase, seconds: float, report: PrefillReport | None, reference: Tensor, logits: Tensor
    ) -> Record:
        count: int = case.more["asked"]
        right = logits[-count:].argmax(-1).tolist() == case.more["follow"][-count:]
        kl = float(divergence(reference[-count:], logits[-count:]).mean())
        return {"group": case.more["group"], "score": float(right), "kl": kl, **figures(report, seconds)}

    def summary(self, found: Found) -> list[Row]:
        """By the definition's place and all together, with the KL over the digits."""
        table = rows(found)
        for row in table:
            own = [r["kl"] for r in found[row["setting"]].values() if row["group"] in ("all", r["group"])]
            low, high = bootstrap([own])
            row |= {"kl": fmean(own), "kl low": low, "kl high": high}
        return table
