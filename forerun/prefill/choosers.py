"""Which tokens of a prompt the target recomputes: choosers give every token a score, `select` takes the best.

A score is how much the tail of the prompt attends to a token, or a stand-in for that. Knows no budget, no depth and no
source: scores that a source measures while it reads come from its own `scores`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from forerun.errors import BadRequest
from forerun.models.execution.runner import Runner, Span
from forerun.prefill.attention_scores import TailAttention
from forerun.prefill.copy_matching import copy_scores, top_mask
from forerun.prefill.depth import RaggedDepthPass, Rows
from forerun.prefill.sources.base import KVSource
from forerun.prefill.state import PrefillState


class TokenScorer(Protocol):
    """Scores of tokens from outside the source, such as those of a draft model of another tokenizer."""

    def scores(self, state: PrefillState) -> np.ndarray:
        """[len(state.tokens)] how much the tail attends to each token."""

    def cost(self, tokens: int) -> float:
        """Work of scoring a prompt of so many tokens, in tokens of the target's own prefill."""


@dataclass
class ChooserInput:
    """What a chooser may use for one prompt."""

    state: PrefillState
    source: KVSource
    runner: Runner
    scorers: dict[str, TokenScorer]


Chooser = Callable[[ChooserInput], "np.ndarray | None"]  # scores [len(state.tokens)], or None where there are none


def by_source(given: ChooserInput) -> np.ndarray | None:
    """What the source measured while reading: draft attention, attention of lower layers, deviation of copied K/V."""
    return given.source.scores(given.state)


def by_tail(given: ChooserInput) -> np.ndarray:
    """What the tail repeats, then what the target's own tail attends to over the drafted K/V."""
    repeated = copy_scores(given.state.ids, given.state.end)  # first, while a device may still be reading the prompt
    return tail_attention(given.runner, given.state, given.source.base) + repeated


def by_scorer(given: ChooserInput) -> np.ndarray | None:
    scorer = given.scorers.get("cross")
    return None if scorer is None else scorer.scores(given.state)


def by_start(given: ChooserInput) -> np.ndarray:
    """First tokens first: of each span that was copied from elsewhere, else of the prompt."""
    copied = given.source.scores(given.state) if given.source.name == "chunk" else None
    return -np.arange(len(given.state.tokens), dtype=np.float64) if copied is None else copied


def at_random(given: ChooserInput) -> np.ndarray:
    """The baseline: the same for every prompt of a length."""
    return np.random.default_rng(len(given.state.tokens)).random(len(given.state.tokens))


CHOOSERS: dict[str, Chooser] = {
    "draft": by_source,
    "lower": by_source,
    "deviation": by_source,
    "tail": by_tail,
    "cross": by_scorer,
    "start": by_start,
    "random": at_random,
}
OFFERED_BY = {"draft": ("draft", "drop"), "lower": ("self",), "deviation": ("chunk",)}  # others go with any source


def chooser_for(asked: str, source: str) -> str:
    """`auto`: the attention of the target's own tail is the best predictor; it needs K/V of all tokens, which dropping
    them does not give."""
    return asked if asked != "auto" else "draft" if source == "drop" else "tail"


def chooser_problem(name: str, source: str, scorers: dict[str, TokenScorer]) -> BadRequest | None:
    """Why a chooser does not go with a source, if that is so."""
    if name not in CHOOSERS:
        return BadRequest(f"the chooser of prefill is {name!r}", f"use one of auto, {', '.join(CHOOSERS)}")
    if name == "cross" and name not in scorers:
        return BadRequest(
            "the chooser 'cross' needs a draft model of another tokenizer, and none is open",
            "open the model with such a draft, or use chooser=auto",
        )
    if source not in OFFERED_BY.get(name, (source,)):
        offered = " or ".join(OFFERED_BY[name])
        return BadRequest(f"the chooser {name!r} goes with the source {offered}, not {source}", "use chooser=auto")
    return None


def select(scores: np.ndarray, candidates: np.ndarray, count: int, window: int = 1) -> np.ndarray:
    """The `count` candidates with the best scores, in their order, which is by position; of equals the first ones.

    `window`: scores are first averaged over so many neighbours, so that whole passages are taken.
    """
    count = min(count, len(candidates))
    if count <= 0:
        return np.zeros(0, dtype=np.int64)
    first, last = candidates[0], candidates[-1]
    mine = smooth(scores, window)
    mine = mine[first : last + 1] if last - first == len(candidates) - 1 else mine[candidates]
    return candidates[top_mask(mine, count)].astype(np.int64)


def smooth(scores: np.ndarray, window: int) -> np.ndarray:
    """Means over a centred window; at the ends, over what there is of it."""
    if window <= 1:
        return scores
    sums = np.concatenate(([0.0], np.cumsum(scores, dtype=np.float64)))
    at = np.arange(len(scores))
    lo, hi = np.maximum(at - (window - 1) // 2, 0), np.minimum(at + window // 2 + 1, len(scores))
    return (sums[hi] - sums[lo]) / (hi - lo)


def tail_rows(state: PrefillState, base: int, want: int = 0) -> Rows:
    """The tail through all layers, or from `base` on where the source has run it through those below; `want`: of so
    many of its last tokens logits."""
    entries, x = np.arange(state.end, len(state.tokens)), None
    if state.x is not None and state.x.shape[0] == len(state.tokens) - state.first:
        x = state.x[state.end - state.first :]
    wanted, depths = range(max(0, len(entries) - want), len(entries)), np.full(len(entries), state.layers)
    return Rows(state.ids[state.end :], entries, state.pages, depths, wanted, x=x, first=0 if x is None else base)


def tail_attention(runner: Runner, state: PrefillState, base: int) -> np.ndarray:
    """[len(state.tokens)] attention of the tail's rows over what lies in the prompt's pages, mean over heads and the
    layers they run.

    The last layer is left out: rows without logits leave the pass before they attend there. A device with a recorded
    pass and sums does both at once, in all layers.
    """
    seen = runner.tail_attention(Span(state.ids[state.end :].tolist(), state.end, state.pages, ()))
    if seen is not None:
        return seen
    tail_attention = TailAttention(runner, state.pages, state.end, len(state.tokens))

    def watch(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
        if q is not None:
            tail_attention.add(layer, q, state.end)

    RaggedDepthPass(runner).run(tail_rows(state, base), watch)
    return tail_attention.reduce()


def warm_up(runner: Runner, tail: int) -> None:
    """Have a device compile and capture the pass that the first prompt's tail would otherwise wait for; needs pages for
    that tail."""
    pool = runner.pool
    if runner.graphs is None or pool.pages_for(tail) > pool.free:
        return
    pages = array("i", pool.allocate(pool.pages_for(tail)))
    try:
        runner.tail_attention(Span([0] * tail, 0, pages, ()))
    finally:
        pool.release(pages)
