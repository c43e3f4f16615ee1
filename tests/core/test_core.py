"""The nouns: values outside their limits are refused, with the value and the limits in the message."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forerun.core import Prefill, SamplingParams, Usage
from forerun.errors import BadRequest

BAD: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "from 0.0 to 100.0"),
    ("temperature", math.nan, "nan"),
    ("temperature", math.inf, "inf"),
    ("temperature", "hot", "must be a number"),
    ("temperature", True, "must be a number"),
    ("top_p", 0.0, "above 0.0 to 1.0"),
    ("top_p", 1.5, "1.5"),
    ("top_k", -2, "-2"),
    ("top_k", 1.5, "whole number"),
    ("min_p", 2.0, "2.0"),
    ("repetition_penalty", 0.0, "from 0.01"),
    ("presence_penalty", 3.0, "-2.0 to 2.0"),
    ("frequency_penalty", -3.0, "-2.0 to 2.0"),
    ("max_tokens", 0, "from 1"),
    ("max_tokens", 10**9, "1000000000"),
    ("n", 0, "from 1"),
    ("n", 100_000, "256"),
    ("seed", 1.5, "whole number"),
    ("logprobs", 21, "20"),
    ("stop", ("",), "non-empty"),
    ("stop", tuple("abcdefghijklmnopq"), "17 entries"),
    ("logit_bias", {5: 101.0}, "logit_bias\\[5\\]"),
    ("logit_bias", None, "None"),
    ("stop", None, "None"),
    ("stop", 5, "5"),
    ("max_tokens", 10**400, "10000000"),
    ("temperature", -(10**400), "from 0.0"),
]


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_bad_values_are_named(name: str, value: Any, says: str):
    with pytest.raises(BadRequest, match=says) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"budget": 0.5}, "budget 0.5"),
        ({"quality": 0.9}, "quality 0.9"),
        ({"source": "self"}, "source 'self'"),
        ({"chooser": "tail", "allow_exact": True}, "chooser 'tail', allow_exact True"),
    ],
)
def test_what_is_about_drafted_prompts_is_not_ignored_by_exact_ones(given: dict[str, Any], says: str):
    modes: list[dict[str, Any]] = [{}, {"mode": "exact"}]
    for mode in modes:
        with pytest.raises(BadRequest, match=f"prefill is 'exact', and {says} is about drafted prompts") as caught:
            Prefill(**mode, **given)
        assert "speculative or provisional" in caught.value.hint
    assert Prefill("speculative", **given).mode == "speculative"
    assert SamplingParams(prefill=Prefill()).prefill == Prefill("exact") == SamplingParams().prefill


def test_unknown_values_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_one_stop_string_needs_no_tuple():
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_usage_counts_decode_speed_after_the_first_token():
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5, ttft_s=1.0, total_s=3.0)
    assert usage.tokens_per_second == 2.0 and usage.computed_tokens == 6
    assert Usage(completion_tokens=1, ttft_s=1.0, total_s=1.0).tokens_per_second == 0.0
