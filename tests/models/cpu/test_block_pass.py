"""A drafted block in few calls of the C kernels: the same rows, K/V and answers as by operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.models.execution.runner import Span
from forerun.models.hidden_draft import BlockModel, BlockRows
from tests import tiny
from tests.train.kinds import PROMPTS, trained

OPTIONS: dict[str, Any] = {"kv_cache_tokens": 4096, "max_model_len": 256, "quiet": True}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # products are the same, norms are summed in another order


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("block-pass")
    target = tiny.write_gguf(
        folder / "target.gguf", tiny.write_folder(folder / "target", "llama", vocab_size=520), kind="Q8_0"
    )
    names = ("state-input", "five-bits", "block", "kv")
    drafters = {name: folder / f"{name}.safetensors" for name in names}
    for name, path in drafters.items():
        trained(target, name).save(path)
    return target, drafters


@pytest.fixture(scope="module", params=["state-input", "five-bits"])
def llm(files: tuple[Path, dict[str, Path]], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(files[0], draft_model=files[1][request.param], **OPTIONS) as opened:
        yield opened


def test_a_pass_gives_what_the_operators_give(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    ctx, seen = llm.engine.speculator.ctx, []
    run_one = BlockModel.run_one

    def both(model: BlockModel, token: int, vector: Tensor, pages: Any, first: int, rows: int, size: int) -> BlockRows:
        assert ctx.hidden_kv is not None
        span = Span([token, *[0] * (rows - 1)], first, pages, range(rows))
        wanted = model.run(ctx.runner.batch([span]), ctx.hidden_kv.kv, rows, vector)
        made = run_one(model, token, vector, pages, first, rows, size)
        torch.testing.assert_close(made.logits, wanted.logits, **CLOSE)
        torch.testing.assert_close(made.hidden, wanted.hidden, **CLOSE)
        seen.append(rows)
        return made

    monkeypatch.setattr(BlockModel, "run_one", both)
    with all_drafts_verified(llm.engine):
        for prompt in PROMPTS:
            llm.generate([prompt], max_tokens=12, ignore_eos=True, speculation=Speculation("block", nodes=6))
    assert len(seen) > 12 and max(seen) == 4


def test_vectors_and_context_are_those_of_the_operators(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    ctx = llm.engine.speculator.ctx
    model = ctx.hidden
    assert isinstance(model, BlockModel) and ctx.hidden_kv is not None and model.block_pass is not None
    draw = torch.Generator().manual_seed(1)
    states = [torch.randn(9, model.width, generator=draw) for _ in model.depths]
    few, kv = model.block_pass, ctx.hidden_kv.kv
    positions, slots = torch.arange(5, 14), torch.arange(32, 41)
    made, written = model.project(states), []
    for way in (few, None):
        monkeypatch.setattr(model, "block_pass", way)
        model.write_context(made, positions, slots, kv, kv)
        written.append([cache[slots].clone() for layer in kv for cache in layer])
        for layer in kv:
            for cache in layer:
                cache[slots] = 0.0
    torch.testing.assert_close(model.project(states), made, **CLOSE)
    torch.testing.assert_close(written[0], written[1], **CLOSE)
    assert all(bool(cache.any()) for cache in written[0])


def test_answers_are_plain_ones_alone_and_in_a_batch(llm: LLM):
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    plain = [llm.generate([prompt], speculation="off", **options)[0].token_ids for prompt in PROMPTS]
    rule = Speculation("block", nodes=6)
    with all_drafts_verified(llm.engine):
        alone = [llm.generate([prompt], speculation=rule, **options)[0] for prompt in PROMPTS]
        together = llm.generate(PROMPTS, speculation=rule, **options)
        sampled = llm.generate(PROMPTS, temperature=0.8, seed=1, speculation=rule, **options)
    assert [answer.token_ids for answer in alone] == plain == [answer.token_ids for answer in together]
    assert sum(answer.usage.drafters["block"].drafted for answer in sampled) > 20


@pytest.mark.parametrize("name", ["block", "kv"])
def test_other_blocks_keep_their_operators(files: tuple[Path, dict[str, Path]], name: str):
    with LLM(files[0], draft_model=files[1][name], **OPTIONS) as llm, all_drafts_verified(llm.engine):
        answer = llm.generate([PROMPTS[0]], max_tokens=8, ignore_eos=True, speculation=Speculation("block", nodes=6))[0]
        model = llm.engine.speculator.ctx.hidden
        assert isinstance(model, BlockModel) and model.block_pass is None
    assert answer.usage.drafters["block"].drafted > 5
