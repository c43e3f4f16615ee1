"""Prefill: time to the first token for prompts of given lengths, and for a second one that shares most of the first."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun.errors import BadRequest
from forerun_research.bench import common
from forerun_research.bench.sides import SideProcess, alternate


def run(setup: common.Setup, lengths: list[int], shared: int | None) -> dict[str, Any]:
    prompts = common.Prompts(setup)
    lengths = sorted(set(lengths))
    prompts.check(lengths[-1] + 1)
    if shared is not None and not 0 < shared < lengths[-1]:
        raise BadRequest(f"--shared is {shared}, the longest prompt {lengths[-1]}", "share less than the whole prompt")
    with setup.open_sides(lengths[-1] + 1) as sides:
        figures: dict[str, dict[str, Any]] = {side.name: {} for side in sides}
        for length in lengths:
            samples = alternate(sides, setup.runs, "prefill", prompts.cut(length))
            for name, found in samples.items():
                figures[name][str(length)] = common.spread([sample["ttft_s"] for sample in found])
        again = _shared(sides[0], prompts, lengths[-1], shared, setup.runs) if shared is not None else None
        result: dict[str, Any] = {
            "bench": "prefill",
            "model": setup.name,
            "lengths": lengths,
            "runs": setup.runs,
            **common.side_results(sides, {name: {"ttft_s": found} for name, found in figures.items()}),
        }
    result["ratio"] = _ratios(result, setup.against)
    if again is not None:
        cold = result["forerun"]["ttft_s"][str(lengths[-1])]["median"]
        result["shared"] = {**again, "ratio": round(cold / again["ttft_s"]["median"], 3)}
    result["hardware"] = common.hardware(setup.thread_count())
    return result


def _shared(side: SideProcess, prompts: common.Prompts, length: int, shared: int, runs: int) -> dict[str, Any]:
    first = prompts.cut(length)
    second = first[:shared] + prompts.cut(length - shared, skip=2 * length)
    found = alternate([side], runs, "shared", first, second)[side.name]
    return {
        "tokens": length,
        "shared": shared,
        "cached_tokens": found[-1]["cached_tokens"],
        "ttft_s": common.spread([sample["ttft_s"] for sample in found]),
    }


def _ratios(result: dict[str, Any], against: str) -> dict[str, float] | None:
    if against == "none":
        return None
    ours, theirs = result["forerun"]["ttft_s"], result[against]["ttft_s"]
    return {length: round(theirs[length]["median"] / ours[length]["median"], 3) for length in ours}


def table(result: dict[str, Any], against: str) -> Table:
    title = f"prefill {result['model']}, seconds to the first token, {result['runs']} runs"
    names = ["forerun"] + ([] if against == "none" else [against])
    found = Table("prompt tokens", *names, "ratio", title=title, title_justify="left")
    for length in map(str, result["lengths"]):
        cells = [common.cell(result[name]["ttft_s"][length], digits=3) for name in names]
        found.add_row(length, *cells, f"{result['ratio'][length]:.2f}" if result["ratio"] else "")
    if "shared" in result:
        again = result["shared"]
        label = f"{again['tokens']}, second request, {again['shared']} shared ({again['cached_tokens']} reused)"
        found.add_row(label, common.cell(again["ttft_s"], digits=3), *[""] * (len(names) - 1), f"{again['ratio']:.2f}")
        found.caption = "the last row's ratio is against Forerun's own cold prompt"
    return found
