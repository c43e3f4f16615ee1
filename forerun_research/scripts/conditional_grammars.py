"""Conditional against masked sampling on the default model: 50 schemas, a statistical test of each, and classification.

The law of a schema is computed by scoring each of its texts and its end by itself, through code that the sampler does
not use. Both samplers get the same schema with the same spacing. Nothing is tuned. `--data` is a .jsonl file with
`category` and `turns` (Spec-Bench): the categories are labels for the first turns.

    python -m forerun_research.scripts.conditional_grammars --samples 200 --data spec_bench_half.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun import LLM, Grammar, SamplingParams, recipes
from forerun.checks.lossless.statistics import Cells, fit, survival
from forerun.decode.grammar import ONE_SPACING
from forerun.sharing.scoring import score_continuations
from forerun_research.studies.intervals import bootstrap, wilson

SIGNIFICANCE = 0.001
ENUMS: dict[str, list[list[str]]] = {
    "a capital city of Europe": [["Paris", "Prague", "Porto", "Palermo"], ["London", "Lisbon", "Ljubljana", "La Paz"]],
    "a country": [["New Zealand", "Norway", "North Macedonia", "Netherlands"], ["United Kingdom", "Uganda", "Uruguay"]],
    "a fruit": [["apple", "apricot", "avocado", "pineapple"], ["blackberry", "blueberry", "banana", "black grapes"]],
    "a colour": [["light blue", "light green", "blue", "green"], ["dark red", "dark grey", "red", "reddish brown"]],
    "an animal": [["sea lion", "sea otter", "seal", "seagull"], ["polar bear", "panda", "penguin", "poodle"]],
    "a job": [["software developer", "sociologist", "soldier", "singer"], ["teacher", "technician", "tailor"]],
    "a month": [["January", "June", "July"], ["March", "May", "August", "April"]],
    "a mood": [["happy", "hopeful", "happy but tired"], ["angry", "anxious", "a bit angry"]],
    "a kind of weather": [["rain", "rainy", "raining heavily"], ["sunny", "snow", "sun and clouds"]],
    "a tool": [["screwdriver", "saw", "scissors"], ["hammer", "hand drill", "hacksaw"]],
}


def schemas() -> list[tuple[str, dict[str, Any]]]:
    """50 questions, each with a schema of few values."""
    found: list[tuple[str, dict[str, Any]]] = []
    for topic, groups in ENUMS.items():
        for values in groups:
            found.append((f"Name {topic}, as JSON text.", {"enum": values}))
            one = {"name": {"enum": values}}
            found.append((f"Name {topic}, as a JSON object with `name`.", _object(one)))
        both = {"name": {"enum": groups[0]}, "known": {"type": "boolean"}}
        found.append((f"Name {topic} and whether it is well known, as a JSON object.", _object(both)))
    return [(question, schema | ONE_SPACING) for question, schema in found]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def texts_of(llm: LLM, schema: dict[str, Any]) -> list[str]:
    trie = llm.engine.intake.trie(Grammar.json(schema, "conditional"))
    assert trie is not None
    return [trie.name(item) for item in range(trie.num_items)]


def law(llm: LLM, prompt: list[int], texts: list[str]) -> Cells:
    ends, ids = llm.engine.intake.end_ids, [llm.tokenizer.encode(text) for text in texts]
    scores = score_continuations(llm, prompt, [[*each, end] for each in ids for end in ends]).totals
    weights = np.exp(np.array(scores)).reshape(len(texts), -1).sum(1)
    probs = weights / weights.sum()
    # a cell's name is its text's number, one token deep
    return Cells({**{(i,): float(p) for i, p in enumerate(probs)}, (): 0.0}, {(): torch.zeros(1)})


def compare_samplers(llm: LLM, samples: int, limit: int, out: Path) -> None:
    """Appends a line to `out` for each schema and sampler; those that are there are not run again."""
    done = {(row["schema"], row["sampler"]) for row in _rows(out)}
    for number, (question, schema) in enumerate(schemas()[:limit]):
        prompt = llm.encode([{"role": "user", "content": question}])
        texts = texts_of(llm, schema)
        expected = law(llm, prompt, texts)
        for name in ("masked", "conditional"):
            if (number, name) in done:
                continue
            row = {"schema": number, "sampler": name, **_sampled(llm, prompt, schema, name, texts, expected, samples)}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number:2d} {name:11s} p {row['p']:.2g}  distance {row['distance']:.3f}  {question}", flush=True)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _sampled(
    llm: LLM, prompt: list[int], schema: dict[str, Any], name: Any, texts: list[str], expected: Cells, samples: int
) -> dict[str, float]:
    params = SamplingParams(temperature=1.0, max_tokens=64, n=samples, seed=1000 * len(texts))
    start = time.perf_counter()
    (done,) = llm.generate([prompt], params, grammar=Grammar.json(schema, name))
    seconds = time.perf_counter() - start
    numbers = [(texts.index(choice.text),) for choice in done.choices]
    result = fit(_merged(expected, samples), numbers)
    seen = Counter(numbers)
    distance = 0.5 * sum(abs(seen[i,] / samples - expected.probs[i,]) for i in range(len(texts)))
    found = {"p": result.p_value, "statistic": min(result.statistic, 1e9), "freedom": max(1, result.cells - 1)}
    ahead = done.usage.conditional.seconds if done.usage.conditional is not None else 0.0
    return {**found, "distance": distance, "seconds": seconds, "ahead_s": ahead}


def summarise(out: Path) -> None:
    for name in ("masked", "conditional"):
        rows = [row for row in _rows(out) if row["sampler"] == name]
        statistic, freedom = sum(row["statistic"] for row in rows), sum(row["freedom"] for row in rows)
        together, alone = survival(statistic, freedom), sum(row["p"] < SIGNIFICANCE for row in rows)
        verdict = "accepted" if together >= SIGNIFICANCE else "rejected"
        distances = [row["distance"] for row in rows]
        low, high = bootstrap([distances])
        print(f"{name}: {verdict} at {SIGNIFICANCE:g}, chi-square {statistic:.0f}, {freedom} degrees, p {together:.2g}")
        print(
            f"  {alone} of {len(rows)} schemas rejected alone; distance {np.mean(distances):.3f} ({low:.3f}-{high:.3f})"
        )
        ahead = 1000 * np.median([row["ahead_s"] for row in rows])
        print(f"  {sum(row['seconds'] for row in rows):.0f} s; looking ahead {ahead:.0f} ms a schema in the median")


def _merged(expected: Cells, samples: int) -> Cells:
    """Cells that expect too few samples become one."""
    large = {cell: p for cell, p in expected.probs.items() if p * samples >= 5.0}
    return Cells({**large, (): max(0.0, 1.0 - sum(large.values()))}, expected.expanded)


def compare_labels(llm: LLM, path: Path, limit: int) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    labels = sorted({row["category"] for row in rows})
    per_label = -(-limit // len(labels))
    chosen = [row for label in labels for row in [r for r in rows if r["category"] == label][:per_label]]
    hits: dict[str, list[bool]] = {"conditional": [], "masked": []}
    seconds = dict.fromkeys(hits, 0.0)
    for row in chosen:
        question = recipes.label_question(row["turns"][0][:400], labels)
        llm.generate([llm.encode(question)], max_tokens=1)  # the prompt is in the cache for both
        start = time.perf_counter()
        hits["conditional"].append(recipes.classify(llm, question, labels).label == row["category"])
        between = time.perf_counter()
        answer = llm.chat(question, grammar=Grammar.choice(labels), max_tokens=32)[0].text
        seconds["masked"] += time.perf_counter() - between
        seconds["conditional"] += between - start
        hits["masked"].append(answer == row["category"])
    for name, found in hits.items():
        low, high = wilson(sum(found), len(found))
        share, spent = f"{sum(found) / len(found):.3f} ({low:.3f} to {high:.3f})", 1000 * seconds[name] / len(found)
        print(f"{len(labels)} labels, {name}: {sum(found)} of {len(found)} right, {share}; {spent:.0f} ms a text")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--samples", type=int, default=200, help="answers of each sampler for each schema, 256 at most")
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("conditional_grammars.jsonl"), help="figures, continued")
    parser.add_argument("--data", type=Path, help="texts with categories")
    parser.add_argument("--texts", type=int, default=120)
    given = parser.parse_args()
    with LLM(given.model, quiet=True) as llm:
        if given.schemas:
            compare_samplers(llm, given.samples, given.schemas, given.out)
            summarise(given.out)
        if given.data is not None:
            compare_labels(llm, given.data, given.texts)


if __name__ == "__main__":
    main()
