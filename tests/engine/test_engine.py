"""The engine: the same tokens whatever shares the batch, and nothing lost, leaked or disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.core import SamplingParams
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadRequest, ForerunError, OutOfPages
from tests.engine.common import Answer, finish, leaked, make_engine, run

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)


def make_prompts(count: int = 12, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(draw.randrange(1, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[int]]]:
    """Each prompt answered by itself, cold: what every other way of running must repeat."""
    answers = {}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        engine = make_engine(folder, enable_prefix_caching=False)
        answers[name] = [run(engine, [prompt], params)[0] for prompt in make_prompts()]
    return answers


def test_greedy_equals_transformers(folder: Path, alone: dict[str, list[list[int]]]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, answer in zip(make_prompts(), alone["greedy"], strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        assert out[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("params", ["greedy", "sampled"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 3},
        {"kv_cache_tokens": 256},
    ],
    ids=["batched", "no prefix cache", "small chunks", "small batch", "preemption"],
)
def test_answers_do_not_depend_on_how_they_run(folder: Path, alone: dict, params: str, config: dict):
    engine = make_engine(folder, **config)
    chosen = GREEDY if params == "greedy" else SAMPLED
    for _ in range(2):  # the second time the prefix cache is warm
        assert run(engine, make_prompts(), chosen) == alone[params]
    assert leaked(engine) == 0


def test_a_small_pool_preempts_and_is_never_exceeded(folder: Path, alone: dict):
    engine = make_engine(folder, kv_cache_tokens=256)
    answers = [Answer(engine, prompt, GREEDY) for prompt in make_prompts()]
    while not engine.idle:
        engine.step()
        assert engine.pool.used <= engine.pool.num_pages == 32
    assert sum(a.last.usage.preemptions for a in answers if a.last.usage) > 0
    assert [a.tokens() for a in answers] == alone["greedy"]


def test_a_known_prefix_is_read_not_computed(folder: Path):
    engine = make_engine(folder)
    prompt = make_prompts(1, seed=5)[0] * 2
    first, again = Answer(engine, prompt, GREEDY), None
    finish(engine)
    again = Answer(engine, prompt, GREEDY)
    finish(engine)
    assert first.last.usage.cached_tokens == 0
    assert again.last.usage.cached_tokens == (len(prompt) - 1) // 8 * 8
    assert again.tokens() == first.tokens()


def test_requests_that_arrive_together_share_one_prefill(folder: Path):
    engine = make_engine(folder)
    stem = [9] * 64
    answers = [Answer(engine, [*stem, i], GREEDY) for i in range(3, 9)]
    finish(engine)
    assert sum(a.last.usage.computed_tokens for a in answers) == 65 + 5  # the stem once, then one token each


def test_n_answers_share_the_prompt_and_differ(folder: Path):
    engine = make_engine(folder)
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=3, n=4, ignore_eos=True)
    answer = Answer(engine, [9] * 64, params)
    finish(engine)
    texts = [tuple(answer.tokens(i)) for i in range(4)]
    assert len(set(texts)) == 4
    assert texts == [
        tuple(run(engine, [[9] * 64], SamplingParams(max_tokens=12, temperature=1.5, seed=3 + i, ignore_eos=True))[0])
        for i in range(4)
    ]


@pytest.mark.parametrize("length", [7, 8, 9, 63, 64, 65])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_branches_join_in_one_step_wherever_the_prompt_ends(folder: Path, length: int, weights: str):
    """Prompts that end with a page, too: a branch must not wait for a page that it computes the end of itself."""
    prompt = make_prompts(1, seed=3)[0][:1] * length
    params = SamplingParams(max_tokens=6, temperature=1.5, seed=3, ignore_eos=True)
    engine = make_engine(folder, weights=weights, max_num_batched_tokens=128)
    answer, steps = Answer(engine, prompt, replace(params, n=6)), 0
    while not engine.idle:
        engine.step()
        steps += 1
    assert steps <= 7  # the prompt, then all branches at once
    alone = make_engine(folder, weights=weights, enable_prefix_caching=False)
    for i in range(6):
        assert answer.tokens(i) == run(alone, [prompt], replace(params, seed=3 + i))[0]
    assert leaked(engine) == 0


def test_cancelling_frees_pages_within_a_step_and_disturbs_no_other(folder: Path, alone: dict):
    engine = make_engine(folder, enable_prefix_caching=False)
    prompts = make_prompts()
    answers = [Answer(engine, prompt, GREEDY) for prompt in prompts]
    for _ in range(6):
        engine.step()
    gone = answers[2]
    engine.cancel(gone.request.id)
    engine.step()
    assert gone.last.finish_reason == "cancelled"
    finish(engine)
    assert [a.tokens() for i, a in enumerate(answers) if i != 2] == [a for i, a in enumerate(alone["greedy"]) if i != 2]
    assert engine.pool.used == 0


def test_a_reader_that_raises_is_cut_off_alone(folder: Path, alone: dict):
    engine = make_engine(folder)
    prompts = make_prompts()
    broken = Answer(engine, prompts[0], GREEDY)

    def fail(event: object) -> None:
        raise RuntimeError("reader gone")

    broken.request.sink = fail
    others = [Answer(engine, prompt, GREEDY) for prompt in prompts[1:]]
    finish(engine)
    assert [a.tokens() for a in others] == alone["greedy"][1:]
    assert leaked(engine) == 0


def test_the_answer_ends_at_eos_at_max_tokens_and_at_the_end_of_the_context(folder: Path):
    engine = make_engine(folder, max_model_len=64)
    free = Answer(engine, [5] * 60, SamplingParams(max_tokens=1000, ignore_eos=True))
    finish(engine)
    assert free.last.finish_reason == "length" and len(free.tokens()) == 4
    forced = Answer(engine, [5, 6], SamplingParams(max_tokens=50, logit_bias={2: 100.0}))  # 2 is the model's EOS
    finish(engine)
    assert forced.last.finish_reason == "stop" and forced.tokens() == [2] and forced.text() == ""


def test_a_stop_string_is_found_across_tokens_and_cut(folder: Path):
    engine = make_engine(folder)
    whole = Answer(engine, [9, 10, 11], SamplingParams(max_tokens=40, ignore_eos=True))
    finish(engine)
    text = whole.text()
    stop = text[7:12]
    stopped = Answer(engine, [9, 10, 11], SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))
    never = Answer(engine, [9, 10, 11], SamplingParams(max_tokens=40, ignore_eos=True, stop=("never said",)))
    finish(engine)
    assert stopped.text() == text[: text.index(stop)] and stopped.last.finish_reason == "stop"
    assert never.text() == text and never.last.finish_reason == "length"


def test_logprobs_are_the_models_own(folder: Path):
    engine = make_engine(folder)
    answer = Answer(engine, [9, 10, 11], SamplingParams(max_tokens=3, logprobs=4, temperature=0.7, seed=1))
    finish(engine)
    tokens = answer.tokens()
    truth = torch.log_softmax(engine.score([9, 10, 11, *tokens]), -1)
    for i, entry in enumerate(e for event in answer.events for e in event.logprobs):
        row = truth[2 + i]
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(float(row[tokens[i]]), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(4).indices.tolist()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], GREEDY, BadRequest, "empty"),
        ([5] * 600, GREEDY, BadRequest, "600 tokens"),
        ([5, 512], GREEDY, BadRequest, "512 is not in the vocabulary of 512"),
        ([-1], GREEDY, BadRequest, "-1"),
        ([*range(300), 2**40, -1], GREEDY, BadRequest, str(2**40)),
        ([*range(300), 7.0, "x"], GREEDY, BadRequest, "token id 7.0 is not"),
        ([5, "x", 600], GREEDY, BadRequest, "token id 'x' is not"),
        ([True, np.int64(5)], GREEDY, BadRequest, "int64"),
        ([5, None], GREEDY, BadRequest, "None"),
        ([5], SamplingParams(logit_bias={9999: 1.0}), BadRequest, "9999"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    folder: Path, prompt: list[int], params: SamplingParams, error: type[ForerunError], message: str
):
    engine = make_engine(folder)
    with pytest.raises(error, match=message) as caught:
        Answer(engine, prompt, params)
    assert caught.value.hint
    assert engine.idle


def test_a_prompt_larger_than_the_pool_is_refused(folder: Path):
    engine = make_engine(folder, kv_cache_tokens=64)
    with pytest.raises(OutOfPages, match="100 tokens"):
        Answer(engine, [5] * 100, GREEDY)


def test_limits_are_checked_when_they_are_set():
    with pytest.raises(BadRequest, match="max_num_batched_tokens is 4"):
        EngineConfig(max_model_len=64, kv_cache_tokens=64, max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(BadRequest, match="max_num_seqs is 0"):
        EngineConfig(max_model_len=64, kv_cache_tokens=64, max_num_seqs=0)


def test_many_requests_leave_nothing_behind(folder: Path):
    engine = make_engine(folder, kv_cache_tokens=512)
    draw = random.Random(4)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(60):
        for _ in range(10):
            Answer(engine, [draw.randrange(3, 20) for _ in range(draw.randrange(1, 40))], params)
        finish(engine)
        assert leaked(engine) == 0
    assert_no_state(engine)


def assert_no_state(engine: Engine) -> None:
    engine.clear_cache()
    assert engine.pool.used == 0 and engine.pool.free == engine.pool.num_pages
    assert not engine.output.open_texts and engine.idle


def test_an_answer_ends_where_a_pool_of_uneven_size_ends(folder: Path):
    engine = make_engine(folder, kv_cache_tokens=21, page_size=8)  # two whole pages and five tokens that are none
    answer = Answer(engine, [5, 6, 7], GREEDY)
    finish(engine, steps=60)
    assert answer.last.finish_reason == "length" and len(answer.tokens()) == 13
    with pytest.raises(OutOfPages, match="holds 16"):
        Answer(engine, [5] * 16, GREEDY)


def test_an_error_ends_all_requests_with_it(folder: Path):
    engine = make_engine(folder)
    answers = [Answer(engine, [5, 6, k], GREEDY) for k in range(3)]
    engine.step()
    error = RuntimeError("out of memory")
    engine.end_all(error)
    assert all(a.last.finish_reason == "error" and a.last.error is error for a in answers)
    assert engine.idle and leaked(engine) == 0
