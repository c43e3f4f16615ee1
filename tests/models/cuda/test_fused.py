import pytest
import torch
import torch.nn.functional as F

from forerun.models.cuda.fused import act_mul, rms_norm, rope_and_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape):
    return torch.randn(*shape, device=DEVICE)


def close(got, want, limit=1e-5):
    return float((got.double() - want.double()).norm() / want.double().norm()) < limit


def norm(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("n", [64, 100, 1536])
def test_rms_norm(n):
    x, weight, residual = draw(5, n), draw(n), draw(5, n)
    assert close(rms_norm(x, weight, 1e-2), norm(x, weight, 1e-2))
    assert close(rms_norm(x, weight, 1e-2, residual), norm(x, weight, 1e-2) + residual)
    assert rms_norm(x[:0], weight, 1e-2).shape == (0, n)


def test_rms_norm_of_rows_apart():
    x, weight = draw(3, 96), draw(64)
    assert close(rms_norm(x[:, :64], weight, 1e-6), norm(x[:, :64], weight, 1e-6))


def test_rms_norm_takes_the_weights_dtype():
    assert rms_norm(draw(2, 64), draw(64).bfloat16(), 1e-6).dtype == torch.bfloat16
    assert rms_norm(draw(2, 64).bfloat16(), draw(64).bfloat16(), 1e-6, draw(2, 64)).dtype == torch.float32


@pytest.mark.parametrize("n", [40, 1024, 1500])
def test_act_mul(n):
    pair = draw(3, 2 * n) * 3
    gate, up = pair.double().chunk(2, dim=-1)
    assert close(act_mul(pair, "silu"), F.silu(gate) * up)
    assert close(act_mul(pair, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
    with pytest.raises(ValueError, match="relu"):
        act_mul(pair, "relu")


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (9, 3, 64), (1, 1, 24), (32, 8, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_store(heads, kv_heads, dim, normed):
    tokens = 5
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim)
    positions = torch.randperm(50, device=DEVICE)[:tokens]
    slots = torch.randperm(40, device=DEVICE)[:tokens]
    slots[2] = -1
    angles = torch.rand(50, dim // 2, device=DEVICE) * 6
    k_cache, v_cache = torch.full((2, 40, kv_heads, dim), float("nan"), device=DEVICE)
    q_norm, k_norm = (draw(dim), draw(dim)) if normed else (None, None)
    q_out = torch.full((tokens, heads, dim), float("nan"), device=DEVICE)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    rope_and_store(qkv, table, positions, slots, k_cache, v_cache, q_out, q_norm, k_norm, 1e-3)

    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = norm(q, q_norm, 1e-3), norm(k, k_norm, 1e-3)

    def turn(x):
        cos, sin = (f.repeat(1, 2)[:, None].double() for f in (angles[positions].cos(), angles[positions].sin()))
        low, high = x.double().chunk(2, dim=-1)
        return x.double() * cos + torch.cat([-high, low], dim=-1) * sin

    kept = slots >= 0
    assert close(q_out, turn(q))
    assert close(k_cache[slots[kept]], turn(k)[kept])
    assert torch.equal(v_cache[slots[kept]], v[kept])
    assert int(k_cache.isnan().all(-1).all(-1).sum()) == 40 - tokens + 1  # nothing else was written
    assert int(v_cache.isnan().all(-1).all(-1).sum()) == 40 - tokens + 1


def test_rope_refusals():
    cache, q = draw(8, 1, 16), draw(1, 2, 16)
    index = torch.zeros(1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="60 columns"):
        rope_and_store(draw(1, 60), draw(4, 16), index, index, cache, cache, q)
    with pytest.raises(ValueError, match="together"):
        rope_and_store(draw(1, 64), draw(4, 16), index, index, cache, cache, q, q_norm=draw(16))
