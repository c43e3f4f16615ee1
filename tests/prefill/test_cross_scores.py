"""Scores through the text: what one tokenizer's tokens have, the other's get, byte by byte."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.errors import BadRequest, OutOfPages
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Prefill
from forerun.prefill.choosers import TailAttention
from forerun.prefill.cross_scores import CrossScores, TokenAlignment
from forerun.prefill.state import PrefillState
from forerun.text.tokenizer import Tokenizer
from tests import tiny
from tests.decode.drafters.common import STORY, other_tokenizer, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_folder: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder("qwen2"))


@pytest.fixture(scope="module")
def other() -> Tokenizer:
    return other_tokenizer()


@pytest.fixture(scope="module")
def spaced() -> Tokenizer:
    """Puts a space before every text, and a BOS token before that."""
    characters = sorted({*"abcdefghijklmnopqrstuvwxyz.,", "\u2581"})
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, "th", "the", "\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend, bos_id=1)


# -- the text ----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=60), st.data())
@settings(max_examples=80, deadline=None)
def test_the_sum_stays_what_it_was(
    target: Tokenizer, other: Tokenizer, spaced: Tokenizer, text: str, data: st.DataObject
):
    tokens = target.encode(STORY + text)
    lo = data.draw(st.integers(0, len(tokens) - 1))
    hi = data.draw(st.integers(lo + 1, len(tokens)))  # may begin and end inside a character
    tokens = data.draw(st.sampled_from([tokens[lo:hi], [*tokens[hi:], 1, *tokens[:lo], 2]]))
    for draft in (other, spaced):
        alignment = TokenAlignment(tokens, target, draft)
        scores = np.random.default_rng(0).random(len(alignment.ids))
        carried = alignment.carry(scores)
        lost = scores[0] if draft is spaced else 0.0  # its BOS, which the target does not have
        assert carried.shape == (len(tokens),) and (carried >= 0).all()
        assert carried.sum() == pytest.approx(scores.sum() - lost)


def test_a_token_s_bytes_get_its_score(target: Tokenizer, other: Tokenizer):
    tokens = target.encode(STORY)
    alignment = TokenAlignment(tokens, target, other)
    assert alignment.ids == other.encode(STORY)
    starts = np.cumsum([0, *(len(target.token_bytes(t)) for t in tokens)])
    at = 0
    for n, token in enumerate(alignment.ids):  # one after the other, by a slow and obvious count
        size = len(other.token_bytes(token))
        expected = [max(0, min(at + size, hi) - max(at, lo)) / size for lo, hi in zip(starts, starts[1:], strict=False)]
        np.testing.assert_allclose(alignment.carry(np.eye(len(alignment.ids))[n]), expected, atol=1e-12)
        at += size


def test_a_tokenizer_carried_to_itself_changes_nothing(target: Tokenizer):
    tokens = target.encode(STORY * 2)
    scores = np.random.default_rng(0).random(len(tokens))
    np.testing.assert_allclose(TokenAlignment(tokens, target, target).carry(scores), scores, atol=1e-12)


def test_characters_of_several_tokens(target: Tokenizer):
    """One side has a character whole, the other in bytes; and a prompt that ends in the middle of one."""
    whole = Tokenizer(train("漢字 漢字 漢字 漢字", 400))
    assert len(whole.encode("漢字")) == 1 and len(target.encode("漢字")) == 6
    tokens = target.encode("a漢字")
    np.testing.assert_allclose(TokenAlignment(tokens, target, whole).carry(np.array([1.0, 6.0])), np.ones(7))
    alignment = TokenAlignment(whole.encode("a漢字"), whole, target)
    np.testing.assert_allclose(alignment.carry(np.arange(7.0)), [0.0, 21.0])
    part = TokenAlignment(tokens[:3], target, whole)  # two of three bytes are read as two strange characters
    scores = np.random.default_rng(0).random(len(part.ids))
    carried = part.carry(scores)
    assert carried[0] == pytest.approx(scores[0]) and carried[1:].sum() == pytest.approx(scores[1:].sum())
    assert carried[1] == pytest.approx(carried[1:].sum() - carried[2]) and carried[1] > 0 and carried[2] > 0


def test_a_space_that_the_tokenizer_adds(target: Tokenizer, spaced: Tokenizer):
    tokens = target.encode("the the")
    alignment = TokenAlignment(tokens, target, spaced)
    assert [spaced.token_bytes(i) for i in alignment.ids] == [b"<s>", b" the", b" the"]
    pieces = [target.token_bytes(t) for t in tokens]
    carried = alignment.carry(np.array([9.0, 3.0, 4.0]))
    np.testing.assert_allclose(carried, [len(b) for b in pieces])  # three bytes and four
    alone = TokenAlignment(target.encode("."), target, spaced)  # a space by itself, then the text
    np.testing.assert_allclose(alone.carry(np.array([9.0, 1.0, 2.0])), [3.0])


def test_control_tokens(target: Tokenizer, other: Tokenizer):
    start, end = (target.encode(name, parse_special=True)[0] for name in ("<|im_start|>", "<|im_end|>"))
    alignment = TokenAlignment([start, *target.encode("keep"), end, end], target, other)
    stop = other.encode("<|im_end|>", parse_special=True)[0]
    assert alignment.ids[-2:] == [stop, stop] and stop not in alignment.ids[:-2]
    scores = np.arange(1.0, len(alignment.ids) + 1)
    carried = alignment.carry(scores)
    assert carried[0] == 0.0 and carried[-2:].tolist() == pytest.approx(scores[-2:].tolist())
    assert carried[1:-2].sum() == pytest.approx(scores[:-2].sum())
    written = TokenAlignment(target.encode("<|im_end|>"), target, other)  # the same characters as text stay text
    assert stop not in written.ids


def test_the_last_token_that_was_read(target: Tokenizer, other: Tokenizer):
    tokens = target.encode(STORY)
    same = TokenAlignment(tokens, target, target)
    assert same.last_read().tolist() == list(range(len(tokens)))
    crossed = TokenAlignment(tokens, target, other)
    read = crossed.last_read()
    for n, last in enumerate(read.tolist()):
        seen = b"".join(target.token_bytes(token) for token in tokens[: n + 1])
        theirs = b"".join(other.token_bytes(token) for token in crossed.ids[: last + 1])
        more = theirs + (other.token_bytes(crossed.ids[last + 1]) if last + 1 < len(crossed.ids) else b"")
        assert seen.startswith(theirs)  # nothing that comes later
        assert last + 1 == len(crossed.ids) or not seen.startswith(more)  # and all that came before


def test_where_the_tail_begins(target: Tokenizer, other: Tokenizer):
    tokens = target.encode(STORY)
    alignment = TokenAlignment(tokens, target, other)
    for n in range(len(tokens) + 1):
        place = sum(len(target.token_bytes(t)) for t in tokens[:n])
        ends = np.cumsum([len(other.token_bytes(t)) for t in alignment.ids])
        assert alignment.tokens_before(n) == int((ends <= place).sum())
    assert TokenAlignment([], target, other).carry(np.zeros(0)).shape == (0,)


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same model with its vocabulary shuffled."""
    folder, twin = (tmp_path_factory.mktemp(name) for name in ("one", "twin"))
    for place in (folder, twin):
        tiny.write_folder(place, "qwen2", seed=4)
    order = np.random.default_rng(0).permutation(tiny.VOCAB)  # id here -> id there
    weights = load_file(folder / "model.safetensors")
    back = torch.from_numpy(order.argsort())
    shuffled = {k: v[back].contiguous() if v.shape[0] == tiny.VOCAB else v for k, v in weights.items()}
    save_file(shuffled, twin / "model.safetensors", {"format": "pt"})
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["vocab"] = {name: int(order[i]) for name, i in stored["model"]["vocab"].items()}
    for added in stored["added_tokens"]:
        added["id"] = int(order[added["id"]])
    (twin / "tokenizer.json").write_text(json.dumps(stored))
    return folder, twin


