"""The one decoder against transformers, for every family, and the rules of `TokenBatch` against slow references."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.cache.pool import PagePool
from forerun.core import TokenBatch
from forerun.models.build import build_decoder
from forerun.models.config import FAMILIES
from forerun.models.decoder import Decoder, Taps
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from tests import tiny

CPU = torch.device("cpu")
IDS = torch.randint(3, 400, (48,), generator=torch.Generator().manual_seed(3)).tolist()


def load(folder: Path, weights: str = "float32") -> Decoder:
    return build_decoder(open_checkpoint(folder), CPU, weights, 256)[0]


def make_runner(decoder: Decoder, pages: int = 32) -> Runner:
    return Runner(decoder, PagePool(decoder.config, pages, 8, decoder.dtype, CPU), 256)


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tiny_folder: Callable[[str], Path]):
    folder = tiny_folder(family)
    logits = make_runner(load(folder)).score(IDS, chunk=64)
    assert relative(logits, reference(folder, IDS)) < 1e-4


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_chunks_change_nothing(family: str, tiny_folder: Callable[[str], Path]):
    runner = make_runner(load(tiny_folder(family)))
    whole, parts = runner.score(IDS, chunk=64), runner.score(IDS, chunk=5)
    assert relative(parts, whole) < 1e-5


SCALINGS = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling_equals_transformers(kind: str, tmp_path: Path):
    rope = {"rope_theta": 10_000.0, **SCALINGS[kind]}
    folder = tiny.write_folder(tmp_path, "llama", rope_parameters=rope)
    plain = tiny.write_folder(tmp_path / "plain", "llama")
    logits = make_runner(load(folder)).score(IDS, chunk=64)
    assert relative(logits, reference(folder, IDS)) < 1e-4
    assert relative(logits, make_runner(load(plain)).score(IDS, chunk=64)) > 1e-3  # the rule does something


def test_sequences_of_a_batch_do_not_see_each_other(tiny_folder: Callable[[str], Path]):
    runner = make_runner(load(tiny_folder("qwen3")))
    texts = [IDS[:7], IDS[5:30], IDS[40:41], IDS[10:19]]
    spans = [Span(t, 0, array("i", runner.pool.allocate(runner.pool.pages_for(len(t)))), range(len(t))) for t in texts]
    together = runner.forward(spans).logits
    alone = torch.cat([runner.score(t, chunk=64) for t in texts])
    assert relative(together, alone) < 1e-5


def test_scattered_pages_change_nothing(tiny_folder: Callable[[str], Path]):
    runner = make_runner(load(tiny_folder("llama")))
    pages = array("i", [9, 3, 17, 4, 1, 30])
    scattered = runner.forward([Span(IDS[:40], 0, pages, range(40))]).logits
    again = runner.forward([Span(IDS[40:], 40, pages, range(8))]).logits
    assert relative(torch.cat((scattered, again)), runner.score(IDS, chunk=64)) < 1e-5


def test_a_draft_tree_gives_each_branch_its_own_continuation(tiny_folder: Callable[[str], Path]):
    """Two branches after one prompt, in one forward: each token must see its ancestors and nothing else."""
    runner = make_runner(load(tiny_folder("gemma3")))
    prompt, left, right = IDS[:20], [11, 12], [21, 22]
    pages = array("i", runner.pool.allocate(4))
    runner.forward([Span(prompt, 0, pages, ())])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    batch = runner.batch([Span(left + right, 20, pages, range(4))]).to(CPU)
    batch = TokenBatch(
        tokens=batch.tokens,
        positions=torch.tensor([20, 21, 20, 21]),
        slot_mapping=batch.slot_mapping,
        kv_lens=torch.full((4,), 20, dtype=torch.int32),
        block_tables=batch.block_tables,
        cu_seqlens=batch.cu_seqlens,
        seq_lens=batch.seq_lens,
        page_size=batch.page_size,
        logits_indices=batch.logits_indices,
        tree=tree,
        tree_start=[20],
    )
    logits = runner.decoder.forward(batch, runner.pool.kv).logits
    expected = torch.cat([runner.score(prompt + branch, chunk=64)[20:] for branch in (left, right)])
    assert relative(logits, expected) < 1e-5


def test_recomputing_some_tokens_in_place_changes_nothing(tiny_folder: Callable[[str], Path]):
    """Partial recompute: tokens from the middle, seeing what lies before them, written over themselves."""
    runner = make_runner(load(tiny_folder("mistral")))
    pages = array("i", runner.pool.allocate(6))
    full = runner.forward([Span(IDS, 0, pages, range(len(IDS)))]).logits
    chosen = [4, 5, 19, 33]
    batch = runner.batch([Span(IDS, 0, pages, range(len(IDS)))]).to(CPU)
    some = torch.tensor(chosen)
    part = TokenBatch(
        tokens=batch.tokens[some],
        positions=batch.positions[some],
        slot_mapping=batch.slot_mapping[some],
        kv_lens=batch.kv_lens[some],
        block_tables=batch.block_tables,
        cu_seqlens=[0, len(chosen)],
        seq_lens=[len(IDS)],
        page_size=batch.page_size,
        logits_indices=torch.arange(len(chosen)),
    )
    assert relative(runner.decoder.forward(part, runner.pool.kv).logits, full[chosen]) < 1e-5


def test_hidden_states_and_kv_for_those_who_ask(tiny_folder: Callable[[str], Path]):
    folder = tiny_folder("qwen2")
    runner = make_runner(load(folder))
    pages = array("i", runner.pool.allocate(6))
    last = runner.decoder.config.num_layers
    out = runner.forward([Span(IDS, 0, pages, range(len(IDS)))], Taps(frozenset({0, 2, last}), frozenset({1})))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        truth = model(torch.tensor([IDS]), output_hidden_states=True, use_cache=True)
    for layer in (0, 2):
        assert relative(out.hidden[layer], truth.hidden_states[layer][0]) < 1e-5
    normed = model.model.norm(out.hidden[last])
    assert relative(normed, truth.hidden_states[last][0]) < 1e-4
    k, v = out.kv[1]
    cached = truth.past_key_values.layers[1]
    assert relative(k, cached.keys[0].transpose(0, 1)) < 1e-4
    assert relative(v, cached.values[0].transpose(0, 1)) < 1e-4


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_quantised_weights_stay_close(weights: str, tiny_folder: Callable[[str], Path]):
    folder = tiny_folder("llama")
    exact = make_runner(load(folder)).score(IDS, chunk=64)
    close = make_runner(load(folder, weights)).score(IDS, chunk=64)
    assert 0 < relative(close, exact) < (1e-3 if weights == "fp16" else 0.05)
