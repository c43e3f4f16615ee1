"""The gate on trial: what is known of a drafted prompt at run time, beside the damage that exact prefill tells.

Each record has the features a gate could use (how much the tail's distributions change under the recomputing that is
done anyway, errors at check spans, the tail's entropy and loss), the damage of every token of the continuation, and
what kind of token that is. Fits nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from forerun.prefill.damage import DamageModel
from forerun.prefill.state import PrefillStage, PrefillState
from forerun_research.studies.intervals import auc, bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import PromptPages, agreement, divergence, figures, prefiller_of
from forerun_research.studies.prefill_signals import checkpoint_signals
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting

OBSERVING = DamageModel(tail_change=0.0, value_error=0.0, margin=0.0, max_kl=1.0)  # compares tails, accepts all
CLASSES = ("digits", "word start", "inside a word", "space and signs")


@dataclass(frozen=True)
class Gate(Measure):
    name: ClassVar[str] = "gate"
    score: ClassVar[str] = "top1"

    prompts: int = 40
    length: int = 768
    continuation: int = 48
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        return [StudyCase(name, ids[: self.length], {"follow": ids[self.length :]}) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [setting.name for setting in settings]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            exact = held.logits(follow)
        for setting in settings:
            if setting.name in wanted:
                with observed(subject, case.ids, setting, len(follow)) as (held, features):
                    logits = held.logits(follow)
                kl = divergence(exact, logits)
                yield (
                    setting.name,
                    {
                        "group": case.id.rpartition(" ")[0],
                        "kl": float(kl.mean()),
                        "top1": float(agreement(exact, logits).float().mean()),
                        "features": features,
                        "ids": case.ids,
                        "tokens": _tokens(subject, follow, exact, kl),
                        **figures(held.report, held.seconds),
                    },
                )

    def summary(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for name, cases in found.items():
            records = list(cases.values())
            for group in (*dict.fromkeys(r["group"] for r in records), ""):
                own = [r for r in records if group in ("", r["group"])]
                kls = [r["kl"] for r in own]
                middle = float(np.median(kls))
                row: Row = {"group": group or "all", "setting": name, "prompts": len(own), "kl": fmean(kls)}
                row["kl low"], row["kl high"] = bootstrap([kls])
                row["top1"] = fmean(r["top1"] for r in own)
                for feature in own[0]["features"]:
                    row[f"AUC {feature}"] = auc([r["features"][feature] for r in own], [kl > middle for kl in kls])
                table.append(row)
        return table

    def figures(self, found: Found) -> list[Figure]:
        return []


@contextmanager
def observed(
    subject: StudySubject, ids: list[int], setting: Setting, room: int
) -> Iterator[tuple[PromptPages, dict[str, float]]]:
    """A prompt drafted with all of its observations and no decision by them."""
    engine = subject.engine
    prefiller = prefiller_of(engine)
    profile, policy = prefiller.profile_of(setting.prefill.source), prefiller.policy
    before = profile.damage, profile.thresholds
    engine.clear_cache()
    pages = array("i", engine.pool.allocate(engine.pool.pages_for(len(ids) + room)))
    try:
        prefiller.policy = replace(policy, shortest=min(policy.shortest, len(ids) // 2))
        with subject.scorer.reading(ids, pages, setting) as state:
            profile.damage, profile.thresholds, state.compares_tail = OBSERVING, {}, True
            while not state.finished:
                prefiller.advance(state, engine.config.max_num_batched_tokens)
            assert state.stage is PrefillStage.DONE, state.report.fell_back
            features = checkpoint_signals(state.report) | _of_tail(state)
        yield PromptPages(engine, ids, pages, state.end, state.report), features
    finally:
        profile.damage, profile.thresholds = before
        prefiller.policy = policy
        engine.pool.release(pages)


def _of_tail(state: PrefillState) -> dict[str, float]:
    """What the last tokens of the prompt make of the K/V: mean entropy, and their loss on the tokens that are there."""
    assert state.tail_logits is not None
    logs = F.log_softmax(state.tail_logits.float(), -1)
    known = state.sent(logs.device)[1 - len(logs) :]
    loss = -logs[:-1].gather(1, known[:, None]).mean()
    return {"tail entropy": float(-(logs.exp() * logs).sum(-1).mean()), "tail loss": float(loss)}


def _tokens(subject: StudySubject, follow: list[int], exact: Tensor, kl: Tensor) -> list[list[Any]]:
    """Of every token: its damage, the entropy of exact prefill's distribution there, and its class."""
    logs = F.log_softmax(exact.float(), -1)
    entropy = -(logs.exp() * logs).sum(-1)
    kinds = [token_class(subject.tokenizer.decode([token])) for token in follow]
    return [[round(float(d), 5), round(float(e), 3), k] for d, e, k in zip(kl, entropy, kinds, strict=True)]


def token_class(text: str) -> str:
    if any(c.isdigit() for c in text):
        return CLASSES[0]
    if any(c.isalpha() for c in text):
        return CLASSES[1] if text[:1].isspace() else CLASSES[2]
    return CLASSES[3]
