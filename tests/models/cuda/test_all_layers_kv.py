from types import SimpleNamespace

import pytest
import torch

from forerun.models.config import RopeConfig
from forerun.models.cuda import all_layers_kv
from forerun.models.cuda.all_layers_kv import CudaAllLayersKV, DeferredRowPicker, addresses_of, gather
from forerun.models.decoder import AllLayersKV, RowPicker
from forerun.models.rope import RopeTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 60
NEAR, FAR = RopeConfig(theta=100.0), RopeConfig(theta=5000.0, kind="yarn", factor=4.0, original_context=64)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make(way, layers, heads, dim, dtype):
    """Planes whose third layers are turned by other angles, on caches of noise that differ in nothing but the way."""
    config = SimpleNamespace(
        layer_ropes=[FAR if i % 3 == 2 else NEAR for i in range(layers)],
        hidden_size=40,
        num_heads=2 * heads,
        head_dim=dim,
    )
    ropes = {rope: RopeTable(rope, dim, 64, DEVICE) for rope in (NEAR, FAR)}
    seeded = torch.Generator().manual_seed(1)
    caches = [torch.randn(SLOTS, heads, dim, generator=seeded).to(DEVICE, dtype) for _ in range(2 * layers)]
    kv = list(zip(caches[::2], caches[1::2], strict=True))
    return way(SimpleNamespace(config=config, attention=SimpleNamespace(ropes=ropes)), kv), kv


def runs(base, layers):
    return [range(i, i + 1) for i in range(base, layers)]


@pytest.mark.parametrize(
    ("layers", "base", "heads", "dim"), [(4, 1, 2, 32), (3, 0, 3, 64), (3, 2, 1, 24), (5, 2, 8, 16)]
)
@pytest.mark.parametrize(("given", "kept"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("tokens", [1, 37])
def test_written_as_torch_does(layers, base, heads, dim, given, kept, tokens):
    mapped = draw(tokens, layers - base, 2, heads, dim, dtype=getattr(torch, given))
    slots = torch.randperm(SLOTS, device=DEVICE)[:tokens]
    (kernel, found), (torchs, wanted) = (
        make(way, layers, heads, dim, getattr(torch, kept)) for way in (CudaAllLayersKV, AllLayersKV)
    )
    for each in (kernel, torchs):
        each.write(mapped, 5, slots, runs(base, layers))
    near = {"float32": 1e-5, "bfloat16": 2**-7}[kept]  # the interpreter cuts off what bfloat16 cannot hold
    others = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE).index_fill_(0, slots, False)
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        for mine, plain in zip(got, want, strict=True):
            assert torch.allclose(mine.float(), plain.float(), rtol=near, atol=1e-5), f"layer {i}"
            assert torch.equal(mine[others], plain[others]), "nothing else is written"
        if given == kept:
            assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layers", "base", "heads", "dim"), [(4, 1, 2, 32), (3, 0, 3, 64), (5, 2, 1, 24)])
@pytest.mark.parametrize("tokens", [1, 29])
def test_moved_as_torch_does(layers, base, heads, dim, kept, tokens):
    places = torch.randperm(SLOTS, device=DEVICE)[: 2 * tokens].view(2, tokens)
    places = torch.cat((places, torch.randint(0, 64, (2, tokens), device=DEVICE)))
    (kernel, found), (torchs, wanted), (_, before) = (
        make(way, layers, heads, dim, getattr(torch, kept)) for way in (CudaAllLayersKV, AllLayersKV, AllLayersKV)
    )
    for each in (kernel, torchs):
        each.move(base, places)
    near = {"float32": 1e-5, "bfloat16": 2**-7}[kept]  # the interpreter cuts off what bfloat16 cannot hold
    others = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE).index_fill_(0, places[1], False)
    for i, (got, want, was) in enumerate(zip(found, wanted, before, strict=True)):
        assert torch.allclose(got[0].float(), want[0].float(), rtol=near, atol=near), f"layer {i}"
        assert torch.equal(got[1], want[1])
        assert all(torch.equal(mine[others], old[others]) for mine, old in zip(got, was, strict=True))
        assert (i >= base) != torch.equal(got[0], was[0]), "layers below are left alone"


