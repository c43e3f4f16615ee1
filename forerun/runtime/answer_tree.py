"""What the model expects after many beginnings of an answer at once: a growing tree of tokens behind one prompt.

All nodes lie on one row of pages behind the prompt and attend to the prompt and their ancestors, as a draft does that
is verified. What has run stays, so that children can follow in a later forward. Runs under an `EngineLease`, between
the engine's steps. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.engine.sequence import UNNAMED, Client
from forerun.errors import OutOfPages
from forerun.models.execution.runner import Span
from forerun.runtime.lease import EngineLease

MAX_FORWARD_NODES = 128  # of one forward: their logits are [N, V] float32, 25 MB for a vocabulary of 49152


class AnswerTree:
    """`ids`: the prompt, which is read from the prefix tree as far as it is known there, and becomes known to it on the
    client's account; None: neither."""

    def __init__(self, lease: EngineLease, ids: list[int], client: Client | None = UNNAMED) -> None:
        self._lease, self._ids = lease, ids
        self._tokens: list[int] = []
        self._parents: list[int] = []
        with lease.exclusive() as engine:
            self._row = lease.pages.hold() if client is None else lease.hold_prefix(engine, ids[:-1])
            self.cached = len(self._row) * engine.pool.page_size
            self._extend(len(ids))
        lease.prefill(ids[:-1], self._row, self.cached, client=client)
        with lease.exclusive() as engine:
            output = engine.runner.forward([Span([ids[-1]], len(ids) - 1, self._row, (0,))])
            self.root_logits = output.logits.clone()  # [1, V]: a forward may reuse the memory of the last one's

    def __len__(self) -> int:
        return len(self._tokens)

    def run(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Add nodes; their logits [N, V]. Numbers follow those of the nodes before; a parent is ROOT or ran earlier."""
        parts = [
            self._run(parents[at : at + MAX_FORWARD_NODES], tokens[at : at + MAX_FORWARD_NODES])
            for at in range(0, len(tokens), MAX_FORWARD_NODES)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, parents: Sequence[int], tokens: Sequence[int]) -> Tensor:
        first, behind = len(self._tokens), len(self._ids)
        self._tokens += tokens
        self._parents += parents
        with self._lease.exclusive() as engine:
            self._extend(behind + len(self._tokens))
            span = Span(list(tokens), behind + first, self._row, range(len(tokens)), behind, self._parents)
            return engine.runner.forward([span]).logits.clone()

    def _extend(self, num_tokens: int) -> None:
        if not self._lease.pages.extend(self._row, num_tokens):
            raise OutOfPages(
                f"{len(self._tokens)} beginnings of answers after a prompt of {len(self._ids)} tokens need more pages "
                "than are free",
                "ask again when fewer requests run, raise kv_cache_tokens, or score fewer answers",
            )
