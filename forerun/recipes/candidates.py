"""Several answers to one prompt, and the best of them: by a score, or by majority vote.

All answers branch from one prefill and run together; each is evaluated as soon as it ends, while others run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.core import SamplingParams, Usage
from forerun.errors import BadRequest
from forerun.llm import LLM, Messages, Prompt
from forerun.options import check_number
from forerun.outputs import Choice
from forerun.sharing.branches import Branch, checked_score, gather_or_cancel, run_branch, run_sync
from forerun.sharing.rollout_config import SAMPLING, answer_seed, group_seed

MAX_CANDIDATES = 256


@dataclass
class Candidate(Choice):
    """One answer. `error`: what the caller's function raised about it; then it has neither score nor vote."""

    usage: Usage = field(default_factory=Usage)
    score: float | None = None
    vote: Hashable = None
    error: Exception | None = None

    @property
    def logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class Best:
    """All candidates of `best_of_n`, best first; those without a score come last."""

    candidates: list[Candidate]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True)
class Vote:
    """The answer with most votes. Ties go to the answer of the highest mean log-probability per token."""

    answer: Hashable
    share: float  # of the candidates that have a vote
    counts: dict[Hashable, int]
    candidates: list[Candidate]


def best_of_n(
    llm: LLM,
    prompt: Prompt | Messages,
    n: int,
    score: Callable[[Candidate], float],
    params: SamplingParams = SAMPLING,
    seed: int | None = None,
) -> Best:
    """n answers from one prefill, best score first. `score` is called in a thread, with one answer at a time, while
    others run; an answer it fails on carries the error. Raises only where it failed on all."""
    if not callable(score):
        raise BadRequest(f"score is {score!r:.80}", "give a function from a candidate to a number")

    def evaluate(candidate: Candidate) -> None:
        candidate.score = checked_score(score, candidate, "a candidate")

    found = _evaluated(llm, prompt, n, params, seed, evaluate)
    return Best(sorted(found, key=lambda c: -float("inf") if c.score is None else c.score, reverse=True))


def self_consistency(
    llm: LLM,
    prompt: Prompt | Messages,
    n: int,
    extract: Callable[[str], Hashable],
    params: SamplingParams = SAMPLING,
    seed: int | None = None,
) -> Vote:
    """n answers from one prefill, and a majority vote. `extract` finds the final answer in a text; None: there is none,
    and no vote."""
    if not callable(extract):
        raise BadRequest(f"extract is {extract!r:.80}", "give a function from a text to its final answer")

    def evaluate(candidate: Candidate) -> None:
        try:
            candidate.vote = extract(candidate.text)
            hash(candidate.vote)
        except Exception as error:
            candidate.vote = None
            hint = "return something that can be counted (text, a number), or None where there is no answer"
            raise BadRequest(f"extract raised {type(error).__name__} on a candidate: {error}", hint) from error

    found = _evaluated(llm, prompt, n, params, seed, evaluate)
    counts = Counter(c.vote for c in found if c.vote is not None)
    if not counts:
        return Vote(None, 0.0, {}, found)
    best_logprob: dict[Hashable, float] = {}
    for candidate in found:
        mean = candidate.logprob / max(1, len(candidate.logprobs))
        best_logprob[candidate.vote] = max(best_logprob.get(candidate.vote, -float("inf")), mean)
    answer = max(counts, key=lambda vote: (counts[vote], best_logprob[vote]))
    return Vote(answer, counts[answer] / counts.total(), dict(counts), found)


def sample(
    llm: LLM, prompt: Prompt | Messages, n: int, params: SamplingParams = SAMPLING, seed: int | None = None
) -> list[Candidate]:
    """n answers from one prefill, in the order they were started."""
    return _evaluated(llm, prompt, n, params, seed, lambda candidate: None)


def _evaluated(
    llm: LLM,
    prompt: Prompt | Messages,
    n: int,
    params: SamplingParams,
    seed: int | None,
    evaluate: Callable[[Candidate], Any],
) -> list[Candidate]:
    check_number("n", n, 1, MAX_CANDIDATES, whole=True)
    if params.n != 1:
        raise BadRequest(f"params has n={params.n}, beside {n} candidates", "leave n out of params")
    ids = llm.encode(prompt)
    llm.engine.intake.check(ids, params)
    found = run_sync(_run(llm, ids, n, params, group_seed(seed, params), evaluate))
    if all(candidate.error is not None for candidate in found):
        assert found[0].error is not None
        raise found[0].error
    return found


async def _run(
    llm: LLM, ids: list[int], n: int, params: SamplingParams, seed: int, evaluate: Callable[[Candidate], Any]
) -> list[Candidate]:
    loop, logprobs = asyncio.get_running_loop(), params.logprobs or 0

    async def one(index: int) -> Candidate:
        b = await run_branch(llm, Branch(ids, replace(params, logprobs=logprobs, seed=answer_seed(seed, index))))
        candidate = Candidate(**vars(b.answer), usage=b.usage)
        try:
            await loop.run_in_executor(thread, evaluate, candidate)
        except BadRequest as error:
            candidate.error = error
        return candidate

    with ThreadPoolExecutor(1, "forerun-score") as thread:
        return await gather_or_cancel(one(index) for index in range(n))
