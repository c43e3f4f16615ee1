"""The limits of one engine, and how many tokens its KV pool holds: what was asked for, or what memory suggests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from forerun.cache.pool import PagePool
from forerun.core import KVShape
from forerun.errors import BadRequest, OutOfPages
from forerun.models.decoder import Decoder
from forerun.options import check_number

CPU_FREE_SHARE = 0.25  # of the memory that is free: other programs run on this machine, too
CUDA_FREE_SHARE = 0.8  # activations, recorded graphs and drafters take the rest
DEFAULT_CONTEXTS = 4  # full contexts that a pool on a CPU has room for


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one engine; every value is checked on creation."""

    max_model_len: int
    kv_cache_tokens: int
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    max_gap_ms: float | None = None  # of a step with prompt tokens beside streams; None: by measured steps

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_tokens", "page_size", "max_num_seqs", "max_num_batched_tokens"):
            check_number(name, getattr(self, name), 1, whole=True)
        if self.max_gap_ms is not None:
            check_number("max_gap_ms", self.max_gap_ms, 0, open_low=True)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadRequest(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}",
                "a step holds one token of every running request: raise max_num_batched_tokens or lower max_num_seqs",
            )
        if self.kv_cache_tokens < 2 * self.page_size:
            problem = f"kv_cache_tokens is {self.kv_cache_tokens}, less than two pages of {self.page_size}"
            raise BadRequest(problem, "raise it")

    @property
    def capacity(self) -> int:
        """Tokens that whole pages of the pool hold; one sequence can never have more."""
        return self.kv_cache_tokens // self.page_size * self.page_size


def size_kv_cache(
    decoders: list[Decoder],
    context: int,
    asked: int | None = None,
    gpu_memory_utilization: float | None = None,
    page_size: int = 16,
    beside: Sequence[KVShape] = (),
) -> int:
    """`asked` tokens, if memory can hold them; else by memory. `gpu_memory_utilization`: share of the GPU's memory.
    `beside`: what else lies on the pages, in the first decoder's dtype."""
    cuda = decoders[0].device.type == "cuda"
    shapes = [(d.config, d.dtype) for d in decoders] + [(shape, decoders[0].dtype) for shape in beside]
    page_bytes = sum(PagePool.page_bytes(shape, page_size, dtype) for shape, dtype in shapes)
    if gpu_memory_utilization is not None:
        if not cuda:
            raise BadRequest("gpu_memory_utilization is about CUDA, and the device is cpu", "give kv_cache_tokens")
        if asked is not None:
            raise BadRequest("kv_cache_tokens and gpu_memory_utilization both size the KV pool", "leave one out")
    free, total = torch.cuda.mem_get_info() if cuda else (psutil.virtual_memory().available, 0)
    if asked is not None:
        needed = asked * page_bytes // page_size
        if needed > free:
            problem = f"kv_cache_tokens is {asked}: {needed / 1e9:.1f} GB of KV, {free / 1e9:.1f} GB of memory are free"
            raise OutOfPages(problem, f"ask for at most {free * asked // needed} tokens, or leave kv_cache_tokens out")
        return asked
    if gpu_memory_utilization is not None:
        return _utilised(gpu_memory_utilization, free, total, page_bytes) * page_size
    pages = int(free * (CUDA_FREE_SHARE if cuda else CPU_FREE_SHARE)) // page_bytes
    return max(2, pages if cuda else min(DEFAULT_CONTEXTS * context // page_size, pages)) * page_size


def _utilised(share: float, free: int, total: int, page_bytes: int) -> int:
    """Pages within a share of the GPU's memory, of which weights and other programs have taken a part."""
    check_number("gpu_memory_utilization", share, 0, 1, open_low=True, hint="use 0.9, for instance")
    pages = (int(share * total) - (total - free)) // page_bytes
    if pages < 2:
        raise OutOfPages(
            f"gpu_memory_utilization is {share}: {share * total / 1e9:.1f} GB, {(total - free) / 1e9:.1f} GB are taken",
            "raise it, or free memory of the GPU",
        )
    return pages
