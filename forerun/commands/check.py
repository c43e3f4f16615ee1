"""`forerun check`: prove on this machine that an answer depends neither on how it was computed nor on drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.commands.screen import print_table

if TYPE_CHECKING:
    from forerun.checks import Finding

app = typer.Typer(no_args_is_help=True, help="Check that results are what they should be; exit status 1 if not.")


@app.command()
def model(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, max=64, help="How many prompts.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=20, help="Tokens of each answer.")] = 32,
    as_json: opt.AsJson = False,
) -> None:
    """Greedy answers of prompts alone, against batch, chunked prefill, warm prefix tree and preemption.

    Answers that part are looked at: a rounding tie between two tokens is reported as such, anything else fails.

    Example: forerun check model --model smollm2-135m-instruct --dtype float32
    """
    from forerun.checks.consistency import check_model

    how: dict[str, Any] = {"weights": weights, "device": device, "threads": threads, "prompts": prompts}
    about: dict[str, str | None] = {"check": "model", "model": model}
    _run(about, as_json, lambda update: check_model(model, tokens=tokens, **how, on_progress=update))


@app.command()
def lossless(
    model: opt.Model = opt.DEFAULT_MODEL,
    draft: opt.Draft = None,
    weights: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, max=256, help="How many prompts.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", min=4, help="Tokens of each greedy answer.")] = 32,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of the sampled part; above 0.")] = 0.8,
    samples: Annotated[
        int, typer.Option("--samples", min=64, max=1_000_000, help="Answers of each test: more show less.")
    ] = 256,
    as_json: opt.AsJson = False,
) -> None:
    """Speculative answers against plain ones: exactly on four tokens, by statistics and token for token on the model.

    Where greedy answers part, the gap between both tokens is compared with the noise of this machine: a tie, or a BUG.

    Example: forerun check lossless --model qwen2.5-coder-1.5b-instruct --draft-model qwen2.5-coder-0.5b-instruct
    """
    from forerun.checks.lossless.run import check_lossless

    how: dict[str, Any] = {"weights": weights, "device": device, "threads": threads, "prompts": prompts}
    how |= {"tokens": tokens, "temperature": temperature, "samples": samples}
    about = {"check": "lossless", "model": model, "draft": draft}
    _run(about, as_json, lambda update: check_lossless(model, draft, **how, on_progress=update))


def _run(
    about: dict[str, str | None], as_json: bool, check: Callable[[Callable[[str], None]], Iterable[Finding]]
) -> None:
    """Shows findings as they come and all of them at the end; `check` gets a function that shows what it does."""
    from rich.console import Console

    from forerun.core.progress import status
    from forerun.models.fetch.store import resolve

    for name in (about["model"], about.get("draft")):
        if name is not None:
            resolve(name)  # a download shows its own progress, before ours
    console, findings = Console(stderr=True), []
    with status("loading", console) as update:
        for finding in check(update):
            findings.append(finding)
            if not as_json:
                console.print(f"{finding.part}: {finding.name}: {finding.verdict}", highlight=False)
    if as_json:
        records = [{**asdict(finding), "verdict": finding.verdict} for finding in findings]
        print(json.dumps(about | {"findings": records}))
    else:
        drafted = f", drafted for by {about['draft']}" if about.get("draft") else ""
        _show(findings, f"check {about['model']}{drafted}")
    if not all(finding.passed for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding], title: str) -> None:
    shown = {"FAIL": "[red]FAIL[/red]"}
    rows = [(f.part, f.name, shown.get(f.verdict, f.verdict), f.detail) for f in findings]
    print_table(("part", "what", "", ""), rows, title=title)
    for finding in findings:
        for difference in finding.data.get("differences", ()):
            if isinstance(difference, dict) and "prompt" in difference:
                print(f"{finding.name}: {describe(difference)}")


def describe(found: dict[str, object]) -> str:
    """One difference between two answers, in a line."""
    return (
        f"prompt {found['prompt']}, position {found['position']}: plain {found['plain']} {found['plain_text']!r}, "
        f"speculative {found['other']} {found['other_text']!r}; gap {found['gap']:.3g}, noise {found['noise']:.3g} "
        f"(a tie up to {found['factor']:g} times): {found['verdict']}"
    )
