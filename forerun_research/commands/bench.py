"""`forerun bench`: Forerun beside another engine, on the same weights and prompts, in one process tree."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands import options as opt
from forerun.errors import BadRequest
from forerun_research.commands import bench_config, bench_edit, bench_load, bench_sharing

if TYPE_CHECKING:
    from forerun_research.bench.common import Setup

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure Forerun, alone or beside transformers or llama.cpp. Every bench ends with one JSON line.",
)

app.command()(bench_sharing.sharing)
app.command()(bench_load.load)
app.command()(bench_config.config)
app.command()(bench_edit.edit)

Against = Annotated[str, typer.Option("--against", help="transformers, llama.cpp or none.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Measured runs of each side, after one for warmth.")]
Shape = Annotated[
    str | None, typer.Option("--random-shape", help="1.5b or 8b: random weights of that shape, for timing only.")
]
_drafting = functools.partial(typer.Option, rich_help_panel="Speculative prefill")
OneJson = Annotated[bool, typer.Option("--json", help="Print only the JSON line.")]
TaskData = Annotated[
    list[Path] | None,
    typer.Option("--data", help="Tasks: a folder or a .jsonl(.gz) file; may be repeated. Default: shipped prompts."),
]


@dataclass(frozen=True)
class SetupOptions:
    """What is measured, beside which engine, how often."""

    model: opt.Model = opt.DEFAULT_MODEL
    weights: opt.Dtype = "auto"
    device: opt.Device = "auto"
    against: Against = "transformers"
    runs: Runs = 5
    threads: opt.Threads = None
    data: opt.Data = None
    random_shape: Shape = None

    def setup(self) -> Setup:
        from forerun_research.bench.common import Setup

        return Setup(
            self.model,
            self.weights,
            self.device,
            self.against,
            self.runs,
            self.threads,
            self.data,
            self.random_shape,
        )


@dataclass(frozen=True)
class PrefillSetupOptions(SetupOptions):
    """The same; data may be a folder, and speculative prefill stands beside exact prefill of the same process."""

    data: Annotated[Path | None, typer.Option("--data", help="Text: a file, or with --speculative a folder, too.")] = (
        None
    )
    against: Annotated[
        str, typer.Option("--against", help="transformers, llama.cpp or none; auto: none with --speculative.")
    ] = "auto"

    def beside(self, speculative: bool) -> Setup:
        peer = ("none" if speculative else "transformers") if self.against == "auto" else self.against
        return replace(self, against=peer).setup()


@dataclass(frozen=True)
class SpeculativeOptions:
    """Speculative prefill: what drafts, and how much may be recomputed."""

    speculative: Annotated[bool, _drafting("--speculative", help="Drafted prefill beside exact prefill.")] = False
    draft_model: Annotated[
        str | None, _drafting("--draft-model", "-d", help="The draft model; a shape where --random-shape names one.")
    ] = None
    prefill_profile: Annotated[
        str | None, _drafting("--prefill-profile", help="What forerun calibrate made for these models.")
    ] = None
    budget: Annotated[float | None, _drafting("--budget", help="Most work, as a share of exact prefill's.")] = None
    quality: Annotated[float | None, _drafting("--quality", help="Least agreement with exact prefill.")] = None
    source: Annotated[str, _drafting("--source", help="What drafts: auto, draft, self.")] = "auto"
    provisional: Annotated[bool, _drafting("--provisional", help="Also answers that begin provisionally.")] = False

    def check(self) -> None:
        given = [f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value and value != "auto"]
        if given and not self.speculative:
            raise BadRequest(f"{', '.join(given)} without --speculative", "add --speculative")


@dataclass(frozen=True)
class BatchSetupOptions(SetupOptions):
    """The same; a batch takes long enough for fewer runs."""

    runs: Runs = 3


@app.command()
@opt.grouped
def decode(
    options: SetupOptions,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of each answer.")] = 64,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the prompt.")] = 512,
    as_json: OneJson = False,
) -> None:
    """Time per token at batch 1.

    [bold]Examples[/bold]

    forerun bench decode

    forerun bench decode --dtype float32 --against transformers --runs 7

    forerun bench decode --model qwen2.5-coder-1.5b-instruct --against llama.cpp --json
    """
    from forerun_research.bench import common
    from forerun_research.bench import decode as bench

    result = bench.run(options.setup(), context, tokens)
    common.report(result, bench.table(result, options.against), as_json)


@app.command()
@opt.grouped
def prefill(
    options: PrefillSetupOptions,
    drafting: SpeculativeOptions,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", min=1, help="Length of the prompt; may be repeated.")
    ] = None,
    shared: Annotated[
        int | None, typer.Option("--shared", min=1, help="Also a second request that shares this many tokens.")
    ] = None,
    edited: Annotated[
        list[str] | None,
        typer.Option("--edited", help="A prompt met before with a line changed: top, middle, inserted; repeatable."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="With --edited: also from disk, after a restart.")] = False,
    as_json: OneJson = False,
) -> None:
    """Time to the first token (default: prompts of 512 and 1,500 tokens; with --speculative 2,048 and 4,096, with
    --edited 4,096).

    [bold]Examples[/bold]

    forerun bench prefill --tokens 1500 --shared 1400

    forerun bench prefill --edited top --edited middle --tokens 4096 --runs 3

    forerun bench prefill --random-shape 8b --tokens 8192 --device cuda

    forerun bench prefill --speculative -m BIG -d SMALL --prefill-profile PROFILE

    forerun bench prefill --speculative --random-shape 5b --draft-model 0.5b --tokens 8192 --device cuda
    """
    from forerun_research.bench import common, edited_prompt, prefill_table, speculative_prefill
    from forerun_research.bench import prefill as bench

    drafting.check()
    if restart and not edited:
        raise BadRequest("--restart without --edited", "add --edited top")
    if edited:
        if drafting.speculative or shared is not None:
            raise BadRequest("--edited is a bench of its own", "leave --speculative and --shared out")
        result = edited_prompt.run(options.beside(True), tokens or [4096], edited, restart)
        common.report(result, edited_prompt.table(result), as_json)
        return
    setup = options.beside(drafting.speculative)
    if not drafting.speculative:
        result = bench.run(setup, tokens or [512, 1500], shared)
        common.report(result, bench.table(result, setup.against), as_json)
        return
    if shared is not None:
        raise BadRequest("--shared is about exact prefill", "leave it or --speculative out")
    asked = {name: value for name, value in asdict(drafting).items() if name != "speculative"}
    result = speculative_prefill.run(setup, tokens or [2048, 4096], speculative_prefill.PrefillBench(**asked))
    common.report(result, prefill_table.table(result, setup.against), as_json)


@app.command()
@opt.grouped
def batch(
    options: BatchSetupOptions,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests at once.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each answer.")] = 64,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of each prompt; default: the shipped prompts.")
    ] = None,
    as_json: OneJson = False,
) -> None:
    """Tokens per second with many requests at once.

    [bold]Examples[/bold]

    forerun bench batch --requests 16

    forerun bench batch --requests 64 --tokens 256 --random-shape 1.5b --device cuda
    """
    from forerun_research.bench import batch as bench
    from forerun_research.bench import common

    result = bench.run(options.setup(), requests, tokens, context)
    common.report(result, bench.table(result, options.against), as_json)


@app.command()
def forward(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens before the measured ones.")] = 512,
    runs: Runs = 5,
    threads: opt.Threads = None,
    random_shape: Shape = None,
    as_json: OneJson = False,
) -> None:
    """Cost of one forward at 1, 2, 4, 8 and 16 tokens: what checking a draft costs.

    Example: forerun bench forward --model qwen2.5-coder-1.5b-instruct --dtype int8
    """
    from forerun_research.bench import common
    from forerun_research.bench import forward as bench

    setup = common.Setup(model, weights, device, "none", runs, threads, None, random_shape)
    result = bench.run(setup, context, [1, 2, 4, 8, 16])
    common.report(result, bench.table(result), as_json)


@app.command()
def speculate(
    model: opt.Model = opt.DEFAULT_MODEL,
    draft: opt.Draft = None,
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    data: TaskData = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Longest answer in tokens.")] = 128,
    per_category: Annotated[int, typer.Option("--per-category", min=1, help="Tasks of each category.")] = 2,
    categories: Annotated[str, typer.Option("--categories", help="Only these, joined by commas.")] = "",
    drafters: Annotated[
        str, typer.Option("--drafters", help="What to measure beside plain, joined by commas: auto, lookup, ...")
    ] = "",
    batch: Annotated[str, typer.Option("--batch", help="Also throughput at these batch sizes: 1,4,16.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0: greedy.")] = 0.0,
    verify: Annotated[
        str, typer.Option("--verify", help="Also accepted lengths of these rules: match,rejection,bounded:0.1.")
    ] = "",
    against: Against = "none",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Passes over all tasks.")] = 2,
    threads: opt.Threads = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write every answer here as it comes, a line each.")] = None,
    as_json: OneJson = False,
) -> None:
    """What guessing ahead gains over plain decoding, by category and drafter, beside the bound that costs allow.

    [bold]Examples[/bold]

    forerun bench speculate --tokens 64

    forerun bench speculate -m qwen2.5-coder-1.5b-instruct -d qwen2.5-coder-0.5b-instruct --data HumanEval.jsonl.gz

    forerun bench speculate -m BIG -d SMALL --temperature 0.8 --verify rejection,traversal --out answers.jsonl --json
    """
    from forerun_research.bench import common, speculate_table
    from forerun_research.bench import speculate as bench
    from forerun_research.bench.speculate_tasks import SpeculateBench

    names, rules, sizes = _list(drafters), _list(verify), _sizes(batch)
    found = tuple(data or ())
    plan = SpeculateBench(draft, found, tokens, per_category, _list(categories), names, sizes, temperature, rules, out)
    result = bench.run(common.Setup(model, weights, device, against, runs, threads), plan)
    common.report(result, speculate_table.table(result), as_json)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _list(text))
    except ValueError:
        raise typer.BadParameter(f"--batch {text!r} is no list of numbers such as 1,4,16") from None
