"""A drafter's block by a few calls of the C kernels: vectors of tokens, K/V of its context, a pass of one block.

In place of some forty small operators, each of which takes as long as a product right after a forward of the target,
when everything is cold. For blocks of packed matrices whose rows start from a hidden state; others, several blocks at
once and other devices have the operators. Knows addresses; no tree and no request.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import slots_of
from forerun.models.cpu.attention import FusedLayers
from forerun.models.cpu.block_linear import BlockLinear, address
from forerun.models.cpu.library import Batch, BlockWeights, Matrix, library
from forerun.models.decoder import Decoder
from forerun.models.linear import Linear, Norm


class BlockPass:
    """Of one drafter and the pages that its K/V lies on."""

    def __init__(
        self,
        decoder: Decoder,
        fused: FusedLayers,
        fc: BlockLinear,
        hidden_norm: Norm,
        context: Sequence[BlockLinear],
        state_in: BlockLinear,
        depths: Tensor,
        taps: int,
    ) -> None:
        """`context`: K and V of each layer, made of vectors. `depths`: [rows, hidden] what a row adds."""
        kernels, head, (final, _) = library(), decoder.head, decoder.final_norm
        assert kernels is not None and isinstance(head, BlockLinear) and final is not None
        self._kernels, self._config, self._fused = kernels, decoder.config, fused
        self._taps, self._hidden, self.max_rows = taps, decoder.config.hidden_size, len(depths)
        matrices = (Matrix * len(context))(*(linear.matrix for linear in context))
        final, depths = final.contiguous(), depths.contiguous()
        self._held = (
            fc,
            hidden_norm,
            context,
            state_in,
            head,
            matrices,
            final,
            depths,
        )  # the kernels read their memory
        self._weights = BlockWeights(
            *(fused.shape_at, fused.layers_at, len(context), taps, fc.matrix, state_in.matrix, head.matrix),
            *(ctypes.addressof(matrices), address(hidden_norm[0]), address(final), address(depths)),
        )
        self._at = ctypes.addressof(self._weights)
        self._made = torch.empty(0)
        rows = self.max_rows
        self._x, self._rows = torch.empty(rows, self._hidden), torch.empty(rows, self._hidden)
        self._logits = torch.empty(rows, head.out_features)
        self._path_starts, self._no_rows = np.zeros(rows + 1, dtype=np.int32), np.zeros(rows, dtype=np.int32)

    @staticmethod
    def possible(linears: Sequence[Linear]) -> bool:
        return all(isinstance(linear, BlockLinear) for linear in linears) and library() is not None

    def vectors(self, states: list[Tensor]) -> Tensor:
        """Hidden states [T, hidden] at each depth to vectors [T, hidden]."""
        count, states = len(states[0]), [state.contiguous() for state in states]
        places = (ctypes.c_void_p * len(states))(*(state.data_ptr() for state in states))
        joined = self._scratch(count * self._taps * self._hidden)
        made = torch.empty(count, self._hidden)
        self._kernels.fr_vectors(self._at, count, ctypes.addressof(places), joined.data_ptr(), made.data_ptr())
        return made

    def write_context(self, vectors: Tensor, positions: Tensor, slots: Tensor) -> None:
        """K/V of tokens at positions [T] to slots [T], in every layer."""
        c, vectors = self._config, vectors.contiguous()
        batch = Batch(len(vectors), 0, c.num_kv_heads, c.head_dim, 0, 0, 0, positions.data_ptr(), slots.data_ptr())
        made = self._scratch(len(vectors) * 2 * c.kv_size)
        self._kernels.fr_context(self._at, ctypes.addressof(batch), vectors.data_ptr(), made.data_ptr())

    def run(
        self, embedding: Tensor, vector: Tensor, pages: array[int], first: int, rows: int, page_size: int
    ) -> tuple[Tensor, Tensor]:
        """A block of so many rows from entry `first` on, behind a token with this embedding [1, hidden] and the vector
        [1, hidden] of the token before it: logits [rows, draft vocabulary] and what the head reads [rows, hidden]. Both
        are overwritten by the next pass."""
        c = self._config
        positions = np.arange(first, first + rows)
        slots = slots_of(pages, first, first + rows, page_size)
        lengths, table = (positions + 1).astype(np.int32), np.array(pages, dtype=np.int32)
        batch = Batch(
            *(rows, c.num_heads, c.num_kv_heads, c.head_dim, page_size, len(table), 0),
            *(positions.ctypes.data, slots.ctypes.data, lengths.ctypes.data, self._no_rows.ctypes.data),
            *(table.ctypes.data, self._path_starts.ctypes.data, None),
        )
        self._kernels.fr_block(
            *(self._at, ctypes.addressof(batch), embedding.data_ptr(), vector.data_ptr()),
            *(self._x.data_ptr(), self._rows.data_ptr(), self._logits.data_ptr(), self._fused.scratch(batch)),
        )
        return self._logits[:rows], self._rows[:rows]

    def _scratch(self, values: int) -> Tensor:
        if self._made.numel() < values:
            self._made = torch.empty(values)
        return self._made
