"""`make demo`: plain decoding against Forerun, two questions about one long document: what is not computed twice, and
what is drafted.

Both sides are the same weights in the same process, and each runs alone. Plain reads no cache and leaves none, computes
its prompt exactly and drafts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from forerun import data
from forerun.commands import options as opt
from forerun_research.commands.race import Lane, Race

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.engine.sequence import Event

DOCUMENT = "documents/handbook.txt"
QUESTIONS = (  # of the few that a model of this size can do
    "Repeat the paragraph of the handbook above about the lighthouse, word for word.",
    "Quote what the handbook above says about the sauna.",
)
PLAIN_OPTIONS: dict[str, Any] = {"speculation": "off", "cache": False}
DRAFTED_OPTIONS: dict[str, Any] = {"prefill": "provisional", "cache": False}


@dataclass(frozen=True)
class DemoRound:
    """One question, both ways."""

    plain: Lane
    ours: Lane

    @property
    def same(self) -> bool:
        return self.plain.token_ids == self.ours.token_ids


app = typer.Typer(add_completion=False)


@app.command(name="demo")
def demo(
    model: opt.Model = opt.DEFAULT_MODEL,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    max_tokens: opt.MaxTokens = 96,
) -> None:
    """Race plain decoding against Forerun: two questions about a long document, live, and a table at the end.

    Example: forerun demo --model qwen2.5-coder-0.5b-instruct
    """
    from forerun import LLM

    console = Console(highlight=False)
    document = data.text(DOCUMENT)
    with LLM(model, dtype=dtype, device=device, threads=threads) as llm:
        _warm_up(llm)
        where = f"weights {llm.precision.name}, on {llm.decoder.device.type}"
        console.print(f"{model}, {where}, asked about a handbook of {len(document.split()):,} words.", markup=False)
        console.print("The same weights on both sides; each runs alone, first plain, then Forerun.", style="dim")
        rounds = [_race(llm, console, document, question, max_tokens) for question in QUESTIONS]
        drafted = _drafted(llm, console, document, max_tokens) if llm.prefill_profile is not None else None
    console.print()
    console.print(_table(rounds, drafted))
    _explain(console, rounds, drafted)


def _warm_up(llm: LLM) -> None:
    """What happens once in a process does not count."""
    from forerun import SamplingParams

    llm.prepare(SamplingParams())
    llm.generate("Hello", SamplingParams(max_tokens=4, **PLAIN_OPTIONS))


def _asked(llm: LLM, document: str, question: str, max_tokens: int, **options: Any) -> Iterator[Event]:
    from forerun import SamplingParams

    # The document comes first: requests share the K/V of what they have in common from the start.
    message = {"role": "user", "content": f"{document}\n\n{question}"}
    return llm.stream([message], SamplingParams(max_tokens=max_tokens, **options))


def _race(llm: LLM, console: Console, document: str, question: str, max_tokens: int) -> DemoRound:
    console.print(f"\n[bold]{question}[/bold]")
    made = DemoRound(Lane("plain"), Lane("Forerun"))
    with Race(console, made.plain, made.ours) as race:
        race.run(made.plain, _asked(llm, document, question, max_tokens, **PLAIN_OPTIONS))
        race.run(made.ours, _asked(llm, document, question, max_tokens))
    return made


def _drafted(llm: LLM, console: Console, document: str, max_tokens: int) -> Lane:
    """The first question once more, as if for the first time, from a prompt that is drafted while it is computed."""
    console.print(f"\n[bold]{QUESTIONS[0]}[/bold] [dim]Again, nothing cached, the prompt drafted.[/dim]")
    lane = Lane("Forerun, prompt drafted")
    with Race(console, lane) as race:
        race.run(lane, _asked(llm, document, QUESTIONS[0], max_tokens, **DRAFTED_OPTIONS))
    return lane


def _table(rounds: list[DemoRound], drafted: Lane | None) -> Table:
    found = Table(box=SIMPLE, pad_edge=False, title="what each answer took", title_justify="left", title_style="bold")
    found.add_column("", no_wrap=True)
    for name in (
        "first\ntoken s",
        "tokens\na second",
        "total\ns",
        "from\ncache",
        "drafts\naccepted",
    ):  # fits into 60 columns
        found.add_column(name, justify="right", no_wrap=True)
    for number, made in enumerate(rounds, 1):
        found.add_row(f"{number} plain", *_cells(made.plain))
        found.add_row(f"{number} Forerun", *_cells(made.ours), style="bold", end_section=True)
    if drafted is not None:
        found.add_row("1 drafted", *_cells(drafted))
    return found


def _cells(lane: Lane) -> list[str]:
    usage = lane.usage
    assert usage is not None
    first = f"{lane.shown_s:.2f}*" if lane.shown_s else f"{lane.first_s:.2f}"
    drafts = f"{usage.accepted:,} of {usage.drafted:,}" if usage.drafted else "-"
    return [first, f"{lane.rate:.1f}", f"{lane.total_s:.1f}", f"{usage.cached_tokens:,}", drafts]


def _explain(console: Console, rounds: list[DemoRound], drafted: Lane | None) -> None:
    first, last = rounds[0], rounds[-1]
    usage = last.ours.usage
    assert usage is not None
    faster = first.ours.rate / first.plain.rate if first.plain.rate else 0.0
    sooner = last.plain.first_s / max(last.ours.first_s, 1e-9)
    why = "since the answer repeats the document, and drafts of it were verified together"
    accepted = first.ours.usage is not None and first.ours.usage.accepted > 0
    console.print(
        f"1: {faster:.1f} times the tokens a second, {why if accepted else 'as no draft was accepted'}.\n"
        f"2: the first token {sooner:.0f} times sooner, since {usage.cached_tokens:,} of {usage.prompt_tokens:,} "
        f"prompt tokens had been computed for the first question."
    )
    if drafted is not None and drafted.usage is not None and drafted.shown_s:
        kept, shown = drafted.usage.confirmed, drafted.usage.provisional
        console.print(
            f"* provisional: {kept} of {shown} tokens were confirmed; "
            f"the exact first token came after {drafted.first_s:.2f} s."
        )
    seconds = [sum(lane.total_s for lane in lanes) for lanes in zip(*((m.plain, m.ours) for m in rounds), strict=True)]
    same = sum(made.same for made in rounds)
    verdict = "the same, token for token" if same == len(rounds) else f"the same in {same} of {len(rounds)} rounds"
    console.print(f"Both questions: {seconds[0]:.1f} s plain, {seconds[1]:.1f} s Forerun. Answers: {verdict}.")
