"""Kernels of drafted and edited prompts by themselves on the GPU at hand: what a new length costs, ways to see less far
back while a draft reads, and copied K/V.

Part of `prefill_trace --kernels`. Times are medians of device events, in milliseconds, on random numbers; the first
call of a length also by the host's clock, since libraries prepare a kernel for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.cuda.fresh import blocks
from forerun.models.cuda.lanes import Shape
from forerun.models.cuda.paged import QueryPlan, paged_attention
from forerun.models.decoder import AllLayersKV
from forerun.models.execution.runner import Runner

REPEATS = 9
DRAFT, TARGET = (14, 2, 64), (12, 2, 128)  # heads, heads of K/V, their size: Qwen2.5 of 0.5B and of 1.5B
BLOCKS = (1024, 2048, 4096)
PAGE = 16
SHAPES = [Shape(64, 64, 4, stages, lanes) for stages in (2, 3) for lanes in (2, 4, 8)]
SHAPES += [Shape(128, 64, 8, 3, lanes) for lanes in (1, 2, 4)] + [Shape(128, 128, 8, 2, lanes) for lanes in (1, 2, 4)]
SHAPES += [Shape(64, 128, 4, 2, lanes) for lanes in (2, 4)]
Heads = tuple[int, int, int]


def device_ms(run: Callable[[], object], repeats: int = REPEATS) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(median(times), 3)


def first_ms(run: Callable[[], object]) -> float:
    """By the host's clock, until the device is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - start), 2)


def random_qkv(tokens: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """As the caches hold them: [T, H, D]."""
    many, few, dim = heads
    return tuple(torch.randn(tokens, n, dim, dtype=torch.bfloat16, device="cuda") for n in (many, few, few))  # type: ignore[return-value]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    count = q.shape[0]
    more = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q[None], k[None], v[None], None, None, count, count, 0.0, True, False), scale=q.shape[2] ** -0.5, **more
    )[0]
    return out[0]


def windowed(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """What `blocks` has to be, in float32."""
    entry = torch.arange(len(q), device=q.device)
    seen = (entry[None] <= entry[:, None]) & (entry[None] // size >= entry[:, None] // size - 1)
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1)


def new_lengths() -> dict[str, Any]:
    """Host milliseconds of the first and the second call of a length."""
    found: dict[str, Any] = {}
    for name, heads in (("draft", DRAFT), ("target", TARGET)):
        for tokens in (8000, 8001, 8064, 12000):
            given = random_qkv(tokens, heads)
            calls = [first_ms(partial(causal, *given)) for _ in range(2)]
            other = [first_ms(partial(flash, *given, None)) for _ in range(2)]
            found[f"{name} {tokens}"] = {"torch": calls, "flash 2": other}
    weight = torch.randn(9728, 896, dtype=torch.bfloat16, device="cuda")
    for tokens in (8000, 8001, 12000):
        x = torch.randn(tokens, 896, dtype=torch.bfloat16, device="cuda")
        found[f"product {tokens}"] = [first_ms(partial(F.linear, x, weight)) for _ in range(2)]
    return found


def reading() -> dict[str, Any]:
    """The draft's attention over a whole prompt, a layer."""
    found: dict[str, Any] = {}
    for tokens in (8192, 16384):
        given = random_qkv(tokens, DRAFT)
        own: dict[str, Any] = {"causal": device_ms(lambda: causal(*given))}  # noqa: B023
        own["causal, backend"] = torch.ops.aten._fused_sdp_choice(
            *(x.transpose(0, 1)[None] for x in given), is_causal=True, enable_gqa=True
        )
        for window in (2048, 4096):
            own[f"flash 2, window {window}"] = device_ms(partial(flash, *given, window))
        for size in BLOCKS:
            own[f"blocks {size}"] = device_ms(partial(blocks, *given, DRAFT[2] ** -0.5, size))
        found[str(tokens)] = own
    given = random_qkv(2048, DRAFT)
    want = windowed(*given, 512)
    found["blocks apart"] = round(float((blocks(*given, DRAFT[2] ** -0.5, 512).float() - want).norm() / want.norm()), 5)
    return found


def moving(runner: Runner, tokens: int = 8000) -> dict[str, Any]:
    """Copied K/V of all layers, as torch does it and as the device's own way does, and how far apart they are."""
    size, held = runner.pool.page_size, runner.all_layers_kv
    with runner.pool.borrow(2 * tokens + 2 * size) as pages:
        slots = torch.tensor(list(pages), device="cuda")[:, None] * size + torch.arange(size, device="cuda")
        source, target = slots.flatten()[:tokens], slots.flatten()[-tokens:]
        old = torch.arange(tokens, device="cuda")
        places = torch.stack((source, target, old, old + 37))
        for cache in (cache for layer in runner.kv for cache in layer):
            cache[source] = torch.randn(tokens, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        AllLayersKV.move(held, 0, places)
        wanted = [cache[target].clone() for layer in runner.kv for cache in layer]
        for cache in (cache for layer in runner.kv for cache in layer):
            cache[target] = float("nan")
        held.move(0, places)
        mine = [cache[target] for layer in runner.kv for cache in layer]
        apart = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(mine, wanted, strict=True))
        unequal = max(float((a != b).float().mean()) for a, b in zip(mine, wanted, strict=True))
        times = {
            "torch": device_ms(lambda: AllLayersKV.move(held, 0, places), 3),
            "device": device_ms(lambda: held.move(0, places)),
        }
        for cache in (cache for layer in runner.kv for cache in layer):
            cache[slots.flatten()] = 0.0
    return {"ms": times, "apart": round(apart, 6), "share of numbers that differ": round(unequal, 6)}


def scattered() -> dict[str, Any]:
    """The target's attention of chosen rows scattered over a prompt, a layer, in tiles and lanes of several shapes."""
    return {f"{rows} of {n}": scattered_rows(rows, n) for rows, n in ((960, 8192), (1792, 16384), (192, 8192))}


def scattered_rows(rows: int, tokens: int) -> dict[str, Any]:
    q, k, v = random_qkv(tokens, TARGET)
    q = q[:rows].contiguous()
    seen = torch.sort(torch.randperm(tokens, device="cuda")[:rows]).values.int() + 1
    table = torch.randperm(tokens // PAGE, device="cuda").int()[None]
    starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    plan = QueryPlan(starts, starts[:1], rows, 0, rows, 4 * tokens)

    def attend(shape: Shape | None) -> Tensor:
        return paged_attention(q, k, v, table, seen, plan, TARGET[2] ** -0.5, page_size=PAGE, many_shape=shape)

    found: dict[str, Any] = {"chosen": device_ms(lambda: attend(None))}
    for shape in SHAPES:
        name = f"{shape.rows}x{shape.keys} {shape.warps}w {shape.stages}s {shape.lanes}l"
        try:
            found[name] = device_ms(partial(attend, shape))
        except Exception as error:
            found[name] = type(error).__name__
    return found


@torch.inference_mode()
def kernels(runner: Runner) -> dict[str, Any]:
    """All of these; what this build of torch or this device cannot do says why."""
    found: dict[str, Any] = {}
    parts: list[tuple[str, Callable[[], Any]]] = [("moving", lambda: moving(runner)), ("reading", reading)]
    for name, run in (*parts, ("new lengths", new_lengths), ("scattered", scattered)):
        try:
            found[name] = run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found
