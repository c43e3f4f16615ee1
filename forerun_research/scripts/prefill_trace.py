"""Where the first token of a drafted or an edited prompt spends its time on a GPU: stages, kernels, and gaps in which
none runs.

    python -m forerun_research.scripts.prefill_trace --tokens 8192,16384 [--edited 8192] [--fresh 3] [--runs 9]
        [--models FOLDER] [--data DATA] [--out TRACE.json]

Exact and drafted prompts of code and essays in turn from cold caches, edited ones (a first line changed, `chunk`,
provisional) after their old prompt, beside exact prefill of them from nothing and behind what prefix caching keeps.
`--fresh`: so many lengths that no prompt had before, each asked twice. Then one of each with a mark at both ends of
every stage: when the host is there, and when the device has done all that was launched before it. Then one of each
under torch's profiler, whose own cost makes the host slower: gaps are upper limits. Before all of these the first
prompt of the process, with marks. `--kernels`: single kernels that were or could be used, by themselves
(`prefill_kernels`). Prints tables, writes all of it to --out. Needs CUDA and a profile of the pair.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.scheduler import Scheduler
from forerun.llm import LLM
from forerun.models.execution.runner import Runner
from forerun.params import Prefill
from forerun.prefill.checks import Checker
from forerun.prefill.maps import KVWriter
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.recompute import RaggedDepthPass
from forerun.prefill.sources.chunk import ChunkSource
from forerun.prefill.sources.draft import WIDE_LAYERS, DraftSource
from forerun_research.studies.prefill_score import EveryPromptPays, PromptScorer, divergence, prefiller_of
from forerun_research.studies.prefill_texts import StudyTexts
from forerun_research.studies.study import Setting

STAGES: dict[type, tuple[str, ...]] = {
    Prefiller: ("open", "_read", "_rank", "_plan", "_look", "_recompute", "_check", "close"),
    RaggedDepthPass: ("run", "at_once"),
    DraftSource: ("_run",),
    ChunkSource: ("open", "_copy"),
    KVWriter: ("write",),
    Checker: ("__init__", "scores"),
    Runner: ("tail_attention", "recompute", "forward"),
    Scheduler: ("_admit", "schedule"),
    Engine: ("process_inbox", "_step", "_append"),
}
MIN_GAP_US = 60.0
MIN_WAIT_US = 100.0
SHOWN_KERNELS, PRINTED_KERNELS = 30, 9
SPECULATIVE, CHUNK = Prefill("speculative", source="draft"), Prefill("speculative", source="chunk")
PROVISIONAL = Prefill("provisional", source="chunk", allow_exact=True)
HEADER, HEADER_TOKENS = "You are given a file of a project, and answer questions about what it does and how.\n", 56
FOLLOWING_TOKENS = 64  # of a prompt, to judge by
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

    def table(self) -> list[str]:
        """A line for each stage: when it begins and how long it takes, on the host and on the device."""
        rows, open_rows, lines = self.rows(), list[int](), list[str]()
        for number, (name, host, device) in enumerate(rows):
            if not name.startswith("/"):
                open_rows.append(number)
                lines.append("")
                continue
            first = open_rows.pop()
            _, host0, device0 = rows[first]
            line = sum(not other.startswith("/") for other, _, _ in rows[:first])
            label = "  " * len(open_rows) + name[1:]
            lines[line] = f"{host0:7.2f} +{host - host0:6.2f}   {device0:7.2f} +{device - device0:6.2f}  {label}"
        return ["   host              device", *(line for line in lines if line)]


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
    names = {"exact": "prefix caching"} if edited else {}
    found: dict[str, list[float]] = defaultdict(list)
    same, same_cold, last = 0, 0, dict[str, Any]()
    for run in range(runs):
        case, answers = cases[run % len(cases)], {}
        if edited:
            prepare(llm, (None, case[1]))
            last = first_token(llm, case, Prefill(), ANSWER_TOKENS)
            answers["from nothing"] = last["ids"]
            found["exact"].append(last["ms"])
        for way, prefill in ways.items():
            prepare(llm, case)
            last = first_token(llm, case, prefill, ANSWER_TOKENS if edited else 1)
            answers[way] = last["ids"]
            found[names.get(way, way)].append(last.get("first_ms", last["ms"]))
            if "first_ms" in last:
                found["confirmed"].append(last["ms"])
                found["shown"].append(last["shown"])
                found["stood"].append(last["stood"])
            if last.get("fell_back"):
                found["fell back"].append(run)
        same += answers["exact"] == answers["drafted"]
        same_cold += answers["drafted"] == answers.get("from nothing")
    llm.clear_cache()
    medians = {way: round(median(own[1:] or own), 2) for way, own in found.items()}
    return {
        "medians": medians,
        "same": same,
        "same as from nothing": same_cold,
        "runs": runs,
        "ms": dict(found),
        "last": last,
    }


def fresh_lengths(llm: LLM, cases: list[Case], count: int) -> dict[str, Any]:
    """First tokens of lengths that no prompt had before, exact and drafted, the first and the second time."""
    found = []
    for number in range(count):
        ids = cases[number % len(cases)][1]
        ids = ids[: len(ids) - 100 - 37 * number]
        times: dict[str, Any] = {"tokens": len(ids)}
        for way, prefill in (("exact", Prefill()), ("drafted", SPECULATIVE)):
            times[way] = []
            for _ in range(2):
                prepare(llm, (None, ids))
                times[way].append(first_token(llm, (None, ids), prefill)["ms"])
        found.append(times)
    return {"fresh lengths": found}


def judged(llm: LLM, texts: StudyTexts, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """KL to exact prefill of the tokens that follow prompts, with each window."""
    scorer, setting = PromptScorer(llm.engine), Setting("drafted", SPECULATIVE)
    source = prefiller_of(llm.engine).source(SPECULATIVE)
    assert isinstance(source, DraftSource)
    found: dict[str, list[float]] = defaultdict(list)
    count = min(args.judged, sum(len(texts.pieces(name, length, 1)) for name in args.texts))
    for _, ids in texts.mixed(args.texts, length, count, seed=1):
        prompt, follow = ids[:-FOLLOWING_TOKENS], ids[-FOLLOWING_TOKENS:]
        with scorer.hold(prompt, None, FOLLOWING_TOKENS) as held:
            reference = held.logits(follow)
        for window in args.read_windows:
            source.narrow(*window)
            with scorer.hold(prompt, setting, FOLLOWING_TOKENS) as held:
                found[str(window)].append(round(float(divergence(reference, held.logits(follow)).mean()), 5))
    source.narrow(*args.read_windows[0])
    return {"kl": {window: round(fmean(own), 5) for window, own in found.items()}, "each": dict(found)}


def staged(llm: LLM, timeline: Timeline, case: Case, prefill: Prefill, warm: int = 1) -> dict[str, Any]:
    for _ in range(warm + 1):
        prepare(llm, case)
        with timeline.taken():
            found = first_token(llm, case, prefill)
    about = {"mode": prefill.mode, "source": prefill.source, **found}
    return {**about, "stages": timeline.rows(), "table": timeline.table()}


def traced(llm: LLM, case: Case, prefill: Prefill) -> dict[str, Any]:
    for _ in range(2):  # the profiler's own start
        prepare(llm, case)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            about = first_token(llm, case, prefill)
            torch.cuda.synchronize()
    ran, calls = [], defaultdict[str, list[float]](list)
    waits: list[tuple[float, float, str]] = []
    for event in seen.events():
        span = event.time_range
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ran.append((span.start, span.end, event.name))
        elif event.name.startswith("cu"):
            calls[event.name].append(span.end - span.start)
            if span.end - span.start > MIN_WAIT_US:
                waits.append((span.start, span.end - span.start, event.name))
    ran.sort()
    by_name = defaultdict[str, list[float]](list)
    for start, end, name in ran:
        by_name[name[:90]].append(end - start)
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN_KERNELS]
    origin, last, gaps = ran[0][0] if ran else 0.0, ran[0][0] if ran else 0.0, []
    for start, end, name in ran:
        if start - last > MIN_GAP_US:
            gaps.append({"at_us": round(last - origin), "us": round(start - last), "then": name[:60]})
        last = max(last, end)
    return {
        "mode": prefill.mode,
        "source": prefill.source,
        "busy_ms": sum(end - start for start, end, _ in ran) / 1e3,
        "span_ms": (last - origin) / 1e3,
        "gaps": gaps,
        "waits": [{"at_us": round(at - origin), "us": round(us), "call": name} for at, us, name in sorted(waits)],
        "launches": sum(len(t) for name, t in calls.items() if "Launch" in name),
        "syncs": sum(len(t) for name, t in calls.items() if "Synchronize" in name),
        "copies": sum(len(t) for name, t in calls.items() if "Memcpy" in name),
        "calls": {name: [len(t), round(sum(t) / 1e3, 3)] for name, t in calls.items()},
        "kernels": [{"name": n, "count": len(t), "ms": round(sum(t) / 1e3, 3)} for n, t in most],
        **about,
    }


def plain_cases(texts: StudyTexts, length: int, names: tuple[str, ...]) -> list[Case]:
    """Pieces of these texts in turn."""
    own = [texts.pieces(name, length) for name in names]
    return [(None, piece) for pieces in zip(*own, strict=False) for piece in pieces]


def edited_cases(llm: LLM, texts: StudyTexts, length: int, names: tuple[str, ...]) -> list[Case]:
    """The same with a line before them that changes, behind one that stays: a page is shared."""
    assert llm.tokenizer is not None
    cases: list[Case] = []
    for number, (_, ids) in enumerate(plain_cases(texts, length - HEADER_TOKENS, names)):
        old, new = (
            llm.tokenizer.encode(f"{HEADER}Turn {n} at 09:{n % 60:02}, checksum {97 * n + 13:05}.\n")
            for n in (number, number + 31)
        )
        cases.append(([*old, *ids], [*new, *ids]))
    return cases


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where the first token of a drafted prompt spends its time.")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--models", type=Path, help="a folder with the GGUF files of both, by these names")
    parser.add_argument("--tokens", type=_numbers, default=[8192, 16384])
    parser.add_argument("--edited", type=_numbers, default=[], help="lengths of edited prompts")
    parser.add_argument("--edited-runs", type=int, default=4)
    parser.add_argument("--fresh", type=int, default=0, help="lengths that no prompt had before")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--kernels", action="store_true", help="single kernels, too")
    parser.add_argument(
        "--read-windows", type=_windows, default=[(0, WIDE_LAYERS)],
        help="of the draft's layers while it reads, and how many of the lowest have none: 0,2048,2048:8; 0: none",
    )  # fmt: skip
    parser.add_argument("--judged", type=int, default=0, help="prompts of each length: KL with each of these windows")
    parser.add_argument("--texts", type=lambda text: tuple(text.split(",")), default=("stdlib",))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing more is begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    begun, found = time.monotonic(), list[dict[str, Any]]()

    def keep(record: dict[str, Any]) -> None:
        found.append(record | {"at_s": round(time.monotonic() - begun, 1)})
        show(found[-1])
        if args.out is not None:
            args.out.write_text(json.dumps(found))

    model, draft = (found_model(args.models, name) for name in (args.model, args.draft_model))
    with LLM(model, draft_model=draft, device=args.device, quiet=True) as llm:
        keep({"opened": True})
        measure(llm, args, keep, lambda: time.monotonic() - begun > args.seconds)
    return 0


def found_model(folder: Path | None, name: str) -> str:
    files = [] if folder is None else sorted(folder.glob(f"{name}*.gguf"))
    return str(files[0]) if files else name


def measure(
    llm: LLM, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None], late: Callable[[], bool]
) -> None:
    texts, timeline = StudyTexts(args.data, llm.tokenizer), Timeline()
    plain = {length: plain_cases(texts, length, args.texts) for length in args.tokens}
    edited = {length: edited_cases(llm, texts, length, args.texts) for length in args.edited}
    keep({"texts": True})
    timeline.watch()
    for length, cases in list(plain.items())[:1]:
        for prefill in (SPECULATIVE, Prefill()):
            keep({"first of the process": length, **staged(llm, timeline, cases[0], prefill, warm=0)})
    prefiller = prefiller_of(llm.engine)
    source = prefiller.source(SPECULATIVE)
    assert isinstance(source, DraftSource)
    for length, cases in plain.items():
        for window in args.read_windows:
            source.narrow(*window)
            keep({"tokens": length, "window": window, **timed(llm, cases, args.runs)})
        source.narrow(*args.read_windows[0])
    forecast, prefiller.forecast = prefiller.forecast, EveryPromptPays(llm.decoder.device.type)
    for length, cases in edited.items():
        keep({"edited": length, **timed(llm, cases, args.edited_runs)})
    for length, cases in (*edited.items(), *plain.items()):
        for prefill in (PROVISIONAL,) if cases[0][0] is not None else (SPECULATIVE,):
            if not late():
                keep({"length": length, **staged(llm, timeline, cases[0], prefill)})
    for length in args.tokens if args.judged else ():
        if not late():
            keep({"tokens": length, **judged(llm, texts, length, args)})
    if args.fresh and not late():
        keep(fresh_lengths(llm, next(iter(plain.values())), args.fresh))
    for length, cases in (*edited.items(), *plain.items()):
        for prefill in (CHUNK,) if cases[0][0] is not None else (SPECULATIVE,):
            if not late():
                keep({"length": length, **traced(llm, cases[0], prefill)})
    prefiller.forecast = forecast
    if args.kernels and not late():
        from forerun_research.scripts.prefill_kernels import kernels

        llm.clear_cache()
        keep({"kernels alone": kernels(llm.engine.runner)})


def _windows(text: str) -> list[tuple[int, int]]:
    given = [part.partition(":") for part in text.split(",")]
    return [(int(window), int(wide or WIDE_LAYERS)) for window, _, wide in given]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def show(record: dict[str, Any]) -> None:
    """A line, the stages below it, and the kernels that take longest."""
    print(json.dumps({name: value for name, value in record.items() if name in _SHOWN}), flush=True)
    for line in record.get("table", ()):
        print(f"    {line}")
    if kernels_seen := record.get("kernels"):
        for kernel in kernels_seen[:PRINTED_KERNELS]:
            print(f"    {kernel['ms']:7.3f} ms {kernel['count']:5d} x {kernel['name'][:60]}")
        print("    gaps", [(gap["at_us"], gap["us"]) for gap in record["gaps"][:12]], flush=True)


_SHOWN = (
    *(
        "opened",
        "texts",
        "edited",
        "tokens",
        "window",
        "medians",
        "same",
        "same as from nothing",
        "runs",
        "at_s",
        "length",
        "source",
        "ms",
    ),
    *("first of the process", "fresh lengths", "kernels alone", "first_ms", "fell_back", "launches", "syncs", "copies"),
    *("kl", "busy_ms", "span_ms", "recomputed", "rounds", "predicted_kl", "read_s", "recompute_s", "check_s"),
)

if __name__ == "__main__":
    raise SystemExit(main())
