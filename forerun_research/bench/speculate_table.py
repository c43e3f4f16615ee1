"""The result of `forerun bench speculate` for people: one row for each category and setting, then the goals."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun_research.bench.common import cell
from forerun_research.bench.speedups import AUTO, PLAIN

_GOALS = {
    "never_slower": "auto against plain decoding",
    "of_bound": "auto against its bound",
    "of_best": "auto against the best single drafter",
    "same_answers": "answers equal to plain ones",
    "batch": "auto against plain in batches",
}


def table(result: dict[str, Any]) -> Table:
    drafted = f" with {result['draft']}" if result["draft"] else ""
    title = f"speculate {result['model']}{drafted}, up to {result['tokens']} tokens, {result['runs']} runs"
    found = Table(
        *("", "drafter", "tokens/s", "decode", "total", "bound", "of it", "accepted", "a pass", "same", "by"),
        title=title,
        title_justify="left",
        caption="\n".join(_notes(result)),
        caption_justify="left",
    )
    for category, figures in result["categories"].items():
        plain = figures[PLAIN]
        label = f"{category} ({figures['tasks']}), {figures['copied']:.0%} copied"
        found.add_row(label, "none", f"{plain['tokens_per_s']:.1f}", "1.00", "1.00")
        for name in result["settings"]:
            found.add_row("", name, *_cells(figures[name]), style="bold" if name == AUTO else "")
        found.add_section()
    return found


def _cells(side: dict[str, Any]) -> list[str]:
    return [
        f"{side['tokens_per_s']:.1f}",
        cell(side["decode"]),
        f"{side['total']['median']:.2f}",
        f"{side['bound']:.2f}",
        f"{side['of_bound']:.0%}",
        f"{side['accepted']}/{side['drafted']}",
        f"{side['accepted_length']:.2f}",
        f"{side['equal']:.0%}",
        ", ".join(f"{name} {share:.0%}" for name, share in side["share"].items()),
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    notes = []
    for name, goal in result["goals"].items():
        mark = "pass" if goal["pass"] else f"FAIL in {', '.join(goal['missed'])}"
        at_least = f"at least {goal['limit']:.2f}, lowest {goal['worst']:.2f} ({goal['category']})"
        unproven = f"; no draft was accepted in {', '.join(goal['unproven'])}" if goal.get("unproven") else ""
        notes.append(f"{_GOALS[name]}: {at_least}: {mark}{unproven}")
    rates = result["prefix_cache"]["hit_rate"]
    if rates is not None:
        notes.append(f"prefix tree gave {rates[PLAIN]:.1%} of second turns without and {rates[AUTO]:.1%} with drafts")
    for size, batch in result.get("batch", {}).items():
        plain, auto = (batch[name]["tokens_per_s"]["median"] for name in (PLAIN, AUTO))
        notes.append(f"batch {size}: {plain:.0f} tokens/s plain, {auto:.0f} auto, {cell(batch['ratio'])} times")
    for rule, figures in result.get("rules", {}).items():
        against = figures["against_first"]
        compared = "nothing drafted, nothing to compare" if against is None else f"{against:.3f} of the first rule"
        notes.append(f"{rule}: {figures['accepted_length']:.3f} tokens a pass, {compared}")
    if "transformers" in result:
        peer = result["transformers"]
        rates = ", ".join(f"{kind} {rate:.1f}" for kind, rate in peer["tokens_per_s"].items())
        notes.append(f"transformers ({peer['weights']}), tokens/s of {peer['tasks']} tasks: {rates}")
        notes.append(f"forerun ({result['forerun']['weights']}) makes {peer['ratio']:.2f} times as many")
    return notes
