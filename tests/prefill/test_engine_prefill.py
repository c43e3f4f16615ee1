"""The real prefiller inside the engine and behind `LLM`, on tiny models with maps that mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.core import Prefill, SamplingParams, Speculation
from forerun.decode.draft_context import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import BadProfile, BadRequest
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.fingerprint import fingerprint, sampled_fingerprint
from forerun.prefill.maps import Maps
from forerun.prefill.open_profile import open_profile
from forerun.prefill.plan import Policy
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import CHUNK_DAMAGE, Profile
from tests.engine.common import Answer, finish, leaked, run
from tests.engine.test_speculation import generous
from tests.engine.test_speculative_prefill import prompt

CPU = torch.device("cpu")
POLICY = Policy(first=8, tail=16, shortest=32, spans=2, span=8)
EXACT = SamplingParams(max_tokens=12, ignore_eos=True)
DRAFTED = replace(EXACT, prefill="speculative")


def random_profile(kind: str, folder: Path, base: int = 1, share: float = 0.1) -> Profile:
    """As calibration would shape it, for a model that drafts for itself or for its equal."""
    checkpoint = open_checkpoint(folder)
    config: ModelConfig = checkpoint.config
    taps = (1, 2) if kind == "self" else (1, 2, 3, 4)
    base = 2 if kind == "self" else base
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    wide, rank, out = len(taps) * config.hidden_size, 16, (config.num_layers - base) * 2 * config.kv_size
    maps = Maps(
        taps, base, normal(rank, wide), torch.zeros(rank), normal(8, rank), normal(rank, 8), normal(out, rank),
        torch.zeros(out),
    )  # fmt: skip
    digest = fingerprint(checkpoint)
    return Profile(kind, digest, digest, {"target": "T", "source": "S"}, maps, 0.2, share)


@pytest.fixture(scope="module")
def make(tiny_folder: Callable[[str], Path]) -> Callable[..., Engine]:
    def engine(kind: str | None = "draft", draft: bool = True, **config: Any) -> Engine:
        target = open_checkpoint(tiny_folder("qwen2"))
        decoder, _ = build_decoder(target, CPU, "float32", 512)
        drafting = None
        if draft:
            drafter, _ = build_decoder(open_checkpoint(tiny_folder("qwen2")), CPU, "float32", 512)
            drafting = DraftModel(drafter, target.tokenizer(), True, "draft")
        values = {
            "max_model_len": 512,
            "kv_cache_tokens": 2048,
            "page_size": 8,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
        } | config
        profile = None if kind is None else random_profile(kind, tiny_folder("qwen2"))
        prefiller = None if profile is None else lambda ctx: Prefiller(ctx, profile, POLICY)
        return Engine(decoder, target.tokenizer(), EngineConfig(**values), drafting, generous(), prefiller)

    return engine


@pytest.fixture(scope="module")
def truth(make: Callable[..., Engine]) -> Callable[..., list[int]]:
    engine = make(None, draft=False, enable_prefix_caching=False)
    return lambda text, params=EXACT: run(engine, [text], replace(params, prefill="exact", speculation="off"))[0]


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_exact_after_drafted_is_exact(kind: str, make: Callable[..., Engine], truth: Callable[..., list[int]]) -> None:
    engine = make(kind)
    drafted = Answer(engine, prompt(0, 200), DRAFTED)
    finish(engine)
    report = drafted.last.usage.prefill  # type: ignore[union-attr]
    assert report is not None and report.source == kind and not report.fell_back
    assert report.drafted > 150 and 0 < report.recomputed < 100 and 0 < report.cost < 1
    assert run(engine, [prompt(0, 200)], EXACT)[0] == truth(prompt(0, 200))
    while engine.upgrade_step():
        pass
    second = [*prompt(0, 200), *drafted.tokens(), *prompt(1, 30)]
    answer = Answer(engine, second, EXACT)
    finish(engine)
    assert answer.tokens() == truth(second)
    assert answer.last.usage.cached_tokens >= 208  # type: ignore[union-attr]
    assert leaked(engine) == 0


@pytest.mark.parametrize("kind", ["draft", "self"])
def test_a_draft_is_read_again_by_the_next(kind: str, make: Callable[..., Engine]) -> None:
    engine = make(kind)
    first = Answer(engine, prompt(2, 200), DRAFTED)
    finish(engine)
    second = Answer(engine, prompt(2, 200), replace(DRAFTED, n=2, temperature=0.8, seed=1))
    again = Answer(engine, [*prompt(2, 200), *prompt(3, 60)], DRAFTED)
    finish(engine)
    assert len(first.tokens()) == len(second.tokens()) == len(second.tokens(1)) == len(again.tokens()) == 12
    assert leaked(engine) == 0


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", ["draft", "self"])
def test_further_answers_start_from_the_first_ones_draft(
    kind: str, cache: bool, make: Callable[..., Engine], truth: Callable[..., list[int]]
) -> None:
    text, params = prompt(2, 200), replace(DRAFTED, temperature=0.8, seed=1, cache=cache, speculation="off")
    alone = [run(make(kind), [text], replace(params, seed=1 + i))[0] for i in range(3)]
    engine, read = make(kind), 0
    assert engine.speculative_prefill.prefiller is not None
    source = engine.speculative_prefill.prefiller.source(params.prefill)
    reading = source.read

    def counted(state: Any, count: int) -> None:
        nonlocal read
        read += count
        reading(state, count)

    source.read = counted  # type: ignore[method-assign]
    answer = Answer(engine, text, replace(params, n=3))
    finish(engine)
    assert read == (200 if kind == "self" else 184)  # a draft leaves the tail to drafters of the answer
    assert [answer.tokens(i) for i in range(3)] == alone
    first, *others = (event.usage.prefill for event in sorted(answer.events, key=lambda e: e.index) if event.usage)
    assert first is not None
    for other in others:
        assert other is not None and other.token_layers == 8 * other.layers and other.cost == 8 / 200 < first.cost
        same = ("tokens", "exact", "drafted", "accepted", "recomputed", "depth_runs", "source", "scores", "spans")
        assert [getattr(other, name) for name in same] == [getattr(first, name) for name in same]
    assert leaked(engine) == 0
    assert run(engine, [text], EXACT)[0] == truth(text)


@pytest.mark.parametrize("mode", ["speculative", "provisional", "upgraded"])
def test_one_reading_serves_prefill_and_the_drafter_of_the_answer(mode: str, make: Callable[..., Engine]) -> None:
    engine = make("draft")
    ran: list[int] = []
    runner = engine.speculator.ctx.draft_runner
    assert runner is not None
    forward = runner.forward

    def count(spans: Any, *rest: Any, **more: Any) -> Any:
        ran.append(sum(len(span.ids) for span in spans))
        return forward(spans, *rest, **more)

    runner.forward = count  # type: ignore[method-assign]
    prefill = "provisional" if mode == "provisional" else "speculative"
    params = replace(DRAFTED, max_tokens=8, speculation=Speculation("model-chain", depth=2), prefill=prefill)
    answer = Answer(engine, prompt(4, 200), params)
    finish(engine)
    if mode == "upgraded":
        while engine.upgrade_step():
            pass
        assert sum(ran) < 200 + 8 * 8
        answer = Answer(engine, prompt(4, 200), replace(params, prefill="exact"))
        finish(engine)
        assert answer.last.usage.cached_tokens == 192  # type: ignore[union-attr]
    assert answer.last.usage.drafted > 0  # type: ignore[union-attr]
    assert 200 <= sum(ran) < 200 + 16 * 8  # the prompt once, then a few tokens a step
    if mode == "speculative":
        ran.clear()
        Answer(engine, prompt(5, 200), replace(params, n=3))
        finish(engine)
        assert 200 <= sum(ran) < 200 + 3 * 16 * 8  # of all answers


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["draft", "self"])
def test_provisional_answers_are_exact_in_the_end(
    kind: str, values: dict[str, Any], make: Callable[..., Engine], truth: Callable[..., list[int]]
) -> None:
    engine = make(kind)
    params = replace(EXACT, prefill="provisional", **values)
    for seed in range(3):
        answer = Answer(engine, prompt(seed, 280), params)
        finish(engine)
        final = [t for e in answer.events if not e.provisional for t in e.token_ids]
        assert final == truth(prompt(seed, 280), params)
        assert any(e.provisional for e in answer.events)
    assert leaked(engine) == 0


def test_batches_of_all_modes_and_preemption(make: Callable[..., Engine], truth: Callable[..., list[int]]) -> None:
    engine = make("draft", kv_cache_tokens=800)
    modes = ["exact", "speculative", "provisional"] * 2
    texts = [prompt(10 + i, 100 + 30 * i) for i in range(6)]
    answers = [
        Answer(engine, text, replace(EXACT, prefill=mode, speculation="model+lookup"))
        for text, mode in zip(texts, modes, strict=True)
    ]
    finish(engine)
    for text, mode, answer in zip(texts, modes, answers, strict=True):
        final = [t for e in answer.events if not e.provisional for t in e.token_ids]
        assert len(final) == 12
        if mode != "speculative":
            assert final == truth(text)
    assert leaked(engine) == 0


@pytest.fixture
def any_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights answer differently in every context: whatever is predicted, copied chunks are accepted."""
    monkeypatch.setattr("forerun.prefill.profile.CHUNK_DAMAGE", replace(CHUNK_DAMAGE, max_kl=float("inf")))


