"""transformers as a side: answers with its assisted generation are its plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forerun_research.bench.peers.transformers import TransformersSide
from forerun_research.bench.sides import SideSpec


@pytest.fixture
def side(tiny_folder: Callable[[str], Path]) -> TransformersSide:
    model = str(tiny_folder("llama"))
    return TransformersSide(SideSpec("transformers", model, device="cpu", draft=model))


def test_assisted_answers_are_the_plain_ones(side: TransformersSide, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(10, 30))
    plain = side.answer(ids, 12, assisted=False)
    calls = 0
    forward = side.model.forward

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return forward(*args, **options)

    monkeypatch.setattr(side.model, "forward", counted)
    assisted = side.answer(ids, 12, assisted=True)
    assert assisted["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) == 12
    assert 0 < calls < 12  # the draft is the model itself: whole spans are accepted
    assert assisted["total_s"] > 0


def test_answers_end_where_the_model_ends_them(side: TransformersSide) -> None:
    ids = list(range(10, 30))
    full = side.answer(ids, 12, assisted=False)["token_ids"]
    side.eos = [full[3]]
    for assisted in (False, True):
        assert side.answer(ids, 12, assisted)["token_ids"] == full[: full.index(full[3]) + 1]
