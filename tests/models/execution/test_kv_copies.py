"""Keys read from scattered slots: in order, copied no more than needed, and never mixed up between readers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.execution.kv_copies import KeyRuns, KVCopies, link_copies

SLOTS, MOST = 200, 64
KV = (torch.arange(SLOTS * 4.0).view(SLOTS, 2, 2), -torch.arange(SLOTS * 4.0).view(SLOTS, 2, 2))


def make(*runs: tuple[int, int], unseen: int = 0) -> KeyRuns:
    count = sum(end - start for start, end in runs)
    return KeyRuns([slice(*run) for run in runs], count, count - unseen)


def check(copies: KVCopies, keys: KeyRuns, kv: tuple[torch.Tensor, torch.Tensor] = KV) -> None:
    slots = torch.cat([torch.arange(run.start, run.stop) for run in keys.runs])[: keys.context]
    for got, cache in zip(copies.read(keys, kv, MOST), kv, strict=True):
        assert got.shape == (1, 2, keys.count, 2)
        assert torch.equal(got[0, :, : keys.context], cache[slots].transpose(0, 1))
        assert got.isfinite().all()


def test_one_run_is_read_where_it_lies():
    keys = make((10, 30))
    k, v = KVCopies().read(keys, KV, MOST)
    assert k.data_ptr() == KV[0][10].data_ptr() and v.data_ptr() == KV[1][10].data_ptr()
    check(KVCopies(), keys)


def test_the_next_copy_keeps_what_is_the_same():
    order = [make((0, 20), (40, 50)), make((0, 20), (60, 75)), make((100, 110)), make((0, 25), (90, 99), unseen=3)]
    link_copies(order)
    assert [keys.reused for keys in order] == [0, 20, 0, 20]
    copies = KVCopies()
    for _ in range(2):  # as in two layers: the first copies all again
        for keys in order:
            check(copies, keys)


def test_what_was_not_attended_to_was_not_copied_and_is_not_kept():
    order = [make((0, 20), (40, 50), unseen=15), make((0, 20), (40, 60))]
    link_copies(order)
    assert order[1].reused == 15


def test_forgetting_makes_new_memory():
    copies, bad, good = KVCopies(), make((0, 9), (20, 29)), make((0, 5), (40, 49))
    copies.read(bad, (KV[0] * torch.nan, KV[1]), MOST)
    assert not copies.read(make((0, 5), (40, 49), unseen=9), KV, MOST)[0].isfinite().all()
    copies.forget()
    check(copies, good)


def test_another_type_of_numbers():
    copies, keys = KVCopies(), make((0, 9), (20, 29))
    check(copies, keys)
    check(copies, keys, (KV[0].bfloat16(), KV[1].bfloat16()))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=3), min_size=1, max_size=6
    )
)
def test_any_order_of_keys(drawn: list[list[tuple[int, int]]]):
    order = [make(*((start, start + length) for start, length in runs)) for runs in sorted(drawn)]
    link_copies(order)
    copies = KVCopies()
    for _ in range(2):
        for keys in order:
            check(copies, keys)
