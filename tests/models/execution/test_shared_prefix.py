"""Sequences that share a prefix: the plain path's bits where they are promised, its values to rounding elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cache.pool import PagePool
from forerun.core import EXTRA_KV_SLOTS, ROOT, TokenBatch
from forerun.models.attention import SdpaAttention
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.execution.kv_copies import KeyRuns
from forerun.models.execution.runner import Runner, Span
from forerun.models.execution.shared_prefix import PrefixGroup, find_groups
from forerun.models.formats.checkpoint import open_checkpoint

CPU = torch.device("cpu")
SIZE, PAGES, HEADS, KV_HEADS, DIM = 16, 260, 6, 2, 16
IDS = torch.randint(3, 400, (700,), generator=torch.Generator().manual_seed(5)).tolist()

Row = tuple[list[int], int, int]  # pages, context, new tokens


def config(window: int | None) -> ModelConfig:
    """Two layers, of which the second slides where there is a window."""
    return ModelConfig(
        "llama", 8, 96, 2, HEADS, KV_HEADS, DIM, 8, 4096, sliding_window=window, window_layers=(False, True)
    )


def make_batch(rows: list[Row]) -> TokenBatch:
    cu_seqlens, kv_lens = [0], []
    block_tables = torch.zeros(len(rows), max(len(pages) for pages, _, _ in rows), dtype=torch.int32)
    for row, (pages, context, count) in enumerate(rows):
        block_tables[row, : len(pages)] = torch.tensor(pages)
        cu_seqlens.append(cu_seqlens[-1] + count)
        kv_lens += range(context - count + 1, context + 1)
    zeros = torch.zeros(cu_seqlens[-1], dtype=torch.int64)
    seq_lens = [context for _, context, _ in rows]
    seen = torch.tensor(kv_lens, dtype=torch.int32)
    return TokenBatch(zeros, zeros, zeros, seen, block_tables, cu_seqlens, seq_lens, SIZE, zeros)


class Case:
    """Random queries, and random K and V in all slots of a pool."""

    def __init__(self, rows: list[Row], window: int | None = None, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        self.batch, self.config = make_batch(rows), config(window)
        self.kv = tuple(torch.randn(PAGES * SIZE + EXTRA_KV_SLOTS, KV_HEADS, DIM, generator=make) for _ in range(2))
        self.q = 3 * torch.randn(self.batch.num_tokens, HEADS, DIM, generator=make)

    def run(self, same_bits: bool, share_prefix: bool) -> tuple[torch.Tensor, SdpaAttention]:
        backend = SdpaAttention(self.config, CPU, 4096, same_bits, share_prefix)
        backend.plan(self.batch)
        return torch.stack([backend.attend(self.q, layer, self.kv) for layer in range(2)]), backend

    def reference(self) -> torch.Tensor:
        """A softmax in double precision per token, over what it sees."""
        out = torch.zeros(2, self.batch.num_tokens, HEADS, DIM, dtype=torch.float64)
        for s, (lo, hi) in enumerate(zip(self.batch.cu_seqlens, self.batch.cu_seqlens[1:], strict=False)):
            for layer in range(2):
                for t in range(lo, hi):
                    seen, window = int(self.batch.kv_lens[t]), self.config.windows[layer]
                    entry = torch.arange(max(0, seen - window) if window else 0, seen)
                    slots = self.batch.block_tables[s][entry // SIZE] * SIZE + entry % SIZE
                    k, v = (c[slots].repeat_interleave(HEADS // KV_HEADS, 1).double() for c in self.kv)
                    weights = torch.einsum("hd,khd->hk", self.q[t].double() * self.config.scale, k).softmax(-1)
                    out[layer, t] = torch.einsum("hk,khd->hd", weights, v)
        return out.view(2, self.batch.num_tokens, -1)

    def check(self) -> list[PrefixGroup]:
        want = self.reference()
        plain, _ = self.run(same_bits=False, share_prefix=False)
        shared, backend = self.run(same_bits=False, share_prefix=True)
        torch.testing.assert_close(plain.double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shared.double(), want, atol=1e-5, rtol=1e-5)
        bits, _ = self.run(same_bits=True, share_prefix=False)
        assert torch.equal(self.run(same_bits=True, share_prefix=True)[0], bits)
        return backend._groups


def branches(prefix: list[int], spare: list[int], ends: list[tuple[int, int]]) -> list[Row]:
    """Sequences of `prefix` and some own entries each (own, new tokens), on pages taken from `spare`."""
    rows = []
    for own, count in ends:
        pages = [spare.pop() for _ in range(-(-own // SIZE))]
        rows.append((prefix + pages, len(prefix) * SIZE + own, count))
    return rows


def shuffled(seed: int) -> list[int]:
    return torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("window", [None, 40, 300, 5000])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("pages", [16, 33, 40])
def test_a_group_gets_what_each_gets_alone(pages: int, together: bool, window: int | None):
    spare = shuffled(pages)
    prefix = list(range(PAGES - pages, PAGES)) if together else spare[:pages]
    rows = branches(prefix, [p for p in spare if p not in prefix], [(1, 1), (70, 1), (16, 4), (17, 1), (200, 16)])
    groups = Case(rows, window).check()
    assert [len(group.tokens) for group in groups] == [23]
    assert isinstance(groups[0].slots, slice) == together


def test_several_groups_beside_strangers_and_prefills():
    spare = shuffled(1)
    first, second = [spare.pop() for _ in range(20)], [spare.pop() for _ in range(30)]
    a, b = branches(first, spare, [(3, 1)] * 3), branches(second, spare, [(9, 1), (40, 2)])
    alone, prefill = branches([spare.pop() for _ in range(25)], spare, [(5, 1)]), branches(first, spare, [(90, 40)])
    rows = [a[0], b[0], alone[0], a[1], prefill[0], b[1], a[2]]  # members are not side by side
    groups = Case(rows, 100).check()
    assert sorted(sorted(group.tokens.tolist()) for group in groups) == [[0, 3, 46], [1, 44, 45]]


def test_a_sequence_that_is_the_beginning_of_another():
    pages = shuffled(2)
    rows = [(pages[:20], 320, 1), (pages[:20], 311, 2), (pages[:50], 790, 1)]
    groups = Case(rows).check()
    assert [len(group.tokens) for group in groups] == [4]


def test_short_prefixes_are_left_alone():
    spare = shuffled(3)
    assert Case(branches([spare.pop() for _ in range(15)], spare, [(20, 1)] * 4)).check() == []


@settings(max_examples=25, deadline=None)
@given(
    stems=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    leaves=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), st.integers(1, 20)), min_size=1, max_size=7),
    window=st.sampled_from([None, 7, 250]),
    seed=st.integers(0, 99),
)
def test_random_trees_of_sequences(stems: list[int], leaves: list[tuple[int, int, int]], window: int | None, seed: int):
    spare = shuffled(seed)
    stem: list[int] = []
    levels = []
    for length in stems:  # each goes on from the one before it
        stem = stem + [spare.pop() for _ in range(length)]
        levels.append(stem)
    rows = [row for at, own, new in leaves for row in branches(levels[at % len(levels)], spare, [(own, min(own, new))])]
    Case(rows, window, seed).check()


def test_groups_save_the_most_reads():
    block_tables = np.zeros((6, 40), dtype=np.int32)
    block_tables[:, :4] = 1  # all share four pages
    block_tables[[0, 2, 4], 4:30] = 2  # three share thirty
    block_tables[[1, 3], 4:20] = 3  # two share twenty
    block_tables[5, 4:] = 4
    block_tables[:, 35] = range(6)
    assert sorted(find_groups(block_tables, [40] * 6, 4)) == [([0, 2, 4], 35), ([1, 3], 35)]
    assert sorted(find_groups(block_tables, [40, 10, 40, 40, 40, 40], 4)) == [([0, 2, 4], 35), ([1, 3], 10)]
    [(rows, pages)] = find_groups(block_tables, [4] * 6, 4)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5] and pages == 4
    assert find_groups(block_tables, [3] * 6, 4) == []


def test_a_long_chain_of_nested_prefixes_is_searched():
    block_tables = np.arange(1200, dtype=np.int32)[None].repeat(1200, 0)
    found = find_groups(block_tables, list(range(1200)), 16)
    rows = [row for group, _ in found for row in group]
    assert len(rows) == len(set(rows)) > 500
    assert all(pages <= min(group) for group, pages in found)


def test_a_shared_prefix_is_copied_once(monkeypatch: pytest.MonkeyPatch):
    spare = shuffled(4)
    case = Case(branches([spare.pop() for _ in range(32)], spare, [(10, 1)] * 5))
    copied: list[int] = []
    copy = KeyRuns.copy

    def counted(keys: KeyRuns, kv: tuple[torch.Tensor, torch.Tensor], memory: torch.Tensor) -> None:
        copied.append(sum(run.stop - run.start for _, run in keys._fresh()))
        copy(keys, kv, memory)

    monkeypatch.setattr(KeyRuns, "copy", counted)
    case.run(same_bits=True, share_prefix=True)
    assert copied == [522, *[10] * 4] * 2  # in both layers
    copied.clear()
    case.run(same_bits=True, share_prefix=False)
    assert copied == [522] * 10


def test_one_backend_serves_calls_in_and_out_of_inference_mode():
    spare = shuffled(6)
    case = Case(branches([spare.pop() for _ in range(3)], spare, [(10, 1)] * 2))
    want, _ = case.run(same_bits=True, share_prefix=True)
    for inference in (True, False):
        fresh = SdpaAttention(case.config, CPU, 4096)
        for mode in (inference, not inference):
            with torch.inference_mode(mode):
                fresh.plan(case.batch)
                assert torch.equal(fresh.attend(case.q, 0, case.kv), want[0])


@pytest.mark.parametrize("weights", ["int8", "float32"])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_branches_and_trees_of_a_model(family: str, weights: str, tiny_folder: Callable[[str], Path]):
    decoder, _ = build_decoder(open_checkpoint(tiny_folder(family)), CPU, weights, 1024)
    runner = Runner(decoder, PagePool(decoder.config, 128, SIZE, decoder.dtype, CPU), 1024)
    stem = array("i", range(20, 56))
    runner.forward([Span(IDS[:576], 0, stem, ())])
    spans = [Span([7 + i], 576, stem + array("i", [100 - i]), (0,)) for i in range(4)]
    spans.append(Span([1, 2, 3], 576, stem + array("i", [110]), (0, 1, 2), 577, [ROOT, ROOT]))
    backend = decoder.attention
    assert isinstance(backend, SdpaAttention)
    together = runner.forward(spans).logits
    assert len(backend._groups) == (weights == "float32")
    alone = torch.cat([runner.forward([span]).logits for span in spans])
    if weights == "int8":
        assert torch.equal(together, alone)
    else:
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)
