"""Best-of-n and self-consistency: one prefill, every answer judged, failures carried."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.recipes.candidates import Candidate, best_of_n, sample, self_consistency
from tests.tiny import TEXT

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen2")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=8192) as made:
        yield made


def test_all_answers_branch_from_one_prefill(llm: LLM):
    llm.clear_cache()
    ids = llm.tokenizer.encode(TEXT)[:100]
    found = sample(llm, ids, 6, PARAMS)
    assert sorted(c.usage.computed_tokens for c in found) == [4] * 5 + [100]
    assert len({tuple(c.token_ids) for c in found}) == 6
    assert [c.token_ids for c in sample(llm, ids, 6, PARAMS)] == [c.token_ids for c in found]
    assert [c.token_ids for c in sample(llm, ids, 6, PARAMS, seed=1)] != [c.token_ids for c in found]


def test_the_seed_of_the_parameters_decides(llm: LLM):
    def ask(seed: int) -> list[list[int]]:
        return [c.token_ids for c in sample(llm, "The lamp", 4, replace(PARAMS, seed=seed))]

    first = ask(7)
    assert first == ask(7) != ask(8) and len({tuple(tokens) for tokens in first}) == 4
    best = best_of_n(llm, "The lamp", 4, lambda c: 0.0, replace(PARAMS, seed=7))
    vote = self_consistency(llm, "The lamp", 4, lambda text: text, replace(PARAMS, seed=7))
    assert [c.token_ids for c in best.candidates] == [c.token_ids for c in vote.candidates] == first
    with pytest.raises(BadRequest, match="seed is 8, params.seed is 7") as caught:
        sample(llm, "The lamp", 4, replace(PARAMS, seed=7), seed=8)
    assert caught.value.hint


def test_best_of_n_is_the_best(llm: LLM):
    found = best_of_n(llm, "The lamp", 6, lambda c: c.token_ids[0], PARAMS)
    scores = [c.score for c in found.candidates]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1  # type: ignore[type-var]
    assert found.best.token_ids[0] == max(c.token_ids[0] for c in found.candidates)
    assert all(c.text == llm.tokenizer.decode(c.token_ids) and len(c.logprobs) == 12 for c in found.candidates)


def test_a_score_that_raises_concerns_one_candidate(llm: LLM):
    def score(candidate: Candidate) -> float:
        calls.append(candidate)
        if len(calls) == 2:
            raise RuntimeError("broken judge")
        return 1.0

    calls: list[Candidate] = []
    found = best_of_n(llm, "The lamp", 4, score, PARAMS)
    assert [c.score for c in found.candidates] == [1.0, 1.0, 1.0, None]
    assert "broken judge" in str(found.candidates[-1].error)
    with pytest.raises(BadRequest, match="ZeroDivisionError"):
        best_of_n(llm, "The lamp", 3, lambda c: 1 / 0, PARAMS)
    assert llm.engine.idle


def votes_in_turn(votes: list[Any]) -> Callable[[str], Hashable]:
    left = list(votes)
    return lambda text: left.pop(0)


def test_the_majority_wins_and_silence_does_not_count(llm: LLM):
    found = self_consistency(llm, "The lamp", 6, votes_in_turn(["a", None, "b", "b", None, "b"]), PARAMS)
    assert (found.answer, found.share, found.counts) == ("b", 0.75, {"a": 1, "b": 3})
    assert len(found.candidates) == 6
    none = self_consistency(llm, "The lamp", 2, lambda text: None, PARAMS)
    assert (none.answer, none.share) == (None, 0.0)


def test_ties_go_to_what_the_model_finds_likelier(llm: LLM):
    found = self_consistency(llm, "The lamp", 2, lambda text: text, PARAMS)
    assert found.share == 0.5
    assert found.answer == max(found.candidates, key=lambda c: c.logprob).text


def test_votes_that_cannot_be_counted_are_carried(llm: LLM):
    found = self_consistency(llm, "The lamp", 3, votes_in_turn([["list"], "x", "x"]), PARAMS)
    assert found.answer == "x" and found.share == 1.0
    assert sum(c.error is not None for c in found.candidates) == 1


@pytest.mark.parametrize("n", [0, -1, 257, True, 2.0])
def test_bad_n(llm: LLM, n: Any):
    with pytest.raises(BadRequest, match="n is"):
        best_of_n(llm, "The lamp", n, lambda c: 1.0)


def test_other_bad_values(llm: LLM):
    with pytest.raises(BadRequest, match="score is None"):
        best_of_n(llm, "The lamp", 2, None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="extract is 3"):
        self_consistency(llm, "The lamp", 2, 3)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="n=2"):
        best_of_n(llm, "The lamp", 2, lambda c: 1.0, SamplingParams(n=2))
