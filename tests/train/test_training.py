"""Rows, loss and network of training, each against a plain computation of the same, and a whole run on tiny models."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from forerun import LLM, BadDrafter, BadRequest
from forerun.cache.pool import PagePool
from forerun.models.build import build_decoder
from forerun.models.cpu.quantise import quantise
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats import adapter
from forerun.models.formats.adapter import CHANGED_BITS, AdaptedCheckpoint, DrafterFile, draft_for_any, drafter_name
from forerun.models.formats.checkpoint import Checkpoint, open_checkpoint
from forerun.models.formats.dequant import dequantise
from forerun.models.formats.fingerprint import fingerprint
from forerun.models.formats.pard import ParallelDrafting, write_pard
from forerun.prefill.calibration.dense import DenseModel
from forerun.prefill.open_profile import draft_for_profile
from forerun.serve.draft_worker import DraftingLLM, DraftWorker
from forerun.train import run
from forerun.train.answers import collect_answers
from forerun.train.layout import draw_layout
from forerun.train.loss import TEXT_WEIGHT, Teaching, backward, row_weights, teach
from forerun.train.parallel import DraftNetwork, in_five_bits
from forerun.train.run import ParallelRun, TrainJob, choose_mask, train_drafter
from forerun.train.trainer import Trainer, TrainSettings
from tests import tiny

CPU = torch.device("cpu")
MASK, TOKENS = 512, 4
SETTINGS = TrainSettings(tokens=TOKENS, rank=4, minutes=0.02, window=32, long_window=64, batch_tokens=128, rate=1e-2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a smaller draft with the same tokens and ids that no token has."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny.write_folder(root / "target", "qwen2", seed=0, vocab_size=520)
    return target, tiny.write_folder(root / "draft", "qwen2", seed=1, vocab_size=520, num_hidden_layers=2)


NOTHING = Teaching(torch.empty(0), torch.empty(0), torch.empty(0))  # of the target: a draft model reads text alone


def network(path: Path, trained: bool = True) -> DraftNetwork:
    made = DraftNetwork.open(open_checkpoint(path), CPU, torch.float32, MASK, rank=4, seed=0)
    if trained:
        for _, b in made.low_rank.values():
            b.data.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(b.shape[0]))
        made.mask.data.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(7))
    return made


def drafter_file(pair: tuple[Path, Path], made: DraftNetwork) -> DrafterFile:
    target, draft = map(open_checkpoint, pair)
    names = {"target": str(pair[0]), "draft": str(pair[1])}
    parallel = ParallelDrafting(MASK, TOKENS)
    return DrafterFile(
        "parallel", fingerprint(target), fingerprint(draft), names, parallel, made.changes(), made.mask.detach()
    )


def engine_logits(checkpoint: Checkpoint, ids: list[int], weights: str = "float32") -> torch.Tensor:
    decoder, _ = build_decoder(checkpoint, CPU, weights, 256, quiet=True, is_draft=True)
    pool = PagePool(decoder.config, 8, 16, torch.float32, CPU)
    return Runner(decoder, pool, 256).forward([Span(ids, 0, array("i", range(8)), range(len(ids)))]).logits


# -- rows --------------------------------------------------------------------------------------------------------------


def test_masks_follow_their_anchors_and_see_nothing_of_others():
    layout = draw_layout(64, TOKENS, 0.7, 0.3, torch.Generator().manual_seed(0))
    seen = layout.hidden == 0.0
    assert len(layout.anchors) % 8 == 0 and len(layout.anchors) > 40
    for row, (anchor, depth) in enumerate(zip(layout.anchors.tolist(), layout.depths.tolist(), strict=True)):
        assert depth == 1 or (layout.anchors[row - 1] == anchor and layout.depths[row - 1] == depth - 1)
        assert anchor + depth < 64
        wanted = {*range(anchor + 1), *(64 + row - back for back in range(depth))}
        assert set(seen[row].nonzero()[:, 0].tolist()) == wanted
    shares = [(layout.depths == depth).sum() / 64 for depth in range(1, TOKENS)]
    assert shares[0] > 0.6 and shares[-1] == pytest.approx(0.34, abs=0.06)


def test_a_long_window_has_no_more_masks_than_a_short_one():
    short, long = (draw_layout(n, 8, 0.7, 0.2, torch.Generator().manual_seed(0)) for n in (512, 2048))
    assert len(long.anchors) == pytest.approx(len(short.anchors), rel=0.05)


@pytest.mark.parametrize("rows", [8, 24, 4096])
def test_masks_in_pieces_attend_to_all_that_they_see(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forerun.train.layout.PIECE_ROWS", rows)
    layout = draw_layout(64, 12, 0.9, 0.5, torch.Generator().manual_seed(3))
    seen, reached = layout.hidden == 0, torch.zeros_like(layout.hidden, dtype=torch.bool)
    for masks, keys, text_end in layout.pieces:
        reached[masks, :text_end] = True
        reached[masks, layout.length + keys.start : layout.length + keys.stop] = True
    assert not (seen & ~reached).any() and reached.float().mean() <= (1.0 if rows == 4096 else 0.75)


def test_rows_of_training_are_what_the_engine_computes(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    """Every mask's row equals that of the engine's decoder with the same changes, run on text and masks."""
    monkeypatch.setattr("forerun.train.layout.PIECE_ROWS", 8)
    made = network(pair[1])
    adapted = AdaptedCheckpoint(open_checkpoint(pair[1]), drafter_file(pair, made))
    tokens = torch.randint(0, 500, (1, 24), generator=torch.Generator().manual_seed(1))
    layout = draw_layout(24, TOKENS, 0.8, 0.5, torch.Generator().manual_seed(2))
    logits = F.linear(
        made.rows(tokens, NOTHING, layout), made.embed if made.config.tie_embeddings else made.weights["head"]
    )[0]
    text = engine_logits(adapted, tokens[0].tolist())
    torch.testing.assert_close(logits[:24, :512], text[:, :512], rtol=1e-3, atol=1e-3)
    for row in range(0, len(layout.anchors), 5):
        anchor, depth = int(layout.anchors[row]), int(layout.depths[row])
        alone = engine_logits(adapted, [*tokens[0, : anchor + 1].tolist(), *[MASK] * depth])[-1]
        torch.testing.assert_close(logits[24 + row, :512], alone[:512], rtol=1e-3, atol=1e-3)


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_loss_and_its_gradient_are_those_of_weighted_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    layout = draw_layout(40, TOKENS, 0.8, 0.5, generator)
    rows = 40 + len(layout.anchors)
    hidden = torch.randn(2, rows, 16, generator=generator, requires_grad=True)
    head = torch.randn(31, 16, generator=generator)
    probs = torch.randn(2, 40, 31, generator=generator).softmax(-1)
    teaching = Teaching(probs, -torch.rand(2, 40, generator=generator), probs.argmax(-1))
    loss = backward(hidden, head, teaching, layout).loss
    other = hidden.detach().clone().requires_grad_()
    weights = row_weights(teaching.log_next, layout)
    cross = -(probs[:, layout.positions] * F.linear(other, head).log_softmax(-1)).sum(-1)
    plain = (weights * cross).sum() / weights.sum()
    plain.backward()
    assert loss == pytest.approx(float(plain.detach()), rel=1e-5)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, other.grad)


def test_a_mask_counts_by_the_probability_of_the_tokens_before_it():
    layout = draw_layout(40, TOKENS, 0.8, 0.5, torch.Generator().manual_seed(0))
    log_next = -torch.rand(1, 40)
    weights = row_weights(log_next, layout)[0]
    assert weights[:40].tolist() == pytest.approx([TEXT_WEIGHT] * 40)
    for row in range(len(layout.anchors)):
        anchor, depth = int(layout.anchors[row]), int(layout.depths[row])
        assert float(weights[40 + row]) == pytest.approx(float(log_next[0, anchor : anchor + depth].sum().exp()))


def test_the_target_teaches_its_own_distributions(pair: tuple[Path, Path]):
    target = DenseModel.from_checkpoint(open_checkpoint(pair[0]), CPU, torch.float32)
    tokens = torch.randint(0, 500, (2, 17))
    teaching = teach(target, tokens[:, :-1], tokens[:, 1:], torch.arange(520), 1)
    probs = target.logits(target.trace(tokens[:, :-1]).hidden[-1]).softmax(-1)
    torch.testing.assert_close(teaching.probs[..., :520], probs, rtol=1e-4, atol=1e-5)
    assert not teaching.probs[..., 520].any()
    torch.testing.assert_close(teaching.log_next, probs.gather(2, tokens[:, 1:, None])[..., 0].log())
    assert torch.equal(teaching.best, probs.argmax(-1))
    some = teach(target, tokens[:, :-1], tokens[:, 1:], torch.arange(0, 520, 2))
    even = probs.argmax(-1) % 2 == 0
    assert torch.equal(some.best, torch.where(even, probs.argmax(-1) // 2, -1)) and bool((~even).any())


@pytest.mark.parametrize("full", [False, True])
def test_training_learns_and_resumes_where_it_stopped(pair: tuple[Path, Path], full: bool):
    def start() -> DraftNetwork:
        return DraftNetwork.open(open_checkpoint(pair[1]), CPU, torch.float32, MASK, None if full else 4, seed=0)

    stream = np.tile(np.arange(100, 132, dtype=np.int32), 40)  # what follows is always the same
    target = DenseModel.from_checkpoint(open_checkpoint(pair[0]), CPU, torch.float32)
    trainer = Trainer(start(), target, stream, SETTINGS)
    losses = [trainer.step(0.3) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.1  # the random target is nearly uniform: most of the loss is its entropy
    other = Trainer(start(), target, stream, SETTINGS)
    other.load(trainer.state())
    assert other.steps == 12 and other.step(0.3) == pytest.approx(trainer.step(0.3), rel=1e-5)


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    path = tmp_path / "drafter.safetensors"
    drafter_file(pair, network(pair[1])).save(path)
    return path


def test_a_saved_drafter_drafts_and_is_found_by_its_models(
    pair: tuple[Path, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {"dtype": "float32", "kv_cache_tokens": 1024, "max_model_len": 128, "quiet": True}
    plain = LLM(pair[0], **options).generate([[5, 6, 7]], max_tokens=12, ignore_eos=True, speculation="off")
    named = LLM(pair[0], draft_model=saved, **options)
    drafted = named.generate([[5, 6, 7]], max_tokens=12, ignore_eos=True, speculation="parallel")
    assert drafted[0].token_ids == plain[0].token_ids
    monkeypatch.setattr(adapter, "drafter_folders", lambda: (tmp_path / "found",))
    untrained = LLM(pair[0], draft_model=pair[1], **options)
    assert untrained.engine.speculator.ctx.draft.parallel is None
    (tmp_path / "found").mkdir()
    saved.rename(tmp_path / "found" / drafter_name(*map(open_checkpoint, pair)))
    found = LLM(pair[0], draft_model=pair[1], **options)
    assert found.engine.speculator.ctx.draft.parallel == ParallelDrafting(MASK, TOKENS)
    (file,) = (tmp_path / "found").iterdir()
    file.write_bytes(file.read_bytes()[:-9])  # damaged, and never asked for
    assert LLM(pair[0], draft_model=pair[1], **options).engine.speculator.ctx.draft.parallel is None


def test_a_profile_has_the_draft_it_was_made_with(
    pair: tuple[Path, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    draft = open_checkpoint(pair[1])
    adapted = AdaptedCheckpoint(draft, DrafterFile.load(saved))
    with_changes, without = (SimpleNamespace(kind="draft", source=fingerprint(own)) for own in (adapted, draft))
    monkeypatch.setattr(adapter, "drafter_folders", lambda: (tmp_path / "found",))
    assert draft_for_profile(with_changes, draft) is draft and draft_for_profile(without, adapted) is draft
    (tmp_path / "found").mkdir()
    file = saved.rename(tmp_path / "found" / f"{'0' * 12}-{drafter_name(draft)}")  # for this draft and another target
    found = draft_for_profile(with_changes, draft)
    assert fingerprint(found) == with_changes.source and draft_for_profile(without, draft) is draft
    file.write_bytes(file.read_bytes()[:-9])
    assert draft_for_profile(with_changes, draft) is draft


def test_a_draft_server_takes_the_drafter_of_its_model_whatever_the_target(
    pair: tuple[Path, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(adapter, "drafter_folders", lambda: (tmp_path / "found",))
    assert not hasattr(draft_for_any(pair[1]), "parallel") or draft_for_any(pair[1]).parallel is None
    assert draft_for_any(saved).parallel == ParallelDrafting(MASK, TOKENS)  # named
    (tmp_path / "found").mkdir()
    draft = open_checkpoint(pair[1])
    file = saved.rename(tmp_path / "found" / f"{'0' * 12}-{drafter_name(draft)}")
    with DraftingLLM(pair[1], dtype="float32", quiet=True, max_model_len=128, threads=1) as llm:
        assert llm.parallel == ParallelDrafting(MASK, TOKENS)
        worker = DraftWorker(llm, 1)
        assert worker.rounds.tokens == TOKENS and worker.rounds.slope >= 0.0
    file.write_bytes(file.read_bytes()[:-9])  # damaged, and never asked for
    assert draft_for_any(pair[1]).config == draft.config and "left out" in caplog.text


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_the_draft_model_holds_the_changes(pair: tuple[Path, Path], saved: Path, weights: str):
    made, ids = network(pair[1]), [5, 9, 33, MASK, MASK]
    loaded = AdaptedCheckpoint(open_checkpoint(pair[1]), DrafterFile.load(saved))
    got = engine_logits(loaded, ids, weights)[:, :512]
    merged = {
        name: value + (made.changes()[name][1] @ made.changes()[name][0] if name in made.changes() else 0.0)
        for name, value in made.weights.items()
    }
    merged["embed"] = merged["embed"].clone()
    merged["embed"][MASK] = made.mask.detach()
    dense = DenseModel(made.config, merged)
    wanted = dense.logits(dense.trace(torch.tensor([ids])).hidden[-1])[0, :, :512]
    close = 0.02 if weights == "float32" else 0.2
    assert float((got - wanted).norm() / wanted.norm()) < close


def test_what_was_made_for_other_models_is_refused(pair: tuple[Path, Path], saved: Path, tmp_path: Path):
    other = tiny.write_folder(tmp_path / "other", "qwen2", seed=5, vocab_size=520)
    with pytest.raises(BadDrafter, match="was trained for"):
        LLM(other, draft_model=saved)
    drafter, target = DrafterFile.load(saved), open_checkpoint(pair[0])
    with pytest.raises(BadDrafter, match="changes"):
        drafter.check(target, open_checkpoint(tiny.write_folder(tmp_path / "b", "qwen2", seed=6, num_hidden_layers=2)))
    small = tiny.write_folder(tmp_path / "c", "qwen2", seed=6, num_hidden_layers=2, vocab_size=512)
    with pytest.raises(BadDrafter, match="vocabulary"):
        drafter.check(target, open_checkpoint(small))


def test_a_damaged_file_is_refused(saved: Path, pair: tuple[Path, Path], tmp_path: Path):
    data = saved.read_bytes()
    cut, changed = tmp_path / "cut.safetensors", tmp_path / "changed.safetensors"
    cut.write_bytes(data[: len(data) // 2])
    changed.write_bytes(data[:-3] + bytes([data[-3] ^ 255]) + data[-2:])
    for path, why in (
        (cut, "not a whole trained drafter"),
        (changed, "checksum"),
        (tmp_path / "no.safetensors", "there is no"),
    ):
        with pytest.raises(BadDrafter, match=why):
            LLM(pair[0], draft_model=path)
    with pytest.raises(BadDrafter, match="not a trained drafter"):
        LLM(pair[0], draft_model=pair[1] / "model.safetensors")


def test_a_folder_in_pards_format_is_the_same_model(pair: tuple[Path, Path], saved: Path, tmp_path: Path):
    """As transformers reads it, and as this package does."""
    ids = [5, 9, 33, MASK, MASK]
    adapted = AdaptedCheckpoint(open_checkpoint(pair[1]), DrafterFile.load(saved))
    write_pard(adapted, adapted.parallel, tmp_path / "pard", quiet=True)
    folder = open_checkpoint(tmp_path / "pard")
    assert folder.parallel == ParallelDrafting(MASK, TOKENS)  # type: ignore[attr-defined]
    assert folder.config == replace(adapted.config, bos_id=folder.config.bos_id, eos_ids=folder.config.eos_ids)
    assert folder.tokenizer().same_tokens(adapted.tokenizer())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "pard", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(engine_logits(folder, ids), wanted, rtol=1e-3, atol=1e-3)
    close = engine_logits(adapted, ids)
    assert float((close - wanted).norm() / wanted.norm()) < 0.03  # bfloat16


# -- the whole run -----------------------------------------------------------------------------------------------------


def test_a_run_makes_a_drafter_with_figures(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text(tiny.TEXT * 8)
    monkeypatch.setattr(run, "ANSWER_TOKENS", 6)
    monkeypatch.setattr("forerun.train.answers.QUESTION_TOKENS", 6)
    monkeypatch.setattr("forerun.train.measure.KINDS", ("code",))
    monkeypatch.setattr("forerun.train.measure.PROMPTS_PER_KIND", 1)
    monkeypatch.setattr("forerun.train.measure.ANSWER_TOKENS", 4)
    monkeypatch.setattr(run, "CONTEXT_LENGTHS", (48, 128))
    out = tmp_path / "drafter.safetensors"
    job = TrainJob(str(pair[0]), str(pair[1]), out, (tmp_path / "text.txt",), answers=4)
    train_drafter(job, SETTINGS, CPU)
    made = DrafterFile.load(out)
    assert {row["way"] for row in made.facts["figures"]} == {"plain", "untrained", "parallel"}
    assert len({row["context"] for row in made.facts["figures"]}) == 2 and "worth using here" in made.facts["worth"]
    assert made.facts["steps"] > 0 and not out.with_name(out.name + ".state").exists()
    told = capsys.readouterr().err
    assert "answers: 4 of 4" in told and "training: " in told and "s left" in told


def test_answers_go_on_after_the_last_one(pair: tuple[Path, Path], tmp_path: Path):
    path, text = tmp_path / "answers.jsonl", tmp_path / "text.txt"
    text.write_text(tiny.TEXT * 8)
    with LLM(pair[0], dtype="float32", kv_cache_tokens=2048, max_model_len=512, quiet=True) as llm:
        collect_answers(llm, path, 3, [text], 4, seed=0)
        first = path.read_text()
        path.write_text(first + "[1, 2")  # an interruption
        collect_answers(llm, path, 5, [text], 4, seed=0)
    assert path.read_text().startswith(first) and len(path.read_text().splitlines()) == 5


def test_what_cannot_work_is_refused_before_anything_long_starts(
    pair: tuple[Path, Path], tiny_folder: Callable[[str], Path], tmp_path: Path
):
    out = tmp_path / "drafter.safetensors"
    with pytest.raises(BadRequest, match="nothing to train on"):
        train_drafter(TrainJob(str(pair[0]), str(pair[1]), out), SETTINGS, CPU)
    full = open_checkpoint(tiny_folder("qwen2"))  # every id is a token
    with pytest.raises(BadRequest, match="none is free"):
        choose_mask(full, full, None)
    assert choose_mask(full, full, 7) == 7
    with pytest.raises(BadRequest, match="has 512 tokens"):
        choose_mask(full, full, 512)


def test_training_goes_on_from_a_drafter_of_lower_rank(pair: tuple[Path, Path], saved: Path, tmp_path: Path):
    """The network that goes on computes what the saved drafter computes, before a step."""
    target, draft = (open_checkpoint(path) for path in pair)
    found = DrafterFile.load(saved)
    rank = len(next(iter(found.low_rank.values()))[0])
    changed = DenseModel.from_checkpoint(AdaptedCheckpoint(draft, found), CPU, torch.float32, quiet=True)
    made = DraftNetwork.open(draft, CPU, torch.float32, found.parallel.mask_token, rank + 3, seed=1)
    made.go_on_from(found.low_rank, found.mask)
    x = torch.randn(2, 5, draft.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for part in ("q", "down"):
        given = x if part == "q" else torch.randn(2, 5, draft.config.intermediate_size)
        torch.testing.assert_close(made.linear(given, 1, part), changed.linear(given, 1, part), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.mask.detach(), found.mask)
    job = TrainJob(str(pair[0]), str(pair[1]), tmp_path / "x.safetensors", answers=1, start=saved)
    with pytest.raises(BadRequest, match="cannot go on at rank"):
        ParallelRun(job, TrainSettings(rank=rank - 1))


def test_training_rounds_as_the_engine_does():
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    kind, raw = quantise(weight, CHANGED_BITS)
    torch.testing.assert_close(in_five_bits(weight), dequantise(raw, kind))
    narrow = torch.randn(4, 40)
    assert in_five_bits(narrow) is narrow
