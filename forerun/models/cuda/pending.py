"""Results of launches that are on their way: the host reads them when the device has written them to its memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.drafted import DraftedTokens


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


@dataclass(frozen=True)
class PendingStep:
    """A step on its way."""

    done: torch.cuda.Event
    results: np.ndarray  # [S, RESULT_SIZE] int32, in pinned memory

    def read(self) -> list[DraftedTokens]:
        """Waits for the device."""
        self.done.synchronize()
        return [DraftedTokens(row[3 : 3 + row[0]], row[1], row[2]) for row in self.results.tolist()]
