"""Text between two tokenizers: the same bytes there and back, wherever tokens end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.decode.drafters.retoken import Transcript, retokenise, split_probs, whole_characters
from forerun.text.tokenizer import Tokenizer
from tests import tiny
from tests.decode.drafters.common import STORY, other_tokenizer, train


@pytest.fixture(scope="module")
def target(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder("qwen2"))


@pytest.fixture(scope="module")
def other() -> Tokenizer:
    return other_tokenizer()


def read(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids)


@given(st.text(max_size=300), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_transcript_is_the_text_wherever_it_is_interrupted(target: Tokenizer, other: Tokenizer, text: str, step: int):
    text = STORY + text
    tokens, transcript = target.encode(text), Transcript(target, other)
    for count in range(1, len(tokens) + step, step):
        transcript.follow(tokens[:count])
        assert read(other, transcript.ids) + transcript.rest == read(target, tokens[:count])
    assert transcript.rest == b""


def test_a_transcript_changes_only_near_its_end(target: Tokenizer, other: Tokenizer):
    tokens = target.encode(STORY * 12)
    transcript, before = Transcript(target, other), list[int]()
    for count in range(1, len(tokens) + 1):
        transcript.follow(tokens[:count])
        common = next((i for i, (a, b) in enumerate(zip(before, transcript.ids, strict=False)) if a != b), len(before))
        assert len(read(other, before[common:])) < 40
        before = list(transcript.ids)
    assert transcript.fixed > 0.8 * len(before)
    assert len(before) - len(other.encode(STORY * 12)) < 5  # encoded in pieces, cut as if in one


def test_control_tokens_have_counterparts_or_none(target: Tokenizer, other: Tokenizer):
    start, end = (target.encode(name, parse_special=True)[0] for name in ("<|im_start|>", "<|im_end|>"))
    transcript = Transcript(target, other)
    transcript.follow([start, *target.encode("keep"), end, *target.encode("er")])
    assert transcript.ids == [*other.encode("keep"), 0, *other.encode("er")]


@given(st.text(max_size=120), st.data())
@settings(max_examples=60, deadline=None)
def test_retokenised_text_continues_the_tokens(target: Tokenizer, text: str, data: st.DataObject):
    tokens = target.encode(STORY + text)
    cut = data.draw(st.integers(0, len(tokens)))
    more = read(target, tokens[cut:])
    found = retokenise(target, tokens[:cut], more)
    assert more.startswith(read(target, found))
    if not more[:1] or more[0] & 0xC0 != 0x80:
        assert read(target, found) == more


def test_text_is_cut_as_the_model_would_cut_it(target: Tokenizer):
    tokens = target.encode(tiny.TEXT)
    for cut in range(1, len(tokens), 7):
        more = read(target, tokens[cut : cut + 9])
        assert retokenise(target, tokens[:cut], more)[:5] == tokens[cut : cut + 5]


def test_a_token_that_stands_is_not_joined_with_what_follows(target: Tokenizer):
    word = next(i for i in target.encode(tiny.TEXT) if len(target.token_bytes(i)) > 3)
    whole = target.token_bytes(word)
    first = target.encode(whole[:1].decode())
    found = retokenise(target, first, whole[1:])
    assert read(target, found) == whole[1:] and [*first, *found] != [word]


def test_what_a_normaliser_changes_is_not_proposed(other: Tokenizer):
    backend = train(STORY, 300)
    backend.normalizer = tokenizers.normalizers.Lowercase()
    small = Tokenizer(backend)
    assert read(small, retokenise(small, [], b"ships and GULLS")) == b"ships and "


def test_whole_characters():
    wave = "🌊".encode()
    assert whole_characters(b"ab" + wave) == b"ab" + wave
    assert whole_characters(b"ab" + wave[:3]) == b"ab"
    assert whole_characters(wave[:2]) == b""


def test_shares_of_chances():
    assert split_probs([(4, 0.25), (2, 0.5)], [2, 4]) == pytest.approx([0.5, 0.25])
    assert split_probs([(1, 0.5), (1, 0.5), (2, 0.9)], [2, 2]) == pytest.approx([0.25, 0.9])
