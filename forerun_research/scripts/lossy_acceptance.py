"""Accepted length against task score under lossy verifiers: GSM8K, drafts drawn by a draft model.

Each rule (`rejection` is lossless, `bounded:B` bounds the total variation of every position by B, `bounded_kl:B` its KL
divergence in nats) answers the same questions with the same seeds. Printed for each: tokens a pass of the target gave,
share of drafted tokens accepted, accuracy with its interval, difference of accuracy to the first rule on the same
questions, and the sum that the answers report as spent (`usage.distance`), a token. Lines in `--out` are kept, and a
run continues where it stopped.

    python -m forerun_research.scripts.lossy_acceptance --model qwen2.5-coder-1.5b-instruct
    --draft-model qwen2.5-coder-0.5b-instruct --data gsm8k_test_half.jsonl --questions 50
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun_research.bench.gsm8k import MathQuestion, final_number, read_questions
from forerun_research.bench.speculate_tasks import parse_rule
from forerun_research.studies.intervals import bootstrap, wilson

RULES = "rejection,bounded:0.02,bounded:0.1,bounded:0.3,bounded_kl:0.01,bounded_kl:0.1,bounded_kl:1"
KV_TOKENS = 65536  # 64 answers with their prompts; a GPU may have other work beside
DEPTH = 5  # drafted tokens a step, the same for all rules: what they accept of the same drafts is compared


def answer(llm: LLM, questions: list[MathQuestion], rule: str, temperature: float, tokens: int) -> list[dict[str, Any]]:
    """All questions at once."""
    spec = replace(parse_rule(rule), nodes=DEPTH, depth=DEPTH)
    asked = [
        SamplingParams(temperature, max_tokens=tokens, seed=number, speculation=spec)
        for number in range(len(questions))
    ]
    done = llm.chat([question.messages for question in questions], asked)
    return [
        {
            "rule": rule,
            "text": each.text,
            "right": final_number(each.text) == question.answer,
            "tokens": each.usage.completion_tokens,
            "steps": each.usage.steps,
            "drafted": each.usage.drafted,
            "accepted": each.usage.accepted,
            "distance": each.usage.distance,
        }
        for question, each in zip(questions, done, strict=True)
    ]


def summarise(rows: list[dict[str, Any]]) -> None:
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    first = {row["question"]: row["right"] for row in rows if row["rule"] == rules[0]}
    print("| rule | questions | tokens a pass | accepted | right | over the first rule | spent a token |")
    print("|---|---|---|---|---|---|---|")
    for rule in rules:
        own = [row for row in rows if row["rule"] == rule and row["question"] in first]
        sums = {name: sum(row[name] for row in own) for name in ("tokens", "steps", "drafted", "accepted", "distance")}
        columns = [[float(row[name]) for row in own] for name in ("tokens", "steps")]
        length = "{:.2f}-{:.2f}".format(*bootstrap(columns, lambda a, b: float(a.sum() / b.sum())))
        hits = sum(row["right"] for row in own)
        share = "{:.2f}-{:.2f}".format(*wilson(hits, len(own)))
        more = [float(row["right"]) - float(first[row["question"]]) for row in own]
        gain = "{:+.2f} ({:+.2f} to {:+.2f})".format(sum(more) / len(more), *bootstrap([more]))
        print(
            f"| {rule} | {len(own)} | {sums['tokens'] / sums['steps']:.2f} ({length}) "
            f"| {sums['accepted'] / max(1, sums['drafted']):.2f} | {hits / len(own):.2f} ({share}) | {gain} "
            f"| {sums['distance'] / max(1, sums['tokens']):.4f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--rules", default=RULES)
    parser.add_argument(
        "--batch", type=int, default=8, help="questions at once; on a GPU many leave no rows for drafts"
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("lossy_acceptance.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new batch after so long")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known, start = {(row["rule"], row["question"]) for row in rows}, time.perf_counter()
    questions = read_questions(given.data)[: given.questions]
    opened = {"quiet": True, "device": given.device, "max_model_len": 2048, "kv_cache_tokens": KV_TOKENS}
    with LLM(given.model, draft_model=given.draft_model, **opened) as llm, given.out.open("a") as out:
        for at in range(0, len(questions), given.batch):
            part = questions[at : at + given.batch]
            for rule in given.rules.split(","):
                if (rule, at) in known or time.perf_counter() - start > given.seconds:
                    continue
                for number, row in enumerate(answer(llm, part, rule, given.temperature, given.tokens), at):
                    rows.append({"question": number, **row})
                    out.write(json.dumps(rows[-1]) + "\n")
                out.flush()
    summarise(rows)


if __name__ == "__main__":
    main()
