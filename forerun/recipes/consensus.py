"""Equilibrium ranking of candidate answers: where the model as generator and the model as discriminator agree.

The Consensus Game (Jacob et al., 2023): the generator gets "correct" or "incorrect" and picks a candidate, the
discriminator gets the candidate and predicts which of the two it was; both win where they agree. Both start from the
model's own probabilities and play no-regret updates with a penalty (KL) for moving away from the start. Candidates that
both find plausible rank highest. Nothing is sampled and nothing is trained: the model only scores given texts, and the
question, which all of them share, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.errors import BadRequest
from forerun.llm import LLM, Messages, Prompt
from forerun.options import check_number
from forerun.sharing.scoring import ContinuationScores, score_each

CORRECT, INCORRECT = 0, 1


@dataclass(frozen=True)
class Wording:
    """The prompts of the two players; each text follows the question."""

    generate_correct: str = "\nCorrect answer:"
    generate_incorrect: str = "\nIncorrect answer:"
    propose: str = "\nProposed answer:"
    judge: str = "\nIs the proposed answer correct or incorrect? It is"
    say_correct: str = " correct"
    say_incorrect: str = " incorrect"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str) or not value:
                raise BadRequest(f"wording: {name} is {value!r}, it must be text", "leave it out for the usual words")


@dataclass(frozen=True)
class Equilibrium:
    """Policies of both players: generator [2, n] over candidates, discriminator [n, 2] over correct and incorrect."""

    generator: np.ndarray
    discriminator: np.ndarray


@dataclass(frozen=True)
class Ranking:
    """Candidates, best first, by the equilibrium's generator; and the policies of both players, after and before the
    game, in the order of the candidates given."""

    order: list[int]
    candidates: list[str]
    equilibrium: Equilibrium
    start: Equilibrium
    cached_tokens: int
    computed_tokens: int

    @property
    def best(self) -> str:
        return self.candidates[self.order[0]]


def play(start: Equilibrium, steps: int = 5000, rate: float = 0.1, stay: float = 0.1) -> Equilibrium:
    """`steps` rounds of both players. `rate`: how fast they follow the other player's average policy; `stay`: weight
    of the KL term, which holds them near the start."""
    check_number("steps", steps, 1, whole=True)
    check_number("rate", rate, 0, open_low=True)
    check_number("stay", stay, 0, open_low=True)
    log_g, log_d = np.log(start.generator), np.log(start.discriminator)  # [2, n], [n, 2]
    generator, discriminator = start.generator, start.discriminator
    sum_d, sum_g = np.zeros_like(generator), np.zeros_like(discriminator)  # of the policies so far
    for t in range(1, steps + 1):
        sum_d, sum_g = sum_d + discriminator.T, sum_g + generator.T
        weight = 1.0 / (rate * t) + stay
        generator = softmax((sum_d / (2 * t) + stay * log_g) / weight)
        discriminator = softmax((sum_g / (2 * t) + stay * log_d) / weight)
    return Equilibrium(generator, discriminator)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; no probability is 0, so that each has a logarithm."""
    e = np.exp(scores - scores.max(-1, keepdims=True))
    probs = np.maximum(e / e.sum(-1, keepdims=True), 1e-12)
    return np.asarray(probs / probs.sum(-1, keepdims=True))


def initial(generate: np.ndarray, judge: np.ndarray) -> Equilibrium:
    """Policies from log-probabilities: `generate` [2, n] of each candidate after "correct" and after "incorrect",
    `judge` [n, 2] of both verdicts after each candidate. Each is normalised over the other role first, so that a
    candidate that is likely in both roles, and a verdict that is likely after any candidate, count for little."""
    relative_g = generate - np.logaddexp(generate[CORRECT], generate[INCORRECT])[None]  # [2, n]
    relative_d = judge - np.logaddexp.reduce(judge, axis=0)[None]  # [n, 2]
    return Equilibrium(softmax(relative_g), softmax(relative_d))


def equilibrium_ranking(
    llm: LLM,
    question: Prompt | Messages,
    candidates: Sequence[str],
    *,
    wording: Wording | None = None,
    steps: int = 5000,
    rate: float = 0.1,
    stay: float = 0.1,
) -> Ranking:
    """Rank candidate answers by where generator and discriminator agree. One prefill of the question serves all."""
    if len(candidates) < 2 or len(set(candidates)) < len(candidates):
        hint = "a ranking needs at least two, each given once"
        raise BadRequest(f"{len(candidates)} candidates, {len(set(candidates))} of them distinct", hint)
    for candidate in candidates:
        if not isinstance(candidate, str) or not candidate.strip():
            raise BadRequest(f"a candidate is text, got {candidate!r:.80}", "leave empty ones out")
    words, stem = wording or Wording(), llm.encode(question)
    scored = _score(llm, stem, [" " + candidate.strip() for candidate in candidates], words)
    generate = np.array([part.means for part in scored[:2]])  # [2, n]
    judge = np.array([part.totals for part in scored[2:]])  # [n, 2]
    start = initial(generate, judge)
    end = play(start, steps, rate, stay)
    order = sorted(range(len(candidates)), key=lambda i: -end.generator[CORRECT, i])
    cached, computed = (sum(getattr(part, name) for part in scored) for name in ("cached_tokens", "computed_tokens"))
    return Ranking(order, list(candidates), end, start, cached, computed)


def _score(llm: LLM, stem: list[int], candidates: list[str], words: Wording) -> list[ContinuationScores]:
    """Candidates after both generator prompts, then the two words after each candidate."""
    encode = llm.tokenizer.encode
    answers = [encode(candidate) for candidate in candidates]
    asked = [[*stem, *encode(text)] for text in (words.generate_correct, words.generate_incorrect)]
    proposed = [*stem, *encode(words.propose)]
    verdicts = [encode(words.say_correct), encode(words.say_incorrect)]
    generator = [(prefix, answers) for prefix in asked]
    discriminator = [([*proposed, *answer, *encode(words.judge)], verdicts) for answer in answers]
    return score_each(llm, [*generator, *discriminator])
