"""`make demo`: plain decoding against Forerun, three questions about one long document: what is not computed twice,
what is drafted, and what becomes of a document whose first line has changed.

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
CHANGED_LINE = "Printed for the crew of the ninth of May.\n"
CHANGED_QUESTION = "How many steps does the tower have?"
PLAIN_OPTIONS: dict[str, Any] = {"speculation": "off", "cache": False}


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
    """Race plain decoding against Forerun: three questions about a long document, live, and a table at the end.

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
        rounds.append(_race(llm, console, CHANGED_LINE + document, CHANGED_QUESTION, max_tokens, **_changed_options()))
    console.print()
    console.print(_table(rounds))
    _explain(console, rounds)


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


def _changed_options() -> dict[str, Any]:
    """Words are shown from K/V of the document as it was, while the changed one is computed."""
    from forerun import Prefill

    return {"prefill": Prefill("provisional", source="chunk", allow_exact=True)}


def _race(llm: LLM, console: Console, document: str, question: str, max_tokens: int, **options: Any) -> DemoRound:
    changed = " [dim]The handbook's first line has changed.[/dim]" if options else ""
    console.print(f"\n[bold]{question}[/bold]{changed}")
    made = DemoRound(Lane("plain"), Lane("Forerun"))
    with Race(console, made.plain, made.ours) as race:
        race.run(made.plain, _asked(llm, document, question, max_tokens, **PLAIN_OPTIONS))
        race.run(made.ours, _asked(llm, document, question, max_tokens, **options))
    return made


def _table(rounds: list[DemoRound]) -> Table:
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
    return found


def _cells(lane: Lane) -> list[str]:
    usage = lane.usage
    assert usage is not None
    first = f"{lane.shown_s:.2f}*" if lane.shown_s else f"{lane.first_s:.2f}"
    drafts = f"{usage.accepted:,} of {usage.drafted:,}" if usage.drafted else "-"
    return [first, f"{lane.rate:.1f}", f"{lane.total_s:.1f}", f"{usage.cached_tokens:,}", drafts]


def _explain(console: Console, rounds: list[DemoRound]) -> None:
    first, second, changed = rounds
    usage = second.ours.usage
    assert usage is not None
    faster = first.ours.rate / first.plain.rate if first.plain.rate else 0.0
    sooner = second.plain.first_s / max(second.ours.first_s, 1e-9)
    why = "since the answer repeats the document, and drafts of it were verified together"
    accepted = first.ours.usage is not None and first.ours.usage.accepted > 0
    console.print(
        f"1: {faster:.1f} times the tokens a second, {why if accepted else 'as no draft was accepted'}.\n"
        f"2: the first token {sooner:.0f} times sooner, since {usage.cached_tokens:,} of {usage.prompt_tokens:,} "
        f"prompt tokens had been computed for the first question."
    )
    _explain_changed(console, changed)
    seconds = [sum(lane.total_s for lane in lanes) for lanes in zip(*((m.plain, m.ours) for m in rounds), strict=True)]
    same = sum(made.same for made in rounds)
    verdict = "the same, token for token" if same == len(rounds) else f"the same in {same} of {len(rounds)} rounds"
    console.print(f"All questions: {seconds[0]:.1f} s plain, {seconds[1]:.1f} s Forerun. Answers: {verdict}.")


def _explain_changed(console: Console, changed: DemoRound) -> None:
    usage = changed.ours.usage
    assert usage is not None
    if not changed.ours.shown_s:
        why = "nothing could be shown before" if usage.prefill is None else usage.prefill.fell_back
        console.print(f"3: computed exactly: {why}.", markup=False)
        return
    sooner = changed.plain.first_s / changed.ours.shown_s
    console.print(
        f"3: the first word {sooner:.1f} times sooner, from K/V of the unchanged lines moved to their new places. "
        f"* provisional: {usage.confirmed} of {usage.provisional} tokens shown stood; "
        f"the exact first token came after {changed.ours.first_s:.2f} s."
    )
