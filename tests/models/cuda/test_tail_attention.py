"""Attention of a sequence's last tokens over its entries: kernels and the pass before them, against the eager way."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.cuda import tail_attention as module
from forerun.models.cuda.tail_attention import BLOCK_KEYS, MAX_SPLITS, TailAttentionKernel, queries_of
from forerun.models.execution.runner import Runner, Span
from forerun.prefill.choosers import TailAttention
from forerun_research.bench.shapes import SHAPES, RandomCheckpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter multiplies no bfloat16
PAGE = 16


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Still several splits in most tests; the interpreter runs programs one by one."""
    monkeypatch.setattr(module, "TARGET_PROGRAMS", 16)


class Case:
    """Random keys on shuffled pages, random queries; what no query may see is NaN."""

    def __init__(self, first, queries, heads=6, kv_heads=2, dim=32, layers=2, windows=None, spare=0):
        slides = {} if windows is None else {"sliding_window": windows[0], "window_layers": (*windows[1], False)}
        self.config = ModelConfig("llama", 8, 96, layers + 1, heads, kv_heads, dim, 8, 4096, **slides)
        self.first, self.queries, tokens = first, queries, first + queries
        count = -(-tokens // PAGE)
        pages = torch.randperm(count + 3)[:count]
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]
        self.kv = []
        for _ in range(layers + 1):
            cache = torch.full(((count + 3) * PAGE, kv_heads, dim), torch.nan)
            cache[slots] = torch.randn(tokens, kv_heads, dim)
            self.kv.append((cache.to(DEVICE, DTYPE), cache.to(DEVICE, DTYPE)))
        self.slots, self.table = slots.to(DEVICE), pages.to(DEVICE, torch.int32)
        self.q = torch.randn(layers, queries + spare, heads, dim, device=DEVICE, dtype=DTYPE)
        self.q[:, queries:] = torch.nan

    def run(self):
        tail_attention = TailAttentionKernel.of(self.config, self.kv, PAGE)
        return tail_attention.weights(self.q, self.table, self.first, self.queries)

    def reference(self):
        tokens, group = self.first + self.queries, self.config.num_heads // self.config.num_kv_heads
        entry = torch.arange(tokens, device=DEVICE)
        own = entry[self.first :, None]
        total = torch.zeros(tokens, dtype=torch.float64, device=DEVICE)
        for layer in range(self.q.shape[0]):
            keys = self.kv[layer][0][self.slots].double().repeat_interleave(group, 1)
            score = torch.einsum("qhd,ehd->hqe", self.q[layer, : self.queries].double(), keys) * self.config.scale
            unseen = (entry > own) | (entry <= own - (self.config.windows[layer] or tokens))
            total += score.masked_fill(unseen, -torch.inf).softmax(-1).mean((0, 1))
        return total / self.q.shape[0]

    def check(self):
        got, want = self.run(), self.reference()
        assert got.shape == want.shape and got.dtype == torch.float32 and got.isfinite().all()
        assert (got.double() - want).abs().max() / want.max() < 1e-5
        assert got.sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("first", "queries"), [(0, 1), (0, 40), (5, 1), (250, 64), (BLOCK_KEYS - 1, 1), (BLOCK_KEYS, 9)]
)
def test_places_of_the_queries(first, queries):
    Case(first, queries).check()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(12, 2, 128), (14, 2, 64), (9, 3, 64), (4, 4, 24), (5, 1, 16), (2, 1, 256)]
)
def test_head_shapes(heads, kv_heads, dim):
    Case(150, 12, heads, kv_heads, dim).check()


@pytest.mark.parametrize("window", [1, 7, 30, 140, 5000])
def test_windows_of_some_layers(window):
    Case(300, 20, heads=3, kv_heads=1, layers=3, windows=(window, (True, False, True))).check()


def test_rows_without_a_query_are_left_out():
    Case(100, 11, spare=5).check()


def test_the_same_input_gives_the_same_bits():
    case = Case(140, 5, heads=2)
    assert torch.equal(case.run(), case.run())


