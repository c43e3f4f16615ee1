"""Thousands of tiny requests through one engine: does memory stay flat, and is every page given back?

    python -m forerun_research.scripts.soak [--requests 10000] [--model PATH]

Without --model, a tiny random model of the tests is made in a temporary folder. Requests differ in everything a request
can differ in: prompts (some share prefixes), lengths, sampling, stop strings, n, log-probabilities; some are cancelled
half-way and some are refused. The pool is small, so pages are evicted and requests preempted all the time. Exit status
1 when a page is missing at the end or resident memory grew by more than --limit MB after the first tenth.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import track

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.inputs import Prompt

REQUESTS_PER_CALL = 10  # requests of one call; every tenth call is a stream that is left early
SHARED_PREFIXES = [list(range(3 + 7 * k, 3 + 7 * k + 48)) for k in range(8)]  # beginnings that requests have in common


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or tiny_model(Path(scratch))
        with LLM(model, threads=1, quiet=True, kv_cache_tokens=args.kv_cache_tokens, max_model_len=256) as llm:
            return soak(llm, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Thousands of tiny requests: memory flat, pages given back?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default=None, help="a name, folder or .gguf file; default: a tiny random model")
    parser.add_argument("--kv-cache-tokens", type=int, default=512)
    parser.add_argument("--limit", type=float, default=8.0, help="MB that resident memory may grow by")
    return parser.parse_args()


def tiny_model(folder: Path) -> str:
    from tests import tiny

    return str(tiny.write_folder(folder / "tiny", "llama"))


def soak(llm: LLM, args: argparse.Namespace) -> int:
    console, process, rng = Console(stderr=True), psutil.Process(), random.Random(0)
    calls = max(args.requests // REQUESTS_PER_CALL, 10)
    counts = {"answered": 0, "cancelled": 0, "refused": 0, "preempted": 0, "tokens": 0}
    resident: list[float] = []  # MB after each tenth
    for call in track(range(1, calls + 1), "soaking", console=console):
        ask(llm, rng, counts, leave=call % 10 == 0)
        if call % (calls // 10) == 0:
            resident.append(process.memory_info().rss / 1e6)
            used, tree = llm.engine.pool.used, llm.engine.tree.num_pages
            console.print(
                f"{call * REQUESTS_PER_CALL:>7,} requests: {resident[-1]:.1f} MB resident; "
                f"pages: {used} used, {tree} in the tree"
            )
    llm.clear_cache()
    left, grown = llm.engine.pool.used, resident[-1] - resident[0]
    print(
        ", ".join(f"{value:,} {name}" for name, value in counts.items()),
        f"resident {resident[0]:.1f} MB after a tenth, {resident[-1]:.1f} MB at the end ({grown:+.1f} MB)",
        f"{left} of {llm.engine.pool.num_pages} pages left allocated",
        sep="\n",
    )
    return int(left > 0 or grown > args.limit)


def ask(llm: LLM, rng: random.Random, counts: dict[str, int], leave: bool) -> None:
    """One call with BATCH requests: all answered, all refused because of one bad prompt, or streams left early."""
    vocab = llm.config.vocab_size
    prompts = [prompt(rng, vocab) for _ in range(REQUESTS_PER_CALL)]
    batch: list[Prompt] = [*prompts]  # the same lists
    if leave:
        for ids in prompts:
            stream = llm.stream(ids, params(rng))
            next(stream)
            del stream  # closes the generator, which cancels the request
        counts["cancelled"] += REQUESTS_PER_CALL
        return
    if rng.random() < 0.02:
        prompts[rng.randrange(REQUESTS_PER_CALL)].append(vocab)  # not a token
    try:
        answers = llm.generate(batch, params(rng))
    except BadRequest:
        counts["refused"] += REQUESTS_PER_CALL
        return
    counts["answered"] += REQUESTS_PER_CALL
    counts["preempted"] += sum(answer.usage.preemptions for answer in answers)
    counts["tokens"] += sum(answer.usage.completion_tokens for answer in answers)


def prompt(rng: random.Random, vocab: int) -> list[int]:
    """A beginning that others share, or none, and some tokens of its own."""
    start = rng.choice([[], *SHARED_PREFIXES])
    return [*start[: rng.randrange(49)], *(rng.randrange(3, vocab) for _ in range(rng.randint(1, 40)))]


def params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 4, 8, 24]),
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.1]),
        stop=rng.choice([(), ("e",), ("never comes",)]),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=rng.choice([None, None, 3]),
        ignore_eos=rng.random() < 0.5,
    )


if __name__ == "__main__":
    raise SystemExit(main())
