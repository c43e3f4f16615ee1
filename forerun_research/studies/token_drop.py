"""Token dropping, as published (SpecPrefill): tokens that are not chosen are absent. A baseline.

Kept tokens lie side by side in the pages but keep their rotary positions, so to the model there are gaps in the prompt.
`drop_tokens` decides what is kept, `TokenDropRun` prefills that on pages of its own and continues from there. Neither
knows which tokens are worth keeping.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from forerun.errors import OutOfPages
from forerun.models.execution.runner import Runner
from forerun.prefill.recompute import RaggedDepthPass, Rows

SINK_TOKENS = 4  # first tokens, always kept: attention sinks
CHUNK_TOKENS = 512  # of one forward


@dataclass(frozen=True)
class KeptTokens:
    """What is left of a prompt: entry i holds the token of position positions[i]."""

    ids: list[int]
    positions: np.ndarray  # [K] int64, rising
    length: int  # tokens of the whole prompt: where the answer's positions begin

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, pages: array[int], layers: int, lo: int, hi: int, want: Sequence[int] = ()) -> Rows:
        """Entries lo .. hi through all layers of the target."""
        entries = np.arange(lo, hi)
        ids, positions = np.array(self.ids[lo:hi]), self.positions[lo:hi]
        return Rows(ids, entries, pages, np.full(hi - lo, layers), want, positions=positions)

    @property
    def shift(self) -> int:
        """Position less entry, of the answer's tokens."""
        return self.length - len(self.ids)


def drop_tokens(tokens: Sequence[int], chosen: Sequence[int] | np.ndarray, tail: int) -> KeptTokens:
    """The chosen tokens, the first few and the last `tail`, in their order."""
    if tail < 1:
        raise ValueError(f"the tail is {tail}, the least is 1: the last token gives the answer's first")
    count = len(tokens)
    keep = np.zeros(count, dtype=bool)
    index = np.asarray(chosen, dtype=np.int64)
    if index.size and not (index.min() >= 0 and index.max() < count):
        raise ValueError(f"chosen tokens go from {index.min()} to {index.max()}, the prompt has {count}")
    keep[index] = True
    keep[:SINK_TOKENS] = True
    keep[max(0, count - tail) :] = True
    positions = np.flatnonzero(keep)
    return KeptTokens([tokens[p] for p in positions.tolist()], positions, count)


class TokenDropRun:
    """One prompt without its dropped tokens on borrowed pages: prefill once, then continue; `close` gives them back.

    In layers with a sliding window a token sees as many kept tokens as the window is wide, wherever they came from.
    """

    def __init__(self, runner: Runner, kept: KeptTokens, room: int) -> None:
        """`room`: tokens that may follow the prompt."""
        pool = runner.pool
        count = pool.pages_for(len(kept) + room)
        if count > pool.free:
            raise OutOfPages(
                f"{len(kept)} kept tokens and {room} more need {count} pages, {pool.free} are free",
                "keep fewer tokens, or raise kv_cache_tokens",
            )
        self._pool, self._ragged_pass, self._layers = pool, RaggedDepthPass(runner), runner.decoder.config.num_layers
        self._pages = array("i", pool.allocate(count))
        self._kept = kept
        self._entries = 0
        self._max_entries = len(kept) + room

    def __enter__(self) -> TokenDropRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.release(self._pages)
        self._pages = array("i")

    def prefill(self) -> Tensor:
        """Logits [V] of the prompt's last token."""
        assert self._entries == 0, "prefilled already"
        end = len(self._kept)
        for lo in range(0, end, CHUNK_TOKENS):
            hi = min(lo + CHUNK_TOKENS, end)
            rows = self._kept.rows(self._pages, self._layers, lo, hi, [hi - lo - 1] if hi == end else ())
            recomputed = self._ragged_pass.run(rows)
        self._entries = end
        return recomputed.logits[-1]

    def score(self, ids: list[int]) -> Tensor:
        """Logits [len(ids), V] of given tokens that follow (teacher forcing)."""
        assert self._kept.ids and self._entries, "nothing is prefilled"
        assert self._entries + len(ids) <= self._max_entries, "more tokens than there is room for"
        entries = np.arange(self._entries, self._entries + len(ids))
        depths, positions = np.full(len(ids), self._layers), entries + self._kept.shift
        rows = Rows(np.array(ids), entries, self._pages, depths, range(len(ids)), positions=positions)
        self._entries += len(ids)
        return self._ragged_pass.run(rows).logits

    def greedy(self, logits: Tensor, count: int, stop: Sequence[int] = ()) -> list[int]:
        """Up to `count` likeliest tokens, the first of them by these logits [V]; the stop token is included."""
        found: list[int] = []
        while len(found) < count:
            found.append(int(logits.argmax()))
            if found[-1] in stop or len(found) == count:
                break
            logits = self.score(found[-1:])[-1]
        return found
