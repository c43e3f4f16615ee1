"""Steps of equal size in all directions: the change is orthogonal and of Adam's size, and states are saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import BadRequest
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.train.block import BlockNetwork
from forerun.train.loss import teach
from forerun.train.muon import ADAM_SIZE, Muon, orthogonal
from forerun.train.run import HiddenRun, TrainJob
from forerun.train.trainer import Trainer, TrainSettings, make_optimizers
from tests.train.kinds import SETTINGS, SMALL, network, teacher, trained


def test_singular_values_become_about_one():
    draw = torch.Generator().manual_seed(0)
    made = orthogonal(torch.randn(3, 24, 40, generator=draw) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None])
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_step_goes_against_the_gradient_and_is_as_large_as_adams(shape: tuple[int, int]):
    matrix = torch.zeros(shape, requires_grad=True)
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    Muon([matrix], lr=0.1).step()
    assert float((matrix.detach() * matrix.grad).sum()) < 0.0
    assert float(matrix.detach().pow(2).mean().sqrt()) == pytest.approx(0.1 * ADAM_SIZE, rel=0.3)


def test_matrices_of_layers_are_muons_and_a_block_learns(target: Path):
    dense = teacher(target)
    made = network("state-input", dense)
    assert isinstance(made, BlockNetwork)
    settings = TrainSettings(
        kind="block", optimizer="muon", state_input=True, layers=2, rate=2e-3, attention_window=16, **SMALL
    )
    adam, muon = make_optimizers(made, settings)
    counts = [sum(len(group["params"]) for group in each.param_groups) for each in (adam, muon)]
    assert sum(counts) == len(made.parameters()) and counts[1] == 2 * 7 + 2  # of two layers, fc and state_in
    stream = torch.arange(4000).remainder(97).numpy().astype("int32")
    trainer = Trainer(made, dense, stream, settings)
    losses = [trainer.step(0.1) for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.3, losses
    other = Trainer(network("state-input", dense), dense, stream, settings)
    other.load(trainer.state())
    assert other.step(0.2) == pytest.approx(trainer.step(0.2), rel=1e-4)


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(BadRequest, match="optimizer is 'lion'"):
        TrainSettings(optimizer="lion")


def test_training_of_a_block_goes_on_where_it_ended(target: Path, tmp_path: Path):
    """The network that goes on computes what the saved one computes; other sizes, kinds and targets are refused."""
    path, dense = tmp_path / "block.safetensors", teacher(target)
    trained(target, "state-input").save(path)
    job = TrainJob(str(target), None, tmp_path / "more.safetensors", answers=1, start=path)
    run = HiddenRun(job, SETTINGS["state-input"])
    stream = torch.arange(4000).remainder(97).numpy().astype("int32")
    made, saved = run.network(dense, stream), HiddenDrafterWeights.load(path)
    assert torch.equal(made.ids, saved.draft_ids)
    for name, value in made.saved()[1].items():
        torch.testing.assert_close(value, saved.tensors[name].float())
    wider = HiddenRun(job, replace(SETTINGS["state-input"], layers=3)).network(dense, stream)
    tokens = torch.arange(40)[None] + 9
    layout = made.layout(32, 4, torch.Generator().manual_seed(0))
    seen = teach(dense, tokens[:, :32], tokens[:, 1:33], made.ids, 0, made.depths, ())
    torch.testing.assert_close(wider.rows(tokens[:, :32], seen, layout), made.rows(tokens[:, :32], seen, layout))
    with pytest.raises(BadRequest, match="state_input is False"):
        HiddenRun(job, SETTINGS["block"])
    with pytest.raises(BadRequest, match="this is heads"):
        HiddenRun(job, SETTINGS["heads"])
