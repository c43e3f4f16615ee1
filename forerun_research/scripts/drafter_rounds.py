"""Tokens a round of a trained drafter on task files, at several lengths of context, in the engine.

    python -m forerun_research.scripts.drafter_rounds --target qwen2.5-coder-1.5b-instruct \\
        --draft-model pair.safetensors --drafter parallel --tasks HumanEval.jsonl.gz gsm8k_test_half.jsonl \\
        --nodes 10 31 --contexts 0 4096

Of each category, tasks spread evenly over its file, greedy, a draft of full depth verified in every step: the mean of
accepted tokens and the target's own one, over all steps, and its standard error over tasks. A context is unrelated text
before the prompt, so many tokens together; 0: the prompt alone. Tokens that follow each other in the answer are counted
as the engine accepts them, so the figure does not depend on the machine. --speed adds tokens a second of `auto` and of
plain decoding, in turn, the prompt's time left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams, Speculation
from forerun.train.measure import at_context
from forerun_research.bench.tasks import BenchTask, read_tasks

ROOM = 64  # tokens of context for drafts behind an answer


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a round of a trained drafter.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft-model", required=True, help="a drafter's file, a folder, or a draft model")
    parser.add_argument("--drafter", required=True, help="its name: parallel, block, heads, model")
    parser.add_argument("--tasks", type=Path, nargs="+", required=True)
    parser.add_argument("--per", type=int, default=8, help="tasks of each category")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--nodes", type=int, nargs="+", default=[31])
    parser.add_argument("--depth", type=int, default=16, help="at most")
    parser.add_argument("--contexts", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path, help="lines of JSON, appended as they come")
    return parser.parse_args(given)


def spread(tasks: list[BenchTask], per: int) -> dict[str, list[BenchTask]]:
    """So many of each category, evenly from its first to its last."""
    found: dict[str, list[BenchTask]] = {}
    for task in tasks:
        found.setdefault(task.category, []).append(task)
    return {name: own[:: max(1, len(own) // per)][:per] for name, own in found.items()}


def rounds(llm: LLM, prompts: list[list[int]], spec: Speculation, tokens: int) -> tuple[float, float]:
    """Mean tokens a round over all steps, and its standard error over prompts."""
    steps: list[tuple[int, int]] = []
    for ids in prompts:
        llm.engine.speculator.drafter_pool.forget()
        usage = llm.generate([ids], SamplingParams(max_tokens=tokens, speculation=spec))[0].usage
        steps.append((sum(usage.lengths) + len(usage.lengths), len(usage.lengths)))
    mean = sum(made for made, _ in steps) / max(1, sum(count for _, count in steps))
    each = [made / count for made, count in steps if count]
    return mean, statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0


def speeds(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Tokens a second of plain decoding and of `auto`, prompt by prompt in turn, their K/V cached."""
    seconds, made = {"off": 0.0, "auto": 0.0}, {"off": 0, "auto": 0}
    for ids in prompts:
        llm.generate([ids], SamplingParams(max_tokens=1, speculation="off"))
        for way in seconds:
            llm.engine.speculator.drafter_pool.forget()
            start = time.perf_counter()
            answer = llm.generate([ids], SamplingParams(max_tokens=tokens, speculation=way))[0]
            seconds[way] += time.perf_counter() - start
            made[way] += len(answer.token_ids)
    return made["off"] / seconds["off"], made["auto"] / seconds["auto"]


def main(given: list[str] | None = None) -> int:
    args = parse_args(given)
    tasks = spread(read_tasks(args.tasks), args.per)
    with LLM(
        args.target,
        draft_model=args.draft_model,
        device=args.device,
        max_model_len=max(2048, max(args.contexts) + args.tokens + ROOM),
        quiet=True,
    ) as llm:
        for name, own in tasks.items():
            plain = [task.ids(llm.tokenizer) for task in own]
            for context in args.contexts:
                prompts = at_context(llm, {name: plain}, context)[name] if context else plain
                record: dict[str, Any] = {"category": name, "context": context, "tasks": len(prompts)}
                for nodes in args.nodes:
                    spec = Speculation(args.drafter, nodes=nodes, depth=min(args.depth, nodes))
                    mean, error = rounds(llm, prompts, spec, args.tokens)
                    record[f"nodes_{nodes}"] = [round(mean, 3), round(error, 3)]
                if args.speed:
                    off, auto = speeds(llm, prompts, args.tokens)
                    record |= {"plain": round(off, 1), "auto": round(auto, 1), "times": round(auto / off, 3)}
                line = json.dumps(record)
                print(line, flush=True)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
