"""The HTTP schema has the fields, defaults, limits and help of the dataclasses in `forerun.params`, and no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from forerun.params import Prefill, SamplingParams, Speculation
from forerun.serve.derived import derived
from forerun.serve.schema import ChatRequest, CompletionRequest, ForerunOptions
from tests.serve.common import ASKED, CHAT, Running, error

SCHEMA: dict[str, Any] = ChatRequest.model_json_schema()
OWN = SCHEMA["$defs"]["ForerunOptions"]["properties"]


def same(shown: dict[str, Any], entry: dataclasses.Field[Any]) -> None:
    about = entry.metadata
    assert shown["description"] == about["help"]
    low = "exclusiveMinimum" if about.get("open_low") else "minimum"
    assert (shown.get(low), shown.get("maximum")) == (about.get("low"), about.get("high"))
    assert shown.get("examples") == (list(about["choices"]) if "choices" in about else None)


@pytest.mark.parametrize(("name", "options"), [("PrefillOptions", Prefill), ("SpeculationOptions", Speculation)])
def test_options_are_those_of_the_dataclass(name: str, options: type):
    shown = SCHEMA["$defs"][name]["properties"]
    assert list(shown) == [entry.name for entry in dataclasses.fields(options)]
    for entry in dataclasses.fields(options):
        same(shown[entry.name], entry)
        assert shown[entry.name]["default"] == entry.default


def test_sampling_fields_are_those_of_sampling_params():
    entries = {entry.name: entry for entry in dataclasses.fields(SamplingParams)}
    for request in (ChatRequest, CompletionRequest):
        shown = request.model_json_schema()["properties"]
        for name in ("n", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty"):
            same(shown[name], entries[name])
            assert shown[name]["default"] is None  # left out: the library's
    for name in ("cache", "top_k", "min_p", "repetition_penalty", "ignore_eos"):
        same(OWN[name], entries[name])
        assert OWN[name]["default"] == entries[name].default
    elsewhere = {"stop", "logprobs", "logit_bias", "grammar", "speculation", "prefill", "prediction", "timeline"}
    assert set(entries) - set(SCHEMA["properties"]) - set(OWN) <= elsewhere
    assert all(field.get("description") for name, field in OWN.items()), OWN


def test_what_is_left_out_is_the_librarys_default():
    body = ChatRequest(model="x", messages=[{"role": "user", "content": "x"}])
    params = body.params(SamplingParams().max_tokens, None, lambda text: [])
    assert params == SamplingParams()
    assert ForerunOptions().params()["prefill"] == Prefill().mode


def test_a_new_option_needs_no_second_spelling():
    @dataclasses.dataclass(frozen=True)
    class Extended(Speculation):
        sparkle: int = dataclasses.field(default=3, metadata={"help": "Shine.", "low": 0, "high": 9})

    made = derived("Extended", Extended)
    shown = made.model_json_schema()["properties"]["sparkle"]
    assert made().sparkle == 3 and shown["maximum"] == 9 and shown["description"] == "Shine."


def test_speculation_has_its_old_name_until_the_next_release():
    old, new = (ForerunOptions(**{name: "lookup"}).params() for name in ("speculate", "speculation"))
    assert old == new and new["speculation"] == "lookup"
    with pytest.raises(ValueError, match="speculate"):
        ForerunOptions(speculate="off", speculation="auto")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forerun": {"prefill": {"mode": "speculative", "budget": 0}}}, "budget is 0"),
        ({"forerun": {"speculation": {"nodes": 513}}}, "nodes is 513"),
        ({"forerun": {"top_k": -2}}, "top_k is -2"),
        ({"top_p": -0.5}, "top_p is -0.5"),
    ],
)
def test_limits_are_checked_in_the_dataclass(served: Running, change: dict[str, Any], words: str):
    assert words in error(served.post(CHAT, ASKED | change), 400)["message"]
