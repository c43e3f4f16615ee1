"""Groups that read shared pages together: every token gets the bits it gets without."""

import numpy as np
import pytest
import torch

from forerun.core import HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.paged import QueryPlan, paged_attention, plan_queries
from forerun.models.cuda.shared import TILE_FIELDS, SharedPlan, most_tiles, plan_shared

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, POOL = 16, 120


class Case:
    """Stems of given pages; sequences (stem, own entries, new tokens), on shuffled pages."""

    def __init__(self, stems, sequences, heads=6, kv_heads=2, dim=32, tree=False):
        self.config = ModelConfig("llama", 8, 96, 1, heads, kv_heads, dim, 8, 4096)
        order = torch.randperm(POOL).tolist()
        stem_pages = [[order.pop() for _ in range(stem)] for stem in stems]
        self.k, self.v = torch.randn(2, POOL * PAGE, kv_heads, dim, device=DEVICE)
        cu_seqlens, kv_lens, pages, seq_lens = [0], [], [], []
        for stem, own, count in sequences:
            table = stem_pages[stem] + [order.pop() for _ in range(-(-own // PAGE))]
            pages.append(np.array(table, dtype=np.int32))
            seq_lens.append(stems[stem] * PAGE + own)
            cu_seqlens.append(cu_seqlens[-1] + count)
            base = seq_lens[-1] - count
            kv_lens += [base] * count if tree else range(base + 1, seq_lens[-1] + 1)
        self.k[torch.tensor(order).repeat_interleave(PAGE) * PAGE] = torch.nan  # free pages
        none = np.zeros(cu_seqlens[-1], dtype=np.int64)
        seen = np.array(kv_lens, dtype=np.int32)
        self.batch = HostBatch(none, none, none, seen, cu_seqlens, seq_lens, pages, PAGE, [])
        self.q = torch.randn(cu_seqlens[-1], heads, dim, device=DEVICE)
        if tree:  # each token sees the tree's first and itself
            self.batch.bits = [1 | 1 << i for _, _, count in sequences for i in range(count)]
            self.batch.tree_start = [
                context - count for context, (_, _, count) in zip(seq_lens, sequences, strict=True)
            ]
        self.tokens = self.batch.to(DEVICE)

    def run(self, shared=None, plan: QueryPlan | None = None):
        tree_start = self.tokens.tree_start
        return paged_attention(
            self.q, self.k, self.v, self.tokens.block_tables, self.tokens.kv_lens,
            plan or plan_queries(self.batch.cu_seqlens, max(self.batch.seq_lens), DEVICE), 0.3, tree=self.tokens.tree,
            tree_start=None if tree_start is None else torch.tensor(tree_start, dtype=torch.int32, device=DEVICE),
            out=torch.full_like(self.q, torch.nan), shared=shared,
        )  # fmt: skip

    def check(self, groups: int):
        found = plan_shared(self.batch, self.config, 1)
        assert found is not None and len(set(found.tiles[:, 0])) == groups
        got, want = self.run(SharedPlan.send(found, DEVICE)), self.run()
        assert want.isfinite().all() and torch.equal(got, want)


# own entries: none of its block, on a page's and a block's border, several blocks
@pytest.mark.parametrize("own", [1, 16, 17, 64, 65, 150])
@pytest.mark.parametrize("stem", [16, 19])
def test_a_group_at_borders_of_pages_and_blocks(own, stem):
    Case([stem], [(0, own, 1), (0, 3, 1), (0, 20, 4)]).check(1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (12, 2, 128), (4, 4, 24)])
def test_head_shapes(heads, kv_heads, dim):
    Case([17], [(0, 9, 1), (0, 30, 2)], heads, kv_heads, dim).check(1)


def test_groups_of_several_tiles_beside_others():
    sequences = [(0, 5, 1), (1, 8, 2), (2, 9, 1), (0, 90, 70), (1, 40, 1), *[(0, 3 + i, 5) for i in range(5)]]
    Case([20, 17, 3], sequences, kv_heads=1).check(2)


def test_draft_trees_are_left_alone():
    """The kernel for trees lays its sums out otherwise: with shared blocks before them the last bit differs."""
    case = Case([16], [(0, 12, 5), (0, 30, 9), (0, 4, 2)], tree=True)
    assert plan_shared(case.batch, case.config, 1) is None
    case.batch.bits = None
    assert plan_shared(case.batch, case.config, 1) is not None


def test_more_blocks_than_lanes():
    Case([36], [(0, 7, 1), (0, 20, 2)], heads=16, kv_heads=16, dim=16).check(1)


def test_room_for_more_groups_is_left_alone():
    """What a captured graph has: buffers for any groups of a bucket, whose grid is fixed."""
    case, seqs, rows = Case([18], [(0, 5, 1), (0, 70, 3)]), 4, 8
    found = plan_shared(case.batch, case.config, 1)
    memory = torch.zeros(seqs + 2 * rows + TILE_FIELDS * most_tiles(rows, 3), dtype=torch.int32)
    found.lay(memory.numpy(), seqs, rows)
    cu_seqlens = torch.tensor([0, 1, 4, 4, 4], dtype=torch.int32, device=DEVICE)
    plan = QueryPlan(cu_seqlens, cu_seqlens[:-1], rows, 4, 0, 1024)
    case.tokens.block_tables = torch.cat([case.tokens.block_tables, torch.zeros_like(case.tokens.block_tables)])
    assert torch.equal(case.run(SharedPlan.of(memory.to(DEVICE), seqs, rows), plan), case.run(plan=plan))


def test_the_backend_groups_where_it_pays(monkeypatch):
    case = Case([18], [(0, 5, 1), (0, 70, 3)])
    backend = PagedAttention(case.config, DEVICE, 512)
    backend.plan(case.tokens)
    assert backend._shared is None  # far too little to pay
    monkeypatch.setattr("forerun.models.cuda.attention.MIN_LAUNCH_SAVING_BYTES", 1)
    plain = backend.attend(case.q, 0, (case.k, case.v))
    backend.plan(case.tokens)
    assert backend._shared is not None
    assert torch.equal(backend.attend(case.q, 0, (case.k, case.v)), plain)
    backend.share_prefix = False
    backend.plan(case.tokens)
    assert backend._shared is None
