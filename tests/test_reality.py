"""The default model itself, against transformers with the same tensors: logits, and greedy answers run in every way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams, data
from forerun.llm import Prompt
from forerun.models.formats.load import open_checkpoint
from forerun_research.bench.peers.transformers import hf_from_checkpoint

PROMPTS, TOKENS = 20, 64
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
def expected(smollm2: Path, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """transformers' greedy answers one by one, and its logits for the longest prompt."""
    model = hf_from_checkpoint(open_checkpoint(smollm2))
    model.generation_config.eos_token_id = None  # neither side stops, or steers away from stopping
    answers = []
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        answers.append(out[0, len(ids) :].tolist())
    with torch.inference_mode():
        return answers, model(torch.tensor([max(prompts, key=len)])).logits[0]


def test_logits_equal_transformers(llm: LLM, prompts: list[list[int]], expected: tuple):
    got = llm.engine.score(max(prompts, key=len))
    assert float((got - expected[1]).norm() / expected[1].norm()) < 1e-4


def test_greedy_answers_equal_transformers_alone_and_in_batches_cold_and_warm(llm: LLM, prompts: list, expected: tuple):
    answers = expected[0]
    alone = [llm.generate(ids, PARAMS)[0].token_ids for ids in prompts]
    assert alone == answers
    llm.clear_cache()
    for _ in range(2):  # cold, then warm
        batch = llm.generate(prompts, PARAMS)
        assert [c.token_ids for c in batch] == answers
    assert sum(c.usage.cached_tokens for c in batch) > 1000


def test_greedy_answers_survive_small_chunks_and_preemption(smollm2: Path, prompts: list, expected: tuple):
    needed = sum(len(ids) + TOKENS for ids in prompts[:16])
    with LLM(
        smollm2, dtype="float32", max_num_seqs=16, max_num_batched_tokens=48, kv_cache_tokens=needed // 3, quiet=True
    ) as small:
        answers = small.generate(prompts, PARAMS)
    assert [c.token_ids for c in answers] == expected[0]
    assert sum(c.usage.preemptions for c in answers) > 0
