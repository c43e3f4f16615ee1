"""The likeliest tokens of a drafted block's positions by one call of the C kernels, in place of many small operators.

Right after a forward of the target everything is cold, and each operator of a few hundred values takes as long as a
product. Same result as the operators, which remain for other devices. Knows tensors; no model and no tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.models.cpu.block_linear import address
from forerun.models.cpu.library import RankCall, library

MAX_CANDIDATES = 32  # what ranking.c is compiled for


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Of every row [N, V] the most probable tokens [N, count], best first, and their probabilities; None where there is
    no kernel for it."""
    kernels = library()
    plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    if kernels is None or not plain or count > MAX_CANDIDATES:
        return None
    rows, vocab = logits.shape
    tokens, probs = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
    kernels.fr_likeliest(logits.data_ptr(), rows, logits.stride(0), vocab, count, tokens.data_ptr(), probs.data_ptr())
    return tokens, probs


class BlockRanking:
    """Of one drafter: its vocabulary `ids` [columns], and, where it has them, its Markov head (`previous` [tokens, r],
    `following` [columns, r]) and its confidence (weights [1, width or width + r], bias [1], the odds' weight [1])."""

    def __init__(
        self,
        ids: Tensor,
        previous: Tensor | None,
        following: Tensor | None,
        confidence: tuple[Tensor, Tensor] | None,
        odds: Tensor | None,
    ) -> None:
        kernels = library()
        assert kernels is not None
        self._kernels, self._ids = kernels, ids.contiguous()
        self._previous, self._following = (None if t is None else t.float().contiguous() for t in (previous, following))
        self._sure = None if confidence is None else confidence[0].float().flatten().contiguous()
        self._bias = 0.0 if confidence is None else float(confidence[1])
        self._odds = 0.0 if odds is None else float(odds)

    @staticmethod
    def possible(logits: Tensor, candidates: int) -> bool:
        plain = logits.device.type == "cpu" and logits.dtype == torch.float32
        return plain and candidates <= MAX_CANDIDATES and library() is not None

    def __call__(
        self, logits: Tensor, rows: Tensor, lasts: Sequence[int], heat: Sequence[float], candidates: int, children: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of blocks: logits [N, D, columns] and rows [N, D, width], the tokens before them, and temperatures. Tokens
        [N, D, candidates], likeliest first; their children [N, D, places, children] with probabilities, 0: none."""
        blocks, depths, columns = logits.shape
        logits, rows = logits.contiguous(), rows.float().contiguous()
        candidates = min(candidates, columns)
        children = min(children, candidates)
        places = candidates if self._previous is not None else 1
        tokens = np.zeros((blocks, depths, candidates), dtype=np.int64)
        found = np.zeros((blocks, depths, candidates, children), dtype=np.int64)
        probs = np.zeros(found.shape, dtype=np.float32)
        rank, width = 0 if self._previous is None else self._previous.shape[1], rows.shape[2]
        sure_previous = None
        if self._sure is not None and self._previous is not None and len(self._sure) > width:
            sure_previous = self._sure.data_ptr() + width * self._sure.element_size()
        made: list[np.ndarray] = [tokens, found, probs]
        at = [(array.ctypes.data, array.strides[0]) for array in made]
        for n in range(blocks):
            own = [first + n * stride for first, stride in at]
            logits_at = logits.data_ptr() + n * depths * columns * logits.element_size()
            rows_at = rows.data_ptr() + n * depths * width * rows.element_size()
            call = RankCall(
                *(depths, columns, candidates, children, rank, width, 1.0 / heat[n], self._bias, self._odds, lasts[n]),
                *(logits_at, self._ids.data_ptr(), address(self._previous), address(self._following)),
                *(rows_at, address(self._sure), sure_previous, *own),
            )
            self._kernels.fr_rank(ctypes.addressof(call))
        return tokens, found[:, :, :places], probs[:, :, :places]
