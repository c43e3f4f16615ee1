"""Conditional against masked sampling on the default model: 50 schemas, a statistical test of each, and classification.

The law of a schema is computed by scoring each of its texts and its end by itself, through code that the sampler does
not use. Both samplers get the same schema with the same spacing. Nothing is tuned. `--data` is a .jsonl file with
`category` and `turns` (Spec-Bench): the categories are labels for the first turns.

The test compares the likelihood ratio of the answers (all texts, rare ones too) with that of answers drawn from the law
itself, so its p-value is exact for any number of answers. It can reject the mask only where the two laws differ, so
schemas have values that begin like a likely answer and end like none. `laws` is the distance (total variation) of the
two over the texts' usual tokens, `power` the probability that the test rejects answers drawn from the mask's law.
`--power` prints these for every schema and samples nothing.

    python -m forerun_research.scripts.conditional_grammars --samples 200 --data spec_bench_half.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun import LLM, Grammar, SamplingParams, recipes
from forerun.checks.lossless.statistics import survival
from forerun.decode.grammar import ONE_SPACING
from forerun.decode.trie import TokenTrie
from forerun.runtime.answer_tree import AnswerTree
from forerun.runtime.look_ahead import LookAhead
from forerun.sharing.scoring import score_continuations
from forerun_research.studies.intervals import bootstrap, wilson

SIGNIFICANCE = 0.001
POWER_DRAWS, TEST_DRAWS = 1000, 20_000
ENUMS: dict[str, list[list[str]]] = {
    "a capital city of Europe": [["Paris", "Prague", "Porto", "Palermo"], ["London", "Lisbon", "Ljubljana", "La Paz"]],
    "a country": [["New Zealand", "Norway", "North Macedonia", "Netherlands"], ["United Airlines", "Uganda", "Peru"]],
    "a fruit": [["apple tree bark", "kiwi", "plum", "pear"], ["orange traffic cone", "fig", "lime"]],
    "a colour": [["blue whale", "green", "teal"], ["red fire engine", "grey", "pink"]],
    "an animal": [["dog house", "seal", "seagull", "cat"], ["polar bear", "panda", "penguin", "poodle"]],
    "a job": [["software developer", "sociologist", "soldier", "singer"], ["teacher", "technician", "tailor"]],
    "a month": [["January", "June", "July"], ["March", "May", "August", "April"]],
    "a mood": [["happy hour menu", "calm", "sad"], ["angry", "anxious", "a bit angry"]],
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


def law(llm: LLM, prompt: list[int], texts: list[str]) -> np.ndarray:
    """Probabilities [texts] of the answers, given that they are one of the texts."""
    ends, ids = llm.engine.intake.end_ids, [llm.tokenizer.encode(text) for text in texts]
    scores = score_continuations(llm, prompt, [[*each, end] for each in ids for end in ends]).totals
    weights = np.exp(np.array(scores) - max(scores)).reshape(len(texts), -1).sum(1)
    return np.asarray(weights / weights.sum())


def ratios(probs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """2 log of the likelihood ratio of counts [..., texts] against their law."""
    expected = counts.sum(-1, keepdims=True) * probs
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / expected), 0.0)
    return np.asarray(2.0 * terms.sum(-1))


def p_values(probs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of counts [N, texts]: the probability that as many answers of the law itself fit it no better, simulated."""
    drawn = np.sort(ratios(probs, np.random.default_rng(0).multinomial(int(counts[0].sum()), probs, TEST_DRAWS)))
    as_large = TEST_DRAWS - np.searchsorted(drawn, ratios(probs, counts) - 1e-9)
    return np.asarray((1 + as_large) / (1 + TEST_DRAWS))


def laws(llm: LLM, prompt: list[int], trie: TokenTrie) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [items] of the texts by their usual tokens: given the grammar, and under a mask."""
    given, masked = np.full(len(trie), -np.inf), np.full(len(trie), -np.inf)  # log-probabilities of nodes
    items = np.full((2, trie.num_items), -np.inf)
    given[0] = masked[0] = 0.0
    look, ends = LookAhead(llm.driver, prompt, SamplingParams(temperature=1.0)), llm.engine.intake.end_ids
    with llm.driver.lease() as lease:
        for node, row in look._rows(AnswerTree(lease, prompt), trie):
            children = trie.children(node)
            own = row[torch.from_numpy(trie.tokens[children].astype(np.int64))].double().numpy()
            end = float(torch.logsumexp(row[ends].double(), 0)) if trie.items[node] >= 0 else -np.inf
            allowed = np.logaddexp.reduce([*own, end])
            given[children], masked[children] = given[node] + own, masked[node] + own - allowed
            if trie.items[node] >= 0:
                items[:, trie.items[node]] = given[node] + end, masked[node] + end - allowed
    conditional, mask = np.exp(items - np.logaddexp.reduce(items, axis=1, keepdims=True))
    return conditional, mask


def power(expected: np.ndarray, mask: np.ndarray, samples: int) -> float:
    """The probability that the test rejects so many answers of the mask's law, simulated."""
    seen = np.random.default_rng(1).multinomial(samples, mask / mask.sum(), POWER_DRAWS)
    return float(np.mean(p_values(expected, seen) < SIGNIFICANCE))


