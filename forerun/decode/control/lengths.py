"""How long answers are, by kind of prompt: what a draft model may read for before its first draft.

Lengths differ by factors, so that their logarithms are averaged. Knows no drafter and no cost.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Protocol

# Of an answer's length, which differs by factors: programs are rarely short, calculations sometimes, answers in prose
# often. Its median, and the factor by which a standard deviation is above or below
PRIOR_ANSWER_TOKENS, PRIOR_ANSWER_FACTOR = 128.0, {"code": 1.25, "numbers": 2.0}
PRIOR_FACTOR_ELSEWHERE = 6.0
PRIOR_ANSWERS = 2.0  # that these count for
LENGTH_DECAY = 0.95  # per answer
QUARTILE = 0.67  # standard deviations from the median


class Answer(Protocol):
    """An answer so far."""

    kind: str
    tokens: int
    max_tokens: int


class AnswerLengths:
    def __init__(self) -> None:
        # by kind: answers that ended, logarithms of their tokens, and those squared
        self.lengths: dict[str, list[float]] = {}

    def expected_remaining(self, answer: Answer) -> int:
        """Tokens that an answer goes on for at least: as long as three of four others of its kind, or as long again as
        it has lasted. Lengths vary far more than acceptance, and a start that is not won back is lost. Where they vary
        widely, an answer that has begun is hardly nearer its end for it."""
        least, usual = self.min_length(answer.kind, QUARTILE), self.min_length(answer.kind, 0.0)
        more = max(least - answer.tokens * least / usual, answer.tokens)
        return max(0, min(answer.max_tokens - answer.tokens, int(more)))

    def min_length(self, kind: str, deviations: float) -> float:
        """Tokens of answers of this kind: the median, less so many standard deviations of its logarithm."""
        answers, logs, squares = self.lengths.get(kind, (0.0, 0.0, 0.0))
        answers += PRIOR_ANSWERS
        prior, deviation = log(PRIOR_ANSWER_TOKENS), log(PRIOR_ANSWER_FACTOR.get(kind, PRIOR_FACTOR_ELSEWHERE))
        mean = (logs + PRIOR_ANSWERS * prior) / answers
        square = (squares + PRIOR_ANSWERS * (prior**2 + deviation**2)) / answers
        return exp(mean - deviations * sqrt(max(0.0, square - mean * mean)))

    def record_length(self, answer: Answer) -> None:
        known, usual = self.lengths.setdefault(answer.kind, [0.0, 0.0, 0.0]), self.min_length(answer.kind, 0.0)
        tokens, weight = max(1.0, answer.tokens), 1.0
        if usual > tokens >= answer.max_tokens:
            # Its limit cut it off: as far as it went, it was not shorter than usual. Left out, short answers alone
            # would count where limits are low
            tokens, weight = usual, tokens / usual
        for i, value in enumerate((1.0, log(tokens), log(tokens) ** 2)):
            known[i] = known[i] * LENGTH_DECAY + weight * value
