"""What is refused at start, in configurations that vLLM itself makes: the names that are read are really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from forerun.vllm.settings import is_used, refusal
from tests import tiny
from tests.vllm.conftest import TRANSFER, needs_vllm
from tests.vllm.test_plugin import SHAPE

pytestmark = needs_vllm


def vllm_config(folder: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "kv_transfer_config": TRANSFER}
    return EngineArgs(model=str(folder), **(given | arguments)).create_engine_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("qwen2"), "qwen2", **SHAPE)


def test_what_is_served(folder: Path) -> None:
    config = vllm_config(folder)
    assert is_used(config) and refusal(config) is None
    assert not is_used(vllm_config(folder, kv_transfer_config=None))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism (2)"),
        ({"tensor_parallel_size": 2}, "tensor parallelism (2)"),
        ({"kv_cache_dtype": "fp8"}, "K/V in fp8"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "K/V in fp8_e5m2"),
        ({"enable_lora": True}, "LoRA"),
        ({"kv_transfer_config": TRANSFER | {"kv_load_failure_policy": "fail"}}, "kv_load_failure_policy is 'fail'"),
    ],
)
def test_options_that_are_refused(arguments: dict[str, Any], text: str, folder: Path) -> None:
    problem = refusal(vllm_config(folder, **arguments))
    assert problem is not None and text in str(problem) and problem.hint


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (
            "DeepseekV2",
            {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
            | {"n_routed_experts": 2, "first_k_dense_replace": 2},
            "MLA",
        ),
        ("Jamba", {"num_key_value_heads": 1, "num_experts": 2, "mamba_dt_rank": 8}, "a hybrid model"),
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}, "the architecture ['OPTForCausalLM']"),
    ],
)
def test_models_that_are_refused(kind: str, values: dict[str, Any], text: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 512}
    made = getattr(transformers, f"{kind}Config")(**(shape | values))
    made.architectures = [f"{kind}ForCausalLM"]
    made.save_pretrained(tmp_path)
    problem = refusal(vllm_config(tmp_path))
    assert problem is not None and text in str(problem) and problem.hint
