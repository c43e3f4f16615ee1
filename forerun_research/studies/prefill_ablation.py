"""Is the draft itself worth anything: drafted K/V of the right hidden states beside that of wrong ones, at equal
recomputing.

`right`: as requests have it; `shuffled`: hidden states of each piece in another order; `mean`: every token has the mean
of its 64 neighbours; `other`: those of another text; `none`: tokens that are not recomputed are absent. Tokens are
chosen over the K/V at hand, except for `none`, which keeps what `right` chose. Layers below `base` are the target's
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from forerun.params import Prefill
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import agreement, divergence, prefiller_of
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting
from forerun_research.studies.token_drop import TokenDropRun, drop_tokens

DRAFTS = ("right", "shuffled", "mean", "other", "none")
MEAN_TOKENS = 64  # whose hidden states `mean` replaces by their mean
Hidden = list[Tensor]  # [tokens, hidden] of each tap


@dataclass(frozen=True)
class Ablation(Measure):
    name: ClassVar[str] = "ablation"
    score: ClassVar[str] = "top1"

    prompts: int = 24
    length: int = 768
    continuation: int = 48
    shares: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2)
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        others = [ids[: self.length] for _, ids in (*pieces[1:], pieces[0])]
        return [
            StudyCase(name, ids[: self.length], {"follow": ids[self.length :], "other": other})
            for (name, ids), other in zip(pieces, others, strict=True)
        ]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [f"{draft} {share}" for share in self.shares for draft in DRAFTS]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            exact = held.logits(follow)
        with _every_prompt(subject, self.length):
            other = self._hidden(subject, case.more["other"])
            for share in self.shares:
                setting = Setting(f"share {share}", Prefill("speculative"), share, deepen=False)
                kept = np.zeros(0, dtype=np.int64)
                for draft in DRAFTS[:-1]:
                    with (
                        replaced_hidden(subject, _change(draft, other)),
                        subject.scorer.hold(case.ids, setting, len(follow)) as held,
                    ):
                        logits = held.logits(follow)
                    assert held.report is not None and not held.report.fell_back
                    if draft == DRAFTS[0]:
                        depths = np.concatenate([np.full(n, depth) for depth, n in held.report.depth_runs])
                        kept = np.flatnonzero(depths == subject.layers)
                    if f"{draft} {share}" in wanted:
                        yield f"{draft} {share}", _record(case, exact, logits)
                if f"none {share}" in wanted:
                    dropped = drop_tokens(case.ids, kept, tail=len(case.ids) - held.end)
                    with TokenDropRun(subject.engine.runner, dropped, len(follow)) as run:
                        logits = torch.cat([run.prefill()[None], run.score(follow[:-1])])
                    yield f"none {share}", _record(case, exact, logits)

    def _hidden(self, subject: StudySubject, ids: list[int]) -> Hidden:
        """Hidden states of another text, from its first entry on."""
        pieces: list[Hidden] = []

        def keep(hidden: Hidden, first: int) -> Hidden:
            pieces.append([x.clone() for x in hidden])
            return hidden

        setting = Setting("other", Prefill("speculative"), 0.0, deepen=False)
        with replaced_hidden(subject, keep), subject.scorer.hold(ids, setting, repair=False):
            return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def summary(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for name, cases in found.items():
            draft, share = name.split(" ")
            right = found.get(f"right {share}", {})
            for group in (*dict.fromkeys(r["group"] for r in cases.values()), ""):
                own = {k: r for k, r in cases.items() if group in ("", r["group"]) and k in right}
                if not own:
                    continue
                kls, lost = [r["kl"] for r in own.values()], [r["kl"] - right[k]["kl"] for k, r in own.items()]
                row: Row = {"group": group or "all", "share": float(share), "draft": draft, "prompts": len(own)}
                row |= {
                    "kl": fmean(kls),
                    "top1": fmean(r["top1"] for r in own.values()),
                    "more than right": fmean(lost),
                }
                row["kl low"], row["kl high"] = bootstrap([kls])
                row["more than right low"], row["more than right high"] = bootstrap([lost])
                table.append(row)
        return table

    def figures(self, found: Found) -> list[Figure]:
        return []


def _record(case: StudyCase, exact: Tensor, logits: Tensor) -> Record:
    same = agreement(exact, logits).float().mean()
    return {
        "group": case.id.rpartition(" ")[0],
        "kl": float(divergence(exact, logits).mean()),
        "top1": float(same),
    }


def _change(draft: str, other: Hidden) -> Callable[[Hidden, int], Hidden]:
    def change(hidden: Hidden, first: int) -> Hidden:
        count = len(hidden[0])
        if draft == "shuffled":
            order = torch.from_numpy(np.random.default_rng(first).permutation(count))
            return [x[order] for x in hidden]
        if draft == "mean":
            return [torch.cat([p.mean(0, keepdim=True).expand_as(p) for p in x.split(MEAN_TOKENS)]) for x in hidden]
        if draft == "other":
            return [x[first : first + count].to(h.dtype) for x, h in zip(other, hidden, strict=True)]
        return hidden

    return change


@contextmanager
def replaced_hidden(subject: StudySubject, change: Callable[[Hidden, int], Hidden]) -> Iterator[None]:
    """For as long as it lasts the maps read what `change` makes of the hidden states of entries from `first` on."""
    writer: Any = prefiller_of(subject.engine).source(Prefill("speculative"))._writer  # type: ignore[attr-defined]
    write = writer.write
    writer.write = lambda state, hidden, first, end: write(state, change(hidden, first), first, end)
    try:
        yield
    finally:
        del writer.write


@contextmanager
def _every_prompt(subject: StudySubject, length: int) -> Iterator[None]:
    """Short prompts are drafted too, and no check turns one away."""
    prefiller = prefiller_of(subject.engine)
    policy, thresholds = prefiller.policy, prefiller.profile.thresholds
    prefiller.policy = replace(policy, shortest=min(policy.shortest, length // 2))
    prefiller.profile.thresholds = {}
    try:
        yield
    finally:
        prefiller.policy, prefiller.profile.thresholds = policy, thresholds
