"""llama.cpp as a side of a bench, through llama-cpp-python on the same .gguf file."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from forerun.errors import BadRequest
from forerun.models.fetch.store import resolve
from forerun_research.bench.common import package_version
from forerun_research.bench.sides import Sample, SideSpec


class LlamaCppSide:
    def __init__(self, spec: SideSpec) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise BadRequest(
                "llama-cpp-python is not installed",
                "pip install 'forerun[llama-cpp]' (it compiles llama.cpp), or use --against transformers",
            ) from None
        path = resolve(spec.model)
        if path.suffix != ".gguf":
            raise BadRequest(f"llama.cpp reads .gguf files, {path} is not one", "choose a .gguf model")
        self._get_logits = llama_cpp.llama_get_logits_ith
        self.llama = llama_cpp.Llama(
            str(path),
            n_ctx=spec.context,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
            n_gpu_layers=0 if spec.device == "cpu" else -1,
            logits_all=False,
            verbose=False,
        )

    def about(self) -> dict[str, Any]:
        return {"weights": "as in the file", "version": package_version("llama-cpp-python")}

    def decode(self, ids: list[int], tokens: int) -> Sample:
        start = time.perf_counter()
        made = [self._first(ids)]
        first = time.perf_counter()
        while len(made) < tokens:
            self.llama.eval([made[-1]])
            made.append(self._likeliest())
        per_token = (time.perf_counter() - first) / max(1, tokens - 1)
        return {
            "ttft_s": first - start,
            "ms_per_token": 1000 * per_token,
            "tokens_per_s": 1 / per_token if per_token else 0.0,
            "token_ids": made,
        }

    def prefill(self, ids: list[int]) -> Sample:
        start = time.perf_counter()
        self._first(ids)
        return {"ttft_s": time.perf_counter() - start}

    def batch(self, prompts: list[list[int]], tokens: int) -> Sample:
        raise BadRequest("llama-cpp-python runs one request at a time", "use --against transformers")

    def _first(self, ids: list[int]) -> int:
        self.llama.reset()
        self.llama.eval(ids)
        return self._likeliest()

    def _likeliest(self) -> int:
        """Greedy straight from the logits: a sampler chain would add time that is not the model's."""
        logits = np.ctypeslib.as_array(self._get_logits(self.llama.ctx, -1), shape=(self.llama.n_vocab(),))
        return int(logits.argmax())
