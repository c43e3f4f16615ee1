"""What a drafter reads of the target: a vector for every token, made of the hidden states at a few depths.

Vectors lie on the pages of the tokens, as K/V does: shared prefixes, copied pages and accepted branches carry them
along. A page that came back from a tier, or whose K/V was drafted, has none until its tokens run again. Knows no
drafter: what becomes of the hidden states is a function that is given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool, slots_of
from forerun.core.batch import send
from forerun.models.decoder import Taps

MAX_WAITING_ROWS = 8  # of a step whose vectors are made later: more are a prompt
WRITTEN_ROWS = 32  # that are made together at the latest


@dataclass(frozen=True)
class FeatureShape:
    """A vector as the pool stores it: its two halves are the K and the V of one layer with one head."""

    kv_size: int
    num_layers: int = 1
    num_kv_heads: int = 1

    @property
    def head_dim(self) -> int:
        return self.kv_size


class HiddenFeatures:
    def __init__(
        self,
        depths: Sequence[int],
        width: int,
        project: Callable[[list[Tensor]], Tensor],
        pool: PagePool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`project`: hidden states at each of the depths, [T, hidden] each, to vectors [T, width]."""
        assert width % 2 == 0
        self.depths, self.taps, self._project = tuple(depths), Taps(hidden=frozenset(depths)), project
        self._size = pool.page_size
        self._on_pages = pool.add_draft_kv(FeatureShape(width // 2), dtype, device)
        self._halves = self._on_pages.kv[0]
        self._waits = device.type == "cpu"  # elsewhere the states are buffers that the next step writes to
        self._waiting: list[tuple[np.ndarray, list[Tensor]]] = []  # slots, and the states of their tokens
        self._latest: tuple[np.ndarray, Tensor] | None = None  # slots and vectors that were written last

    def record(self, slots: np.ndarray, hidden: dict[int, Tensor]) -> None:
        """The tokens at these slots have run. On a CPU those of a few steps wait for each other: made into vectors one
        by one they would slow down every step, whether a drafter reads them or not."""
        states = [hidden[depth] for depth in self.depths]
        if self._waits and len(slots) <= MAX_WAITING_ROWS:
            self._waiting.append((slots, states))
            if sum(len(each) for each, _ in self._waiting) >= WRITTEN_ROWS:
                self.write_waiting()
            return
        self.write_waiting()
        self._write(slots, states)

    def write_waiting(self) -> None:
        """Vectors of all tokens that wait. Of a slot that several tokens had, the last one's stays."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) <= 1:  # slots of one step differ from each other
            for only in waiting:
                self._write(*only)
            return
        slots = np.concatenate([each for each, _ in waiting])
        states = [torch.cat(parts) for parts in zip(*(each for _, each in waiting), strict=True)]
        last = {slot: row for row, slot in enumerate(slots.tolist())}
        if len(last) < len(slots):
            kept = np.array(sorted(last.values()))
            self._mark(slots)
            slots, states = slots[kept], [state[torch.from_numpy(kept)] for state in states]
        self._write(slots, states)

    @torch.inference_mode()
    def _write(self, slots: np.ndarray, states: list[Tensor]) -> None:
        rows = self._project(states)  # [T, width]
        places = send(slots, rows.device)
        for cache, half in zip(self._halves, rows.chunk(2, -1), strict=True):
            cache[:, 0].index_copy_(0, places, half.to(cache.dtype))
        self._latest = (slots, rows) if self._waits and rows.dtype == self._halves[0].dtype else None
        self._mark(slots)

    def _mark(self, slots: np.ndarray) -> None:
        """These have vectors."""
        filled = self._on_pages.filled
        for page, entry in zip((slots // self._size).tolist(), (slots % self._size).tolist(), strict=True):
            if entry == filled[page]:
                filled[page] = entry + 1

    def move(self, source: list[int], target: list[int]) -> None:
        """Of an accepted branch, from slots to slots."""
        self.write_waiting()
        self._latest = None
        for cache in self._halves:
            cache[torch.tensor(target, device=cache.device)] = cache[torch.tensor(source, device=cache.device)]

    def known_from(self, pages: array[int], first: int, end: int) -> int:
        """The least entry from `first` on such that it and all up to `end` have vectors; `end`: the last has none."""
        self.write_waiting()
        filled, size = self._on_pages.filled, self._size
        page = (end - 1) // size
        if end <= first or filled[pages[page]] < (end - 1) % size + 1:
            return end
        while page * size > first and filled[pages[page - 1]] == size:
            page -= 1
        return max(first, page * size)

    def rows(self, pages: array[int], first: int, end: int) -> Tensor:
        """[end - first, width] of a sequence's entries."""
        self.write_waiting()
        slots = slots_of(pages, first, end, self._size)
        if self._latest is not None:  # of the last step, as a rule
            at = int((self._latest[0] == slots[0]).argmax())
            if np.array_equal(self._latest[0][at : at + len(slots)], slots):
                return self._latest[1][at : at + len(slots)]
        places = send(slots, self._halves[0].device)
        return torch.cat([cache[:, 0].index_select(0, places) for cache in self._halves], -1)
