"""Tries of token sequences: building, walking, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.decode.trie import TokenTrie, open_trie
from forerun.decode.trie_answer import ConditionalAnswer, TrieAnswer, score_nodes
from forerun.errors import BadRequest

ITEMS = [[5, 1, 2], [5, 1], [3], [5, 4, 4, 4], [7, 7]]


def walk(trie: TokenTrie, node: int = 0, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {path: int(trie.items[node])} if trie.items[node] >= 0 else {}
    for child in range(trie.children(node).start, trie.children(node).stop):
        found |= walk(trie, child, (*path, int(trie.tokens[child])))
    return found


def test_every_item_is_found_again() -> None:
    trie = TokenTrie.build(ITEMS, list("abcde"))
    assert walk(trie) == {tuple(ids): number for number, ids in enumerate(ITEMS)}
    assert [trie.name(item) for item in range(5)] == list("abcde")
    assert trie.child(0, 5) is not None and trie.child(0, 6) is None
    assert trie.parents()[1:].tolist() == [0, 0, 0, *trie.parents()[4:].tolist()]


def test_many_random_items() -> None:
    draw = np.random.default_rng(0)
    wanted = sorted({tuple(draw.integers(0, 9, draw.integers(1, 7)).tolist()) for _ in range(500)})
    trie = TokenTrie.build(wanted)
    assert walk(trie) == {ids: number for number, ids in enumerate(wanted)}
    nodes = draw.permutation(len(trie))[:200].tolist()
    children, rows = trie.children_of(nodes)
    each = [(node, i) for i, at in enumerate(nodes) for node in range(*trie.children(at).indices(len(trie)))]
    assert list(zip(children.tolist(), rows.tolist(), strict=True)) == each


def test_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "items.trie"
    TokenTrie.build(ITEMS).save(path)
    assert walk(open_trie(path)) == walk(TokenTrie.build(ITEMS))
    assert [p.name for p in tmp_path.iterdir()] == ["items.trie"]
    data = bytearray(path.read_bytes())
    for at, message in ((-64, "damaged"), (12, "version"), (0, "no trie")):
        broken = bytearray(data)
        broken[at] ^= 0x7F
        path.write_bytes(broken)
        with pytest.raises(BadRequest, match=message):
            TokenTrie.open(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadRequest, match="damaged"):
        TokenTrie.open(path)
    with pytest.raises(BadRequest, match="cannot open"):
        open_trie(tmp_path / "none.trie")


def test_items_that_are_refused() -> None:
    with pytest.raises(BadRequest, match="items 1 and 2 have the same"):
        TokenTrie.build([[3], [1, 2], [1, 2]])
    with pytest.raises(BadRequest, match=r"items 0 and 1 \('lamp' and 'Lamp'\) have the same"):
        TokenTrie.build([[1], [1]], ["lamp", "Lamp"])
    with pytest.raises(BadRequest, match="no items"):
        TokenTrie.build([])
    with pytest.raises(BadRequest, match="from -1 to 2"):
        TokenTrie.build([[2], [-1]])
    with pytest.raises(BadRequest, match="2000 tokens, the limit is 1024"):
        TokenTrie.build([[1] * 2000])
    with pytest.raises(BadRequest, match="token id 7, the vocabulary has 6"):
        TrieAnswer(TokenTrie.build(ITEMS), 6, [0])
    with pytest.raises(BadRequest, match="begins another one"):
        TrieAnswer(TokenTrie.build(ITEMS), 8, [])


def test_answer_follows_the_trie() -> None:
    answer = TrieAnswer(TokenTrie.build(ITEMS), 8, [0])
    assert answer.allowed([]).nonzero()[:, 0].tolist() == [3, 5, 7]
    assert answer.allowed([5, 1]).nonzero()[:, 0].tolist() == [0, 2]
    assert answer.allowed([3, 0]).nonzero()[:, 0].tolist() == [0]
    assert [(token, share) for token, share, _ in answer.likely_children(0)] == [(3, 0.2), (5, 0.6), (7, 0.2)]
    both = answer.likely_children(answer.node([5, 1]))  # the item 5 1 ends, or 5 1 2 goes on
    assert [(token, share) for token, share, _ in both] == [(2, 0.5), (0, 0.5)]
    assert [child[:2] for child in answer.likely_children(answer.node([5, 4, 4]))] == [(4, 1.0)]
    assert answer.likely_children(answer.node([3, 0])) == []
    assert answer.accepts([5], [4, 4, 1]) == 2
    answer.advance([5, 1])
    assert answer.allowed([]).nonzero()[:, 0].tolist() == [0, 2]
    answer.advance([0])
    assert answer.allowed([]).nonzero()[:, 0].tolist() == [0]


def test_without_end_tokens_an_answer_ends_at_a_leaf() -> None:
    answer = TrieAnswer(TokenTrie.build([[1, 2], [1, 3]]), 8, [])
    assert not answer.ends_at([1]) and answer.ends_at([1, 3])
    assert [child[:2] for child in answer.likely_children(0)] == [(1, 1.0)]
    assert answer.likely_children(answer.node([1, 3])) == []


@pytest.mark.parametrize("best", [False, True])
def test_futures_are_those_of_all_items(best: bool) -> None:
    trie = TokenTrie.build(ITEMS)
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(trie.parents()[1:].tolist(), 1):
        paths.append((*paths[parent], int(trie.tokens[node])))
    draw = torch.Generator().manual_seed(1)
    rows = [torch.log_softmax(torch.randn(8, generator=draw, dtype=torch.float64), -1) for _ in paths]
    found = score_nodes(trie, [0], enumerate(rows), best)
    table = dict(zip(paths, rows, strict=True))
    whole = [sum(float(table[tuple(ids[:n])][t]) for n, t in enumerate([*ids, 0])) for ids in ITEMS]
    assert found.futures[0] == pytest.approx(max(whole) if best else float(np.logaddexp.reduce(whole)), abs=1e-12)
    answer = ConditionalAnswer(trie, 8, [0], found)
    assert answer.futures([5]).isfinite().nonzero()[:, 0].tolist() == [1, 4]
    weights = np.array([w == max(whole) for w in whole]) if best else np.exp(whole) / np.exp(whole).sum()
    drafted: dict[tuple[int, ...], float] = {}  # the probabilities that drafts are made with are those of the items
    pending = [((), 0, 1.0)]
    while pending:
        path, node, prob = pending.pop()
        for token, share, child in answer.likely_children(node):
            if token == 0:
                drafted[path] = prob * share
            else:
                pending.append(((*path, token), child, prob * share))  # type: ignore[arg-type]
    for ids, weight in zip(ITEMS, weights, strict=True):
        assert drafted.get(tuple(ids), 0.0) == pytest.approx(float(weight), abs=0.06)  # improbable ones are not drafted
