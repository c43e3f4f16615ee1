"""Several tokens in one forward: rows as masks give them, the most probable tree, and answers of plain decoding."""

from __future__ import annotations

import itertools
import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, Grammar, SamplingParams, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import Draft
from forerun.decode.control.controller import Controller, DraftedBatch
from forerun.decode.control.cost import CostCurve
from forerun.decode.drafters import DraftRequest
from forerun.decode.drafters.parallel import ParallelDrafter
from forerun.decode.sampling import Context
from forerun.decode.tree import path_probs
from forerun.errors import BadRequest, CorruptModel
from forerun.models.execution.runner import Runner, Span

MASK, TOKENS = 500, 5
PROMPTS = [[5, 6, 7, 8] * 6, list(range(20, 90)), [9, 9, 9, 40, 41, 42, 9, 9, 9], [300, 301]]


@pytest.fixture(scope="module")
def pard(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target itself in PARD's format: its first token is always right, those of masks are not."""
    return with_config(tiny_folder("qwen2"), tmp_path_factory.mktemp("pard") / "drafter")


def with_config(folder: Path, copy: Path, **values: Any) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"pard_token": MASK, "spd_type": "pard", "num_speculative_tokens": TOKENS} | values
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path], pard: Path) -> LLM:
    return LLM(tiny_folder("qwen2"), draft_model=pard, dtype="float32", kv_cache_tokens=4096, max_model_len=512)


def drafter(llm: LLM) -> ParallelDrafter:
    llm.generate([[1, 2, 3]], max_tokens=2, speculation="parallel")
    found = llm.engine.speculator.drafter_pool["parallel"]
    assert isinstance(found, ParallelDrafter)
    return found


def request(llm: LLM, tokens: list[int], depth: int = 8, nodes: int = 12, **values: Any) -> DraftRequest:
    pool = llm.engine.speculator.ctx.pool
    pages = array("i", pool.allocate(pool.pages_for(len(tokens) + nodes + 1)))
    context = Context(SamplingParams(**values), tokens, len(tokens), seed=0)
    return DraftRequest(id(pages), context, depth, nodes, pages)


def test_long_prompts_are_read_as_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """A device has recorded passes for what one launch does not take, and would capture a graph for it else."""
    runner, made = llm.engine.speculator.ctx.draft_runner, drafter(llm)
    assert runner is not None
    monkeypatch.setattr(Runner, "decoding_rows", 32)
    forward, ran = runner.forward, list[Span]()
    monkeypatch.setattr(runner, "forward", lambda spans, **how: (ran.extend(spans), forward(spans, **how))[1])
    for length, read in ((150, True), (40, True), (33, False)):
        ran.clear()
        made.propose([request(llm, list(range(1, 1 + length)))])
        first, rest = ran
        assert (len(first.ids), first.prompt, len(first.logits_indices)) == (length - 1, read, 0)
        assert not rest.prompt and len(rest.ids) <= TOKENS + 1


def test_rows_are_those_of_the_sequence_followed_by_masks(llm: LLM):
    ask, runner = request(llm, PROMPTS[1], temperature=0.1), llm.engine.speculator.ctx.draft_runner
    assert runner is not None
    draft = drafter(llm).propose([ask])[0]
    pages = array("i", runner.pool.allocate(8))
    ids = [*PROMPTS[1], *[MASK] * (TOKENS - 1)]
    probs = torch.softmax(runner.forward([Span(ids, 0, pages, range(len(PROMPTS[1]) - 1, len(ids)))]).logits / 0.1, -1)
    assert 2 <= max(draft.depths()) <= TOKENS == len(probs)
    for token, depth, prob in zip(draft.tokens, draft.depths(), draft.probs, strict=True):
        assert prob == pytest.approx(float(probs[depth - 1, token]), rel=1e-4)


