"""Matrix products: one contract, several precisions, and none whose result for a token depends on its neighbours.

`linear(x, norm=..., add=...)` is `rms_norm(x) @ W.T + bias + add`, so that a backend may fuse what surrounds the
product. Knows no model and no file. CPU kernels were chosen by measurement (docs/log.md): plain `F.linear` makes two
tokens cost 2.5 times one, which would leave speculation nothing to win; the prepacked ones are nearly flat to eight.

int8 needs a rotated residual stream. A few channels of a decoder's hidden states are tens of times larger than the
rest, and a row's int8 scale must cover them. An orthogonal matrix spreads them over all channels and costs nothing at
run time: RMS norms do not see a rotation once their weights are folded into the matrices behind them, matrices that
read the stream are multiplied by it, matrices that write the stream by its transpose. It is a Kronecker product of two
small ones, because a full one would cost more than loading the model.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = tuple[Tensor | None, float]  # weight of an RMS norm (None: folded into the matrix behind it) and its epsilon


def _kernel(overload: Any) -> Any:
    """The operator below torch's Python dispatch, which costs as much as a small product at each call."""
    return getattr(overload, "_op", overload)


_packed_float32 = _kernel(torch.ops.mkldnn._linear_pointwise.default)
_packed_float32_add = _kernel(torch.ops.mkldnn._linear_pointwise.binary)
_packed_float16 = _kernel(torch.ops.quantized.linear_dynamic_fp16.default)
_packed_int8 = _kernel(torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default)


def few_shapes(x: Tensor) -> Tensor:
    """x [T, in] with rows of zeros below, so that on a CPU some 60 values of T occur and not 512.

    oneDNN keeps what it has prepared for every matrix and number of rows it meets: with any number of rows, a thousand
    different batches would take hundreds of megabytes. The cost of a product grows with T, so steps grow with it too.
    """
    rows = x.shape[0]
    missing = -rows % (1 if rows <= 16 or x.is_cuda else 4 if rows <= 64 else 8 if rows <= 128 else 16)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm[0], norm[1])


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, for the two halves of the last dimension."""
    left, right = gate_up.chunk(2, dim=-1)
    left = F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")
    return left.mul_(right)


class Linear:
    """The contract, and its plain form on `F.linear`: right on any device and in any dtype."""

    packs = False  # whether weights are turned into a form of the kernel's own
    beside: type[Linear] | None = None  # what float matrices that run beside it are held in, where that is another kind

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._pack(weight)

    def _pack(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        rows = few_shapes(x)
        y = F.linear(rows, self.weight, self.bias)
        y = y if rows is x else y[: x.shape[0]]
        return y if add is None else y.add_(add)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        return self._product(x if norm is None else rms_norm(x, norm), add)  # [T, in] -> [T, out]

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        """For a fused gate/up matrix: act(gate) * up, [T, in] -> [T, out / 2]."""
        return gate(self(x, norm=norm), activation)

    def joined(self, parts: list[Tensor], eps: float) -> Tensor:
        """Of parts [T, width] side by side, each row of each divided by its own root mean square: [T, out]."""
        return self(torch.cat([F.rms_norm(part, (part.shape[-1],), None, eps) for part in parts], 1))


class PackedFloat32(Linear):
    """oneDNN's prepacked float32: exact, and eight tokens cost little more than one."""

    packs = True

    def _pack(self, weight: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), None)
        self._numel = weight.numel()

    @property
    def nbytes(self) -> int:
        return self._numel * 4

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        rows = few_shapes(x)
        if add is not None and rows is x:
            return _packed_float32_add(x, add, self.weight, self.bias, "add")
        y = _packed_float32(rows, self.weight, self.bias, "none", [], "")
        y = y if rows is x else y[: x.shape[0]]
        return y if add is None else y.add_(add)


class PackedFloat16(Linear):
    """FBGEMM with fp16 weights and float32 activations: half the bytes, no activation rounding at all."""

    packs = True

    def _pack(self, weight: Tensor) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), self.bias)
        self._numel = weight.numel()

    @property
    def nbytes(self) -> int:
        return self._numel * 2

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        y = _packed_float16(x, self.packed)
        return y if add is None else y.add_(add)