def print_power(llm: LLM, samples: int, limit: int) -> None:
    found = []
    for number, (question, schema) in enumerate(schemas()[:limit]):
        prompt = llm.encode([{"role": "user", "content": question}])
        texts = texts_of(llm, schema)
        trie = llm.engine.intake.trie(Grammar.json(schema, "conditional"))
        assert trie is not None
        conditional, mask = laws(llm, prompt, trie)
        expected = law(llm, prompt, texts)
        error = float(np.abs(expected - conditional).max())
        found.append((0.5 * float(np.abs(conditional - mask).sum()), power(expected, mask, samples)))
        named = texts[int(conditional.argmax())], texts[int(mask.argmax())]
        print(
            f"{number:2d} laws {found[-1][0]:.3f}  power {found[-1][1]:.2f}  ({error:.1g})  {' / '.join(named)}",
            flush=True,
        )
    certain = sum(p >= 0.99 for _, p in found)
    distances = [d for d, _ in found]
    rejections = sum(p for _, p in found)
    print(f"{len(found)} schemas: {certain} with a power of 0.99 or more; {rejections:.1f} rejections to expect")
    print(f"distance of the laws: median {np.median(distances):.3f}, {min(distances):.3f} to {max(distances):.3f}")


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
    llm: LLM, prompt: list[int], schema: dict[str, Any], name: Any, texts: list[str], expected: np.ndarray, samples: int
) -> dict[str, float]:
    params = SamplingParams(temperature=1.0, max_tokens=64, n=samples, seed=1000 * len(texts))
    start = time.perf_counter()
    (done,) = llm.generate([prompt], params, grammar=Grammar.json(schema, name))
    seconds = time.perf_counter() - start
    seen = Counter(choice.text for choice in done.choices)
    counts = np.array([seen[text] for text in texts])
    assert counts.sum() == samples, f"an answer that is no text of the schema: {seen.keys() - set(texts)}"
    distance = 0.5 * float(np.abs(counts / samples - expected).sum())
    ahead = done.usage.conditional.seconds if done.usage.conditional is not None else 0.0
    return {"p": float(p_values(expected, counts[None])[0]), "distance": distance, "seconds": seconds, "ahead_s": ahead}


def summarise(out: Path) -> None:
    for name in ("masked", "conditional"):
        rows = [row for row in _rows(out) if row["sampler"] == name]
        together = survival(-2.0 * sum(math.log(row["p"]) for row in rows), 2 * len(rows))  # Fisher's method
        alone = sum(row["p"] < SIGNIFICANCE for row in rows)
        verdict = "accepted" if together >= SIGNIFICANCE else "rejected"
        distances = [row["distance"] for row in rows]
        low, high = bootstrap([distances])
        print(f"{name}: {verdict} at {SIGNIFICANCE:g}, all schemas together p {together:.2g}")
        print(
            f"  {alone} of {len(rows)} schemas rejected alone; distance {np.mean(distances):.3f} ({low:.3f}-{high:.3f})"
        )
        ahead = 1000 * np.median([row["ahead_s"] for row in rows])
        print(f"  {sum(row['seconds'] for row in rows):.0f} s; looking ahead {ahead:.0f} ms a schema in the median")


def compare_labels(llm: LLM, path: Path, limit: int, names: str) -> None:
    """`names`: labels joined by commas, and only texts of these; empty: all."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    labels = names.split(",") if names else sorted({row["category"] for row in rows})
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
    more = [float(a) - float(b) for a, b in zip(hits["conditional"], hits["masked"], strict=True)]
    low, high = bootstrap([more])
    print(f"conditional over masked, the same texts: {np.mean(more):+.3f} ({low:+.3f} to {high:+.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--samples", type=int, default=200, help="answers of each sampler for each schema, 256 at most")
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("conditional_grammars.jsonl"), help="figures, continued")
    parser.add_argument("--power", action="store_true", help="what the test can show, without sampling")
    parser.add_argument("--data", type=Path, help="texts with categories")
    parser.add_argument("--labels", default="", help="of --data, joined by commas; default: all")
    parser.add_argument("--texts", type=int, default=120)
    given = parser.parse_args()
    with LLM(given.model, quiet=True) as llm:
        if given.power:
            print_power(llm, given.samples, given.schemas)
        elif given.schemas:
            compare_samplers(llm, given.samples, given.schemas, given.out)
            summarise(given.out)
        if given.data is not None:
            compare_labels(llm, given.data, given.texts, given.labels)


if __name__ == "__main__":
    main()
