"""Frames of the draft protocol: what is encoded comes back, and whatever else arrives is a `ProtocolError`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from forerun.decode.remote.protocol import (
    DIGEST_BYTES,
    MAX_NODES,
    Cancel,
    Close,
    Distribution,
    DraftOrder,
    Forgot,
    Frame,
    Hello,
    ProtocolError,
    Refused,
    Tree,
    Welcome,
    decode,
    encode,
    quantised_weights,
    token_bytes,
    vocabulary_digest,
)
from forerun.text.tokenizer import NoTokenizer
from tests.decode.drafters.common import other_tokenizer

SMALL, LARGE = 512, 151_936  # token ids of two and of three bytes
ids = some.integers(0, 2**32 - 1)
vocabularies = some.sampled_from([SMALL, 65_536, LARGE])


@some.composite
def trees(draw: some.DrawFn) -> tuple[Tree, int]:
    vocab_size, bits = draw(vocabularies), draw(some.sampled_from([8, 16]))
    size = draw(some.integers(0, 40))
    tokens = draw(some.lists(some.integers(0, vocab_size - 1), min_size=size, max_size=size, unique=True))
    parents = [draw(some.integers(-1, node - 1)) for node in range(size)]
    top = (1 << bits) - 1
    probs = [draw(some.integers(0, top)) / top for _ in range(size)]
    laws = {}
    for node in draw(some.lists(some.integers(-1, size - 1), max_size=3, unique=True)):
        among = draw(some.lists(some.integers(0, vocab_size - 1), min_size=1, max_size=5, unique=True))
        laws[node] = Distribution(among, [draw(some.integers(1, top)) for _ in among])
    return Tree(draw(ids), draw(ids), draw(ids), draw(ids), tokens, parents, probs, laws, bits), vocab_size


@given(trees())
@settings(max_examples=60, deadline=None)
def test_a_tree_comes_back_as_it_was(given: tuple[Tree, int]) -> None:
    tree, vocab_size = given
    assert decode(encode(tree, vocab_size), vocab_size) == tree


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_an_order_comes_back_and_a_token_takes_two_or_three_bytes(vocab_size: int) -> None:
    order = DraftOrder(7, 3, 100, 2, [5, vocab_size - 1], 8, 32, 16, 16, 0.75, 0.0, 1.0, 40)
    data = encode(order, vocab_size)
    assert decode(data, vocab_size) == order
    longer = encode(DraftOrder(7, 3, 100, 2, [5] * 12, 8, 32, 16, 16, 0.75, 0.0, 1.0, 40), vocab_size)
    assert len(longer) - len(data) == 10 * token_bytes(vocab_size) and token_bytes(vocab_size) in (2, 3)


@pytest.mark.parametrize(
    "frame",
    [
        Hello(SMALL, bytes(range(DIGEST_BYTES))),
        Welcome(2048, 16, 0.5, "a model"),
        Welcome(2048, 16, 0.5, "a model", 1, 12, 0.25, {"code": [[9.0, 10.0], [4.0, 9.0]], "text": []}),
        Cancel(1, 2),
        Close(3),
        Forgot(4, 5),
        Refused(6, 7, "too many sequences – the limit is 2"),
    ],
)
def test_other_frames_come_back(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


LAWS = {"code": [[2.0, 3.0]]}


def test_a_server_states_no_more_hits_than_tries_and_no_empty_round() -> None:
    for wrong in ({"outcomes": {"code": [[4.0, 3.0]]}}, {"round_tokens": 0}, {"round_slope": float("nan")}):
        with pytest.raises(ProtocolError):
            decode(encode(Welcome(9, 9, 0.1, "m", **wrong)))  # type: ignore[arg-type]


def sample_frames() -> list[bytes]:
    law = Distribution([1, 2, 3], [255, 7, 1])
    tree = Tree(1, 2, 3, 4, [9, 8, 7], [-1, 0, 0], [1.0, 0.2, 0.0], {-1: law, 1: law})
    order = DraftOrder(1, 1, 0, 0, [1, 2, 3, 500])
    frames: list[Frame] = [
        tree,
        order,
        Hello(SMALL, bytes(DIGEST_BYTES)),
        Welcome(9, 9, 0.1, "m", 1, 3, 0.5, LAWS),
        Refused(1, 1, "no"),
    ]
    return [encode(frame, SMALL) for frame in frames]


def test_whatever_arrives_is_a_frame_or_a_protocol_error() -> None:
    """Random bytes, and real frames with bytes changed, cut off and repeated; what decodes is sound."""
    draw, decoded = random.Random(5), 0
    real = sample_frames()
    for _ in range(20_000):
        data = bytearray(draw.choice(real) if draw.random() < 0.8 else draw.randbytes(draw.randrange(64)))
        for _ in range(draw.randrange(4)):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.3:
            data = data[: draw.randrange(len(data) + 1)] + data[: draw.randrange(3)]
        try:
            frame = decode(bytes(data), SMALL)
        except ProtocolError:
            continue
        decoded += 1
        if isinstance(frame, Tree):
            assert_sound(frame)
        if isinstance(frame, DraftOrder):
            assert all(0 <= token < SMALL for token in frame.tokens) and frame.kept + len(frame.tokens) > 0
        if isinstance(frame, Welcome):
            assert frame.round_tokens > 0 and 0.0 <= frame.round_slope < 1e6
            assert all(0.0 <= hits <= tries for depths in frame.outcomes.values() for hits, tries in depths)
    assert decoded > 1000


def assert_sound(tree: Tree) -> None:
    assert len(tree.tokens) == len(tree.parents) == len(tree.probs) <= MAX_NODES
    assert all(0 <= token < SMALL for token in tree.tokens) and all(0.0 <= prob <= 1.0 for prob in tree.probs)
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)
    for node, law in tree.distributions.items():
        assert -1 <= node < len(tree.tokens) and len(law.tokens) == len(law.weights) > 0
        assert all(0 <= token < SMALL for token in law.tokens) and min(law.weights) > 0


def test_a_message_of_text_is_no_frame() -> None:
    with pytest.raises(ProtocolError, match="text"):
        decode("hello")  # type: ignore[arg-type]


def test_weights_never_lose_a_token() -> None:
    assert quantised_weights([0.8, 0.4, 1e-9], 8) == [255, 128, 1]
    assert quantised_weights([0.5, 0.5], 16) == [65535, 65535]


def test_digests_tell_vocabularies_apart() -> None:
    one = other_tokenizer()
    assert vocabulary_digest(one) == vocabulary_digest(other_tokenizer()) != bytes(DIGEST_BYTES)
    one.backend.add_special_tokens(["<other>"])
    assert vocabulary_digest(one) != vocabulary_digest(other_tokenizer())
    assert vocabulary_digest(None) == vocabulary_digest(NoTokenizer("no text", ())) == bytes(DIGEST_BYTES)
