import numpy as np
import pytest

from forerun.core import HostBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda.packing import Bucket
from forerun.models.cuda.shared import (
    BLOCK_KEYS,
    GROUP_TILES,
    MAX_DECODE_TOKENS,
    TILE_FIELDS,
    TILE_PAIRS,
    most_tiles,
    plan_shared,
)

PAGE = 16
HEADS, KV_HEADS, DIM = 12, 2, 8
KEY_BYTES = 4 * KV_HEADS * DIM


def config(window: int | None = None, window_layers: tuple[bool, ...] = ()) -> ModelConfig:
    return ModelConfig(
        "llama", 8, 96, 2, HEADS, KV_HEADS, DIM, 8, 4096, sliding_window=window, window_layers=window_layers
    )


def make_batch(rows: list[tuple[list[int], int, int]]) -> HostBatch:
    """Sequences of (pages, context, new tokens)."""
    cu_seqlens, kv_lens = [0], []
    for _, context, count in rows:
        cu_seqlens.append(cu_seqlens[-1] + count)
        kv_lens += range(context - count + 1, context + 1)
    none = np.zeros(cu_seqlens[-1], dtype=np.int64)
    return HostBatch(
        none, none, none, np.array(kv_lens, dtype=np.int32), cu_seqlens, [context for _, context, _ in rows],
        [np.array(pages, dtype=np.int32) for pages, _, _ in rows], PAGE, list(range(cu_seqlens[-1])),
    )  # fmt: skip


def branch(prefix: list[int], own: int, new: int, at: int) -> tuple[list[int], int, int]:
    """A prefix and `own` entries on pages from `at` on."""
    return [*prefix, *range(at, at - (-own // PAGE))], len(prefix) * PAGE + own, new


FIRST, SECOND = list(range(100, 130)), list(range(200, 221))  # 480 and 336 entries


def test_tiles_and_members_of_two_groups_beside_others():
    rows = [
        branch(FIRST, 5, 1, 300),
        branch(SECOND, 40, 3, 310),
        branch([], 90, 1, 320),
        branch(
            [], MAX_DECODE_TOKENS + 9, MAX_DECODE_TOKENS + 9, 330
        ),  # a prefill, which takes no place among the tokens whose keys are cut
        branch(FIRST, 20, 4, 340),
        branch(SECOND, 1, 1, 350),
        branch(FIRST, 100, 1, 360),
    ]
    batch = make_batch(rows)
    found = plan_shared(batch, config(), 1)
    assert found is not None
    assert found.blocks.tolist() == [7, 5, 0, 0, 7, 5, 7]  # whole blocks of the shared entries
    tiles = {tuple(tile) for tile in found.tiles.tolist()}
    by_row = {row: (first, size, pair, blocks) for first, size, pair, row, blocks in tiles}
    assert set(by_row) == {0, 1} and len(tiles) == 2
    first, size, pair, blocks = by_row[0]
    assert (size, pair, blocks) == (6, 0, 7)
    assert found.members[first : first + size].tolist() == [[0, 0], [78, 5], [79, 6], [80, 7], [81, 8], [83, 10]]
    first, size, _, blocks = by_row[1]
    assert found.members[first : first + size].tolist() == [[1, 1], [2, 2], [3, 3], [82, 9]] and blocks == 5
    assert found.spared == ((3 - 1) * 7 + (2 - 1) * 5) * BLOCK_KEYS * KEY_BYTES


def test_what_is_spared_decides():
    batch = make_batch([branch(FIRST, 5, 1, 300 + 10 * i) for i in range(20)])
    found = plan_shared(batch, config(), 1)
    assert found is not None and len(found.tiles) == -(-20 * 6 // (TILE_PAIRS * GROUP_TILES)) == 2
    assert [pair for _, _, pair, _, _ in found.tiles.tolist()] == [0, TILE_PAIRS * GROUP_TILES]
    assert found.spared == (20 - 2) * 7 * BLOCK_KEYS * KEY_BYTES
    assert plan_shared(batch, config(), found.spared) is not None
    assert plan_shared(batch, config(), found.spared + 1) is None


@pytest.mark.parametrize(
    "rows",
    [
        [branch(FIRST, 5, 1, 300)],
        [branch(FIRST, 5, 1, 300), branch(SECOND, 5, 1, 310)],
        [branch(FIRST[:15], 5, 1, 300), branch(FIRST[:15], 5, 1, 310)],  # 240 entries are too few
        [
            branch(FIRST, MAX_DECODE_TOKENS + 1, MAX_DECODE_TOKENS + 1, 300),
            branch(FIRST, 5, 1, 320),
        ],  # one of them prefills
        [branch(FIRST, 5, 1, 300), (FIRST, 200, 1)],  # and one is only at its beginning
    ],
)
def test_nothing_to_share(rows: list[tuple[list[int], int, int]]):
    assert plan_shared(make_batch(rows), config(), 1) is None


def test_windows_have_no_use_for_it():
    batch = make_batch([branch(FIRST, 5, 1, 300 + 10 * i) for i in range(4)])
    assert plan_shared(batch, config(64, (True, True)), 1) is None
    assert plan_shared(batch, config(64, (False, True)), 1) is not None


def test_no_token_shares_what_it_does_not_see():
    batch = make_batch([branch(FIRST, 5, 1, 300), branch(FIRST, 9, 3, 310)])
    batch.kv_lens[1:] = 300  # nodes of a tree that hangs in the middle
    found = plan_shared(batch, config(), 1)
    assert found is not None and found.blocks.tolist() == [4, 4]


@pytest.mark.parametrize("rows", [2, 8, 24, 64])
@pytest.mark.parametrize("heads_per_kv", [1, 3, 6, 16])
def test_a_bucket_has_room_for_any_groups(rows: int, heads_per_kv: int):
    def count(sizes: list[int]) -> int:
        return sum(-(-size * heads_per_kv // (TILE_PAIRS * GROUP_TILES)) for size in sizes)

    splits = [[rows], [2] * (rows // 2), [rows // 2, rows - rows // 2], [3] * (rows // 3) + [rows % 3]]
    assert max(map(count, splits)) <= most_tiles(rows, heads_per_kv)


def test_groups_are_laid_one_after_the_other():
    found = plan_shared(make_batch([branch(FIRST, 5, 1, 300), branch(FIRST, 9, 3, 310)]), config(), 1)
    assert found is not None
    memory = np.zeros(8 + 2 * 16 + TILE_FIELDS * 5, dtype=np.int32)
    found.lay(memory, 8, 16)
    assert memory[:8].tolist() == [7, 7] + [0] * 6
    assert memory[8:40].reshape(16, 2)[:5].tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [0, 0]]
    assert memory[40:].reshape(5, TILE_FIELDS).tolist() == [[0, 4, 0, 0, 7]] + [[0] * TILE_FIELDS] * 4


def test_shared_batches_have_graphs_of_their_own():
    batch = make_batch([branch(FIRST, 5, 1, 300), branch(FIRST, 9, 3, 310)])
    plain, shared = Bucket.of(batch), Bucket.of(batch, shared=True)
    assert plain is not None and shared is not None and plain != shared and shared.rows == plain.rows