class PackedInt8(Linear):
    """FBGEMM int8 with weights scaled per output channel and activations scaled per row.

    FBGEMM takes one activation scale for the whole tensor. Dividing each row by its own largest value first and passing
    a fixed scale makes the scale per row in effect, so that a token's result depends on the token alone.
    """

    packs = True

    def __init__(self, weight: Tensor | Int8Rows, bias: Tensor | None = None) -> None:
        rows = self.quantise(weight) if isinstance(weight, Tensor) else weight
        self.out_features, self.in_features = rows.levels.shape
        self.bias, self.range = bias, int8_range()
        self.packed = pack_int8(rows)
        self._least: Tensor | None = None  # what keeps the length of a row of zeros from being zero

    @classmethod
    def quantise(cls, weight: Tensor) -> Int8Rows:
        """What the kernel's packed form is made of."""
        return quantise_matrix(weight, int8_range())

    @property
    def nbytes(self) -> int:
        return self.out_features * self.in_features + 4 * self.out_features

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        if norm is None or norm[0] is not None:
            return super().__call__(x, norm=norm, add=add)
        # a norm without weights only scales its row, and rows are scaled by their peak anyway: scale once, at the end
        if self._least is None:
            self._least = torch.tensor((x.shape[-1] * norm[1]) ** 0.5)
        length = torch.linalg.vector_norm(x, 2, -1, keepdim=True)  # [T, 1]
        return self._scaled(x, torch.hypot(length, self._least).div_(x.shape[-1] ** 0.5), add)

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        return self._scaled(x, None, add)

    def _scaled(self, x: Tensor, rms: Tensor | None, add: Tensor | None) -> Tensor:
        """(x / rms) @ W.T + bias + add."""
        peak = x.abs().amax(-1, keepdim=True)  # [T, 1]
        # a row of zeros becomes 0 / 0, which the kernel rounds to some integer, and the zero peak takes back
        y = _packed_int8(x / peak, 1.0 / self.range.levels, self.range.zero, self.packed)
        scale = peak if rms is None else peak.div_(rms)
        if self.bias is not None:
            add = self.bias if add is None else add + self.bias
        return y.mul_(scale) if add is None else torch.addcmul(add, y, scale)


