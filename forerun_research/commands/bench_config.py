"""`forerun bench config`: which draft model, depth and precision to use behind a round trip."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.commands import options as opt


def config(
    model: opt.Model = opt.DEFAULT_MODEL,
    draft_models: Annotated[
        list[str] | None,
        typer.Option("--draft-model", "-d", help="A model or remote:HOST:PORT; may be repeated."),
    ] = None,
    dtypes: Annotated[
        list[str] | None, typer.Option("--dtype", "-w", help="Of the draft models; may be repeated; default: auto.")
    ] = None,
    depths: Annotated[
        list[int] | None, typer.Option("--depth", min=1, max=64, help="May be repeated; default: 1, 2, 4, 8.")
    ] = None,
    rtt: Annotated[float, typer.Option("--rtt", min=0.0, help="Round trip in ms; to a server it is measured.")] = 0.0,
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=30, help="Shipped prompts.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of each answer, at most.")] = 64,
    target_price: Annotated[
        float, typer.Option("--target-price", min=0.0, help="Of the target's machine, an hour.")
    ] = 1.0,
    draft_price: Annotated[
        float, typer.Option("--draft-price", min=0.0, help="Of the drafting machine, an hour.")
    ] = 0.2,
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON line.")] = False,
) -> None:
    """Profile draft models, depths and precisions here, and print the choice for goodput, for cost and for bytes.

    [bold]Examples[/bold]

    forerun bench config --model qwen2.5-coder-1.5b-instruct --draft-model qwen2.5-coder-0.5b-instruct --rtt 20

    forerun bench config -m TARGET -d SMALL -d SMALLER -w auto -w int8 --depth 2 --depth 6 --draft-price 0.05

    forerun bench config -m TARGET -d remote:HOST:8100 -d SMALL
    """
    from forerun_research.bench import common
    from forerun_research.bench import draft_config as bench

    plan = bench.ConfigBench(
        model,
        tuple(draft_models or ()),
        tuple(dtypes or ("auto",)),
        tuple(sorted(set(depths or (1, 2, 4, 8)))),
        rtt_ms=rtt,
        prompts=prompts,
        tokens=tokens,
        target_price=target_price,
        draft_price=draft_price,
        threads=threads,
    )
    result = bench.run(plan)
    common.report(result, bench.table(result), as_json)
