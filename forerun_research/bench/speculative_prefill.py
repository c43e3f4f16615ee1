"""Speculative prefill: time to the first token beside exact prefill of the same process, on the same prompts.

Both take turns on one prompt after the other, each from cold caches; times count everything: the draft, its maps,
checks and recomputing. With random weights only the times mean anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.bench import common
from forerun_research.bench.prompts import read_prompts
from forerun_research.bench.shapes import SHAPES
from forerun_research.bench.sides import Sample, SideProcess

EXACT, SPECULATIVE, PROVISIONAL = "exact", "speculative", "provisional"
SUFFIXES = (".txt", ".md", ".py", ".rst")
ANSWER_TOKENS = 32  # tokens of an answer that begins provisionally
COUNTS = ("tokens", "exact", "drafted", "accepted", "recomputed", "token_layers", "rounds")
TIMES = ("read_s", "recompute_s", "check_s")


@dataclass(frozen=True)
class PrefillBench:
    """What is drafted and how, beside the model."""

    draft_model: str | None = None
    prefill_profile: str | None = None
    budget: float | None = None
    quality: float | None = None
    source: str = "auto"
    provisional: bool = False

    def check(self, setup: common.Setup) -> None:
        if setup.shape is not None and self.prefill_profile is not None:
            raise BadRequest("random weights have a random profile", "leave --prefill-profile or --random-shape out")
        if setup.shape is not None and (self.draft_model is None or self.draft_model not in SHAPES):
            raise BadRequest(
                f"--draft-model is {self.draft_model!r} beside the random shape {setup.shape}",
                f"name the draft's shape, one of {', '.join(SHAPES)}",
            )

    def prefill(self, mode: str) -> Prefill:
        if mode == EXACT:
            return Prefill()
        return Prefill(mode, budget=self.budget, quality=self.quality, source=self.source)


class Documents(common.Prompts):
    """Prompts of running text; `--data` may be a folder of documents, too."""

    def __init__(self, setup: common.Setup) -> None:
        folder = setup.data if setup.data is not None and setup.data.is_dir() else None
        super().__init__(setup if folder is None else replace(setup, data=None))
        if folder is not None and setup.shape is None:
            self._text = self.tokenizer.encode("\n\n".join(_texts(folder)))


def _texts(folder: Path) -> list[str]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    texts = [text for path in files for text in (prompt.text for prompt in read_prompts(path)) if text.strip()]
    if not texts:
        raise BadRequest(f"{folder} has no text file", f"give a folder with {', '.join(SUFFIXES)} files")
    return texts


def run(setup: common.Setup, lengths: list[int], plan: PrefillBench) -> dict[str, Any]:
    plan.check(setup)
    prompts, lengths = Documents(setup), sorted(set(lengths))
    context = lengths[-1] + ANSWER_TOKENS + 1
    prompts.check(context)
    modes = [EXACT, SPECULATIVE, *([PROVISIONAL] if plan.provisional else [])]
    spec = replace(setup.spec("forerun", context, batch=2), draft=plan.draft_model, profile=plan.prefill_profile)
    with ExitStack() as stack:
        ours = stack.enter_context(SideProcess(spec))
        peer = None
        if setup.against != "none":
            peer = stack.enter_context(SideProcess(setup.spec(setup.against, context)))
        found = {str(length): _length(ours, peer, prompts, length, setup.runs, plan, modes) for length in lengths}
        sides = [ours] if peer is None else [ours, peer]
        about = common.side_results(sides, {side.name: {} for side in sides})
    return {
        "bench": "prefill",
        "speculative": True,
        "model": setup.name,
        "draft": plan.draft_model,
        "profile": None if plan.prefill_profile is None else Path(plan.prefill_profile).name,
        "random_weights": setup.shape is not None,
        "budget": plan.budget,
        "quality": plan.quality,
        "source": plan.source,
        "lengths": lengths,
        "runs": setup.runs,
        "figures": found,
        **about,
        "hardware": common.hardware(setup.thread_count()),
    }


def _length(
    ours: SideProcess,
    peer: SideProcess | None,
    prompts: Documents,
    length: int,
    runs: int,
    plan: PrefillBench,
    modes: Sequence[str],
) -> dict[str, Any]:
    """Another piece of text in each run, the same for all sides; the first run is for warmth."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    theirs: list[Sample] = []
    for run in range(runs + 1):
        ids = prompts.cut(length, skip=run * length)
        for mode in modes:
            prefill = plan.prefill(mode)
            asked = ("provisional", ids, prefill, ANSWER_TOKENS) if mode == PROVISIONAL else ("drafted", ids, prefill)
            sample = ours.call(*asked)
            if run:
                samples[mode].append(sample)
        if peer is not None:
            sample = peer.call("prefill", ids)
            theirs += [sample] if run else []
    return figures(samples) | ({peer.name: _ttft(theirs)} if peer is not None else {})


def figures(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Spread of times, what became of the tokens, and how much sooner than exact prefill."""
    exact, drafted = samples[EXACT], samples[SPECULATIVE]
    times = [[sample["ttft_s"] for sample in found] for found in (exact, drafted)]
    found: dict[str, Any] = {
        EXACT: _ttft(exact),
        SPECULATIVE: _ttft(drafted) | _reports([s["report"] for s in drafted if s["report"] is not None]),
        "ratio": round(median(times[0]) / median(times[1]), 3),
        "ratios": common.spread([a / b for a, b in zip(*times, strict=True)]),
    }
    if PROVISIONAL in samples:
        found[PROVISIONAL] = _provisional(samples[PROVISIONAL], median(times[0]))
    return found


def _ttft(samples: Sequence[Sample]) -> dict[str, Any]:
    return {"ttft_s": common.spread([sample["ttft_s"] for sample in samples])}


def _reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not reports:
        return {}
    found: dict[str, Any] = {"cost": common.spread([r["cost"] for r in reports])}
    found |= {name: fmean(r[name] for r in reports) for name in (*COUNTS, *TIMES)}
    found["fell_back"] = sorted({r["fell_back"] for r in reports if r["fell_back"]})
    found["fallbacks"] = sum(bool(r["fell_back"]) for r in reports)
    last = reports[-1]
    return found | {name: last[name] for name in ("source", "chooser", "layers")}


def _provisional(samples: Sequence[Sample], exact_s: float) -> dict[str, Any]:
    """Prompts that were computed exactly at once have no provisional token."""
    having = [s for s in samples if s["provisional_s"] is not None]
    found: dict[str, Any] = {"confirmed_s": common.spread([s["confirmed_s"] for s in samples])}
    if having:
        first = common.spread([s["provisional_s"] for s in having])
        shown = sum(s["shown"] for s in having)
        found |= {"provisional_s": first, "ratio": round(exact_s / first["median"], 3)}
        found["share_confirmed"] = round(sum(s["kept"] for s in having) / max(1, shown), 4)
    return found
