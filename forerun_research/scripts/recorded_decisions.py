"""The decision whether to draft, on recorded answers and a simulated clock: every drafter on the same text, in seconds.

    python -m forerun_research.scripts.recorded_decisions record FOLDER --target T --draft-model D --files FILE ...
    python -m forerun_research.scripts.recorded_decisions play FOLDER --target T --drafter-file F --machine cores

`record` answers tasks plainly and keeps what the draft model proposes at every token, with and without its Markov head
(two cores: 8 s an answer of 128 tokens). `play` gives the answers again by `auto`, lookup, the draft model's drafter
and plain decoding, in the costs of one H200 or of two cores (`bench/recorded_engine.py`; `cores` and `zen5` are two
CPUs): how much faster each is, by category, and what `auto` is of the best. No figure of any hardware: simulated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forerun import LLM, SamplingParams, Speculation
from forerun.core import Draft
from forerun.decode.drafters import parallel
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.best_first import PlainMarginals, grow, most_probable
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun_research.bench.recorded_engine import (
    BLOCK,
    CORES,
    H200,
    ZEN5,
    RecordedAnswer,
    RecordedEngine,
    seconds_by_drafter,
)
from forerun_research.bench.tasks import BenchTask, read_tasks

NODES = 31  # of a recorded tree
DRAFTERS = ("off", "auto", "lookup", "parallel")
WARM_UP_TOKENS = 16  # of a first answer by each drafter, as in `bench speculate`
CPU_TOKENS = 96  # of an answer at most on the machine without a device, as in its benches
MACHINES = {"h200": H200, "cores": CORES, "zen5": ZEN5}

Trees = dict[str, Any]  # by kind: tokens, parents, probabilities


@contextmanager
def proposals() -> Iterator[list[tuple[int, Trees]]]:
    """What the drafter proposes, by tokens of the sequence. Its drafts are empty, so that answers are plain."""
    found: list[tuple[int, Trees]] = []

    def kept(tree: TreeBuilder, marginals: Any, mixer: Any = None) -> None:
        plain = PlainMarginals(marginals._logits, most_probable(marginals._logits))
        trees = {}
        for kind, each in (("markov", marginals), ("plain", plain)):
            grown = TreeBuilder(tree.request, tree.source)
            grow(grown, each)
            draft = grown.draft
            trees[kind] = [draft.tokens, draft.parents, [round(prob, 4) for prob in draft.probs]]
        found.append((len(tree.request.tokens), trees))

    draft_all = parallel.ParallelDrafter.propose

    def propose(self: parallel.ParallelDrafter, requests: list[DraftRequest]) -> list[Draft]:
        draft_all(self, requests)
        return [Draft() for _ in requests]

    with patch.object(parallel, "grow", kept), patch.object(parallel.ParallelDrafter, "propose", propose):
        yield found


def record(args: argparse.Namespace) -> None:
    by_category: dict[str, list[BenchTask]] = {}
    for task in read_tasks(args.files):
        by_category.setdefault(task.category, []).append(task)
    spec = Speculation(parallel.ParallelDrafter.name, nodes=NODES, depth=BLOCK)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, speculation=spec)
    args.folder.mkdir(parents=True, exist_ok=True)
    with LLM(args.target, draft_model=args.draft_model, device="cpu", quiet=True) as llm, proposals() as found:
        for category, tasks in by_category.items():
            for number in args.tasks:
                path = args.folder / f"{category}_{number}.json"
                if number >= len(tasks) or path.exists():
                    continue
                ids = tasks[number].ids(llm.tokenizer)
                found.clear()
                answer = llm.generate([ids], params)[0]
                drafts = {tokens - len(ids): trees for tokens, trees in found}
                tokens = [*answer.token_ids, *([] if answer.finish_reason == "length" else llm.tokenizer.eos_ids[:1])]
                made = {"category": category, "prompt": list(ids), "answer": tokens, "drafts": drafts}
                path.write_text(json.dumps(made), encoding="utf-8")
                print(f"{category} {number}: {len(tokens)} tokens", flush=True)


def read(folder: Path, tasks: Sequence[int], most: int) -> list[RecordedAnswer]:
    found = []
    for path in sorted(folder.glob("*.json")):
        if int(path.stem.rpartition("_")[2]) in tasks:
            body = json.loads(path.read_text(encoding="utf-8"))
            drafts = {int(at): trees for at, trees in body["drafts"].items()}
            found.append(RecordedAnswer(body["category"], body["prompt"], body["answer"][:most], drafts, most))
    return found


def play(args: argparse.Namespace) -> None:
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint
    from forerun.models.formats.drafter_file import read_drafter

    machine = MACHINES[args.machine]
    recorded = read(args.folder, args.tasks, args.tokens if machine.step_s else min(args.tokens, CPU_TOKENS))
    about, _ = read_drafter(args.drafter_file)
    tokenizer = open_checkpoint(resolve(args.target)).tokenizer()
    engine = RecordedEngine(machine, about["parallel"]["outcomes"], tokenizer)
    first = recorded[0]
    warm = RecordedAnswer(first.category, first.prompt, first.answer[:WARM_UP_TOKENS], first.drafts, WARM_UP_TOKENS)
    for drafter in DRAFTERS:
        engine.answer([warm], drafter)
    for line in table(seconds_by_drafter(engine, recorded, DRAFTERS)):
        print(line)


def table(seconds: dict[str, dict[str, float]]) -> list[str]:
    """How many times as fast as plain decoding, and `auto` of the best."""
    lines = []
    rows = {**seconds, "all": {name: sum(own[name] for own in seconds.values()) for name in DRAFTERS}}
    for category, own in rows.items():
        ratios = {name: own["off"] / own[name] for name in DRAFTERS[1:]}
        cells = " ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        lines.append(f"{category:16s} {cells}, auto of the best {ratios['auto'] / max(ratios.values()):.2f}")
    return lines


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The decision whether to draft, on recorded answers.")
    commands = parser.add_subparsers(required=True)
    for run in (record, play):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path)
        command.add_argument("--target", required=True)
        command.add_argument("--tasks", type=int, nargs="+", default=[0, 1, 2], help="of each category, from 0 on")
        command.add_argument("--tokens", type=int, default=128)
        if run is record:
            command.add_argument("--draft-model", required=True)
            command.add_argument("--files", type=Path, nargs="+", required=True)
        else:
            command.add_argument("--drafter-file", type=Path, required=True)
            command.add_argument("--machine", choices=tuple(MACHINES), default="cores")
    args = parser.parse_args(given)
    args.run(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
