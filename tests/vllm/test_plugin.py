"""The plugin inside vLLM's CPU build, on tiny models: what it injects, what it never leaks, what it falls back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.core import SamplingParams
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.build import build_decoder
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.forecast import PrefillForecast
from forerun.prefill.open_profile import read_profile
from forerun.prefill.prefiller import Prefiller
from forerun.vllm.settings import PluginSettings
from tests import tiny
from tests.engine.common import Answer, finish
from tests.engine.test_speculation import generous
from tests.engine.test_speculative_prefill import prompt
from tests.prefill.test_engine_prefill import random_profile
from tests.vllm.conftest import CONTEXT, VllmEngine, needs_vllm, open_vllm

pytestmark = needs_vllm

# the CPU build attends with heads of 32 and more; below eight layers the least that drafting costs is most of exact
SHAPE = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 8}
MIN_PROMPT_TOKENS = 64
EXACT, DRAFTED = {"mode": "exact"}, {}  # options of requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("qwen2"), "qwen2", **SHAPE)


@pytest.fixture(scope="module")
def profile_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "self.safetensors"
    random_profile("self", folder).save(path)
    return path


@pytest.fixture(scope="module")
def vllm(folder: Path, profile_path: Path) -> Iterator[VllmEngine]:
    options = {"min_prompt_tokens": MIN_PROMPT_TOKENS, "piece_tokens": 96, "staging_tokens": 4096}
    with open_vllm(folder, profile=str(profile_path), **options) as engine:
        yield engine


def test_exact_kv_injected_gives_plain_answers(vllm: VllmEngine) -> None:
    """100 prompts, all at once: each token as plain vLLM has it."""
    prompts = [prompt(seed, 66 + 3 * seed) for seed in range(100)]
    plain = vllm.generate(prompts, [None] * 100)
    injected = vllm.generate(prompts, [EXACT] * 100)
    assert [a.tokens for a in injected] == [a.tokens for a in plain]
    assert all(a.cached == len(ids) - 64 for a, ids in zip(injected, prompts, strict=True))
    assert all(a.label is not None and not a.label["approximate"] for a in injected)
    assert all(a.label is None for a in plain)


def test_exact_kv_has_vllms_own_bits_in_bfloat16(folder: Path) -> None:
    """Its layers round where vLLM's do: one prompt at a time, so that both compute the same batches."""
    prompts = [[prompt(seed, 80 + 5 * seed)] for seed in range(24)]
    with open_vllm(folder, {"dtype": "bfloat16"}, min_prompt_tokens=MIN_PROMPT_TOKENS, staging_tokens=4096) as vllm:
        plain = [vllm.generate(ids, [None], 24, "plain")[0].tokens for ids in prompts]
        injected = [vllm.generate(ids, [EXACT], 24)[0] for ids in prompts]
    assert all(a.cached > 0 for a in injected)
    assert [a.tokens for a in injected] == plain