def test_texts_seen_before_are_reused_elsewhere_and_never_in_the_way(
    make: Callable[..., Engine], truth: Callable[..., list[int]], any_damage: None
) -> None:
    engine = make("self", draft=False, kv_cache_tokens=640)
    chunked = replace(EXACT, prefill=Prefill("speculative", source="chunk"))
    one, other = prompt(30, 160), prompt(31, 120)
    first = Answer(engine, [*one, *prompt(32, 20)], chunked)  # nothing was met yet: computed
    finish(engine)
    assert first.tokens() == truth([*one, *prompt(32, 20)])
    second = Answer(engine, [*other, *one, *prompt(33, 20)], chunked)
    finish(engine)
    report = second.last.usage.prefill  # type: ignore[union-attr]
    assert report is not None and not report.fell_back and report.drafted > 60
    assert run(engine, [[*other, *one, *prompt(33, 20)]], EXACT)[0] == truth([*other, *one, *prompt(33, 20)])
    (cache,) = engine.scheduler.text_caches
    kept = cache.num_pages
    assert kept > 0 and engine.scheduler.make_room(engine.pool.num_pages)  # everything can be had
    for seed in range(34, 44):  # more than the pool holds
        assert run(engine, [prompt(seed, 200)], EXACT)[0] == truth(prompt(seed, 200))
    engine.clear_cache()
    assert engine.pool.used == 0


