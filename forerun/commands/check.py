"""`forerun check`: prove on this machine that an answer does not depend on how it was computed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.commands import options as opt

app = typer.Typer(no_args_is_help=True, help="Check that results are what they should be; exit status 1 if not.")


@app.callback()
def group() -> None:
    """Check that results are what they should be; exit status 1 if not."""


@app.command()
def model(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    prompts: Annotated[int, typer.Option("--prompts", min=2, max=64, help="How many prompts.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=20, help="Tokens of each answer.")] = 32,
    as_json: opt.AsJson = False,
) -> None:
    """Greedy answers of prompts alone, against batch, chunked prefill, warm prefix tree and preemption.

    Answers that part are looked at: a rounding tie between two tokens is reported as such, anything else fails.

    Example: forerun check model --model smollm2-135m-instruct --weights float32
    """
    from forerun.lab.consistency import check_model
    from forerun.models.store import resolve

    resolve(model)  # a download shows its own progress, before ours
    console = Console(stderr=True)
    findings = []
    with console.status("loading") as status:
        checks = check_model(model, weights=weights, device=device, threads=threads, prompts=prompts, tokens=tokens)
        for finding in checks:
            findings.append(finding)
            status.update(f"{finding.name}: {'pass' if finding.passed else 'FAIL'}")
    if as_json:
        print(json.dumps({"check": "model", "model": model, "findings": [asdict(f) for f in findings]}))
    else:
        table = Table("compared with each prompt alone", "", "", title=f"check {model}", title_justify="left")
        for finding in findings:
            table.add_row(finding.name, "pass" if finding.passed else "[red]FAIL[/red]", finding.detail)
        Console(highlight=False).print(table)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(1)
