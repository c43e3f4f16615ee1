"""Quality figures on hand-written logits, where the right values are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.checks.quality import COMPARED_ROWS, compare, measure_modes
from forerun.errors import BadRequest


def test_equal_logits_lose_nothing() -> None:
    torch.manual_seed(0)
    ids, logits = torch.randint(0, 50, (2 * COMPARED_ROWS + 3,)), torch.randn(2 * COMPARED_ROWS + 3, 50)
    found = compare("x", "text", ids, logits, logits)
    assert found.kl == 0.0 and found.top1 == 1.0
    assert found.perplexity == found.reference_perplexity
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert math.log(found.perplexity) == pytest.approx(float(expected), rel=1e-5)


def test_figures_of_two_known_distributions() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.1, 0.9], [0.5, 0.5]]).log()
    found = compare("x", "text", torch.tensor([0, 1, 0]), reference, other)
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    assert found.kl == pytest.approx((first + second) / 2, rel=1e-5)
    assert found.top1 == 0.0  # the last position has no next token and does not count
    assert found.perplexity == pytest.approx((0.75 * 0.1) ** -0.5, rel=1e-5)
    assert found.reference_perplexity == pytest.approx((0.5 * 0.9) ** -0.5, rel=1e-5)


def test_measure_runs_both_modes_of_a_model(tiny_folder: Callable[[str], Path]) -> None:
    text = {"lamp": "The lamp turns twelve times a minute. " * 4}
    found = measure_modes(str(tiny_folder("qwen2")), ["int8"], text, tokens=40, threads=1)[0]
    assert found.weights == "int8" and found.tokens == 40
    assert 0 < found.kl < 1 and 0 < found.top1 <= 1


def test_a_text_too_short_to_measure_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(BadRequest, match="at least 2"):
        measure_modes(str(tiny_folder("llama")), ["int8"], {"a": "a"}, tokens=1)
