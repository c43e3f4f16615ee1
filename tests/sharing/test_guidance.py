"""Guidance from a pair of sequences, ids without a tokenizer, and chunks of actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, BadRequest, Grammar, SamplingParams
from forerun.decode.trie import TokenTrie
from forerun.recipes import accept_until_broken
from forerun.sharing import guided

OWN, OTHER = list(range(20, 45)), list(range(50, 61))


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny_folder("llama"), dtype="float32", max_model_len=256, skip_tokenizer_init=True, quiet=True) as opened:
        yield opened


def test_guided_answer_is_that_of_the_mixed_distributions(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    found = guided(llm, OWN, OTHER, 3.0, params)
    answer: list[int] = []
    for _ in range(6):
        own, other = (torch.log_softmax(llm.engine.score([*ids, *answer])[-1].float(), -1) for ids in (OWN, OTHER))
        answer.append(int((other + 3.0 * (own - other)).argmax()))
    assert found.token_ids == answer and found.passes == 6
    drafted = guided(llm, OWN, OTHER, 3.0, params, lambda so_far: [*answer[len(so_far) : len(so_far) + 2], 9])
    assert drafted.token_ids == answer and drafted.passes == 2 and drafted.accepted == 4


def test_guidance_of_one_is_plain_sampling(llm: LLM) -> None:
    params = SamplingParams(1.0, max_tokens=8, seed=5, ignore_eos=True)
    plain = list(llm.generate([OWN], params)[0].choices[0].token_ids)
    assert guided(llm, OWN, OTHER, 1.0, params).token_ids == plain
    with pytest.raises(BadRequest, match="scale is 99"):
        guided(llm, OWN, OTHER, 99.0, params)


def test_answers_without_a_seed_differ_and_options_that_do_nothing_are_refused(llm: LLM) -> None:
    params = SamplingParams(1.5, max_tokens=8, ignore_eos=True)
    assert len({tuple(guided(llm, OWN, OTHER, 1.5, params).token_ids) for _ in range(4)}) > 1
    refused: list[dict[str, Any]] = [
        {"grammar": Grammar.regex("a")}, {"n": 2}, {"stop": "a"}, {"stop_token_ids": [3]}, {"logprobs": 0},
        {"prediction": [1]}, {"prefill": "speculative"},
    ]  # fmt: skip
    for values in refused:
        with pytest.raises(BadRequest, match=f"without {next(iter(values))}"):
            guided(llm, OWN, OTHER, 1.5, SamplingParams(max_tokens=4, **values))
    with pytest.raises(BadRequest, match="token id 100000 is not in the vocabulary"):
        guided(llm, OWN, OTHER, 1.5, params, lambda answer: [100_000])


def test_ids_in_and_out_without_a_tokenizer(llm: LLM, tmp_path: Path) -> None:
    done = llm.generate([OWN], max_tokens=5, ignore_eos=True)[0]
    assert done.text == "" and len(done.choices[0].token_ids) == 5
    for asked in ("text", [{"role": "user", "content": "hello"}]):
        with pytest.raises(BadRequest, match="without a tokenizer"):
            llm.encode(asked)  # type: ignore[arg-type]
    path = tmp_path / "items.trie"
    TokenTrie.build([[30, 31], [30, 32], [33]]).save(path)
    for sampling in ("masked", "conditional"):
        answer = llm.generate([OWN], grammar=Grammar.trie(path, sampling))[0]  # type: ignore[arg-type]
        assert list(answer.choices[0].token_ids)[:-1] in ([30, 31], [30, 32], [33])
    with pytest.raises(BadRequest, match="stop strings need a tokenizer"):
        llm.generate([1, 2, 3], stop="a")
    with pytest.raises(BadRequest, match="needs a tokenizer"):
        llm.generate([OWN], grammar=Grammar.regex("a"))


def test_chunks_are_accepted_until_broken() -> None:
    """Heavy: towards 10, one at a time; light: the same, but wrong from 6 on."""

    def verify(state: int, chunk: list[int]) -> list[int]:
        return [1 for _ in range(len(chunk) + 1)]

    def propose(state: int) -> list[int]:
        return [1 if state + i < 6 else 0 for i in range(4)]

    run = accept_until_broken(0, propose, verify, lambda state, action: state + action, lambda state: state >= 10, 50)
    assert run.state == 10 and run.actions == [1] * 10
    assert run.accepted == 5 and run.calls == 5  # to 5, to 7, then every chunk is broken at once
    with pytest.raises(BadRequest, match="returned 1 actions for a chunk of 4"):
        accept_until_broken(0, propose, lambda s, c: [1], lambda s, a: s + a, lambda s: s >= 10, 50)
