"""Batch: many requests at once, tokens a second over all of them, prompts included in the time."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from forerun.errors import BadRequest
from forerun_research.bench import common
from forerun_research.bench.sides import alternate

FIGURES = ("tokens_per_s", "total_s")


def run(setup: common.Setup, requests: int, tokens: int, context: int | None) -> dict[str, Any]:
    if setup.against == "llama.cpp":
        raise BadRequest("llama-cpp-python runs one request at a time", "use --against transformers")
    prompts = common.Prompts(setup)
    # With a length given: different pieces of the documents, so that no prefix is shared by accident.
    asked = [prompts.cut(context, skip=97 * i) for i in range(requests)] if context else prompts.requests(requests)
    longest = max(map(len, asked))
    prompts.check(longest + tokens)
    with setup.open_sides(longest + tokens, batch=requests) as sides:
        samples = alternate(sides, setup.runs, "batch", asked, tokens)
        figures = {name: common.summarise(found, FIGURES) for name, found in samples.items()}
        result: dict[str, Any] = {
            "bench": "batch",
            "model": setup.name,
            "requests": requests,
            "prompt_tokens": sum(map(len, asked)),
            "tokens": tokens,
            "runs": setup.runs,
            **common.side_results(sides, figures),
        }
    result["ratio"] = common.ratio(result, setup.against, "tokens_per_s", higher_is_better=True)
    result["hardware"] = common.hardware(setup.thread_count())
    return result


def table(result: dict[str, Any], against: str) -> Table:
    title = (
        f"batch {result['model']}, {result['requests']} requests of {result['tokens']} tokens, {result['runs']} runs"
    )
    found = Table("", "weights", "tokens/s", "seconds", "memory", title=title, title_justify="left")
    for name in ["forerun"] + ([] if against == "none" else [against]):
        side = result[name]
        found.add_row(
            name,
            side["weights"],
            common.cell(side["tokens_per_s"], digits=1),
            common.cell(side["total_s"]),
            common.megabytes(side),
        )
    if result["ratio"] is not None:
        found.caption = f"forerun makes {result['ratio']:.2f} times as many tokens a second"
    return found
