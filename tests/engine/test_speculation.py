"""Speculation inside the engine: whatever is drafted by whichever drafter, the answer is that of plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core import ROOT, Draft, SamplingParams, Speculation
from forerun.decode.control.controller import Controller
from forerun.decode.control.cost import CostCurve
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.drafters.base import _REGISTRY, Drafter, DraftRequest, register
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadRequest
from forerun.models.build import build_decoder
from forerun.models.formats.checkpoint import open_checkpoint
from tests import tiny
from tests.engine.common import Answer, finish, leaked, run

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8] * 6, list(range(20, 90)), [9, 9, 9, 40, 41, 42, 9, 9, 9], [300, 301]]
NAMES = ("lookup", "suffix", "copy", "model", "model-chain", "model+lookup+suffix", "auto")


class Fixed(CostCurve):
    def observe(self, tokens: int, sequences: int, context: int, seconds: float) -> None: ...


def generous() -> Controller:
    """Costs that make every guess worth checking, so that tests do not depend on this machine's speed."""
    rounds: dict[str, CostCurve] = {name: Fixed({1: 1e-4, 64: 1.1e-4}) for name in ("model", "model-chain")}
    return Controller(Fixed({1: 1.0, 64: 1.001}), rounds)


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """`make(draft="same"|"other"|None)`: a tiny target, drafted for by itself, by another model, or by none."""
    stranger = tiny.write_folder(tmp_path_factory.mktemp("stranger"), "qwen2", seed=9, num_hidden_layers=2)

    def engine(draft: str | None = "same", weights: str = "float32", **config: Any) -> Engine:
        target = open_checkpoint(tiny_folder("qwen2"))
        decoder, _ = build_decoder(target, CPU, weights, 512)
        drafting = None
        if draft is not None:
            checkpoint = open_checkpoint(tiny_folder("qwen2") if draft == "same" else stranger)
            drafter, _ = build_decoder(checkpoint, CPU, weights, 512)
            drafting = DraftModel(drafter, checkpoint.tokenizer(), True, "draft")
        values = {
            "max_model_len": 512,
            "kv_cache_tokens": 2048,
            "page_size": 8,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
        } | config
        return Engine(decoder, target.tokenizer(), EngineConfig(**values), drafting, generous())

    return engine


def params(drafter: str, **values: Any) -> SamplingParams:
    verify = values.pop("verify", "auto")
    return SamplingParams(
        **{"max_tokens": 40, "ignore_eos": True, **values}, speculation=Speculation(drafter, verify=verify)
    )


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 3, "top_p": 0.95}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("draft", ["same", "other"])
def test_answers_are_those_of_plain_decoding(draft: str, values: dict[str, Any], make: Callable[..., Engine]):
    plain = run(make(None), PROMPTS, params("off", **values))
    for name in NAMES:
        engine = make(draft)
        assert run(engine, PROMPTS, params(name, **values)) == plain, name
        assert leaked(engine) == 0


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_one_by_one_and_together(weights: str, make: Callable[..., Engine]):
    plain = run(make(None, weights), PROMPTS, params("off"))
    engine = make("other", weights)
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        assert run(engine, [prompt], params("auto")) == [expected]


def test_a_perfect_draft_is_accepted_whole(make: Callable[..., Engine]):
    engine = make("same")
    answer = Answer(engine, PROMPTS[1], params("model-chain", max_tokens=300))
    finish(engine)
    usage = answer.last.usage
    assert usage is not None
    assert sum(usage.lengths[-10:]) > 40  # random weights are never sure of themselves: experience must correct that
    assert usage.accepted > 0.9 * usage.drafted and usage.verifier == "match" and usage.lossless
    assert usage.drafters["model-chain"].accepted == usage.accepted == sum(usage.lengths)
    assert usage.steps + usage.accepted == usage.completion_tokens


def test_preemption_in_the_middle_of_speculation(make: Callable[..., Engine]):
    plain = run(make(None), PROMPTS * 2, params("off"))
    engine = make("same", kv_cache_tokens=240, max_num_batched_tokens=128)
    answers = [Answer(engine, prompt, params("model+suffix")) for prompt in PROMPTS * 2]
    finish(engine)
    assert [a.tokens() for a in answers] == plain
    assert sum(a.last.usage.preemptions for a in answers if a.last.usage) > 0
    assert leaked(engine) == 0


def test_the_prefix_cache_is_hit_as_without_speculation(make: Callable[..., Engine]):
    def hits(drafter: str) -> list[int]:
        engine, found, prompt = make("other"), [], PROMPTS[1]
        for _ in range(4):  # a conversation: each turn continues the last
            answer = Answer(engine, prompt, params(drafter, max_tokens=17))
            finish(engine)
            prompt = [*prompt, *answer.tokens(), 50, 51, 52]
            found.append(answer.last.usage.cached_tokens if answer.last.usage else -1)
        return found

    assert hits("auto") == hits("off") != [0, 0, 0, 0]


