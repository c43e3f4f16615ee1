"""How large a KV pool is made: by what was asked, by free memory, by a share of the GPU; what cannot be is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forerun.engine import config
from forerun.errors import BadRequest, OutOfPages

PAGE_BYTES = 1000  # of one page of 16 tokens


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two models on a device with 100,000 bytes of which 60,000 are free; their pages have 1,000 bytes together."""
    monkeypatch.setattr(config.PagePool, "page_bytes", lambda *args: PAGE_BYTES // 2)
    monkeypatch.setattr(config.torch.cuda, "mem_get_info", lambda: (60_000, 100_000))
    monkeypatch.setattr(config.psutil, "virtual_memory", lambda: SimpleNamespace(available=60_000))

    def make(device: str) -> Any:
        return [SimpleNamespace(device=SimpleNamespace(type=device), config=None, dtype=None)] * 2

    return make


def test_a_cpu_takes_four_contexts_within_a_quarter_of_what_is_free(decoders: Any) -> None:
    assert config.size_kv_cache(decoders("cpu"), context=32) == 4 * 32
    assert config.size_kv_cache(decoders("cpu"), context=4096) == 15 * 16


def test_a_gpu_takes_most_of_what_is_free(decoders: Any) -> None:
    assert config.size_kv_cache(decoders("cuda"), context=32) == 48 * 16


def test_a_share_of_the_gpu_includes_what_is_taken(decoders: Any) -> None:
    assert config.size_kv_cache(decoders("cuda"), 32, gpu_memory_utilization=0.9) == 50 * 16
    with pytest.raises(OutOfPages, match="are taken"):
        config.size_kv_cache(decoders("cuda"), 32, gpu_memory_utilization=0.4)
    for wrong in (0.0, 1.5, True, "half"):
        with pytest.raises(BadRequest, match="gpu_memory_utilization is"):
            config.size_kv_cache(decoders("cuda"), 32, gpu_memory_utilization=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="both size the KV pool"):
        config.size_kv_cache(decoders("cuda"), 32, 160, 0.9)
    with pytest.raises(BadRequest, match="the device is cpu"):
        config.size_kv_cache(decoders("cpu"), 32, gpu_memory_utilization=0.9)


def test_what_was_asked_must_fit(decoders: Any) -> None:
    assert config.size_kv_cache(decoders("cpu"), 32, 960) == 960
    with pytest.raises(OutOfPages, match="kv_cache_tokens is 976") as caught:
        config.size_kv_cache(decoders("cpu"), 32, 976)
    assert "at most 960 tokens" in caught.value.hint


def test_a_bound_of_gaps_is_a_number_above_zero() -> None:
    assert config.EngineConfig(512, 1024, max_gap_ms=40).max_gap_ms == 40
    for wrong in (0, -1.0, True, "40"):
        with pytest.raises(BadRequest, match="max_gap_ms"):
            config.EngineConfig(512, 1024, max_gap_ms=wrong)  # type: ignore[arg-type]
