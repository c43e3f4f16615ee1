"""Sequences: their tokens as caches read them, and how far two of them are the same."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import SamplingParams
from forerun.engine.sequence import Request, Sequence, common_prefix
from tests.engine.common import make_engine

GREEDY = SamplingParams()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 9)), st.integers(-5, 30), st.booleans())
def test_packed_tokens_are_the_tokens(prompt: list[int], answer: list[int], end: int, checked: bool):
    request = Request(prompt, GREEDY, sink=lambda event: None, packed=array("i", prompt) if checked else None)
    seq, other = Sequence(request, 0, 1), Sequence(request, 1, 2)
    for token in answer:
        seq.tokens.append(token)
        assert seq.packed(end).tolist() == seq.tokens[:end]
    assert other.packed(len(prompt)).tolist() == prompt  # answers of one request do not meet
    seq.packed(3).append(1)
    assert seq.packed(len(seq.tokens)).tolist() == seq.tokens


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_prefixes(a: list[int], b: list[int]):
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(array("i", a), array("i", b)) == same


def test_a_request_is_looked_through_once(tiny_folder, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(Path(tiny_folder("llama")))
    looked, check = [], engine.intake.check

    def counted(ids: list[int], params: SamplingParams) -> array[int]:
        looked.append(ids)
        return check(ids, params)

    monkeypatch.setattr(engine.intake, "check", counted)
    request = Request([1, 2, True], GREEDY, sink=lambda event: None)
    engine.intake.receive(request)
    engine.submit(request)
    assert len(looked) == 1 and request.packed == array("i", [1, 2, 1])
