"""Drafts in one forward, corrected by the token before: by the two heads' product, on likeliest tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun import LLM, BadRequest, Speculation
from forerun.checks.lossless.forced_drafting import all_drafts_verified
from forerun.decode.drafters.best_first import likeliest
from forerun.decode.drafters.markov import MarkovHead, MarkovMarginals
from forerun.models.formats.adapter import AdaptedCheckpoint, DrafterFile
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.dense import DenseModel
from forerun.train.run import ParallelRun, TrainJob
from forerun.train.trainer import TrainSettings
from tests import tiny
from tests.train.test_training import drafter_file, network

VOCAB, RANK, DEPTH, KEPT = 40, 3, 4, 6
CPU = torch.device("cpu")


def test_candidates_have_the_probabilities_of_both_together():
    draw = torch.Generator().manual_seed(0)
    logits, *heads = (torch.randn(n, k, generator=draw) for n, k in ((DEPTH, VOCAB), (30, RANK), (30, RANK)))
    found = likeliest(logits, KEPT).numpy()
    tokens, probs = found[:, :KEPT].astype(np.int64), found[:, KEPT:]
    marginals = MarkovMarginals(logits, tokens, probs, MarkovHead(heads[0], heads[1]))
    assert [token for token, _ in marginals.top(0, 7)] == tokens[0, :4].tolist()
    padded = [torch.cat((head, torch.zeros(VOCAB - 30, RANK))) for head in heads]  # later ids have no vectors
    for depth in range(1, DEPTH):
        for before in tokens[depth - 1].tolist():
            bias = padded[1] @ padded[0][before]
            changed = torch.where(torch.isin(torch.arange(VOCAB), torch.from_numpy(tokens[depth])), bias, 0.0)
            wanted = (logits[depth] + changed).softmax(-1)
            for token, prob in marginals.top(depth, before):
                assert prob == pytest.approx(float(wanted[token]), rel=1e-4)
            best = max(tokens[depth].tolist(), key=lambda token: float(wanted[token]))
            assert marginals.top(depth, before)[0][0] == best
    assert torch.equal(marginals.row(2, 5), logits[2])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("markov")
    return (
        tiny.write_folder(folder / "target", "qwen2", seed=0, vocab_size=520),
        tiny.write_folder(folder / "draft", "qwen2", seed=1, vocab_size=520, num_hidden_layers=2),
    )


def test_a_file_carries_the_head_and_answers_stay_plain(pair: tuple[Path, Path], tmp_path: Path):
    made = drafter_file(pair, network(pair[1]))
    draw = torch.Generator().manual_seed(2)
    made.markov = torch.randn(520, RANK, generator=draw), torch.randn(520, RANK, generator=draw)
    path = tmp_path / "drafter.safetensors"
    made.save(path)
    found = DrafterFile.load(path).markov
    assert found is not None
    for part, was in zip(found, made.markov, strict=True):
        torch.testing.assert_close(part, was, rtol=0.02, atol=0.03)
    with LLM(pair[0], draft_model=path, dtype="float32", kv_cache_tokens=2048, max_model_len=256, quiet=True) as llm:
        prompts = [[5, 6, 7, 8] * 4, list(range(20, 60))]
        plain = [llm.generate([ids], max_tokens=12, ignore_eos=True, speculation="off")[0] for ids in prompts]
        with all_drafts_verified(llm.engine):
            rule = Speculation("parallel", nodes=8)
            alone = [llm.generate([ids], max_tokens=12, ignore_eos=True, speculation=rule)[0] for ids in prompts]
            together = llm.generate(prompts, max_tokens=12, ignore_eos=True, speculation=rule)
        wanted = [answer.token_ids for answer in plain]
        assert [a.token_ids for a in alone] == wanted == [a.token_ids for a in together]
        assert sum(answer.usage.drafters["parallel"].drafted for answer in alone) > 20
    job = TrainJob(str(pair[0]), str(pair[1]), tmp_path / "more.safetensors", answers=1, start=path)
    with pytest.raises(BadRequest, match="Markov head of rank 3"):
        ParallelRun(job, TrainSettings(rank=64))
    made.markov = None
    made.save(path)
    run = ParallelRun(job, TrainSettings(rank=6, markov=2, markov_only=True))
    learnt = run.network(DenseModel.from_checkpoint(run.target, CPU, torch.float32, quiet=True), np.zeros(0))
    assert learnt.learned is not None and len(learnt.parameters()) == 2
    learnt.learned.data.normal_()
    with_head, before = run.made(learnt, {}), DrafterFile.load(path)
    assert isinstance(with_head, DrafterFile) and with_head.markov is not None
    with_head.save(path)
    draft = open_checkpoint(pair[1])
    prints = {AdaptedCheckpoint(draft, each).hash_parts() for each in (before, with_head, DrafterFile.load(path))}
    assert len(prints) == 1  # profiles that were made with the draft as it was are still found
    with pytest.raises(BadRequest, match="goes on from a trained drafter"):
        ParallelRun(replace(job, start=None), TrainSettings(rank=6, markov=2, markov_only=True))
    with pytest.raises(BadRequest, match="trains nothing"):
        TrainSettings(markov_only=True)
    with pytest.raises(BadRequest, match="markov is for changes"):
        TrainSettings(markov=4, full=True)


def test_training_learns_it_for_masks_alone(pair: tuple[Path, Path]):
    made = network(pair[1])
    made.add_markov(RANK, seed=0)
    assert made.learned is not None and made.previous is not None and len(made.quick()) == 2
    made.learned.data.normal_(generator=torch.Generator().manual_seed(1))
    layout = made.layout(24, 4, torch.Generator().manual_seed(3))
    tokens = torch.arange(24)[None] + 30
    rows = made.rows(tokens, None, layout)  # type: ignore[arg-type]
    assert rows.shape[-1] == made.config.hidden_size + RANK
    assert not rows[:, :24, -RANK:].any()
    masks = rows[0, 24:, -RANK:]
    torch.testing.assert_close(masks, made.previous[tokens[0, layout.positions[24:]]])
    made.freeze()
    again = made.rows(tokens, None, layout)  # type: ignore[arg-type]
    torch.testing.assert_close(again, rows)
    again.sum().backward()
    assert made.parameters() == made.quick() and made.previous.grad is not None and made.mask.grad is None
    assert all(a.grad is None and b.grad is None for a, b in made.low_rank.values())
    saved = made.markov()
    assert saved is not None and saved[0].shape == saved[1].shape == (520, RANK)