def test_draft_kv_is_inside_the_pool(make: Callable[..., Engine]):
    alone, both = make(None), make("same")
    assert both.pool.nbytes == 2 * alone.pool.nbytes  # the same model twice, on the same pages
    assert both.pool.num_pages == alone.pool.num_pages


def test_the_second_reader_of_a_prefix_finds_the_drafts_kv_too(make: Callable[..., Engine]):
    engine = make("same")
    run(engine, [PROMPTS[1]], params("model"))
    drafter = engine.speculator.drafter_pool["model"]
    ran: list[int] = []
    runner = drafter._runner  # type: ignore[attr-defined]
    original = runner.forward
    runner.forward = lambda spans: (ran.append(sum(len(s.ids) for s in spans)), original(spans))[1]
    run(engine, [PROMPTS[1]], params("model", max_tokens=2))
    assert max(ran, default=0) < 20  # not the 70 tokens of the prompt


# -- bad input ---------------------------------------------------------------------------------------------------------


class Broken(Drafter):
    name = "broken"
    how = "raise"

    def __init__(self, ctx: DraftContext) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        if self.how == "raise" and any(len(a.tokens) % 3 == 0 for a in requests):
            raise RuntimeError("drafter out of order")
        if self.how == "parents":
            return [Draft([5, 6], [1, ROOT], [0.9, 0.9], ["broken"] * 2) for _ in requests]
        if self.how == "tokens":
            return [Draft([10**6], [ROOT], [0.9], ["broken"]) for _ in requests]
        if self.how == "count":
            return []
        if self.how == "sources":
            return [Draft([5], [ROOT], [0.9], None) for _ in requests]  # type: ignore[arg-type]
        if self.how == "stranger":
            return [Draft.chain([5, 6], [0.9, 0.9], "another one") for _ in requests]
        if self.how == "probs":
            return [Draft([5], [ROOT], [None], ["broken"]) for _ in requests]  # type: ignore[list-item]
        if self.how == "proposals":
            return [Draft([5], [ROOT], [0.9], ["broken"], {ROOT: torch.ones(512) / 512}) for _ in requests]
        if self.how == "tuple":
            return (Draft([-1], [ROOT], [0.9], ["broken"]),) * len(requests)  # type: ignore[return-value]
        return [None for _ in requests]  # type: ignore[misc]


@pytest.fixture
def broken() -> Any:
    yield register(Broken)
    del _REGISTRY["broken"]


@pytest.mark.parametrize(
    "how", ["raise", "parents", "tokens", "count", "nothing", "sources", "probs", "proposals", "tuple"]
)
def test_a_drafter_that_fails_is_left_out(
    how: str, broken: Any, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setattr(Broken, "how", how)
    plain = run(make(None), PROMPTS, params("off"))
    with caplog.at_level(logging.WARNING, "forerun"):
        assert run(make(None), PROMPTS, params("broken+lookup")) == plain
    assert len([r for r in caplog.records if "broken" in r.getMessage()]) == 1


def test_unknown_names_are_refused_with_those_that_exist(make: Callable[..., Engine]):
    engine = make(None)
    with pytest.raises(BadRequest, match="'medusa'") as error:
        Answer(engine, PROMPTS[0], params("medusa"))
    assert "lookup" in (error.value.hint or "")
    with pytest.raises(BadRequest, match="needs a draft model"):
        Answer(engine, PROMPTS[0], params("model"))
    with pytest.raises(BadRequest, match="no verifier"):
        Answer(engine, PROMPTS[0], params("auto", verify="wishful"))
    assert engine.idle


@pytest.mark.parametrize(("nodes", "fine"), [(0, True), (1, True), (512, True), (1_000_000, False), (-1, False)])
def test_budgets(nodes: int, fine: bool, make: Callable[..., Engine]):
    if not fine:
        with pytest.raises(BadRequest, match=str(nodes)):
            Speculation(nodes=nodes)
        return
    plain = run(make(None), PROMPTS, params("off"))
    asked = SamplingParams(max_tokens=40, ignore_eos=True, speculation=Speculation("auto", nodes=nodes))
    assert run(make("same"), PROMPTS, asked) == plain


def test_a_fixed_depth_is_kept_whatever_it_costs(make: Callable[..., Engine]):
    engine = make("other")
    asked = SamplingParams(
        max_tokens=30,
        ignore_eos=True,
        speculation=Speculation("model-chain", depth=5, nodes=8),
        temperature=1.0,
        seed=1,
    )
    answer = Answer(engine, PROMPTS[1], asked)
    finish(engine)
    usage = answer.last.usage
    assert usage is not None and usage.drafted >= 5 * (usage.steps - 6)


@pytest.mark.parametrize("verify", ["rejection", "block", "traversal", "transport"])
def test_drawn_drafts_with_every_verifier(verify: str, make: Callable[..., Engine]):
    engine = make("same")
    asked = SamplingParams(
        max_tokens=60, ignore_eos=True, temperature=0.9, seed=5, speculation=Speculation("model", 30, 4, verify)
    )
    answers = [Answer(engine, prompt, asked) for prompt in PROMPTS]
    finish(engine)
    for answer in answers:
        usage = answer.last.usage
        assert usage is not None and usage.verifier == verify and len(answer.tokens()) == 60
        assert usage.accepted_length > 3.5  # the draft is the target itself: drawn tokens are accepted
    assert leaked(engine) == 0


def test_a_drafter_cannot_draft_in_anothers_name(
    broken: Any, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Broken, "how", "stranger")
    engine = make(None)
    assert run(engine, PROMPTS, params("broken")) == run(make(None), PROMPTS, params("off"))
    assert set(engine.speculator.totals.drafters) == {"broken"}


class Costly(Drafter):
    """Claims to run a model, and gets everything wrong."""

    name = "costly"
    free = False

    def catch_up_tokens(self, request: DraftRequest) -> int:
        raise RuntimeError("lost count")

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft() for _ in requests]

    def time_round(self, tokens: int, context: int) -> float:
        return 1e-4


