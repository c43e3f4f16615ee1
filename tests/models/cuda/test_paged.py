from dataclasses import replace

import pytest
import torch

from forerun.models.cuda.lanes import PREFILL_SHAPE, SHORT_PREFILL_SHAPE, WIDE_HEAD_SHAPE, choose_shape
from forerun.models.cuda.paged import QueryPlan, Shape, paged_attention, plan_queries
from forerun.models.execution.batch_split import MAX_DECODE_TOKENS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
SMALL = {"few_shape": Shape(16, 16, 4, 2), "many_shape": Shape(32, 32, 4, 2)}  # many blocks from few keys


class Case:
    """Sequences of given (context, new tokens) on shuffled pages; unwritten slots hold NaN, which must not be read."""

    def __init__(self, sequences, heads=6, kv_heads=2, dim=32, tree_width=0):
        self.seq_lens = [context for context, _ in sequences]
        self.cu_seqlens = [0]
        for _, count in sequences:
            self.cu_seqlens.append(self.cu_seqlens[-1] + count)
        pages = [-(-context // PAGE) for context in self.seq_lens]
        order = torch.randperm(sum(pages) + 3)
        self.k = torch.full(((sum(pages) + 3) * PAGE, kv_heads, dim), float("nan"), device=DEVICE)
        self.v = self.k.clone()
        self.block_tables = torch.zeros(len(sequences), max(pages), dtype=torch.int32, device=DEVICE)
        self.slots: list[torch.Tensor] = []
        kv_lens: list[int] = []
        used = 0
        for row, (context, count) in enumerate(sequences):
            own = order[used : used + pages[row]].to(DEVICE)
            used += pages[row]
            self.block_tables[row, : len(own)] = own
            slots = (own[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:context]
            self.k[slots], self.v[slots] = torch.randn(2, context, kv_heads, dim, device=DEVICE)
            self.slots.append(slots)
            base = context - count
            kv_lens += [base] * count if tree_width else range(base + 1, context + 1)
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(self.cu_seqlens[-1], heads, dim, device=DEVICE)
        self.tree: torch.Tensor | None = None
        self.tree_start: torch.Tensor | None = None
        if tree_width:  # each token sees itself and a random earlier node's ancestors
            self.tree_start = torch.tensor([c - n for c, n in sequences], dtype=torch.int32, device=DEVICE)
            self.tree = torch.zeros(self.cu_seqlens[-1], tree_width, dtype=torch.bool, device=DEVICE)
            for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False):
                for node in range(end - start):
                    if node:
                        self.tree[start + node] = self.tree[start + int(torch.randint(node, ()))]
                    self.tree[start + node, node] = True

    def scatter(self):
        """New tokens at any positions instead of the last ones, as in the repair of a prompt."""
        for start, end, context in zip(self.cu_seqlens, self.cu_seqlens[1:], self.seq_lens, strict=False):
            places = torch.randperm(context)[: end - start].sort().values
            self.kv_lens[start:end] = (places + 1).to(self.kv_lens)
        return self

    def run(self, window=None, q=None, cu_seqlens=None, max_context=None, plan=None, **shapes):
        plan = plan or plan_queries(cu_seqlens or self.cu_seqlens, max_context or max(self.seq_lens), DEVICE)
        q = self.q if q is None else q
        out, shapes = torch.full_like(q, float("nan")), dict(shapes or SMALL)
        if few_shape := shapes.pop("few_shape", None):
            plan = replace(plan, few_shape=few_shape)
        return paged_attention(
            q, self.k, self.v, self.block_tables, self.kv_lens, plan, 0.3, window=window, tree=self.tree,
            tree_start=self.tree_start, out=out, **shapes,
        )  # fmt: skip

    def reference(self, window=None):
        out = torch.zeros_like(self.q, dtype=torch.float64)
        group = self.q.shape[1] // self.k.shape[1]
        for row, slots in enumerate(self.slots):
            k, v = (cache[slots].double().repeat_interleave(group, 1) for cache in (self.k, self.v))
            for t in range(self.cu_seqlens[row], self.cu_seqlens[row + 1]):
                entry = torch.arange(len(slots), device=DEVICE)
                visible = entry < self.kv_lens[t]
                kin = torch.zeros_like(visible)
                if self.tree is not None and self.tree_start is not None:
                    first = int(self.tree_start[row])
                    kin[first:] = self.tree[t, : len(slots) - first]
                if window:
                    visible &= entry > int((visible | kin).sum()) - 1 - window
                visible |= kin
                score = torch.einsum("hd,ehd->he", self.q[t].double(), k) * 0.3
                if visible.any():
                    out[t] = torch.einsum("he,ehd->hd", score.masked_fill(~visible, -torch.inf).softmax(-1), v)
        return out


def check(case, window=None, **shapes):
    got, want = case.run(window, **shapes), case.reference(window)
    assert got.isfinite().all()
    assert (got.double() - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize(
    "sequences", [[(1, 1)], [(40, 1)], [(300, 1), (17, 1), (1, 1)], [(100, 16)], [(70, 5), (9, 9)]]
)
@pytest.mark.parametrize("window", [None, 7, 50])
def test_few_tokens(sequences, window):
    check(Case(sequences), window)


@pytest.mark.parametrize("window", [None, 20])
def test_many_tokens_beside_few(window):
    check(
        Case([(90, 70), (33, 1), (80, MAX_DECODE_TOKENS), (MAX_DECODE_TOKENS + 1, MAX_DECODE_TOKENS + 1)], kv_heads=3),
        window,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (8, 1, 64), (5, 1, 24), (32, 8, 128)])
def test_head_shapes(heads, kv_heads, dim):
    check(Case([(45, 3), (20, 1)], heads, kv_heads, dim))


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("count", [9, MAX_DECODE_TOKENS + 3])
def test_draft_tree(window, count):
    check(Case([(count + 40, count), (count, count)], tree_width=count + 2), window)


def test_more_blocks_than_lanes_and_default_tiles():
    check(Case([(1100, 2)], heads=2, kv_heads=2))
    check(Case([(150, 2), (70, 70)], dim=64), few_shape=Shape(32, 64, 4, 2))


@pytest.mark.parametrize("window", [None, 33])
def test_a_token_is_the_same_bits_alone_and_in_a_batch(window):
    case = Case([(200, 1), (150, 12), (61, 1)])
    together = case.run(window)
    for row, (start, end) in enumerate(zip(case.cu_seqlens, case.cu_seqlens[1:], strict=False)):
        for t in {start, end - 1}:
            alone = Case([(1, 1)])
            alone.k, alone.v, alone.block_tables = case.k, case.v, case.block_tables[row : row + 1]
            alone.kv_lens, alone.q, alone.seq_lens = case.kv_lens[t : t + 1], case.q[t : t + 1], [int(case.kv_lens[t])]
            assert torch.equal(alone.run(window)[0], together[t])


def test_a_larger_grid_changes_nothing():
    case = Case([(130, 1), (40, 3)])
    assert torch.equal(case.run(), case.run(max_context=5000))


def test_tables_may_be_stored_page_by_page():
    case = Case([(130, 1), (40, 3)])
    want = case.run()
    case.block_tables = case.block_tables.T.contiguous().T
    assert case.block_tables.stride(1) == 2 and torch.equal(case.run(), want)


def test_padding_rows_and_sequences_are_left_alone():
    case = Case([(20, 2), (30, 1)])
    q = torch.cat([case.q, torch.zeros_like(case.q[:2])])
    case.block_tables = torch.cat([case.block_tables, torch.zeros_like(case.block_tables)])
    got = case.run(q=q, cu_seqlens=[0, 2, 3, 3, 3])
    assert torch.equal(got[:3], case.run(cu_seqlens=[0, 2, 3, 3, 3], q=case.q))
    assert got[3:].isnan().all()


def test_a_token_that_sees_nothing_gets_zeros():
    case = Case([(20, 2)])
    case.kv_lens[0] = 0
    assert case.run()[0].eq(0).all()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("lanes", [2, 4])
def test_many_tokens_of_one_sequence_are_cut_into_lanes(lanes, window):
    case = Case([(300, MAX_DECODE_TOKENS + 9)]).scatter()
    case.kv_lens[:3] = 0  # in a tile with others that see something
    check(case, window, many_shape=Shape(32, 16, 4, 2, lanes))
    assert case.run(window, many_shape=Shape(32, 16, 4, 2, lanes))[:3].eq(0).all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 24), (4, 4, 16)])
