"""Which signal tells that drafted K/V is unsafe: the area under the ROC curve of each, against the damage done.

A case is unsafe where the KL of its continuation is above a threshold. `checkpoint ...` is what the checks of prefill
saw, with no knowledge of the truth; `tail ...` compares the tail's way through the target with its way after exact
prefill, `true ...` all K/V with the exact one: what perfect knowledge would be worth. With `spans` prompts are looked
at span by span, too: one span drafted, the rest exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from forerun.core import PrefillReport
from forerun_research.studies.intervals import auc, bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_layers import FIRST_EXACT_TOKENS, relative_error
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase, bars
from forerun_research.studies.prefill_score import PromptPages, agreement, divergence, figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting

COSINES = ("attention", "hidden")  # more is better: they count as 1 - cosine
SPANS = "spans"


class _Look:
    """Keeps what runs through every layer: its input and the attention's output, of the first rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.hidden: list[Tensor] = []
        self.attention: list[Tensor] = []

    def __call__(self, layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
        self.hidden.append(x[: self.rows].float().clone())
        if a is not None:
            self.attention.append(a[: self.rows].float().clone())

    def apart(self, other: _Look) -> dict[str, float]:
        """1 - cosine against another look, mean over layers and rows."""
        return {
            f"tail {name}": 1.0
            - fmean(
                float(F.cosine_similarity(mine, theirs, dim=-1).mean())
                for mine, theirs in zip(getattr(self, name), getattr(other, name), strict=True)
            )
            for name in ("attention", "hidden")
        }


@dataclass(frozen=True)
class Signals(Measure):
    name: ClassVar[str] = "signals"
    score: ClassVar[str] = "top1"

    prompts: int = 40
    length: int = 2048
    continuation: int = 64
    threshold: float = 0.1  # KL above which a prompt is unsafe
    spans: int = 0  # of each prompt that are looked at alone, for the study's first setting
    span: int = 64  # tokens
    span_threshold: float = 0.01
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        return [StudyCase(name, ids[: self.length], {"follow": ids[self.length :]}) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [*(setting.name for setting in settings), *([SPANS] if self.spans else [])]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as exact:
            tail = len(case.ids) - exact.end
            look = _Look(tail)
            truth = _Truth(exact, follow, tail, exact.logits(follow, look), look, subject.layers)
            for setting in settings:
                if setting.name in wanted:
                    with subject.scorer.hold(case.ids, setting, len(follow)) as held:
                        signals = checkpoint_signals(held.report) | truth.errors(
                            held, slice(FIRST_EXACT_TOKENS, exact.end)
                        )
                        yield setting.name, truth.compare(held, signals) | figures(held.report, held.seconds)
            if SPANS in wanted:
                with subject.scorer.hold(case.ids, settings[0], len(follow), repair=False) as held:
                    yield SPANS, {"spans": list(self._spans(truth, held))}

    def _spans(self, truth: _Truth, drafted: PromptPages) -> Iterator[Record]:
        """The damage of single spans, spread over the prompt."""
        starts = np.linspace(FIRST_EXACT_TOKENS, truth.exact.end - self.span, self.spans).astype(int)
        for start in dict.fromkeys(starts.tolist()):
            place = slice(start, start + self.span)
            for i in range(truth.layers):
                for part in (0, 1):
                    truth.exact.replace(i, part, drafted.entry(i, part), place)
            found = truth.compare(truth.exact, truth.errors(drafted, place))
            for i in range(truth.layers):
                for part in (0, 1):
                    truth.exact.replace(i, part, truth.kv[i][part], place)
            yield {"start": start, **found}

    def summary(self, found: Found) -> list[Row]:
        settings = {name: list(cases.values()) for name, cases in found.items() if name != SPANS}
        groups = {**settings, "all": [r for records in settings.values() for r in records]}
        table = [row for name, records in groups.items() for row in _aucs(name, records, self.threshold)]
        spans = [span for r in found.get(SPANS, {}).values() for span in r["spans"]]
        return table + _aucs("single spans", spans, self.span_threshold)

    def figures(self, found: Found) -> list[Figure]:
        table = [row | {"group": row["setting"], "setting": row["signal"]} for row in self.summary(found)]
        return [bars(table, "AUC of signals for unsafe K/V (0.5: tells nothing)", "auc", "auc low", "auc high")]


class _Truth:
    """A prompt after exact prefill, and what another one is compared with."""

    def __init__(
        self, exact: PromptPages, follow: list[int], tail: int, logits: Tensor, look: _Look, layers: int
    ) -> None:
        self.exact, self.follow, self.tail, self.logits, self.look = exact, follow, tail, logits, look
        self.layers = layers
        self.kv = [[exact.entry(i, part) for part in (0, 1)] for i in range(layers)]

    def errors(self, held: PromptPages, place: slice) -> dict[str, float]:
        found = {}
        for part, name in enumerate(("true key", "true value")):
            found[name] = fmean(
                relative_error(held.entry(i, part)[place], self.kv[i][part][place]) for i in range(self.layers)
            )
        return found

    def compare(self, held: PromptPages, signals: dict[str, float]) -> Record:
        """Damage on the continuation. The KL of its first token is a signal: it is what the tail can tell."""
        look = _Look(self.tail)
        logits = held.logits(self.follow, look)
        kl = divergence(self.logits, logits)
        signals = signals | look.apart(self.look) | {"tail kl": float(kl[0])}
        after = kl[1:] if len(kl) > 1 else kl
        return {
            "kl": float(after.mean()),
            "top1": float(agreement(self.logits, logits).float().mean()),
            "signals": signals,
        }


def checkpoint_signals(report: PrefillReport | None) -> dict[str, float]:
    """What the checks saw, mean over the layers that were drafted; larger is worse."""
    if report is None or report.fell_back:
        return {}
    found = {}
    for signal, layers in report.scores.items():
        value = float(np.mean(layers[1:] if len(layers) > 1 else layers))
        found[f"checkpoint {signal}"] = 1.0 - value if signal in COSINES else value
    return found


def _aucs(name: str, records: Sequence[dict[str, Any]], threshold: float) -> list[Row]:
    table: list[Row] = []
    for signal in dict.fromkeys(s for r in records for s in r["signals"]):
        own = [r for r in records if signal in r["signals"]]
        values, unsafe = [r["signals"][signal] for r in own], [r["kl"] > threshold for r in own]
        low, high = bootstrap([values, [float(u) for u in unsafe]], auc)
        table.append(
            {
                "setting": name,
                "signal": signal,
                "cases": len(own),
                "unsafe": sum(unsafe),
                "auc": auc(values, unsafe),
                "auc low": low,
                "auc high": high,
            }
        )
    return table
