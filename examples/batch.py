"""Many prompts at once: they share batches and prefixes, and a progress bar counts finished answers.

python examples/batch.py                      # questions of its own
python examples/batch.py questions.txt        # one question a line
"""

from __future__ import annotations

import sys
from pathlib import Path

from forerun import LLM, SamplingParams

QUESTIONS = [f"What is {a} plus {b}? Answer with a number." for a in (2, 7, 11) for b in (3, 5)]


def main(questions: list[str]) -> None:
    with LLM() as llm:
        conversations = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(conversations, SamplingParams(max_tokens=24), progress=True)
        for question, answer in zip(questions, answers, strict=True):
            print(f"{question}  ->  {answer.text.strip()}")
        stats = llm.stats()
        print(f"{stats.answers} answers, {stats.completion_tokens} tokens, {stats.cached_share:.0%} of prompts cached")


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text().splitlines() if len(sys.argv) > 1 else QUESTIONS)
