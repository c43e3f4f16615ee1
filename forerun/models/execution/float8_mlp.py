"""A decoder whose MLPs multiply in float8 where many rows run, and one such product by itself: faster than bf16, right
to a few percent.

For reading a long prompt to guess at what another model makes of it. The decoder that it is made from stays as it
is, and so does every forward of few rows. Knows the device and the layers; not why rows are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.decoder import MIN_FLOAT8_ROWS, Decoder, Layer
from forerun.models.linear import Linear

if TYPE_CHECKING:
    from forerun.models.cuda.float8 import Float8Projection

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0  # that it has
FLOAT8_MULTIPLE = 16  # numbers of a row: what a product in float8 takes multiples of


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] as float8 [N, K] and, for each row, what it is to be multiplied by: [N, 1] float32."""
    rows = rows.float()
    most = rows.abs().amax(-1, keepdim=True).clamp(1e-30, 3e38)  # a row of zeros is one, infinities have a place
    return (rows * (FLOAT8_MAX / most)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), most / FLOAT8_MAX


def float8_decoder(decoder: Decoder, layers: int) -> Decoder:
    """One that shares everything with this, but computes the MLPs of its first `layers` layers in float8 where at least
    MIN_FLOAT8_ROWS rows run; this one itself where the device, the model or the memory left does not allow it.

    The copies take a byte for each weight of these MLPs: half of what they take in bf16. For the lower 14 of 24 layers
    of a model of 0.5B that is 183 MB, for the lower 17 of 28 layers of one of 1.5B 702 MB.
    """
    if not (layers and _device_can(decoder) and all(_fits(decoder, layer) for layer in decoder.layers[:layers])):
        return decoder
    try:
        float8 = [replace(layer, float8_mlp=_float8_mlp(decoder, layer)) for layer in decoder.layers[:layers]]
        # compiles the kernels now, so that no prompt waits for it, and shows whether this build of torch can
        assert float8[0].float8_mlp is not None
        float8[0].float8_mlp(
            torch.zeros(MIN_FLOAT8_ROWS, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
        )
    except RuntimeError:  # no memory for it, or no such product
        return decoder
    return replace(decoder, layers=float8 + decoder.layers[layers:])


def float8_projection(linear: Linear, widths: list[int], eps: float) -> Float8Projection | None:
    """A copy of this matrix for parts of these widths, each divided by its root mean square, of MIN_FLOAT8_ROWS rows
    and more; none where the device, the matrix or the memory left does not allow it."""
    if not (_plain(linear) and _device_can(linear.weight)):
        return None
    from forerun.models.cuda.float8 import Float8Projection

    try:
        made = Float8Projection(to_float8(linear.weight), linear.bias, eps)
        # as above: compiled now, and seen to run
        nothing = [linear.weight.new_zeros(MIN_FLOAT8_ROWS, width) for width in widths]
        if not made.takes(nothing):
            return None
        made(nothing)
    except RuntimeError:
        return None
    return made


def _device_can(held: Decoder | Tensor) -> bool:
    if held.device.type != "cuda" or held.dtype != torch.bfloat16 or not hasattr(torch, "_scaled_mm"):
        return False
    return torch.cuda.get_device_capability(held.device) >= (9, 0)


def _plain(linear: Linear) -> bool:
    aligned = linear.in_features % FLOAT8_MULTIPLE == 0 and linear.out_features % FLOAT8_MULTIPLE == 0
    return aligned and not linear.packs and linear.weight.dtype == torch.bfloat16


def _fits(decoder: Decoder, layer: Layer) -> bool:
    """Whether float8 has the pieces of this layer's MLP: none after the products, plain matrices, their sizes."""

    def unbiased(linear: Linear) -> bool:
        return linear.bias is None and _plain(linear)

    gated = decoder.config.activation in ("silu", "gelu_tanh")
    alone = layer.post_mlp_norm is None and layer.mlp_norm[0] is not None
    return gated and alone and unbiased(layer.gate_up) and unbiased(layer.down)


def _float8_mlp(decoder: Decoder, layer: Layer) -> Callable[[Tensor], Tensor]:
    from forerun.models.cuda.float8 import Float8Mlp

    weight, eps = layer.mlp_norm
    assert weight is not None
    return Float8Mlp(
        weight, eps, to_float8(layer.gate_up.weight), to_float8(layer.down.weight), decoder.config.activation
    )
