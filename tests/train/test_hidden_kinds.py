"""Blocks and heads: rows of training are what the engine drafts; learning, files, answers, a whole run."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import LLM, BadDrafter, BadRequest, Grammar, SamplingParams, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.core import EXTRA_KV_SLOTS, ROOT
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.block import BlockDrafter, BlockMarginals
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.sampling import Context
from forerun.engine.config import size_kv_cache
from forerun.errors import UnsupportedModel
from forerun.models.execution.runner import Span
from forerun.models.formats import adapter
from forerun.models.formats.adapter import drafter_name
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights, write_speculators
from forerun.models.hidden_draft import BlockModel, HeadsModel, build_hidden_draft
from forerun.prefill.calibration.dense import DenseModel
from forerun.train import run
from forerun.train.block import BlockNetwork, default_depths
from forerun.train.layout import draw_blocks
from forerun.train.loss import Outcome, teach
from forerun.train.parallel import in_five_bits
from forerun.train.run import TrainJob, train_drafter
from forerun.train.trainer import Trainer, TrainSettings
from tests import tiny
from tests.train.kinds import (
    CPU,
    MASK,
    OPTIONS,
    PROMPTS,
    SETTINGS,
    TOKENS,
    VARIANTS,
    WINDOW,
    make,
    network,
    teacher,
    trained,
)

# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_of_a_block_see_what_comes_before_their_anchor_and_themselves():
    layout = draw_blocks(64, TOKENS, WINDOW, torch.Generator().manual_seed(0))
    seen = layout.hidden == 0.0
    assert len(layout.anchors) == len(seen) and int(layout.anchors.min()) >= 1
    for row, (anchor, depth) in enumerate(zip(layout.anchors.tolist(), layout.depths.tolist(), strict=True)):
        assert anchor + depth < 64 and depth == row % TOKENS
        before = {entry for entry in range(anchor) if entry > anchor + depth - WINDOW}
        assert set(seen[row].nonzero()[:, 0].tolist()) == before | {64 + row - back for back in range(depth + 1)}
    cuts = {draw_blocks(64, TOKENS, WINDOW, torch.Generator().manual_seed(s)).first_known > 0 for s in range(60)}
    assert cuts == {False, True}


def drafted_logits(llm: LLM, tokens: list[int], first_known: int) -> Tensor:
    """[TOKENS, columns] of the engine's drafter after a text, before the Markov head's part."""
    ctx = llm.engine.speculator.ctx
    pages = array("i", ctx.pool.allocate(ctx.pool.pages_for(len(tokens) + 8)))
    features = ctx.runner.features
    ctx.runner.forward([Span(tokens[:-1], 0, pages, ())])
    if first_known:  # as after a prompt whose K/V was drafted
        assert features is not None
        features._on_pages.filled[pages[0]] = 0
        assert features.known_from(pages, 0, len(tokens) - 1) == first_known
    ask, model = asked(tokens, pages), ctx.hidden
    if isinstance(model, HeadsModel):
        assert features is not None
        found = model.logits(features.rows(pages, len(tokens) - 2, len(tokens) - 1))[0]
    else:
        assert isinstance(model, BlockModel)
        marginals = BlockDrafter(ctx)._pass([ask], [TreeBuilder(ask, "block")])[0][0]
        assert isinstance(marginals, BlockMarginals)
        found = marginals._logits
    ctx.pool.release(pages)
    return found


def asked(tokens: list[int], pages: array[int], **values: Any) -> DraftRequest:
    return DraftRequest(-1, Context(SamplingParams(**values), tokens, len(tokens), seed=0), TOKENS, 12, pages)


CASES = [(kind, 0) for kind in VARIANTS] + [("block", 16), ("norms", 16), ("both", 16)]


@pytest.mark.parametrize(("kind", "first_known"), CASES)
def test_trained_rows_are_what_the_engine_drafts(target: Path, kind: str, first_known: int):
    """Also with hidden states missing at the beginning."""
    dense = teacher(target)
    made = network(kind, dense)
    text = torch.randint(0, 500, (1, 40), generator=torch.Generator().manual_seed(1))
    layout = replace(draw_blocks(40, TOKENS, WINDOW, torch.Generator().manual_seed(2)), first_known=first_known)
    teaching = teach(dense, text, text, made.ids, 0, made.depths, made.kv_layers)
    rows, head = made.rows(text, teaching, layout)[0].detach(), made.head()
    if SETTINGS[kind].head_rank:
        head = made.trained["head"][:, : SETTINGS[kind].head_rank].detach()
    logits = rows[:, : head.shape[1]] @ head.T  # [rows, columns]
    llm = LLM(target, draft_model=trained(target, kind), **OPTIONS)
    for anchor in sorted(set(layout.anchors.tolist()))[-4:]:
        assert anchor > first_known
        row = layout.anchors.tolist().index(anchor)
        got = drafted_logits(llm, text[0, : anchor + 1].tolist(), first_known)
        torch.testing.assert_close(got, logits[row : row + TOKENS], rtol=1e-3, atol=1e-3)


def test_the_markov_head_and_the_confidence_become_probabilities(target: Path):
    llm = LLM(target, draft_model=trained(target, "block"), **OPTIONS)
    ctx, tokens = llm.engine.speculator.ctx, PROMPTS[1]
    pages = array("i", ctx.pool.allocate(8))
    ctx.runner.forward([Span(tokens[:-1], 0, pages, ())])
    ask, drafter, model = asked(tokens, pages, temperature=0.7), BlockDrafter(ctx), ctx.hidden
    assert isinstance(model, BlockModel)
    draft = drafter.propose([ask])[0]
    assert draft.problem(520) is None and max(draft.depths()) > 1
    marginals = drafter._pass([ask], [TreeBuilder(ask, "block")])[0][0]
    span = Span([tokens[-1], *[0] * (TOKENS - 1)], len(tokens) - 1, pages, range(TOKENS))
    rows = model.run(ctx.runner.batch([span]), drafter._kv, TOKENS)
    for node, children in draft.children().items():
        before, depth = (tokens[-1], 0) if node == ROOT else (draft.tokens[node], draft.depths()[node])
        bias = model.bias(torch.tensor([before]))[0]
        torch.testing.assert_close(marginals.row(depth, before)[model.ids], rows.logits[0, depth] + bias)
        probs = torch.softmax(marginals.row(depth, before) / 0.7, -1)
        sure = model.confidence(rows.hidden[0, depth], torch.tensor([before]))
        assert sure is not None and draft.probs[children[0]] == pytest.approx(float(sure[0]), rel=1e-3)
        # candidates are the likeliest of the position without the Markov head: a few tokens may be left out
        assert float(probs[draft.tokens[children[0]]]) > 0.8 * float(probs.max())


# -- learning ----------------------------------------------------------------------------------------------------------


STREAM = np.tile(np.arange(100, 132, dtype=np.int32), 40)


def sure_teacher(target: Path) -> DenseModel:
    """A random model is nearly uniform; this one has something to teach."""
    dense = teacher(target)
    dense.weights["head"] = 4.0 * dense.weights["head"]
    return dense


@pytest.mark.parametrize("kind", list(VARIANTS))
def test_training_learns_and_resumes_where_it_stopped(target: Path, kind: str):
    dense, ids = sure_teacher(target), torch.arange(300)
    trainer = Trainer(make(kind, dense, ids), dense, STREAM, SETTINGS[kind])
    losses = [trainer.step(0.3) for _ in range(25)]
    other = Trainer(make(kind, dense, ids), dense, STREAM, SETTINGS[kind])
    other.load(trainer.state())
    assert other.steps == 25 and other.step(0.3) == pytest.approx(trainer.step(0.3), rel=1e-4)
    trainer.steps = 0  # the first windows again
    assert trainer.step(0.3) < 0.8 * losses[0]


def test_training_ends_after_so_many_steps(target: Path):
    dense, settings = sure_teacher(target), replace(SETTINGS["block"], minutes=5.0, max_steps=3)
    trainer = Trainer(make("block", dense, torch.arange(300)), dense, STREAM, settings)
    trainer.run()
    assert trainer.steps == 3


@pytest.mark.parametrize("kind", list(VARIANTS))
def test_training_runs_in_the_dtype_of_a_gpu(target: Path, kind: str):
    dense = sure_teacher(target)
    half = DenseModel(dense.config, {name: value.bfloat16() for name, value in dense.weights.items()})
    trainer = Trainer(make(kind, half, torch.arange(300)), half, STREAM, SETTINGS[kind])
    plain = Trainer(make(kind, dense, torch.arange(300)), dense, STREAM, SETTINGS[kind])
    for _ in range(4):  # the fourth step has long windows
        assert trainer.step(0.3) == pytest.approx(plain.step(0.3), rel=0.05)
    assert all(value.dtype == torch.float32 for value in trainer.network.parameters())


def test_the_confidence_head_learns_how_much_is_accepted(target: Path):
    made = BlockNetwork(teacher(target), torch.arange(300), SETTINGS["block"], MASK)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 60, 64 + 4, generator=generator)
    accepted = (rows[..., 3] + rows[..., -1]).sigmoid()  # by a hidden value and by the token before
    outcome = Outcome(0.0, accepted, torch.full((2, 60), 1 / 120))
    weight, bias = (made.trained[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
    optimizer = torch.optim.Adam([weight, bias], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        made.learn_confidence(rows, outcome)
        optimizer.step()
    sure = (rows @ weight[0] + bias).sigmoid().detach()
    assert float((sure - accepted).abs().mean()) < 0.02 < float((0.5 - accepted).abs().mean())
    others = [value for name, value in made.trained.items() if not name.startswith("confidence")]
    assert all(value.grad is None for value in others)  # the layers do not change for it


def test_confidence_follows_the_odds_of_the_likeliest_token(target: Path):
    """Where it is trained with them, and in the engine as in training."""
    made = BlockNetwork(teacher(target), torch.arange(300), SETTINGS["state-input"], MASK)
    generator = torch.Generator().manual_seed(0)
    rows, odds = torch.randn(2, 60, 64 + 4, generator=generator), 3.0 * torch.randn(2, 60, generator=generator)
    outcome = Outcome(torch.zeros(()), (2.0 * odds - 1.0).sigmoid(), torch.full((2, 60), 1 / 120), odds)
    optimizer = torch.optim.Adam([v for n, v in made.trained.items() if n.startswith("confidence")], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        made.learn_confidence(rows, outcome)
        optimizer.step()
    assert float(made.trained["confidence_head.odds"].detach()) == pytest.approx(2.0, abs=0.2)
    llm = LLM(target, draft_model=trained(target, "state-input"), **OPTIONS)
    model, before = llm.engine.speculator.ctx.hidden, torch.tensor([7])
    assert isinstance(model, BlockModel) and model._confidence_odds is not None
    low, high = (model.confidence(torch.zeros(64), before, torch.tensor([top])) for top in (0.2, 0.9))
    assert low is not None and high is not None
    added = float(model._confidence_odds) * (torch.tensor(0.9).logit() - torch.tensor(0.2).logit())
    assert float(high.logit() - low.logit()) == pytest.approx(float(added), rel=1e-3)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_for_another_target_is_refused(target: Path, saved: Path, tmp_path: Path):
    other = tiny.write_folder(tmp_path / "other", "llama", seed=5, vocab_size=520)
    with pytest.raises(BadDrafter, match=r"was trained for target, not for other"):
        LLM(other, draft_model=saved)
    small = tiny.write_folder(tmp_path / "small", "llama", vocab_size=512)
    with pytest.raises(BadDrafter, match="a vocabulary of 520 tokens, small has 512"):
        LLM(small, draft_model=saved)
    data, cut, changed = saved.read_bytes(), tmp_path / "cut.safetensors", tmp_path / "changed.safetensors"
    cut.write_bytes(data[: len(data) // 2])
    changed.write_bytes(data[:-3] + bytes([data[-3] ^ 255]) + data[-2:])
    for path, why in ((cut, "not a whole"), (changed, "checksum")):
        with pytest.raises(BadDrafter, match=why):
            LLM(target, draft_model=path)


def test_a_drafter_is_found_by_the_targets_weights(
    target: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter, "drafter_folders", lambda: (tmp_path,))
    assert LLM(target, **OPTIONS).draft_name is None
    place = tmp_path / drafter_name(open_checkpoint(target))
    place.write_bytes(saved.read_bytes())
    llm = LLM(target, **OPTIONS)
    assert saved.stem in llm.engine.speculator.drafter_pool.names(SamplingParams())
    assert LLM(open_checkpoint(target), **OPTIONS).draft_name is None  # what was opened stays alone
    place.write_bytes(saved.read_bytes()[:-9])  # damaged, and never asked for
    assert LLM(target, **OPTIONS).draft_name is None


def test_a_block_as_a_folder_of_the_package_is_the_same_drafter(target: Path, saved: Path, tmp_path: Path):
    checkpoint, weights = open_checkpoint(target), HiddenDrafterWeights.load(saved)
    if saved.stem == "heads":
        with pytest.raises(Exception, match="no form in the `speculators` format"):
            write_speculators(weights, checkpoint, tmp_path / "folder")
        return
    write_speculators(weights, checkpoint, tmp_path / "folder")
    again = HiddenDrafterWeights.load(tmp_path / "folder")
    again.check(checkpoint)
    assert (again.tokens, again.layers, again.depths(checkpoint.config)) == (
        TOKENS,
        weights.layers,
        default_depths(checkpoint.config.num_layers),
    )
    decoder = LLM(target, **OPTIONS).decoder
    ours, theirs = (build_hidden_draft(each, checkpoint, decoder, 256) for each in (weights, again))
    hidden = [torch.randn(3, 64) for _ in ours.depths]
    torch.testing.assert_close(ours.project(hidden), theirs.project(hidden), rtol=0.02, atol=0.02)  # bfloat16
    assert isinstance(theirs, BlockModel) and isinstance(ours, BlockModel)
    torch.testing.assert_close(theirs._mask, ours._mask, rtol=0.01, atol=0.01)


def test_what_lies_on_the_pages_is_part_of_the_pools_budget(target: Path, saved: Path):
    plain, with_drafter = (LLM(target, draft_model=draft, **OPTIONS) for draft in (None, saved))
    hidden, pool = with_drafter.engine.speculator.ctx.hidden, with_drafter.engine.pool
    assert hidden is not None
    slots = pool.num_pages * 16 + EXTRA_KV_SLOTS
    beside = sum(pool.page_bytes(shape, slots, torch.float32) for shape in hidden.on_pages)
    assert pool.nbytes == plain.engine.pool.nbytes + beside
    decoders = [plain.decoder]
    asked = size_kv_cache(decoders, 1 << 30), size_kv_cache(decoders, 1 << 30, beside=hidden.on_pages)
    assert asked[1] < 0.95 * asked[0]  # by the memory that is free


# -- answers -----------------------------------------------------------------------------------------------------------


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
def test_answers_are_those_of_plain_decoding(target: Path, saved: Path, values: dict[str, Any]):
    llm = LLM(target, draft_model=saved, **OPTIONS)
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, **values}
    plain = [llm.generate([prompt], speculation="off", **options)[0].token_ids for prompt in PROMPTS]
    llm.clear_cache()
    rule = Speculation(saved.stem, nodes=10)
    with all_drafts_verified(llm.engine):
        together = llm.generate(PROMPTS, speculation=rule, **options)
        again = [llm.generate([prompt], speculation=rule, **options)[0] for prompt in PROMPTS]  # cached prefixes
    assert [answer.token_ids for answer in together] == plain == [answer.token_ids for answer in again]
    drafted = [a.usage.drafters[saved.stem].drafted for a in together if saved.stem in a.usage.drafters]
    assert sum(drafted) > (0 if "grammar" in values else 50)


@pytest.mark.parametrize("name", ["norms", "kv", "both", "low-rank", "state-input", "five-bits"])
def test_answers_of_other_blocks_are_those_of_plain_decoding(target: Path, name: str, tmp_path: Path):
    """In a batch, and drafts that are sampled."""
    path = tmp_path / f"{name}.safetensors"
    trained(target, name).save(path)
    llm = LLM(target, draft_model=path, **OPTIONS)
    assert (llm.engine.speculator.ctx.runner.features is None) == (name == "kv")
    options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    plain = [llm.generate([prompt], speculation="off", **options)[0].token_ids for prompt in PROMPTS]
    llm.clear_cache()
    with all_drafts_verified(llm.engine):
        together = llm.generate(PROMPTS, speculation=Speculation("block", nodes=10), **options)
        rule = Speculation("block", nodes=6, verify="traversal")
        sampled = llm.generate(PROMPTS, temperature=0.8, seed=1, speculation=rule, **options)
    assert [answer.token_ids for answer in together] == plain
    for answers in (together, sampled):
        assert sum(answer.usage.drafters["block"].drafted for answer in answers) > 20


def test_what_the_package_has_no_place_for_is_not_written(target: Path, tmp_path: Path):
    checkpoint = open_checkpoint(target)
    reasons = {"norms": "norms of its hidden states", "kv": "--reuse kv", "both": "--reuse both and norms"}
    reasons["state-input"] = "rows that start from a hidden state"
    for name, why in reasons.items():
        with pytest.raises(UnsupportedModel, match=why):
            write_speculators(trained(target, name), checkpoint, tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_head_of_low_rank_is_written_as_a_whole_one(target: Path, tmp_path: Path):
    weights, checkpoint = trained(target, "low-rank"), open_checkpoint(target)
    write_speculators(weights, checkpoint, tmp_path / "folder")
    again, decoder = HiddenDrafterWeights.load(tmp_path / "folder"), LLM(target, **OPTIONS).decoder
    again.check(checkpoint)
    assert again.tensors["lm_head.weight"].shape == (300, 64) and "head_rank" not in again.config
    ours, theirs = (build_hidden_draft(each, checkpoint, decoder, 256) for each in (weights, again))
    assert isinstance(ours, BlockModel) and isinstance(theirs, BlockModel) and ours._head_down is not None
    row, before = torch.randn(1, 64), torch.tensor([[7]])
    low = ours._head_down(row)
    torch.testing.assert_close(ours.row_logits(low), theirs.row_logits(row), rtol=0.03, atol=0.03)  # bfloat16
    sure = [model.confidence(read, before) for model, read in ((ours, low), (theirs, row))]
    torch.testing.assert_close(sure[0], sure[1], rtol=0.02, atol=0.02)


def test_a_block_that_reads_keys_of_another_form_is_refused(target: Path):
    weights = trained(target, "kv")
    weights.config["transformer_layer_config"] |= {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    with pytest.raises(BadDrafter, match="another rope than target has"):
        HiddenDrafterWeights(weights.config, weights.tensors, "x").check(open_checkpoint(target))


# -- the whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["block", "heads"])
def test_a_run_makes_a_drafter_with_figures(
    target: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    monkeypatch.setattr(run, "ANSWER_TOKENS", 6)
    monkeypatch.setattr("forerun.train.answers.QUESTION_TOKENS", 6)
    monkeypatch.setattr("forerun.train.measure.KINDS", ("code",))
    monkeypatch.setattr("forerun.train.measure.PROMPTS_PER_KIND", 1)
    monkeypatch.setattr("forerun.train.measure.ANSWER_TOKENS", 4)
    monkeypatch.setattr(run, "CONTEXT_LENGTHS", (48, 128))
    out = tmp_path / "drafter.safetensors"
    train_drafter(TrainJob(str(target), None, out, (tmp_path / "text.txt",), answers=4), SETTINGS[kind], CPU)
    made = HiddenDrafterWeights.load(out)
    assert {row["way"] for row in made.facts["figures"]} == {"plain", "untrained", kind}
    assert len({row["context"] for row in made.facts["figures"]}) == 2 and "worth using here" in made.facts["worth"]
    assert made.facts["steps"] > 0 and made.facts["covered"] > 0.9 and made.names == {"target": "target"}
    assert all(0.0 <= share <= 1.0 for share in made.facts["agreement"]) and len(made.facts["agreement"]) == TOKENS
    llm = LLM(target, draft_model=made, **OPTIONS)
    known = llm.engine.speculator.controller.acceptance.records[kind].kinds  # before any request
    assert (
        {name: record.depths[:TOKENS] for name, record in known.items()}
        == {name: depths[:TOKENS] for name, depths in made.facts["outcomes"].items()}
        != {}
    )
    assert "answers: 4 of 4" in capsys.readouterr().err


def test_layers_in_five_bits_are_read_as_they_are_trained(target: Path, tmp_path: Path):
    """The file is smaller, and what is rounded once is rounded to nearly the same again."""
    made, paths = trained(target, "five-bits"), [tmp_path / f"{bits}.safetensors" for bits in (5, 8)]
    made.save(paths[0])
    replace(made, config=made.config | {"bits": 8}).save(paths[1])
    assert paths[0].stat().st_size < paths[1].stat().st_size
    found = HiddenDrafterWeights.load(paths[0])
    found.check(open_checkpoint(target))
    for name, value in made.tensors.items():
        if name.startswith("layers.") and value.ndim == 2:
            torch.testing.assert_close(found.tensors[name], in_five_bits(value), rtol=1e-3, atol=1e-5)
    with pytest.raises(BadRequest, match="bits is 4"):
        TrainSettings(kind="block", bits=4)
