import pytest
import torch

from forerun.models.cuda.most_probable import BLOCK, most_probable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab", [7, 1000, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("count", [1, 4])
def test_as_softmax_and_topk(vocab, count):
    logits = 4.0 * torch.randn(5, vocab + 3, device=DEVICE)[:, :vocab]  # rows apart
    found = most_probable(logits, count)
    top = logits.double().softmax(-1).topk(count, -1)
    assert found[:, :count].tolist() == top.indices.tolist()
    assert torch.allclose(found[:, count:], top.values, rtol=1e-5)


def test_ties_go_to_the_smaller_token():
    logits = torch.zeros(2, BLOCK + 9, device=DEVICE)
    logits[1, [5, BLOCK + 2]] = 1.0
    found = most_probable(logits, 3)
    assert found[:, :3].tolist() == [[0, 1, 2], [5, BLOCK + 2, 0]]


def test_tokens_that_cannot_come_have_no_probability():
    logits = torch.full((1, 50), float("-inf"), device=DEVICE)
    logits[0, 7] = 3.0
    found = most_probable(logits, 3)
    assert found[0, 0] == 7 and found[0, 3:].tolist() == [1.0, 0.0, 0.0]
