"""Is a verifier lossless? Exactly, for a vocabulary of a few tokens: every outcome of every draw is run through with
its probability, drafting included, and what is answered in the end is compared with what the target answers by itself.

A verifier sees no difference to a real step: `Target` shapes tiny logits as it shapes real ones, only that probability
is enumerated. Drafts come from any callable of (tokens so far, random numbers). Knows no engine and no model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.sampling import Constraint, Context, Rng, shape
from forerun.decode.verifiers.base import Verifier
from forerun.decode.verify import Target
from forerun.params import SamplingParams

Tokens = tuple[int, ...]
Law = dict[Tokens, float]  # probability of each sequence of tokens
MakeDraft = Callable[[list[int], Rng], Draft]
T = TypeVar("T")

MAX_DIFFERENCE = 1e-9  # rounding in float64 stays far below, a wrong rule far above


class EveryOutcome:
    """An `Rng` that follows a script and counts the other outcomes of each draw. Impossible ones are left out."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.prob = script, 1.0
        self.options: list[int] = []  # how many outcomes each throw had

    def flip(self, prob: float) -> bool:
        prob = min(max(prob, 0.0), 1.0)
        return bool(self._throw([(0, 1.0 - prob), (1, prob)]))

    def pick(self, weights: Tensor) -> int:
        wide = weights.double()
        return self._throw(list(enumerate((wide / wide.sum()).tolist())))

    def _throw(self, outcomes: list[tuple[int, float]]) -> int:
        possible = [(value, prob) for value, prob in outcomes if prob > 0.0]
        place = len(self.options)
        if place == len(self.script):
            self.script.append(0)
        self.options.append(len(possible))
        value, prob = possible[self.script[place]]
        self.prob *= prob
        return value


def outcomes(run: Callable[[Rng], T]) -> Iterator[tuple[float, T]]:
    """All that `run` can return, with probabilities that add up to one; the same value may come more than once."""
    script: list[int] = []
    while True:
        rng = EveryOutcome(script)
        value = run(rng)
        yield rng.prob, value
        while script and script[-1] + 1 == rng.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


@dataclass(frozen=True)
class TinyTarget:
    """A target model by its logits after each sequence, and how it is asked to sample."""

    name: str
    logits: Callable[[Tokens], Tensor]  # [V] float64
    params: SamplingParams
    constraint: Callable[[Tokens], Constraint] | None = None  # for the answer so far
    prompt: Tokens = (0, 1)
    nodes: int = 6  # of a draft for it: what is drawn at random must stay few enough to count
    known: dict[tuple[Tokens, Tokens], Tensor] = field(default_factory=dict, compare=False)  # distributions, for speed

    def view(self, answer: Tokens, draft: Draft, rng: Rng) -> _View:
        tokens = [*self.prompt, *answer]
        constraint = self.constraint(answer) if self.constraint is not None else None
        context = Context(self.params, tokens, len(self.prompt), seed=0, constraint=constraint)
        return _View(self, answer, context, draft, rng)

    def probs(self, answer: Tokens) -> Tensor:
        return self.view(answer, Draft(), EveryOutcome([])).probs(ROOT)


class _View(Target):
    """A real target whose own draws are enumerated, too."""

    def __init__(self, tiny: TinyTarget, answer: Tokens, context: Context, draft: Draft, rng: Rng) -> None:
        super().__init__(torch.empty(0), context, draft)
        self._tiny, self._answer, self._rng = tiny, answer, rng

    def probs(self, node: int) -> Tensor:
        row = self.row(node)
        key = (self._answer, tuple(row.path))
        if key not in self._tiny.known:
            logits = self._tiny.logits((*row.context.tokens, *row.path))
            self._tiny.known[key] = self._distribution(shape(logits[None], [row]))
        return self._tiny.known[key]

    def draw(self, node: int) -> int:
        return self._rng.pick(self.probs(node))


def target_distribution(target: TinyTarget, length: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(length):
        law = _extended(law, target)
    return law


def output_distribution(
    make_draft: MakeDraft, target: TinyTarget, verifier: Verifier, length: int, steps: int = 1
) -> Law:
    """Exact distribution of the first `length` tokens: some speculative steps, then plain sampling for the rest."""
    law: Law = {(): 1.0}
    for _ in range(steps):
        after: Law = defaultdict(float)
        for answer, weight in law.items():
            if len(answer) >= length:
                after[answer] += weight
                continue
            step = partial(_step, make_draft, target, verifier, answer)
            for prob, tokens in outcomes(step):
                after[(*answer, *tokens)[:length]] += weight * prob
        law = after
    done: Law = defaultdict(float)
    while law:
        for answer in [answer for answer in law if len(answer) == length]:
            done[answer] += law.pop(answer)
        law = _extended(law, target)
    return done


def _step(make_draft: MakeDraft, target: TinyTarget, verifier: Verifier, answer: Tokens, rng: Rng) -> Tokens:
    draft = make_draft([*target.prompt, *answer], rng)
    verdict = verifier.verify(draft, target.view(answer, draft, rng), rng)
    return (*(draft.tokens[i] for i in verdict.path), verdict.next_token)


def _extended(law: Law, target: TinyTarget) -> Law:
    """Every sequence by one token, drawn by the target."""
    after: Law = defaultdict(float)
    for answer, weight in law.items():
        for token, prob in enumerate(target.probs(answer).tolist()):
            if prob > 0.0:
                after[(*answer, token)] += weight * prob
    return after


def difference(a: Law, b: Law) -> float:
    """Largest difference in the probability of any sequence."""
    return max(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in {*a, *b})


VOCAB = 4


def tiny_logits(seed: float, spread: float = 1.5) -> Callable[[Tokens], Tensor]:
    """A model without structure: any sequence has logits that look unrelated to those of any other."""

    def logits(tokens: Tokens) -> Tensor:
        mixed = seed
        for token in tokens:
            mixed = math.sin(mixed * 12.9898 + token * 78.233) * 43.7585
        return torch.tensor([spread * math.sin(mixed * (i + 1) + i) for i in range(VOCAB)], dtype=torch.float64)

    return logits
