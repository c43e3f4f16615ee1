"""Equilibrium ranking: the game by itself, and candidates scored from one prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import LLM
from forerun.errors import BadRequest
from forerun.recipes.consensus import CORRECT, INCORRECT, Equilibrium, Wording, equilibrium_ranking, initial, play
from tests.tiny import TEXT

WORDS = ["twelve times a minute", "never", "720 times"]


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=8192) as made:
        yield made


def start(generator: list[float], discriminator: list[float]) -> Equilibrium:
    """From what each says of "correct"; "incorrect" is spread evenly, or what is left."""
    n = len(generator)
    said = np.array(discriminator)
    return Equilibrium(np.array([generator, [1 / n] * n]), np.stack([said, 1 - said], axis=1))


def test_policies_stay_distributions():
    end = play(start([0.7, 0.2, 0.1], [0.4, 0.9, 0.1]))
    assert end.generator.sum(1) == pytest.approx([1, 1]) and end.discriminator.sum(1) == pytest.approx([1, 1, 1])
    assert (end.generator > 0).all() and (end.discriminator > 0).all()


def test_players_come_to_agree():
    """Each likes another candidate a little better; the one that both find good wins with both."""
    end = play(start([0.45, 0.44, 0.11], [0.1, 0.55, 0.6]))
    assert end.generator[CORRECT].argmax() == 1
    assert end.discriminator[1, CORRECT] > 0.5 > end.discriminator[0, CORRECT]


def test_more_weight_on_the_start_keeps_it():
    first = start([0.6, 0.3, 0.1], [0.2, 0.7, 0.6])
    held, loose = play(first, stay=1e4), play(first, stay=0.01)
    assert held.generator == pytest.approx(first.generator, abs=1e-3)
    assert np.abs(loose.generator - first.generator).max() > 0.1


def test_more_steps_change_less_and_less():
    first = start([0.5, 0.3, 0.2], [0.3, 0.6, 0.5])
    a, b, c = (play(first, steps).generator for steps in (100, 5000, 10_000))
    assert np.abs(c - b).max() < 0.1 < np.abs(b - a).max()


def test_what_is_likely_whatever_was_asked_counts_for_little():
    generate = np.array([[-1.0, -3.0], [-1.0, -6.0]])  # the first is as likely when asked for a wrong answer
    judge = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    made = initial(generate, judge)
    assert made.generator[CORRECT].argmax() == 1 and made.generator[INCORRECT].argmax() == 0
    assert made.discriminator == pytest.approx(np.full((2, 2), 0.5))


def test_the_question_is_computed_once(llm: LLM):
    llm.clear_cache()
    question = TEXT[:600]
    stem = len(llm.encode(question)) // 16 * 16
    found = equilibrium_ranking(llm, question, WORDS)
    assert sorted(found.order) == [0, 1, 2] and found.best == WORDS[found.order[0]]
    ranked = [found.equilibrium.generator[CORRECT, i] for i in found.order]
    assert ranked == sorted(ranked, reverse=True)
    assert found.cached_tokens >= 4 * (stem - 16)  # of five prefixes (two prompts, three candidates) all but the first
    again = equilibrium_ranking(llm, question, WORDS)
    assert again.order == found.order and again.computed_tokens < found.computed_tokens - stem + 16
    assert equilibrium_ranking(llm, question, WORDS[::-1]).best == found.best
    llm.clear_cache()
    assert llm.engine.pool.used == 0


@pytest.mark.parametrize("candidates", [[], ["one"], ["a", "a"], ["a", " "], ["a", 3]])
def test_bad_candidates(llm: LLM, candidates: list[Any]):
    with pytest.raises(BadRequest, match="candidate"):
        equilibrium_ranking(llm, "How often?", candidates)


@pytest.mark.parametrize(
    "values, word", [({"steps": 0}, "steps is 0"), ({"rate": 0.0}, "rate is"), ({"stay": -1}, "stay is")]
)
def test_bad_games(llm: LLM, values: dict[str, Any], word: str):
    with pytest.raises(BadRequest, match=word):
        equilibrium_ranking(llm, "How often?", WORDS, **values)


def test_bad_wording():
    with pytest.raises(BadRequest, match="judge is ''"):
        Wording(judge="")