def test_rows_of_what_is_mapped_may_lie_apart():
    wide = draw(9, 2 * 2 * 2 * 16 + 32)
    slots = torch.arange(9, device=DEVICE) * 3
    (mine, found), (plain, wanted) = (make(way, 2, 2, 16, torch.float32) for way in (CudaAllLayersKV, AllLayersKV))
    for each in (mine, plain):
        each.write(wide[:, :128].view(9, 2, 2, 2, 16), 0, slots, runs(0, 2))
        each.write(wide[:, :128].view(9, 2, 2, 2, 16).flip(3), 0, slots + 1, runs(0, 2))
    assert all(
        torch.allclose(a, b, atol=1e-5) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(2, 32, torch.bfloat16), (3, 24, torch.float32), (1, 16, torch.bfloat16)]
)
@pytest.mark.parametrize("count", [0, 1, 50])
def test_read_as_torch_does(heads, dim, dtype, count):
    slots = torch.randint(0, SLOTS, (count,), device=DEVICE)
    (mine, _), (plain, _) = (make(way, 4, heads, dim, dtype) for way in (CudaAllLayersKV, AllLayersKV))
    for base in (0, 1, 3):
        got = mine.read(base, slots)
        assert got.shape == (2, 4 - base, count, heads, dim)
        assert torch.equal(got, plain.read(base, slots))


@pytest.mark.parametrize("held", [0, 2000, 1 << 20])
def test_rows_are_picked_from_all(monkeypatch, held):
    monkeypatch.setattr(all_layers_kv, "MAX_HELD_BYTES", held)
    rows = torch.tensor([6, 0, 3], device=DEVICE)
    shown = [draw(7, 5, 20) for _ in range(6)]
    late, plain = DeferredRowPicker(rows), RowPicker(rows)
    for x in shown:
        late.add(x)
        plain.add(x)
    assert torch.equal(late.picked(), torch.stack([x[rows] for x in shown]))
    assert torch.equal(late.picked(), plain.picked())


def test_rows_that_have_no_address_are_copied():
    late, wide = DeferredRowPicker(torch.tensor([3, 1], device=DEVICE)), draw(4, 9)
    late.add(wide[:, 1:])
    late.add(wide.flatten()[1:33].view(4, 8))
    assert torch.equal(late.picked(), torch.stack([wide[:, 1:][[3, 1]], wide.flatten()[1:33].view(4, 8)[[3, 1]]]))


def test_preparing_writes_nothing():
    (mine, found), (_, before) = (make(way, 3, 2, 16, torch.bfloat16) for way in (CudaAllLayersKV, AllLayersKV))
    mine.prepare()
    assert all(torch.equal(a, b) for x, y in zip(found, before, strict=True) for a, b in zip(x, y, strict=True))


def test_what_was_picked_does_not_change_later():
    late, x = DeferredRowPicker(torch.tensor([1], device=DEVICE)), draw(2, 8)
    late.add(x)
    late.flush()
    kept = x[1].clone()
    x.zero_()
    assert torch.equal(late.picked(), kept[None, None])


def test_refusals():
    with pytest.raises(ValueError, match="contiguous"):
        addresses_of([draw(8, 8).T], DEVICE)
    with pytest.raises(ValueError, match="multiples of 16"):
        addresses_of([draw(9)[1:]], DEVICE)
    with pytest.raises(ValueError, match="2 layers from 1"):
        make(CudaAllLayersKV, 4, 1, 16, torch.float32)[0].write(
            draw(1, 2, 2, 1, 16), 0, torch.zeros(1).long(), runs(1, 4)
        )
    assert gather(addresses_of([draw(4, 3)], DEVICE)[None], 0, draw(4, 3), torch.zeros(0).long()).shape == (1, 1, 0, 3)
