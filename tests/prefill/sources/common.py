"""What the tests of mapped sources share: a target, a draft that is the same model, and maps that are exactly right.

K and V of a layer are linear in its input divided by its root mean square. So maps exist that give the target's own K/V
from a draft with the same weights, and whatever a source gets wrong (a position, a slot, a bias, a chunk's edge) shows.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.params import Prefill
from forerun.prefill.maps import Maps
from forerun.prefill.profile import Profile
from forerun.prefill.sources import KVSource
from forerun.prefill.state import PrefillState

CPU = torch.device("cpu")
PAGE = 8
IDS = np.random.default_rng(8).integers(3, 400, 61).tolist()
TAIL = 10
END = len(IDS) - TAIL
PAGES = array("i", [9, 4, 5, 11, 2, 3, 8, 1])  # neither in order nor side by side
EMPTY = 7.0  # what lies where nothing was written


def make_draft_context(folder: Path, weights: str = "float32", draft: Path | None = None, same_tokens: bool = True):
    """A target with itself, or another model, as its draft."""
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, weights, 256, quiet=True)
    second, _ = build_decoder(open_checkpoint(draft or folder), CPU, weights, 256, quiet=True)
    pool = PagePool(decoder.config, 16, PAGE, decoder.dtype, CPU)
    drafter = DraftModel(second, None, same_tokens, "little")
    ctx = DraftContext.build(pool, Runner(decoder, pool, 256), None, 256, drafter)
    clear(pool)
    return ctx


def clear(pool: PagePool) -> None:
    for kv in (pool.kv, *(draft_kv.kv for draft_kv in pool.draft_kvs)):
        for cache in (cache for layer in kv for cache in layer):
            cache.fill_(EMPTY)
    for draft_kv in pool.draft_kvs:
        draft_kv.filled[:] = draft_kv.lower[:] = 0
        draft_kv.drop_partial(1)


def linear_kv(checkpoint: Checkpoint, i: int) -> tuple[Tensor, Tensor]:
    """Layer i's K (before rotation), then V, as a matrix [2 * kv_size, hidden] and a bias on unit inputs."""
    c = checkpoint.config
    assert not c.qk_norm
    weight = torch.cat([checkpoint.tensor(f"layers.{i}.{part}").float() for part in "kv"])
    bias = torch.zeros(2 * c.kv_size)
    if c.qkv_bias:
        bias = torch.cat([checkpoint.tensor(f"layers.{i}.{part}_bias").float() for part in "kv"])
    return weight * checkpoint.tensor(f"layers.{i}.attn_norm").float(), bias


def make_maps(folder: Path, base: int, taps: tuple[int, ...], seed: int = 0) -> Maps:
    """Exact for layers whose input is among the taps, random for the others."""
    checkpoint, draw = open_checkpoint(folder), torch.Generator().manual_seed(seed)
    c = checkpoint.config
    size, wide = c.hidden_size, len(taps) * c.hidden_size
    up, bias = [], []
    for i in range(base, c.num_layers):
        block = torch.zeros(2 * c.kv_size, wide)
        if i in taps:
            at = taps.index(i) * size
            block[:, at : at + size], shift = linear_kv(checkpoint, i)
        else:
            block, shift = torch.randn(block.shape, generator=draw) / 8, torch.randn(len(block), generator=draw)
        up.append(block)
        bias.append(shift)
    return Maps(
        taps, base, torch.eye(wide), torch.zeros(wide), torch.zeros(4, wide), torch.zeros(wide, 4),
        torch.cat(up), torch.cat(bias),
    )  # fmt: skip


def make_profile(kind: str, maps: Maps, source_cost: float = 0.25) -> Profile:
    return Profile(kind, "t", "s", {"target": "t", "source": "s"}, maps, source_cost, 0.1)


def make_state(first: int = 0, known: int = 0, layers: int = 4, chooser: str = "tail") -> PrefillState:
    state = PrefillState(1, IDS, PAGES, first, END, Prefill("speculative"), layers, known=known)
    state.report.chooser = chooser
    return state


def read_all(source: KVSource, state: PrefillState, chunk: int) -> None:
    state.source = source
    source.open(state)
    while state.read < state.read_end:
        source.read(state, chunk)


def stored(runner: Runner, first: int = 0, end: int = len(IDS)) -> list[tuple[Tensor, Tensor]]:
    slots = [PAGES[e // PAGE] * PAGE + e % PAGE for e in range(first, end)]
    return [(k[slots].clone(), v[slots].clone()) for k, v in runner.kv]


def exact_kv(ctx: DraftContext, end: int = len(IDS)) -> list[tuple[Tensor, Tensor]]:
    """The target's own K/V of the whole prompt; the pool is as empty afterwards as it was before."""
    ctx.runner.forward([Span(IDS, 0, PAGES, ())])
    found = stored(ctx.runner, 0, end)
    clear(ctx.pool)
    return found


def put_prefix(ctx: DraftContext, first: int) -> None:
    """Exact K/V of the first entries, as the prefix tree has them."""
    if first:
        ctx.runner.forward([Span(IDS[:first], 0, PAGES, ())])


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
