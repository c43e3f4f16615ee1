"""Matrix products: one contract, several precisions, and none whose result for a token depends on its neighbours.

`linear(x, norm=..., add=...)` is `rms_norm(x) @ W.T + bias + add`, so that a backend may fuse what surrounds the product.
Knows no model and no file. CPU kernels were chosen by measurement (docs/log.md): plain `F.linear` makes two tokens cost
2.5 times one, which would leave speculation nothing to win; the prepacked kernels here are nearly flat to eight.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.rotation import hadamard

Norm = tuple[Tensor | None, float]  # weight of an RMS norm (None: folded into the matrix behind it) and its epsilon

# overloads looked up once: resolving them at each call costs as much as a small product
_packed_float32 = torch.ops.mkldnn._linear_pointwise.default
_packed_float32_add = torch.ops.mkldnn._linear_pointwise.binary
_packed_float16 = torch.ops.quantized.linear_dynamic_fp16.default
_packed_int8 = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


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
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)

    def __call__(self, x: Tensor, *, norm: Norm | None = None, add: Tensor | None = None) -> Tensor:
        return self._product(x if norm is None else rms_norm(x, norm), add)  # [T, in] -> [T, out]

    def gated(self, x: Tensor, activation: str, *, norm: Norm | None = None) -> Tensor:
        """For a fused gate/up matrix: act(gate) * up, [T, in] -> [T, out / 2]."""
        return gate(self(x, norm=norm), activation)


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
        if add is None:
            return _packed_float32(x, self.weight, self.bias, "none", [], "")
        return _packed_float32_add(x, add, self.weight, self.bias, "add")


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
    LEVELS = 127

    def _pack(self, weight: Tensor) -> None:
        self.packed = pack_int8(weight, saturating=not torch.cpu._is_vnni_supported())
        self._numel = weight.numel()

    @property
    def nbytes(self) -> int:
        return self._numel + 4 * self.out_features

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        peak = x.abs().amax(-1, keepdim=True).clamp_min_(1e-20)  # [T, 1]
        y = _packed_int8(x / peak, 1.0 / self.LEVELS, 128, self.packed)
        if self.bias is not None:
            add = self.bias if add is None else add + self.bias
        return y.mul_(peak) if add is None else torch.addcmul(add, y, peak)


class SpreadInt8(PackedInt8):
    """PackedInt8 for inputs with outliers of their own: mixes each block of channels first, here and in the weights."""

    BLOCK = 64

    def _pack(self, weight: Tensor) -> None:
        self.mixing = hadamard(min(weight.shape[1] & -weight.shape[1], self.BLOCK))
        super()._pack(self._mix(weight.float()))

    def _mix(self, x: Tensor) -> Tensor:
        return (x.view(x.shape[0], -1, self.mixing.shape[0]) @ self.mixing).view(x.shape)

    def _product(self, x: Tensor, add: Tensor | None) -> Tensor:
        return super()._product(self._mix(x), add)


PAIR_LIMIT = 128  # 255 * 128 < 2**15


def quantise_rows(weight: Tensor, saturating: bool) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row: (int8 [N, K], scales [N]).

    Without VNNI the kernel adds the products of two neighbouring weights in 16 bits, and 255 * (w0 + w1) saturates once
    both are large and of one sign. Such pairs are rare, so only they are pulled back to the limit, instead of giving up
    a bit of every weight: the sums can then never saturate, whatever the activations.
    """
    scales = weight.abs().amax(1).div_(127).clamp_min_(1e-12)  # [N]
    levels = (weight / scales[:, None]).round_().clamp_(-127, 127)
    if saturating:
        levels = limit_pairs(levels)
    return levels.to(torch.int8), scales


def limit_pairs(levels: Tensor) -> Tensor:
    """Pull neighbouring weights (2j, 2j+1) of one sign back until they sum to at most PAIR_LIMIT."""
    rows, cols = levels.shape
    pairs = F.pad(levels, (0, cols % 2)).view(rows, -1, 2)
    same_sign = pairs[..., 0] * pairs[..., 1] > 0
    total = pairs.abs().sum(-1)  # [N, K / 2]
    shrink = torch.where(same_sign & (total > PAIR_LIMIT), PAIR_LIMIT / total.clamp_min(1), 1.0)
    return (pairs * shrink[..., None]).trunc_().view(rows, -1)[:, :cols]


def pack_int8(weight: Tensor, saturating: bool) -> Any:
    """FBGEMM's packed form of a float matrix [N, K], quantised some rows at a time to bound the temporaries."""
    out, chunk = weight.shape[0], max(1, (1 << 22) // weight.shape[1])
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(out)
    for lo in range(0, out, chunk):
        levels[lo : lo + chunk], scales[lo : lo + chunk] = quantise_rows(weight[lo : lo + chunk].float(), saturating)
    with warnings.catch_warnings():  # the packed operators are current, the tensor type they take is marked deprecated
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch._make_per_channel_quantized_tensor(levels, scales.double(), torch.zeros(out, dtype=torch.int64), 0)
    if torch.backends.quantized.engine != "fbgemm":  # oneDNN's packed form is several times slower here
        torch.backends.quantized.engine = "fbgemm"
    return torch.ops.quantized.linear_prepack(tensor, None)


@dataclass(frozen=True)
class Precision:
    """A way to hold and compute weights: what `--weights` names."""

    name: str
    linear: type[Linear]
    dtype: torch.dtype  # of activations and the KV cache
    rotated: bool = False  # the residual stream is rotated, so that few bits hold it
    down: type[Linear] | None = None  # for the matrix behind the activation function, where it needs another kind


CPU_PRECISIONS = {
    "float32": Precision("float32", PackedFloat32, torch.float32),
    "fp16": Precision("fp16", PackedFloat16, torch.float32),
    "int8": Precision("int8", PackedInt8, torch.float32, rotated=True, down=SpreadInt8),
}
