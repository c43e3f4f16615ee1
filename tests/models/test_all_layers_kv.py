"""K/V of all layers by torch: as a layer's own backend writes it; rows picked while tensors pass by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.decoder import AllLayersKV, RowPicker
from forerun.models.execution.runner import Runner
from forerun.models.formats.checkpoint import open_checkpoint

CPU = torch.device("cpu")
SLOTS = torch.tensor([9, 4, 30, 5, 17])
BASE, FIRST = 2, 11


def make_runner(folder: Path) -> Runner:
    decoder, _ = build_decoder(open_checkpoint(folder), CPU, "float32", 64, quiet=True)
    return Runner(decoder, PagePool(decoder.config, 8, 8, decoder.dtype, CPU), 64)


def test_written_and_read_as_layer_by_layer(tiny_folder: Callable[[str], Path]):
    """Gemma turns the K of its two kinds of layer by different angles."""
    mine, other = (make_runner(tiny_folder("gemma3")) for _ in range(2))
    c, attention = mine.decoder.config, other.decoder.attention
    draw = torch.Generator().manual_seed(2)
    mapped = torch.randn(len(SLOTS), c.num_layers - BASE, 2, c.num_kv_heads, c.head_dim, generator=draw)
    for i in range(BASE, c.num_layers):
        k, v = mapped[:, i - BASE].unbind(1)
        attention.write(k, v, i, other.kv[i], torch.arange(FIRST, FIRST + len(SLOTS)), SLOTS)
    mine.all_layers_kv.write(mapped, FIRST, SLOTS, [range(i, i + 1) for i in range(BASE, c.num_layers)])
    for layer, wanted in zip(mine.kv, other.kv, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, wanted, strict=True))
    some = SLOTS[[3, 0, 0]]
    found = mine.all_layers_kv.read(BASE + 1, some)  # [2, layers, 3, Hkv, D]
    assert found.shape[:3] == (2, c.num_layers - BASE - 1, 3)
    for i, layer in enumerate(other.kv[BASE + 1 :]):
        assert all(torch.equal(found[j, i], cache[some]) for j, cache in enumerate(layer))


def test_a_runner_has_planes_of_its_own_kv(tiny_folder: Callable[[str], Path]):
    runner = make_runner(tiny_folder("llama"))
    assert isinstance(runner.all_layers_kv, AllLayersKV) and runner.all_layers_kv is runner.all_layers_kv
    runner.kv[1][0].fill_(3.0)
    assert runner.all_layers_kv.read(0, SLOTS)[0].mean((1, 2, 3)).tolist() == [0.0, 3.0, 0.0, 0.0]


def test_rows_are_picked_when_they_pass():
    row_picker, x = RowPicker(torch.tensor([2, 0])), torch.arange(12.0).view(3, 4)
    row_picker.add(x)
    row_picker.add(x + 100)
    x.zero_()  # what was shown may be gone by then
    assert row_picker.picked().tolist() == [
        [[8, 9, 10, 11], [0, 1, 2, 3]],
        [[108, 109, 110, 111], [100, 101, 102, 103]],
    ]