def test_lanes_without_a_block_and_head_shapes(heads, kv_heads, dim):
    case = Case([(70, 68)], heads, kv_heads, dim).scatter()
    check(case, many_shape=Shape(64, 16, 4, 2, 8))  # five blocks: three lanes have none
    case.kv_lens[:] = 0
    assert case.run(many_shape=Shape(64, 16, 4, 2, 8)).eq(0).all()


def test_lanes_with_a_draft_tree():
    check(
        Case([(MAX_DECODE_TOKENS + 70, MAX_DECODE_TOKENS + 3)], tree_width=MAX_DECODE_TOKENS + 5),
        many_shape=Shape(32, 16, 4, 2, 4),
    )


@pytest.mark.parametrize("count", [0, 5, 70])
def test_a_static_plan_holds_fewer_rows(count):
    case = Case([(150, count)]).scatter()
    rows = 80
    cu_seqlens = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    plan = QueryPlan(cu_seqlens, cu_seqlens[:-1], rows, 0, rows, 4096)  # no few: any number of rows runs as many do
    q = torch.cat([case.q, torch.full((rows - count, *case.q.shape[1:]), float("nan"), device=DEVICE)])
    got = case.run(q=q, plan=plan, many_shape=Shape(32, 16, 4, 2, 4))
    assert got[count:].isnan().all()  # left as they were
    assert torch.allclose(got[:count].double(), case.reference(), atol=1e-5)


