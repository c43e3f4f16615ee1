"""The most probable tokens of rows of logits, with their probabilities: two small kernels in place of a softmax over
the vocabulary and a sort.

The first cuts each row into blocks, and leaves the best few of a block and the sum of its exponentials; the second
joins the blocks of a row. Ties go to the smaller token. Knows no model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.models.cuda.launch import cdiv, launch, next_power_of_2, options, wait_for_previous

BLOCK = 4096  # logits of a program: 38 programs for each row of 151,936


@triton.jit
def _best_of_blocks(
    logits, values, tokens, sums, stride, vocab, blocks,
    COUNT: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    cell = row * blocks + block
    tl.store(sums + cell, tl.sum(tl.where(x > float("-inf"), tl.exp(x - best), 0.0), axis=0))
    for i in tl.static_range(COUNT):
        best = tl.max(x, axis=0)
        token = tl.min(tl.where(x == best, column, vocab), axis=0)
        tl.store(values + cell * COUNT + i, best)
        tl.store(tokens + cell * COUNT + i, token)
        x = tl.where(column == token, float("-inf"), x)


@triton.jit
def _best_of_rows(
    values, tokens, sums, found, vocab, blocks,
    COUNT: tl.constexpr, CELLS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    cell, block = tl.arange(0, CELLS), tl.arange(0, BLOCKS)
    there = cell < blocks * COUNT
    x = tl.load(values + row * blocks * COUNT + cell, mask=there, other=float("-inf"))
    token = tl.load(tokens + row * blocks * COUNT + cell, mask=there, other=vocab)
    highest = tl.max(x, axis=0)
    firsts = tl.load(values + (row * blocks + block) * COUNT, mask=block < blocks, other=float("-inf"))
    part = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    total = tl.sum(tl.where(firsts > float("-inf"), part * tl.exp(firsts - highest), 0.0), axis=0)
    for i in tl.static_range(COUNT):
        best = tl.max(x, axis=0)
        chosen = tl.min(tl.where(x == best, token, vocab), axis=0)
        prob = tl.where(best > float("-inf"), tl.exp(best - highest) / total, 0.0)
        tl.store(found + row * 2 * COUNT + i, chosen.to(tl.float64))
        tl.store(found + row * 2 * COUNT + COUNT + i, prob.to(tl.float64))
        x = tl.where(token == chosen, float("-inf"), x)


def most_probable(logits: Tensor, count: int) -> Tensor:  # [N, V] -> [N, 2 * count] float64
    """Of each row the most probable tokens, then their probabilities, the most probable first."""
    rows, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    values = torch.empty(rows, blocks, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, blocks, count, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, 2 * count, dtype=torch.float64, device=logits.device)
    launch(
        _best_of_blocks, (rows, blocks),
        logits, values, tokens, sums, logits.stride(0), vocab, blocks, COUNT=count, SIZE=BLOCK, **options(8),
    )  # fmt: skip
    launch(
        _best_of_rows, (rows,),
        values, tokens, sums, found, vocab, blocks, COUNT=count, CELLS=next_power_of_2(blocks * count),
        BLOCKS=next_power_of_2(blocks), **options(1),
    )  # fmt: skip
    return found
