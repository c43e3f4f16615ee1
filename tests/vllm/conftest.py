"""vLLM itself, its CPU build, with the plugin: `make test-vllm` makes an environment that has both.

Where vLLM is not installed these files are skipped, and the reason is printed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# before vLLM is imported: one engine process a model, small caches, threads left where they are
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm makes a place where it is"
)
BLOCK_SIZE = 32  # the least that the CPU build attends over
CONTEXT = 1024
TRANSFER: dict[str, Any] = {  # --kv-transfer-config
    "kv_connector": "ForerunConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "forerun.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


@dataclass
class VllmAnswer:
    tokens: list[int]
    label: dict[str, Any] | None  # what the plugin reports
    cached: int  # tokens of the prompt that vLLM did not compute


class VllmEngine:
    """One vLLM, driven step by step."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(
        self,
        prompts: list[list[int]],
        options: list[dict[str, Any] | None],
        max_tokens: int = 8,
        salt: str | None = None,
    ) -> list[VllmAnswer]:
        """`options`: of each prompt what it asks of the plugin; None: nothing."""
        given = [{"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt}) for ids in prompts]
        params = [self._params(own, max_tokens) for own in options]
        found = self.llm.generate(given, params, use_tqdm=False)
        return [
            VllmAnswer(
                list(o.outputs[0].token_ids), (o.kv_transfer_params or {}).get("forerun"), o.num_cached_tokens or 0
            )
            for o in found
        ]

    def start(self, name: str, prompt: list[int], options: dict[str, Any] | None, max_tokens: int = 8) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, self._params(options, max_tokens))

    @staticmethod
    def _params(options: dict[str, Any] | None, max_tokens: int) -> Any:
        from vllm import SamplingParams

        extra = None if options is None else {"kv_transfer_params": {"forerun": options}}
        return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)


@contextmanager
def open_vllm(folder: Path, arguments: dict[str, Any] | None = None, **extra: Any) -> Iterator[VllmEngine]:
    """`extra`: the plugin's options; `arguments`: of vLLM, in place of those that are given here."""
    from vllm import LLM

    given: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "num_gpu_blocks_override": 160,
        "kv_transfer_config": TRANSFER | {"kv_connector_extra_config": extra},
    }
    llm = LLM(str(folder), **(given | (arguments or {})))
    try:
        yield VllmEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
