"""Folders of the `speculators` package: the logits that it computed itself, and answers of plain decoding.

`tests/data/speculators/make.py` wrote the folders and the logits beside them with that package.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun import LLM, Speculation
from forerun.cache.pool import PagePool
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.decode.draft_context import DraftContext
from forerun.decode.drafters.eagle import EagleRunner
from forerun.errors import BadDrafter, BadRequest, UnsupportedModel
from forerun.models.build import build_decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.models.hidden_draft import BlockModel, EagleModel, build_hidden_draft
from tests import tiny

FOLDERS = Path(__file__).parents[2] / "data" / "speculators"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny.write_folder(tmp_path_factory.mktemp("target"), "llama", **shape)


def opened(target: Path, name: str) -> tuple[DraftContext, dict[str, Tensor], array[int]]:
    """A drafter with its reference's hidden states in the place of the target's."""
    checkpoint, weights = open_checkpoint(target), HiddenDrafterWeights.load(FOLDERS / name)
    weights.check(checkpoint)
    reference = load_file(FOLDERS / f"{name}.reference.safetensors")
    if "embed" in reference:
        weights.tensors["embed_tokens.weight"] = reference["embed"]
    decoder, _ = build_decoder(checkpoint, CPU, "float32", 256, quiet=True)
    pool = PagePool(decoder.config, 8, 16, decoder.dtype, CPU)
    runner = Runner(decoder, pool, 256)
    model = build_hidden_draft(weights, checkpoint, decoder, 256)
    ctx = DraftContext.build(pool, runner, None, 256, model)
    pages = array("i", [5, 2, 7])
    assert runner.features is not None and pool.allocate(8)
    slots = runner.batch([Span([0] * 24, 0, pages, ())]).slot_mapping
    runner.features.record(slots, dict(zip(model.depths, reference["hidden"].chunk(3, -1), strict=True)))
    return ctx, reference, pages


@pytest.mark.parametrize("name", ["eagle3", "eagle31"])
def test_eagle_gives_the_packages_logits(target: Path, name: str):
    """The rounds of a chain after some tokens, where each node is the text's own next token."""
    ctx, reference, pages = opened(target, name)
    assert isinstance(ctx.hidden, EagleModel)
    runner, tokens, ids = EagleRunner(ctx, ctx.hidden), reference["tokens"].tolist()[1:], ctx.hidden.ids
    whole = runner.forward([Span(tokens, 0, pages, range(len(tokens)))]).logits[:, ids]
    torch.testing.assert_close(whole, reference["logits"][0], rtol=1e-4, atol=1e-4)
    runner.start()
    length = 17
    first = runner.forward([Span(tokens[:length], 0, pages, (length - 1,))]).logits[0, ids]
    torch.testing.assert_close(first, reference["logits"][0, length - 1], rtol=1e-4, atol=1e-4)
    for depth in (1, 2):
        node = Span([tokens[length + depth - 1]], length + depth - 1, pages, (0,), length, list(range(-1, depth - 1)))
        got = runner.forward([node]).logits[0, ids]
        torch.testing.assert_close(got, reference["logits"][depth, length - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_gives_the_packages_logits(target: Path, name: str):
    ctx, reference, pages = opened(target, name)
    model, anchor, tokens = ctx.hidden, int(reference["anchor"]), reference["tokens"]
    assert isinstance(model, BlockModel) and ctx.hidden_kv is not None and ctx.runner.features is not None
    rows = model.first_row + model.tokens
    assert (rows, model.tokens) == (5, 5 if name == "dspark" else 4)
    slots = torch.from_numpy(ctx.runner.batch([Span([0] * anchor, 0, pages, ())]).slot_mapping)
    made = ctx.runner.features.rows(pages, 0, anchor)
    model.write_context(made, torch.arange(anchor), slots, ctx.hidden_kv.kv, ctx.pool.kv)
    span = Span([int(tokens[anchor]), *[0] * (rows - 1)], anchor, pages, range(rows))
    found = model.run(ctx.runner.batch([span]), ctx.hidden_kv.kv, rows)
    logits = found.logits[0]
    if name == "dspark":
        before = tokens[anchor : anchor + rows]
        logits = logits + torch.cat([model.bias(token[None]) for token in before])
        sure = model.confidence(found.hidden, before[None, :, None])
        assert sure is not None
        torch.testing.assert_close(sure[0, :, 0], reference["confidence"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, reference["logits"][model.first_row :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "eagle31", "dflash", "dspark"])
@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seeded"])
def test_answers_are_those_of_plain_decoding(target: Path, name: str, values: dict[str, Any]):
    prompts = [[5, 6, 7, 8] * 6, list(range(20, 90)), [300, 301]]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, **values}
    llm = LLM(target, draft_model=FOLDERS / name, dtype="float32", kv_cache_tokens=2048, max_model_len=256, quiet=True)
    drafter = "block" if name.startswith("d") else "eagle3"
    assert drafter in llm.engine.speculator.drafter_pool.names(llm.request([1]).params)
    plain = [llm.generate([prompt], speculation="off", **options)[0].token_ids for prompt in prompts]
    llm.clear_cache()
    with all_drafts_verified(llm.engine):
        drafted = llm.generate(prompts, speculation=Speculation(drafter, nodes=8), **options)
    assert [answer.token_ids for answer in drafted] == plain
    assert sum(answer.usage.drafters[drafter].drafted for answer in drafted) > 20


def test_what_does_not_fit_is_refused(target: Path, tiny_folder: Callable[[str], Path], tmp_path: Path):
    def changed(**values: Any) -> Path:
        copy = tmp_path / "-".join(values)
        shutil.copytree(FOLDERS / "dspark", copy, dirs_exist_ok=True)
        config = json.loads((copy / "config.json").read_text()) | values
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    with pytest.raises(BadDrafter, match="reads hidden states of 32 values"):
        LLM(tiny_folder("llama"), draft_model=FOLDERS / "eagle3")
    layers = json.loads((FOLDERS / "dspark" / "config.json").read_text())["transformer_layer_config"]
    with pytest.raises(BadDrafter, match="a vocabulary of 500 tokens"):
        LLM(target, draft_model=changed(transformer_layer_config=layers | {"vocab_size": 500}))
    with pytest.raises(BadDrafter, match="at depths 1, 2, 9"):
        LLM(target, draft_model=changed(aux_hidden_state_layer_ids=[1, 2, 9]))
    with pytest.raises(BadDrafter, match="fc.weight has shape"):
        LLM(target, draft_model=changed(aux_hidden_state_layer_ids=[1, 2]))
    with pytest.raises(UnsupportedModel, match="'peagle' drafter"):
        LLM(target, draft_model=changed(speculators_model_type="peagle"))
    with pytest.raises(UnsupportedModel, match="'rnn' Markov head"):
        LLM(target, draft_model=changed(markov_head_type="rnn"))
    cut = changed(block_size=5)
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadDrafter, match="truncated or damaged"):
        LLM(target, draft_model=cut)
    with pytest.raises(BadRequest, match="reads the target's hidden states"):
        LLM(target, kv_cache_tokens=512, max_model_len=64, quiet=True).generate([[1, 2]], speculation="eagle3")
