"""`forerun bench edit`: edits by way and drafter, copying beside decoding, and oracle programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.errors import BadRequest

PARTS = ("oracle", "copy", "tasks")


def edit(
    data: Annotated[Path | None, typer.Option("--data", help="HumanEvalPack's python.jsonl.")] = None,
    releases: Annotated[
        list[Path] | None,
        typer.Option("--release", help="A release of a package, folder or wheel: older and newer in turn."),
    ] = None,
    part: Annotated[str, typer.Option("--part", help="oracle, copy or tasks.")] = "tasks",
    model: opt.Model = "qwen2.5-coder-1.5b-instruct",
    draft_model: opt.Draft = None,
    category: Annotated[list[str] | None, typer.Option("--category", help="generation, edit, release.")] = None,
    way: Annotated[list[str] | None, typer.Option("--way", help="rewrite, replace, copy, write.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="off, copy+lookup+suffix, model; default: all.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Tasks of each category.")] = 1000,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens before a copied span.")] = 1024,
    out: Annotated[Path | None, typer.Option("--out", help="Results, a line each; none is measured twice.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Begin no task after so long.")] = 1e9,
    by_setting: Annotated[
        bool,
        typer.Option("--by-setting", help="All tasks in one setting after the other, the slow ones last."),
    ] = False,
    measure_only: Annotated[bool, typer.Option("--measure-only", help="Judge and print nothing yet.")] = False,
    threads: opt.Threads = None,
    device: opt.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print only the JSON line.")] = False,
) -> None:
    """Edits of files: seconds, exact matches and tests passed, by way of editing and drafter.

    [bold]Examples[/bold]

    forerun bench edit --data humanevalpack_python.jsonl -d qwen2.5-coder-0.5b-instruct --limit 20 --out edits.jsonl

    forerun bench edit --release click-8.1.3.whl --release click-8.1.7.whl --category release

    forerun bench edit --part copy --context 1024
    """
    from forerun import LLM
    from forerun_research.bench import common
    from forerun_research.bench import edit as bench
    from forerun_research.bench.edit_tasks import CATEGORIES, choose_tasks

    if part not in PARTS or any(name not in CATEGORIES for name in category or []) or len(releases or []) % 2:
        raise BadRequest(f"--part {part}, --category {category}, --release {releases}", "see forerun bench edit --help")
    with LLM(model, draft_model=draft_model, threads=threads, device=device, quiet=True) as llm:
        if part == "copy":
            print_json({"model": model, "context": context, "copies": bench.copy_times(llm, context)})
            return
        tasks = choose_tasks(data, releases or [], llm.tokenizer.encode, category or CATEGORIES, limit)
        if part == "oracle":
            print_json({"model": model, **bench.round_trips(llm, tasks)})
            return
        settings = bench.settings_of(way or [], draft_model is not None, drafter or [])
        records = bench.run(llm, tasks, settings, out, seconds, by_setting)
    if measure_only:
        return
    bench.judge(records, tasks)
    rows = bench.summarise(records)
    common.report({"model": model, "draft_model": draft_model, "rows": rows}, bench.table(rows), as_json)


def print_json(result: dict[str, Any]) -> None:
    import json

    print(json.dumps(result))
