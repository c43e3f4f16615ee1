"""Vectors of the tokens that ran: right whatever kernels ran them, and carried along by pages and accepted branches."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.core import HostBatch
from forerun.models.build import build_decoder
from forerun.models.decoder import Output, Taps
from forerun.models.execution.hidden_features import HiddenFeatures
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.prefill.calibration.dense import DenseModel

CPU = torch.device("cpu")
DEPTHS, TOKENS = (1, 3, 4), [7, 80, 3, 400, 21, 22, 9, 150, 33, 4, 5, 6, 77, 301, 12, 13, 14, 15, 16, 99]


def opened(path: Path, weights: str) -> tuple[Runner, HiddenFeatures]:
    decoder, _ = build_decoder(open_checkpoint(path), CPU, weights, 256, quiet=True)
    pool = PagePool(decoder.config, 8, 16, decoder.dtype, CPU)
    runner = Runner(decoder, pool, 256)
    width = len(DEPTHS) * decoder.config.hidden_size
    features = HiddenFeatures(DEPTHS, width, lambda hidden: torch.cat(hidden, -1), pool, decoder.dtype, CPU)
    runner.read_hidden(features)
    return runner, features


def hidden_states(path: Path) -> Tensor:
    traced = DenseModel.from_checkpoint(open_checkpoint(path), CPU, torch.float32, quiet=True).trace(
        torch.tensor([TOKENS])
    )
    return torch.cat([traced.hidden[depth][0] for depth in DEPTHS], -1)


@pytest.mark.parametrize("weights", ["float32", "int8", "file"])
def test_a_forward_leaves_the_models_hidden_states(
    tiny_folder: Callable[[str], Path], tiny_gguf: Callable[..., Path], weights: str
):
    """`file`: all layers in one call of the C kernels, cut at the depths."""
    path = tiny_gguf("llama", "Q8_0") if weights == "file" else tiny_folder("llama")
    runner, features = opened(path, weights)
    pages = array("i", runner.pool.allocate(3))
    with_features = runner.forward([Span(TOKENS[:9], 0, pages, (8,))]).logits.clone()
    runner.forward([Span(TOKENS[9:], 9, pages, (10,))])
    wanted = hidden_states(path)
    got = features.rows(pages, 0, len(TOKENS))
    assert float((got - wanted).norm() / wanted.norm()) < {"float32": 1e-4, "int8": 0.05, "file": 0.05}[weights]
    plain, _ = opened(path, weights)
    plain.features = None
    again = array("i", plain.pool.allocate(3))
    assert torch.equal(plain.forward([Span(TOKENS[:9], 0, again, (8,))]).logits, with_features)


class RecordedForwards:
    """In the place of a device's: short batches as if they were recorded, and launches that are not waited for."""

    prompts = SimpleNamespace(min_rows=1)
    batch_invariant = True

    def __init__(self, runner: Runner) -> None:
        self._runner, self.taps, self.states = runner, None, dict[int, Tensor]()

    def leave_states(self, taps: Taps) -> None:
        self.taps = taps

    def run(self, batch: HostBatch, wait: bool = True) -> Output | None:
        if batch.prompt:
            return None
        return self._runner.decoder.forward(batch.to(CPU), self._runner.kv, self.taps)

    def launch(self, batch: HostBatch, choose: object) -> object:
        self.states = self.run(batch).hidden  # type: ignore[union-attr]
        return object()


def test_forwards_of_a_device_leave_the_same_vectors(tiny_folder: Callable[[str], Path]):
    """A prompt that no recording fits, a recorded forward, a launch ahead: the depths hold the last layer's output."""
    path = tiny_folder("llama")
    runner, features = opened(path, "float32")
    fake = RecordedForwards(runner)
    runner.graphs, runner.prompts_apart, runner.features = fake, True, None  # type: ignore[assignment]
    runner.read_hidden(features)
    assert fake.taps == features.taps and runner.can_launch
    pages = array("i", runner.pool.allocate(3))
    runner.forward([Span(TOKENS[:9], 0, pages, (), prompt=True)])
    runner.forward([Span(TOKENS[9:18], 9, pages, (8,), prompt=True)])
    runner.forward([Span(TOKENS[18:19], 18, pages, (0,))])
    own = np.array(pages[:2], dtype=np.int32)  # up to the entry's own page
    assert runner.launch(np.array(TOKENS[19:]), np.array([19]), [own]) is not None
    assert features.known_from(pages, 0, len(TOKENS)) == 0
    torch.testing.assert_close(features.rows(pages, 0, len(TOKENS)), hidden_states(path), rtol=1e-3, atol=1e-4)


