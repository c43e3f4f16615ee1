"""Parameters: one name each, old ones with a warning, errors as Python has them, shapes from Python objects."""

from __future__ import annotations

import json
import traceback
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pydantic
import pytest

from forerun.errors import BadProfile, BadRequest, ForerunError, OutOfPages
from forerun.params import PREFILL_CHOOSERS, PREFILL_SOURCES, VERIFIERS, Grammar, Prefill, SamplingParams, Speculation


def test_a_wrong_value_is_a_value_error_with_its_hint_in_the_traceback() -> None:
    with pytest.raises(ValueError, match="temperature is -1") as caught:
        SamplingParams(temperature=-1)
    error = caught.value
    assert isinstance(error, ForerunError) and error.hint == "choose a value in that range"
    assert "hint" not in str(error)  # the command line prints it on a line of its own
    lines = traceback.format_exception_only(error)
    assert lines[-1].strip() == f"hint: {error.hint}" and "temperature is -1" in lines[-2]
    assert isinstance(BadProfile("none"), ValueError)
    assert not isinstance(OutOfPages("full"), ValueError) and "hint" not in "".join(
        traceback.format_exception_only(OutOfPages("full"))
    )


def test_names_become_objects_once() -> None:
    params = SamplingParams(speculation="lookup", prefill="speculative")
    assert params.speculation == Speculation("lookup") and params.prefill == Prefill("speculative")
    assert replace(params, temperature=1.0).speculation is params.speculation
    for name in ("speculation", "prefill"):
        with pytest.raises(BadRequest, match=f"{name} must be a name or a"):
            SamplingParams(**{name: 5})  # type: ignore[arg-type]


def test_old_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="speculate= is now speculation="):
        params = SamplingParams(speculate="off")  # type: ignore[call-arg]
    assert params == SamplingParams(speculation="off")
    with pytest.warns(DeprecationWarning, match="SamplingParams.speculate is now SamplingParams.speculation"):
        assert params.speculate is params.speculation  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="SamplingParams.prefilling is now"):
        assert params.prefilling.exact  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="speculate and speculation are the same"):
        SamplingParams(speculate="off", speculation="off")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="speculate= is now speculation="):
        assert replace(SamplingParams(top_k=3), speculate="off") == SamplingParams(top_k=3, speculation="off")  # type: ignore[call-arg]


@pytest.mark.parametrize("key", [True, -1, 1.0, "5", None])
def test_keys_of_logit_bias_are_token_ids(key: Any) -> None:
    with pytest.raises(BadRequest, match="logit_bias has the key"):
        SamplingParams(logit_bias={key: 1.0})


@pytest.mark.parametrize("name", ["ignore_eos", "cache", "timeline"])
@pytest.mark.parametrize("value", [1, "yes", None])
def test_switches_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"{name} must be true or false"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda value: Prefill(mode=value),
        lambda value: Prefill("speculative", source=value),
        lambda value: Grammar(kind=value),
        lambda value: Speculation(drafter=value),
        lambda value: SamplingParams(stop=value),
        lambda value: SamplingParams(temperature=value),
        lambda value: SamplingParams(prediction=value),
    ],
)
def test_arrays_are_refused_cleanly(make: Any) -> None:
    with pytest.raises(BadRequest):
        make(np.zeros(3))


def test_grammars_come_from_python_objects() -> None:
    class Ship(pydantic.BaseModel):
        name: str
        masts: int

    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    assert Grammar.json(schema) == Grammar("json_schema", json.dumps(schema)) == Grammar("json_schema", schema)
    assert json.loads(Grammar.json(Ship).source) == Ship.model_json_schema()
    assert json.loads(Grammar.json(Ship(name="Ann", masts=2)).source) == Ship.model_json_schema()
    assert Grammar.json() == Grammar("json_object")
    assert Grammar.regex("[0-9]+") == Grammar("regex", "[0-9]+") and Grammar.lark("start: A").kind == "lark"
    for wrong in (5, object(), {"x": object()}, {1, 2}):
        with pytest.raises(BadRequest, match="JSON"):
            Grammar.json(wrong)
    with pytest.raises(BadRequest, match="source of a regex grammar is text"):
        Grammar("regex", {"a": 1})


def test_a_prediction_is_text_or_token_ids() -> None:
    assert SamplingParams(prediction=[1, 2]).prediction == (1, 2)
    assert SamplingParams(prediction="as said before").prediction == "as said before"
    for wrong in ([True], ["a"], 5):
        with pytest.raises(BadRequest, match="prediction must be text or"):
            SamplingParams(prediction=wrong)  # type: ignore[arg-type]


def test_every_option_has_help_and_numbers_have_limits() -> None:
    for kind in (SamplingParams, Speculation, Prefill):
        for entry in fields(kind):
            assert entry.metadata["help"].endswith("."), entry.name
            if entry.type in ("int", "float", "int | None", "float | None"):
                assert entry.metadata["low"] < entry.metadata["high"]


def test_known_names_are_those_that_exist() -> None:
    from forerun.decode.verifiers import LOSSLESS, LOSSY
    from forerun.prefill.choosers import CHOOSERS

    assert set(PREFILL_CHOOSERS) == {"auto", "cross", *CHOOSERS}
    assert set(VERIFIERS) == {"auto", *LOSSLESS, *LOSSY}
    assert set(PREFILL_SOURCES) == {"auto", "draft", "self", "chunk"}


def test_settings_that_a_model_recommends() -> None:
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).greedy
    made = SamplingParams.from_generation_config({"do_sample": True, "top_p": 0.8, "top_k": 20, "eos_token_id": 2})
    assert (made.temperature, made.top_p, made.top_k) == (1.0, 0.8, 20)
