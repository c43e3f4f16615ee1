"""When the model side of a draft server ends a tree: by entropy, where others wait, where its order was replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.decode.remote.protocol import DraftOrder, Tree
from forerun.models import build
from forerun.models.execution.short_head import ShortHead
from forerun.models.formats.pard import ParallelDrafting
from forerun.serve import draft_worker
from forerun.serve.draft_worker import SHARED_DEPTH, DraftingLLM, DraftWorker
from tests import tiny

TOKENS = [3, 9, 4, 17, 8]


@pytest.fixture
def worker(tiny_folder: Callable[[str], Path]) -> Iterator[DraftWorker]:
    with LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as llm:
        made = DraftWorker(llm, max_sequences=8)
        made.start()
        yield made
        made.stop()


def order(seq: int = 1, version: int = 1, **values: Any) -> DraftOrder:
    given = {"depth": 12, "nodes": 24, "temperature": 0.05, "min_prob": 0.0, "paid_prob": 0.0} | values
    return DraftOrder(seq, version, 0, 0, TOKENS, **given)


def draft(worker: DraftWorker, asked: list[DraftOrder], vocab_size: int = tiny.VOCAB) -> list[Tree]:
    """Trees of orders that arrive together."""
    found: dict[int, Any] = {}
    came = threading.Condition()

    def reply(frame: Any) -> None:
        with came:
            found[frame.seq] = frame
            came.notify()

    with worker._changed:  # the thread sees them at once
        for each in asked:
            worker.submit("target", each, vocab_size, reply)
    with came:
        assert came.wait_for(lambda: len(found) == len(asked), timeout=60)
    return [found[each.seq] for each in asked]


def depth(tree: Tree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def test_a_tree_ends_where_the_entropy_says_that_acceptance_is_improbable(
    worker: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are probable enough in both cases: only the factor of the entropy differs."""
    monkeypatch.setattr(draft_worker, "ENTROPY_FACTOR", 0.0)
    (whole,) = draft(worker, [order(1, min_prob=0.02)])
    monkeypatch.setattr(draft_worker, "ENTROPY_FACTOR", 1e6)
    (cut,) = draft(worker, [order(2, min_prob=0.02)])
    assert depth(whole) > depth(cut) == 1
    assert cut.tokens[0] == whole.tokens[0]


def test_entropy_of_a_few_tokens_bounds_that_of_all() -> None:
    assert draft_worker._entropy([1.0]) == 0.0
    assert draft_worker._entropy([0.5, 0.5]) == pytest.approx(0.6931, abs=1e-4)
    assert draft_worker._entropy([0.5]) == pytest.approx(0.6931, abs=1e-4)  # the rest is one token, at least


def test_trees_are_short_while_others_wait(worker: DraftWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_worker, "ENTROPY_FACTOR", 0.0)
    (alone,) = draft(worker, [order(1)])
    monkeypatch.setattr(draft_worker, "MAX_BATCH", 1)
    first, last = draft(worker, [order(2), order(3)])
    assert depth(alone) == depth(last) == 12 and depth(first) == SHARED_DEPTH


def test_an_order_that_was_replaced_has_no_tree(worker: DraftWorker) -> None:
    frames: list[Any] = []
    with worker._changed:
        worker.submit("target", order(1, 1), tiny.VOCAB, frames.append)
        worker.submit("target", order(1, 2), tiny.VOCAB, frames.append)
        worker.submit("target", order(2, 1), tiny.VOCAB, frames.append)
        worker.cancel("target", 2, 1)
    draft(worker, [order(3)])
    assert [(frame.seq, frame.version) for frame in frames] == [(1, 2)]


@pytest.fixture
def block_worker(tiny_folder: Callable[[str], Path]) -> Iterator[DraftWorker]:
    """Of a model that drafts five tokens in one forward."""
    with LLM(str(tiny_folder("llama")), dtype="float32", quiet=True, max_model_len=512, threads=1) as llm:
        llm.parallel = ParallelDrafting(mask_token=2, tokens=5, outcomes={"code": [[3.0, 4.0]]})  # type: ignore[attr-defined]
        made = DraftWorker(llm, max_sequences=8)
        made.start()
        yield made
        made.stop()


def test_a_model_that_was_trained_for_it_drafts_a_tree_in_one_forward(block_worker: DraftWorker) -> None:
    assert block_worker.rounds.tokens == 5 and block_worker.outcomes == {"code": [[3.0, 4.0]]}
    (tree,) = draft(block_worker, [order()])
    assert depth(tree) == 5 and (block_worker.trees, block_worker.num_rounds) == (1, 1)
    assert not tree.distributions
    first, second = draft(block_worker, [order(2), order(3)])  # of one forward
    assert depth(first) == depth(second) == SHARED_DEPTH and block_worker.num_rounds == 3


def test_nodes_of_one_forward_say_what_is_drawn_from(block_worker: DraftWorker) -> None:
    (tree,) = draft(block_worker, [order(top_tokens=4, temperature=0.7)])
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    inner = {-1, *(node for node, deep in enumerate(depths) if deep < 5)}
    assert set(tree.distributions) == inner
    assert all(len(law.tokens) == 4 and max(law.weights) == 255 for law in tree.distributions.values())
    assert tree.distributions[-1].tokens[0] == tree.tokens[0]


def test_tokens_that_a_target_does_not_have_are_not_sent(block_worker: DraftWorker) -> None:
    wanted = [order(seq, top_tokens=4, temperature=0.9) for seq in range(1, 9)]
    for vocab_size in (tiny.VOCAB, 20):
        trees = draft(block_worker, wanted, vocab_size)
        laws = [token for tree in trees for law in tree.distributions.values() for token in law.tokens]
        sent = max(laws + [token for tree in trees for token in tree.tokens])
        assert sent < vocab_size and (vocab_size == 20 or sent > 20)
        block_worker.close("target")


def test_a_served_model_is_opened_as_a_draft(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a large vocabulary is the largest matrix of a small model, and most of it is never guessed."""
    monkeypatch.setattr(build, "FREQUENT_IDS", tiny.VOCAB // 4)
    options = {"dtype": "float32", "quiet": True, "max_model_len": 512, "threads": 1}
    with DraftingLLM(str(tiny_folder("llama")), **options) as llm:
        assert isinstance(llm.decoder.head, ShortHead)
        made = DraftWorker(llm, max_sequences=1)
        made.start()
        (tree,) = draft(made, [order()])
        assert tree.tokens and all(token < tiny.VOCAB // 4 or token in TOKENS for token in tree.tokens)
        made.stop()
