"""Whether to draft is known before reading: simulated machines, lengths and texts, with bounds on what a request
loses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from forerun.prefill.forecast import MIN_OBSERVATIONS, PrefillForecast

LENGTHS = [64, 512, 2048, 8192, 32768]
REQUESTS = 600
COST = 0.48  # of exact prefill's work, planned


@dataclass(frozen=True)
class Machine:
    """Seconds of exact prefill: a token, a pair of tokens, a prompt; of drafting: a factor on its work, and a
    prompt."""

    device: str
    token_s: float
    pair_s: float
    prompt_s: float
    factor: float
    drafted_s: float

    def exact_s(self, tokens: int) -> float:
        return self.prompt_s + self.token_s * tokens + self.pair_s * tokens * tokens


MACHINES = {
    "two cores": Machine("cpu", 1.1e-3, 6e-8, 0.01, 1.2, 0.02),
    "busy cores": Machine("cpu", 4e-3, 2e-7, 0.05, 1.3, 0.1),
    "fast GPU": Machine("cuda", 5e-6, 1.5e-10, 3e-3, 1.1, 0.015),
    "slow host": Machine("cuda", 5e-6, 1.5e-10, 3e-3, 1.5, 0.04),
    "drafts never pay": Machine("cpu", 1.1e-3, 6e-8, 0.01, 2.9, 0.05),
}
TEXTS = {  # probability that a first check fails, and a last one
    "like the calibration's": (0.0, 0.0),
    "now and then unlike": (0.02, 0.005),
    "never passes a first check": (1.0, 0.0),
    "passes the first, not the last": (0.0, 1.0),
}


def simulated(machine: Machine, tokens: int, early: float, late: float) -> tuple[np.ndarray, int]:
    """Seconds of each request over those of exact prefill, without the noise of a clock, and how many were drafted."""
    draw = np.random.default_rng(tokens)
    forecast, exact_s = PrefillForecast(machine.device), machine.exact_s(tokens)
    if machine.device == "cuda":
        forecast.observe_exact(2048, machine.exact_s(2048))  # as a model is opened there
    ratios, drafted = np.ones(REQUESTS), 0
    for i in range(REQUESTS):
        noise = draw.lognormal(0.0, 0.05)
        if forecast.why_exact("self", tokens, COST):
            forecast.observe_exact(tokens, exact_s * noise)
            continue
        drafted += 1
        fails_early, fails_late = draw.random() < early, draw.random() < late
        if fails_early or fails_late:
            spent = min(384 / tokens, 1.0) * COST if fails_early else COST
            ratios[i] = 1.0 + spent * machine.factor
            forecast.record_fallback("self", tokens, 1.0 + spent, spent * machine.factor * exact_s * noise)
            forecast.observe_exact(tokens, exact_s * noise)
            continue
        seconds = machine.factor * COST * exact_s + machine.drafted_s
        ratios[i] = seconds / exact_s
        forecast.observe_drafted("self", tokens, COST, seconds * noise)
    return ratios, drafted


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_few_requests_are_slower_than_exact_prefill(tokens: int, machine: str, text: str):
    ratios, _ = simulated(MACHINES[machine], tokens, *TEXTS[text])
    assert np.quantile(ratios, 0.95) <= 1.05
    assert np.quantile(ratios, 0.99, method="inverted_cdf") <= 1.2


@pytest.mark.parametrize("machine", ["two cores", "busy cores", "fast GPU"])
def test_where_drafting_pays_it_is_done(machine: str):
    ratios, drafted = simulated(MACHINES[machine], 32768, 0.0, 0.0)
    assert drafted == REQUESTS - 1 and ratios.mean() < 0.75
    # one of them was computed exactly, to compare with
    ratios, drafted = simulated(MACHINES[machine], 32768, 0.02, 0.0)
    assert drafted > 0.9 * REQUESTS


def test_where_nothing_is_known_of_a_gpu_prompts_are_computed():
    assert "not timed" in PrefillForecast("cuda").why_exact("draft", 8192, 0.38)
    forecast = PrefillForecast("cuda")
    forecast.observe_exact(2048, 0.0175)
    assert "2048 tokens" in forecast.why_exact("draft", 2048, 0.38)  # 15 ms of its own beside 17.5
    assert not forecast.why_exact("draft", 8192, 0.38)


def test_what_was_slow_once_is_tried_again():
    forecast = PrefillForecast("cpu")
    forecast.observe_exact(2048, 2.0)
    for _ in range(MIN_OBSERVATIONS):
        assert not forecast.why_exact("self", 2048, COST)
        forecast.observe_drafted("self", 2048, COST, 8.0)
    skipped = 0
    while forecast.why_exact("self", 2048, COST):
        skipped += 1
        assert skipped < 10_000
    assert skipped > 100
    assert not forecast.why_exact("draft", 2048, COST)  # another source has its own record
    assert not forecast.why_exact("self", 8192, COST)  # and so has another length


def test_kernels_that_a_first_prompt_compiles_teach_nothing():
    forecast, slow = PrefillForecast("cuda"), PrefillForecast("cuda")
    for one in (forecast, slow):
        one.observe_exact(8192, 0.05)
    forecast.observe_drafted("draft", 8192, 0.38, 1.5)
    for _ in range(4):
        assert not forecast.why_exact("draft", 8192, 0.38)
        forecast.observe_drafted("draft", 8192, 0.38, 0.032)
    for _ in range(MIN_OBSERVATIONS + 1):  # where it is not the first alone it counts
        slow.observe_drafted("draft", 8192, 0.38, 1.5)
    assert "is expected to take" in slow.why_exact("draft", 8192, 0.38)


def test_a_prompt_that_fails_late_is_followed_by_many_exact_ones():
    forecast = PrefillForecast("cpu")
    assert not forecast.why_exact("self", 2048, COST)
    forecast.record_fallback("self", 2048, 1.5, 1.0)
    exact = 0
    while why := forecast.why_exact("self", 2048, COST):
        assert "took longer than exact" in why
        exact += 1
    assert exact == 148  # the two that were drafted make 150, of which one is slow


def test_provisional_answers_are_not_begun_where_few_words_stand():
    forecast = PrefillForecast("cpu")
    begun = shown = stood = 0
    for _ in range(40):  # of each answer one token stands, as on the default model and an essay
        if not forecast.why_not_provisional("self", 0.907):
            begun, limit = begun + 1, forecast.max_shown("self", 0.907)
            shown, stood = shown + limit, stood + 1
            forecast.record_provisional("self", 0.907, limit, 1)
    assert 1 <= begun < 8 and shown < 60 and "expected to stand" in forecast.why_not_provisional("self", 0.907)
    assert not forecast.why_not_provisional("chunk", 1.0)  # another source has its own record


def test_as_many_words_are_shown_as_stand():
    forecast = PrefillForecast("cpu")
    first = forecast.max_shown("chunk", 1.0)
    for _ in range(20):
        forecast.record_provisional("chunk", 1.0, 6, 4)
    assert forecast.max_shown("chunk", 1.0) < first and not forecast.why_not_provisional("chunk", 1.0)
    for _ in range(30):
        forecast.record_provisional("chunk", 1.0, 48, 48)
    assert forecast.max_shown("chunk", 1.0) == 64
    assert "expected to stand" in forecast.why_not_provisional("draft", 0.7)  # known from the curve


def test_a_source_that_failed_is_tried_again():
    forecast = PrefillForecast("cpu")
    for _ in range(4):
        forecast.record_provisional("self", 0.92, 20, 1)
    skipped = 0
    while forecast.why_not_provisional("self", 0.92):
        skipped += 1
        assert skipped < 10_000
    assert skipped > 20
