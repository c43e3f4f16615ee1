"""Workers on one cache: the same numbers as a slow reference that turns every key to where each worker sees it; one
worker alone is ordinary generation; nothing is left behind however it ends.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.core import Grammar
from forerun.engine.sequence import Event
from forerun.errors import BadRequest, ForerunError, OutOfPages
from forerun.sharing.blocks import view_starts
from forerun.sharing.workers import workers
from tests import tiny
from tests.sharing.reference import PROMPT, replay, tokens_of

PREFIXES = ["Alice:", "Bob, who listens:", " Carol"]


def params(max_tokens: int = 6, **others) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **others})


def open_llm(folder: Path, **options) -> LLM:
    return LLM(str(folder), weights="float32", threads=1, quiet=True, **{"pool_tokens": 2048, **options})


@pytest.fixture(scope="module")
def llms(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[[str], LLM]]:
    """`llms("qwen3")`: a tiny model of that family."""
    made: dict[str, LLM] = {}

    def find(family: str) -> LLM:
        if family not in made:
            made[family] = open_llm(tiny_folder(family))
        return made[family]

    yield find
    for llm in made.values():
        llm.close()


@pytest.fixture
def llm(llms: Callable[[str], LLM]) -> LLM:
    return llms("qwen3")


def assert_no_page_is_held(llm: LLM) -> None:
    llm.clear_cache()
    assert llm.engine.pool.used == 0


# -- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_workers_compute_what_the_reference_computes(family: str, llms: Callable[[str], LLM]):
    llm, lengths = llms(family), [7, 3, 5]  # ends differ: the others go on and still see all that was said
    events = list(workers(llm, PROMPT, 3, [params(m, logprobs=5) for m in lengths], PREFIXES))
    assert [len(ids) for ids in tokens_of(events, 3)] == lengths
    replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES], events)


def test_long_and_missing_prefixes_follow_the_same_rule(llm: LLM):
    ids = llm.tokenizer.encode(tiny.TEXT)
    prefixes = [ids[:150], [], ids[150:155]]
    events = list(workers(llm, PROMPT, 3, params(4, logprobs=3), prefixes))
    replay(llm, prefixes, events)


def test_scaled_positions_without_a_prefix_tree_in_small_chunks(tmp_path: Path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    folder = tiny.write_folder(tmp_path, "llama", rope_parameters=yarn)
    with open_llm(folder, prefix_cache=False, max_batch=8, chunk_tokens=8) as llm:
        assert llm.config.rope.kind == "yarn" and len(llm.encode(PROMPT)) > 8
        events = list(workers(llm, PROMPT, 3, params(4, logprobs=5), PREFIXES))
        assert llm.engine.pool.used == 0
        replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES], events)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_one_layer_equals_the_visible_text_from_scratch(family: str, tmp_path: Path):
    """K and V of a first layer do not depend on what a token sees: then the whole view can be recomputed as a text."""
    with open_llm(tiny.write_folder(tmp_path, family, num_hidden_layers=1)) as llm:
        events = list(workers(llm, PROMPT, 3, params(5, logprobs=5), PREFIXES))
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
        events = list(workers(llm, PROMPT, 1, own))
        assert tokens_of(events, 1)[0] == completion.token_ids
        assert "".join(event.text for event in events) == completion.text
        assert events[-1].finish_reason == completion.finish_reason


def test_one_worker_with_eight_bit_weights_is_ordinary_generation(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("llama")), weights="int8", threads=1, quiet=True, pool_tokens=2048) as llm:
        expected = llm.generate(PROMPT, params(60))[0].token_ids
        assert tokens_of(list(workers(llm, PROMPT, 1, params(60))), 1)[0] == expected


def test_a_prefix_of_one_worker_is_part_of_its_prompt(llm: LLM):
    expected = llm.generate(llm.encode(PROMPT) + llm.tokenizer.encode("Bob:"), params(12))[0]
    events = list(workers(llm, PROMPT, 1, params(12), ["Bob:"]))
    assert tokens_of(events, 1)[0] == expected.token_ids
    assert events[-1].usage is not None and events[-1].usage.prompt_tokens == expected.usage.prompt_tokens


# -- events, usage, sampling -------------------------------------------------------------------------------------------


def test_events_come_from_all_workers_in_turn(llm: LLM):
    events = list(workers(llm, PROMPT, 3, [params(2), params(5), params(3)]))
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
        events = list(workers(llm, PROMPT, 3, params(2)))
        return [event.usage.cached_tokens for event in events if event.usage is not None]

    assert cached() == [0, count, count]
    assert cached() == [(count - 1) // page * page, count, count]


def test_usage_says_how_prompts_were_served_and_adds_up(llm: LLM):
    llm.clear_cache()
    before = llm.stats()
    usages = [e.usage for e in workers(llm, PROMPT, 2, params(4)) if e.usage is not None]
    assert usages[0].served["computed"] == usages[0].prompt_tokens and usages[0].served["pool"] == 0
    assert usages[1].served["pool"] == len(llm.encode(PROMPT)) and usages[1].served["computed"] > 0
    assert usages[0].written == len(llm.encode(PROMPT)) // 16 * 16 and usages[1].written == 0
    after = llm.stats()
    assert after.answers - before.answers == 2
    assert after.prompt_tokens - before.prompt_tokens == sum(usage.prompt_tokens for usage in usages)


def test_a_seed_decides_and_workers_differ(llm: LLM):
    def ask(seed: int) -> list[list[int]]:
        own = params(8, temperature=1.0, seed=seed)
        return tokens_of(list(workers(llm, PROMPT, 3, own, ["", "", ""])), 3)

    first = ask(1)
    assert first == ask(1) != ask(2)
    assert len({tuple(ids) for ids in first}) == 3
    assert len(ask(2**64)) == 3


def test_stop_strings_are_each_workers_own(llm: LLM):
    text = "".join(event.text for event in workers(llm, PROMPT, 2, params(12)) if event.index == 1)
    stop = text[len(text) // 2 :][:2]
    events = list(workers(llm, PROMPT, 2, [params(12), params(12, stop=(stop,))]))
    assert "".join(event.text for event in events if event.index == 1) == text[: text.index(stop)]
    assert {e.index: e.finish_reason for e in events if e.finish_reason} == {0: "length", 1: "stop"}


def test_grammars_are_each_workers_own(llm: LLM):
    events = list(workers(llm, PROMPT, 2, [params(12, grammar=Grammar("regex", "[0-9]{3}")), params(12)]))
    assert re.fullmatch("[0-9]{3}", "".join(event.text for event in events if event.index == 0))
    assert {e.index: e.finish_reason for e in events if e.finish_reason} == {0: "stop", 1: "length"}


def test_the_token_that_means_the_end_is_hidden_from_the_others(llm: LLM):
    (eos,) = llm.config.eos_ids
    each = [params(4, logit_bias={eos: 100.0}, ignore_eos=False), params(6, logprobs=3)]
    events = list(workers(llm, PROMPT, 2, each, PREFIXES[:2]))
    assert tokens_of(events, 2)[0] == [eos] and events[0].finish_reason == "stop"
    replay(llm, [llm.tokenizer.encode(prefix) for prefix in PREFIXES[:2]], [e for e in events if e.index == 1])


# -- beside other requests ---------------------------------------------------------------------------------------------


def test_other_requests_are_answered_as_ever_meanwhile(llm: LLM):
    expected = llm.generate("def turn(lamp):", params(40))[0].token_ids
    alone = tokens_of(list(workers(llm, PROMPT, 3, params(30))), 3)
    llm.clear_cache()
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(llm.generate("def turn(lamp):", params(40))[0].token_ids))
    stream = llm.stream("def turn(lamp):", params(40))
    streamed = list(next(stream).token_ids)
    events = []
    for i, event in enumerate(workers(llm, PROMPT, 3, params(30))):
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
    alone = [tokens_of(list(workers(llm, prompt, 2, params(8))), 2) for prompt in (PROMPT, "The lamp turns")]
    pairs = list(zip(*(workers(llm, prompt, 2, params(8)) for prompt in (PROMPT, "The lamp turns")), strict=True))
    assert [tokens_of([pair[i] for pair in pairs], 2) for i in range(2)] == alone


def test_requests_go_on_while_only_workers_step(llm: LLM):
    stream = llm.stream("twelve times", params(10, speculate="off"))
    next(stream)
    list(workers(llm, PROMPT, 2, params(20)))
    assert llm.engine.idle  # the workers' turns served the request to its end
    assert sum(len(event.token_ids) for event in stream) == 9


# -- leaving early, and errors -----------------------------------------------------------------------------------------


def test_closing_the_iterator_frees_all_pages(llm: LLM):
    llm.clear_cache()
    running = workers(llm, PROMPT, 4, params(50))
    assert llm.engine.pool.used == 0  # nothing is taken before the first event is asked for
    next(running)
    assert llm.engine.pool.used >= 4 * llm.engine.pool.pages_for(50)
    running.close()  # type: ignore[attr-defined]
    assert_no_page_is_held(llm)


def test_a_failing_forward_frees_all_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    running = workers(llm, PROMPT, 2, params(50))
    next(running)

    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("forerun.sharing.blocks.BlockAttention.attend", fail)
    with pytest.raises(RuntimeError, match="broken"):
        list(running)
    assert_no_page_is_held(llm)


def test_a_closed_llm_ends_the_workers(tiny_folder: Callable[[str], Path]):
    llm = open_llm(tiny_folder("llama"))
    running = workers(llm, PROMPT, 2, params(50))
    next(running)
    llm.close()
    with pytest.raises(ForerunError, match="closed"):
        list(running)
    assert_no_page_is_held(llm)
    with pytest.raises(ForerunError, match="closed"):
        workers(llm, PROMPT, 2, params(50))


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (0, {}, "n is 0, there can be 1 to 16"),
        (17, {}, "n is 17"),
        (True, {}, "n is True"),
        (2, {"params": [params()]}, "params for 1 workers, n is 2"),
        (2, {"params": "fast"}, "must be SamplingParams, got 'fast'"),
        (2, {"params": params(n=3)}, "n=3"),
        (2, {"params": params(prefill="speculative")}, "speculative"),
        (2, {"params": params(speculate="lookup")}, "lookup"),
        (2, {"prefixes": ["a"]}, "prefixes for 1 workers, n is 2"),
        (2, {"prefixes": "ab"}, "must be a list"),
        (2, {"prefixes": [3, 4]}, "cannot be a int"),
        (2, {"prefixes": [[3], [9999]]}, "9999"),
        (4, {"params": params(300), "prefixes": [[3]] * 4}, "up to 1204, the context holds 1024"),
    ],
)
def test_what_cannot_run_is_refused_at_once(llm: LLM, n: int, options: dict, message: str):
    with pytest.raises(BadRequest, match=re.escape(message)) as caught:
        workers(llm, PROMPT, n, **options)
    assert caught.value.hint


def test_too_few_pages_are_named(tiny_folder: Callable[[str], Path]):
    with open_llm(tiny_folder("llama"), pool_tokens=512) as llm:
        with pytest.raises(OutOfPages, match="need 39 pages of 16 tokens, the KV pool has 32"):
            workers(llm, [5] * 40, 4, params(140), [[5]] * 4)
        running = workers(llm, [5] * 40, 2, params(140), [[5]] * 2)
        next(running)
        with pytest.raises(OutOfPages, match="need 19 more pages of 16 tokens, 11 of 32 are free"):
            next(workers(llm, [5] * 40, 2, params(140), [[5]] * 2))
        assert len(tokens_of(list(running), 2)[1]) == 140  # the first group goes on as if nothing had happened
        assert_no_page_is_held(llm)


# -- an iterator that nobody goes on with ------------------------------------------------------------------------------


def paused(llm: LLM) -> Iterator[Event]:
    """Workers that hold 29 of 32 pages, after their first event."""
    running = workers(llm, [5] * 40, 2, params(200), [[5]] * 2)
    next(running)
    return running


def test_a_request_beside_a_paused_iterator_of_its_own_thread_does_not_wait_for_ever(
    tiny_folder: Callable[[str], Path],
):
    with open_llm(tiny_folder("llama"), pool_tokens=512) as llm:
        running = paused(llm)
        with pytest.raises(OutOfPages, match="29 of 32 pages belong to an iterator of workers") as caught:
            llm.generate([7] * 100, params(4))
        assert "close it" in caught.value.hint
        with pytest.raises(OutOfPages, match="finds no room"):  # it was let in, and then had no page to go on
            llm.generate([7] * 40, params(40))
        assert len(tokens_of(list(running), 2)[1]) == 200  # the group goes on as if nothing had happened
        assert len(llm.generate([7] * 100, params(4))[0].choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_a_request_elsewhere_waits_for_workers_who_go_on(tiny_folder: Callable[[str], Path]):
    with open_llm(tiny_folder("llama"), pool_tokens=512) as llm:
        running = paused(llm)
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(llm.generate, [7] * 100, params(4))
            assert len(tokens_of(list(running), 2)[1]) == 200
            assert len(answer.result(30)[0].choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_pages_of_an_abandoned_iterator_are_taken_back(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forerun.engine.loans.PATIENCE", 0.05)
    with open_llm(tiny_folder("llama"), pool_tokens=512) as llm:
        running = paused(llm)
        with ThreadPoolExecutor(1) as other:
            assert len(other.submit(llm.generate, [7] * 100, params(4)).result(30)[0].choices[0].token_ids) == 4
        with pytest.raises(OutOfPages, match="taken back"):
            list(running)
        running = paused(llm)
        assert len(asyncio.run(llm.agenerate([8] * 100, params(4))).choices[0].token_ids) == 4
        assert_no_page_is_held(llm)


def test_an_iterator_may_end_while_its_thread_has_the_engine(llm: LLM):
    """As when a garbage collector ends it in the middle of a step."""
    running = workers(llm, PROMPT, 2, params(50))
    next(running)
    llm._driver.visit(lambda engine: running.close())  # type: ignore[attr-defined]
    llm.generate("twelve", params(2))
    assert_no_page_is_held(llm)