def test_documents_in_another_order_are_reused_without_a_profile(
    tiny_folder: Callable[[str], Path], any_damage: None
) -> None:
    """What exact requests computed before the first request for chunks counts, and only requests for chunks get it."""
    a, b, c, question = prompt(50, 300), prompt(51, 290), prompt(52, 280), prompt(53, 80)
    chunked = replace(EXACT, prefill=Prefill("speculative", source="chunk"))
    with LLM(str(tiny_folder("qwen2")), dtype="float32", threads=1, quiet=True, kv_cache_tokens=16384) as llm:
        assert llm.prefill_profile is None
        llm.generate([*a, *b, *c, *question], EXACT)
        mixed = [*c, *a, *b, *question]
        usage = llm.generate(mixed, chunked)[0].usage
        report = usage.prefill
        assert report is not None and not report.fell_back and report.source == "chunk" and report.cost < 0.8
        assert report.chooser == "tail"
        assert 0.6 * len(mixed) < report.accepted < len(mixed) - len(question)
        assert usage.served["approximate"] == report.accepted
        assert usage.served["approximate"] + usage.served["computed"] == len(mixed) == usage.prompt_tokens
        assert llm.stats().served["approximate"] == report.accepted
        llm.upgrade()
        exact = llm.generate([*b, *a, *c, *question], EXACT)[0]  # not asked for: computed, whatever is known
        assert exact.usage.served["approximate"] == 0 and exact.usage.served["computed"] == len(mixed)
        with pytest.raises(BadProfile, match="needs a profile") as caught:
            llm.generate(mixed, DRAFTED)
        assert "chunk" in caught.value.hint
        llm.clear_cache()
        assert llm.engine.pool.used == 0


