"""Spans of a prompt that were met before: found wherever they lie, kept as long as there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.sources.chunk_index import MIN_SPAN_TOKENS, SINK_TOKENS, ChunkIndex
from tests import tiny

CPU = torch.device("cpu")


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, count).tolist()


class Book:
    """An index on a pool whose K/V is not read."""

    def __init__(self, tiny_folder: Callable[[str], Path], most: int = 100) -> None:
        config = open_checkpoint(tiny_folder("llama")).config
        self.pool = PagePool(config, 200, 8, torch.float32, CPU)
        self.index = ChunkIndex(self.pool, most)

    def add(self, tokens: list[int], shared: list[int] | None = None) -> list[int]:
        """Remembered, then finished: only the texts hold it."""
        new = self.pool.allocate(len(tokens) // 8 - len(shared or []))
        pages = [*(shared or []), *new]
        self.index.remember(tokens, pages)
        self.pool.release(new)
        return pages

    def find(self, tokens: list[int], start: int = 0) -> list[tuple[int, int, int]]:
        return [(m.start, m.count, m.old) for m in self.index.find(tokens, start, len(tokens))]


@pytest.mark.parametrize("offset", [0, 1, 5, 8, 15, 17])
@pytest.mark.parametrize("count", [MIN_SPAN_TOKENS - 1, MIN_SPAN_TOKENS, MIN_SPAN_TOKENS + 3, 150])
def test_a_span_is_found_wherever_it_lies(offset: int, count: int, tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    text = words(1, 320)
    book.add(text)
    prompt = [*words(2, offset), *text[41 : 41 + count], *words(3, 30)]
    assert book.find(prompt) == ([(offset, count, 41)] if count >= MIN_SPAN_TOKENS else [])
    assert book.find(prompt[: offset + count], start=offset + 10) == (
        [(offset + 10, count - 10, 51)] if count - 10 >= MIN_SPAN_TOKENS else []
    )


def test_the_longest_of_several_is_taken_and_slots_are_where_it_lies(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    b = words(1, 160)
    book.add([*words(2, 40), *b[:80], *words(3, 40)])
    pages = book.add([*words(4, 24), *b])
    book.add([*words(5, 40), *b[:120]])
    (match,) = book.index.find([9, 9, 9, *b, 9, 9], 0, 165)
    assert (match.start, match.count, match.old) == (3, 160, 24)
    assert match.slots.tolist() == [pages[e // 8] * 8 + e % 8 for e in range(24, 184)]


def test_spans_of_several_texts_in_one_prompt(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    a, b = words(1, 160), words(2, 160)
    book.add(a)
    book.add(b)
    assert book.find([*b[30:110], *words(3, 7), *a[16:96], *b[120:]]) == [(0, 80, 30), (87, 80, 16)]


def test_sinks_are_not_moved(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    text = words(1, 120)
    book.add(text)
    assert book.find([*words(2, 10), *text]) == [(10 + SINK_TOKENS, 120 - SINK_TOKENS, SINK_TOKENS)]


def test_a_shared_prefix_is_held_once(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    head, one, two = words(1, 80), words(2, 80), words(3, 80)
    pages = book.add([*head, *one])
    book.add([*head, *two], shared=pages[:10])
    assert book.index.num_pages == book.pool.used == 30
    assert book.find([7, 7, *head, *two]) == [(2 + SINK_TOKENS, 80 - SINK_TOKENS, SINK_TOKENS), (82, 80, 80)]
    assert book.index.release(1000) == 30 and book.pool.used == 0
    assert book.find([*head, *two]) == [] and not book.index._places


def test_the_least_recently_used_goes_first_from_its_end(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder, most=50)
    a, b, c = words(1, 160), words(2, 160), words(3, 160)
    book.add(a)
    book.add(b)
    assert book.find([5, *a]) == [(1 + SINK_TOKENS, 160 - SINK_TOKENS, SINK_TOKENS)]  # now b is the oldest
    book.add(c)
    assert book.index.num_pages == book.pool.used == 50
    assert book.find([5, *b]) == [(1 + SINK_TOKENS, 80 - SINK_TOKENS, SINK_TOKENS)]  # half of it
    assert book.find(a) and book.find(c)
    book.add(words(4, 800))
    assert book.index.num_pages == book.pool.used == 50 and not book.find(a)


def test_a_lying_hash_finds_nothing(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forerun.prefill.sources.chunk_index._BASE", 0)
    book = Book(tiny_folder)
    book.add([*words(1, 100), *[8] * 20])
    text = [*words(2, 50), *[8] * 100]
    assert book.find(text) == []


def test_one_token_over_and_over(tiny_folder: Callable[[str], Path]):
    book = Book(tiny_folder)
    book.add([8] * 160)
    found = book.find([8] * 400)
    assert sum(count for _, count, _ in found) >= 300 and all(count <= 160 - SINK_TOKENS for _, count, _ in found)
