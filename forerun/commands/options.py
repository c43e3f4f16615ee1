"""Options that several subcommands share, and the objects made from them. Knows no engine until one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.core import Usage

DEFAULT_MODEL = "smollm2-135m-instruct"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name, a folder, a .gguf file, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct."
    ),
]
Weights = Annotated[
    str,
    typer.Option("--weights", "-w", help="auto, float32, fp16, bf16 or int8. auto: int8 for quantised files on CPU."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: one for each core.")]
PoolTokens = Annotated[
    int | None, typer.Option("--pool-tokens", min=16, help="Tokens the KV cache holds; default: by free memory.")
]
MaxContext = Annotated[int | None, typer.Option("--max-context", min=16, help="Longest prompt and answer together.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy. 0.7: usual for chat.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this total probability.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest one.")]
Repetition = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: repeat less, prompt included.")]
Presence = Annotated[float, typer.Option("--presence-penalty", help="-2 to 2: against tokens already in the answer.")]
Frequency = Annotated[float, typer.Option("--frequency-penalty", help="-2 to 2: the same, for each time they came.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End the answer before this text; may be repeated.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same answer.")]
System = Annotated[str | None, typer.Option("--system", help="A system message to start the conversation with.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print what the answer cost on stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Data = Annotated[Path | None, typer.Option("--data", help="Prompts of your own: a .jsonl file, or any text file.")]


def open_llm(
    model: str,
    weights: str,
    device: str,
    threads: int | None = None,
    pool_tokens: int | None = None,
    max_context: int | None = None,
) -> LLM:
    from forerun import LLM

    return LLM(model, weights=weights, device=device, threads=threads, pool_tokens=pool_tokens, max_context=max_context)


def stop_strings(given: list[str] | None) -> tuple[str, ...]:
    """A shell passes a backslash and an n; people mean a line break."""
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in given or ())


def usage_line(usage: Usage, finish_reason: str | None) -> str:
    """What an answer cost, in one line."""
    parts = [
        f"prompt {usage.prompt_tokens:,} tokens ({usage.cached_tokens:,} reused)",
        f"first token {usage.ttft_s:.2f} s",
        f"{usage.completion_tokens:,} tokens at {usage.tokens_per_second:.1f}/s",
        f"total {usage.total_s:.2f} s",
    ]
    return " · ".join([*parts, finish_reason or "unfinished"])
