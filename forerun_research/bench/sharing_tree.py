"""The prefix tree at size: what a request pays to match and insert among many texts, and what a node weighs.

Texts grow from each other at random, as conversations and branches do. Times are this thread's own, so that other
processes do not count. No model is needed.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from array import array
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

import torch

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.errors import BadRequest
from forerun_research.bench.shapes import SHAPES

PAGE_TOKENS = 16
GOAL_S = 0.001
PASSES = 3
# K/V is never looked at here: as little of it as a pool can have
SMALL = replace(SHAPES["tiny"], num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4)


# Each text as the number of the one it goes on from, and all its tokens; not as lists, which would keep Python's
# garbage collector busy in the middle of what is timed
Texts: TypeAlias = "list[tuple[int | None, array[int]]]"


def small_pool(pages: int, page_size: int) -> PagePool:
    return PagePool(SMALL, pages, page_size, torch.float32, torch.device("cpu"))


def run(nodes: int = 1000, tokens: int = 1_000_000, seed: int = 0) -> dict[str, Any]:
    """Build a tree of `nodes` nodes with `tokens` tokens together, then ask for texts in it."""
    if nodes < 1 or tokens // PAGE_TOKENS < nodes:
        raise BadRequest(
            f"{tokens:,} tokens in {nodes:,} nodes: a node has at least one page of {PAGE_TOKENS} tokens",
            "ask for more tokens",
        )
    total = tokens // PAGE_TOKENS
    sizes = [total // nodes + (number < total % nodes) for number in range(nodes)]  # pages of each node
    pool = small_pool(total, PAGE_TOKENS)
    texts = _texts(sizes, seed)
    pages = _pages(pool, texts, sizes)
    found, each = _steady([_pass(pool, texts, pages, seed) for _ in range(PASSES)])
    asked, put = _figures(found), _figures(each)
    return {
        "nodes": nodes,
        "tokens": total * PAGE_TOKENS,
        "longest_text": max(len(text) for _, text in texts),
        "match_s": asked,
        "match_and_insert_s": put,
        "bytes_per_node": _weight(pool, texts, pages) // nodes,
        "goal": {"seconds": GOAL_S, "reached": max(asked["max"], put["max"]) < GOAL_S},
    }


def _pass(pool: PagePool, texts: Texts, pages: list[array[int]], seed: int) -> tuple[list[float], list[float]]:
    """Seconds of each request that only asks, and of each that asks and then inserts."""
    tree = PrefixTree(pool)
    each = _build(tree, texts, pages)
    found = _ask(tree, texts, seed)
    assert tree.num_nodes == len(texts) and tree.num_pages == pool.num_pages
    tree.clear()
    return found, each


def _steady(passes: list[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Each request's median over the passes: what belongs to it, and not to a pause of the interpreter's."""
    asked, put = ([median(seconds) for seconds in zip(*kind, strict=True)] for kind in zip(*passes, strict=True))
    return asked, put


def _texts(sizes: list[int], seed: int) -> Texts:
    draw = random.Random(seed)
    texts: Texts = []
    for number, size in enumerate(sizes):
        parent = draw.randrange(number) if number and draw.random() < 0.98 else None
        fresh = array("i", (draw.randrange(100_000) for _ in range(size * PAGE_TOKENS)))
        texts.append((parent, fresh if parent is None else texts[parent][1] + fresh))
    return texts


def _pages(pool: PagePool, texts: Texts, sizes: list[int]) -> list[array[int]]:
    pages: list[array[int]] = []
    last: int | None = None
    for (parent, _), size in zip(texts, sizes, strict=True):
        fresh = pool.allocate(size, after=last)
        last = fresh[-1]
        pages.append(array("i", [*(pages[parent] if parent is not None else ()), *fresh]))
    return pages


def _build(tree: PrefixTree, texts: Texts, pages: list[array[int]]) -> list[float]:
    """What a request does: match and read before it runs, insert after."""
    seconds = []
    for (_, packed), where in zip(texts, pages, strict=True):
        text = list(packed)
        start = time.thread_time()
        known = tree.match(text)
        tree.count_read(text[: len(known) * PAGE_TOKENS])
        tree.insert(text, where)
        seconds.append(time.thread_time() - start)
    return seconds


def _ask(tree: PrefixTree, texts: Texts, seed: int) -> list[float]:
    draw, seconds = random.Random(seed + 1), []
    for _ in range(len(texts)):
        text = [*draw.choice(texts)[1], 1, 2, 3]
        start = time.thread_time()
        known = tree.match(text)
        seconds.append(time.thread_time() - start)
        assert len(known) == len(text) // PAGE_TOKENS
    return seconds


def _weight(pool: PagePool, texts: Texts, pages: list[array[int]]) -> int:
    """Bytes that a tree of these texts adds to the process."""
    tree = PrefixTree(pool)
    tracemalloc.start()
    try:
        for (_, text), where in zip(texts, pages, strict=True):
            tree.insert(text, where)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        tree.clear()


def _figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": median(ordered), "p99": ordered[int(0.99 * (len(ordered) - 1))], "max": ordered[-1]}
