"""Token dropping: what is kept keeps its place in the prompt, what is not kept is not seen."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.errors import OutOfPages
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Prefill
from forerun.prefill.sources.draft import DraftSource
from forerun.prefill.state import PrefillState
from forerun_research.studies.token_drop import SINK_TOKENS, TokenDropRun, drop_tokens
from tests import tiny
from tests.prefill.sources.common import make_maps, make_profile

CPU = torch.device("cpu")


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, count).tolist()


def draft_context_of(target: Path, draft: Path | None = None, same_tokens: bool = True) -> DraftContext:
    decoder, _ = build_decoder(open_checkpoint(target), CPU, "float32", 512)
    pool = PagePool(decoder.config, 128, 8, decoder.dtype, CPU)
    model = None
    if draft is not None:
        model = DraftModel(build_decoder(open_checkpoint(draft), CPU, "float32", 512)[0], None, same_tokens)
    return DraftContext.build(pool, Runner(decoder, pool, 512), None, 512, model)


def test_the_first_tokens_the_tail_and_the_chosen_are_kept():
    kept = drop_tokens(list(range(100, 150)), [20, 7, 7, 48], tail=3)
    assert kept.positions.tolist() == [*range(SINK_TOKENS), 7, 20, 47, 48, 49]
    assert kept.ids == [100 + p for p in kept.positions] and kept.shift == 50 - 9
    assert len(drop_tokens([1, 2], [], tail=10)) == 2
    with pytest.raises(ValueError, match="least is 1"):
        drop_tokens([1, 2, 3], [], tail=0)
    for chosen in ([3], [-1]):
        with pytest.raises(ValueError, match="the prompt has 3"):
            drop_tokens([1, 2, 3], chosen, tail=1)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_nothing_dropped_is_exact_prefill(family: str, tiny_folder: Callable[[str], Path], monkeypatch):
    monkeypatch.setattr("forerun_research.studies.token_drop.CHUNK_TOKENS", 32)
    ctx = draft_context_of(tiny_folder(family))
    prompt, answer = words(1, 90), words(2, 12)
    exact = ctx.runner.score([*prompt, *answer], 64)
    with TokenDropRun(ctx.runner, drop_tokens(prompt, range(90), 16), room=12) as run:
        torch.testing.assert_close(run.prefill(), exact[89], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(run.score(answer), exact[90:], atol=2e-4, rtol=1e-3)
    assert ctx.pool.used == 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dropped_tokens_are_as_if_never_attended_to(family: str, tiny_folder: Callable[[str], Path]):
    """Against transformers, where a mask hides them and positions stay."""
    from transformers import AutoModelForCausalLM

    folder = tiny_folder(family)
    ctx = draft_context_of(folder)
    prompt, answer = words(1, 80), words(2, 8)
    kept = drop_tokens(prompt, [9, 30, 31, 32, 55], tail=16)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    ids = torch.tensor([[*prompt, *answer]])
    seen = torch.zeros(1, 88, dtype=torch.long)
    seen[0, kept.positions] = 1
    seen[0, 80:] = 1
    with torch.inference_mode():
        truth = model(ids, attention_mask=seen, position_ids=torch.arange(88)[None]).logits[0]
    with TokenDropRun(ctx.runner, kept, room=8) as run:
        torch.testing.assert_close(run.prefill(), truth[79], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(run.score(answer[:5]), truth[80:85], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(run.score(answer[5:]), truth[85:], atol=2e-4, rtol=1e-3)


def test_greedy_goes_on_from_what_was_kept(tiny_folder: Callable[[str], Path]):
    ctx = draft_context_of(tiny_folder("qwen2"))
    prompt = words(1, 60)
    expected, tokens = list[int](), list(prompt)
    for _ in range(6):
        tokens.append(int(ctx.runner.score(tokens, 128)[-1].argmax()))
        expected.append(tokens[-1])
    with TokenDropRun(ctx.runner, drop_tokens(prompt, range(60), 1), room=6) as run:
        assert run.greedy(run.prefill(), 6) == expected
    stop = expected[2]
    with TokenDropRun(ctx.runner, drop_tokens(prompt, range(60), 1), room=6) as run:
        assert run.greedy(run.prefill(), 6, stop=[stop]) == expected[: expected.index(stop) + 1]


def test_too_many_tokens_for_the_pool(tiny_folder: Callable[[str], Path]):
    ctx = draft_context_of(tiny_folder("llama"))
    with pytest.raises(OutOfPages, match="128 are free"):
        TokenDropRun(ctx.runner, drop_tokens(words(1, 2000), range(2000), 1), room=1)
    assert ctx.pool.used == 0


def test_the_draft_says_what_the_tail_looks_at(tiny_folder: Callable[[str], Path]):
    """The target as its own draft: what is kept by its attention leaves less to miss than what it never looks at."""
    ctx = draft_context_of(tiny_folder("qwen2"), tiny_folder("qwen2"))
    source = DraftSource(ctx, make_profile("draft", make_maps(tiny_folder("qwen2"), 1, (1, 4))))
    prompt = words(1, 200)
    state = PrefillState(0, prompt, array("i", ctx.pool.allocate(25)), 0, 184, Prefill("speculative"), 4)
    state.report.chooser = "draft"
    state.source = source
    source.open(state)
    while state.read < 200:
        assert source.scores(state) is None
        source.read(state, 70)
    scores = source.scores(state)
    assert scores is not None and scores.shape == (200,) and scores.sum() == pytest.approx(1.0, abs=1e-3)
    order = np.argsort(-scores[:184])
    exact = ctx.runner.score(prompt, 256)[-1].log_softmax(-1)
    losses = []
    for chosen in (order[:90], order[94:]):
        with TokenDropRun(ctx.runner, drop_tokens(prompt, chosen, 16), room=0) as run:
            losses.append(float((exact.exp() * (exact - run.prefill().log_softmax(-1))).sum()))
    assert losses[0] < losses[1]
