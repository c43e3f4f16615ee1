"""Greedy drafts of several tokens in one launch: each step's likeliest token is embedded and run without the host.

The draft model reads the tokens it has not seen yet, then its own guesses one by one; their K/V goes to the entries
that follow, except the last guess's. Knows a draft model, its K/V and pages; not whose drafts they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.core import KV, HostBatch
from forerun.models.cuda.packing import MAX_STEPS
from forerun.models.cuda.stack import KERNEL_ROWS, Stack, fits
from forerun.models.decoder import Decoder


@dataclass(frozen=True)
class Chains:
    """For each sequence of a batch the guesses made, and the draft model's probability of each."""

    tokens: list[list[int]]  # [S, steps], at most as many steps as were asked for
    probs: list[list[float]]  # [S, steps]


def can_chain(decoder: Decoder, page_size: int) -> bool:
    """Whether this decoder can draft so on this device; others draft step by step."""
    c = decoder.config
    return fits(decoder, page_size) and c.tie_embeddings and c.embed_scale == 1.0 and decoder.basis is None


class ChainRunner:
    """Chains of one draft model. `can_chain` says whether there can be one; CompileError: the driver is too old.

    `head_rows`: only tokens below this id are guessed. Vocabularies are sorted by frequency, so the first part of one
    holds nearly all that is ever guessed right, and reading less of the head makes a step shorter.
    """

    def __init__(
        self, decoder: Decoder, kv: KV, max_context: int, page_size: int, head_rows: int | None = None
    ) -> None:
        self.stack = Stack(decoder, kv, max_context, page_size, KERNEL_ROWS[0], head_rows, keep_logits=False)

    def run(self, batch: HostBatch, depth: int, least: Sequence[float] = ()) -> Chains:
        """Up to 16 rows, at least one of each sequence, the newest token last; causal. Up to MAX_STEPS guesses each.

        After i guesses, all sequences go on if any has a product of probabilities of at least least[i - 1]; without
        `least` there are `depth` guesses. Deciding this on the device costs nothing, so chains need not be cut short
        blindly. Pages must reach to where the last guess but one goes; a sequence whose pages end before that (or the
        model's context) gets worthless guesses from there on.
        """
        cu_seqlens = batch.cu_seqlens
        if batch.bits is not None or not 1 <= depth <= MAX_STEPS or len(least) > MAX_STEPS:
            raise ValueError(f"chains follow plain sequences and have 1 to {MAX_STEPS} tokens, not {depth}")
        if any(a == b for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)):
            raise ValueError("a sequence without tokens has no chain")
        self.stack.run(batch, None, depth, least)
        torch.cuda.current_stream().synchronize()
        return self._read(cu_seqlens, depth)

    def _read(self, cu_seqlens: list[int], depth: int) -> Chains:
        greedy, probs = self.stack.greedy.numpy(), self.stack.probs.numpy()
        depth = next((step for step in range(1, depth) if greedy[step, 0] < 0), depth)
        last = [end - 1 for end in cu_seqlens[1:]]  # of the first step; then a sequence has one row
        seqs = len(last)
        tokens = [greedy[0, last].tolist(), *greedy[1:depth, :seqs].tolist()]  # [depth][S]
        sure = [probs[0, last].tolist(), *probs[1:depth, :seqs].tolist()]
        return Chains([list(t) for t in zip(*tokens, strict=True)], [list(c) for c in zip(*sure, strict=True)])