def test_more_blocks_than_splits(monkeypatch):
    monkeypatch.setattr(module, "TARGET_PROGRAMS", 1024)
    Case(BLOCK_KEYS * (MAX_SPLITS + 2), 3, heads=2, kv_heads=1, layers=1, dim=16).check()


def test_very_unequal_scores_stay_finite():
    case = Case(200, 16)
    case.q *= 40
    case.check()


class TinyRunner(Runner):
    """A model with a window in every other layer, which has read a prompt up to its tail."""

    def __init__(self, tokens, tail, **about):
        SHAPES["tail"] = replace(
            SHAPES["tiny"], num_layers=4, sliding_window=60, window_layers=(True, False, True, False), **about
        )
        kind = "bf16" if DEVICE.type == "cuda" else "float32"
        decoder, _ = build_decoder(RandomCheckpoint("tail", DEVICE), DEVICE, kind, 512, quiet=True)
        pool = PagePool(decoder.config, 64, PAGE, decoder.dtype, DEVICE)
        super().__init__(decoder, pool, 512)
        ids = np.random.default_rng(0).integers(0, 512, tokens).tolist()
        pages = array("i", pool.allocate(60)[1::2][::-1])
        self.forward([Span(ids[:-tail], 0, pages, ())])
        self.span = Span(ids[-tail:], tokens - tail, pages, ())

    def eager(self):
        """Queries and K/V as a forward leaves them, and the weights by `TailAttention`."""
        span, last, queries = self.span, self.decoder.config.num_layers - 1, []
        tail_attention = TailAttention(self, span.pages, span.first, span.first + len(span.ids))

        def watch(layer, x, q, a):
            if q is not None and layer < last:
                tail_attention.add(layer, q.float(), span.first)
                queries.append(q.clone())

        self.forward([span], watch=watch)
        return torch.stack(queries), [cache.clone() for layer in self.kv for cache in layer], tail_attention.reduce()

    def forget_tail(self):
        slots = self.span.slots(PAGE)
        for layer in self.kv:
            for cache in layer:
                cache[slots] = torch.nan


if DEVICE.type == "cpu":

    @pytest.mark.parametrize("tail", [1, 23])
    def test_a_pass_gives_the_queries_and_leaves_the_kv(tail):
        runner = TinyRunner(333, tail)
        queries, kv, weights = runner.eager()
        runner.forget_tail()
        batch = runner.batch([runner.span]).to(DEVICE)
        runner.decoder.attention.plan(batch)
        with torch.inference_mode():
            got = queries_of(runner.decoder, batch, runner.kv)
        assert torch.equal(got, queries)
        written = [cache for layer in runner.kv for cache in layer]
        assert all(torch.equal(a, b) for a, b in zip(written, kv, strict=True))
        tail_attention = TailAttentionKernel.of(runner.decoder.config, runner.kv, PAGE)
        table = torch.tensor(runner.span.pages, dtype=torch.int32)
        assert tail_attention.weights(got, table, runner.span.first, tail).numpy() == pytest.approx(weights, abs=1e-6)
        assert runner.tail_attention(runner.span) is None  # nothing is captured here


if DEVICE.type == "cuda":  # graphs are captured there only

    @pytest.mark.parametrize("tail", [1, 23, 64])
    def test_a_graph_leaves_the_same_weights_and_kv(tail):
        runner = TinyRunner(333, tail, num_heads=12, head_dim=64)
        _, kv, weights = runner.eager()
        slots = runner.span.slots(PAGE)
        for _ in range(2):  # captured, then replayed
            runner.forget_tail()
            got = runner.tail_attention(runner.span)
            assert got is not None and np.abs(got - weights).max() < 0.01 * weights.max()
            for cache, want in zip((cache for layer in runner.kv for cache in layer), kv, strict=True):
                assert (cache[slots].float() - want[slots].float()).norm() < 0.02 * want[slots].float().norm()

    def test_what_the_graph_does_not_fit_is_refused():
        runner = TinyRunner(333, 65)
        assert runner.tail_attention(runner.span) is None
