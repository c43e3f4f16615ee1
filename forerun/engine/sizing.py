"""How many tokens the KV pool holds: what was asked for, if memory can hold it, or what memory suggests."""

from __future__ import annotations

import psutil
import torch

from forerun.cache.pool import PagePool
from forerun.errors import OutOfPages
from forerun.models.decoder import Decoder


def _page_bytes(decoders: list[Decoder], page_size: int) -> int:
    return sum(PagePool.page_bytes(d.config, page_size, d.dtype) for d in decoders)


def default_kv_cache_tokens(decoders: list[Decoder], context: int, page_size: int = 16) -> int:
    """Room for four full contexts, within a quarter of the memory that is free (CPU) or most of it (CUDA)."""
    per_page = _page_bytes(decoders, page_size)
    if decoders[0].device.type == "cuda":
        room = int(torch.cuda.mem_get_info()[0] * 0.8)
        return max(2, room // per_page) * page_size
    room = psutil.virtual_memory().available // 4
    pages = min(4 * context // page_size, room // per_page)
    return max(2, pages) * page_size


def checked_kv_cache_tokens(asked: int | None, decoders: list[Decoder], page_size: int = 16) -> int | None:
    """What was asked for, if memory can hold it."""
    if asked is None:
        return None
    needed = asked * _page_bytes(decoders, page_size) // page_size
    cuda = decoders[0].device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
    if needed > free:
        raise OutOfPages(
            f"kv_cache_tokens is {asked}: {needed / 1e9:.1f} GB of KV, {free / 1e9:.1f} GB of memory are free",
            f"ask for at most {free * asked // needed} tokens, or leave kv_cache_tokens out",
        )
    return asked
