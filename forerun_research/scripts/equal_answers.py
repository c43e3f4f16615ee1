"""Greedy answers with every drafter and in batches against plain decoding's, token for token, on any device.

    python -m forerun_research.scripts.equal_answers --target qwen2.5-coder-1.5b-instruct \\
        --draft-model qwen2.5-coder-0.5b-instruct --tasks HumanEval.jsonl.gz spec_bench_half.jsonl --answers 200

Tasks are spread evenly over the files. First each is answered plainly and alone; then alone with each drafter, and by
`auto` and plainly in batches of several sizes. A row says how many answers are equal, and where the first other one
parts. Answers of batches that are wider than what gives equal bits (`batch_invariant`) may part; all others must not.
Exit status 1 where one does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from forerun import LLM, SamplingParams
from forerun_research.bench.tasks import read_tasks

DRAFTERS = ("auto", "lookup", "suffix", "copy", "parallel", "model")


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Equal greedy answers with and without drafts.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--tasks", type=Path, nargs="*", default=[])
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS))
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-invariant", action="store_true", help="equal bits in batches of any width")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = parse_args(given)
    invariant = True if args.batch_invariant else None
    llm = LLM(args.target, draft_model=args.draft_model, device=args.device, max_num_seqs=64, batch_invariant=invariant)
    tasks = read_tasks(args.tasks)
    tasks = tasks[:: max(1, len(tasks) // args.answers)][: args.answers]
    conversations = [task.messages for task in tasks]
    exact = llm.engine.runner.decoding_rows or 1 << 20
    print(f"{len(tasks)} answers of up to {args.tokens} tokens, equal bits up to {exact} rows", flush=True)

    def answer(speculation: str, batch: int) -> list[list[int]]:
        params, found = SamplingParams(max_tokens=args.tokens, speculation=speculation), list[list[int]]()
        for first in range(0, len(tasks), batch):
            found += [each.token_ids for each in llm.chat(conversations[first : first + batch], params)]
            llm.engine.clear_cache()
        return found

    plain, failed = answer("off", 1), 0
    for speculation, batch in [
        *((name, 1) for name in args.drafters),
        *((s, b) for b in args.batches for s in ("off", "auto")),
    ]:
        start = time.perf_counter()
        answers = answer(speculation, batch)
        parted = [i for i, pair in enumerate(zip(plain, answers, strict=True)) if pair[0] != pair[1]]
        promised = batch <= exact or args.batch_invariant
        failed += len(parted) * promised
        row = {"speculation": speculation, "batch": batch, "equal": len(tasks) - len(parted), "of": len(tasks)}
        if parted:
            one, other = plain[parted[0]], answers[parted[0]]
            at = next(
                (k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)),
            )
            row |= {"first": tasks[parted[0]].category, "at token": at, "promised": promised}
        print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
