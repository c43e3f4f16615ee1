"""The gate on trial, as requests meet it: does it know which prompts are damaged, does its bound hold, and is there
less damage at equal cost?

The distributions of `agreement`, in a table of their own. A setting with `deepen: false` recomputes the same share of
every prompt and has no gate; beside it the same share with one recomputes as much in the mean over the calibration's
prompts. AUC: of the attention that is left on drafted K/V, for a KL above the median, within one kind of text and over
all of them. `kept`: of the prompts that were drafted, those whose KL is at most the bound that was stated for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import numpy as np

from forerun_research.studies.intervals import auc, bootstrap, wilson
from forerun_research.studies.prefill_agreement import Agreement
from forerun_research.studies.prefill_measure import Found, Record, Row, costs
from forerun_research.studies.study import EXACT


@dataclass(frozen=True)
class GateTrial(Agreement):
    name: ClassVar[str] = "gate-trial"

    prompts: int = 120
    texts: tuple[str, ...] = ("stdlib", "essays", "tables", "logs", "gsm8k_test_half.jsonl", "spec_bench_half.jsonl")

    def summary(self, found: Found) -> list[Row]:
        groups = list(dict.fromkeys(r["group"] for cases in found.values() for r in cases.values()))
        table = []
        for group in [*groups, ""]:
            for name, cases in found.items():
                own = [r for r in cases.values() if group in ("", r["group"])]
                if own and name != EXACT:
                    table.append({"group": group or "all", "setting": name, **_row(own)})
        return table


def _row(records: Sequence[Record]) -> Row:
    kls = [float(r["kl"]) for r in records]
    row: Row = {"prompts": len(records), "kl": fmean(kls)}
    row["kl low"], row["kl high"] = bootstrap([kls])
    row["top1"] = fmean(float(r["top1"]) for r in records)
    row["top1 low"], row["top1 high"] = bootstrap([[float(r["top1"]) for r in records]])
    drafted = [r for r in records if r.get("uncovered") is not None and not r.get("fell_back")]
    if len(drafted) > 1:
        seen, kls = [float(r["uncovered"]) for r in drafted], [float(r["kl"]) for r in drafted]
        unsafe = [float(kl > np.median(kls)) for kl in kls]
        row["auc"] = auc(seen, [bool(u) for u in unsafe])
        row["auc low"], row["auc high"] = bootstrap([seen, unsafe], auc)
    bounded = [r for r in drafted if r.get("kl_bound") is not None]
    if bounded:
        kept = sum(r["kl"] <= r["kl_bound"] for r in bounded)
        row |= {"bounded": len(bounded), "kept": kept / len(bounded), "bound": fmean(r["kl_bound"] for r in bounded)}
        row["kept low"], row["kept high"] = wilson(kept, len(bounded))
        row["covered"] = sum(bool(r["covered"]) for r in bounded)
    return row | costs(records)
