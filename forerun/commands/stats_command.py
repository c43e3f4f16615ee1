"""`forerun stats`: how prompt tokens were served and what a finished answer costs, in total and by session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.commands import options as opt
from forerun.commands.extras import research
from forerun.commands.generate import read_text
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.engine.stats import Account, Stats

_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "written")


@opt.grouped
def stats(
    opened: opt.ModelOptions,
    records: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of answers as `forerun generate --json` prints them, one a line; `-`: stdin."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace of your own to replay; default: the shipped one.")
    ] = None,
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="Replay only the first turns.")] = None,
    speculation: opt.Drafter = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """How prompt tokens were served (read from which cache, computed) and what a finished answer cost.

    With RECORDS it sums up answers you have: every line is one answer's JSON, and a `session` in it puts the answer
    under that name. Without, it replays an agent's conversation (turns, tool results, branches) with a model from a
    cold cache. In a program of your own, llm.stats() gives the same figures.

    [bold]Examples[/bold]

    forerun stats

    forerun stats --trace mine.jsonl -m qwen2.5-coder-1.5b-instruct --json

    forerun generate "Why?" -f handbook.txt --json >> answers.jsonl; forerun stats answers.jsonl
    """
    if records and (trace is not None or turns is not None):
        raise BadRequest("records are summed up, a trace is replayed", "give RECORDS, or --trace and --turns")
    found = read_records(records) if records else _replayed(opened, trace, turns, speculation)
    if as_json:
        print(json.dumps(found.record()), flush=True)
        return
    from rich.console import Console

    Console(highlight=False).print(table(found))


def _replayed(opened: opt.ModelOptions, trace: Path | None, turns: int | None, speculation: str) -> Stats:
    agent_trace = research("bench.agent_trace")
    asked = agent_trace.read_trace(trace, turns)
    with opened.open() as llm:
        return agent_trace.replay(llm, asked, speculation).stats


def read_records(paths: list[Path]) -> Stats:
    """The sum of all answers in these files."""
    from forerun.engine.stats import Stats

    found = Stats()
    for path in paths:
        for number, line in enumerate(read_text(path).splitlines(), 1):
            if line.strip():
                _book(found, line, f"{path}, line {number}")
    if not found.requests:
        raise BadRequest(f"{', '.join(map(str, paths))}: no answer", "give lines of `forerun generate --json`")
    return found


def _book(found: Stats, line: str, where: str) -> None:
    from forerun.core import Usage
    from forerun.engine.stats import SERVED

    try:
        record = json.loads(line)
        own = record["usage"]
        prompt, cached, answer, written = (int(own.get(name, 0)) for name in _COUNTS)
        served = {str(name): int(tokens) for name, tokens in own.get("served", {}).items()}
        usage = Usage(prompt, cached, served, written, answer, total_s=float(own.get("total_s", 0.0)))
        reasons = {str(choice.get("finish_reason")) for choice in record.get("choices", [])}
        session = record.get("session")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BadRequest(f"{where}: not an answer with a `usage`", "give lines of `forerun generate --json`") from None
    if session is not None and not isinstance(session, str):
        raise BadRequest(f"{where}: `session` is {session!r:.40}, not a name", "leave it out, or give text")
    if unknown := sorted(set(served) - set(SERVED)):
        raise BadRequest(f"{where}: no tokens are served by {unknown[0]!r:.40}", f"there are {', '.join(SERVED)}")
    usage.served = served or {"pool": usage.cached_tokens, "computed": usage.computed_tokens}
    found.book(session, usage, finished=not reasons & {"cancelled", "error"})


def table(found: Stats) -> Table:
    from rich.table import Table

    names = ("", "answers", "prompt tokens", "read from cache", "computed", "for one answer")
    made = Table(*names, title="how prompt tokens were served", title_justify="left")
    for name, account in found.sessions.items():
        made.add_row(name, *_cells(account))
    made.add_section()
    made.add_row("total", *_cells(found))
    made.caption = "for one finished answer: tokens computed, of prompts and answers, and seconds"
    return made


def _cells(account: Account) -> tuple[str, ...]:
    tiers = [f"{tier} {tokens:,}" for tier, tokens in account.served.items() if tokens and tier != "computed"]
    return (
        f"{account.answers:,}",
        f"{account.prompt_tokens:,}\nwritten {account.written:,}",
        "\n".join([f"{account.cached_share:.1%}", *tiers]),
        f"{account.computed:,}",
        f"{account.computed_per_answer:,.0f} tokens\n{account.seconds_per_answer:.2f} s",
    )
