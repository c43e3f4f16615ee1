"""Where drafted K/V does its damage: KL to exact prefill token by token, binned by what kind of token comes next.

Bins of every token of a continuation: its class (digits, words, signs), how far back it was last seen in the prompt,
how often it stands there, how sure exact prefill is of what comes (entropy), and its place in the continuation. A row
has the mean KL of a bin, an interval over prompts, and the bin's share of all tokens and of all damage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch.nn.functional as F

from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure
from forerun_research.studies.prefill_agreement import Agreement
from forerun_research.studies.prefill_drop import holding
from forerun_research.studies.prefill_gate import token_class
from forerun_research.studies.prefill_measure import Found, Record, Row, StudyCase
from forerun_research.studies.prefill_score import agreement, divergence, figures
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import EXACT, Setting

NEVER = -1  # a distance: not in the prompt
Token = dict[str, Any]


def _upto(value: float, edges: Sequence[float], unit: str = "") -> str:
    edge = next((edge for edge in edges if value <= edge), None)
    return f"above {edges[-1]:g}{unit}" if edge is None else f"up to {edge:g}{unit}"


BINS: dict[str, Callable[[Token], str]] = {
    "class": lambda token: str(token["class"]),
    "distance": lambda t: "not before" if t["distance"] == NEVER else _upto(t["distance"], (64, 512, 1024, 2048)),
    "in the prompt": lambda token: _upto(token["count"], (0, 1, 4, 16), " times"),
    "entropy": lambda token: _upto(token["entropy"], (0.1, 0.5, 1.0, 2.0)),
    "place": lambda token: _upto(token["place"] + 1, (4, 16, 32, 64)),
}


@dataclass(frozen=True)
class FailureBins(Agreement):
    name: ClassVar[str] = "failure-bins"

    prompts: int = 96
    texts: tuple[str, ...] = ("stdlib", "essays", "tables", "logs", "gsm8k_test_half.jsonl", "spec_bench_half.jsonl")

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [setting.name for setting in settings]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        follow: list[int] = case.more["follow"]
        with subject.scorer.hold(case.ids, None, len(follow)) as held:
            exact = held.logits(follow)
        logs = F.log_softmax(exact.float(), -1)
        entropy = (-(logs.exp() * logs).sum(-1)).tolist()
        about = seen_tokens(case.ids, follow, subject.tokenizer.decode)
        for setting in settings:
            if setting.name not in wanted:
                continue
            with holding(subject.scorer, case.ids, setting, len(follow)) as drafted:
                logits = drafted.logits(follow)
            kl, same = divergence(exact, logits).tolist(), agreement(exact, logits).tolist()
            rows = zip(about, kl, same, entropy, strict=True)
            tokens = [t | {"kl": round(k, 5), "same": bool(s), "entropy": round(e, 4)} for t, k, s, e in rows]
            whole = {"kl": fmean(kl), "top1": fmean(map(float, same)), "tokens": tokens}
            yield (
                setting.name,
                {"group": case.id.rpartition(" ")[0], **whole, **figures(drafted.report, drafted.seconds)},
            )

    def summary(self, found: Found) -> list[Row]:
        table = []
        for name, cases in found.items():
            if name != EXACT:
                prompts = [record["tokens"] for record in cases.values()]
                table += [row for kind in BINS for row in _binned(name, kind, prompts)]
        return table

    def figures(self, found: Found) -> list[Figure]:
        return []


def seen_tokens(prompt: Sequence[int], follow: Sequence[int], decode: Callable[[list[int]], str]) -> list[Token]:
    """Of every token that follows: its class, how often the prompt has it, and how far back it was last seen there."""
    counts, last = Counter(prompt), {token: at for at, token in enumerate(prompt)}
    found = []
    for place, token in enumerate(follow):
        distance = len(prompt) + place - last[token] if token in last else NEVER
        found.append(
            {"class": token_class(decode([token])), "count": counts[token], "distance": distance, "place": place}
        )
    return found


def _binned(setting: str, kind: str, prompts: Sequence[Sequence[Token]]) -> list[Row]:
    every = [token for tokens in prompts for token in tokens]
    damage = sum(token["kl"] for token in every) or 1.0
    bins: dict[str, list[list[Token]]] = {}
    for tokens in prompts:
        own: dict[str, list[Token]] = {}
        for token in tokens:
            own.setdefault(BINS[kind](token), []).append(token)
        for label, some in own.items():
            bins.setdefault(label, []).append(some)
    table = []
    for label, groups in bins.items():
        some = [token for group in groups for token in group]
        kl = sum(token["kl"] for token in some)
        sums, sizes = [sum(t["kl"] for t in group) for group in groups], [float(len(group)) for group in groups]
        row: Row = {"group": kind, "bin": label, "setting": setting, "tokens": len(some), "kl": kl / len(some)}
        row["kl low"], row["kl high"] = bootstrap([sums, sizes], lambda a, b: float(a.sum() / b.sum()))
        row |= {"top1": fmean(float(t["same"]) for t in some), "of tokens": len(some) / len(every)}
        table.append(row | {"of damage": kl / damage})
    return sorted(table, key=lambda row: -row["of damage"])