def test_the_tree_holds_the_most_probable_paths(llm: LLM):
    draft = drafter(llm).propose([request(llm, PROMPTS[0], nodes=9, temperature=0.1)])[0]
    assert draft.problem(512) is None and len(draft) == 9
    top: dict[int, dict[int, float]] = {}
    for token, depth, prob in zip(draft.tokens, draft.depths(), draft.probs, strict=True):
        top.setdefault(depth, {})[token] = prob
    paths = sorted(path_probs(draft), reverse=True)
    every = []
    for length in range(1, max(top) + 1):
        for tokens in itertools.product(*(top[depth] for depth in range(1, length + 1))):
            prob = 1.0
            for depth, token in enumerate(tokens, 1):
                prob *= top[depth][token]
            every.append(prob)
    assert paths == pytest.approx(sorted(every, reverse=True)[:9])


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.9, "seed": 3},
        {"repetition_penalty": 1.3},
        {"grammar": Grammar.regex("(ab|ba|keeper|ship)+"), "ignore_eos": False},
    ],
    ids=["greedy", "seeded", "penalty", "grammar"],
)
def test_answers_are_those_of_plain_decoding(llm: LLM, together: bool, values: dict[str, Any]):
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, **values}
    plain = [llm.generate([prompt], speculation="off", **options)[0].token_ids for prompt in PROMPTS]
    llm.clear_cache()
    rule = Speculation("parallel", nodes=10)
    with all_drafts_verified(llm.engine):
        if together:
            drafted = llm.generate(PROMPTS, speculation=rule, **options)
        else:
            drafted = [llm.generate([prompt], speculation=rule, **options)[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in drafted] == plain
    tallies = [answer.usage.drafters["parallel"] for answer in drafted if "parallel" in answer.usage.drafters]
    assert sum(tally.accepted for tally in tallies) > 0


def test_a_step_is_one_round(llm: LLM):
    params = SamplingParams(max_tokens=24, ignore_eos=True, speculation=Speculation("parallel", nodes=10))
    with all_drafts_verified(llm.engine):
        usage = llm.generate([PROMPTS[1]], params)[0].usage
    found = drafter(llm)
    assert usage.accepted >= usage.steps - 2  # each step's first token is the target's own
    assert len(found.rounds) == 1 and found.rounds[0].tokens <= found.max_unread_tokens + TOKENS


def test_auto_drafts_in_parallel_where_the_draft_was_trained_for_it(llm: LLM, tiny_folder: Callable[[str], Path]):
    pool = llm.engine.speculator.drafter_pool
    assert pool.names(SamplingParams())[-2:] == ["suffix", "parallel"]  # chains of the same model only by name
    plain = LLM(tiny_folder("qwen2"), draft_model=tiny_folder("qwen2"), kv_cache_tokens=2048, max_model_len=256)
    assert plain.engine.speculator.drafter_pool.names(SamplingParams())[-1] == "model"
    with pytest.raises(BadRequest, match="was not trained"):
        plain.generate([[1, 2]], speculation="parallel")


@pytest.mark.parametrize("values", [{"pard_token": 512}, {"pard_token": "x"}, {"num_speculative_tokens": 0}])
def test_a_folder_that_names_an_impossible_mask_is_refused(pard: Path, tmp_path: Path, values: dict[str, Any]):
    with pytest.raises(CorruptModel, match="pard_token|num_speculative_tokens"):
        LLM(pard, draft_model=with_config(pard, tmp_path / "copy", **values))


def test_the_plan_pays_one_round_for_all_depths():
    """Where a chain of such costly rounds never pays, one round for all tokens does."""
    for block, pays in ((1, False), (8, True)):
        control = Controller(CostCurve({1: 1.0, 16: 1.1}), {"paid": CostCurve({1: 0.9, 16: 0.95})})
        control.drafters["paid"].tokens_per_round = block
        stats = control.new_request("code")
        plan = control.plan_rounds(DraftedBatch([stats], [Draft()], [16], 100), "paid", [0.0])
        assert (plan is not None and plan.rounds[0] > 1) == pays


def test_a_sequence_may_be_drafted_for_by_both_in_turn(llm: LLM):
    """They share the draft model's K/V: what one wrote for tokens that stayed the other reads, and masks never stay."""
    parallel = drafter(llm)
    llm.generate([[1, 2, 3]], max_tokens=2, speculation="model")
    chain = llm.engine.speculator.drafter_pool["model"]
    tokens = list(range(20, 60))
    asked = request(llm, tokens, depth=4, nodes=60)
    asked.max_nodes = 4
    for turn, one in enumerate([chain, parallel, chain, chain, parallel, parallel, chain]):
        found = one.propose([asked])[0]
        llm.engine.speculator.ctx.draft_states.pop(asked.seq_id)
        llm.engine.speculator.ctx.draft_kv.filled[:] = 0  # everything is read anew
        fresh = one.propose([asked])[0]
        assert found.tokens == fresh.tokens and found.parents == fresh.parents
        assert found.probs == pytest.approx(fresh.probs, abs=1e-4)
        right = min(turn, len(found))  # so many of its tokens stay, and one that it did not draft
        asked.context.tokens.extend([*found.tokens[:right], 100 + turn])
