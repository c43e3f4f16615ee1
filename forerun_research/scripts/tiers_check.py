"""Tiers on a device: what leaves the pool comes back bit for bit, from host memory, from disk and after a restart.

    python -m forerun_research.scripts.tiers_check --device cuda
    python -m forerun_research.scripts.tiers_check --device cuda --model qwen2.5-coder-1.5b-instruct --tokens 4000

First page by page with random K/V in a small pool, then with a model whose pool holds one prompt at a time: answers
must be those of a pool that holds everything, and usage must say where prompts were read from. Raises where anything
differs; prints one JSON line of figures.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree, pack
from forerun.cache.tiers import TierConfig, Tiers
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint

PAGE_TOKENS = 16


def check_pages(device: torch.device, folder: Path) -> dict[str, Any]:
    """Evict, read back from host memory, have host memory overflow to disk, read back again."""
    config = replace(SHAPES["tiny"], num_layers=3)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pool = PagePool(config, 32, PAGE_TOKENS, dtype, device)
    page_bytes = PagePool.page_bytes(config, PAGE_TOKENS, dtype)
    tiers, tree = Tiers(pool, TierConfig(8 * page_bytes, folder, 1 << 30), "check"), PrefixTree(pool)
    tree.on_evict = tiers.spill
    if tiers.host is not None and device.type == "cuda":
        assert tiers.host._memory.is_pinned(), "host memory is not pinned"
    texts = [[random.randrange(1000) for _ in range(8 * PAGE_TOKENS)] for _ in range(6)]
    truth = {}
    for text in texts:
        tree.evict(max(0, 8 - pool.free))
        pages = pool.allocate(8)
        for cache in (cache for layer in pool.kv for cache in layer):
            for page in pages:
                at = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                cache[at] = torch.randn(cache[at].shape, device=device).to(dtype)
        truth[pack(text)] = tiers._gather(pages).cpu()
        tree.insert(text, pages)
        pool.release(pages)
    assert tiers.disk is not None
    served = {"host": 0, "disk": 0}
    for turn in range(3):
        for text in [text for text in texts for _ in range(2)]:  # at once again: from host memory
            tree.evict(pool.num_pages)
            if turn == 1:
                tiers.disk.flush()  # from files now, not from what waits to be written
            pages, parts = tiers.restore(text, [])
            assert len(pages) == 8, f"{len(pages)} of 8 pages came back"
            assert torch.equal(tiers._gather(pages).cpu(), truth[pack(text)]), f"K/V differs: {parts}"
            served = {name: served[name] + parts[name] for name in served}
            tree.insert(text, pages)
            pool.release(pages)
    assert served["host"] and served["disk"], served
    tiers.close(tree)
    tree.clear()
    assert pool.used == 0, f"{pool.used} pages leaked"
    return {"tokens_from": served}


def check_model(device: str, model: Any, tokens: int, folder: Path) -> dict[str, Any]:
    params = SamplingParams(max_tokens=16, ignore_eos=True, speculation="off")
    options: dict[str, Any] = {"device": device, "quiet": True, "max_model_len": tokens + 64}
    found: dict[str, Any] = {}
    with LLM(model, kv_cache_tokens=4 * (tokens + 64), **options) as llm:
        draw = random.Random(0)
        prompts = [[draw.randrange(10, llm.config.vocab_size - 10) for _ in range(tokens)] for _ in range(3)]
        for prompt in prompts:
            llm.generate(prompt, params)
        # from the pool, so that the same tokens run in the same shapes as after reading a tier: the same bits
        truth = [llm.generate(prompt, params)[0].token_ids for prompt in prompts]
        page_bytes = PagePool.page_bytes(llm.config, llm.engine.pool.page_size, llm.decoder.dtype)
    host_bytes = 3 * (tokens // PAGE_TOKENS + 4) * page_bytes
    kinds: dict[str, dict[str, Any]] = {"host": {"host_bytes": host_bytes}, "disk": {"disk": folder}}
    for kind, tier in kinds.items():
        with LLM(model, kv_cache_tokens=tokens + 64, **options, **tier) as llm:
            _ask(llm, prompts, truth, params)
            if llm.engine.tiers is not None and llm.engine.tiers.disk is not None:
                llm.engine.tiers.disk.flush()
            found[kind] = _ask(llm, prompts, truth, params, kind)
    with LLM(model, kv_cache_tokens=tokens + 64, **options, disk=folder) as llm:  # as a new process would
        found["restart"] = _ask(llm, prompts, truth, params, "disk")
    return found


def _ask(
    llm: LLM, prompts: list[list[int]], truth: list[list[int]], params: SamplingParams, kind: str | None = None
) -> dict[str, Any]:
    seconds, read = [], 0
    for prompt, expected in zip(prompts, truth, strict=True):
        answer = llm.generate(prompt, params)[0]
        seconds.append(answer.usage.ttft_s)
        if kind is None:  # computed: this is what the tier is filled with
            continue
        least = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert answer.usage.served[kind] == least, f"{answer.usage.served}: {kind} should have {least}"
        assert answer.token_ids == expected, f"another answer from {kind}"
        read += least
    return {"ttft_s": [round(value, 4) for value in seconds], "tokens": read}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="default: random weights of a tiny shape")
    parser.add_argument("--tokens", type=int, default=500)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(prefix="forerun-tiers-") as folder:
        pages = check_pages(device, Path(folder) / "pages")
        model = args.model or RandomCheckpoint("tiny", device)
        figures = check_model(args.device, model, args.tokens, Path(folder) / "model")
    print(json.dumps({"device": args.device, "pages": pages} | figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
