"""What callers may hand in, on a tiny model: prompts, conversations, options of one call, names that others use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest
from forerun.inputs import weights_mode
from forerun.params import SamplingOptions

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = ["The lamp turns", "A keeper counts the ships", "def turn(lamp):", "twelve times"]
MESSAGES = [{"role": "user", "content": "Who counts the ships?"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("qwen3")), dtype="float32", threads=1, quiet=True) as made:
        yield made


@pytest.mark.parametrize(
    "prompt", [None, b"abc", 1.5, [1.5], [[1.5]], [True], [None], {"role": "user"}, [b"x"], "", [""]]
)
def test_prompts_of_the_wrong_kind_are_refused(llm: LLM, prompt: Any):
    with pytest.raises(BadRequest):
        llm.generate(prompt, PARAMS)
    with pytest.raises(BadRequest):
        next(llm.stream(prompt, PARAMS))


@pytest.mark.parametrize("messages", [None, "hi", ["hi"], [], [[]], {"role": "user"}, [{"content": "x"}], [None]])
def test_conversations_of_the_wrong_kind_are_refused(llm: LLM, messages: Any):
    with pytest.raises(BadRequest):
        llm.chat(messages, PARAMS)


def test_parameters_and_models_of_the_wrong_kind_are_refused(llm: LLM):
    with pytest.raises(BadRequest, match="SamplingParams"):
        llm.generate("hi", {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="NoneType"):
        LLM(None)  # type: ignore[arg-type]


def test_options_of_one_call(llm: LLM) -> None:
    assert llm.generate("fog", max_tokens=3, ignore_eos=True)[0].usage.completion_tokens == 3
    assert llm.generate("fog", PARAMS, max_tokens=3)[0].token_ids == llm.generate("fog", PARAMS)[0].token_ids[:3]
    assert len(list(llm.stream("fog", PARAMS, max_tokens=2, speculation="off"))) == 2
    assert llm.chat(MESSAGES, max_tokens=2, ignore_eos=True)[0].usage.completion_tokens == 2
    assert len(asyncio.run(llm.agenerate("fog", PARAMS, max_tokens=2))[0].token_ids) == 2
    with pytest.raises(BadRequest, match="called 'max_token'") as caught:
        llm.generate("fog", max_token=3)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean max_tokens?"
    for name, hint in (("sampling_params", "as params"), ("best_of", "known are"), ("budget", "prefill=Prefill(")):
        with pytest.raises(BadRequest, match=f"called {name!r}") as caught:
            llm.generate("fog", **{name: PARAMS})  # type: ignore[arg-type]
        assert hint in caught.value.hint
    with pytest.raises(BadRequest, match="temperature is -1"):
        llm.generate("fog", temperature=-1)
    with pytest.warns(DeprecationWarning, match="speculate= is now speculation="):
        llm.generate("fog", PARAMS, speculate="off")  # type: ignore[call-arg]


def test_options_of_one_call_are_the_fields_of_params() -> None:
    assert list(SamplingOptions.__annotations__) == [entry.name for entry in fields(SamplingParams)]


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    each = [replace(PARAMS, max_tokens=number) for number in (1, 2, 3, 4)]
    assert [len(c.token_ids) for c in llm.generate(PROMPTS, each)] == [1, 2, 3, 4]
    assert [len(c.token_ids) for c in asyncio.run(llm.agenerate(PROMPTS, each, n=2))] == [1, 2, 3, 4]
    with pytest.raises(BadRequest, match="4 prompts and 3 params"):
        llm.generate(PROMPTS, each[:3])
    with pytest.raises(BadRequest, match="must be SamplingParams"):
        llm.generate(PROMPTS, {"max_tokens": 3})  # type: ignore[arg-type]


def test_statistics_are_methods_and_old_names_warn(llm: LLM) -> None:
    assert llm.memory_stats()["weights"] > 0 and "drafters" in llm.speculation_stats()
    with pytest.warns(DeprecationWarning, match="LLM.memory is now"):
        assert llm.memory.keys() == llm.memory_stats().keys()
    with pytest.warns(DeprecationWarning, match=r"LLM.speculation\(\) is now"):
        llm.speculation()
    with pytest.warns(DeprecationWarning, match="LLM.profile is now LLM.prefill_profile"):
        assert llm.profile is None


@pytest.mark.parametrize(
    ("dtype", "quantization", "mode"),
    [
        ("auto", None, "auto"),
        ("float16", None, "fp16"),
        ("half", None, "fp16"),
        (torch.bfloat16, None, "bf16"),
        (torch.float32, None, "float32"),
        ("auto", "int8", "int8"),
        ("int8", "int8", "int8"),
    ],
)
def test_weights_are_named_as_others_name_them(dtype: Any, quantization: str | None, mode: str) -> None:
    assert weights_mode(dtype, quantization) == mode


def test_an_unknown_role_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="the role 'wizard'") as caught:
        llm.chat([{"role": "wizard", "content": "Who counts the ships?"}], PARAMS)
    assert "system, user, assistant, tool" in caught.value.hint


def test_what_vllm_users_pass(llm: LLM) -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    with pytest.raises(BadRequest, match="top_k is -2"):
        SamplingParams(top_k=-2)
    limit = llm.engine.config.max_model_len
    whole = llm.generate([5] * (limit - 9), max_tokens=None, ignore_eos=True)[0]
    assert (len(whole.token_ids), whole.finish_reason) == (9, "length")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who counts "}, {"type": "text", "text": "ships?"}]}]
    plain = [{"role": "user", "content": "Who counts ships?"}]
    assert llm.chat(parts, PARAMS)[0] == replace(llm.chat(plain, PARAMS)[0], usage=ANY)
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5):
        with pytest.raises(BadRequest, match="a part of a message is") as caught:
            llm.chat([{"role": "user", "content": [part]}], PARAMS)  # type: ignore[list-item]
        assert "text only" in caught.value.hint


def test_warnings_about_old_names_stand_in_the_callers_file(llm: LLM) -> None:
    async def ask() -> None:
        await llm.agenerate("fog", PARAMS, speculate="off")  # type: ignore[call-arg]

    for use in (
        lambda: llm.generate("fog", PARAMS, speculate="off"),  # type: ignore[call-arg]
        lambda: list(llm.stream("fog", PARAMS, speculate="off")),  # type: ignore[call-arg]
        lambda: asyncio.run(ask()),
        lambda: replace(PARAMS, speculate="off"),  # type: ignore[call-arg]
        lambda: llm.memory,
    ):
        with pytest.warns(DeprecationWarning) as caught:
            use()
        assert [warning.filename for warning in caught] == [__file__]
