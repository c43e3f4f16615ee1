"""Sampling: hand-written logits in, the distribution that the parameters promise out."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from forerun.core import SamplingParams
from forerun.engine.sampler import distribution, draw, penalise, sample, uniform
from forerun.engine.sequence import Request, Sequence
from forerun.models.decoder import Output

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]])
P = torch.softmax(LOGITS, -1)[0].tolist()


def seq(
    params: SamplingParams, prompt: list[int] | None = None, generated: tuple[int, ...] = (), seed: int = 1
) -> Sequence:
    s = Sequence(Request(prompt or [0], params, sink=lambda event: None), 0, seed)
    s.tokens += generated
    return s


def shaped(**values: float) -> list[float]:
    return distribution(LOGITS.clone(), [SamplingParams(**{"temperature": 1.0, **values})])[0].tolist()  # type: ignore[arg-type]


def norm(values: list[float]) -> list[float]:
    return [v / sum(values) for v in values]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, torch.softmax(LOGITS / 0.5, -1)[0].tolist()),
        ({"top_k": 2}, norm([P[0], P[1], 0, 0, 0])),
        ({"top_k": 100}, P),
        ({"top_p": 0.6}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.7}, norm([P[0], P[1], 0, 0, 0])),
        ({"min_p": 0.2}, norm([P[0], P[1], 0, 0, 0])),
        ({"top_k": 3, "top_p": 0.9}, norm([P[0], P[1], 0, 0, 0])),  # top-p among what top-k left: 0.665 < 0.9 <= 0.91
        ({"top_k": 2, "min_p": 0.9}, [1, 0, 0, 0, 0]),
    ],
)
def test_distribution(values: dict[str, float], expected: list[float]):
    assert shaped(**values) == pytest.approx(expected, abs=1e-6)


def test_top_p_on_a_flat_distribution_needs_the_full_sort():
    flat = torch.zeros(1, 5000)
    flat[0, :10] = 0.5
    kept = distribution(flat, [SamplingParams(temperature=1.0, top_p=0.9)])[0]
    assert float(torch.softmax(flat, -1)[0][kept > 0].sum()) >= 0.9
    assert kept[:10].min() > 0


def test_rows_do_not_influence_each_other():
    params = [SamplingParams(temperature=t, top_p=p) for t, p in ((0.3, 1.0), (1.0, 0.8), (2.0, 0.5))]
    rows = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    together = distribution(rows, params)
    for i in range(3):
        assert torch.equal(together[i], distribution(rows[i : i + 1], [params[i]])[0])


def test_drawing_follows_the_distribution():
    """Chi-square over 20,000 draws; a generator off by 2% on a token of probability 0.2 would fail."""
    probs = torch.softmax(LOGITS, -1)
    count = 20_000
    seen = Counter(token for i in range(count) for token in draw(probs, [uniform(5, i)]))
    chi2 = sum((seen[t] - count * p) ** 2 / (count * p) for t, p in enumerate(P))
    assert chi2 < 18.5  # 0.1% point of 4 degrees of freedom


def test_uniform_depends_on_both_numbers_and_is_flat():
    assert uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    values = [uniform(3, i) for i in range(5000)]
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(values) / 5000 - 0.5) < 4 * math.sqrt(1 / 12 / 5000)
    bins = Counter(int(v * 10) for v in values)
    assert all(400 < bins[b] < 600 for b in range(10))


def test_tokens_of_probability_zero_are_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    assert {draw(probs, [u])[0] for u in (0.0, 0.25, 0.4999999, 0.5, 0.75, 0.999999999)} <= {1, 3}


def test_repetition_penalty_covers_prompt_and_answer():
    got = penalise(LOGITS.clone(), [seq(SamplingParams(repetition_penalty=2.0), [0], (3,))])[0].tolist()
    assert got == [1.0, 1.0, 0.0, -2.0, -8.0]


def test_presence_and_frequency_penalties_cover_the_answer_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = penalise(LOGITS.clone(), [seq(params, [0], (1, 1, 3))])[0].tolist()
    assert got == [2.0, 1.0 - 0.5 - 0.5, 0.0, -1.0 - 0.5 - 0.25, -8.0]


def test_logit_bias_moves_a_token():
    tokens = sample(Output(LOGITS), [seq(SamplingParams(logit_bias={4: 50.0}))])
    assert tokens[0].token_id == 4


def test_greedy_and_sampled_rows_share_a_batch():
    rows = LOGITS.repeat(3, 1)
    hot = SamplingParams(temperature=1.0, seed=3)
    mixed = sample(Output(rows), [seq(SamplingParams()), seq(hot, seed=9), seq(SamplingParams(logprobs=2))])
    assert mixed[0].token_id == mixed[2].token_id == 0
    assert mixed[1].token_id == sample(Output(LOGITS), [seq(hot, seed=9)])[0].token_id
    logprob = mixed[2].logprob
    assert logprob is not None and [t for t, _ in logprob.top] == [0, 1]
    assert logprob.logprob == pytest.approx(math.log(P[0]), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float):
    assert shaped(temperature=temperature) == [1.0, 0.0, 0.0, 0.0, 0.0]
