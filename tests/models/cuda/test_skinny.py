import pytest
import torch
import torch.nn.functional as F

from forerun.models.cuda.skinny import MAX_ROWS, Tile, choose_tile, skinny_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies bfloat16 wrongly
DTYPES = [torch.float32, HALF]
LIMIT = {torch.float32: 1e-5, HALF: 1e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def reference(x, w, bias=None, norm_weight=None, eps=1e-6, residual=None, activation=None):
    x, w = x.double(), w.double()
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight.double()
    y = x @ w.T + (0 if bias is None else bias.double())
    if activation is not None:
        gate, up = y.chunk(2, dim=-1)
        y = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("swap", [False, True])
def test_norm_bias_and_residual(dtype, rows, split, swap):
    x, w, bias = draw(rows, 384, dtype=dtype), draw(96, 384, dtype=dtype) / 20, draw(96, dtype=dtype)
    norm_weight, residual = draw(384, dtype=dtype) + 1, draw(rows, 96, dtype=dtype)
    tile = Tile(32, 64, split=split, swap=swap)
    out = torch.full((rows, 96), float("nan"), dtype=dtype, device=DEVICE)
    got = skinny_linear(x, w, bias, norm_weight=norm_weight, eps=1e-5, residual=residual, out=out, tile=tile)
    assert got is out
    assert relative(out, reference(x, w, bias, norm_weight, 1e-5, residual)) < LIMIT[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("split", [1, 2])
def test_gated_activation(activation, split):
    x, w, norm_weight, bias = draw(3, 256), draw(2 * 80, 256) / 8, draw(256), draw(160)
    got = skinny_linear(x, w, bias, norm_weight=norm_weight, activation=activation, tile=Tile(32, 64, split=split))
    assert got.shape == (3, 80)
    assert relative(got, reference(x, w, bias, norm_weight, activation=activation)) < 1e-5


@pytest.mark.parametrize(("n", "k"), [(50, 100), (576, 576), (1, 16), (33, 1000)])
def test_shapes_that_no_block_divides(n, k):
    x, w, norm_weight = draw(2, k), draw(n, k), draw(k)
    assert relative(skinny_linear(x, w), reference(x, w)) < 1e-5
    assert relative(skinny_linear(x, w, norm_weight=norm_weight), reference(x, w, norm_weight=norm_weight)) < 1e-5


@pytest.mark.parametrize("split", [1, 4])
def test_a_row_does_not_depend_on_the_others(split):
    x, w, norm_weight = draw(16, 512), draw(64, 512), draw(512)
    tile = Tile(32, 64, split=split)
    together = skinny_linear(x, w, norm_weight=norm_weight, tile=tile)
    for row in range(0, 16, 5):
        alone = skinny_linear(x[row : row + 1], w, norm_weight=norm_weight, tile=tile)
        assert torch.equal(alone[0], together[row])


def test_counters_are_left_at_zero_for_the_next_call():
    tile = Tile(16, 64, split=4)
    for _ in range(3):
        x, w = draw(4, 256), draw(48, 256)
        assert relative(skinny_linear(x, w, tile=tile), reference(x, w)) < 1e-5


def test_residual_in_place_and_wider_than_the_weights():
    x, w = draw(4, 128, dtype=HALF), draw(64, 128, dtype=HALF)
    stream = draw(4, 64)
    want = reference(x, w, residual=stream)
    assert skinny_linear(x, w, residual=stream).dtype == torch.float32
    skinny_linear(x, w, residual=stream, out=stream)
    assert relative(stream, want) < 1e-2


def test_rows_of_a_wider_tensor():
    wide, w = draw(4, 300), draw(32, 128)
    assert relative(skinny_linear(wide[:, :128], w), reference(wide[:, :128], w)) < 1e-5


def test_refusals_name_the_value():
    with pytest.raises(ValueError, match="65 rows .* at most 64"):
        skinny_linear(draw(MAX_ROWS + 1, 16), draw(16, 16))
    with pytest.raises(ValueError, match="relu"):
        skinny_linear(draw(1, 16), draw(16, 16), activation="relu")
    with pytest.raises(ValueError, match="16 columns"):
        skinny_linear(draw(1, 16), draw(16, 32))


def test_tiles_fill_the_chip():
    for n, k, gated in [(896, 896, False), (9728, 896, True), (896, 4864, False), (5120, 5120, False)]:
        tile = choose_tile(n, k, gated)
        programs = -(-(n // 2 if gated else n) // tile.block_n) * tile.split
        assert programs >= 132 or tile.split == 8 or k // tile.block_k < 2 * (tile.split + 1)
