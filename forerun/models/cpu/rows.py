"""What a step does once for each token beside its products: the rows of its embeddings, and the token that is drawn.

One call of the C kernels each, where operators of a few hundred numbers would take as long as a layer. Knows tensors;
no model and no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.cpu.block_linear import FORMATS, ROW_BYTES
from forerun.models.cpu.library import library
from forerun.models.formats.dequant import EmbeddingRows

MAX_ROWS = 64  # that one thread turns into floats; more are work for several


class BlockEmbeddings(EmbeddingRows):
    """Rows of a table when they are asked for, few of them by the C kernels."""

    def __call__(self, ids: Tensor) -> Tensor:
        kernels, (vocab, row_bytes) = library(), self.raw.shape
        if kernels is None or self.kind not in FORMATS or not 0 < len(ids) <= MAX_ROWS or not self.raw.is_contiguous():
            return super().__call__(ids)
        wanted = ids.tolist()
        if min(wanted) < 0 or max(wanted) >= vocab:
            return super().__call__(ids)
        type, per = FORMATS[self.kind]
        cols, ids = row_bytes // ROW_BYTES[self.kind] * per, ids.contiguous()
        out = torch.empty(len(wanted), cols)
        kernels.fr_rows(type, self.raw.data_ptr(), cols, ids.data_ptr(), len(wanted), out.data_ptr())
        return out


def draw(logits: Tensor, temperatures: Sequence[float], numbers: Sequence[float]) -> Tensor | None:
    """Of each row [N, V] the token that a number in [0, 1) draws at a temperature above 0, [N] int64. None where there
    is no kernel for it, or none is loaded: it is no reason to compile one."""
    kernels = library() if library.cache_info().currsize else None
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    if kernels is None or not plain:
        return None
    at, step, vocab = logits.data_ptr(), 4 * logits.stride(0), logits.shape[-1]
    tokens = [
        kernels.fr_draw(at + row * step, vocab, temperature, number)
        for row, (temperature, number) in enumerate(zip(temperatures, numbers, strict=True))
    ]
    return torch.tensor(tokens)