def draft_context_of(target: Path, draft: Path, pages: int = 128, tokenizer: Tokenizer | None = None) -> DraftContext:
    opened, drafting = open_checkpoint(target), open_checkpoint(draft)
    decoder, other = (build_decoder(checkpoint, CPU, "float32", 512)[0] for checkpoint in (opened, drafting))
    pool = PagePool(decoder.config, pages, 8, decoder.dtype, CPU)
    model = DraftModel(other, tokenizer or drafting.tokenizer(), False)
    return DraftContext.build(pool, Runner(decoder, pool, 512), opened.tokenizer(), 512, model)


def test_the_same_model_under_other_ids_looks_where_the_target_looks(
    twins: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.prefill.cross_scores.CHUNK_TOKENS", 50)
    ctx = draft_context_of(*twins)
    assert ctx.tokenizer is not None
    tokens = [*ctx.tokenizer.encode(tiny.TEXT)[:160], 2]
    pages = array("i", ctx.pool.allocate(21))
    tail_attention = TailAttention(ctx.runner, pages, 141, 161)

    def watch(layer: int, x: Tensor, q: Tensor | None, a: Tensor | None) -> None:
        if q is not None:
            tail_attention.add(layer, q[141:], 141)

    ctx.runner.forward([Span(tokens, 0, pages, ())], watch=watch)
    ctx.pool.release(pages)
    scorer = CrossScores(ctx)
    assert scorer.cost(10) == pytest.approx(10.0)
    state = PrefillState(0, tokens, array("i"), 0, 141, Prefill("speculative", chooser="cross"), 4)
    np.testing.assert_allclose(scorer.scores(state), tail_attention.reduce(), atol=1e-5)
    assert ctx.pool.used == 0


def test_a_stranger_s_scores(tiny_folder: Callable[[str], Path], other: Tokenizer):
    ctx = draft_context_of(tiny_folder("llama"), tiny_folder("qwen3"), tokenizer=other)
    assert ctx.tokenizer is not None
    tokens = ctx.tokenizer.encode(STORY * 2)
    scores = CrossScores(ctx).score_tokens(tokens, 16)
    assert scores.shape == (len(tokens),) and scores.sum() == pytest.approx(1.0, abs=1e-3)
    assert CrossScores(ctx).score_tokens([], 16).shape == (0,)


def test_what_it_needs(tiny_folder: Callable[[str], Path], other: Tokenizer):
    ctx = draft_context_of(tiny_folder("llama"), tiny_folder("qwen3"), pages=8, tokenizer=other)
    assert ctx.tokenizer is not None
    scorer, asked = CrossScores(ctx), list[int]()
    held = ctx.pool.allocate(6)
    tokens = ctx.tokenizer.encode("The keeper counts the ships. ")

    def make_room(count: int) -> bool:
        asked.append(count)
        ctx.pool.release(held)
        return True

    with pytest.raises(OutOfPages, match="2 are free"):
        scorer.score_tokens(tokens * 2, 8)
    ctx.make_room = make_room
    assert scorer.score_tokens(tokens * 2, 8).sum() > 0 and len(asked) == 1 and ctx.pool.used == 0
    with pytest.raises(BadRequest, match="reads at most 512"):
        scorer.score_tokens(tokens * 50, 8)
    ctx.tokenizer = None
    with pytest.raises(BadRequest, match="the target has no tokenizer"):
        CrossScores(ctx)
    ctx.draft = None
    with pytest.raises(BadRequest, match="needs a draft model"):
        CrossScores(ctx)
