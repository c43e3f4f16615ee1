"""Which prompts torch's attention takes, and that it computes what the paged kernel does."""

import numpy as np
import pytest
import torch

from forerun.core import EXTRA_KV_SLOTS, HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda.attention import MAX_KNOWN_SHARE, FreshPrompt, PagedAttention

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
    assert backend._fresh is not None and backend._fresh.rows % EXTRA_KV_SLOTS == 0
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
