"""Drafters, verifiers and targets on four tokens, checked pair by pair: every outcome is enumerated."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.checks.enumeration import (
    MAX_DIFFERENCE,
    VOCAB,
    MakeDraft,
    TinyTarget,
    Tokens,
    difference,
    output_distribution,
    target_distribution,
    tiny_logits,
)
from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.sampling import Context, Rng
from forerun.decode.verifiers.base import Verifier
from forerun.params import SamplingParams


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
