"""Shared-prefix attention on the GPU at hand: checks, then times of the attention alone and of whole forwards.

    python -m forerun_research.scripts.cuda_shared_prefix --json out.json [--parts check,forward,attention,step]

`check` compares the attention with the plain paged kernel and with float64, `forward` logits of graphs and of single
launches with and without. Both expect the same bits. `attention` times one layer of 28 in a captured graph, by how many
bytes of K and V it is spared; `step` whole forwards of the 1.5B shape, 16, 64 and 256 sequences, each in the way that
would run without sharing (one launch, graph, single launches) and with it. What `GRAPH`, `LAUNCHES` and `STACK` in
shared.py must be is printed at the end: the fewest spared bytes from which all larger ones gain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT, HostBatch
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.cuda import attention, graphs, shared
from forerun.models.cuda.paged import paged_attention, plan_queries
from forerun.models.cuda.shared import SharedPlan
from forerun.models.execution.runner import Runner, Span
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint
from forerun_research.scripts.cuda_stack import relative, timed, wall
from forerun_research.scripts.cuda_sweep import capture

DEVICE, PAGE = torch.device("cuda"), 16
CONFIGS = {  # heads, KV heads, width
    "smollm2": ModelConfig("llama", 8, 576, 1, 9, 3, 64, 8, 65536),
    "1.5b": ModelConfig("qwen2", 8, 1536, 1, 12, 2, 128, 8, 65536),
    "8b": ModelConfig("llama", 8, 4096, 1, 32, 8, 128, 8, 131072),
}

# sequences as (stem, own entries, new tokens); stems as pages
CASES: list[tuple[list[int], list[tuple[int, int, int]]]] = [
    ([16], [(0, 1, 1), (0, 1, 1)]),
    ([17], [(0, own, 1) for own in (1, 15, 16, 17, 48, 64, 65, 300)]),
    ([128], [(0, 1 + i, 1) for i in range(16)]),
    ([130, 40, 20], [(0, 9, 1), (1, 70, 4), (2, 33, 1), (1, 5, 1), (0, 64, 2), (0, 130, 16), (1, 90, 1)]),
    ([300, 21], [(0, 20 + i, 1 + i % 3) for i in range(40)] + [(1, 200, 90), (1, 30, 1)]),
    ([520], [(0, 1 + 3 * i, 1) for i in range(100)]),
]


class AttentionCase:
    def __init__(self, config: ModelConfig, stems: list[int], sequences: list[tuple[int, int, int]], layers: int = 1):
        own = [-(-entries // PAGE) for _, entries, _ in sequences]
        order = torch.randperm(sum(stems) + sum(own)).tolist()
        stem_pages = [[order.pop() for _ in range(pages)] for pages in stems]
        block_tables = [stem_pages[stem] + [order.pop() for _ in range(n)]
                  for (stem, _, _), n in zip(sequences, own, strict=True)]  # fmt: skip
        seq_lens = [stems[stem] * PAGE + entries for stem, entries, _ in sequences]
        counts = [count for _, _, count in sequences]
        cu_seqlens = [0, *itertools.accumulate(counts)]
        kv_lens = [e for context, n in zip(seq_lens, counts, strict=True) for e in range(context - n + 1, context + 1)]
        none = np.zeros(cu_seqlens[-1], dtype=np.int64)
        self.config, self.scale = config, config.head_dim**-0.5
        self.host = HostBatch(none, none, none, np.array(kv_lens, dtype=np.int32), cu_seqlens, seq_lens,
                              [np.array(t, dtype=np.int32) for t in block_tables], PAGE, [])  # fmt: skip
        self.batch = self.host.to(DEVICE)
        shape = ((sum(stems) + sum(own)) * PAGE, config.num_kv_heads, config.head_dim)
        self.kv = [tuple(torch.randn(2, *shape, device=DEVICE, dtype=torch.bfloat16)) for _ in range(layers)]
        self.q = 2 * torch.randn(cu_seqlens[-1], config.num_heads, config.head_dim, device=DEVICE, dtype=torch.bfloat16)
        self.plan = plan_queries(cu_seqlens, max(seq_lens), DEVICE)
        groups = shared.plan_shared(self.host, config, 1)
        assert groups is not None
        self.groups, self.shared = groups, SharedPlan.send(groups, DEVICE)

    def run(self, share: bool) -> torch.Tensor:
        b = self.batch
        for k, v in self.kv:
            out = paged_attention(self.q, k, v, b.block_tables, b.kv_lens, self.plan, self.scale, page_size=PAGE,
                                  shared=self.shared if share else None)  # fmt: skip
        return out

    def reference(self) -> torch.Tensor:
        out = torch.empty_like(self.q, dtype=torch.float64)
        group = self.config.num_heads // self.config.num_kv_heads
        for s, context in enumerate(self.host.seq_lens):
            entry = torch.arange(context, device=DEVICE)
            slots = self.batch.block_tables[s].long()[entry // PAGE] * PAGE + entry % PAGE
            k, v = (c[slots].double().repeat_interleave(group, 1) for c in self.kv[0])
            rows = slice(self.host.cu_seqlens[s], self.host.cu_seqlens[s + 1])
            score = torch.einsum("thd,ehd->hte", self.q[rows].double(), k) * self.scale
            score = score.masked_fill(entry >= self.batch.kv_lens[rows, None], -torch.inf)
            out[rows] = torch.einsum("hte,ehd->thd", score.softmax(-1), v)
        return out


def note(report: dict, part: str, figures: dict[str, Any], ok: bool | None = None) -> None:
    report.setdefault(part, []).append(figures | ({} if ok is None else {"ok": ok}))
    told = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(f"{'' if ok is None else 'ok    ' if ok else 'WRONG '}{part}: {told}", flush=True)


def check(report: dict) -> None:
    for name, config in CONFIGS.items():
        for number, (stems, sequences) in enumerate(CASES):
            case = AttentionCase(config, stems, sequences)
            with_, without = case.run(True), case.run(False)
            error, same = relative(with_, case.reference()), torch.equal(with_, without)
            again = torch.equal(with_, case.run(True))
            differ = float((with_.float() - without.float()).abs().max())
            figures = {"shape": name, "case": number, "tiles": len(case.groups.tiles), "same_bits": same}
            figures |= {"to_plain": differ, "to_float64": error, "twice_the_same": again}
            note(report, "check", figures, again and error < 5e-3 and relative(with_, without) < 5e-3)


@contextmanager
def least(value: int) -> Iterator[None]:
    """Share from so many spared bytes on, however a batch runs."""
    places = (
        (graphs, "MIN_GRAPH_SAVING_BYTES"),
        (graphs, "MIN_STACK_SAVING_BYTES"),
        (attention, "MIN_LAUNCH_SAVING_BYTES"),
    )
    before = [getattr(*place) for place in places]
    for place in places:
        setattr(*place, value)
    try:
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            setattr(*place, old)


def load(shape: str, context: int, pages: int, layers: int | None = None) -> Runner:
    if layers is not None:
        SHAPES["cut"] = replace(SHAPES[shape], num_layers=layers, vocab_size=4096)
        shape = "cut"
    decoder = build_decoder(RandomCheckpoint(shape, DEVICE), DEVICE, "bf16", context, quiet=True)[0]
    pool = PagePool(decoder.config, pages, PAGE, torch.bfloat16, DEVICE)
    for cache in itertools.chain(*pool.kv):
        cache.normal_()
    return Runner(decoder, pool, context)


def branches(stem: int, ends: list[tuple[int, int, bool]], draw: random.Random) -> list[Span]:
    """Sequences (own entries before, new tokens, tree) behind one stem of so many pages."""
    made, at = [], stem
    for before, new, tree in ends:
        size = -(-(before + new) // PAGE)
        pages = array("i", [*range(stem), *range(at, at + size)])
        parents = [draw.randrange(ROOT, node) if node else ROOT for node in range(new - 1)] if tree else []
        first = stem * PAGE + before
        made.append(Span([draw.randrange(4000) for _ in range(new)], first, pages, range(new),
                         first + 1 if tree else 0, parents))  # fmt: skip
        at += size
    return made


def forward(report: dict) -> None:
    """Logits with and without: the same bits where both run as graphs, or both as single launches."""
    runner, draw = load("1.5b", 4096, 1000, layers=3), random.Random(3)
    fast = runner.graphs
    assert fast is not None
    apart = graphs.GraphRunner(runner.decoder, runner.kv, 4096, PAGE)
    apart.stacks = {16: None, 32: None}
    cases = {
        "16x1": [(5 * i, 1, False) for i in range(16)],
        "40x1": [(2 * i, 1, False) for i in range(40)],
        "64x1": [(3, 1, False)] * 64,
        "12x5": [(7 * i, 5, False) for i in range(12)],
        "8 trees of 8": [(20, 8, True)] * 8,
        "100x1": [(i, 1, False) for i in range(100)],
    }
    for name, ends in cases.items():
        spans = branches(130, ends, draw)
        logits = {}
        for share in (True, False):
            runner.decoder.attention.share_prefix = share  # type: ignore[attr-defined]
            runner.graphs = apart
            with least(1):
                logits[share] = runner.forward(spans).logits.clone()
        runner.graphs = fast
        usual = runner.forward(spans).logits
        same, error = torch.equal(logits[True], logits[False]), relative(logits[True], usual)
        buckets = sum(bucket.shared for bucket in apart._graphs)
        figures = {"case": name, "same_bits": same, "to_usual": error, "graphs_that_share": buckets}
        note(report, "forward", figures, error < 2e-2 and relative(logits[True], logits[False]) < 2e-2)


def time_attention(report: dict) -> None:
    for name, seqs, length in itertools.product(("1.5b", "smollm2"), (16, 64, 256), (512, 2048, 8192, 32768)):
        case = AttentionCase(CONFIGS[name], [length // PAGE], [(0, 64, 1)] * seqs, layers=28)
        figures: dict[str, Any] = {"shape": name, "seqs": seqs, "shared": length, "spared": case.groups.spared}
        stages = (2, 3, 4) if name == "1.5b" and length == 8192 else (2,)
        for how, share, n in [("plain", False, 2)] + [(f"shared_{n}", True, n) for n in stages]:
            shared.STAGES = n
            graph = capture(partial(case.run, share), 1)
            figures[f"{how}_us"] = timed(graph.replay, 5) * 1e3 / len(case.kv)
        shared.STAGES = 2
        note(report, "attention", figures | {"gain": figures["plain_us"] / figures["shared_2_us"]})


def _whole(runner: Runner, spans: list[Span]) -> None:
    runner.forward(spans).logits[0, 0].item()  # reading one value waits for the device


def time_steps(report: dict) -> None:
    runner, draw = load("1.5b", 33_024, 2048 + 256 * 5), random.Random(4)
    backend, fast = runner.decoder.attention, runner.graphs
    assert fast is not None
    for seqs, length in itertools.product((16, 32, 64, 256), (512, 2048, 8192, 32768)):
        spans = branches(length // PAGE, [(63, 1, False)] * seqs, draw)
        batch = runner.batch(spans)
        groups = shared.plan_shared(batch, runner.decoder.config, 1)
        assert groups is not None
        way = "single launches" if seqs > 64 else "one launch" if fast._stack(seqs) is not None else "graph"
        figures: dict[str, Any] = {"way": way, "seqs": seqs, "shared": length, "spared": groups.spared}
        for share in (False, True):
            backend.share_prefix = share  # type: ignore[attr-defined]
            with least(1):
                whole = partial(_whole, runner, spans)
                whole(), whole()
                figures["shared_ms" if share else "plain_ms"] = wall(whole, 4 if seqs == 256 else 8)
        figures["plan_ms"] = wall(partial(shared.plan_shared, batch, runner.decoder.config, 1), 5)
        note(report, "step", figures | {"gain": figures["plain_ms"] / figures["shared_ms"]})
    for way in ("graph", "single launches", "one launch"):
        rows = sorted((row["spared"], row["gain"]) for row in report["step"] if row["way"] == way)
        lost = max((spared for spared, gain in rows if gain < 1.02), default=0)
        above = [spared for spared, _ in rows if spared > lost]
        print(f"{way}: gains from {min(above) / 2**20:.0f} MiB a layer" if above else f"{way}: never gains", flush=True)
        report.setdefault("gains_from", {})[way] = min(above, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="check,forward,step,attention")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    parts = {"check": check, "forward": forward, "attention": time_attention, "step": time_steps}
    for part in args.parts.split(","):
        begin = time.time()
        parts[part](report)
        torch.cuda.empty_cache()
        report.setdefault("seconds", {})[part] = round(time.time() - begin, 1)
        args.json.write_text(json.dumps(report, indent=1))
        print(f"-- {part}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
