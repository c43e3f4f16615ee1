"""A drafter that learns while serving: what helps on newer tokens is kept, the rest is dropped, state is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.errors import BadDrafter
from forerun.models.online_adapter import MAX_NEWEST_PASSES, MAX_PASSES, MIN_NEW_PASSES, WHOLE_PASSES, OnlineAdapter

WIDTH, VOCAB, DEPTH = 24, 60, 3
HEAD = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(10, 50)


def made(learning: bool = True) -> OnlineAdapter:
    return OnlineAdapter(HEAD, IDS, VOCAB, learning=learning)


def feed(adapter: OnlineAdapter, count: int, seed: int, every: int) -> None:
    """Passes of a text in which only every so many tokens of the vocabulary occur: the likeliest of those comes."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [10]
    for number in range(count):
        rows = torch.randn(DEPTH, WIDTH, generator=draw)
        adapter.record(number, tokens, rows)
        came = IDS[::every][(rows @ HEAD[::every].T).argmax(-1)].tolist()
        adapter.finish(number, [*tokens, *came])


def learn(adapter: OnlineAdapter) -> None:
    while adapter.step():
        pass


def accepted(adapter: OnlineAdapter) -> int:
    return sum(adapter.accepted(adapter.state, list(adapter.passes)[-32:]))


def test_what_it_learns_is_kept_where_newer_passes_gain():
    adapter = made()
    assert not adapter.due and not adapter.step()
    feed(adapter, MIN_NEW_PASSES, 1, every=4)
    before = accepted(adapter)
    for seed in range(2, 8):
        feed(adapter, MIN_NEW_PASSES, seed, every=4)
        learn(adapter)
    assert adapter.active and adapter.stats["kept"] > 0 and accepted(adapter) > 1.3 * before
    row = torch.randn(2, WIDTH)
    assert not torch.equal(adapter.change_rows(row), row)


def test_what_does_not_help_newer_passes_is_thrown_away():
    adapter = made()
    feed(adapter, MIN_NEW_PASSES // 2, 1, every=4)
    feed(adapter, MIN_NEW_PASSES // 2, 2, every=1)  # the text has turned to what the drafter was trained for
    learn(adapter)
    assert adapter.stats == {"trials": 1, "kept": 0, "dropped": 0} and not adapter.active
    row = torch.randn(2, WIDTH)
    assert torch.equal(adapter.change_rows(row), row)


def test_an_answer_is_not_measured_on_itself():
    """What is learnt from the beginning of one drafts its end better, and others worse."""
    adapter, tokens = made(), [10]
    draw = torch.Generator().manual_seed(5)
    for number in range(4 * WHOLE_PASSES):
        adapter.record(0, tokens, torch.randn(1, WIDTH, generator=draw))
        tokens = [*tokens, 10 + number % 40]
    assert adapter._new > MIN_NEW_PASSES and not adapter.due
    assert WHOLE_PASSES < len(adapter.passes) < 3 * WHOLE_PASSES  # a long one leaves room for others
    feed(adapter, MIN_NEW_PASSES, 1, every=4)
    assert adapter.step() and adapter._trial is not None
    older, newest = ({each.sequence for each in part} for part in (adapter._trial.older, adapter._trial.newest))
    assert older and newest and not older & newest


def test_a_kept_change_is_dropped_when_the_text_turns():
    adapter = made()
    for seed in range(1, 7):
        feed(adapter, MIN_NEW_PASSES, seed, every=4)
        learn(adapter)
    assert adapter.active
    feed(adapter, MAX_NEWEST_PASSES, 9, every=1)
    learn(adapter)
    assert not adapter.active and adapter.stats["dropped"] == 1


def test_the_buffer_is_bounded_and_unfinished_passes_are_dropped():
    adapter = made()
    feed(adapter, MAX_PASSES + 50, 1, every=4)
    assert len(adapter.passes) == MAX_PASSES and not adapter._pending
    other = made()
    other.record(3, [10, 11], torch.randn(DEPTH, WIDTH))
    other.record(3, [10, 11, 12], torch.randn(DEPTH, WIDTH))
    assert not other.passes
    other.record(3, [10, 11, 12, 13, 14], torch.randn(DEPTH, WIDTH))  # the first pass's three tokens have come
    assert [each.tokens for each in other.passes] == [[11, 12, 13, 14]]
    other.finish(3, [10, 11, 12, 13, 14])
    assert len(other.passes) == 1 and not other._pending
    silent = made(learning=False)
    feed(silent, MIN_NEW_PASSES, 1, every=4)
    assert not silent.passes and not silent.due


def test_tokens_that_are_never_drafted_teach_nothing():
    adapter = made()
    adapter.record(0, [1], torch.randn(1, WIDTH))
    adapter.finish(0, [1, 5])  # 5 is not among the ids
    rows, before, wanted = adapter._batch(list(adapter.passes))
    assert (before.tolist(), wanted.tolist(), rows.shape) == ([1], [-1], (1, WIDTH))


def test_what_was_learnt_is_loaded_again():
    adapter = made()
    assert adapter.tensors() == {}
    adapter.state.bias[3], adapter.active = 2.0, True
    again = made()
    again.load(adapter.tensors())
    logits: Tensor = torch.zeros(1, 40)
    assert again.active and float(again.change_logits(logits)[0, 3]) == 2.0
    with pytest.raises(BadDrafter, match="other shapes"):
        again.load(adapter.tensors() | {"adapter.bias": torch.zeros(7)})
