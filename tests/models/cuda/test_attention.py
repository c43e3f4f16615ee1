"""Which prompts torch's attention takes, and that it computes what the paged kernel does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.core import EXTRA_KV_SLOTS, HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda import fresh
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.fresh import MAX_KNOWN_SHARE, FreshPrompt, blocks, room_for, rooms
from forerun.models.cuda.lanes import Shape
from forerun.models.cuda.paged import QueryPlan, paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 24, 4, 2, 16
CONFIG = ModelConfig("llama", 8, HEADS * DIM, 1, HEADS, KV_HEADS, DIM, 8, 512)


def batch_of(first, tokens, pages, skip=1):
    entries = np.arange(first, first + tokens * skip, skip)
    return HostBatch(
        tokens=np.zeros(tokens, dtype=np.int64),
        positions=entries,
        slot_mapping=pages.astype(np.int64)[entries // PAGE] * PAGE + entries % PAGE,
        kv_lens=(entries + 1).astype(np.int32),
        cu_seqlens=[0, tokens],
        seq_lens=[int(entries[-1]) + 1],
        pages=[pages[: entries[-1] // PAGE + 1].astype(np.int32)],
        page_size=PAGE,
        logits_indices=[],
    ).to(DEVICE)


def cache():
    return tuple(torch.randn(PAGES * PAGE + EXTRA_KV_SLOTS, KV_HEADS, DIM, device=DEVICE) for _ in range(2))


@pytest.mark.parametrize("pages", [np.arange(3, 15), np.random.default_rng(1).permutation(PAGES)[:12]])
@pytest.mark.parametrize(("first", "tokens"), [(0, 70), (0, 128), (20, 100), (1, 97)])
def test_torch_sees_what_the_paged_kernel_sees(first, tokens, pages):
    backend, kv, batch = PagedAttention(CONFIG, DEVICE, 512), cache(), batch_of(first, tokens, pages)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE)
    backend.plan(batch)
    assert backend._fresh is not None and backend._fresh.rows == room_for(first + tokens)
    mine = backend.attend(backend.store(qkv, 0, kv, None), 0, kv)
    backend._fresh = None
    paged = backend.attend(backend.store(qkv, 0, kv, None), 0, kv)
    assert mine.shape == (tokens, HEADS * DIM) and mine.is_contiguous()
    assert torch.allclose(mine, paged, atol=1e-5)


def test_what_torch_does_not_take():
    pages = np.arange(PAGES)
    assert FreshPrompt.of(batch_of(0, 100, pages), 101) is None  # too short
    assert FreshPrompt.of(batch_of(0, 100, pages, skip=2), 65) is None  # rows with gaps between them
    known = int(MAX_KNOWN_SHARE * 160)
    assert FreshPrompt.of(batch_of(known, 160 - known, pages), 65) is not None
    assert FreshPrompt.of(batch_of(known + 1, 159 - known, pages), 65) is None  # most of it would be computed in vain


def test_beyond_the_end_of_the_cache_there_are_zeros():
    batch = batch_of(0, 100, np.arange(PAGES - 7, PAGES))
    kv = tuple(cache[: PAGES * PAGE] for cache in cache())
    backend = PagedAttention(CONFIG, DEVICE, 512)
    backend.plan(batch)
    q = backend.store(torch.randn(100, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE), 0, kv, None)
    mine = backend.attend(q, 0, kv)
    backend._fresh = None
    assert torch.allclose(mine, backend.attend(q, 0, kv), atol=1e-5)


def test_numbers_of_rows_are_few():
    given = range(1, 1 << 15)
    assert all(tokens <= room_for(tokens) < tokens + max(256, 0.126 * tokens) for tokens in given)
    found = rooms(1536, 1 << 15)
    assert set(found) == {room_for(tokens) for tokens in range(1536, (1 << 15) + 1)} and len(found) < 36


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_blocks_see_themselves_and_the_one_before(count):
    size = 8
    q, k, v = (torch.randn(count * size, heads, DIM, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    at = torch.arange(count * size, device=DEVICE)
    seen = (at[None] <= at[:, None]) & (at[None] // size >= at[:, None] // size - 1)
    rows, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, seen, scale=0.3, enable_gqa=True)
    assert torch.allclose(blocks(q, k, v, 0.3, size), want[0].transpose(0, 1), atol=1e-5)


def test_a_draft_that_is_narrowed_reads_in_blocks(monkeypatch):
    tokens, window = 150, 32
    batch, kv = batch_of(0, tokens, np.arange(PAGES)), cache()
    backend = PagedAttention(replace(CONFIG, num_layers=2), DEVICE, 512)
    narrow, asked = backend.narrowed(window, 1), []
    monkeypatch.setattr(fresh, "blocks", lambda *given: asked.append(given[-1]) or blocks(*given))
    qkv, found = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE), {}
    for way in (backend, narrow):
        way.plan(batch)
        found[way] = [way.attend(way.store(qkv, layer, kv, None), layer, kv) for layer in range(2)]
    assert asked == [window] and narrow._fresh.rows == 160
    assert torch.allclose(found[narrow][0], found[backend][0], atol=1e-5)  # a wide layer
    apart = (found[narrow][1] - found[backend][1]).abs().amax(1)
    assert (apart[: 2 * window] < 1e-5).all() and (apart[2 * window :] > 1e-5).all()


def test_what_prompts_will_run_is_prepared(monkeypatch):
    """Every number of rows that whole prompts come in, and every number of blocks of a call."""
    backend, kv, ran = PagedAttention(CONFIG, DEVICE, 512), cache(), []
    monkeypatch.setattr(fresh, "causal", lambda q, k, v, scale: ran.append((len(q), len(k), scale)))
    backend.prepare_prompts(kv, 700, 300)
    assert [rows for rows, _, _ in ran] == [512, 768] and all(rows == keys for rows, keys, _ in ran)
    backend.prepare_prompts(kv, 700)  # shorter ones do not come here
    assert len(ran) == 2
    calls = set()
    way = fresh._with_sums
    monkeypatch.setattr(fresh, "_with_sums", lambda q, *given: calls.add((len(q), given[-1])) or way(q, *given))
    backend.narrowed(16, 1).prepare_prompts(kv, 700, 300)  # this model has one layer, which sees all
    prepared = set(calls)
    for count in range(1, 20):
        blocks(*(torch.zeros(16 * count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)), 0.3, 16)
    assert calls == prepared and len(calls) == 8


@pytest.mark.parametrize("lanes", [1, 4])
def test_scattered_rows_in_lanes(lanes):
    """Blocks that all rows of a tile see are read without a mask."""
    tokens, rows = 300, 40
    entries = torch.sort(torch.randperm(tokens)[:rows]).values.to(DEVICE)
    q, (k, v) = torch.randn(rows, HEADS, DIM, device=DEVICE), cache()
    pages = torch.randperm(PAGES, device=DEVICE).int()
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    plan = QueryPlan(starts, starts[:1], rows, 0, rows, 384)
    shape = Shape(16, 32, 4, 2, lanes)
    got = paged_attention(q, k, v, pages[None], (entries + 1).int(), plan, 0.3, page_size=PAGE, many_shape=shape)
    slots = (pages.long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:tokens]
    seen = torch.arange(tokens, device=DEVICE)[None] <= entries[:, None]
    given = (x.transpose(0, 1)[None] for x in (q, k[slots], v[slots]))
    want = torch.nn.functional.scaled_dot_product_attention(*given, seen, scale=0.3, enable_gqa=True)
    assert torch.allclose(got, want[0].transpose(0, 1), atol=1e-4)
