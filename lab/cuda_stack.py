"""Checks and times captured forwards on the GPU at hand: one launch (`Stack`) and kernel by kernel, on random models.

    python lab/cuda_stack.py --json out.json [--parts check,time] [--models 1.5b,8b]

Checks compare replays with `Decoder.forward`, and a row's logits alone with the same row's among others, bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from array import array
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from forerun.bench.shapes import SHAPES, RandomCheckpoint
from forerun.cache.pool import PagePool
from forerun.engine.runner import Runner, Span
from forerun.models.build import build_decoder
from forerun.models.cuda import linear
from forerun.models.cuda.graphs import GraphRunner
from forerun.models.decoder import Decoder

DEVICE = torch.device("cuda")
SHAPES["small"] = replace(
    SHAPES["1.5b"], vocab_size=4096, hidden_size=896, num_layers=4, num_heads=14, head_dim=64, intermediate_size=4864
)
SHAPES["wide"] = replace(SHAPES["8b"], vocab_size=4096, num_layers=2)


def load(shape: str, context: int) -> Decoder:
    return build_decoder(RandomCheckpoint(shape, DEVICE), DEVICE, "bf16", context, quiet=True)[0]


def pool_for(decoder: Decoder, pages: int) -> PagePool:
    c = decoder.config
    kv = [
        tuple(torch.randn(2, pages * 16, c.num_kv_heads, c.head_dim, device=DEVICE, dtype=torch.bfloat16))
        for _ in range(c.num_layers)
    ]
    pool = PagePool.__new__(PagePool)
    pool.kv, pool.page_size = kv, 16  # type: ignore[assignment]
    return pool


def spans(decoder: Decoder, seqs: int, new: int, context: int, draw: torch.Generator) -> list[Span]:
    """`seqs` sequences of `new` tokens each, the last at `context`, on pages of their own in random order."""
    pages = torch.randperm(seqs * -(-context // 16), generator=draw).int().view(seqs, -1)
    ids = torch.randint(decoder.config.vocab_size, (seqs, new), generator=draw).tolist()
    return [Span(ids[s], context - new, array("i", pages[s].tolist()), range(new)) for s in range(seqs)]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def check(shape: str, report: dict) -> None:
    decoder = load(shape, 4096)
    runner = Runner(decoder, pool_for(decoder, 64 * 40), 4096)
    graphs = runner.graphs
    assert graphs is not None
    print(f"{shape}: one launch {graphs.stack is not None}, {graphs.stack.cut if graphs.stack else ''}", flush=True)
    draw = torch.Generator().manual_seed(1)
    cases = [(1, 1, 512), (1, 1, 3), (1, 16, 512), (1, 5, 2000), (16, 1, 512), (3, 1, 77), (9, 1, 600), (64, 1, 512)]
    for seqs, new, context in cases:
        work = spans(decoder, seqs, new, context, draw)
        batch = runner.batch(work)
        kept = [(k.clone(), v.clone()) for k, v in runner.pool.kv]
        eager = decoder.forward(batch.to(DEVICE), kept)
        for _ in range(2):
            output = graphs.run(batch)
        assert output is not None and output.greedy is not None
        error = relative(output.logits, eager.logits)
        cache = max(relative(a, b) for pair, other in zip(runner.pool.kv, kept, strict=True)
                    for a, b in zip(pair, other, strict=True))  # fmt: skip
        right = torch.equal(output.greedy.cuda(), output.logits.argmax(-1))
        together = output.logits.clone()
        alone = (
            [graphs.run(runner.batch([span])).logits.clone() for span in work[:2]] if new == 1 and seqs <= 16 else []
        )
        same = all(torch.equal(o[0], together[i]) for i, o in enumerate(alone))
        if new > 1:  # the first token of several, alone
            one = Span(work[0].ids[:1], work[0].first, work[0].pages, range(1))
            o = graphs.run(runner.batch([one]))
            same = o is not None and torch.equal(o.logits[0], together[0])
        ok = error < 2e-2 and cache < 1e-2 and right and same
        report.setdefault("check", []).append({"shape": shape, "seqs": seqs, "new": new, "error": error, "ok": ok})
        print(f"{'ok   ' if ok else 'WRONG'} {shape} {seqs} x {new} at {context}: logits {error:.1e}, "
              f"cache {cache:.1e}, greedy {right}, same alone {same}", flush=True)  # fmt: skip


def replay_ms(graphs: GraphRunner, runner: Runner, work: list[Span], repeats: int = 40) -> float:
    batch = runner.batch(work)
    graphs.run(batch)
    graph = graphs._graphs[graphs._bucket(batch)].graph  # type: ignore[index]
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def times(shape: str, report: dict) -> None:
    decoder = load(shape, 4096)
    runner = Runner(decoder, pool_for(decoder, 64 * 40), 4096)
    draw = torch.Generator().manual_seed(2)
    for graphs, name in ((runner.graphs, "one launch"), (GraphRunner(decoder, runner.pool.kv, 4096, 16), "by kernel")):
        assert graphs is not None
        if name == "by kernel":
            graphs.stack = None
        base = 0.0
        for seqs, new, context in [
            (1, 1, 512),
            (1, 4, 512),
            (1, 8, 512),
            (1, 16, 512),
            (16, 1, 512),
            (1, 1, 4000),
            (64, 1, 512),
        ]:
            if name == "one launch" and seqs > 16:
                continue
            ms = replay_ms(graphs, runner, spans(decoder, seqs, new, context, draw))
            base = base or ms
            report.setdefault("time", []).append(
                {"shape": shape, "how": name, "seqs": seqs, "new": new, "context": context, "ms": ms}
            )
            print(f"{shape} {name} {seqs} x {new} at {context}: {ms:.3f} ms, {ms / base:.2f}x", flush=True)


def batches(shape: str, report: dict) -> None:
    """Decoding of more sequences than one launch takes: fused products, or cuBLAS."""
    decoder = load(shape, 4096)
    runner = Runner(decoder, pool_for(decoder, 64 * 40), 4096)
    draw = torch.Generator().manual_seed(3)
    for most, seqs in itertools.product((64, 16), (24, 32, 48, 64)):
        linear.FEW_ROWS = most
        graphs = GraphRunner(decoder, runner.pool.kv, 4096, 16)
        ms = replay_ms(graphs, runner, spans(decoder, seqs, 1, 512, draw), 20)
        how = "fused products" if most == 64 else "cuBLAS"
        report.setdefault("batch", []).append({"shape": shape, "how": how, "seqs": seqs, "ms": ms})
        print(f"{shape} {how} {seqs} x 1 at 512: {ms:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="check,time")
    parser.add_argument("--models", default="1.5b,8b")
    args = parser.parse_args()
    report: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in args.parts.split(","):
        begin = time.time()
        for shape in ("small", "wide") if part == "check" else args.models.split(","):
            {"check": check, "time": times, "batch": batches}[part](shape, report)
            torch.cuda.empty_cache()
            args.json.write_text(json.dumps(report, indent=1))
        print(f"-- {part}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
