"""The host's side of a launch: what lies where, what tree nodes see, which graph serves which batch."""

import numpy as np
import pytest
import torch

from forerun.core import HostBatch
from forerun.models.cuda.packing import MAX_DECODE_ROWS, Bucket, Packed, lay_pages, layout, masks_of
from forerun.models.execution.batch_split import MAX_LAUNCH_ROWS

CPU = torch.device("cpu")


def batch(counts, seq_lens=None, bits=None, tree_start=None, page_size=16):
    """Sequences of `counts` new tokens at the end of `seq_lens` entries; causal unless bits are given."""
    seq_lens = seq_lens or [100 + count for count in counts]
    cu_seqlens = [0, *np.cumsum(counts).tolist()]
    entries = [e for count, context in zip(counts, seq_lens, strict=True) for e in range(context - count, context)]
    pages = [np.arange(-(-context // page_size), dtype=np.int32) + 100 * s for s, context in enumerate(seq_lens)]
    return HostBatch(
        tokens=np.arange(cu_seqlens[-1]) + 7,
        positions=np.array(entries),
        slot_mapping=np.array(entries) + 1000,
        kv_lens=np.array(entries, dtype=np.int32) + 1,
        cu_seqlens=cu_seqlens,
        seq_lens=seq_lens,
        pages=pages,
        page_size=page_size,
        logits_indices=list(range(cu_seqlens[-1])),
        bits=bits,
        tree_start=tree_start,
    )


@pytest.mark.parametrize("rows", [16, 32])
def test_layout_is_that_of_the_c_struct(rows):
    kind = layout(rows)
    assert kind.fields is not None
    offsets = {name: entry[1] for name, entry in kind.fields.items()}
    assert (offsets["rows"], offsets["steps"], offsets["out"], offsets["bits"]) == (0, 12, 16, 24)
    assert offsets["chosen_at"] == 20
    assert offsets["tokens"] == 24 + 8 * rows and offsets["cu_seqlens"] == 24 + 28 * rows
    assert kind.itemsize == 96 + 32 * rows  # a multiple of 8, as C rounds it up


def test_fill_lays_pages_out_page_by_page():
    given = batch([3, 1], [40, 20])
    packed = Packed(layout(16), 16 * 8, 128, 16, CPU)
    used = packed.fill(given, [0, 0, 1 << 63, 5], 4)
    words = packed._staging[packed._turn].memory.numpy()[packed.head : used].view(np.int32)
    assert words.reshape(3, 2).tolist() == [[0, 100], [1, 101], [2, 0]]
    field = packed.field
    assert [int(field[name][0]) for name in ("rows", "seqs", "page_stride", "steps")] == [4, 2, 2, 4]
    assert field["bits"][:4].tolist() == [0, 0, 1 << 63, 5]
    assert field["tokens"][:4].tolist() == [7, 8, 9, 10]
    assert field["cu_seqlens"][:3].tolist() == [0, 3, 4]
    assert field["room"][:2].tolist() == [48, 32]
    assert field["kv_lens"][:4].tolist() == [38, 39, 40, 20]
    assert field["least"].tolist() == [0.0] * 16
    packed.fill(given, None, 4, [0.5, 0.25], out=2, chosen_at=32)
    assert packed.field["least"].tolist() == [0.5, 0.25] + [0.0] * 14
    assert (int(packed.field["out"][0]), int(packed.field["chosen_at"][0])) == (2, 32)
    assert field["least"].tolist() == [0.0] * 16  # the batch before may still be read


def test_fill_leaves_nothing_of_the_batch_before():
    packed = Packed(layout(16), 16 * 8, 40, 16, CPU)
    packed.fill(batch([4], bits=[1, 2, 3, 4], tree_start=[100]), [1, 2, 3, 4], 1)
    packed.fill(batch([4], [45]), None, 2)
    assert packed.field["bits"][:4].tolist() == [0] * 4
    assert int(packed.field["room"][0]) == 40  # not the page's 48: the model knows no further position


def test_pages_past_the_context_are_left_out():
    given, block_tables = batch([1, 1], [40, 100]), np.zeros(12, dtype=np.int32)
    assert lay_pages(given, block_tables, 3, 4) == 4
    assert block_tables.reshape(4, 3).tolist() == [[0, 100, 0], [1, 101, 0], [2, 102, 0], [0, 103, 0]]
    assert lay_pages(batch([1], [100]), block_tables, 1, 4) == 4 and block_tables[:4].tolist() == [0, 1, 2, 3]


def test_masks_count_from_what_a_token_sees():
    given = batch([3, 2], bits=[0, 0b1, 0b11, 0, 0], tree_start=[101, 0])
    given.kv_lens[:3] = [101, 101, 99]
    enough, masks = masks_of(given)
    assert enough and masks == [0, 0b1, 0b1100, 0, 0]
    assert masks_of(batch([2])) == (True, None)


def test_masks_of_large_trees_are_refused():
    given = batch([2], bits=[0, 1 << 64], tree_start=[101])
    given.kv_lens[:] = 101
    assert not masks_of(given)[0]
    given.bits = [0, 1 << 63]
    assert masks_of(given) == (True, [0, 1 << 63])


@pytest.mark.parametrize(
    ("counts", "want"),
    [
        ([1], (1, 1, 1)),
        ([1] * 3, (4, 4, 1)),
        ([1] * 33, (40, 40, 1)),
        ([5], (8, 1, 8)),
        ([40], (40, 1, 40)),
        ([5, 1, 3], (16, 4, 16)),
        ([2, 2], (4, 4, 4)),
        ([4] * 16, (64, 16, 4)),
        ([2] * 32, (64, 64, 4)),
        ([60, 1], (64, 4, 64)),
    ],
)
def test_bucket_holds_the_batch(counts, want):
    found = Bucket.of(batch(counts))
    assert found is not None and (found.rows, found.seqs, found.few) == want and not found.tree
    assert found.rows >= sum(counts) and found.seqs >= len(counts) and found.few >= max(counts)


def test_buckets_are_few_and_know_trees():
    kinds = {
        Bucket.of(batch([few] + [1] * more))
        for few in range(1, 65)
        for more in range(64)
        if few + more <= MAX_LAUNCH_ROWS
    }
    assert None not in kinds and len(kinds) < 60
    tree = Bucket.of(batch([2], bits=[0, 1], tree_start=[101]))
    assert tree is not None and tree.tree
    assert Bucket.of(batch([MAX_LAUNCH_ROWS + 1])) is None
    many = Bucket.of(batch([1] * (MAX_LAUNCH_ROWS + 1)))
    assert many is not None and many.rows == many.seqs == 96
    assert Bucket.of(batch([1] * (MAX_DECODE_ROWS + 1))) is None
