"""The cache agrees with a plain dictionary; and a cache with a defect would not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forerun.cache.pool import PagePool
from forerun.cache.prefix import PrefixTree
from forerun.cache.tiers import Tiers
from forerun_research.bench import cache_model

OFTEN = {"restart": 0.5, "crash": 0.5}


@pytest.mark.parametrize("seed", [1, 2])
def test_cache_and_dictionary_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_model, "RARE", OFTEN)
    found = cache_model.run(1500, seed)
    assert found["difference"] is None and found["leaked_pages"] == 0 and found["goal"]["reached"]
    assert found["steps"] == 1500 and set(cache_model.OPERATIONS | OFTEN) - {"clear"} <= set(found["operations"])
    assert all(found["pages_read"][tier] > 20 for tier in ("pool", "host", "disk"))


def broken(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, change: Any) -> None:
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: change(self, right, *args, **kwargs))


def difference(steps: int = 2500) -> str:
    found = cache_model.run(steps, seed=3)
    assert not found["goal"]["reached"]
    return str(found["difference"])


def test_a_leaked_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(tree: PrefixTree, right: Any, count: int) -> int:
        freed: int = right(tree, count)
        if freed and tree.pool.free:
            tree.pool.allocate(1)
        return freed

    broken(monkeypatch, PrefixTree, "evict", leak)
    assert "references" in difference()


def test_a_page_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, PrefixTree, "match", lambda tree, right, tokens: right(tree, tokens)[:3])
    assert "match" in difference()


def test_a_page_that_is_evicted_in_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixTree, "_can_drop", lambda tree, page: True)
    assert "evicted" in difference()


def test_wrong_k_v_from_a_tier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_up(tiers: Tiers, right: Any, pages: Sequence[int], data: Any) -> None:
        right(tiers, pages, data.flip(0))

    broken(monkeypatch, Tiers, "_write", mixed_up)
    assert "does not hold" in difference()


def test_what_was_promised_and_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_model, "RARE", OFTEN)
    broken(monkeypatch, Tiers, "close", lambda tiers, right, tree: right(tiers, PrefixTree(tiers.pool)))
    assert "gone" in difference() or "restored" in difference()


def test_a_release_that_is_missed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, PagePool, "release", lambda pool, right, pages: right(pool, list(pages)[:4]))
    assert difference() != "None"
