"""Checks and times the CUDA kernels on the GPU at hand: correctness, tiles of each weight shape, prefill.
Whole forwards are timed by cuda_stack.py.

    python -m forerun_research.scripts.cuda_sweep --json out.json [--parts check,sweep,prefill] [--models 1.5b,8b]

Products are timed as replays of a captured graph over weights several times larger than L2. TB/s counts the
weights' bytes once. Partial results are printed as they come; the JSON file is rewritten after every part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from forerun.models.cuda.fused import act_mul, rms_norm
from forerun.models.cuda.launch import Pdl
from forerun.models.cuda.paged import Shape, paged_attention, plan_queries
from forerun.models.cuda.skinny import Tile, skinny_linear

BF16 = torch.bfloat16


@dataclass(frozen=True)
class KernelShapes:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inter: int
    vocab: int
    dim: int = 128

    def shapes(self) -> dict[str, tuple[int, int, bool]]:
        """Name -> (weight rows, columns, gated)."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden, False),
            "o": (self.hidden, self.heads * self.dim, False),
            "gate_up": (2 * self.inter, self.hidden, True),
            "down": (self.hidden, self.inter, False),
            "head": (self.vocab, self.hidden, False),
        }


MODELS = {
    "1.5b": KernelShapes(1536, 28, 12, 2, 8960, 151936),
    "8b": KernelShapes(4096, 32, 32, 8, 14336, 128256),
}


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def capture(run, warm: int = 2) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_ms(run, repeats: int = 20) -> float:
    """Median milliseconds by events; `run` is enqueued while the device is still busy with the one before."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def call(name: str, x: torch.Tensor, w: torch.Tensor, tile: Tile | None, norm: torch.Tensor, extra: torch.Tensor):
    """The product as a decoder layer uses it: normed before qkv, gate_up and head; residual after o and down."""
    if name in ("o", "down"):
        return skinny_linear(x, w, residual=extra, out=extra, tile=tile)
    return skinny_linear(x, w, norm_weight=norm, activation="silu" if name == "gate_up" else None, tile=tile)


def candidates(name: str, n: int, k: int, gated: bool) -> list[Tile]:
    """A narrow grid around what should keep 132 multiprocessors full with 40 to 100 kB in flight each."""
    if name == "head":
        grid = [(64, 128, 4, 4), (64, 256, 4, 3), (32, 256, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (64, 128, 8, 5)]
        tiles = [Tile(bn, bk, 1, w, s) for bn, bk, w, s in grid]
        return tiles + [Tile(64, 128, 1, 4, 4, swap=True), Tile(128, 128, 1, 4, 3, swap=True)]
    tiles = []
    if gated:
        cuts = [(16, 128, 4, 4), (16, 256, 4, 3), (32, 128, 4, 4), (32, 128, 4, 3), (32, 256, 8, 3), (32, 64, 4, 6)]
        tiles += [Tile(bn, bk, 1, w, s, ahead=4 if bk < 256 else 2) for bn, bk, w, s in cuts]
        tiles += [Tile(64, 128, 1, 4, 3, swap=True, ahead=4), Tile(64, 64, 1, 4, 4, swap=True, ahead=4)]
        tiles += [Tile(64, 128, 2, 4, 3, swap=True, ahead=4), Tile(32, 128, 1, 4, 4)]
        return tiles
    for bn, bk, stages, swap in [(16, 256, 4, False), (32, 128, 4, False), (32, 256, 4, False), (64, 128, 4, True)]:
        most = k // bk
        for wanted in (132, 264, 400, 530):
            split = max(1, min(most, round(wanted * bn / n)))
            split = -(-most // -(-most // split))  # no split without a block
            ahead = max(1, min(-(-most // split), 4))
            tiles.append(Tile(bn, bk, split, 4, stages, swap=swap, ahead=ahead))
    tiles.append(Tile(32, 256, tiles[9].split, 8, 4, ahead=2))
    return list(dict.fromkeys(tiles))


def compile_one(job: tuple[str, int, int, bool, Tile]) -> str | None:
    """In a worker process: one launch, so that the compiled kernel lies in the disk cache."""
    name, n, k, gated, tile = job
    try:
        w = torch.empty(n, k, device="cuda", dtype=BF16).zero_()
        x, norm = w[:1].clone(), w[0].clone()
        call(name, x, w, tile, norm, torch.empty(1, n, device="cuda", dtype=BF16))
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit the chip must not end the sweep
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


def time_product(name: str, shape: tuple[int, int, bool], tile: Tile | None, rows: int, weights: torch.Tensor) -> float:
    """Milliseconds per launch, over a chain of launches on different weights in one graph."""
    n, k, gated = shape
    x, norm = draw(rows, k), draw(k)
    extra = draw(rows, n)
    graph = capture(lambda: [call(name, x, w, tile, norm, extra) for w in weights])
    return time_ms(graph.replay) / len(weights)


def sweep(models: list[str], report: dict) -> None:
    jobs = [(m, name, shape, t) for m in models for name, shape in MODELS[m].shapes().items()
            for t in candidates(name, *shape)]  # fmt: skip
    begin = time.time()
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        failed = list(pool.map(compile_one, [(name, *shape, t) for _, name, shape, t in jobs], chunksize=1))
    print(f"compiled {len(jobs)} kernels in {time.time() - begin:.0f} s, {sum(f is not None for f in failed)} failed")
    rows_out = report.setdefault("sweep", [])
    for (model, name), group in itertools.groupby(zip(jobs, failed, strict=True), key=lambda j: (j[0][0], j[0][1])):
        shape = MODELS[model].shapes()[name]
        n, k, _ = shape
        size = n * k * 2
        weights = draw(max(2, min(40, int(6e8 // size))), n, k, scale=0.02)
        results = []
        for (_, _, _, tile), error in group:
            if error:
                rows_out.append({"model": model, "shape": name, "tile": asdict(tile), "error": error})
                print(f"  {model} {name} {tile}: {error}")
                continue
            one, many = (time_product(name, shape, tile, rows, weights) for rows in (1, 16))
            results.append((one, many, tile))
        results.sort(key=lambda r: r[0] + r[1])
        Pdl.enabled = False
        plain = time_product(name, shape, results[0][2], 1, weights)
        Pdl.enabled = True
        for one, many, tile in results:
            figures = {"us_1": one * 1e3, "us_16": many * 1e3, "tbs_1": size / one / 1e9, "tbs_16": size / many / 1e9}
            rows_out.append({"model": model, "shape": name, "tile": asdict(tile), **figures})
        print(f"{model} {name} {n}x{k}: {size / 4.3e6:.1f} us at 4.3 TB/s; best without PDL {plain * 1e3:.1f} us")
        for one, many, t in results[:5]:
            cut = f"n{t.block_n} k{t.block_k} split{t.split} warps{t.warps} stages{t.stages} ahead{t.ahead}"
            print(f"    {one * 1e3:7.2f} us {size / one / 1e9:5.2f} TB/s | 16 rows {many * 1e3:7.2f} us | {cut}"
                  f"{' swap' if t.swap else ''}", flush=True)  # fmt: skip


def check_products(models: list[str], report: dict) -> bool:
    good = True
    for model, rows in itertools.product(models, (1, 7, 16, 33, 64)):
        for name, (n, k, gated) in list(MODELS[model].shapes().items())[:4]:
            x, w, norm, extra = draw(rows, k), draw(n, k, scale=0.02), 1 + draw(k, scale=0.1), draw(rows, n)
            h = x.float()
            if name not in ("o", "down"):
                h = F.rms_norm(h, (k,), norm.float(), 1e-6)
            want = h @ w.float().T
            want = F.silu(want[:, : n // 2]) * want[:, n // 2 :] if gated else want
            want = want + extra.float() if name in ("o", "down") else want
            start = extra.clone()
            got = call(name, x, w, None, norm, extra)
            again = call(name, x[:1], w, None, norm, start[:1].clone())
            error = relative(got, want)
            same = rows > 16 or torch.equal(again[0], got[0])
            if not (error < 1e-2 and same):
                good = False
                print(f"WRONG {model} {name} rows {rows}: error {error:.2e}, row alone equal: {same}")
    report["products_correct"] = good
    return good


def attend_plainly(q, k, v, seen, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    score = torch.einsum("thd,ehd->hte", q.float(), k) * scale
    hidden = torch.arange(k.shape[0], device="cuda")[None, :] >= seen[:, None]
    return torch.einsum("hte,ehd->thd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check_attention(report: dict) -> bool:
    good = True
    for heads, kv_heads, context, new in [(12, 2, 512, 1), (12, 2, 700, 16), (32, 8, 5000, 3), (12, 2, 1000, 900)]:
        pages = -(-context // 16)
        table = torch.randperm(pages + 5, device="cuda")[:pages].int()[None]
        k_cache, v_cache = torch.full((2, (pages + 5) * 16, kv_heads, 128), float("nan"), device="cuda", dtype=BF16)
        slots = (table[0].long()[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:context]
        k_cache[slots], v_cache[slots] = draw(context, kv_heads, 128), draw(context, kv_heads, 128)
        q, seen = draw(new, heads, 128), torch.arange(context - new + 1, context + 1, device="cuda").int()
        got = paged_attention(q, k_cache, v_cache, table, seen, plan_queries([0, new], 8192, "cuda"), 0.088)
        error = relative(got, attend_plainly(q, k_cache[slots], v_cache[slots], seen, 0.088))
        alone = paged_attention(q[:1], k_cache, v_cache, table, seen[:1], plan_queries([0, 1], 8192, "cuda"), 0.088)
        same = new > 64 or torch.equal(alone[0], got[0])
        if not (error < 1e-2 and same):
            good = False
            print(f"WRONG attention {heads}/{kv_heads} context {context} new {new}: {error:.2e}, alone equal: {same}")
    report["attention_correct"] = good
    return good


def prefill(report: dict) -> None:
    """8,192 fresh tokens and a chunk of 2,048 at the end of 8,192, per layer, beside SDPA on contiguous tensors."""
    for name, m in MODELS.items():
        k_cache, v_cache = draw(2, 8192, m.kv_heads, m.dim)
        table = torch.arange(512, device="cuda", dtype=torch.int32)[None]
        shapes = (Shape(128, 64, 8, 3), Shape(128, 64, 4, 3), Shape(64, 64, 4, 3), Shape(128, 128, 8, 2))
        for new, shape in itertools.product((8192, 2048), shapes):
            q = draw(new, m.heads, m.dim)
            seen = torch.arange(8192 - new + 1, 8193, device="cuda").int()
            plan = plan_queries([0, new], 8192, "cuda")
            ms = time_ms(lambda: paged_attention(q, k_cache, v_cache, table, seen, plan, 0.088, many_shape=shape), 5)  # noqa: B023
            report.setdefault("prefill", []).append({"model": name, "new": new, "shape": asdict(shape), "ms": ms})
            print(f"prefill attention {name} {new} of 8192, {shape}: {ms:.3f} ms a layer", flush=True)
        q = draw(1, m.heads, 8192, m.dim)
        k, v = (c.transpose(0, 1)[None] for c in (k_cache, v_cache))
        ms = time_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 5)  # noqa: B023
        x, pair, norm = draw(8192, m.hidden), draw(8192, 2 * m.inter), draw(m.hidden)
        small = [time_ms(f, 5) for f in (lambda: rms_norm(x, norm, 1e-6), lambda: act_mul(pair, "silu"))]  # fmt: skip  # noqa: B023
        report["prefill"].append({"model": name, "sdpa_ms": ms, "norm_act_ms": small})
        print(f"  SDPA {ms:.3f} ms; rms_norm, act_mul of 8192 rows: {[f'{t:.3f}' for t in small]} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parts", default="check,sweep,prefill")
    parser.add_argument("--models", default="1.5b,8b")
    args = parser.parse_args()
    models = args.models.split(",")
    report: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for part in args.parts.split(","):
        begin = time.time()
        if part == "check":
            good = check_products(models, report) & check_attention(report)
            print("all correct" if good else "SOMETHING IS WRONG", flush=True)
        elif part == "sweep":
            sweep(models, report)
        elif part == "prefill":
            prefill(report)
        args.json.write_text(json.dumps(report, indent=1))
        print(f"-- {part}: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
