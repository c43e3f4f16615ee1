"""The default model itself, against transformers with the same tensors: logits, and greedy answers run in every way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams, data
from forerun.llm import Prompt
from forerun.models.formats.checkpoint import open_checkpoint
from forerun_research.bench.peers.transformers import hf_from_checkpoint

PROMPTS, TOKENS = 12, 32
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, dtype="float32", max_num_seqs=16, quiet=True) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[Prompt]:
    """Shipped prompts of all kinds; every other one after a piece of the handbook, so that prefixes are shared."""
    handbook = " ".join(data.text("documents/handbook.txt").split()[:120])
    texts = [p.text for p in data.read_prompts()[:PROMPTS]]
    return [llm.encode(f"{handbook}\n\n{text}" if i % 2 else text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def answers(llm: LLM, prompts: list[Prompt]) -> list[list[int]]:
    """Greedy answers one by one."""
    return [llm.generate(ids, PARAMS)[0].token_ids for ids in prompts]


@pytest.fixture(scope="module")
def peer(smollm2: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers' logits at every position of a text."""
    model = hf_from_checkpoint(open_checkpoint(smollm2))

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


def test_logits_equal_transformers(llm: LLM, prompts: list[list[int]], peer: Callable):
    longest = max(prompts, key=len)
    got, expected = llm.engine.score(longest), peer(longest)
    assert float((got - expected).norm() / expected.norm()) < 1e-4


def test_greedy_answers_equal_transformers(prompts: list[list[int]], answers: list[list[int]], peer: Callable):
    """An answer is its greedy one if each token is the likeliest after those before it: one forward shows that."""
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer) == TOKENS
        assert peer(ids + answer)[len(ids) - 1 : -1].argmax(-1).tolist() == answer


def test_greedy_answers_in_batches_cold_and_warm(llm: LLM, prompts: list, answers: list):
    llm.clear_cache()
    for _ in range(2):  # cold, then warm
        batch = llm.generate(prompts, PARAMS)
        assert [c.token_ids for c in batch] == answers
    assert sum(c.usage.cached_tokens for c in batch) > 1000


def test_greedy_answers_survive_small_chunks_and_preemption(smollm2: Path, prompts: list, answers: list):
    needed = sum(len(ids) + TOKENS for ids in prompts)
    with LLM(
        smollm2, dtype="float32", max_num_seqs=16, max_num_batched_tokens=48, kv_cache_tokens=needed // 3, quiet=True
    ) as small:
        completions = small.generate(prompts, PARAMS)
    assert [c.token_ids for c in completions] == answers
    assert sum(c.usage.preemptions for c in completions) > 0
