"""Checks recorded passes on the GPU at hand: rows that recompute at once leave what the same rows leave layer by layer.

    python -m forerun_research.scripts.cuda_recompute [--shape 0.5b]

K/V of all layers, inputs and queries of picked rows, and the last row's logits, on a random model, for several numbers
of rows. Small blocks of memory that were free while the passes were recorded are filled first, so that a recording that
kept the address of something that is gone reads nonsense.
"""

from __future__ import annotations

import argparse
import sys
from array import array

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun_research.bench.shapes import RandomCheckpoint, random_ids

TOKENS, PAGE = 3000, 16
MAX_RELATIVE_DISTANCE = 0.03  # relative distance in bf16: other kernels round differently


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def filled_caches(runner: Runner, ids: np.ndarray, pages: array[int]) -> list[Tensor]:
    """K/V of the whole text, as other tokens left it; the caches themselves."""
    runner.forward([Span(ids.tolist(), 0, pages, ())])
    return [cache for layer in runner.kv for cache in layer]


def check(runner: Runner, ids: np.ndarray, pages: array[int], count: int) -> tuple[float, float, float]:
    """How far K/V, picked rows and logits are from those of the layer by layer pass."""
    draw, layers, stairs = np.random.default_rng(count), len(runner.kv), RaggedDepthPass(runner)
    entries = np.sort(draw.choice(TOKENS, count, replace=False))
    rows = Rows(ids[entries][::-1], entries, pages, np.full(count, layers), logits_indices=[count - 1])
    seen: list[tuple[Tensor, Tensor | None]] = []
    filled_caches(runner, ids, pages)
    logits = stairs.run(rows, lambda i, x, q, a: seen.append((x, q))).logits
    steps = [cache.clone() for layer in runner.kv for cache in layer]
    caches, picks = filled_caches(runner, ids, pages), np.array([0, 3, count - 2])
    rows.logits_indices = ()
    recompute = stairs.at_once(rows, picks)
    assert recompute is not None, f"{count} rows do not recompute"
    kv = max(apart(mine, theirs) for mine, theirs in zip(caches, steps, strict=True))
    met = [(recompute.x[i], seen[i][0][picks]) for i in range(layers - 1)]
    met += [(recompute.q[i], q[picks]) for i, (_, q) in enumerate(seen[: layers - 1]) if q is not None]
    return kv, max(apart(*pair) for pair in met), apart(recompute.logits, logits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b")
    checkpoint = RandomCheckpoint(parser.parse_args().shape, torch.device("cuda"))
    decoder, _ = build_decoder(checkpoint, torch.device("cuda"), "bf16", 2 * TOKENS, quiet=True)
    pool = PagePool(decoder.config, TOKENS // PAGE + 2, PAGE, decoder.dtype, decoder.device)
    runner = Runner(decoder, pool, 4096)
    runner.prepare_recompute()
    torch.cuda.empty_cache()
    nonsense = [torch.full((size,), 1 << 30, dtype=torch.int32, device="cuda") for size in (1, 128, 512) * 1000]
    ids = np.array(random_ids(decoder.config.vocab_size, TOKENS, 1))
    pages = array("i", pool.allocate(pool.pages_for(TOKENS))[::-1])
    bad = 0
    for count in (70, 128, 200, 700, 1024, 1900):
        figures = check(runner, ids, pages, count)
        bad += max(figures) > MAX_RELATIVE_DISTANCE
        print(
            f"{count:5d} rows: K/V {figures[0]:.4f}, picked rows {figures[1]:.4f}, logits {figures[2]:.4f}", flush=True
        )
    print("bad" if bad else "ok", f"({len(nonsense)} blocks of nonsense)")
    return bad


if __name__ == "__main__":
    sys.exit(main())