def test_vectors_go_where_k_and_v_go(tiny_folder: Callable[[str], Path]):
    runner, features = opened(tiny_folder("llama"), "float32")
    pool, wanted = runner.pool, hidden_states(tiny_folder("llama"))
    pages = array("i", pool.allocate(2))
    assert features.known_from(pages, 0, 4) == 4  # nothing has run
    parents = [-1, 0, -1, 2]  # a branch that goes on, and one that is the text
    ids = [*TOKENS[:5], 500, 501, *TOKENS[5:7]]
    runner.forward([Span(ids, 0, pages, (4,), 5, parents)])
    assert features.known_from(pages, 0, 5) == 0
    runner.move(pages, [7, 8], [5, 6])  # the second branch was accepted
    runner.forward([Span(TOKENS[7:], 7, pages, ())])
    torch.testing.assert_close(features.rows(pages, 0, len(TOKENS)), wanted, rtol=1e-4, atol=1e-4)
    copy = pool.allocate(1)
    pool.copy([pages[0]], copy)
    torch.testing.assert_close(features.rows(array("i", copy), 0, 16), wanted[:16], rtol=1e-4, atol=1e-4)
    assert features.known_from(array("i", [*copy, pages[1]]), 2, 20) == 2
    pool.release(copy)
    fresh = array("i", [*pool.allocate(1, after=copy[0] - 1), pages[1]])
    assert features.known_from(fresh, 0, 20) == 16  # its first page was given to other tokens


def test_vectors_of_single_steps_are_made_together(tiny_folder: Callable[[str], Path]):
    """Of a slot that was run twice, as after a rejected draft, the last token's vector stays."""
    runner, features = opened(tiny_folder("llama"), "float32")
    made, project = [], features._project
    features._project = lambda hidden: made.append(len(hidden[0])) or project(hidden)  # type: ignore[func-returns-value]
    pages = array("i", runner.pool.allocate(4))
    runner.forward([Span(TOKENS[:9], 0, pages, (8,))])  # a prompt: at once
    runner.forward([Span([TOKENS[9], 77, 78], 9, pages, (0,))])  # two drafted tokens that are rejected
    for at in range(10, len(TOKENS)):
        runner.forward([Span(TOKENS[at : at + 1], at, pages, (0,))])
    assert made == [9]
    got = features.rows(pages, 0, len(TOKENS))
    assert made == [9, 11] and features.known_from(pages, 0, len(TOKENS)) == 0
    torch.testing.assert_close(got, hidden_states(tiny_folder("llama")), rtol=1e-3, atol=1e-4)
    for at in range(len(TOKENS), len(TOKENS) + 40):  # not for ever
        runner.forward([Span([5], at, pages, (0,))])
    assert made == [9, 11, 32]


def test_vectors_of_the_last_step_are_those_on_the_pages(tiny_folder: Callable[[str], Path]):
    runner, features = opened(tiny_folder("llama"), "float32")
    pages = array("i", runner.pool.allocate(3))
    runner.forward([Span(TOKENS[:14], 0, pages, (13,))])
    runner.forward([Span(TOKENS[14:18], 14, pages, (3,))])  # over the end of a page
    latest, again = features.rows(pages, 15, 18).clone(), features.rows(pages, 13, 18)
    features._latest = None
    assert torch.equal(features.rows(pages, 15, 18), latest) and torch.equal(features.rows(pages, 13, 18), again)
    assert torch.equal(again[2:], latest)
