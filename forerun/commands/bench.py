"""`forerun bench`: Forerun beside another engine, on the same weights and prompts, in one process tree."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.commands import options as opt

app = typer.Typer(
    no_args_is_help=True,
    help="Measure Forerun, alone or beside transformers or llama.cpp. Every bench ends with one JSON line.",
)

Against = Annotated[str, typer.Option("--against", help="transformers, llama.cpp or none.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Measured runs of each side, after one for warmth.")]
Shape = Annotated[
    str | None, typer.Option("--random-shape", help="1.5b or 8b: random weights of that shape, for timing only.")
]
OneJson = Annotated[bool, typer.Option("--json", help="Print only the JSON line.")]


@app.command()
def decode(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    against: Against = "transformers",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")] = 64,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the prompt.")] = 512,
    runs: Runs = 5,
    threads: opt.Threads = None,
    data: opt.Data = None,
    random_shape: Shape = None,
    as_json: OneJson = False,
) -> None:
    """Time per token at batch 1.

    [bold]Examples[/bold]

    forerun bench decode

    forerun bench decode --weights float32 --against transformers --runs 7

    forerun bench decode --model qwen2.5-coder-1.5b-instruct --against llama.cpp --json
    """
    from forerun.bench import common
    from forerun.bench import decode as bench

    setup = common.Setup(model, weights, device, against, runs, threads, data, random_shape)
    result = bench.run(setup, context, tokens)
    common.report(result, bench.table(result, against), as_json)


@app.command()
def prefill(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    against: Against = "transformers",
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Length of the prompt; may be repeated.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option("--shared", min=1, help="Also a second request that shares this many tokens.")
    ] = None,
    runs: Runs = 5,
    threads: opt.Threads = None,
    data: opt.Data = None,
    random_shape: Shape = None,
    as_json: OneJson = False,
) -> None:
    """Time to the first token (default: prompts of 512 and 1,500 tokens).

    [bold]Examples[/bold]

    forerun bench prefill --tokens 1500 --shared 1400

    forerun bench prefill --random-shape 8b --tokens 8192 --device cuda
    """
    from forerun.bench import common
    from forerun.bench import prefill as bench

    setup = common.Setup(model, weights, device, against, runs, threads, data, random_shape)
    result = bench.run(setup, tokens or [512, 1500], shared)
    common.report(result, bench.table(result, against), as_json)


@app.command()
def batch(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    against: Against = "transformers",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests at once.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each answer.")] = 64,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of each prompt; default: the shipped prompts.")
    ] = None,
    runs: Runs = 3,
    threads: opt.Threads = None,
    data: opt.Data = None,
    random_shape: Shape = None,
    as_json: OneJson = False,
) -> None:
    """Tokens per second with many requests at once.

    [bold]Examples[/bold]

    forerun bench batch --requests 16

    forerun bench batch --requests 64 --tokens 256 --random-shape 1.5b --device cuda
    """
    from forerun.bench import batch as bench
    from forerun.bench import common

    setup = common.Setup(model, weights, device, against, runs, threads, data, random_shape)
    result = bench.run(setup, requests, tokens, context)
    common.report(result, bench.table(result, against), as_json)


@app.command()
def forward(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens before the measured ones.")] = 512,
    runs: Runs = 5,
    threads: opt.Threads = None,
    random_shape: Shape = None,
    as_json: OneJson = False,
) -> None:
    """Cost of one forward at 1, 2, 4, 8 and 16 tokens: what checking a draft costs.

    Example: forerun bench forward --model qwen2.5-coder-1.5b-instruct --weights int8
    """
    from forerun.bench import common
    from forerun.bench import forward as bench

    setup = common.Setup(model, weights, device, "none", runs, threads, None, random_shape)
    result = bench.run(setup, context, [1, 2, 4, 8, 16])
    common.report(result, bench.table(result), as_json)