def test_what_cannot_be_is_refused(make: Callable[..., Engine]) -> None:
    engine = make("self", draft=False)
    with pytest.raises(BadProfile, match="draft"):
        Answer(engine, prompt(0, 200), replace(EXACT, prefill=Prefill("speculative", source="draft")))
    with pytest.raises(BadRequest, match="nonsense"):
        Answer(engine, prompt(0, 200), replace(EXACT, prefill=Prefill("speculative", source="nonsense")))
    assert engine.idle


def test_llm_takes_a_profile(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_folder("qwen2")
    path = tmp_path / "profile.safetensors"
    random_profile("self", folder).save(path)
    params = replace(DRAFTED, max_tokens=6)
    text = prompt(20, 1750)
    with LLM(str(folder), prefill_profile=path, dtype="float32", threads=1, quiet=True, kv_cache_tokens=8192) as llm:
        completion = llm.generate(text, params)[0]
        report = completion.usage.prefill
        assert report is not None and report.source == "self" and report.drafted > 500
        provisional = replace(params, prefill="provisional", max_tokens=12)
        events = list(llm.stream(text, provisional))
        exact = llm.generate(text, replace(EXACT, max_tokens=12))[0]
        assert llm.generate(text, provisional)[0].token_ids == exact.token_ids
        assert [t for e in events if not e.provisional for t in e.token_ids] == exact.token_ids
        llm.upgrade()
        llm.clear_cache()
        assert llm.engine.pool.used == 0
    with LLM(str(folder), dtype="float32", threads=1, quiet=True) as plain:
        assert plain.prefill_profile is None
        with pytest.raises(BadProfile, match="needs a profile"):
            plain.generate(text, params)


def test_a_profile_of_another_model_is_refused(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    profile = random_profile("self", tiny_folder("qwen2"))
    with pytest.raises(BadProfile, match="made for T"):
        LLM(str(tiny_folder("llama")), prefill_profile=profile, dtype="float32", threads=1, quiet=True)
    with pytest.raises(BadProfile, match="no draft model is open"):
        LLM(
            str(tiny_folder("qwen2")),
            prefill_profile=random_profile("draft", tiny_folder("qwen2")),
            threads=1,
            quiet=True,
        )
    with pytest.raises(BadProfile, match="no profile"):
        LLM(str(tiny_folder("qwen2")), prefill_profile=tmp_path / "none.safetensors", threads=1, quiet=True)
    with pytest.raises(BadRequest, match="cannot be a int"):
        LLM(str(tiny_folder("qwen2")), prefill_profile=3, threads=1, quiet=True)  # type: ignore[arg-type]


def test_a_profile_that_records_samples_is_taken_with_a_warning(tiny_folder: Callable[[str], Path]) -> None:
    checkpoint, profile = open_checkpoint(tiny_folder("qwen2")), random_profile("self", tiny_folder("qwen2"))
    profile.target = profile.source = sampled_fingerprint(checkpoint)
    with pytest.warns(FutureWarning, match="calibrate again"):
        assert open_profile(profile, checkpoint) is profile
    with pytest.warns(FutureWarning), pytest.raises(BadProfile, match="made for T"):
        open_profile(profile, open_checkpoint(tiny_folder("llama")))
