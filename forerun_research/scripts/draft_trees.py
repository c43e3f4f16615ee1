"""Logged draft trees: acceptance by domain, depth and entropy, and what choosing nodes by their marginal gain is worth.

The first run logs (`--log`): along greedy answers of the target, every few tokens a tree of the draft model, the tokens
that the target went on with, the target's entropy there, and the seconds of its forwards by size. Tables are made of
the log alone; a log that is there is not made again.

Acceptance is that of the most probable child, once its parent is right. The ablation lays each logged tree out by
several rules and counts, from the log, the tokens each would have given, and the seconds by the logged costs: `chain`
is the most probable path of D tokens, `tree` the N most probable nodes, `least` all nodes whose path has at least that
probability, `gain` the nodes that make expected tokens over seconds largest (`control.selection.select`, what the
engine does; marginal gain, as in SMART). Drafting takes the same rounds for all rules and is left out. D, N and the
least probability are chosen on the even trees, and figures are of the odd ones.

    python -m forerun_research.scripts.draft_trees --data spec_bench_half.jsonl --per-category 2
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun import LLM, SamplingParams, Speculation
from forerun.core import ROOT, Draft
from forerun.decode.control.cost import CostCurve
from forerun.decode.control.selection import StepCosts, select
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import Context
from forerun.decode.tree import path_probs
from forerun.models.execution.runner import Span
from forerun_research.bench.tasks import BenchTask, read_tasks
from forerun_research.bench.tasks import select as select_tasks
from forerun_research.studies.intervals import bootstrap, wilson

TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ENTROPY_BOUNDS = (0.0, 0.1, 0.5, 1.0, 2.0, 20.0)  # nats
KV_TOKENS = 16384  # one answer runs at a time; a GPU may have other work beside
MIN_TRIES = 10  # of a figure that is printed
Choice = Callable[[Draft, list[float]], list[int]]  # of a tree and the probabilities of its paths: nodes to verify


# -- the log -----------------------------------------------------------------------------------------------------------


def log_answer(llm: LLM, task: BenchTask, given: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Trees along one answer."""
    prompt = task.ids(llm.tokenizer)
    answer = list(llm.generate(prompt, SamplingParams(0.0, max_tokens=given.tokens, speculation="off"))[0].token_ids)
    runner, pool = llm.engine.runner, llm.engine.pool
    llm.prepare(SamplingParams(speculation="model"))  # on a GPU `auto` has others
    drafter = llm.engine.speculator.drafter_pool["model"]
    pages = array("i", pool.allocate(pool.pages_for(len(prompt) + len(answer) + given.nodes)))
    params, done = SamplingParams(0.0, speculation=Speculation("model", given.nodes, given.depth)), 0
    for at in range(1, len(answer), given.every):
        tokens = [*prompt, *answer[:at]]
        logits = runner.forward(
            [Span(tokens[done:], done, pages, range(len(tokens) - done - 1, len(tokens) - done))]
        ).logits
        done = len(tokens)
        probs = torch.softmax(logits[-1].float(), -1)
        context = Context(params, tokens, len(prompt), seed=0)
        draft = drafter.propose([DraftRequest(id(pages), context, given.depth, given.nodes, pages)])[0]
        yield {
            "category": task.category,
            "entropy": -float(torch.special.xlogy(probs, probs).sum()),
            "follows": answer[at : at + given.depth + 1],
            "tokens": draft.tokens,
            "parents": draft.parents,
            "probs": [round(p, 5) for p in draft.probs],
        }
    drafter.finish(id(pages), [], 0)
    pool.release(pages)


def write_log(given: argparse.Namespace) -> None:
    tasks = select_tasks(read_tasks(given.data), given.per_category)
    sizes: dict[str, Any] = {"max_model_len": 2048, "kv_cache_tokens": KV_TOKENS}
    opened = LLM(given.model, draft_model=given.draft_model, quiet=True, device=given.device, **sizes)
    with opened as llm, given.log.open("w") as out:
        costs = {rows: llm.engine.runner.time_forward(rows, 256) for rows in TIMED_ROWS}
        out.write(json.dumps({"model": given.model, "draft_model": given.draft_model, "seconds": costs}) + "\n")
        for task in tasks:
            for row in log_answer(llm, task, given):
                out.write(json.dumps(row) + "\n")
            out.flush()


# -- acceptance --------------------------------------------------------------------------------------------------------


def chain_hits(tree: dict[str, Any]) -> list[bool]:
    """Of the most probable path, by depth: whether each token is right, up to the first that is not."""
    draft, node, hits = _draft(tree), ROOT, list[bool]()
    children = draft.children()
    for right in tree["follows"]:
        if node not in children:
            break
        node = max(children[node], key=lambda n: draft.probs[n])
        hits.append(draft.tokens[node] == right)
        if not hits[-1]:
            break
    return hits


