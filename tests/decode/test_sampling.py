"""Sampling: hand-written logits in, the distribution that the parameters promise out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from forerun.core import SamplingParams
from forerun.decode.sampling import Context, Row, choose, distribution, draw, logprob, shape, uniform

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]])
P = torch.softmax(LOGITS, -1)[0].tolist()


def row(
    params: SamplingParams,
    prompt: tuple[int, ...] = (0,),
    generated: tuple[int, ...] = (),
    seed: int = 1,
    path: tuple[int, ...] = (),
) -> Row:
    return Row(Context(params, [*prompt, *generated], len(prompt), seed), path)


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
    seen = Counter(token for i in range(count) for token in draw(probs, [uniform(5, i)]).tolist())
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
    assert {int(draw(probs, [u])[0]) for u in (0.0, 0.25, 0.4999999, 0.5, 0.75, 0.999999999)} <= {1, 3}


def test_repetition_penalty_covers_prompt_answer_and_drafted_path():
    params = SamplingParams(repetition_penalty=2.0)
    assert shape(LOGITS, [row(params, (0,), (3,))])[0].tolist() == [1.0, 1.0, 0.0, -2.0, -8.0]
    assert shape(LOGITS, [row(params, (0,), (3,), path=(1,))])[0].tolist() == [1.0, 0.5, 0.0, -2.0, -8.0]


def test_presence_and_frequency_penalties_cover_the_answer_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    expected = [2.0, 1.0 - 0.5 - 0.5, 0.0, -1.0 - 0.5 - 0.25, -8.0]
    assert shape(LOGITS, [row(params, (0,), (1, 1, 3))])[0].tolist() == expected
    assert shape(LOGITS, [row(params, (0,), (1,), path=(1, 3))])[0].tolist() == expected


def test_logit_bias_moves_a_token():
    assert choose(LOGITS, [row(SamplingParams(logit_bias={4: 50.0}))]) == [4]


class Read(list[int]):
    """Tokens, and how often they were read from the first on."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()


def test_rows_of_a_draft_share_the_work_of_their_sequence(monkeypatch: pytest.MonkeyPatch):
    """64 rows, thousands of biases and tokens: done for every row, one such request holds up all others."""
    tokens, made = Read([0, 3]), 0
    context = Context(SamplingParams(logit_bias=dict.fromkeys(range(5), 1.0), repetition_penalty=2.0), tokens, 1, 1)
    alone = [shape(LOGITS, [Row(context, path)])[0].tolist() for path in ((), (1,))]
    tensor = torch.tensor

    def counted(values: object, **options: Any) -> torch.Tensor:
        nonlocal made
        made += isinstance(values, list) and len(values) == 5
        return tensor(values, **options)

    monkeypatch.setattr(torch, "tensor", counted)
    tokens.times = 0
    together = shape(LOGITS.repeat(64, 1), [Row(context, (1,) if i else ()) for i in range(64)])
    assert together[0].tolist() == alone[0] and all(row.tolist() == alone[1] for row in together[1:])
    assert tokens.times == 1 and made == 0


def test_a_constraint_leaves_only_what_it_allows():
    class Odd:
        def allowed(self, path: Sequence[int]) -> torch.Tensor:
            return torch.arange(5) % 2 == 1 if len(path) == 1 else torch.arange(5) == 4

    context = Context(SamplingParams(), [0], 1, 1, Odd())
    assert choose(LOGITS.repeat(2, 1), [Row(context, [0]), Row(context, [])]) == [1, 4]


def test_greedy_and_sampled_rows_share_a_batch():
    hot = SamplingParams(temperature=1.0, seed=3)
    mixed = choose(LOGITS.repeat(3, 1), [row(SamplingParams()), row(hot, seed=9), row(SamplingParams())])
    assert mixed[0] == mixed[2] == 0
    assert mixed[1] == choose(LOGITS, [row(hot, seed=9)])[0]


def test_a_drafted_path_shifts_the_position_of_the_draw():
    hot = SamplingParams(temperature=5.0)
    drawn = [choose(LOGITS, [row(hot, (0,) * n, path=(1,) * (8 - n))])[0] for n in range(1, 8)]
    assert len(set(drawn)) == 1  # the number belongs to the position, not to how it was reached
    others = {choose(LOGITS, [row(hot, (0,) * n)])[0] for n in range(1, 40)}
    assert len(others) > 1


def test_logprobs_are_the_models_own():
    found = logprob(LOGITS[0], 0, SamplingParams(logprobs=2, temperature=3.0))
    assert found is not None and [t for t, _ in found.top] == [0, 1]
    assert found.logprob == pytest.approx(math.log(P[0]), abs=1e-6)
    assert logprob(LOGITS[0], 0, SamplingParams()) is None


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-44])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float):
    assert shaped(temperature=temperature) == [1.0, 0.0, 0.0, 0.0, 0.0]
