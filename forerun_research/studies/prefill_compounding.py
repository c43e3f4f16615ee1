"""Whether errors compound while answering: KL and agreement against the number of tokens already generated.

The exact answer is given token by token. `upgraded after n`: once n tokens are there, the prompt's K/V becomes exact
and the answer's own, made from approximate K/V, stays; what is then left of the error lives in the answer alone.
Recomputing everything would leave none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from forerun.core import SamplingParams
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure, Line
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import agreement, divergence, figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting


@dataclass(frozen=True)
class Compounding(Measure):
    name: ClassVar[str] = "compounding"
    score: ClassVar[str] = "top1"

    prompts: int = 16
    length: int = 2048
    tokens: int = 512  # of the answer
    upgrades: tuple[int, ...] = (64,)
    bin: int = 32  # tokens of an answer that share a point
    question: str = "Explain the text above in detail, one part after the other."
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 < n < self.tokens for n in self.upgrades):
            raise ValueError(f"upgrades {self.upgrades} must lie within the {self.tokens} tokens of the answer")

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length - 64, self.prompts, self.seed)  # room for the question
        decode = subject.tokenizer.decode
        return [StudyCase(name, subject.ask(f"{decode(ids)}\n\n{self.question}")) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [name for s in settings for name in (s.name, *(_upgraded(s.name, n) for n in self.upgrades))]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        params = SamplingParams(max_tokens=self.tokens, ignore_eos=True)
        subject.llm.clear_cache()
        answer = subject.llm.generate(case.ids, params)[0].token_ids
        with subject.scorer.hold(case.ids, None, len(answer)) as exact:
            reference = exact.logits(answer)
        for setting in settings:
            for n in (0, *self.upgrades):
                name = _upgraded(setting.name, n) if n else setting.name
                if name in wanted:
                    with subject.scorer.hold(case.ids, setting, len(answer)) as held:
                        logits = held.logits(answer)
                        if n:
                            held.run(case.ids, 0)
                            # the answer's first tokens keep the K/V that they had; the rest is run again after them
                            later = held.score(answer[n - 1 : -1], len(case.ids) + n - 1)
                            logits = torch.cat((logits[:n], later))
                        yield name, self._record(reference, logits) | figures(held.report, held.seconds)

    @staticmethod
    def _record(reference: Tensor, logits: Tensor) -> Record:
        kl, same = divergence(reference, logits), agreement(reference, logits)
        return {
            "top1": float(same.float().mean()),
            "kl": float(kl.mean()),
            "kls": [round(value, 5) for value in kl.tolist()],
            "sames": [int(value) for value in same.tolist()],
        }

    def summary(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for name, cases in found.items():
            longest = max((len(r["kls"]) for r in cases.values()), default=0)
            for start in range(0, longest, self.bin):
                place = slice(start, start + self.bin)
                own = [r for r in cases.values() if len(r["kls"]) > start]
                kls, same = ([fmean(r[key][place]) for r in own] for key in ("kls", "sames"))
                low, high = bootstrap([kls])
                row = {"setting": name, "from token": start, "prompts": len(own), "kl": fmean(kls)}
                table.append(row | {"kl low": low, "kl high": high, "top1": fmean(same)})
        return table

    def figures(self, found: Found) -> list[Figure]:
        table = self.summary(found)
        return [
            Figure(title, "tokens of the answer so far", key, [_line(table, name, key) for name in found], log_y=log)
            for key, title, log in (
                ("kl", "KL along the exact answer", True),
                ("top1", "top-1 agreement along the exact answer", False),
            )
        ]


def _upgraded(name: str, tokens: int) -> str:
    return f"{name}, upgraded after {tokens}"


def _line(table: Sequence[Row], name: str, key: str) -> Line:
    own = [row for row in table if row["setting"] == name]
    low, high = ([row[f"kl {end}"] for row in own] if key == "kl" else [] for end in ("low", "high"))
    return Line(name, [float(row["from token"]) for row in own], [row[key] for row in own], low, high)
