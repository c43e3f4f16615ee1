"""`forerun bench sharing`: what prefix sharing saves, and whether the cache is quick and right at size."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands import options as opt

if TYPE_CHECKING:
    from forerun_research.bench.sharing import Sizes

_sizes = functools.partial(typer.Option, rich_help_panel="Sizes (the defaults are those the goals are set for)")


@dataclass(frozen=True)
class SizeOptions:
    """How much of everything."""

    prompt: Annotated[int, _sizes("--prompt", min=1, help="Tokens of the prompt that is branched.")] = 2000
    branches: Annotated[int, _sizes("--branches", min=2, max=256, help="Answers that branch from it.")] = 16
    tokens: Annotated[int, _sizes("--tokens", min=1, help="Tokens of each branch.")] = 128
    questions: Annotated[int, _sizes("--questions", min=1, help="Questions for rollout trees.")] = 4
    budget: Annotated[int, _sizes("--budget", min=1, help="Tokens computed for each question.")] = 2000
    trace: Annotated[Path | None, _sizes("--trace", help="An agent's conversation of your own.")] = None
    turns: Annotated[int | None, _sizes("--turns", min=1, help="Only the first turns of the trace.")] = None
    tasks: Annotated[int, _sizes("--tasks", min=1, help="Tasks for planning before tools.")] = 6
    nodes: Annotated[int, _sizes("--nodes", min=1, help="Nodes of the prefix tree.")] = 1000
    tree_tokens: Annotated[int, _sizes("--tree-tokens", min=16, help="Tokens in that tree.")] = 1_000_000
    steps: Annotated[int, _sizes("--steps", min=1, help="Random operations on the cache.")] = 100_000

    def sizes(self, parts: tuple[str, ...], quick: bool) -> Sizes:
        from forerun_research.bench.sharing import PARTS, Sizes

        if not quick:
            return Sizes(parts=parts or PARTS, **vars(self))
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        chosen = {entry.name: own[entry.name] for entry in fields(self) if own[entry.name] != entry.default}
        return Sizes.small(parts=parts or PARTS, **chosen)


@opt.grouped
def sharing(
    sizes: SizeOptions,
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    parts: Annotated[
        str, typer.Option("--parts", help="Only these of branches,restart,rollouts,trace,plan,tree,operations.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option("--data", help="Questions for rollouts: a .jsonl file with `question` on each line.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Measured runs of branches, after one for warmth.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, to see that everything runs; goals are not set for them.")
    ] = False,
    threads: opt.Threads = None,
    random_shape: Annotated[
        str | None, typer.Option("--random-shape", help="1.5b or 8b: random weights of that shape, for timing only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON line.")] = False,
) -> None:
    """What sharing saves: branches of one prompt, a restart, rollout trees, an agent's turns, plans; the cache at size.

    [bold]Examples[/bold]

    forerun bench sharing --data gsm8k.jsonl

    forerun bench sharing --quick

    forerun bench sharing --parts tree,operations --json

    forerun bench sharing --parts branches --random-shape 8b --device cuda --json
    """
    from rich.console import Console

    from forerun_research.bench import common, sharing_table
    from forerun_research.bench import sharing as bench

    asked = sizes.sizes(tuple(part.strip() for part in parts.split(",") if part.strip()), quick)
    setup = common.Setup(model, weights, device, "none", runs, threads, data, random_shape)
    with Console(stderr=True).status("loading") as status:
        result = bench.run(setup, asked, status.update)
    common.report(result, sharing_table.table(result), as_json)
