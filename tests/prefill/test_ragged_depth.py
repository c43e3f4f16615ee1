"""The ragged pass against a reference that goes through layers, tokens and heads one after the other."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu

from forerun.cache.pool import PagePool
from forerun.core import TokenBatch
from forerun.models.attention import SdpaAttention
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.rope import inverse_frequencies
from forerun.prefill.recompute import RaggedDepthPass, Rows
from forerun.prefill.state import depth_runs
from tests.tiny import FAMILIES

CPU = torch.device("cpu")
IDS = np.random.default_rng(5).integers(3, 400, 40)
PAGES = array("i", [9, 4, 5, 11, 2])  # neither in order nor side by side
PAGE = 8
SLOTS = np.array([PAGES[e // PAGE] * PAGE + e % PAGE for e in range(len(IDS))])


@dataclass
class Slow:
    """One sequence through a model, obviously: K/V is a list per layer and entry, made of the checkpoint's tensors."""

    checkpoint: Checkpoint
    kv: list[tuple[Tensor, Tensor]]  # per layer [entries, Hkv, D], as it was before

    def weight(self, i: int, name: str) -> Tensor:
        return self.checkpoint.tensor(f"layers.{i}.{name}").float()

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.checkpoint.config.norm_eps).sqrt() * weight

    def turn(self, heads: Tensor, i: int, position: int) -> Tensor:
        c = self.checkpoint.config
        inverse, factor = inverse_frequencies(c.layer_ropes[i], c.head_dim)
        turned = torch.empty_like(heads)
        for head, out in zip(heads, turned, strict=True):
            for j, frequency in enumerate(inverse.tolist()):
                a, b, angle = float(head[j]), float(head[j + c.head_dim // 2]), position * frequency
                out[j] = (a * math.cos(angle) - b * math.sin(angle)) * factor
                out[j + c.head_dim // 2] = (b * math.cos(angle) + a * math.sin(angle)) * factor
        return turned

    def heads(self, x: Tensor, i: int, name: str, position: int) -> Tensor:
        c = self.checkpoint.config
        y = self.weight(i, name) @ self.norm(x, self.weight(i, "attn_norm"))
        y = (y + self.weight(i, f"{name}_bias") if c.qkv_bias else y).view(-1, c.head_dim)
        if c.qk_norm and name != "v":
            y = self.norm(y, self.weight(i, f"{name}_norm"))
        return y if name == "v" else self.turn(y, i, position)

    def attend(self, x: Tensor, i: int, entry: int, position: int) -> Tensor:
        c, (keys, values) = self.checkpoint.config, self.kv[i]
        window, out = c.windows[i], []
        first = 0 if window is None else max(0, entry + 1 - window)
        for h, q in enumerate(self.heads(x, i, "q", position)):
            kv_head = h // (c.num_heads // c.num_kv_heads)
            weights = torch.softmax(keys[first : entry + 1, kv_head] @ q * c.scale, 0)
            out.append(weights @ values[first : entry + 1, kv_head])
        y = self.weight(i, "o") @ torch.cat(out)
        x = x + (self.norm(y, self.weight(i, "post_attn_norm")) if c.post_norms else y)
        normed = self.norm(x, self.weight(i, "mlp_norm"))
        gate = self.weight(i, "gate") @ normed
        gate = gate * torch.sigmoid(gate) if c.activation == "silu" else gelu(gate, approximate="tanh")
        y = self.weight(i, "down") @ (gate * (self.weight(i, "up") @ normed))
        return x + (self.norm(y, self.weight(i, "post_mlp_norm")) if c.post_norms else y)

    def run(self, rows: Rows) -> list[list[Tensor]]:
        """Hidden states of every row: its inputs of layers 0, 1, ..., as far as its depth takes it."""
        c = self.checkpoint.config
        embedded = self.checkpoint.rows("embed", torch.from_numpy(rows.ids)).float() * c.embed_scale
        states = [[x] for x in embedded]
        assert rows.positions is not None
        at = list(zip(rows.entries.tolist(), rows.positions.tolist(), rows.depths.tolist(), strict=True))
        for i in range(c.num_layers):
            for (entry, position, depth), state in zip(at, states, strict=True):
                if depth > i:
                    self.kv[i][0][entry] = self.heads(state[i], i, "k", position)
                    self.kv[i][1][entry] = self.heads(state[i], i, "v", position)
            for (entry, position, depth), state in zip(at, states, strict=True):
                if depth > i:
                    state.append(self.attend(state[i], i, entry, position))
        return states

    def logits(self, x: Tensor) -> Tensor:
        head = "embed" if self.checkpoint.config.tie_embeddings else "head"
        ids = torch.arange(self.checkpoint.config.vocab_size)
        return self.checkpoint.rows(head, ids).float() @ self.norm(x, self.checkpoint.tensor("final_norm").float())


def make_runner(folder: Path, weights: str = "float32", seed: int = 0) -> Runner:
    """A runner whose K/V is random numbers everywhere."""
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, weights, 256, quiet=True)
    runner = Runner(decoder, PagePool(decoder.config, 16, PAGE, decoder.dtype, CPU), 256)
    draw = torch.Generator().manual_seed(seed)
    for cache in (cache for layer in runner.kv for cache in layer):
        cache.copy_(torch.randn(cache.shape, generator=draw))
    return runner


def copy_kv(runner: Runner) -> list[tuple[Tensor, Tensor]]:
    return [(k[SLOTS].clone(), v[SLOTS].clone()) for k, v in runner.kv]


@pytest.fixture(scope="module")
def models(tiny_folder: Callable[[str], Path]) -> Callable[[str, str], Runner]:
    made: dict[tuple[str, str], Runner] = {}

    def get(family: str, weights: str = "float32") -> Runner:
        if (family, weights) not in made:
            made[family, weights] = make_runner(tiny_folder(family), weights)
        return made[family, weights]

    return get


# -- depths -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=50))
def test_runs_are_the_depths(depths: list[int]):
    runs = depth_runs(np.array(depths, dtype=np.int16))
    assert [d for d, count in runs for _ in range(count)] == depths
    assert all(a[0] != b[0] for a, b in zip(runs, runs[1:], strict=False))


# -- the pass ----------------------------------------------------------------------------------------------------------


def random_rows(seed: int, layers: int) -> Rows:
    """Some tokens of the sequence, in levels, at least one of them wanted."""
    rng = np.random.default_rng(seed)
    entries = np.flatnonzero(rng.random(len(IDS)) < rng.choice([0.2, 0.6, 1.0]))
    entries = entries if len(entries) else np.array([7])
    depths = rng.choice(rng.integers(0, layers + 1, 3), len(entries))
    want = sorted(rng.choice(len(entries), min(2, len(entries)), replace=False).tolist())
    depths[want] = layers
    positions = entries + int(rng.choice([0, 0, 21]))
    return Rows(IDS[entries], entries, PAGES, depths, want, positions=positions)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_depths_give_what_the_slow_way_gives(family: str, models: Callable[..., Runner], tiny_folder, seed: int):
    runner = models(family)
    slow = Slow(open_checkpoint(tiny_folder(family)), copy_kv(runner))
    before, layers = copy_kv(runner), runner.decoder.config.num_layers
    rows = random_rows(seed, layers)
    logits = RaggedDepthPass(runner).run(rows).logits
    states = slow.run(rows)
    expected = torch.stack([slow.logits(states[r][layers]) for r in rows.logits_indices])
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    for i, (was, now, true) in enumerate(zip(before, copy_kv(runner), slow.kv, strict=True)):
        deep = rows.entries[rows.depths > i]
        rest = np.setdiff1d(np.arange(len(IDS)), deep)
        for a, b, c in zip(was, now, true, strict=True):
            assert torch.allclose(b[deep], c[deep], rtol=1e-3, atol=1e-3), f"layer {i}"
            assert torch.equal(b[rest], a[rest]), f"layer {i}: K/V above a token's depth was touched"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_full_depth_is_the_runners_forward(family: str, weights: str, models: Callable[..., Runner]):
    """The same batch in all but the last layer: the same bits, logits and K/V."""
    runner, n = models(family, weights), len(IDS)
    exact = runner.forward([Span(IDS.tolist(), 0, PAGES, range(n))]).logits.clone()
    kv = copy_kv(runner)
    for cache in (cache for layer in runner.kv for cache in layer):
        cache[SLOTS] = 7.0
    layers = runner.decoder.config.num_layers
    full = RaggedDepthPass(runner).run(Rows(IDS, np.arange(n), PAGES, np.full(n, layers), range(n)))
    assert torch.equal(full.logits, exact)
    assert full.token_layers == n * layers
    last = RaggedDepthPass(runner).run(Rows(IDS, np.arange(n), PAGES, np.full(n, layers), (n - 1,)))
    if weights == "int8":  # a token's result does not depend on its batch, and eight bits hide what float32 shows
        assert torch.equal(last.logits, exact[-1:])
    assert torch.allclose(last.logits, exact[-1:], rtol=1e-4, atol=1e-4)
    assert last.token_layers == n * (layers - 1) + 1
    for mine, theirs in zip(copy_kv(runner), kv, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_kept_inputs_continue_where_they_were_kept(weights: str, models: Callable[..., Runner]):
    """Lower layers in one pass, upper ones of some tokens in another: what one pass gives."""
    runner, n, base = models("gemma3", weights), len(IDS), 3
    layers = runner.decoder.config.num_layers
    depths = np.where(np.arange(n) % 3 == 0, layers, base)
    depths[-1] = layers
    once = RaggedDepthPass(runner).run(Rows(IDS, np.arange(n), PAGES, depths, (n - 1,))).logits
    kv = copy_kv(runner)
    ragged_pass = RaggedDepthPass(runner)
    low = ragged_pass.run(Rows(IDS, np.arange(n), PAGES, np.full(n, base)), keep=base)
    assert low.x is not None and low.kept.tolist() == list(range(n)) and low.logits.shape[0] == 0
    deep = np.flatnonzero(depths == layers)
    rows = Rows(IDS[deep], deep, PAGES, depths[deep], (len(deep) - 1,), low.x[deep], base)
    assert torch.allclose(ragged_pass.run(rows).logits, once, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(copy_kv(runner), kv, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_kept_inputs_are_the_layers_inputs(models: Callable[..., Runner]):
    runner, layers = models("llama"), 4
    depths = np.array([0, 4, 2, 1, 3, 2, 4, 1])
    seen: dict[int, tuple[Tensor, np.ndarray]] = {}
    for keep in range(layers + 1):
        rows = Rows(IDS[:8], np.arange(8), PAGES, depths)
        got: dict[int, Tensor] = {}

        def watch(layer: int, x: Tensor, *_, got: dict[int, Tensor] = got) -> None:
            got[layer] = x

        recomputed = RaggedDepthPass(runner).run(rows, watch, keep)
        assert recomputed.kept.tolist() == np.flatnonzero(depths >= keep).tolist()
        for layer, x in got.items():
            if layer < layers:
                assert len(x) == rows.whole(layer, layers, keep).sum()
        assert recomputed.x is not None
        seen[keep] = recomputed.x, recomputed.kept
    for keep in range(layers):
        after, kept = seen[keep + 1]
        x, before = seen[keep]
        rows = Rows(IDS[kept], kept, PAGES, depths[kept], x=x[np.isin(before, kept)] if keep else None, first=keep)
        again = RaggedDepthPass(runner).run(rows, keep=keep + 1).x
        assert again is not None and torch.allclose(again, after, atol=1e-5)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_long_prompt_in_pieces_is_the_whole(weights: str, models: Callable[..., Runner]):
    """More rows than attention takes at once, and levels in each piece: no row sees less than it should."""
    runner = models("qwen3", weights)
    pool = PagePool(runner.decoder.config, 60, PAGE, runner.decoder.dtype, CPU)
    long = Runner(runner.decoder, pool, 256)
    n, layers = 250, runner.decoder.config.num_layers
    ids = np.random.default_rng(1).integers(3, 400, n)
    pages = array("i", np.random.default_rng(2).permutation(60)[: pool.pages_for(n)].tolist())
    exact = long.forward([Span(ids.tolist(), 0, pages, (n - 1,))]).logits.clone()
    kv = [(k.clone(), v.clone()) for k, v in long.kv]
    rest = np.sort(np.random.default_rng(3).permutation(n - 1)[:150])  # keep the K/V they have
    for lo, hi in ((0, 170), (170, n)):
        entries = np.arange(lo, hi)
        depths = np.where(np.isin(entries, rest), 1, layers)
        logits = (
            RaggedDepthPass(long)
            .run(Rows(ids[entries], entries, pages, depths, (hi - lo - 1,) if hi == n else ()))
            .logits
        )
    assert torch.allclose(logits, exact, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(long.kv, kv, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(mine, theirs, strict=True))


def test_attention_is_planned_once_a_level(models: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch):
    runner, n = models("gemma3"), len(IDS)
    layers, plan = runner.decoder.config.num_layers, SdpaAttention.plan
    plans: list[TokenBatch] = []

    def counted(self: SdpaAttention, batch: TokenBatch) -> None:
        plans.append(batch)
        plan(self, batch)

    monkeypatch.setattr(SdpaAttention, "plan", counted)
    RaggedDepthPass(runner).run(Rows(IDS, np.arange(n), PAGES, np.full(n, layers)))
    assert len(plans) == 1  # the last layer, which only writes, is written with the plan of those below
    plans.clear()
    RaggedDepthPass(runner).run(Rows(IDS, np.arange(n), PAGES, np.where(np.arange(n) % 2, 3, layers), (0,)))
    assert len(plans) == 5  # all; those that leave at 3; the rest; the last layer's K/V; the one with logits


def test_rows_refuse_disorder(models: Callable[..., Runner]):
    with pytest.raises(AssertionError):
        Rows(IDS[:2], np.array([3, 3]), PAGES, np.array([1, 1]))
    with pytest.raises(AssertionError, match="full depth"):
        RaggedDepthPass(models("llama")).run(Rows(IDS[:2], np.array([0, 1]), PAGES, np.array([1, 4]), (0,)))
    with pytest.raises(AssertionError, match="beyond"):
        RaggedDepthPass(models("llama")).run(Rows(IDS[:2], np.array([0, 1]), PAGES, np.array([1, 5])))


def test_no_rows_are_no_work(models: Callable[..., Runner]):
    nothing = np.zeros(0, dtype=np.int64)
    recomputed = RaggedDepthPass(models("llama")).run(Rows(nothing, nothing, PAGES, nothing), keep=2)
    assert recomputed.token_layers == 0 and recomputed.x is not None and recomputed.x.shape == (0, 64)