class Stillborn(Costly):
    name = "stillborn"

    def __init__(self, ctx: DraftContext) -> None:
        raise ZeroDivisionError("never worked")


def test_a_drafter_that_cannot_even_start(make: Callable[..., Engine], caplog: Any):
    register(Costly)
    register(Stillborn)
    try:
        plain, engine = run(make(None), PROMPTS, params("off")), make(None)
        with pytest.raises(BadRequest, match="never worked"):
            engine.prepare(params("stillborn"))
        with caplog.at_level(logging.WARNING, "forerun"):
            assert run(engine, PROMPTS, params("stillborn+lookup+costly")) == plain
        assert {r.getMessage().split("'")[1] for r in caplog.records} == {"stillborn", "costly"}
    finally:
        del _REGISTRY["costly"], _REGISTRY["stillborn"]


def test_pages_of_drafts_preempt_no_sequence(make: Callable[..., Engine]):
    """Two answers that just fit side by side: guesses must not cost one of them its place."""

    def preemptions(drafter: str) -> int:
        engine = make(None, kv_cache_tokens=88, max_num_batched_tokens=128, enable_prefix_caching=False)
        short = Answer(engine, list(range(10, 20)), params(drafter, max_tokens=20))
        long = Answer(engine, [7, 8] * 20, params(drafter, max_tokens=8))
        finish(engine)
        usages = [answer.last.usage for answer in (short, long)]
        return sum(usage.preemptions for usage in usages if usage is not None)

    assert preemptions("lookup+suffix+copy") == preemptions("off") == 0


def test_the_drafts_kv_is_shared_after_accepted_drafts(make: Callable[..., Engine]):
    engine = make("same")
    first = Answer(engine, PROMPTS[1], params("model-chain", max_tokens=200))
    finish(engine)
    draft_kv = engine.pool.draft_kvs[0]
    pages = engine.tree.match([*PROMPTS[1], *first.tokens()])
    assert len(pages) > 25
    assert sum(draft_kv.filled[page] == engine.pool.page_size for page in pages) >= len(pages) - 3


def test_an_answer_that_ends_inside_a_draft_counts_what_it_has(make: Callable[..., Engine]):
    engine = make("same")
    whole = Answer(engine, PROMPTS[1], params("off", max_tokens=120))
    finish(engine)
    stop = whole.text()[60:64]
    ended = Answer(engine, PROMPTS[1], params("model-chain", max_tokens=120, stop=(stop,)))
    finish(engine)
    usage = ended.last.usage
    assert usage is not None and ended.last.finish_reason == "stop"
    assert usage.accepted == sum(usage.lengths) <= usage.completion_tokens <= usage.steps + usage.accepted


def test_a_draft_of_a_shorter_context(make: Callable[..., Engine], tmp_path: Path):
    tiny.write_folder(tmp_path, "qwen2", max_position_embeddings=64)
    checkpoint = open_checkpoint(tmp_path)
    drafter, _ = build_decoder(checkpoint, CPU, "float32", 64)
    plain = make(None)
    engine = Engine(
        plain.decoder, plain.tokenizer, plain.config, DraftModel(drafter, checkpoint.tokenizer(), True, "short")
    )
    assert run(engine, PROMPTS, params("auto")) == run(plain, PROMPTS, params("off"))


def test_free_drafters_serve_verifiers_that_draw(make: Callable[..., Engine]):
    engine = make(None)
    asked = SamplingParams(
        max_tokens=60, ignore_eos=True, temperature=0.3, seed=5, speculation=Speculation("lookup", verify="traversal")
    )
    answer = Answer(engine, [5, 6, 7, 8] * 8, asked)
    finish(engine)
    assert answer.last.usage is not None and answer.last.usage.drafted > 0
