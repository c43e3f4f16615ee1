"""Distinct trajectories per 1,000 computed tokens: rollout trees beside independent sampling, on GSM8K questions.

    python -m forerun_research.scripts.rollouts --model smollm2-135m-instruct --data gsm8k.jsonl --prompts 6 --budget
    2000

Every question is answered with the same budget of computed tokens by independent sampling, which shares the prompt's
prefill, and by trees that branch on steps and on entropy. Only complete answers count. Prints a line per question and
at last the sums: distinct answers by their tokens, by their final number, and with a mean pairwise edit distance beside
them, because answers that differ in one word are distinct, too.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.recipes.compare import Sampled, independent, sampled
from forerun.sharing.branches import run_sync
from forerun.sharing.rollout import arollout
from forerun.sharing.rollout_config import RolloutConfig
from forerun.sharing.tree import RolloutTree, Trajectory

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(trajectory: Trajectory) -> str | None:
    """The last number of an answer, as GSM8K is judged."""
    found = _NUMBER.findall(trajectory.text)
    return found[-1].replace(",", "").removesuffix(".00") if found else None


def figures(tree: RolloutTree) -> dict[str, Any]:
    by_tokens = sampled(tree)
    return asdict(by_tokens) | {"numbers": sampled(tree, final_number).distinct}


def question(llm: LLM, text: str, config: RolloutConfig) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    row = {"independent": figures(independent(llm, messages, config))}
    for name in ("step", "entropy"):
        row[name] = figures(run_sync(arollout(llm, messages, replace(config, branch_on=name))))
    return row


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in rows[0]:
        parts = [row[way] for row in rows]
        sums = {name: sum(part[name] for part in parts) for name in ("trajectories", "distinct", "tokens", "numbers")}
        sums["distance"] = sum(part["distance"] for part in parts) / len(parts)
        rate = Sampled(sums["trajectories"], sums["distinct"], sums["tokens"], sums["distance"]).per_thousand
        found[way] = sums | {"per_thousand": rate, "numbers_per_thousand": 1000 * sums["numbers"] / sums["tokens"]}
    for way in ("step", "entropy"):
        found[way]["gain"] = found[way]["per_thousand"] / found["independent"]["per_thousand"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--budget", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    config = RolloutConfig(args.width, args.depth, args.budget, params=params)
    rows = []
    with LLM(args.model, threads=args.threads, quiet=True) as llm, args.data.open() as lines:
        for line, _ in zip(lines, range(args.prompts), strict=False):
            rows.append(question(llm, json.loads(line)["question"], config))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(totals(rows)))


if __name__ == "__main__":
    main()
