"""A pair: rows over K/V that comes from elsewhere, and the tail's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.prefill.calibration.dense import LayerActivations
from forerun.prefill.calibration.model_pair import (
    FIRST_TOKENS,
    TAIL_TOKENS,
    DenseTailAttention,
    ModelPair,
    choose,
    repeated,
    tail_attention_over,
    with_ends,
)
from forerun.prefill.calibration.quality import evaluate
from forerun.prefill.choosers import copy_scores
from forerun.prefill.maps import Maps, unit

TOKENS = torch.randint(3, 512, (2, 200), generator=torch.Generator().manual_seed(0))
END = 100


def true_kv(pair: ModelPair, exact: LayerActivations) -> Tensor:
    return torch.cat([part for kv in exact.kv[pair.base :] for part in kv], -1)


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


@pytest.mark.parametrize("which", ["pair", "alone"])
def test_over_true_kv_rows_are_exact(which: str, request: pytest.FixtureRequest) -> None:
    pair: ModelPair = request.getfixturevalue(which)
    exact = pair.target.trace(TOKENS)
    rows = with_ends(torch.tensor([[50, 33], [20, 90]]), END, 200)
    x = pair.recompute(exact, true_kv(pair, exact), rows)
    torch.testing.assert_close(x, at_rows(exact.hidden[-1], rows), atol=1e-4, rtol=1e-4)


def test_with_every_row_the_drafts_do_not_count(pair: ModelPair) -> None:
    exact = pair.target.trace(TOKENS)
    everything = torch.arange(200).expand(2, -1)
    x = pair.recompute(exact, torch.randn(2, 200, pair.width), everything)
    torch.testing.assert_close(x, exact.hidden[-1], atol=1e-4, rtol=1e-4)


def test_a_row_sees_drafts_of_those_before_it_only(pair: ModelPair) -> None:
    exact = pair.target.trace(TOKENS)
    drafted = true_kv(pair, exact)
    rows = torch.tensor([[10, 60, 150], [10, 60, 150]])
    before = pair.recompute(exact, drafted, rows)
    drafted[:, 61:] += 1.0
    after = pair.recompute(exact, drafted, rows)
    torch.testing.assert_close(after[:, :2], before[:, :2])
    assert (after[:, 2] - before[:, 2]).abs().max() > 1e-3


def test_drafts_get_gradients(pair: ModelPair) -> None:
    exact = pair.target.trace(TOKENS)
    drafted = true_kv(pair, exact).requires_grad_()
    rows = with_ends(torch.tensor([[50], [20]]), END, 200)
    pair.recompute(exact, drafted, rows)[:, -1].square().sum().backward()
    assert drafted.grad is not None
    used = drafted.grad.abs().sum(-1) > 0
    assert used[:, 70].all() and not used[0, 50] and not used[:, :FIRST_TOKENS].any() and not used[:, END:].any()


def test_features_are_hidden_states_at_the_taps(pair: ModelPair, alone: ModelPair) -> None:
    exact = pair.target.trace(TOKENS)
    features = pair.features(TOKENS, exact)
    hidden = pair.source.trace(TOKENS).hidden
    wanted = [*(unit(hidden[i]) for i in (0, 1, 2)), unit(pair.target.embed_tokens(TOKENS))]
    torch.testing.assert_close(features, torch.cat(wanted, -1))
    assert pair.target_embedding and pair.inputs == 3 * 32 + 64 == features.shape[-1]
    features = alone.features(TOKENS, exact)
    torch.testing.assert_close(features[..., 128:], unit(exact.hidden[2]))
    assert not alone.target_embedding and alone.inputs == 3 * 64 == features.shape[-1]


def test_tail_attention_is_attention(pair: ModelPair) -> None:
    model = pair.source
    tail_attention = DenseTailAttention(slice(90, 95), model.config.scale)
    model.trace(TOKENS, layers=1, hook=tail_attention)
    q, k, _ = model.project(model.embed_tokens(TOKENS), 0)
    positions = torch.arange(200)
    q, k = model.rotate(q, positions, 0), model.rotate(k, positions, 0)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * model.config.scale
    scores = scores.masked_fill(torch.ones(200, 200, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(tail_attention.mean(), scores.softmax(-1).mean(1)[:, 90:95], atol=1e-5, rtol=1e-4)


def test_the_tails_attention_over_true_kv_is_the_exact_one(pair: ModelPair) -> None:
    exact = pair.target.trace(TOKENS)
    wanted = DenseTailAttention(slice(END, END + TAIL_TOKENS), pair.target.config.scale)

    def mapped_layers(layer: int, q: Tensor, k: Tensor, positions: Tensor) -> None:
        if layer >= pair.base:
            wanted(layer, q, k, positions)

    pair.target.trace(TOKENS, hook=mapped_layers)
    given = tail_attention_over(pair, exact, true_kv(pair, exact), END)
    torch.testing.assert_close(given, wanted.mean(), atol=1e-5, rtol=1e-3)


def test_choosing() -> None:
    tail_attention = torch.zeros(2, 3, 150)
    # the first tokens and the tail are run anyway
    tail_attention[0, 1, [3, 40, 60, 120]] = torch.tensor([9.0, 2.0, 1.0, 9.0])
    tail_attention[1, :, [70, 71]] = 1.0
    marks = torch.zeros(2, 100)
    chosen = choose(tail_attention, marks, 0.02)
    assert [sorted(row) for row in chosen.tolist()] == [[40, 60], [70, 71]]
    rows = with_ends(chosen, 100, 104)
    assert rows[0].tolist() == [*range(FIRST_TOKENS), 40, 60, 100, 101, 102, 103]
    assert choose(tail_attention, marks, 0.0).shape == (2, 0)
    marks[0, 50] = 5.0  # what the tail repeats comes before what it attends to
    assert sorted(choose(tail_attention, marks, 0.02)[0].tolist()) == [40, 50]


def test_what_the_tail_repeats_is_chosen_as_for_any_request() -> None:
    tokens = TOKENS.clone()
    tokens[0, 150:170] = tokens[0, 40:60]  # the prompt's last 20 tokens come again from an earlier place
    marks = repeated(tokens[:, :170], END)
    assert marks.shape == (2, END)
    for row, own in zip(marks, tokens[:, :170], strict=True):
        assert torch.equal(row, torch.from_numpy(copy_scores(own.numpy(), END)[:END]).float())
    assert marks[0, 60:70].min() > 0 == marks[1].max()  # what comes after it may be what is copied next


def test_scores_of_perfect_and_of_useless_maps(alone: ModelPair) -> None:
    """K and V of layer `base` are a linear function of its input: maps can be perfect for that layer alone."""
    exact = alone.target.trace(TOKENS)
    useless = Maps(
        (2,),
        2,
        down=torch.zeros(4, 64),
        down_bias=torch.zeros(4),
        mix_in=torch.zeros(4, 4),
        mix_out=torch.zeros(4, 4),
        up=torch.zeros(alone.width, 4),
        up_bias=torch.zeros(alone.width),
    )
    reader = ModelPair(alone.target, alone.target, (2,), 2)
    blind = evaluate(reader, useless, TOKENS, 20, 0.0)
    assert blind.kl.shape == (2, 20) and blind.divergence > 0 and not blind.same.all()
    half, most = (evaluate(reader, useless, TOKENS, 20, share).divergence for share in (0.5, 0.8))
    assert most < half < blind.divergence
    best = alone.target.logits(exact.hidden[-1])[:, -21:-1].argmax(-1)
    assert torch.equal(blind.exact_right, best == TOKENS[:, -20:])
    single = evaluate(reader, useless, TOKENS[1:], 20, 0.0, batch=1)
    torch.testing.assert_close(single.kl[0], blind.kl[1], atol=1e-4, rtol=1e-3)
