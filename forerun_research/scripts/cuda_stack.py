"""Checks and times forwards on the GPU at hand: one launch (`Stack`), graphs and draft chains, on random models.

    python -m forerun_research.scripts.cuda_stack --json out.json [--parts check,chain,move,time,draft] [--models 1.5b]

Checks compare with the reference attention backend on a copy of the cache, a row's logits alone with the same row's
among others bit by bit, and chains with the same steps run one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT
from forerun.models.attention import SdpaAttention
from forerun.models.build import build_decoder
from forerun.models.cuda.graphs import GraphRunner
from forerun.models.cuda.stack import ChainRunner
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner, Span
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint

DEVICE = torch.device("cuda")
CONTEXT = 4096
SHAPES["small"] = replace(SHAPES["0.5b"], vocab_size=4096, num_layers=4)
SHAPES["narrow"] = replace(SHAPES["1.5b"], vocab_size=4096, num_layers=3)
SHAPES["wide"] = replace(SHAPES["8b"], vocab_size=4096, num_layers=2)

# sequences as (entries before, new tokens, whether all but the first are a tree)
CASES = [
    [(511, 1, False)],
    [(2, 1, False)],
    [(496, 16, False)],
    [(1995, 5, False)],
    [(511, 1, False)] * 16,
    [(30, 5, False), (600, 1, False), (77, 3, False)],
    [(511, 8, True)],
    [(60, 16, True)],
    [(15, 9, True), (250, 1, False), (63, 4, True)],
    [(300, 32, True)],
    [(63, 4, False), (64, 4, True)] * 4,
    [(511, 1, False)] * 24,
    [(100, 8, True), (500, 8, False)] * 4,
    [(511, 1, False)] * 64,
    [(33, 48, True)],
    [(900, 3, True), (12, 1, False), (64, 9, True)] * 3,
]


def load(shape: str) -> Runner:
    decoder = build_decoder(RandomCheckpoint(shape, DEVICE), DEVICE, "bf16", CONTEXT, quiet=True)[0]
    pool = PagePool(decoder.config, 64 * 40, 16, torch.bfloat16, DEVICE)
    for cache in itertools.chain(*pool.kv):
        cache.normal_()
    return Runner(decoder, pool, CONTEXT)


def spans(decoder: Decoder, sequences: list[tuple[int, int, bool]], draw: random.Random) -> list[Span]:
    """On pages of their own, in random order."""
    sizes = [-(-(before + new + 16) // 16) for before, new, _ in sequences]
    pages = draw.sample(range(64 * 40), sum(sizes))
    made = []
    for (before, new, tree), size in zip(sequences, sizes, strict=True):
        ids = [draw.randrange(decoder.config.vocab_size) for _ in range(new)]
        own = array("i", [pages.pop() for _ in range(size)])
        parents = [draw.randrange(ROOT, node) if node else ROOT for node in range(new - 1)] if tree else []
        made.append(Span(ids, before, own, range(new), before + 1 if tree else 0, parents))
    return made


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def check(shape: str, report: dict) -> None:
    runner, draw = load(shape), random.Random(1)
    decoder, graphs = runner.decoder, runner.graphs
    assert graphs is not None
    reference = replace(decoder, attention=SdpaAttention(decoder.config, DEVICE, CONTEXT, same_bits=False))
    for sequences in CASES:
        work = spans(decoder, sequences, draw)
        batch = runner.batch(work)
        rows = len(batch.tokens)
        kept = [(k.clone(), v.clone()) for k, v in runner.kv]
        want = reference.forward(batch.to(DEVICE), kept).logits
        for _ in range(2):
            output = graphs.run(batch)
        assert output is not None and output.greedy is not None
        error = relative(output.logits, want)
        slots = torch.from_numpy(batch.slot_mapping).to(DEVICE)
        cache = max(relative(a[slots], b[slots]) for pair, other in zip(runner.kv, kept, strict=True)
                    for a, b in zip(pair, other, strict=True))  # fmt: skip
        right = torch.equal(output.greedy.cuda(), output.logits.argmax(-1))
        together, same = output.logits.clone(), True
        stack = graphs._stack(rows)
        for i in {0, len(work) - 1} if stack else set():  # a sequence's first token alone, through the smaller launch
            one = Span(work[i].ids[:1], work[i].first, work[i].pages, range(1))
            alone = graphs.run(runner.batch([one]))
            same = same and alone is not None and torch.equal(alone.logits[0], together[batch.cu_seqlens[i]])
        ok = error < 2e-2 and cache < 2e-2 and right and same
        report.setdefault("check", []).append({"shape": shape, "sequences": sequences, "error": error, "ok": ok})
        print(f"{'ok   ' if ok else 'WRONG'} {shape} {len(work)} seqs, {rows} rows, {'stack' if stack else 'graph'}, "
              f"tree {batch.bits is not None}: logits {error:.1e}, cache {cache:.1e}, greedy {right}, alone {same}",
              flush=True)  # fmt: skip
    print(f"{shape}: {[s and s.cut for s in graphs.stacks.values()]}, {len(graphs._graphs)} graphs", flush=True)


def chain(shape: str, report: dict) -> None:
    """A chain is what its steps give one by one: tokens, K/V, and probabilities from the logits."""
    runner, draw = load(shape), random.Random(2)
    if not runner.decoder.config.tie_embeddings:
        return
    chains = ChainRunner(runner.decoder, runner.kv, CONTEXT, 16)
    few = ChainRunner(runner.decoder, runner.kv, CONTEXT, 16, head_rows=1024)
    cases = [[(511, 1, False)], [(60, 3, False)], [(63, 4, False), (200, 1, False)], [(30, 1, False)] * 16,
             [(500, 2, False)] * 8]  # fmt: skip
    for sequences in cases:
        work, depth, ok = spans(runner.decoder, sequences, draw), 8, True
        before = [(k.clone(), v.clone()) for k, v in runner.kv]
        got = chains.run(runner.batch(work), depth)
        after = [(k.clone(), v.clone()) for k, v in runner.kv]
        for now, then in zip(itertools.chain(*runner.kv), itertools.chain(*before), strict=True):
            now.copy_(then)
        step = work
        for d in range(depth):
            output = runner.forward([replace(span, logits_indices=[len(span.ids) - 1]) for span in step])
            assert output.greedy is not None
            sure = output.logits.softmax(-1).amax(-1).tolist()
            tokens = output.greedy.tolist()
            ok &= tokens == [t[d] for t in got.tokens]
            ok &= all(abs(a - b[d]) < 1e-4 * a for a, b in zip(sure, got.probs, strict=True))
            step = [Span([t], s.first + len(s.ids), s.pages, [0]) for t, s in zip(tokens, step, strict=True)]
        ok &= all(torch.equal(a, b) for a, b in zip(itertools.chain(*runner.kv), itertools.chain(*after), strict=True))
        ok &= all(t < 1024 for row in few.run(runner.batch(work), 4).tokens for t in row)
        report.setdefault("chain", []).append({"shape": shape, "sequences": sequences, "ok": bool(ok)})
        print(f"{'ok   ' if ok else 'WRONG'} {shape} chain of {depth}, {len(work)} sequences", flush=True)


def move(shape: str, report: dict) -> None:
    runner, draw = load(shape), random.Random(3)
    assert runner.graphs is not None
    for count in (1, 3, 16, 64, 150):  # a path through a tree; the last ones in several launches
        source, target = sorted(draw.sample(range(300, 1000), count)), list(range(300, 300 + count))
        want = [cache.clone() for cache in itertools.chain(*runner.kv)]
        for cache in want:
            cache[torch.tensor(target).cuda()] = cache[torch.tensor(source).cuda()]
        runner.graphs.move(source, target)
        ok = all(torch.equal(a, b) for a, b in zip(itertools.chain(*runner.kv), want, strict=True))
        ms = timed(partial(runner.graphs.move, source, target))
        print(f"{'ok   ' if ok else 'WRONG'} {shape} move of {count}: {ms * 1e3:.0f} us", flush=True)
        report.setdefault("move", []).append({"shape": shape, "count": count, "ok": ok, "ms": ms})


def timed(call: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds on the device."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def wall(call: Callable[[], object], repeats: int = 30) -> float:
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


def times(shape: str, report: dict) -> None:
    runner, draw = load(shape), random.Random(4)
    apart = GraphRunner(runner.decoder, runner.kv, CONTEXT, 16)
    apart.stacks = dict.fromkeys(apart.stacks | {32: None})
    one = (511, 1, False)
    cases: dict[str, list[tuple[int, int, bool]]] = {
        "1x1": [one], "1x2": [(510, 2, False)], "1x4": [(508, 4, False)], "1x8": [(504, 8, False)],
        "1x16": [(496, 16, False)], "tree 8": [(504, 8, True)], "tree 16": [(496, 16, True)],
        "2x4": [(508, 4, False)] * 2, "4x4": [(508, 4, False)] * 4, "8x2": [(510, 2, False)] * 8, "16x1": [one] * 16,
        "1x1 at 4000": [(3999, 1, False)],
        "1x24": [(488, 24, False)], "tree 32": [(480, 32, True)], "8x4": [(508, 4, False)] * 8, "32x1": [one] * 32,
        "16x4": [(508, 4, False)] * 16, "64x1": [one] * 64, "32x2": [(510, 2, False)] * 32,
        "tree 48": [(480, 48, True)],
    }  # fmt: skip
    for name, sequences in cases.items():
        batch, row = runner.batch(spans(runner.decoder, sequences, draw)), {}
        rows = len(batch.tokens)
        for how, graphs in (("stack", runner.graphs), ("graph", apart)):
            assert graphs is not None
            stack = graphs._stack(rows)
            if (how == "stack") != (stack is not None):
                continue
            begin = time.perf_counter()
            graphs.run(batch)
            row[f"{how} first"] = time.perf_counter() - begin
            call = stack.launch if stack else graphs._graph(batch).graph.replay  # type: ignore[union-attr]
            row[how] = timed(call)
            row[f"{how} run"] = wall(partial(graphs.run, batch))
        report.setdefault("time", []).append({"shape": shape, "case": name} | row)
        print(f"{shape} {name:12}" + ", ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    print(f"{shape}: {len(apart._graphs)} graphs, {torch.cuda.memory_reserved() / 2**30:.1f} GiB reserved", flush=True)


def draft(shape: str, report: dict) -> None:
    runner, draw = load("0.5b"), random.Random(5)
    for head_rows in (None, 65536, 32768):
        chains = ChainRunner(runner.decoder, runner.kv, CONTEXT, 16, head_rows)
        for seqs, new in ((1, 1), (1, 4), (4, 1), (16, 1)):
            batch = runner.batch(spans(runner.decoder, [(511, new, False)] * seqs, draw))
            for depth in (1, 2, 4, 8):
                chains.run(batch, depth)
                ms, whole = timed(chains.stack.launch), wall(partial(chains.run, batch, depth))
                report.setdefault("draft", []).append(
                    {"head": head_rows, "seqs": seqs, "new": new, "depth": depth, "ms": ms, "run": whole}
                )
                print(f"chain head {head_rows} {seqs}x{new} depth {depth}: {ms:.3f} ms, {ms / depth:.3f} a token, "
                      f"run {whole:.3f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="check,chain,move,time,draft")
    parser.add_argument("--models", default="1.5b")
    args = parser.parse_args()
    report: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts = {"check": check, "chain": chain, "move": move, "time": times, "draft": draft}
    shapes = {
        "check": ["small", "narrow", "wide"],
        "chain": ["small", "narrow"],
        "move": ["small", "narrow"],
        "draft": ["0.5b"],
    }
    for part in args.parts.split(","):
        begin = time.time()
        for shape in shapes.get(part, args.models.split(",")):
            parts[part](shape, report)
            torch.cuda.empty_cache()
            args.json.write_text(json.dumps(report, indent=1))
        print(f"-- {part}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
