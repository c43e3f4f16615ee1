"""One changed line: a long prompt met before comes again with a line changed or inserted.

Beside each other: exact prefill from cold caches; exact prefill after the old prompt, where a prefix cache reads what
precedes the change; a provisional answer whose draft is the old prompt's K/V, moved to its new place; and, with
`restart`, the same after the process has ended and begun again on its disk tier. Final answers are compared.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from rich.table import Table

from forerun.errors import BadRequest
from forerun.params import Prefill
from forerun_research.bench import common
from forerun_research.bench.sides import Sample, SideProcess, SideSpec
from forerun_research.bench.speculative_prefill import Documents

EDITS = ("top", "middle", "inserted")
ANSWER_TOKENS = 32
CHUNK = Prefill("provisional", source="chunk", allow_exact=True)
WAYS = {
    "exact": "exact, nothing cached",
    "cached": "exact, prefix cache",
    "provisional": "provisional from the old prompt",
    "restarted": "the same after a restart",
}


def edit(kind: str, document: list[int], lines: list[list[int]]) -> tuple[list[int], list[int]]:
    """A prompt and the same with one line changed: both begin with a line of their own, or one is put in later."""
    old, new = lines
    if kind == "top":
        return old + document, new + document
    half = len(document) // 2
    before, after = document[:half], document[half:]
    return before + (old if kind == "middle" else []) + after, before + new + after


def run(setup: common.Setup, lengths: list[int], kinds: list[str], restart: bool) -> dict[str, Any]:
    for kind in kinds:
        if kind not in EDITS:
            raise BadRequest(f"--edited is {kind!r}", f"use one of {', '.join(EDITS)}")
    if setup.shape is not None:
        raise BadRequest("--edited with --random-shape", "name a model: random weights answer nothing")
    prompts, lengths = Documents(setup), sorted(set(lengths))
    context = lengths[-1] + ANSWER_TOKENS + 1
    prompts.check(context)
    spec = setup.spec("forerun", context, batch=4)
    found: dict[str, Any] = {}
    for length in lengths:
        for kind in kinds:
            cases = [_case(prompts, kind, length, run) for run in range(setup.runs)]
            found[f"{length} {kind}"] = figures(_samples(spec, cases, restart))
    return {
        "bench": "prefill",
        "edited": kinds,
        "model": setup.name,
        "lengths": lengths,
        "runs": setup.runs,
        "figures": found,
        "hardware": common.hardware(setup.thread_count()),
    }


def _case(prompts: Documents, kind: str, length: int, run: int) -> tuple[list[int], list[int]]:
    lines = [prompts.tokenizer.encode(f"Turn {n} at 09:{n:02}, checksum {97 * n + 13:05}.\n") for n in (run, run + 31)]
    document = prompts.cut(length - max(map(len, lines)), skip=run * length)
    return edit(kind, document, lines)


def _samples(spec: SideSpec, cases: list[tuple[list[int], list[int]]], restart: bool) -> list[dict[str, Sample]]:
    samples: list[dict[str, Sample]] = []
    with SideProcess(spec) as side:
        side.call("provisional", cases[0][0][:64], Prefill(), 2)  # for warmth
        for old, new in cases:
            exact = side.call("provisional", new, Prefill(), ANSWER_TOKENS)
            cached = side.call("after", old, new, Prefill(), ANSWER_TOKENS)
            drafted = side.call("after", old, new, CHUNK, ANSWER_TOKENS)
            samples.append({"exact": exact, "cached": cached, "provisional": drafted})
    if restart:
        for (old, new), sample in zip(cases, samples, strict=True):
            sample["restarted"] = _restarted(spec, old, new)
    return samples


def _restarted(spec: SideSpec, old: list[int], new: list[int]) -> Sample:
    with tempfile.TemporaryDirectory(prefix="forerun-edited-") as folder, ExitStack() as stack:
        first = stack.enter_context(SideProcess(replace(spec, disk=folder)))
        first.call("prefill", old)
        first.call("close")
        first.close()
        second = stack.enter_context(SideProcess(replace(spec, disk=folder)))
        second.call("provisional", old[:64][::-1], Prefill(), 2)  # for warmth
        return second.call("keeping", new, CHUNK, ANSWER_TOKENS)


def figures(samples: list[dict[str, Sample]]) -> dict[str, Any]:
    """Of each way the first word, the first that stands, what was read from where; and which answers were exact's."""
    exact_s = median(sample["exact"]["confirmed_s"] for sample in samples)
    found: dict[str, Any] = {}
    for way in samples[0]:
        own = [sample[way] for sample in samples]
        firsts = [s["confirmed_s"] if s["provisional_s"] is None else s["provisional_s"] for s in own]
        same = sum(s["token_ids"] == sample["exact"]["token_ids"] for s, sample in zip(own, samples, strict=True))
        found[way] = {
            "first_s": common.spread(firsts),
            "confirmed_s": common.spread(s["confirmed_s"] for s in own),
            "ratio": round(exact_s / median(firsts), 3),
            "cached_tokens": round(sum(s["cached_tokens"] for s in own) / len(own)),
            "same_answers": same,
            "shown": sum(s["shown"] for s in own),
            "kept": sum(s["kept"] for s in own),
            "predicted_kl": [s["report"]["predicted_kl"] for s in own if s["report"]],
            "cost": [round(s["report"]["cost"], 4) for s in own if s["report"]],
            "fell_back": sorted({s["report"]["fell_back"] for s in own if s["report"] and s["report"]["fell_back"]}),
        }
    return found


def table(result: dict[str, Any]) -> Table:
    title = f"one changed line, {result['model']}, {result['runs']} prompts of each kind"
    made = Table(
        *("tokens, edit", "way", "first word, s", "sooner", "exact answer, s", "same text", "words that stood"),
        title=title,
        title_justify="left",
    )
    reasons = set[str]()
    for name, ways in result["figures"].items():
        for way, own in ways.items():
            stood = f"{own['kept']} of {own['shown']}" if own["shown"] else ""
            times = [common.cell(own[key]) for key in ("first_s", "confirmed_s")]
            same = f"{own['same_answers']} of {result['runs']}"
            made.add_row(name, WAYS[way], times[0], f"{own['ratio']:.2f}x", times[1], same, stood)
            reasons.update(own["fell_back"])
            name = ""
        made.add_section()
    if reasons:
        made.caption = "computed exactly after all: " + "; ".join(sorted(reasons))
    return made
