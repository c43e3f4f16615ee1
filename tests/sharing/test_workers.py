"""Workers on one cache: the same numbers as a slow reference that turns every key to where each worker sees it; one
worker alone is ordinary generation.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun import LLM
from forerun.core import Grammar
from forerun.sharing.blocks import view_starts
from tests import tiny
from tests.sharing.common import PREFIXES, assert_no_page_is_held, open_llm, params
from tests.sharing.reference import PROMPT, replay, tokens_of


@pytest.fixture
def llm(llms: Callable[[str], LLM]) -> LLM:
    return llms("qwen3")


# -- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_workers_compute_what_the_reference_computes(family: str, llms: Callable[[str], LLM]):
    llm, lengths = llms(family), [7, 3, 5]  # ends differ: the others go on and still see all that was said
    events = list(llm.workers(PROMPT, 3, [params(m, logprobs=5) for m in lengths], PREFIXES))
    assert [len(ids) for ids in tokens_of(events, 3)] == lengths
    replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES], events)


def test_long_and_missing_prefixes_follow_the_same_rule(llm: LLM):
    ids = llm.tokenizer.encode(tiny.TEXT)
    prefixes = [ids[:150], [], ids[150:155]]
    events = list(llm.workers(PROMPT, 3, params(4, logprobs=3), prefixes))
    replay(llm, prefixes, events)


def test_scaled_positions_without_a_prefix_tree_in_small_chunks(tmp_path: Path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = tiny.write_folder(tmp_path, "llama", rope_parameters=yarn)
    with open_llm(folder, enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=8) as llm:
        assert llm.config.rope.kind == "yarn" and len(llm.encode(PROMPT)) > 8
        events = list(llm.workers(PROMPT, 3, params(4, logprobs=5), PREFIXES))
        assert llm.engine.pool.used == 0
        replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES], events)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_one_layer_equals_the_visible_text_from_scratch(family: str, tmp_path: Path):
    """K and V of a first layer do not depend on what a token sees: then the whole view can be recomputed as a text."""
    with open_llm(tiny.write_folder(tmp_path, family, num_hidden_layers=1)) as llm:
        events = list(llm.workers(PROMPT, 3, params(5, logprobs=5), PREFIXES))
        said = tokens_of(events, 3)
        blocks = [llm.tokenizer.encode(prefix) for prefix in PREFIXES]
        for step in range(5):
            for w in range(3):
                view = [*llm.encode(PROMPT), *blocks[(w + 1) % 3], *blocks[(w + 2) % 3], *blocks[w]]
                expected = torch.log_softmax(llm.engine.score(view)[-1], -1)
                got = [event for event in events if event.index == w][step].logprobs[0]
                assert got.logprob == pytest.approx(float(expected[got.token_id]), abs=1e-4)
                assert [token for token, _ in got.top] == expected.topk(5).indices.tolist()
            blocks = [[*block, said[w][step]] for w, block in enumerate(blocks)]


def test_every_worker_sees_itself_last():
    assert [view_starts(10, [1, 2, 4], w) for w in range(3)] == [[16, 10, 12], [14, 15, 10], [10, 11, 13]]
    assert view_starts(7, [5], 0) == [7]


# -- one worker alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_worker_is_ordinary_generation(family: str, llms: Callable[[str], LLM]):
    llm = llms(family)
    for own in (params(16), params(16, temperature=0.9, seed=5, repetition_penalty=1.2), params(16, stop=("e",))):
        completion = llm.generate(PROMPT, own)[0]
        events = list(llm.workers(PROMPT, 1, own))
        assert tokens_of(events, 1)[0] == completion.token_ids
        assert "".join(event.text for event in events) == completion.text
        assert events[-1].finish_reason == completion.finish_reason


def test_one_worker_with_eight_bit_weights_is_ordinary_generation(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("llama")), dtype="int8", threads=1, quiet=True, kv_cache_tokens=2048) as llm:
        expected = llm.generate(PROMPT, params(60))[0].token_ids
        assert tokens_of(list(llm.workers(PROMPT, 1, params(60))), 1)[0] == expected


def test_a_prefix_of_one_worker_is_part_of_its_prompt(llm: LLM):
    expected = llm.generate(llm.encode(PROMPT) + llm.tokenizer.encode("Bob:"), params(12))[0]
    events = list(llm.workers(PROMPT, 1, params(12), ["Bob:"]))
    assert tokens_of(events, 1)[0] == expected.token_ids
    assert events[-1].usage is not None and events[-1].usage.prompt_tokens == expected.usage.prompt_tokens


# -- events, usage, sampling -------------------------------------------------------------------------------------------


def test_events_come_from_all_workers_in_turn(llm: LLM):
    events = list(llm.workers(PROMPT, 3, [params(2), params(5), params(3)]))
    assert [event.index for event in events] == [0, 1, 2, 0, 1, 2, 1, 2, 1, 1]
    ends = {event.index: event for event in events if event.finish_reason is not None}
    assert {w: end.finish_reason for w, end in ends.items()} == {0: "length", 1: "length", 2: "length"}
    for w, ids in enumerate(tokens_of(events, 3)):
        text = "".join(event.text for event in events if event.index == w)
        assert text == llm.tokenizer.decode(ids)
        usage = ends[w].usage
        assert usage is not None and usage.completion_tokens == usage.steps == len(ids)
        assert 0 < usage.ttft_s <= usage.total_s


def test_the_prompt_is_computed_once_and_stays_known(llm: LLM):
    llm.clear_cache()
    page, count = llm.engine.pool.page_size, len(llm.encode(PROMPT))

    def cached() -> list[int]:
        events = list(llm.workers(PROMPT, 3, params(2)))
        return [event.usage.cached_tokens for event in events if event.usage is not None]

    assert cached() == [0, count, count]
    assert cached() == [(count - 1) // page * page, count, count]


def test_usage_says_how_prompts_were_served_and_adds_up(llm: LLM):
    llm.clear_cache()
    before = llm.stats()
    usages = [e.usage for e in llm.workers(PROMPT, 2, params(4)) if e.usage is not None]
    assert usages[0].served["computed"] == usages[0].prompt_tokens and usages[0].served["pool"] == 0
    assert usages[1].served["pool"] == len(llm.encode(PROMPT)) and usages[1].served["computed"] > 0
    assert usages[0].written == len(llm.encode(PROMPT)) // 16 * 16 and usages[1].written == 0
    after = llm.stats()
    assert after.answers - before.answers == 2
    assert after.prompt_tokens - before.prompt_tokens == sum(usage.prompt_tokens for usage in usages)


def test_a_seed_decides_and_workers_differ(llm: LLM):
    def ask(seed: int) -> list[list[int]]:
        own = params(8, temperature=1.0, seed=seed)
        return tokens_of(list(llm.workers(PROMPT, 3, own, ["", "", ""])), 3)

    first = ask(1)
    assert first == ask(1) != ask(2)
    assert len({tuple(ids) for ids in first}) == 3
    assert len(ask(2**64)) == 3


def test_stop_strings_are_each_workers_own(llm: LLM):
    text = "".join(event.text for event in llm.workers(PROMPT, 2, params(12)) if event.index == 1)
    stop = text[len(text) // 2 :][:2]
    events = list(llm.workers(PROMPT, 2, [params(12), params(12, stop=(stop,))]))
    assert "".join(event.text for event in events if event.index == 1) == text[: text.index(stop)]
    assert {e.index: e.finish_reason for e in events if e.finish_reason} == {0: "length", 1: "stop"}


def test_grammars_are_each_workers_own(llm: LLM):
    events = list(llm.workers(PROMPT, 2, [params(12, grammar=Grammar("regex", "[0-9]{3}")), params(12)]))
    assert re.fullmatch("[0-9]{3}", "".join(event.text for event in events if event.index == 0))
    assert {e.index: e.finish_reason for e in events if e.finish_reason} == {0: "stop", 1: "length"}


def test_the_token_that_means_the_end_is_hidden_from_the_others(llm: LLM):
    (eos,) = llm.config.eos_ids
    each = [params(4, logit_bias={eos: 100.0}, ignore_eos=False), params(6, logprobs=3)]
    events = list(llm.workers(PROMPT, 2, each, PREFIXES[:2]))
    assert tokens_of(events, 2)[0] == [eos] and events[0].finish_reason == "stop"
    replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES[:2]], [e for e in events if e.index == 1])


# -- beside other requests ---------------------------------------------------------------------------------------------


def test_other_requests_are_answered_as_ever_meanwhile(llm: LLM):
    expected = llm.generate("def turn(lamp):", params(40))[0].token_ids
    alone = tokens_of(list(llm.workers(PROMPT, 3, params(30))), 3)
    llm.clear_cache()
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(llm.generate("def turn(lamp):", params(40))[0].token_ids))
    stream = llm.stream("def turn(lamp):", params(40))
    streamed = list(next(stream).token_ids)
    events = []
    for i, event in enumerate(llm.workers(PROMPT, 3, params(30))):
        events.append(event)
        if i == 3:
            thread.start()
        if i % 3 == 0 and (other := next(stream, None)) is not None:
            streamed += other.token_ids
    streamed += [token for event in stream for token in event.token_ids]
    thread.join(timeout=60)
    assert tokens_of(events, 3) == alone
    assert streamed == expected and got == [expected]
    assert_no_page_is_held(llm)


def test_two_groups_may_run_at_once(llm: LLM):
    alone = [tokens_of(list(llm.workers(prompt, 2, params(8))), 2) for prompt in (PROMPT, "The lamp turns")]
    pairs = list(zip(*(llm.workers(prompt, 2, params(8)) for prompt in (PROMPT, "The lamp turns")), strict=True))
    assert [tokens_of([pair[i] for pair in pairs], 2) for i in range(2)] == alone


def test_requests_go_on_while_only_workers_step(llm: LLM):
    stream = llm.stream("twelve times", params(10, speculation="off"))
    next(stream)
    list(llm.workers(PROMPT, 2, params(20)))
    assert llm.engine.idle  # the workers' turns served the request to its end
    assert sum(len(event.token_ids) for event in stream) == 9
