"""`make demo`: two questions about one long document, so that a newcomer sees what Forerun does not compute twice."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from forerun import data
from forerun.commands import options as opt

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.core import Usage

DOCUMENT = "documents/handbook.txt"
QUESTIONS = (
    "What is the oldest bird ever caught?",
    "When is the sauna heated?",
)


def demo(
    model: opt.Model = opt.DEFAULT_MODEL,
    weights: opt.Weights = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    max_tokens: opt.MaxTokens = 96,
) -> None:
    """Ask two questions about a long document and show what the second one did not have to compute.

    Example: forerun demo --model qwen2.5-coder-0.5b-instruct
    """
    console = Console(highlight=False)
    document = data.text(DOCUMENT)
    with opt.open_llm(model, weights, device, threads) as llm:
        console.print(f"[bold]{model}[/bold], weights {llm.precision.name}, on {llm.decoder.device.type}.")
        console.print(f"Document: a station handbook of {len(document.split()):,} words, shipped with the package.")
        usages = [_ask(llm, console, document, question, max_tokens) for question in QUESTIONS]
    _explain(console, *usages)


def _ask(llm: LLM, console: Console, document: str, question: str, max_tokens: int) -> Usage:
    from forerun import SamplingParams

    # The document comes first: requests share the K/V of what they have in common from the start.
    message = {"role": "user", "content": f"{document}\n\nAnswer from the handbook above: {question}"}
    console.print(f"\n[bold]{question}[/bold]")
    usage = None
    for event in llm.stream([message], SamplingParams(max_tokens=max_tokens)):
        sys.stdout.write(event.text)
        sys.stdout.flush()
        usage = event.usage or usage
    assert usage is not None
    console.print()
    console.print(
        f"first token after {usage.ttft_s:.2f} s · {usage.tokens_per_second:.1f} tokens/s · prompt "
        f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them reused from the prefix tree",
        style="dim",
    )
    return usage


def _explain(console: Console, first: Usage, second: Usage) -> None:
    sooner = first.ttft_s / max(second.ttft_s, 1e-9)
    console.print(
        f"\nThe second question started {sooner:.0f} times sooner: {second.cached_tokens:,} of its "
        f"{second.prompt_tokens:,} prompt tokens had been computed for the first and were read from the KV cache, "
        f"so only {second.computed_tokens:,} were new. `forerun check model` compares answers with and without it."
    )


def main() -> None:
    from forerun.cli import main as forerun

    forerun(["demo", *sys.argv[1:]])


if __name__ == "__main__":
    main()
