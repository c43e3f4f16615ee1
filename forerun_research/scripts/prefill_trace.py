"""Where the first token of a drafted prompt spends its time on a GPU: kernels by stage, and gaps in which none runs.

    python -m forerun_research.scripts.prefill_trace --tokens 8192,16384 [--runs 9] [--out TRACE.json]

Exact and drafted prompts of code in turn from cold caches, then one of each under torch's profiler, whose own cost
makes the host slower: gaps are upper limits. A stage's kernels are those that start while it runs or are its last
launches, so that stages overlap by what the device is behind. Needs CUDA and a profile of the pair.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from forerun.core import SamplingParams
from forerun.llm import LLM
from forerun.params import Prefill
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.sources.draft import DraftSource
from forerun_research.studies.prefill_score import prefiller_of
from forerun_research.studies.prefill_texts import StudyTexts

STAGES = ("open", "_read", "_plan", "_recompute", "_check", "close")
STAGE, WHOLE = "stage ", "first token"  # marks in a trace
MIN_GAP_US = 60.0
SHOWN_KERNELS = 24


def mark_stages() -> None:
    """Let the profiler see the prefiller's stages."""
    for name in STAGES:
        plain: Callable[..., Any] = getattr(Prefiller, name)

        def marked(self: Prefiller, *args: Any, _plain: Callable[..., Any] = plain, _name: str = name) -> Any:
            with record_function(f"{STAGE}{_name}"):
                return _plain(self, *args)

        setattr(Prefiller, name, marked)


def first_token(llm: LLM, ids: list[int], mode: str) -> tuple[float, dict[str, Any]]:
    llm.clear_cache()
    usage = llm.generate(ids, SamplingParams(max_tokens=1, prefill=mode))[0].usage
    llm.clear_cache()
    report = usage.prefill
    about = (
        {} if report is None else {n: getattr(report, n) for n in ("read_s", "recompute_s", "check_s", "recomputed")}
    )
    return usage.ttft_s, about | ({} if report is None else {"fell_back": report.fell_back})


def traced(llm: LLM, ids: list[int], mode: str) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function(WHOLE):
            seconds, about = first_token(llm, ids, mode)
        torch.cuda.synchronize()
    kernels, stages = [], []
    for event in seen.events():
        span = event.time_range
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith((STAGE, WHOLE)):
            kernels.append((span.start, span.end, event.name))
        elif event.name.startswith(STAGE):
            stages.append((span.start, span.end, event.name.removeprefix(STAGE)))
    kernels.sort()
    by_name: dict[str, list[float]] = defaultdict(list)
    for start, end, name in kernels:
        by_name[name[:90]].append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    origin, last, gaps = kernels[0][0] if kernels else 0.0, kernels[0][0] if kernels else 0.0, []
    for start, end, name in kernels:
        if start - last > MIN_GAP_US:
            gaps.append({"at_us": round(last - origin), "us": round(start - last), "then": name[:60]})
        last = max(last, end)
    return {
        "mode": mode,
        "ttft_ms": 1e3 * seconds,
        "busy_ms": sum(end - start for start, end, _ in kernels) / 1e3,
        "span_ms": (last - origin) / 1e3,
        "stages": [{"stage": n, "at_us": round(a - origin), "us": round(b - a)} for a, b, n in sorted(stages)],
        "gaps": gaps,
        "kernels": [{"name": n, "count": len(t), "ms": round(sum(t) / 1e3, 3)} for n, t in most],
        **about,
    }


def timed(llm: LLM, texts: list[list[int]], runs: int) -> dict[str, Any]:
    """Exact and drafted prompts in turn; medians without the first."""
    times: dict[str, list[float]] = {"exact": [], "speculative": []}
    about: dict[str, Any] = {}
    for run in range(runs):
        for mode, own in times.items():
            seconds, about = first_token(llm, texts[run % len(texts)], mode)
            own.append(round(1e3 * seconds, 3))
    return {mode: round(median(own[1:] or own), 2) for mode, own in times.items()} | {"ms": times, "last": about}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where the first token of a drafted prompt spends its time.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--tokens", default="8192,16384")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--read-windows", default="0", help="of the draft's layers while it reads; 0: none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    found, begun = [], time.monotonic()
    with LLM(args.model, draft_model=args.draft_model, device=args.device, quiet=True) as llm:
        print(f"open after {time.monotonic() - begun:.1f} s", flush=True)
        pieces = {n: StudyTexts(None, llm.tokenizer).pieces("stdlib", n) for n in map(int, args.tokens.split(","))}
        source = prefiller_of(llm.engine).source(Prefill("speculative", source="draft"))
        assert isinstance(source, DraftSource)
        for window in map(int, args.read_windows.split(",")):
            source.narrow(window)
            for length, texts in pieces.items():
                found.append({"tokens": length, "window": window, **timed(llm, texts, args.runs)})
                print(found[-1], flush=True)
        source.narrow(0)
        mark_stages()
        for length, texts in pieces.items():
            for mode in ("speculative", "exact"):
                traced(llm, texts[0], mode)  # the profiler's own start
                found.append({"tokens": length, **traced(llm, texts[0], mode)})
                print(json.dumps(found[-1]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
