"""Log-probabilities of given continuations: exact, with one prefill, and nothing forgotten or leaked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import BadRequest, ForerunError, OutOfPages
from forerun.sharing.scoring import score_continuations, score_each
from tests.tiny import TEXT

WORDS = [" ships", " lamp", " the keeper reads old letters", " a"]


@pytest.fixture(params=["llama", "gemma3"], scope="module")
def llm(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    folder = str(tiny_folder(request.param))
    with LLM(folder, dtype="float32", threads=1, quiet=True, max_num_batched_tokens=64, kv_cache_tokens=4096) as made:
        yield made


def plainly(llm: LLM, prefix: list[int], continuation: list[int]) -> list[float]:
    """The slow way: the whole text from scratch."""
    logits = llm.engine.score([*prefix, *continuation])
    found = torch.log_softmax(logits, -1)[len(prefix) - 1 : -1]
    return [float(found[i, token]) for i, token in enumerate(continuation)]


@pytest.mark.parametrize("length", [1, 16, 17, 150])
def test_scores_equal_those_from_scratch(llm: LLM, length: int):
    prefix = llm.tokenizer.encode(TEXT)[:length]
    continuations = [llm.tokenizer.encode(word) for word in (*WORDS, TEXT[:300])]  # the last is longer than a chunk
    found = score_continuations(llm, prefix, continuations)
    for logprobs, continuation in zip(found.logprobs, continuations, strict=True):
        assert logprobs == pytest.approx(plainly(llm, prefix, continuation), abs=2e-4)
    assert found.totals[0] == pytest.approx(sum(found.logprobs[0]))
    assert found.means[2] == pytest.approx(found.totals[2] / len(continuations[2]))


def test_the_prefix_is_computed_once_and_stays_known(llm: LLM):
    llm.clear_cache()
    prefix, words = llm.tokenizer.encode(TEXT)[:100], [llm.tokenizer.encode(word) for word in WORDS]
    first, second = (score_continuations(llm, prefix, words) for _ in range(2))
    own = sum(4 + len(word) - 1 for word in words)  # 96 of the prefix's tokens lie on whole pages
    assert (first.cached_tokens, first.computed_tokens) == (0, 96 + own)
    assert (second.cached_tokens, second.computed_tokens) == (96, own)
    assert first.logprobs == second.logprobs
    assert llm.generate(prefix, SamplingParams(max_tokens=1))[0].usage.cached_tokens == 96
    llm.clear_cache()
    assert llm.engine.pool.used == 0


def test_what_was_generated_is_read_again(llm: LLM):
    llm.clear_cache()
    prefix = llm.tokenizer.encode(TEXT)[:64]
    made = llm.generate(prefix, SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0))[0]
    found = score_each(llm, [([*prefix, *made.token_ids], [[5], [6]]), (prefix, [made.token_ids])])
    assert found[0].cached_tokens == 96
    assert found[1].logprobs[0] == pytest.approx([entry.logprob for entry in made.choices[0].logprobs], abs=2e-4)


def test_bad_continuations_are_refused(llm: LLM):
    with pytest.raises(BadRequest, match="continuation 1 is empty"):
        score_continuations(llm, [5], [[6], []])
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        score_continuations(llm, [5], [[100_000]])
    with pytest.raises(BadRequest, match="prompt is empty"):
        score_continuations(llm, [], [[5]])
    assert score_continuations(llm, [5], []).logprobs == []


def test_text_is_encoded(llm: LLM):
    encode = llm.tokenizer.encode
    ids = encode("The lamp", add_special=True)
    by_text = score_continuations(llm, "The lamp", [" turns", [5, 6]])
    assert by_text.logprobs == score_continuations(llm, ids, [encode(" turns"), [5, 6]]).logprobs
    with pytest.raises(BadRequest, match="continuation 0 is empty"):
        score_continuations(llm, "The lamp", [""])


def test_a_small_pool_takes_turns_and_says_when_nothing_fits(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("llama")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=128) as small:
        ids = small.tokenizer.encode(TEXT)
        words = [ids[k : k + 40] for k in range(8)]  # three pages each beside two of the prefix: two fit at a time
        found = score_continuations(small, ids[:33], words)
        assert found.logprobs[7] == pytest.approx(plainly(small, ids[:33], words[7]), abs=2e-4)
        small.clear_cache()
        assert small.engine.pool.used == 0
        kept = small.engine.pool.allocate(6)
        with pytest.raises(OutOfPages, match="are free"):
            score_continuations(small, ids[:33], words)
        small.engine.pool.release(kept)
        small.clear_cache()
        assert small.engine.pool.used == 0
    with pytest.raises(ForerunError, match="closed"):
        score_continuations(small, [5], [[6]])