def test_drafted_prompts_are_those_of_our_own_engine(
    vllm: VllmEngine, folder: Path, profile_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers from the same file, whose maps are rounded, with the same tokens recomputed at the same cost."""
    monkeypatch.setattr(PrefillForecast, "why_exact", lambda *_: "")  # our engine times prompts, and tiny ones are slow
    profile = read_profile(profile_path)
    prompts = [prompt(seed, 500 + 20 * seed) for seed in range(20)]
    checkpoint = open_checkpoint(folder)
    decoder, _ = build_decoder(checkpoint, torch.device("cpu"), "float32", CONTEXT)
    policy = PluginSettings(min_prompt_tokens=MIN_PROMPT_TOKENS).policy
    ours = Engine(
        decoder,
        checkpoint.tokenizer(),
        EngineConfig(max_model_len=CONTEXT, kv_cache_tokens=4096, enable_prefix_caching=False),
        None,
        generous(),
        lambda ctx: Prefiller(ctx, profile, policy),
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True, prefill="speculative", speculation="off")
    answers = vllm.generate(prompts, [DRAFTED] * 20)
    plain = vllm.generate(prompts, [None] * 20)
    for ids, answer in zip(prompts, answers, strict=True):
        own = Answer(ours, ids, params)
        finish(ours)
        report = own.last.usage.prefill  # type: ignore[union-attr]
        assert report is not None and answer.label is not None and not report.fell_back
        for name in ("source", "chooser", "exact", "accepted", "recomputed", "rounds", "token_layers"):
            assert answer.label[name] == getattr(report, name), name
        assert answer.label["cost"] == pytest.approx(report.cost) and answer.label["approximate"]
        assert answer.tokens == own.tokens()
    assert [a.tokens for a in answers] != [a.tokens for a in plain]  # maps that mean nothing do change answers


def test_approximate_kv_never_reaches_the_prefix_cache(vllm: VllmEngine) -> None:
    """Whatever salts requests bring: the same prompt after a drafted one is computed, and is exact."""
    for number, salt in enumerate((None, "tenant")):
        ids = prompt(200 + number, 600)
        drafted = vllm.generate([ids], [DRAFTED], salt=salt)[0]
        again = vllm.generate([ids], [DRAFTED], salt=salt)[0]
        assert drafted.label is not None and drafted.label["approximate"] and again.tokens == drafted.tokens
        plain = vllm.generate([ids, [*ids, *drafted.tokens]], [None, None], salt=salt)
        assert plain[0].cached == 0 and plain[0].tokens != drafted.tokens
        assert plain[1].cached <= len(ids)  # of the prompt beside it, not of the drafted one's answer
        warm = vllm.generate([ids], [None], salt=salt)[0]
        assert warm.cached > 500 and warm.tokens == plain[0].tokens
        assert vllm.generate([ids], [EXACT], salt=salt)[0].tokens == plain[0].tokens


def test_mixed_requests(vllm: VllmEngine) -> None:
    """50 at once, drafted, plain and short: none is lost, no plain answer changes."""
    prompts = [prompt(300 + seed, 30 + 19 * seed) for seed in range(50)]
    options = [DRAFTED if seed % 2 else None for seed in range(50)]
    alone = [vllm.generate([ids], [None], salt="alone")[0].tokens for ids in prompts]
    answers = vllm.generate(prompts, options)
    for ids, own, answer, want in zip(prompts, options, answers, alone, strict=True):
        if own is None:
            assert answer.label is None and answer.tokens == want
            continue
        assert answer.label is not None and len(answer.tokens) == 8
        assert answer.label["approximate"] == (not answer.label["fell_back"])
        if answer.label["fell_back"]:
            assert len(ids) < 500 and answer.tokens == want  # too short to be worth it


def test_others_are_served_between_the_pieces_of_a_drafted_prompt(vllm: VllmEngine) -> None:
    engine = vllm.llm.llm_engine

    def step() -> dict[str, int]:
        """Tokens so far of those that have some new."""
        return {o.request_id.partition("-")[0]: len(o.outputs[0].token_ids) for o in engine.step()}

    vllm.start("plain", prompt(800, 100), None, 64)
    while not step():
        pass
    vllm.start("drafted", prompt(801, 900), DRAFTED)
    streamed: list[int] = []
    while "drafted" not in (found := step()):
        streamed += [found["plain"]] if "plain" in found else []
    assert len(set(streamed)) >= 4, "a stream waited for a prompt that was drafted"
    while engine.has_unfinished_requests():
        step()


def test_requests_that_end_while_they_are_drafted_free_their_blocks(vllm: VllmEngine) -> None:
    """More blocks than there are, if any stayed taken."""
    engine = vllm.llm.llm_engine
    for number in range(12):
        names = [f"{number} {i}" for i in range(3)]
        for i, name in enumerate(names):
            vllm.start(name, prompt(400 + i, 900), DRAFTED)
        for _ in range(1 + number % 3):
            engine.step()
        engine.abort_request(names)
    steps = 0
    vllm.start("last", prompt(500, 900), DRAFTED)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps += 1
        assert steps < 1000, "blocks of ended requests are not free"
    (last,) = [o for o in outputs if o.finished]
    assert last.kv_transfer_params["forerun"]["approximate"]


def test_drafted_prompts_that_are_preempted_go_on_exactly(folder: Path, profile_path: Path) -> None:
    """With fewer blocks than all answers need: what vLLM computes again is exact, and no plain answer changes."""
    prompts, options = [prompt(900 + seed, 500) for seed in range(4)], [None, DRAFTED] * 2
    own = {"profile": str(profile_path), "min_prompt_tokens": MIN_PROMPT_TOKENS, "staging_tokens": 4096}
    with open_vllm(folder, {"num_gpu_blocks_override": 70, "enable_prefix_caching": False}, **own) as vllm:
        alone = [vllm.generate([ids], [each], 90)[0].tokens for ids, each in zip(prompts, options, strict=True)]
        answers = vllm.generate(prompts, options, 90)
        changed = [n for n, answer in enumerate(answers) if answer.tokens != alone[n]]
        assert changed and all(options[n] is DRAFTED for n in changed), changed
        for n in changed:
            found = answers[n].tokens
            same = next(at for at, token in enumerate(found) if token != alone[n][at])
            exact = vllm.generate([[*prompts[n], *found[:same]]], [None], 90 - same)[0]
            assert found[same:] == exact.tokens


def test_chunks_of_earlier_prompts(vllm: VllmEngine) -> None:
    """A prompt met before with some tokens inserted: what comes after them is copied to its new place."""
    old, chunked = prompt(50, 900), {"source": "chunk"}
    new = [*old[:500], *prompt(53, 5), *old[500:]]
    first = vllm.generate([old], [chunked])[0]
    assert first.label is not None and not first.label["approximate"]  # there was nothing to copy
    assert first.tokens == vllm.generate([old], [None], salt="another")[0].tokens
    second = vllm.generate([new], [chunked])[0]
    assert second.label is not None and second.label["source"] == "chunk" and second.label["approximate"]
    assert second.label["cost"] < 0.8 and second.label["accepted"] > 400 and second.label["predicted_kl"] < 0.05
    assert vllm.generate([new], [None])[0].cached == 0


def test_options_that_are_wrong_are_named_in_the_answer(vllm: VllmEngine) -> None:
    ids = prompt(600, 300)
    plain = vllm.generate([ids], [None])[0]
    for options, text in (
        ({"budget": 7}, "budget is 7"),
        ({"colour": 1}, "colour is no option"),
        ({"mode": "provisional"}, "provisional"),
        ({"source": "draft"}, "the profile is one for the source 'self'"),
    ):
        answer = vllm.generate([ids], [options])[0]
        assert answer.label is not None and text in answer.label["fell_back"] and answer.tokens == plain.tokens


def test_a_failed_check_falls_back_to_exact_prefill(folder: Path, tmp_path: Path) -> None:
    """With the source `draft`: the answer is plain vLLM's, its label has the reason, and its K/V can be shared."""
    layers = open_checkpoint(folder).config.num_layers
    strict = replace(random_profile("draft", folder), thresholds={"key": [0.0] * layers})
    strict.save(tmp_path / "strict")
    ids, late = prompt(700, 700), prompt(701, 510)  # up to 512 are read at once: no first check
    with open_vllm(
        folder, profile=str(tmp_path / "strict"), draft_model=str(folder), min_prompt_tokens=MIN_PROMPT_TOKENS
    ) as vllm:
        early = vllm.generate([ids], [DRAFTED])[0]  # after a first span of a long prompt
        assert early.label is not None and "a first check" in early.label["fell_back"]
        assert not early.label["approximate"]
        last = vllm.generate([late], [DRAFTED])[0]  # after all of a short one
        assert last.label is not None and "check spans failed" in last.label["fell_back"]
        plain = vllm.generate([ids, late], [None, None])
        assert [a.tokens for a in plain] == [early.tokens, last.tokens]
        assert plain[0].cached > 600  # computed exactly, it is like any other
        drafted = vllm.generate([ids], [{"source": "draft"}])[0]
        assert drafted.tokens == early.tokens


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_families(family: str, tmp_path: Path) -> None:
    own = tiny.write_folder(tmp_path / family, family, **SHAPE)
    prompts = [prompt(seed, 100 + 31 * seed) for seed in range(8)]
    with open_vllm(own, min_prompt_tokens=MIN_PROMPT_TOKENS) as vllm:
        plain, injected = (vllm.generate(prompts, [options] * 8) for options in (None, EXACT))
        assert [a.tokens for a in injected] == [a.tokens for a in plain]
        without = vllm.generate(prompts[-1:], [DRAFTED])[0]  # no profile
        assert without.label is not None and "needs a profile" in without.label["fell_back"]
        assert without.tokens == plain[-1].tokens
