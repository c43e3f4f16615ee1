"""Decode: the time of one more token at batch 1, after a prompt of a given length, greedy."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun_research.bench import common
from forerun_research.bench.sides import alternate

FIGURES = ("ms_per_token", "tokens_per_s", "ttft_s")


def run(setup: common.Setup, context: int, tokens: int) -> dict[str, Any]:
    prompts = common.Prompts(setup)
    prompts.check(context + tokens)
    with setup.open_sides(context + tokens) as sides:
        samples = alternate(sides, setup.runs, "decode", prompts.cut(context), tokens)
        figures = {name: common.summarise(found, FIGURES) for name, found in samples.items()}
        result: dict[str, Any] = {
            "bench": "decode",
            "model": setup.name,
            "context": context,
            "tokens": tokens,
            "runs": setup.runs,
            **common.side_results(sides, figures),
        }
    result["ratio"] = common.ratio(result, setup.against, "ms_per_token")
    if setup.against != "none":
        ours, theirs = (samples[name][0]["token_ids"] for name in ("forerun", setup.against))
        result["same_tokens"] = common.same_prefix(ours, theirs)
    result["hardware"] = common.hardware(setup.thread_count())
    return result


def table(result: dict[str, Any], against: str) -> Table:
    title = f"decode {result['model']}, {result['tokens']} tokens after {result['context']}, {result['runs']} runs"
    found = Table(
        "", "weights", "ms a token", "tokens/s", "first token, s", "memory", title=title, title_justify="left"
    )
    for name in ["forerun"] + ([] if against == "none" else [against]):
        side = result[name]
        found.add_row(
            name,
            side["weights"],
            common.cell(side["ms_per_token"]),
            common.cell(side["tokens_per_s"], digits=1),
            common.cell(side["ttft_s"]),
            common.megabytes(side),
        )
    if result["ratio"] is not None:
        found.caption = f"forerun takes 1/{result['ratio']:.2f} of the time; same first {result['same_tokens']} tokens"
    return found
