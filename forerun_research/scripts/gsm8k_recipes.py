"""Voting, consensus ranking and planning on GSM8K: accuracy of each on the same questions and the same answers.

`greedy` is one answer at temperature 0. The others share `--candidates` answers at `--temperature` of each question:
`first` is the first of them, `vote` the majority (`recipes.self_consistency`), `consensus` the equilibrium ranking of
the distinct final numbers (`recipes.equilibrium_ranking`), `any` whether one of them is right: no choice can be better.
`plan` has the model plan calls of a calculator before any result is known (`recipes.plan.solve`). One half of the data
is for choosing settings, the other for the report: `--half 0` and `--half 1`. Nothing was chosen so far. Lines in
`--out` are kept, and a run continues where it stopped. With `--at-once` several questions share the engine's steps:
that is quicker on a GPU, and seconds then say nothing.

    python -m forerun_research.scripts.gsm8k_recipes --model qwen2.5-coder-0.5b-instruct --data gsm8k_test_half.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams, recipes
from forerun_research.bench.gsm8k import MathQuestion, final_number, read_questions
from forerun_research.bench.sharing_plan import tools
from forerun_research.studies.intervals import bootstrap, wilson

KV_TOKENS = 65536  # 64 answers with their prompts; a GPU may have other work beside
WAYS = ("greedy", "first", "vote", "consensus", "any", "plan")
EXAMPLES = [
    recipes.plan.Example(
        "A baker has 24 rolls and sells 3 bags of 6. How many rolls are left?",
        "#E1 = Reckon[3 * 6]\n#E2 = Reckon[24 - #E1]",
        {"#E1": "18", "#E2": "6"},
        "6 rolls are left.",
    ),
    recipes.plan.Example(
        "Tom reads 12 pages a day for a week, and then 6 more. How many pages did he read?",
        "#E1 = Reckon[12 * 7]\n#E2 = Reckon[#E1 + 6]",
        {"#E1": "84", "#E2": "90"},
        "He read 90 pages.",
    ),
]
RECKON = {"Reckon": tools(0.0)["Reckon"]}
LIMITS = recipes.plan.Limits(max_calls=6, plan_tokens=128, answer_tokens=48)


def solve(llm: LLM, question: MathQuestion, candidates: int, temperature: float, tokens: int) -> dict[str, Any]:
    """Whether each way has the right number, and its seconds."""
    seconds, start = dict[str, float](), time.perf_counter()
    greedy = llm.chat(question.messages, SamplingParams(0.0, max_tokens=tokens))[0].text
    right = {"greedy": final_number(greedy) == question.answer}
    seconds["greedy"] = time.perf_counter() - start
    start = time.perf_counter()
    params = SamplingParams(temperature, max_tokens=tokens)
    vote = recipes.self_consistency(llm, question.messages, candidates, final_number, params, seed=1)
    seconds["vote"] = time.perf_counter() - start
    numbers = [candidate.vote for candidate in vote.candidates]
    right |= {"first": numbers[0] == question.answer, "vote": vote.answer == question.answer}
    right["any"] = question.answer in numbers
    distinct = [f"{n:g}" for n in dict.fromkeys(numbers) if isinstance(n, float)]
    start = time.perf_counter()
    best = recipes.equilibrium_ranking(llm, question.text, distinct).best if len(distinct) > 1 else "".join(distinct)
    seconds["consensus"] = seconds["vote"] + time.perf_counter() - start
    right["consensus"] = best != "" and float(best) == question.answer
    right["plan"], seconds["plan"] = _planned(llm, question)
    return {"right": right, "seconds": seconds, "distinct": len(distinct)}


def _planned(llm: LLM, question: MathQuestion) -> tuple[bool, float]:
    """The plan's last result is the answer: what the model writes about it afterwards is not needed."""
    start = time.perf_counter()
    try:
        done = recipes.plan.solve(llm, question.text, RECKON, examples=EXAMPLES, limits=LIMITS)
    except recipes.plan.PlanError:
        return False, time.perf_counter() - start
    found = final_number(done.answer), final_number(done.calls[-1].result) if done.calls else None
    return question.answer in found, time.perf_counter() - start


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in (path.read_text().splitlines() if path.exists() else ()))


def summarise(rows: list[dict[str, Any]]) -> None:
    for way in WAYS:
        hits = [bool(row["right"][way]) for row in rows]
        low, high = wilson(sum(hits), len(hits))
        more = [float(hit) - float(row["right"]["first"]) for hit, row in zip(hits, rows, strict=True)]
        gain = "{:+.3f} ({:+.3f} to {:+.3f})".format(sum(more) / len(more), *bootstrap([more]))
        spent = [row["seconds"][way] for row in rows if way in row["seconds"]]
        timed = f"; {sum(spent) / len(spent):.1f} s each" if spent else ""
        share = f"{sum(hits) / len(hits):.3f} ({low:.3f} to {high:.3f})"
        print(f"{way}: {sum(hits)} of {len(hits)} right, {share}; over first {gain}{timed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="every second question, from this one on")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("gsm8k_recipes.jsonl"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new question after so long")
    parser.add_argument("--at-once", type=int, default=1, help="questions")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    known = {row["question"] for row in rows_of(given.out)}
    numbered = list(enumerate(read_questions(given.data)[given.half :: 2][: given.questions]))
    end = time.perf_counter() + given.seconds
    with (
        LLM(given.model, quiet=True, device=given.device, max_model_len=2048, kv_cache_tokens=KV_TOKENS) as llm,
        given.out.open("a") as out,
        ThreadPoolExecutor(given.at_once) as pool,
    ):

        def row_of(numbered: tuple[int, MathQuestion]) -> dict[str, Any] | None:
            number, question = numbered
            if time.perf_counter() > end:
                return None
            return {"question": number, **solve(llm, question, given.candidates, given.temperature, given.tokens)}

        for row in pool.map(row_of, [pair for pair in numbered if pair[0] not in known]):
            if row is not None:
                out.write(json.dumps(row) + "\n")
                out.flush()
    summarise(list(rows_of(given.out)))


if __name__ == "__main__":
    main()
