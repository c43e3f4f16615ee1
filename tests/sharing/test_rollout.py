"""Rollout trees on a tiny model: what they share, what they cost, and what bad input does."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core import TokenLogprob
from forerun.errors import BadRequest, ForerunError
from forerun.recipes.compare import compare, sampled
from forerun.sharing.branching import entropy, step_starts
from forerun.sharing.rollout import RolloutConfig, arollout
from forerun.sharing.scoring import score_continuations
from forerun.sharing.tree import RolloutNode, RolloutTree, Trajectory, group_relative, node_advantages, token_advantages
from tests.tiny import TEXT

PARAMS = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, speculation="off")
STEM = TEXT[:400]


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(str(tiny_folder("llama")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=16384) as made:
        yield made


def grow(llm: LLM, **changes: Any) -> RolloutTree:
    values: dict[str, Any] = dict(width=3, depth=3, token_budget=600, branch_on="entropy", params=PARAMS, min_prob=0.0)
    return llm.rollout(changes.pop("prompt", STEM), **(values | changes))


def test_the_stem_is_computed_once(llm: LLM):
    llm.clear_cache()
    stem = len(llm.encode(STEM))
    again = stem - (stem - 1) // 16 * 16
    tree = grow(llm, depth=1, width=4)
    assert tree.root.cost.computed + tree.root.children[0].cost.prefill == stem
    assert [child.cost.prefill for child in tree.root.children] == [again] * 4
    assert tree.cost.computed == stem + 3 * again + 4 * 40
    assert grow(llm, depth=1, width=2).root.cost.computed == 0  # it is known by now


def test_branches_share_all_but_a_page_and_the_budget_holds(llm: LLM):
    tree = grow(llm)
    found = tree.trajectories()
    assert len(found) > 7
    assert tree.cost.computed <= tree.token_budget
    assert tree.cost.generated < sum(len(t.token_ids) for t in found) / 1.5
    for node in tree.nodes[1:]:
        assert node.cost.prefill <= 16
        assert len(node.token_ids) == node.cost.generated + node.forced
        assert len(node.children) <= 3 and node.generation <= 3
    assert all(t.complete and len(t.token_ids) == len(t.logprobs) == 40 for t in found)
    assert len({tuple(t.token_ids) for t in found}) == len(found)


def test_logprobs_are_those_of_the_model(llm: LLM):
    tree = grow(llm)
    stem = llm.encode(STEM)
    branched = next(t for t in tree.trajectories() if len(t.forced) >= 2)
    expected = score_continuations(llm, stem, [branched.token_ids]).logprobs[0]
    assert [entry.logprob for entry in branched.logprobs] == pytest.approx(expected, abs=1e-3)
    assert [entry.token_id for entry in branched.logprobs] == branched.token_ids
    assert branched.logprob == pytest.approx(sum(expected), abs=1e-2)
    assert branched.text == llm.tokenizer.decode(branched.token_ids)


def test_the_seed_of_the_parameters_decides_too(llm: LLM):
    def ask(seed: int) -> list[list[int]]:
        own = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=seed)
        return [t.token_ids for t in llm.rollout(STEM, 3, 1, 1000, params=own).trajectories()]

    first = ask(5)
    assert first == ask(5) != ask(6) and len({tuple(tokens) for tokens in first}) == 3
    with pytest.raises(BadRequest, match="seed is 4, params.seed is 5"):
        RolloutConfig(2, 1, 1000, params=SamplingParams(seed=5), seed=4)


def test_the_seed_decides(llm: LLM):
    first, again, other = (grow(llm, seed=seed).trajectories() for seed in (5, 5, 6))
    assert [t.token_ids for t in first] == [t.token_ids for t in again]
    assert [t.token_ids for t in first] != [t.token_ids for t in other]


def test_steps_branch_where_a_step_begins(llm: LLM):
    tree = grow(llm, branch_on="step", separator="e")
    starts = [(t, at) for t in tree.trajectories() for at in t.forced if at]
    assert starts and all("e" in llm.tokenizer.decode([t.token_ids[at - 1]]) for t, at in starts)


def tree_root(node: RolloutNode) -> RolloutNode:
    while node.parent is not None:
        node = node.parent
    return node


def test_a_function_says_where_to_branch(llm: LLM):
    tree = grow(llm, branch_on=lambda node: [5] if node.parent is tree_root(node) and len(node.token_ids) > 5 else [])
    assert {at for t in tree.trajectories() for at in t.forced} == {5}


def test_step_starts_count_separators_in_a_row_once(llm: LLM):
    ids = [t for piece in ("one", "\n", "\n", "two", "\n") for t in llm.tokenizer.encode(piece)]
    two = len(llm.tokenizer.encode("one")) + 2
    assert step_starts(ids, llm.tokenizer, "\n") == [two]


def test_entropy_of_what_is_known_of_a_distribution():
    half = math.log(0.5)
    assert entropy(TokenLogprob(1, half, [(1, half), (2, half)])) == pytest.approx(math.log(2))
    assert entropy(TokenLogprob(1, half, [(1, half)])) == pytest.approx(math.log(2))  # the rest counts as one
    assert entropy(TokenLogprob(1, 0.0, [(1, 0.0)])) == 0.0


# -- scores ------------------------------------------------------------------------------------------------------------


def test_the_best_are_branched(llm: LLM):
    def score(t: Trajectory) -> float:
        return float(t.token_ids[0])

    tree = grow(llm, score=score, keep=0.3, width=4, depth=2)
    firsts = sorted((child.token_ids[0] for child in tree.root.children), reverse=True)
    branched = [child for child in tree.root.children if child.children]
    assert branched and {child.token_ids[0] for child in branched} <= set(firsts[:2])
    assert all(t.score == t.token_ids[0] for t in tree.trajectories())


def test_a_score_that_raises_fails_its_branch_alone(llm: LLM):
    def score(t: Trajectory) -> float:
        if len(calls) == 1:
            calls.append(1)
            raise ValueError("no idea")
        calls.append(1)
        return 1.0

    calls: list[int] = []
    tree = grow(llm, score=score)
    (failed,) = tree.failures()
    assert failed.status == "failed" and isinstance(failed.error, BadRequest) and "no idea" in str(failed.error)
    assert isinstance(failed.error.__cause__, ValueError)
    assert len(tree.trajectories()) == len(calls) - 1 > 3
    assert llm.engine.idle


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", None])
def test_a_score_must_be_a_number(llm: LLM, value: Any):
    tree = grow(llm, depth=1, width=2, score=lambda t: value)
    assert len(tree.failures()) == 2 and not tree.trajectories()
    assert repr(value) in str(tree.failures()[0].error)


def test_scores_are_made_while_others_run(llm: LLM):
    """The score of the first answer waits for tokens that another answer can only get meanwhile."""
    longer = threading.Event()
    seen: list[bool] = []

    def score(t: Trajectory) -> float:
        if not seen:
            seen.append(longer.wait(20))
        return 0.0

    async def both() -> None:
        params = SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True)
        config = RolloutConfig(2, 1, 1200, params=params, score=score)
        task = asyncio.ensure_future(arollout(llm, STEM, config))
        await llm.agenerate("A boat", SamplingParams(max_tokens=60, ignore_eos=True))
        longer.set()
        await task

    asyncio.run(both())
    assert seen == [True]


def test_pruned_branches_stop_at_a_step(llm: LLM):
    tree = grow(llm, depth=1, width=4, separator="e", score=lambda t: 1.0 if t.complete else -1.0, prune_below=0.0)
    stopped = [leaf for leaf in tree.root.leaves() if leaf.status == "pruned"]
    assert stopped and all(leaf.finish_reason == "cancelled" and len(leaf.token_ids) < 40 for leaf in stopped)
    assert len(tree.trajectories()) + len(stopped) == len(tree.trajectories(complete=False)) == 4
    assert all(leaf.cost.generated == len(leaf.token_ids) for leaf in stopped)


def test_branches_too_alike_are_stopped(llm: LLM):
    cold = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, speculation="off")
    free, bound = (grow(llm, depth=1, width=4, params=cold, min_distance=least) for least in (0.0, 0.2))
    assert len(free.trajectories()) == 4 and len({tuple(t.token_ids) for t in free.trajectories()}) == 1
    assert [leaf.status for leaf in bound.root.leaves()] == ["finished", "alike", "alike", "alike"]
    assert bound.cost.computed < free.cost.computed


# -- advantages and comparison -----------------------------------------------------------------------------------------


def test_group_relative_advantages():
    assert group_relative([1.0, 3.0]) == pytest.approx([-1.0, 1.0], abs=1e-4)
    assert group_relative([2.0, 2.0, 2.0]) == [0.0, 0.0, 0.0]
    assert group_relative([]) == []


def test_advantages_of_a_tree_compare_siblings(llm: LLM):
    tree = RolloutTree([1], llm.tokenizer, 100)
    a, b = tree.add(tree.root, 1), tree.add(tree.root, 1)
    for node, score in ((a, 1.0), (b, 0.0)):
        node.token_ids, node.logprobs, node.status = (
            [5, 6, 7],
            [TokenLogprob(t, -1.0, []) for t in (5, 6, 7)],
            "finished",
        )
        node.score = score
    upper = tree.split(a, 1)
    c = tree.add(upper, 2)
    c.token_ids, c.logprobs, c.status, c.score = [9], [TokenLogprob(9, -2.0, [])], "finished", 0.5
    assert tree.value(upper) == 0.75
    found = node_advantages(tree)
    assert found[upper.id] == pytest.approx(1.0, abs=1e-4) and found[b.id] == pytest.approx(-1.0, abs=1e-4)
    assert found[a.id] == pytest.approx(1.0, abs=1e-4) and found[c.id] == pytest.approx(-1.0, abs=1e-4)
    assert token_advantages(tree)[0] == [found[upper.id], found[a.id], found[a.id]]
    assert [t.token_ids for t in tree.trajectories()] == [[5, 6, 7], [5, 6, 7], [5, 9]]


def test_trees_give_more_distinct_answers_for_their_tokens(llm: LLM):
    config = RolloutConfig(3, 4, 800, "entropy", params=PARAMS, min_prob=0.0)
    found = compare(llm, STEM, config)
    assert found.tree.tokens <= 800 and found.independent.tokens <= 800
    assert found.gain > 1.2 and found.gain_unshared > 2 * found.gain
    assert found.tree.per_thousand == pytest.approx(1000 * found.tree.distinct / found.tree.tokens)


def test_a_key_says_which_answers_are_the_same(llm: LLM):
    tree = grow(llm, depth=1)
    assert sampled(tree).distinct == 3 and sampled(tree, key=lambda t: len(t.token_ids)).distinct == 1


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"width": 0}, "width is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"depth": True}, "depth is True"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"token_budget": 20}, "the token budget is 20, the stem alone has"),
        ({"branch_on": "word"}, "branch_on is 'word'"),
        ({"score": 3}, "score is 3"),
        ({"prune_below": 0.5}, "no score"),
        ({"min_distance": 1.5}, "min_distance is 1.5"),
        ({"keep": -0.1}, "keep is -0.1"),
        ({"separator": ""}, "separator is ''"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"params": SamplingParams(n=2)}, "n=2"),
        ({"params": SamplingParams(presence_penalty=1.0)}, "presence_penalty=1.0"),
        ({"params": {"max_tokens": 3}}, "must be SamplingParams"),
        ({"prompt": ""}, "empty"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(llm: LLM, changes: dict[str, Any], word: str):
    with pytest.raises(BadRequest, match=word) as caught:
        grow(llm, **changes)
    assert caught.value.hint and llm.engine.idle


def test_a_small_budget_starts_what_it_holds(llm: LLM):
    stem = len(llm.encode(STEM))
    tree = grow(llm, token_budget=stem + 5, width=8)
    assert tree.cost.computed + tree.root.cost.shared <= stem + 5
    assert tree.trajectories() == [] and tree.trajectories(complete=False)  # cut by the budget: not complete


@pytest.mark.parametrize("function", [lambda node: 1 / 0, lambda node: [1000], lambda node: ["a"]])
def test_a_branch_function_that_fails_is_carried_in_the_tree(llm: LLM, function: Callable[[RolloutNode], list[int]]):
    tree = grow(llm, branch_on=function)
    assert len(tree.trajectories()) == 3 == len(tree.failures())
    assert all("branch_on" in str(node.error) for node in tree.failures())


def test_it_works_inside_a_running_loop_and_leaves_nothing_behind(llm: LLM):
    async def inside() -> int:
        return len(grow(llm, depth=1).trajectories())

    assert asyncio.run(inside()) == 3
    llm.clear_cache()
    assert llm.engine.idle and llm.engine.pool.used == 0


def test_answers_that_fill_the_context_branch_as_well(tiny_folder: Callable[[str], Path]):
    folder = str(tiny_folder("llama"))
    with LLM(folder, dtype="float32", threads=1, quiet=True, max_model_len=64, max_num_batched_tokens=64) as short:
        stem = short.tokenizer.encode(TEXT)[:40]
        tree = grow(short, prompt=stem, branch_on=lambda node: [len(node.token_ids) - 1])
        assert {len(t.token_ids) for t in tree.trajectories()} == {24} and len(tree.trajectories()) > 3


def test_without_a_prefix_cache_every_branch_pays_for_its_prompt(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("llama")), dtype="float32", threads=1, quiet=True, enable_prefix_caching=False) as plain:
        stem = len(plain.encode(STEM))
        tree = grow(plain, depth=1, width=3, token_budget=2000)
        assert tree.cost.computed == 3 * (stem + 40) and tree.cost.shared == 0
        assert len(grow(plain, token_budget=2 * stem + 100).trajectories(complete=False)) == 2


def test_a_cancelled_rollout_ends_its_branches(llm: LLM):
    async def leave() -> None:
        long = SamplingParams(temperature=1.0, max_tokens=500, ignore_eos=True)
        task = asyncio.ensure_future(arollout(llm, STEM, RolloutConfig(4, 1, 5000, params=long)))
        while not llm.engine.scheduler.running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (answer,) = await llm.agenerate("A boat", SamplingParams(max_tokens=3, ignore_eos=True))
        assert answer.usage.completion_tokens == 3

    asyncio.run(leave())
    llm.clear_cache()
    assert llm.engine.idle and llm.engine.pool.used == 0


def test_a_closed_model_says_so(tiny_folder: Callable[[str], Path]):
    with LLM(str(tiny_folder("llama")), dtype="float32", threads=1, quiet=True) as closed:
        pass
    with pytest.raises(ForerunError, match="closed"):
        grow(closed)
