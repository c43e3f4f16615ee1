"""The plain network of calibration against transformers and against the engine's own decoder."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.rope import RopeTable, rotate
from forerun.prefill.calibration.dense import DenseModel
from tests import tiny

CPU = torch.device("cpu")
IDS = torch.randint(3, 400, (3, 40), generator=torch.Generator().manual_seed(3))


def dense(folder: Path) -> DenseModel:
    return DenseModel.from_checkpoint(open_checkpoint(folder), CPU, torch.float32, quiet=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_and_hidden_states_equal_transformers(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(family)
    model = dense(folder)
    trace = model.trace(IDS)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = oracle(IDS, output_hidden_states=True)
    assert relative(model.logits(trace.hidden[-1]), wanted.logits) < 1e-4
    for i, state in enumerate(wanted.hidden_states[:-1]):  # the last one is after the final norm there
        assert relative(trace.hidden[i], state) < 1e-4, i


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keys_and_values_are_those_of_the_engine(family: str, tiny_folder: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(tiny_folder(family))
    decoder, _ = build_decoder(checkpoint, CPU, "float32", 256, quiet=True)
    runner = Runner(decoder, PagePool(decoder.config, 16, 8, decoder.dtype, CPU), 256)
    ids = IDS[0].tolist()
    runner.forward([Span(ids, 0, array("i", range(5)), logits_indices=())])
    trace = dense(tiny_folder(family)).trace(IDS[:1])
    config = decoder.config
    for i, (k, v) in enumerate(trace.kv):
        stored_k, stored_v = (cache[: len(ids)] for cache in runner.kv[i])  # [T, Hkv, D], K rotated
        table = RopeTable(config.layer_ropes[i], config.head_dim, 256, CPU)
        heads = k[0].unflatten(-1, (-1, config.head_dim))
        assert relative(rotate(heads, *table.at(torch.arange(len(ids)))), stored_k) < 1e-4
        assert relative(v[0].unflatten(-1, (-1, config.head_dim)), stored_v) < 1e-4


def test_fewer_layers_are_the_first_ones(tiny_folder: Callable[[str], Path]) -> None:
    model = dense(tiny_folder("qwen2"))
    whole, some = model.trace(IDS), model.trace(IDS, layers=2, keep_kv=False)
    assert len(some.hidden) == 3 and not some.kv and len(whole.kv) == 4
    assert all(torch.equal(a, b) for a, b in zip(some.hidden, whole.hidden, strict=False))


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # without and with a sliding window
def test_some_rows_alone_are_the_same_rows(family: str, tiny_folder: Callable[[str], Path]) -> None:
    model = dense(tiny_folder(family))
    positions = torch.arange(40)
    q, k, v = model.project(model.embed_tokens(IDS), 0)
    q, k = model.rotate(q, positions, 0), model.rotate(k, positions, 0)
    whole = model.causal_attention(q, k, v, 0)
    rows = torch.tensor([[3, 9, 39], [0, 20, 21], [5, 6, 7]])
    at = rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    some = model.masked_attention(q.gather(2, at), k, v, rows, 0)
    wanted = whole.gather(1, rows[..., None].expand(-1, -1, whole.shape[2]))
    torch.testing.assert_close(some, wanted, atol=1e-5, rtol=1e-5)
