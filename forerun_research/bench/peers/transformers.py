"""transformers as a side of a bench: its own generate on the same tensors, float32 on CPU and bf16 on CUDA."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.errors import BadRequest
from forerun.models.build import choose_device
from forerun.models.formats.checkpoint import Checkpoint
from forerun_research.bench.common import package_version
from forerun_research.bench.peers.hf_model import hf_from_checkpoint
from forerun_research.bench.sides import Sample, SideSpec

__all__ = ["TransformersSide", "hf_from_checkpoint"]


class _Times:
    """A streamer that notes when each token came; generate calls `put` for the prompt and then for every token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Part of the streamer contract; there is nothing to finish."""


class TransformersSide:
    def __init__(self, spec: SideSpec) -> None:
        try:
            import transformers
        except ImportError:
            raise BadRequest(
                "transformers is not installed", "pip install 'forerun[bench]', or use --against none"
            ) from None
        transformers.logging.set_verbosity_error()
        self.device = choose_device(spec.device)
        if self.device.type == "cpu":
            torch.set_num_threads(spec.threads)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        checkpoint = _open(spec, self.device)
        self.eos = list(checkpoint.config.eos_ids)
        self.model = self._load(checkpoint)
        self.draft = None if spec.draft is None else self._load(_open(replace(spec, model=spec.draft), self.device))
        # Answers have a fixed length: an end-of-text token is a token like any other.
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = None

    def _load(self, checkpoint: Checkpoint) -> Any:
        model = hf_from_checkpoint(checkpoint, device=self.device, dtype=self.dtype)
        checkpoint.release()
        return model

    def about(self) -> dict[str, Any]:
        weights = str(self.dtype).removeprefix("torch.")
        return {"weights": weights, "version": package_version("transformers")}

    def decode(self, ids: list[int], tokens: int) -> Sample:
        times = _Times()
        self._wait()
        start = time.perf_counter()
        out = self._generate(torch.tensor([ids], device=self.device), tokens, streamer=times)
        first, last = times.at[1], times.at[-1]  # at[0] is the prompt
        per_token = (last - first) / max(1, tokens - 1)
        return {
            "ttft_s": first - start,
            "ms_per_token": 1000 * per_token,
            "tokens_per_s": 1 / per_token if per_token else 0.0,
            "token_ids": out[0, len(ids) :].tolist(),
        }

    def prefill(self, ids: list[int]) -> Sample:
        self._wait()
        start = time.perf_counter()
        self._generate(torch.tensor([ids], device=self.device), 1)
        self._wait()
        return {"ttft_s": time.perf_counter() - start}

    def batch(self, prompts: list[list[int]], tokens: int) -> Sample:
        self._wait()
        start = time.perf_counter()
        made = self._continuous(prompts, tokens) if self.device.type == "cuda" else self._padded(prompts, tokens)
        self._wait()
        total = time.perf_counter() - start
        assert made == tokens * len(prompts), f"{made} tokens instead of {tokens * len(prompts)}"
        return {"total_s": total, "tokens_per_s": made / total}

    def answer(self, ids: list[int], tokens: int, assisted: bool) -> Sample:
        """One greedy answer that ends where the model ends it; `assisted`: with the draft model."""
        self._wait()
        options = {"assistant_model": self.draft} if assisted else {}
        start = time.perf_counter()
        out = self._generate(torch.tensor([ids], device=self.device), tokens, eos_token_id=self.eos or None, **options)
        self._wait()
        return {"total_s": time.perf_counter() - start, "token_ids": out[0, len(ids) :].tolist()}

    def _continuous(self, prompts: list[list[int]], tokens: int) -> int:
        """Its own continuous batching; the manager is kept between runs, so that only the first one pays for it."""
        import transformers

        config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        answers = self.model.generate_batch(
            inputs=prompts, generation_config=config, progress_bar=False, persistent_manager=True
        )
        return sum(len(answer.generated_tokens) for answer in answers.values())

    def _padded(self, prompts: list[list[int]], tokens: int) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)  # [B, width]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        return self._generate(ids, tokens, attention_mask=mask)[:, width:].numel()

    def _generate(self, ids: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
        options.setdefault("attention_mask", torch.ones_like(ids))
        with torch.inference_mode():
            return self.model.generate(
                ids, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0, **options
            )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _open(spec: SideSpec, device: torch.device) -> Checkpoint:
    if spec.shape is not None:
        from forerun_research.bench.shapes import RandomCheckpoint

        return RandomCheckpoint(spec.shape, device)
    from forerun.models.fetch.store import resolve
    from forerun.models.formats.checkpoint import open_checkpoint

    return open_checkpoint(Path(resolve(spec.model)))