class SpreadInt8(PackedInt8):
    """PackedInt8 for inputs with outliers of their own: mixes each block of channels first, here and in the weights."""

    BLOCK = 16  # larger blocks mix no better and cost more

    def __init__(self, weight: Tensor | Int8Rows, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.mixing = self._mixing(self.in_features)

    @classmethod
    def quantise(cls, weight: Tensor) -> Int8Rows:
        return super().quantise(_mix(weight.float(), cls._mixing(weight.shape[1])))

    @classmethod
    def _mixing(cls, size: int) -> Tensor:
        return hadamard(min(size & -size, cls.BLOCK))

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        return super()._product(_mix(x, self.mixing), add)


def _mix(x: Tensor, mixing: Tensor) -> Tensor:
    return each_row(x.view(x.shape[0], -1, mixing.shape[0]), mixing).view(x.shape)


def each_row(blocks: Tensor, matrix: Tensor) -> Tensor:
    """blocks [T, M, K] @ matrix [K, N] as T products of one shape. `@` makes one product of T * M rows of it, and
    matrix libraries choose kernels, each with its own order of summation, by the number of rows."""
    return torch.bmm(blocks, matrix.expand(blocks.shape[0], -1, -1))


@dataclass(frozen=True)
class Range:
    """What a kernel's sums can hold: activations become zero +- levels, neighbouring weights sum to at most `pair`."""

    levels: int
    zero: int
    pair: int | None
    tops: tuple[int, ...]  # what a row's largest weight may become; the one with the least error is taken


# With VNNI products are summed in 32 bits. Without it the products of two neighbours are summed in 16: activations of
# 0..200 and pairs of at most 163 can never exceed 2**15 - 1, and cost less than giving a whole bit of either side away.
# The last top is half of such a pair: rows whose weights are all of one size are clipped by any larger one (6.3% error
# at 89, 1.7% at 81).
EXACT = Range(levels=127, zero=128, pair=None, tops=(127,))
SATURATING = Range(levels=100, zero=100, pair=163, tops=(127, 116, 106, 97, 89, 81))


def range_for(vnni: bool) -> Range:
    return EXACT if vnni else SATURATING


def int8_range() -> Range:
    """Of this CPU."""
    return range_for(vnni=torch.cpu._is_vnni_supported())


class Int8Rows(NamedTuple):
    """A matrix in int8 with a scale for each row."""

    levels: Tensor  # [N, K] int8
    scales: Tensor  # [N] float32


def quantise_rows(weight: Tensor, allowed: Range) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row, within what the kernel's sums can hold: (int8 [N, K], scales [N])."""
    peak = weight.abs().amax(1).clamp_min_(1e-12)  # [N]
    best: tuple[Tensor, Tensor, Tensor] | None = None  # levels, scales, squared error
    for top in allowed.tops:
        scales = peak / top
        levels = (weight / scales[:, None]).round_()
        if allowed.pair is None:
            return levels.to(torch.int8), scales
        levels = limit_pairs(levels, allowed.pair)
        error = (levels * scales[:, None]).sub_(weight).square_().sum(1)  # [N]
        if best is None:
            best = levels, scales, error
        else:
            better = error < best[2]
            best = (
                torch.where(better[:, None], levels, best[0]),
                torch.where(better, scales, best[1]),
                torch.minimum(error, best[2]),
            )
    assert best is not None
    return best[0].to(torch.int8), best[1]


def limit_pairs(levels: Tensor, limit: int) -> Tensor:
    """Pull neighbouring weights (2j, 2j+1) of one sign back until they sum to at most `limit`."""
    rows, cols = levels.shape
    pairs = F.pad(levels, (0, cols % 2)).view(rows, -1, 2)
    excess = (pairs.sum(-1).abs() - limit).clamp_min_(0)  # [N, K / 2]; more than the limit only where signs agree
    each = (excess / 2).ceil_()
    shrunk = pairs.sign() * (pairs.abs() - each[..., None]).clamp_min_(0)
    return shrunk.view(rows, -1)[:, :cols]


def quantise_matrix(weight: Tensor, allowed: Range) -> Int8Rows:
    """`quantise_rows` of a matrix [N, K], some rows at a time to bound the temporaries."""
    out, chunk = weight.shape[0], max(1, (1 << 22) // weight.shape[1])
    rows = Int8Rows(torch.empty(weight.shape, dtype=torch.int8), torch.empty(out))
    for lo in range(0, out, chunk):
        hi = lo + chunk
        rows.levels[lo:hi], rows.scales[lo:hi] = quantise_rows(weight[lo:hi].float(), allowed)
    return rows


def pack_int8(rows: Int8Rows) -> Any:
    """FBGEMM's packed form."""
    zeros = torch.zeros(rows.scales.numel(), dtype=torch.int64)
    with warnings.catch_warnings():  # the packed operators are current, the tensor type they take is marked deprecated
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(rows.levels, rows.scales.double(), zeros, 0)
    if torch.backends.quantized.engine != "fbgemm":  # oneDNN's packed form is several times slower here
        torch.backends.quantized.engine = "fbgemm"
    return torch.ops.quantized.linear_prepack(tensor, None)


@dataclass(frozen=True)
class Precision:
    """A way to hold and compute weights: what `--dtype` names."""

    name: str
    linear: type[Linear]
    dtype: torch.dtype  # of activations and the KV cache
    rotated: bool = False  # the residual stream is rotated, so that few bits hold it
    down: type[Linear] | None = None  # for the matrix behind the activation function, where it needs another kind
    plan: str = ""  # bits of each layer, where they differ

    @property
    def identity(self) -> str:
        """Equal where numbers are: names what is kept of a model that was computed in it."""
        return f"{self.name} {self.plan}" if self.plan else self.name


CPU_PRECISIONS = {
    "float32": Precision("float32", PackedFloat32, torch.float32),
    "fp16": Precision("fp16", PackedFloat16, torch.float32),
    "int8": Precision("int8", PackedInt8, torch.float32, rotated=True, down=SpreadInt8),
}


_BLOCK = 64
_CHUNK_ROWS = 256


class Rotation:
    """An orthogonal matrix Q of the given size, as kron(outer, inner)."""

    def __init__(self, size: int) -> None:
        inner = min(size & -size, _BLOCK)  # the largest power of two that divides size, within a block
        self.size, self.inner, self.outer = size, hadamard(inner), _orthogonal(size // inner)

    def apply(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """(x * scale) @ Q for rows x [N, size]; a row's result does not depend on how many rows there are."""
        if x.shape[0] > _CHUNK_ROWS:  # a matrix: some rows at a time stay in the caches, three times faster
            out = torch.empty(x.shape, dtype=torch.float32)
            for lo in range(0, x.shape[0], _CHUNK_ROWS):
                out[lo : lo + _CHUNK_ROWS] = self.apply(x[lo : lo + _CHUNK_ROWS], scale)
            return out
        x = x.float() if scale is None else x * scale
        blocks = each_row(x.reshape(-1, self.outer.shape[0], self.inner.shape[0]), self.inner)  # [N, outer, inner]
        return torch.bmm(self.outer.T.expand(x.shape[0], -1, -1), blocks).view(x.shape)

    def undo(self, x: Tensor) -> Tensor:
        """x @ Q.T for rows x [..., size]."""
        blocks = x.reshape(-1, self.outer.shape[0], self.inner.shape[0])
        return torch.matmul(self.outer, blocks @ self.inner.T).view(x.shape)

    def apply_output(self, weight: Tensor) -> Tensor:
        """Q.T @ weight for a matrix [size, K] that writes the stream."""
        blocks = weight.reshape(self.outer.shape[0], self.inner.shape[0], -1)  # [outer, inner, K]
        blocks = torch.matmul(self.inner.T, blocks)
        return (self.outer.T @ blocks.reshape(self.outer.shape[0], -1)).view(weight.shape)


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def _orthogonal(size: int) -> Tensor:
    if size & (size - 1) == 0:
        return hadamard(size)
    draw = torch.Generator().manual_seed(size)
    q, r = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()
