"""Accepted length of the verifiers on the same drawn trees: does a better rule pay?

    python -m forerun_research.scripts.tree_verification --model 1.5B.gguf --draft 0.5B.gguf --data HumanEval.jsonl.gz
    --out trees.jsonl

Trees are drawn by the draft model along answers that the target itself drew, one every few tokens; every verifier
judges every tree with the same numbers of draws. To judge thousands of times in reasonable time, the vocabulary
is cut to tokens that are among the likeliest of any node, drafted tokens included; the rest (its share is written down)
is one token. Prints the mean accepted length (drafted tokens that were accepted, and one), its ratio to `rejection`,
and the standard error of that ratio over trees.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
from array import array
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams, Speculation
from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import Context, SeededRng
from forerun.decode.verifiers import make_verifier
from forerun.decode.verify import Target
from forerun.models.execution.runner import Span
from forerun_research.bench.tasks import read_tasks

VERIFIERS = ("rejection", "traversal", "transport")
TOKENS_PER_NODE = 256  # likeliest tokens of each node that keep a place of their own


class Table:
    """A target made of rows of probabilities; what `Target` is to an engine."""

    def __init__(self, probs: torch.Tensor) -> None:
        self._probs = probs  # [1 + nodes, V']

    def probs(self, node: int) -> torch.Tensor:
        return self._probs[node + 1]

    def draw(self, node: int) -> int:
        return int(self._probs[node + 1].argmax())  # none of these verifiers follows the target's own draws


def trees(llm: LLM, prompt: list[int], args: argparse.Namespace) -> list[tuple[Draft, torch.Tensor, float]]:
    """Trees along one answer, each with the target's distributions at its root and nodes [1 + nodes, V']."""
    plain = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.tokens, speculation="off")
    answer = llm.generate(prompt, plain)[0].token_ids
    runner, pool = llm.engine.runner, llm.engine.pool
    drafter = llm.engine.speculator.drafter_pool["model"]
    llm.clear_cache()
    pages = array("i", pool.allocate(pool.pages_for(len(prompt) + len(answer) + args.nodes)))
    found, done = [], 0
    params = SamplingParams(temperature=args.temperature, speculation=Speculation("model", args.nodes, args.depth))
    for at in range(args.every, len(answer), args.every):
        tokens = [*prompt, *answer[:at]]
        runner.forward([Span(tokens[done:-1], done, pages, ())])
        done = len(tokens) - 1
        context = Context(params, tokens, len(prompt), seed=args.seed + at)
        draft = drafter.propose([DraftRequest(id(pages), context, args.depth, args.nodes, pages, sampled=True)])[0]
        if len(draft) == 0:
            continue
        span = Span([tokens[-1], *draft.tokens], done, pages, range(1 + len(draft)), done + 1, draft.parents)
        target = Target(runner.forward([span]).logits, context, draft)
        found.append(small(draft, torch.stack([target.probs(node) for node in range(ROOT, len(draft))])))
    drafter.finish(id(pages), [], 0)
    pool.release(pages)
    return found


def small(draft: Draft, probs: torch.Tensor) -> tuple[Draft, torch.Tensor, float]:
    """The same draft and target on the tokens that matter; what the others hold at most is the last number."""
    q = torch.stack(list(draft.proposals.values())).to(probs.device)
    likely = [rows.topk(min(TOKENS_PER_NODE, rows.shape[-1]), -1).indices.flatten() for rows in (probs, q)]
    kept = torch.cat([*likely, torch.tensor(draft.tokens, device=probs.device)]).unique()
    place = {int(token): i for i, token in enumerate(kept)}

    def cut(rows: torch.Tensor) -> torch.Tensor:
        own = rows[:, kept].double()
        rest = rows.double().sum(-1, keepdim=True) - own.sum(-1, keepdim=True)
        return torch.cat([own, rest.clamp_min(0)], -1).cpu()

    target, proposals = cut(probs), cut(q)
    tokens = [place[token] for token in draft.tokens]
    rows = dict(zip(draft.proposals, proposals, strict=True))
    return Draft(tokens, draft.parents, draft.probs, draft.sources, rows), target, float(target[:, -1].max())


def judge(job: tuple[Draft, torch.Tensor, float, int]) -> dict[str, float]:
    """Mean accepted length of each verifier on one tree."""
    torch.set_num_threads(1)
    draft, probs, _, rng = job
    lengths = {}
    for name in VERIFIERS:
        verifier = make_verifier(Speculation(verify=name))
        rolls = [verifier.verify(draft, Table(probs), SeededRng(roll, 7)) for roll in range(rng)]
        lengths[name] = sum(1 + len(verdict.path) for verdict in rolls) / rng
    return lengths


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means, and ratios to `rejection` with the standard error over trees (delta method)."""
    n = len(rows)
    mean = {name: sum(row[name] for row in rows) / n for name in VERIFIERS}
    base = mean["rejection"]
    found: dict[str, Any] = {"trees": n}
    for name in VERIFIERS:
        ratio = mean[name] / base
        spread = sum((row[name] - ratio * row["rejection"]) ** 2 for row in rows) / max(1, n - 1)
        error = math.sqrt(spread / n) / base
        found[name] = {"length": round(mean[name], 3), "ratio": round(ratio, 4), "error": round(error, 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("trees.jsonl"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--nodes", type=int, default=96)
    parser.add_argument("--rngs", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    cores = max(1, (os.cpu_count() or 2) - 1)
    with (
        LLM(args.model, draft_model=args.draft, max_model_len=2048, kv_cache_tokens=8192) as llm,
        args.out.open("w") as out,
        multiprocessing.get_context("spawn").Pool(cores) as pool,
    ):
        for task in read_tasks([args.data])[: args.prompts]:
            jobs = [(*tree, args.rngs) for tree in trees(llm, task.ids(llm.tokenizer), args)]
            for job, row in zip(jobs, pool.map(judge, jobs, chunksize=1), strict=True):
                rows.append(row)
                out.write(json.dumps(row | {"nodes": len(job[0]), "rest": job[2]}) + "\n")
            out.flush()
            if rows:
                print(json.dumps(summary(rows)), flush=True)


if __name__ == "__main__":
    main()
