"""How far a trained drafter's drafts are accepted, by kind of text: from the shipped prompts, written into its file.

    python -m forerun_research.scripts.drafter_outcomes FILE --target TARGET [--device cuda]

A file that says so need not be guessed about in a first request. Counted is what a step gains: tokens accepted in a
row, by depth, of the nodes that a forward of one sequence verifies. Knows no benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from forerun import LLM, SamplingParams, Speculation
from forerun.decode.control.acceptance import DrafterRecord
from forerun.models.formats.adapter import DrafterFile
from forerun.models.formats.drafter_file import read_drafter, write_drafter
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.train.measure import at_context, held_out_prompts

PARALLEL_NODES = 15  # with the last token a tile of 16 rows, where a forward takes hardly longer than for 8
HIDDEN_NODES = 5  # of a small target, whose rows cost more beside its weights
PER_KIND, TOKENS = 12, 96  # prompts and tokens of an answer
LONG_TOKENS = 768  # of prompts of the kind `long`


def measured(llm: LLM, drafter: str, nodes: int, depth: int) -> dict[str, list[list[float]]]:
    """Accepted and tried by depth, for each kind of text that the prompts and their answers have."""
    records = llm.engine.speculator.controller.acceptance.records
    records[drafter] = DrafterRecord()  # nothing of what the file says now
    spec = Speculation(drafter, nodes=nodes, depth=min(depth, nodes))
    params = SamplingParams(max_tokens=TOKENS, speculation=spec)
    short = held_out_prompts(llm, PER_KIND)
    for prompts in (short, at_context(llm, short, LONG_TOKENS)):
        for found in prompts.values():
            for ids in found:
                llm.generate([ids], params)
    return {kind: known.depths for kind, known in records[drafter].kinds.items() if known.total[1]}


def tokens_a_step(depths: Sequence[Sequence[float]]) -> float:
    """Accepted tokens and the target's own."""
    tokens, path = 1.0, 1.0
    for hits, tries in depths:
        path *= hits / tries if tries else 0.0
        tokens += path
    return tokens


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Acceptance of a trained drafter by kind of text, into its file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(given)
    about, tensors = read_drafter(args.file)
    parallel = about.get("kind") == "parallel"
    drafter = (DrafterFile if parallel else HiddenDrafterWeights).of(args.file, about, tensors)
    with LLM(args.target, draft_model=str(args.file), device=args.device) as llm:
        nodes = PARALLEL_NODES if parallel else HIDDEN_NODES
        outcomes = measured(llm, drafter.kind, nodes, drafter.tokens)
    for kind, depths in sorted(outcomes.items()):
        by_depth = " ".join(f"{hits / tries:.2f}" for hits, tries in depths if tries)
        print(f"{kind}: {tokens_a_step(depths):.2f} tokens a step; by depth {by_depth}", flush=True)
    if isinstance(drafter, DrafterFile):
        told = {"parallel": asdict(replace(drafter.parallel, outcomes=outcomes))}
    else:
        told = {"facts": drafter.facts | {"outcomes": outcomes}}
    write_drafter(args.file, tensors, about | told)  # tensors as they were read: nothing is rounded again
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
