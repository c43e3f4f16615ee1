"""`forerun lab`: studies written as YAML files, measured, reported, and continued where they stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forerun.commands import options as opt

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run studies written as YAML files.")

StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A name of `forerun lab list`, or a YAML file.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for results; default: lab-results/NAME.")]
DataFolder = Annotated[Path | None, typer.Option("--data", help="Folder with the files that the study names.")]
MAX_PRINTED_FAILURES = 12  # all are written


@app.callback()
def group() -> None:
    """Run studies written as YAML files."""


@app.command(name="list")
def list_studies() -> None:
    """Studies that come with the package, and what each asks."""
    from forerun_research.studies.study import question, shipped

    table = Table("study", "question", box=None)
    for name, path in shipped().items():
        table.add_row(name, question(path))
    Console(highlight=False).print(table)


@app.command()
def run(
    name: StudyName,
    out: Out = None,
    data: DataFolder = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="In place of the study's.")] = None,
    draft: Annotated[str | None, typer.Option("--draft-model", "-d", help="In place of the study's.")] = None,
    profile: Annotated[str | None, typer.Option("--prefill-profile", help="In place of the study's.")] = None,
    weights: Annotated[str | None, typer.Option("--dtype", "-w", help="In place of the study's.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    threads: opt.Threads = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="Prompts of each measure, in place of the study's counts.")
    ] = None,
    only: Annotated[str, typer.Option("--only", help="Only these measures, joined by commas.")] = "",
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Measure nothing: tables and plots of what there is so far.")
    ] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure what has no result yet, then print tables, and write report.json, plots and failures.jsonl.

    [bold]Examples[/bold]

    forerun lab run prefill_agreement --prefill-profile qwen.safetensors --data data

    forerun lab run prefill_tasks --only needle --prompts 2 --device cpu
    """
    from forerun.core.progress import status
    from forerun_research.studies import execute
    from forerun_research.studies.study import find, load, narrowed

    asked: dict[str, Any] = {"data": data, "model": model, "draft": draft, "profile": profile}
    asked |= {"weights": weights, "device": device, "threads": threads}
    file = find(name)
    study = narrowed(load(file, asked), [part.strip() for part in only.split(",") if part.strip()], prompts)
    folder = out or Path("lab-results") / file.stem
    if report_only:
        _show(execute.report(study, folder), folder, as_json)
        return
    with status("loading", Console(stderr=True)) as update:
        found = execute.run(study, folder, update)
    _show(found, folder, as_json)


def _show(found: dict[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: value for key, value in found.items() if key != "broken"}))
        return
    console = Console(highlight=False)
    for entry in found["tables"]:
        title = ", ".join(part for part in (found["study"], entry["variant"], entry["measure"]) if part)
        console.print(_table(title, entry["rows"]))
    broken = found["broken"]
    if broken:
        console.print(f"{len(broken)} broken prompts, worst first; all of them in {folder / 'failures.jsonl'}")
    for row in broken[:MAX_PRINTED_FAILURES]:
        console.print(
            f"{row['measure']} {row['case']}, {row['setting']}: lost {row['lost']:.3f}: ...{row['asked'][-80:]!r}",
            markup=False,
        )
    console.print(f"results, report.json and plots: {folder}")


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Columns as they come; ends of intervals stand beside their figure."""
    columns = [name for name in rows[0] if not name.endswith(("low", "high"))] if rows else []
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(_cell(row, name) for name in columns))
    return table


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    ends = [row.get(f"{name} {end}", row.get(end) if name == "score" else None) for end in ("low", "high")]
    if None in ends:
        return f"{value:.3f}"
    return f"{value:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"