def test_a_static_plan_with_both_regimes_leaves_few_rows_to_theirs():
    case = Case([(150, 5)])
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    both = case.run(
        plan=QueryPlan(cu_seqlens, cu_seqlens[:-1], MAX_DECODE_TOKENS, MAX_DECODE_TOKENS, 80, 4096),
        **SMALL | {"many_shape": Shape(32, 16, 4, 2, 4)},
    )
    assert torch.equal(both, case.run())


def test_lanes_are_for_one_sequence():
    with pytest.raises(AssertionError, match="several sequences"):
        Case([(80, 70), (80, 70)]).run(many_shape=Shape(32, 16, 4, 2, 2))


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "lanes"),
    [(64, 12, 2, 16), (944, 12, 2, 4), (1800, 12, 2, 4), (2048, 12, 2, 2), (944, 24, 4, 2), (1800, 24, 4, 2)],
)
def test_the_shape_chosen_fills_the_chip(rows: int, heads: int, kv_heads: int, lanes: int):
    assert choose_shape(rows, heads, kv_heads, 128, 1, 16384) == replace(SHORT_PREFILL_SHAPE, lanes=lanes)
    assert choose_shape(rows, heads, kv_heads, 128, 2, 16384) == PREFILL_SHAPE  # would need a table of cells


def test_lanes_need_keys_and_wide_heads_smaller_tiles():
    assert choose_shape(8192, 12, 2, 128, 1, 8192) == PREFILL_SHAPE
    assert choose_shape(80, 12, 2, 128, 1, 80).lanes == 1
    assert choose_shape(80, 12, 2, 128, 1, 1100).lanes == 4
    assert choose_shape(8192, 8, 1, 256, 1, 8192) == WIDE_HEAD_SHAPE
    assert choose_shape(80, 8, 1, 256, 1, 8192) == replace(WIDE_HEAD_SHAPE, lanes=16)


def test_the_chosen_shape_is_right():
    check(Case([(1100, MAX_DECODE_TOKENS + 1)], heads=2, kv_heads=2, dim=16).scatter(), few_shape=Shape(16, 16, 4, 2))
    assert choose_shape(MAX_DECODE_TOKENS + 1, 2, 2, 16, 1, 1100).lanes > 1
