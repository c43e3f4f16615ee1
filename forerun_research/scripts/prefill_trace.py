"""Where the first token of a drafted or an edited prompt spends its time on a GPU: stages, kernels, and gaps in which
none runs.

    python -m forerun_research.scripts.prefill_trace --tokens 8192,16384 [--edited 8192] [--runs 9] [--data DATA]
        [--out TRACE.json]

Exact and drafted prompts of code and essays in turn from cold caches, edited ones (a first line changed, `chunk`) after
their old prompt. Then one of each with a mark at both ends of every stage: when the host is there, and when the device
has done all that was launched before it. Then one of each under torch's profiler, whose own cost makes the host slower:
gaps are upper limits. Needs CUDA and a profile of the pair.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.llm import LLM
from forerun.models.execution.runner import Runner
from forerun.params import Prefill
from forerun.prefill.checks import Checker
from forerun.prefill.maps import KVWriter
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.recompute import RaggedDepthPass
from forerun.prefill.sources.draft import DraftSource
from forerun_research.studies.prefill_score import prefiller_of
from forerun_research.studies.prefill_texts import StudyTexts

STAGES: dict[type, tuple[str, ...]] = {
    Prefiller: ("open", "_read", "_rank", "_plan", "_look", "_recompute", "_check", "close"),
    RaggedDepthPass: ("run", "at_once"),
    KVWriter: ("write",),
    Checker: ("__init__", "scores"),
    Runner: ("tail_attention", "forward"),
    Engine: ("_step", "_append"),
}
MIN_GAP_US = 60.0
MIN_WAIT_US = 100.0
SHOWN_KERNELS = 30
SPECULATIVE, CHUNK = Prefill("speculative", source="draft"), Prefill("speculative", source="chunk")
PROVISIONAL = Prefill("provisional", source="chunk", allow_exact=True)
ANSWER_TOKENS = 16  # of edited prompts, to compare
Case = tuple[list[int] | None, list[int]]  # what was asked before, if anything, and what is asked


class Timeline:
    """Both ends of every stage, on the host and on the device."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float, Any]] = []
        self.on = False

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, time.perf_counter(), event))

    def watch(self) -> None:
        for owner, names in STAGES.items():
            for name in names:
                self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)
        label = f"{owner.__name__}.{name.strip('_')}"

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return plain(*args, **kwargs)
            self.mark(label)
            try:
                return plain(*args, **kwargs)
            finally:
                self.mark(f"/{label}")

        setattr(owner, name, marked)

    @contextmanager
    def taken(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self.marks, self.on = [], True
        self.mark("begin")
        try:
            yield
        finally:
            self.on = False
            torch.cuda.synchronize()

    def rows(self) -> list[tuple[str, float, float]]:
        """(mark, ms on the host, ms on the device), both from the beginning."""
        _, origin, first = self.marks[0]
        return [
            (name, round(1e3 * (at - origin), 2), round(first.elapsed_time(e), 2)) for name, at, e in self.marks[1:]
        ]


def prepare(llm: LLM, case: Case) -> None:
    llm.clear_cache()
    if case[0] is not None:
        llm.generate(case[0], SamplingParams(max_tokens=1))
        torch.cuda.synchronize()


def first_token(llm: LLM, case: Case, prefill: Prefill, tokens: int = 1) -> dict[str, Any]:
    """Of a prompt that was prepared."""
    answer = llm.generate(case[1], SamplingParams(max_tokens=tokens, prefill=prefill))[0]
    usage, report = answer.usage, answer.usage.prefill
    found: dict[str, Any] = {"ms": round(1e3 * usage.ttft_s, 3), "ids": answer.token_ids}
    if usage.provisional:
        found |= {"first_ms": round(1e3 * usage.provisional_s, 3), "shown": usage.provisional}
        found["stood"] = usage.confirmed
    if report is not None:
        names = ("read_s", "recompute_s", "check_s", "recomputed", "rounds", "fell_back", "predicted_kl", "cost")
        found |= {name: getattr(report, name) for name in names}
    return found


def timed(llm: LLM, cases: list[Case], runs: int) -> dict[str, Any]:
    """All ways in turn, and their medians without the first; edited prompts end as exact prefill with the same cache
    does, or not."""
    edited = cases[0][0] is not None
    ways = {"exact": Prefill(), "drafted": PROVISIONAL if edited else SPECULATIVE}
    found: dict[str, list[float]] = defaultdict(list)
    same, last = 0, dict[str, Any]()
    for run in range(runs):
        case, answers = cases[run % len(cases)], {}
        if edited:
            prepare(llm, (None, case[1]))
            found["from nothing"].append(first_token(llm, case, Prefill())["ms"])
        for way, prefill in ways.items():
            prepare(llm, case)
            last = first_token(llm, case, prefill, ANSWER_TOKENS if edited else 1)
            answers[way] = last["ids"]
            found[way].append(last.get("first_ms", last["ms"]))
            if "first_ms" in last:
                found["confirmed"].append(last["ms"])
            if last.get("fell_back"):
                found["fell back"].append(run)
        same += answers["exact"] == answers["drafted"]
    llm.clear_cache()
    medians = {way: round(median(own[1:] or own), 2) for way, own in found.items()}
    return {"medians": medians, "same": same, "runs": runs, "ms": dict(found), "last": last}


def staged(llm: LLM, timeline: Timeline, case: Case, prefill: Prefill) -> dict[str, Any]:
    for _ in range(2):
        prepare(llm, case)
        with timeline.taken():
            found = first_token(llm, case, prefill)
    return {"mode": prefill.mode, "source": prefill.source, **found, "stages": timeline.rows()}


def traced(llm: LLM, case: Case, prefill: Prefill) -> dict[str, Any]:
    for _ in range(2):  # the profiler's own start
        prepare(llm, case)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            about = first_token(llm, case, prefill)
            torch.cuda.synchronize()
    kernels, calls = [], defaultdict[str, list[float]](list)
    waits: list[tuple[float, float, str]] = []
    for event in seen.events():
        span = event.time_range
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append((span.start, span.end, event.name))
        elif event.name.startswith("cu"):
            calls[event.name].append(span.end - span.start)
            if span.end - span.start > MIN_WAIT_US:
                waits.append((span.start, span.end - span.start, event.name))
    kernels.sort()
    by_name = defaultdict[str, list[float]](list)
    for start, end, name in kernels:
        by_name[name[:90]].append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    origin, last, gaps = kernels[0][0] if kernels else 0.0, kernels[0][0] if kernels else 0.0, []
    for start, end, name in kernels:
        if start - last > MIN_GAP_US:
            gaps.append({"at_us": round(last - origin), "us": round(start - last), "then": name[:60]})
        last = max(last, end)
    return {
        "mode": prefill.mode,
        "source": prefill.source,
        "busy_ms": sum(end - start for start, end, _ in kernels) / 1e3,
        "span_ms": (last - origin) / 1e3,
        "gaps": gaps,
        "waits": [{"at_us": round(at - origin), "us": round(us), "call": name} for at, us, name in sorted(waits)],
        "calls": {name: [len(t), round(sum(t) / 1e3, 3)] for name, t in calls.items()},
        "kernels": [{"name": n, "count": len(t), "ms": round(sum(t) / 1e3, 3)} for n, t in most],
        **about,
    }


def plain_cases(texts: StudyTexts, length: int, names: tuple[str, ...]) -> list[Case]:
    """Pieces of these texts in turn."""
    own = [texts.pieces(name, length) for name in names]
    return [(None, piece) for pieces in zip(*own, strict=False) for piece in pieces]


def edited_cases(llm: LLM, texts: StudyTexts, length: int, names: tuple[str, ...]) -> list[Case]:
    """The same with a first line before them that changes."""
    assert llm.tokenizer is not None
    cases: list[Case] = []
    for number, (_, ids) in enumerate(plain_cases(texts, length - 32, names)):
        old, new = (
            llm.tokenizer.encode(f"Turn {n} at 09:{n % 60:02}, checksum {97 * n + 13:05}.\n")
            for n in (number, number + 31)
        )
        cases.append(([*old, *ids], [*new, *ids]))
    return cases


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where the first token of a drafted prompt spends its time.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--tokens", type=_numbers, default=[8192, 16384])
    parser.add_argument("--edited", type=_numbers, default=[], help="lengths of edited prompts")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument(
        "--read-windows", type=_numbers, default=[0], help="of the draft's layers while it reads; 0: none"
    )
    parser.add_argument("--texts", type=lambda text: tuple(text.split(",")), default=("stdlib",))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing more is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    begun, found = time.monotonic(), list[dict[str, Any]]()

    def keep(record: dict[str, Any]) -> None:
        found.append(record | {"at_s": round(time.monotonic() - begun, 1)})
        print(json.dumps({name: value for name, value in found[-1].items() if name in _SHOWN}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(found))

    with LLM(args.model, draft_model=args.draft_model, device=args.device, quiet=True) as llm:
        keep({"opened": True})
        measure(llm, args, keep, lambda: time.monotonic() - begun > args.seconds)
    return 0


def measure(
    llm: LLM, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None], late: Callable[[], bool]
) -> None:
    texts, timeline = StudyTexts(args.data, llm.tokenizer), Timeline()
    timeline.watch()
    source = prefiller_of(llm.engine).source(SPECULATIVE)
    assert isinstance(source, DraftSource)
    plain = {length: plain_cases(texts, length, args.texts) for length in args.tokens}
    edited = {length: edited_cases(llm, texts, length, args.texts) for length in args.edited}
    keep({"texts": True})
    for length, cases in edited.items():
        keep({"edited": length, **timed(llm, cases, args.runs)})
    for length, cases in plain.items():
        for window in args.read_windows:
            source.narrow(window)
            keep({"tokens": length, "window": window, **timed(llm, cases, args.runs)})
        source.narrow(args.read_windows[0])
    for way in (lambda *given: staged(llm, timeline, *given), lambda *given: traced(llm, *given)):
        for length, cases in (*edited.items(), *plain.items()):
            for prefill in (CHUNK,) if cases[0][0] is not None else (SPECULATIVE, Prefill()):
                if not late():
                    keep({"length": length, **way(cases[0], prefill)})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


_SHOWN = ("opened", "texts", "edited", "tokens", "window", "medians", "same", "runs", "at_s", "length", "source", "ms")

if __name__ == "__main__":
    raise SystemExit(main())
