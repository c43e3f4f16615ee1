"""Arrays on their way to a device: one copy of several holds what each of them held, where kernels expect it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import HostBatch
from forerun.core.batch import ALIGNED_BYTES, _unpack, send, send_together

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.sampled_from([np.int32, np.int64]), st.integers(0, 40), st.booleans()), max_size=8))
def test_several_arrays_in_one_copy(asked: list[tuple[type, int, bool]]):
    draw = np.random.default_rng(len(asked))
    arrays: list[np.ndarray] = [draw.integers(-(2**31), 2**31, count).astype(kind) for kind, count, _ in asked]
    arrays = [array[None] if flat else array for array, (_, _, flat) in zip(arrays, asked, strict=True)]
    sent = send_together(arrays, CPU)
    for array, tensor in zip(arrays, sent, strict=True):
        like = torch.from_numpy(array)
        assert tensor.dtype == like.dtype and tensor.shape == like.shape and torch.equal(tensor, like)
        assert tensor.is_contiguous() and tensor.stride() == torch.empty(array.shape).stride()
        assert tensor.storage_offset() * tensor.element_size() % ALIGNED_BYTES == 0


def test_arrays_that_are_no_runs_of_memory():
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    turned, every = send_together([table.T, np.arange(9)[::2]], CPU)
    assert turned.tolist() == table.T.tolist() and every.tolist() == [0, 2, 4, 6, 8]


def test_other_numbers_are_refused():
    with pytest.raises(KeyError):
        send_together([np.zeros(3)], CPU)


def test_on_a_cpu_nothing_is_copied():
    values = np.arange(5)
    sent = send(values, CPU)
    values[2] = 9
    assert sent.tolist() == [0, 1, 9, 3, 4]


def test_a_batch_in_one_copy_is_the_same_batch(monkeypatch: pytest.MonkeyPatch):
    """What CUDA gets, on a CPU."""
    ids, seen = np.arange(5), np.arange(1, 6, dtype=np.int32)
    pages = [np.array([3, 1], dtype=np.int32), np.array([2], dtype=np.int32)]
    host = HostBatch(ids, ids + 10, np.array([48, 49, 50, 32, 33]), seen, [0, 3, 5], [3, 5], pages, 16, [2, 4])
    plain = host.to(CPU)

    class Device:
        type = "cuda"

    monkeypatch.setattr("forerun.core.batch.send_together", lambda arrays, device: send_together(arrays, CPU))
    packed = host.to(Device())  # type: ignore[arg-type]
    for name in ("tokens", "positions", "slot_mapping", "kv_lens", "block_tables", "logits_indices"):
        one, other = getattr(plain, name), getattr(packed, name)
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    assert packed.block_tables.tolist() == [[3, 1], [2, 0]] and packed.run_start is None


def test_sets_of_entries_become_rows() -> None:
    """Sets with more entries than a machine word has bits, and one without any."""
    sets = [0, 1, 1 << 3 | 1 << 70, (1 << 71) - 1, 1 << 64]
    assert _unpack(sets).tolist() == [[bool(bits >> j & 1) for j in range(71)] for bits in sets]
    assert _unpack([0, 0]).tolist() == [[False], [False]]