def print_acceptance(trees: list[dict[str, Any]]) -> None:
    by: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in ("domain", "depth", "entropy, nats")}
    for tree in trees:
        hits = chain_hits(tree)
        for depth, hit in enumerate(hits, 1):
            by["domain"][tree["category"]].append(hit)
            by["depth"][str(depth)].append(hit)
        place = int(np.searchsorted(ENTROPY_BOUNDS, tree["entropy"], side="right"))
        by["entropy, nats"][f"{ENTROPY_BOUNDS[place - 1]:g} to {ENTROPY_BOUNDS[place]:g}"] += hits[:1]
    for name, groups in by.items():
        print(f"\n| {name} | tried | accepted |\n|---|---|---|")
        for group, hits in sorted(groups.items(), key=lambda item: item[0]):
            if len(hits) >= MIN_TRIES:
                low, high = wilson(sum(hits), len(hits))
                print(f"| {group} | {len(hits)} | {sum(hits) / len(hits):.2f} ({low:.2f}-{high:.2f}) |")


# -- which nodes -------------------------------------------------------------------------------------------------------


def accepted(draft: Draft, nodes: list[int], follows: list[int]) -> int:
    """Tokens that verifying these nodes gives: those of a path that are right, and one."""
    kept, node, count = set(nodes), ROOT, 1
    children = draft.children()
    for right in follows[:-1]:
        node = next((n for n in children.get(node, []) if n in kept and draft.tokens[n] == right), -2)
        if node < 0:
            break
        count += 1
    return count


def chain_of(depth: int) -> Choice:
    def choose(draft: Draft, paths: list[float]) -> list[int]:
        children, node, found = draft.children(), ROOT, list[int]()
        while len(found) < depth and node in children:
            node = max(children[node], key=lambda n: draft.probs[n])
            found.append(node)
        return found

    return choose


def most_probable(count: int) -> Choice:
    return lambda draft, paths: sorted(range(len(paths)), key=lambda n: -paths[n])[:count]


def at_least(prob: float) -> Choice:
    return lambda draft, paths: [n for n, path in enumerate(paths) if path >= prob]


def by_gain(curve: CostCurve) -> Choice:
    def choose(draft: Draft, paths: list[float]) -> list[int]:
        return select(curve, [draft], [draft.probs], [len(draft)], 0, StepCosts(0.0, 0.0), []).nodes[0]

    return choose


def rate(trees: list[dict[str, Any]], choose: Choice, curve: CostCurve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, seconds and verified nodes of each tree."""
    found = []
    for tree in trees:
        draft = _draft(tree)
        nodes = choose(draft, path_probs(draft, draft.probs))
        found.append((accepted(draft, nodes, tree["follows"]), curve.seconds(1 + len(nodes)), len(nodes)))
    tokens, seconds, nodes = np.array(found).T
    return tokens, seconds, nodes


def print_ablation(trees: list[dict[str, Any]], costs: dict[str, float]) -> None:
    curve = CostCurve({int(rows): seconds for rows, seconds in costs.items()})
    rules: dict[str, dict[str, Choice]] = {
        "chain": {str(d): chain_of(d) for d in (1, 2, 3, 4, 6, 8)},
        "tree": {str(n): most_probable(n) for n in (2, 4, 6, 8, 12, 16, 24)},
        "least": {str(p): at_least(p) for p in (0.5, 0.3, 0.2, 0.1, 0.05)},
        "gain": {"": by_gain(curve)},
    }
    plain = 1.0 / curve.seconds(1)
    print("\n| nodes | chosen | verified a step | tokens a step | times plain |\n|---|---|---|---|---|")
    ours = rate(trees[1::2], by_gain(curve), curve)
    for name, settings in rules.items():
        tuned = {key: rate(trees[::2], choose, curve) for key, choose in settings.items()}
        best = max(tuned, key=lambda key: tuned[key][0].sum() / tuned[key][1].sum())
        tokens, seconds, nodes = rate(trees[1::2], settings[best], curve)
        low, high = bootstrap([tokens, seconds], lambda a, b: float(a.sum() / b.sum() / plain))
        gain = f"{tokens.sum() / seconds.sum() / plain:.2f} ({low:.2f}-{high:.2f})"
        less = bootstrap([*ours[:2], tokens, seconds], lambda a, b, c, d: float(a.sum() / b.sum() * d.sum() / c.sum()))
        beside = "" if name == "gain" else f"; gain is {less[0]:.2f}-{less[1]:.2f} of it"
        print(f"| {name} | {best} | {nodes.mean():.1f} | {tokens.mean():.2f} | {gain}{beside} |")


def _draft(tree: dict[str, Any]) -> Draft:
    return Draft(tree["tokens"], tree["parents"], tree["probs"], ["model"] * len(tree["tokens"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b-instruct")
    parser.add_argument("--draft-model", default="qwen2.5-coder-0.5b-instruct")
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--log", type=Path, default=Path("draft_trees.jsonl"))
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if not given.log.exists():
        write_log(given)
    head, *trees = [json.loads(line) for line in given.log.read_text().splitlines()]
    domains = {tree["category"] for tree in trees}
    print(f"{len(trees)} trees of {len(domains)} domains, {head['draft_model']} for {head['model']}")
    print_acceptance(trees)
    print_ablation(trees, head["seconds"])


if __name__ == "__main__":
    main()
