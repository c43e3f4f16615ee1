"""Results of launches that are on their way: the host reads them when the device has written them to its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.drafted import DraftedTokens

NOT_LEFT = -1  # of a launch that leaves nothing on the device for the next one


@dataclass(frozen=True)
class PendingTokens:
    """Tokens that the device is about to choose."""

    done: torch.cuda.Event
    greedy: list[Tensor]  # [rows of a part] each, in pinned memory
    launch: int  # number of the launch: what it left on the device is there as long as it is the last one

    def read(self) -> list[int]:
        """Waits for the device."""
        self.done.synchronize()
        return [token for part in self.greedy for token in part.tolist()]


@torch.inference_mode()
def choose_later(logits: Tensor, choose: Callable[[Tensor, int], Tensor] | None) -> PendingTokens:
    """Enqueue the choice of the likeliest token behind each of logits [N, V], or what `choose` makes of them."""
    tokens = logits.argmax(-1) if choose is None else choose(logits, 0)
    found = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
    found.copy_(tokens, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return PendingTokens(done, [found], NOT_LEFT)


@dataclass(frozen=True)
class PendingStep:
    """A step on its way."""

    done: torch.cuda.Event
    results: np.ndarray  # [S, RESULT_SIZE] int32, in pinned memory

    def read(self) -> list[DraftedTokens]:
        """Waits for the device."""
        self.done.synchronize()
        return [DraftedTokens(row[3 : 3 + row[0]], row[1], row[2]) for row in self.results.tolist()]
