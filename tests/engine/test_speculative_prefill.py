"""Drafted prompts inside the engine: nothing approximate ever answers an exact request, nothing is lost or leaked."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from forerun.cache.approximate import ApproximatePages
from forerun.cache.prefix import PrefixTree
from forerun.core import Prefill, SamplingParams
from forerun.engine.engine import Engine
from forerun.errors import BadProfile, BadRequest
from tests.engine.common import Answer, finish, leaked, make_engine, run
from tests.engine.fake_prefiller import TAIL, FakePrefiller, fake

EXACT = SamplingParams(max_tokens=16, ignore_eos=True)
DRAFTED = SamplingParams(max_tokens=16, ignore_eos=True, prefill="speculative")
BAD = 3.0


def prompt(seed: int, tokens: int = 150) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(tokens)]


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(bad: float = BAD, config: dict[str, Any] | None = None, **values: Any) -> Engine:
        return make_engine(tiny_folder("qwen2"), prefiller=fake(bad=bad, **values), **(config or {}))

    return engine


@pytest.fixture(scope="module")
def truth(tiny_folder: Callable[[str], Path]) -> Callable[..., list[int]]:
    engine = make_engine(tiny_folder("qwen2"), enable_prefix_caching=False)

    def exact(text: list[int], params: SamplingParams = EXACT) -> list[int]:
        return run(engine, [text], params)[0]

    return exact


def prefiller(engine: Engine) -> FakePrefiller:
    return cast(FakePrefiller, engine.speculative_prefill.prefiller)


def assert_clean(engine: Engine) -> None:
    assert engine.idle and leaked(engine) == 0 and not prefiller(engine).open_states
    engine.clear_cache()
    assert engine.pool.used == 0 and not engine.output.open_texts


def test_a_perfect_draft_answers_like_exact_prefill(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(bad=0.0)
    answer = Answer(engine, prompt(0), DRAFTED)
    finish(engine)
    assert answer.tokens() == truth(prompt(0))
    usage = answer.last.usage
    assert usage is not None and usage.prefill is not None and usage.cached_tokens == 0
    assert usage.prefill.drafted == 150 - TAIL
    assert_clean(engine)


def test_a_bad_draft_is_really_used_and_never_answers_an_exact_request(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make()
    bad = run(engine, [prompt(0)], DRAFTED)[0]
    assert bad != truth(prompt(0))
    after = Answer(engine, prompt(0), EXACT)
    finish(engine)
    assert after.tokens() == truth(prompt(0))
    assert after.last.usage is not None
    assert after.last.usage.cached_tokens == 0 and after.last.usage.prefill is None
    assert_clean(engine)


def test_an_exact_request_is_exact_while_a_draft_of_its_prompt_runs(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make()
    for wait in range(0, 14, 2):  # while it is drafted, when its tail runs, and while it answers
        drafted = Answer(engine, prompt(1), DRAFTED)
        for _ in range(wait):
            engine.step()
        exact = Answer(engine, prompt(1), EXACT)
        later = Answer(engine, [*prompt(1), 5], EXACT)
        finish(engine)
        assert exact.tokens() == truth(prompt(1)) and later.tokens() == truth([*prompt(1), 5])
        assert len(drafted.tokens()) == 16
        assert_clean(engine)


def test_who_wants_it_exact_does_not_wait_for_a_draft(make: Callable[..., Engine]):
    engine = make()
    Answer(engine, prompt(1, 300), DRAFTED)
    engine.step()
    Answer(engine, prompt(1, 300), EXACT)
    other = replace(EXACT, prefill=Prefill("speculative", source="other"))
    Answer(engine, prompt(1, 300), other)  # computed or drafted: the exact one is worth waiting for
    engine.step()
    assert [seq.params for seq in engine.scheduler.running] == [DRAFTED, EXACT]
    engine.end_all()
    assert_clean(engine)


def test_only_what_is_not_known_exactly_is_drafted(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make()
    run(engine, [prompt(2, 60)], EXACT)
    again = Answer(engine, [*prompt(2, 60), *prompt(3, 90)], DRAFTED)
    finish(engine)
    assert prefiller(engine).opened[-1].first == again.last.usage.cached_tokens == 56  # type: ignore[union-attr]
    exact = Answer(engine, [*prompt(2, 60), *prompt(3, 90)], EXACT)
    finish(engine)
    assert exact.last.usage.cached_tokens == 56  # type: ignore[union-attr]
    assert exact.tokens() == truth([*prompt(2, 60), *prompt(3, 90)])
    assert_clean(engine)


def test_a_draft_is_shared_under_its_key_and_recomputing_touches_only_copies(make: Callable[..., Engine]):
    engine = make()
    first = run(engine, [prompt(4)], DRAFTED)[0]
    where = engine.approximate._match("fake auto", prompt(4))
    before = [layer[0].clone() for layer in engine.pool.kv]
    assert run(engine, [prompt(4)], DRAFTED)[0] == first  # from the same K/V
    state = prefiller(engine).opened[-1]
    assert state.known == 150 - TAIL
    assert (state.depths[: 150 - TAIL] == 1).all()
    slots = [page * 8 + i for page in where for i in range(8)]
    assert all((layer[0][slots] == old[slots]).all() for layer, old in zip(engine.pool.kv, before, strict=True))
    other = SamplingParams(max_tokens=16, ignore_eos=True, prefill=Prefill("speculative", source="other"))
    run(engine, [prompt(4)], other)
    assert prefiller(engine).opened[-1].known == 0
    assert_clean(engine)


def test_others_decode_and_prefill_while_a_prompt_is_drafted(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(config={"max_num_batched_tokens": 32})
    decoding = Answer(engine, prompt(6, 20), SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    drafted = Answer(engine, prompt(7, 400), DRAFTED)
    for _ in range(2):
        engine.step()
    assert engine.scheduler.drafting
    other = Answer(engine, prompt(8, 100), EXACT)
    seen = len(decoding.tokens())
    while engine.scheduler.drafting:
        engine.step()
    assert len(decoding.tokens()) >= seen + 10  # a token in every step
    assert other.tokens()  # it did not wait for the long one
    finish(engine)
    assert other.tokens() == truth(prompt(8, 100)) and len(drafted.tokens()) == 16
    assert decoding.tokens() == truth(prompt(6, 20), SamplingParams(max_tokens=60, ignore_eos=True))
    assert_clean(engine)


def test_a_draft_that_ends_exact_is_exact_prefill(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(exact_from=60)
    answer = Answer(engine, prompt(9), DRAFTED)
    finish(engine)
    assert answer.tokens() == truth(prompt(9))
    assert answer.last.usage.prefill.fell_back == "checks failed"  # type: ignore[union-attr]
    again = Answer(engine, prompt(9), EXACT)
    finish(engine)
    assert again.last.usage.cached_tokens == 144  # type: ignore[union-attr]
    assert again.tokens() == truth(prompt(9))
    assert_clean(engine)


def test_short_prompts_and_allowed_fall_backs_are_exact(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make()
    short = Answer(engine, prompt(10, 12), DRAFTED)
    impossible = Prefill("speculative", source="impossible", allow_exact=True)
    allowed = Answer(engine, prompt(11), SamplingParams(max_tokens=16, ignore_eos=True, prefill=impossible))
    finish(engine)
    assert short.tokens() == truth(prompt(10, 12)) and allowed.tokens() == truth(prompt(11))
    assert "impossible" in allowed.last.usage.prefill.fell_back  # type: ignore[union-attr]
    with pytest.raises(BadRequest, match="impossible"):
        Answer(engine, prompt(11), SamplingParams(prefill=Prefill("speculative", source="impossible")))
    assert_clean(engine)


def test_without_a_profile_only_exact_prefill_can_be_asked_for(tiny_folder: Callable[[str], Path]):
    engine = make_engine(tiny_folder("qwen2"))
    with pytest.raises(BadProfile, match="needs a profile") as caught:
        Answer(engine, prompt(0), DRAFTED)
    assert "profile" in caught.value.hint and "--allow-exact" in caught.value.hint and engine.idle
    with pytest.raises(BadProfile, match="needs a profile"):  # before a prompt is there, too
        engine.speculative_prefill.check(DRAFTED.prefill, 1)
    allowed = SamplingParams(max_tokens=2, prefill=Prefill("speculative", allow_exact=True))
    engine.speculative_prefill.check(allowed.prefill, 1)
    answer = Answer(engine, prompt(0), allowed)
    finish(engine)
    assert answer.tokens() and "profile" in answer.last.usage.prefill.fell_back  # type: ignore[union-attr]


def test_a_source_that_fails_ends_its_own_request_only(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(fails_at=48)
    failing, other = Answer(engine, prompt(12), DRAFTED), Answer(engine, prompt(13), EXACT)
    finish(engine)
    assert failing.last.finish_reason == "error" and "source failed" in str(failing.last.error)
    assert other.tokens() == truth(prompt(13))
    assert_clean(engine)


def test_a_source_that_fails_leaves_it_to_exact_prefill_where_that_was_allowed(
    make: Callable[..., Engine], truth: Callable[..., list[int]]
):
    engine = make(fails_at=48)
    answer = Answer(engine, prompt(12), replace(EXACT, prefill=Prefill("speculative", allow_exact=True)))
    finish(engine)
    assert answer.tokens() == truth(prompt(12))
    assert answer.last.usage.prefill.fell_back == "the source failed"  # type: ignore[union-attr]
    assert_clean(engine)


def test_cancelling_at_any_time_frees_everything(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make()
    for wait in range(12):
        gone, other = Answer(engine, prompt(14), DRAFTED), Answer(engine, prompt(15), EXACT)
        for _ in range(wait):
            engine.step()
        engine.cancel(gone.request.id)
        finish(engine)
        assert gone.last.finish_reason == "cancelled"
        assert other.tokens() == truth(prompt(15))
        assert_clean(engine)


def test_a_small_pool_preempts_and_evicts_drafts_first(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(config={"kv_cache_tokens": 320})
    texts = [prompt(seed, 30 + 20 * (seed % 4)) for seed in range(20, 28)]
    answers = [
        Answer(engine, text, replace(DRAFTED if i % 2 else EXACT, max_tokens=50)) for i, text in enumerate(texts)
    ]
    finish(engine)
    for i, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        assert len(answer.tokens()) == 50
        if i % 2 == 0:
            assert answer.tokens() == truth(text, replace(EXACT, max_tokens=50))
    preempted = [a.last.usage.preemptions > 0 for a in answers if a.last.usage]
    assert any(preempted[::2]) and any(preempted[1::2])
    assert leaked(engine) == 0
    engine.clear_cache()
    run(engine, [texts[0]], DRAFTED)
    run(engine, [texts[1]], EXACT)
    known, held = len(engine.tree.match(texts[1])), engine.approximate.num_pages
    assert known and held
    engine.scheduler.make_room(engine.pool.free + 1)
    assert engine.approximate.num_pages < held and len(engine.tree.match(texts[1])) == known
    assert_clean(engine)


def test_mixed_modes_in_one_batch(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    stem, engine = prompt(30, 64), make(config={"kv_cache_tokens": 4096})
    texts = [[*stem, *prompt(seed, 70)] for seed in range(31, 39)]
    answers = [Answer(engine, text, DRAFTED if i % 3 == 1 else EXACT) for i, text in enumerate(texts)]
    finish(engine)
    for i, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        assert (answer.last.usage.prefill is not None) == (i % 3 == 1)  # type: ignore[union-attr]
        if i % 3 != 1:
            assert answer.tokens() == truth(text)
    assert_clean(engine)


def test_without_a_prefix_cache_nothing_is_kept(make: Callable[..., Engine], truth: Callable[..., list[int]]):
    engine = make(config={"enable_prefix_caching": False})
    for _ in range(2):
        run(engine, [prompt(40)], DRAFTED)
        assert engine.pool.used == 0
    assert run(engine, [prompt(40)], EXACT)[0] == truth(prompt(40))


def test_the_exact_tree_cannot_take_approximate_pages(make: Callable[..., Engine]):
    engine = make()
    where = ApproximatePages(array("i", engine.pool.allocate(2)), 0, np.zeros(16, dtype=np.int16))
    with pytest.raises(TypeError):
        PrefixTree(engine.pool).insert([1] * 16, where)  # type: ignore[arg-type]
