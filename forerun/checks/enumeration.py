"""Is a verifier lossless? Exactly, for a vocabulary of a few tokens: every outcome of every draw is run through with
its probability, drafting included, and what is answered in the end is compared with what the target answers by itself.

A verifier sees no difference to a real step: `Target` shapes tiny logits as it shapes real ones, only that probability
is enumerated. Drafts come from any callable of (tokens so far, random numbers). Knows no engine and no model.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
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


# ---- what is checked against what ----


@dataclass(frozen=True)
class PairResult:
    drafter: str
    verifier: str
    worst_difference: float
    passed: bool


class Proposes(Protocol):
    """All that is asked of a drafter here."""

    def propose(self, requests: list[DraftRequest]) -> list[Draft]: ...


def drafts_of(drafter: Proposes, params: SamplingParams, num_prompt: int = 2, nodes: int = 4) -> MakeDraft:
    """A drafter of the engine's kind that draws nothing by itself, as a callable."""

    def make(tokens: list[int], rng: Rng) -> Draft:
        context = Context(params, list(tokens), num_prompt, seed=0)
        return drafter.propose([DraftRequest(0, context, max_depth=3, max_nodes=nodes, pages=array("i"))])[0]

    return make


def check_pairs(
    verifiers: Iterable[Verifier], drafters: dict[str, MakeDraft] | None = None, targets: list[TinyTarget] | None = None
) -> Iterator[PairResult]:
    """Every drafter with every verifier, over all targets; by default over the kinds of drafts and targets below."""
    targets = tiny_targets() if targets is None else targets
    plain = {target.name: target_distribution(target, 3) for target in targets}
    for name, make in (tiny_drafters() if drafters is None else drafters).items():
        for verifier in verifiers:
            worst = max(difference(output_distribution(make, t, verifier, 3), plain[t.name]) for t in targets)
            yield PairResult(name, verifier.name, worst, worst < MAX_DIFFERENCE)


VOCAB = 4


def tiny_logits(seed: float, spread: float = 1.5) -> Callable[[Tokens], Tensor]:
    """A model without structure: any sequence has logits that look unrelated to those of any other."""

    def logits(tokens: Tokens) -> Tensor:
        mixed = seed
        for token in tokens:
            mixed = math.sin(mixed * 12.9898 + token * 78.233) * 43.7585
        return torch.tensor([spread * math.sin(mixed * (i + 1) + i) for i in range(VOCAB)], dtype=torch.float64)

    return logits


class _OnlyEven:
    """A grammar: token 3 never, and after an answer of an even length nothing odd."""

    def __init__(self, answer: Tokens) -> None:
        self.answer = answer

    def allowed(self, path: Sequence[int]) -> Tensor:
        odd = (len(self.answer) + len(path)) % 2 == 0
        return torch.tensor([token != 3 and not (odd and token % 2) for token in range(VOCAB)])


def tiny_targets() -> list[TinyTarget]:
    """One of each kind that shapes a distribution, greedy included."""
    return [
        TinyTarget("temperature 0.8", tiny_logits(0.3), SamplingParams(temperature=0.8)),
        TinyTarget("top-k 2", tiny_logits(0.7), SamplingParams(temperature=1.2, top_k=2)),
        TinyTarget(
            "penalties",
            tiny_logits(0.5),
            SamplingParams(temperature=1.0, frequency_penalty=1.5, repetition_penalty=1.3),
        ),
        TinyTarget("grammar", tiny_logits(0.9), SamplingParams(temperature=1.0), _OnlyEven),
        TinyTarget("greedy", tiny_logits(0.2), SamplingParams(temperature=0.0)),
    ]


def tiny_tree(
    widths: list[int], certain: tuple[int, ...] = (), seed: float = 1.7, ruled_out: int | None = None
) -> MakeDraft:
    """Drafts with so many children at each depth, drawn without replacement, or the likeliest ones where `certain`."""
    logits = tiny_logits(seed)

    def make(tokens: list[int], rng: Rng) -> Draft:
        draft, level = Draft(), [ROOT]
        for depth, width in enumerate(widths):
            level = [kid for node in level for kid in grow(draft, tokens, rng, node, width, depth in certain)]
        return draft

    def grow(draft: Draft, tokens: list[int], rng: Rng, node: int, width: int, certain: bool) -> list[int]:
        probs = torch.softmax(logits((*tokens, *(draft.tokens[i] for i in draft.path(node)))), -1)
        if ruled_out is not None:
            probs[ruled_out] = 0.0
        if not certain:
            draft.proposals[node] = probs.clone()
        kids = []
        for _ in range(width):
            token = int(probs.argmax()) if certain else rng.pick(probs)
            kids.append(draft.add(token, node, float(probs[token]), "tiny"))
            probs[token] = 0.0
        return kids

    return make


def tiny_drafters() -> dict[str, MakeDraft]:
    """One of each kind of draft that verifiers must cope with."""
    return {
        "nothing": tiny_tree([]),
        "certain chain": tiny_tree([1, 1, 1], certain=(0, 1, 2)),
        "certain tree": tiny_tree([3, 2], certain=(0, 1)),
        "drawn chain": tiny_tree([1, 1]),
        "drawn siblings": tiny_tree([3]),
        "drawn tree": tiny_tree([2, 1], ruled_out=2),
        "drawn, then certain": tiny_tree([2, 2], certain=(1,)),
        "certain, then drawn": tiny_tree([2, 1], certain=(0,)),
    }
