"""Which layers tolerate approximation: the drafted K, or V, of one layer alone among exact K/V, and the damage it does.

`key 5`: only layer 5's K is drafted, for all of the prompt but its first tokens and its tail; `above 5`: K and V of
layer 5 and all layers above it. Drafted as the source reads it, without any repair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from torch import Tensor

from forerun.errors import BadRequest
from forerun_research.studies.intervals import bootstrap
from forerun_research.studies.plots import Figure, Line
from forerun_research.studies.prefill_measure import Found, Measure, Record, Row, StudyCase
from forerun_research.studies.prefill_score import agreement, divergence
from forerun_research.studies.prefill_subject import StudySubject
from forerun_research.studies.study import Setting

PARTS = ("key", "value", "both", "above")
FIRST_EXACT_TOKENS = 16  # tokens that are never drafted


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((found.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-9))


@dataclass(frozen=True)
class Layers(Measure):
    name: ClassVar[str] = "layers"
    score: ClassVar[str] = "top1"

    prompts: int = 8
    length: int = 2048
    continuation: int = 64
    parts: tuple[str, ...] = PARTS
    setting: str = ""  # whose source drafts; the study's first setting
    texts: tuple[str, ...] = ("stdlib", "essays")
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.parts) - set(PARTS))
        if unknown:
            raise ValueError(f"parts has {', '.join(unknown)}; known are {', '.join(PARTS)}")

    def cases(self, subject: StudySubject) -> list[StudyCase]:
        pieces = subject.texts.mixed(self.texts, self.length + self.continuation, self.prompts, self.seed)
        return [StudyCase(name, ids[: self.length], {"follow": ids[self.length :]}) for name, ids in pieces]

    def conditions(self, settings: Sequence[Setting], layers: int) -> list[str]:
        return [f"{part} {layer}" for part in self.parts for layer in range(layers)]

    def run(
        self, subject: StudySubject, case: StudyCase, settings: Sequence[Setting], wanted: Sequence[str], done: Found
    ) -> Iterator[tuple[str, Record]]:
        setting, follow = chosen(settings, self.setting), case.more["follow"]
        with (
            subject.scorer.hold(case.ids, None, len(follow)) as exact,
            subject.scorer.hold(case.ids, setting, len(follow), repair=False) as drafted,
        ):
            reference = exact.logits(follow)
            true = [[exact.entry(i, part) for part in (0, 1)] for i in range(subject.layers)]
            guess = [[drafted.entry(i, part) for part in (0, 1)] for i in range(subject.layers)]
            end = min(exact.end, drafted.end)
            place = slice(FIRST_EXACT_TOKENS, end)
            for name in wanted:
                which, at = name.split(" ")
                layers = range(int(at), subject.layers) if which == "above" else range(int(at), int(at) + 1)
                parts = {"key": (0,), "value": (1,)}.get(which, (0, 1))
                for i in layers:
                    for part in parts:
                        exact.replace(i, part, guess[i][part], place)
                logits = exact.logits(follow)
                for i in layers:
                    for part in parts:
                        exact.replace(i, part, true[i][part], place)
                error = fmean(
                    relative_error(guess[i][part][place], true[i][part][place]) for i in layers for part in parts
                )
                yield (
                    name,
                    {
                        "part": which,
                        "layer": int(at),
                        "error": error,
                        "kl": float(divergence(reference, logits).mean()),
                        "top1": float(agreement(reference, logits).float().mean()),
                    },
                )

    def summary(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for name, cases in found.items():
            part, layer = name.split(" ")
            row: Row = {"part": part, "layer": int(layer), "prompts": len(cases)}
            for key in ("error", "kl", "top1"):
                row[key] = fmean(r[key] for r in cases.values())
            row["kl low"], row["kl high"] = bootstrap([[r["kl"] for r in cases.values()]])
            table.append(row)
        return table

    def figures(self, found: Found) -> list[Figure]:
        table = self.summary(found)
        return [
            Figure(title, "layer", key, [_line(table, part, key) for part in self.parts], log_y=key == "kl")
            for key, title in (
                ("kl", "damage: KL where only this layer is drafted"),
                ("error", "error of the draft, by layer"),
            )
        ]


def _line(table: Sequence[Row], part: str, key: str) -> Line:
    own = sorted((row for row in table if row["part"] == part), key=lambda row: row["layer"])
    low, high = ([row[f"{key} {end}"] for row in own] if key == "kl" else [] for end in ("low", "high"))
    return Line(part, [row["layer"] for row in own], [row[key] for row in own], low, high)


def chosen(settings: Sequence[Setting], name: str) -> Setting:
    """The setting of that name, or the first."""
    for setting in settings:
        if name in ("", setting.name):
            return setting
    raise BadRequest(f"the study has no setting {name!r}", "list it under `settings`")
