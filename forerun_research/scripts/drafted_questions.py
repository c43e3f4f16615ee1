"""Ten questions about one document, its first line changed each time: how soon drafted prompts answer, and whether they
answer the same.

Each question three ways: computed exactly from cold caches; drafted by the profile's own source; and provisionally
from the K/V of the document as it was met first, where only the line changed. Answers are greedy and compared token by
token.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

from forerun import LLM, Prefill, SamplingParams, data

QUESTIONS = (
    "Quote what the handbook above says about the sauna.",
    "Repeat the paragraph of the handbook above about the lighthouse, word for word.",
    "How many steps does the tower have?",
    "What is the supply ship called?",
    "Who decides everything that concerns safety?",
    "Where does the electricity come from?",
    "When does the generator start by itself?",
    "What is the red log for?",
    "How much water does a crew of six use a day?",
    "What is this handbook about?",
)
WAYS = {
    "exact": Prefill(),
    "profile": Prefill("speculative", source="self"),
    "changed line": Prefill("provisional", source="chunk", allow_exact=True),
}


def prompt(number: int, document: str, question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Turn {number} at 09:{number:02}.\n{document}\n\n{question}"}]


def ask(llm: LLM, messages: list[dict[str, str]], prefill: Prefill, tokens: int, cache: bool) -> dict[str, Any]:
    found = llm.chat(messages, SamplingParams(max_tokens=tokens, prefill=prefill, cache=cache))[0]
    usage = found.usage
    report = usage.prefill
    return {
        "ids": found.token_ids,
        "first_s": usage.provisional_s or usage.ttft_s,
        "exact_s": usage.ttft_s,
        "shown": usage.provisional,
        "stood": usage.confirmed,
        "fell_back": "" if report is None else report.fell_back,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--questions", type=int, nargs=2, default=(0, len(QUESTIONS)), metavar=("FIRST", "END"))
    asked = parser.parse_args()
    document, found = data.text("documents/handbook.txt"), list[dict[str, Any]]()
    first, end = asked.questions
    with LLM(asked.model, quiet=True) as llm:
        ask(llm, prompt(0, document, "Say hello."), Prefill(), 1, cache=True)  # the document as it was met first
        for number, question in enumerate(QUESTIONS[first:end], first + 1):
            messages = prompt(number, document, question)
            row = {
                way: ask(llm, messages, prefill, asked.tokens, way == "changed line") for way, prefill in WAYS.items()
            }
            found.append(row)
            print(json.dumps({"question": question} | row), flush=True)
    for way in WAYS:
        own = [row[way] for row in found]
        same = sum(mine["ids"] == row["exact"]["ids"] for mine, row in zip(own, found, strict=True))
        print(
            f"{way}: first word after {median(r['first_s'] for r in own):.2f} s, exact one after "
            f"{median(r['exact_s'] for r in own):.2f} s, {same} of {len(own)} answers as exact prefill's, "
            f"{sum(r['stood'] for r in own)} of {sum(r['shown'] for r in own)} shown tokens stood, "
            f"{sum(bool(r['fell_back']) for r in own)} computed exactly after all"
        )


if __name__ == "__main__":
    main()
