"""The drafting contract of prefill: who can say what a prompt's K/V looks like without running the whole target.

A source reads a prompt some tokens at a time and writes K/V for the target's layers above `base`, approximate, into the
prompt's own pages. It knows neither which tokens will be recomputed nor whether its K/V is any good.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from forerun.errors import BadRequest
from forerun.prefill.state import PrefillState


class KVSource(ABC):
    name: str
    base: int  # depth that the target itself gives to every token: layers below it are exact as far as their input is
    start: float = 1.0  # of the shortest prompt worth drafting: less where reading costs next to nothing

    def problem(self, tokens: int) -> BadRequest | None:
        """Why a prompt of so many tokens cannot be drafted, if that is so."""
        return None

    def open(self, state: PrefillState) -> None:  # noqa: B027 (most have nothing to look at)
        """Look at a prompt before anything runs; `state.read` may be moved on to what needs no reading."""

    @abstractmethod
    def read(self, state: PrefillState, count: int) -> None:
        """Read entries state.read .. state.read + count (the tail included), and write K/V for those of them before
        state.end that are not known yet; sets state.read, state.x and state.scores as it can."""

    @abstractmethod
    def cost(self, tokens: int) -> float:
        """Work of reading so many tokens, maps included, in tokens of the target's own prefill."""

    def finish(self, state: PrefillState) -> None:  # noqa: B027 (most keep all they know in the state)
        """The prompt is done or gone: forget it."""

    def scores(self, state: PrefillState) -> np.ndarray | None:
        """[len(state.tokens)] how much the tail looks at each token, once everything is read; None: it cannot say."""
        return None
