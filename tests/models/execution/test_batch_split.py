"""Batches that run in parts: which spans stay together, and that nothing of what they give is lost or mixed up."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.cache.pool import PagePool
from forerun.core import ROOT
from forerun.models.build import build_decoder
from forerun.models.decoder import Output
from forerun.models.execution.batch_split import (
    MAX_DECODE_TOKENS,
    MAX_LAUNCH_ROWS,
    MIN_LONE_PROMPT_TOKENS,
    InvariantSplit,
    clone_output,
    join_outputs,
    split_spans,
)
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import open_checkpoint

CPU, SIZE = torch.device("cpu"), 8


def span(tokens: int, first: int = 0, isolated: bool = False, want: int = 1) -> Span:
    return Span([1] * tokens, first, array("i"), range(tokens - want, tokens), isolated=isolated)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([span(1, 9), span(1, 5)], [[0, 1]]),
        ([span(1, 9), span(MIN_LONE_PROMPT_TOKENS), span(3, 5)], [[1], [0, 2]]),
        ([span(MIN_LONE_PROMPT_TOKENS), span(MIN_LONE_PROMPT_TOKENS)], [[0], [1]]),
        (
            [span(1, 9), span(MAX_DECODE_TOKENS + 1), span(MIN_LONE_PROMPT_TOKENS - 1)],
            [[1, 2], [0]],
        ),  # short prompts stay together
        ([span(1, 9), span(MAX_DECODE_TOKENS + 1)], [[1], [0]]),
        ([span(1, 9), span(MAX_DECODE_TOKENS - 1)], [[0, 1]]),
        (
            [span(1, 9), span(MIN_LONE_PROMPT_TOKENS, 64), span(MAX_DECODE_TOKENS + 1)],
            [[1, 2], [0]],
        ),  # not from the first token on
        ([span(1, 9), span(20, 64, isolated=True), span(MIN_LONE_PROMPT_TOKENS)], [[1], [2], [0]]),
        ([span(1, 9), span(1, 64, isolated=True)], [[1], [0]]),
        (
            [*[span(1, 9)] * MAX_LAUNCH_ROWS, span(MAX_DECODE_TOKENS + 1)],
            [[MAX_LAUNCH_ROWS], list(range(MAX_LAUNCH_ROWS))],
        ),
        (
            [*[span(1, 9)] * (MAX_LAUNCH_ROWS + 1), span(MAX_DECODE_TOKENS + 1)],
            [list(range(MAX_LAUNCH_ROWS + 2))],
        ),  # no single launch either way
        (
            [*[span(1, 9)] * (MAX_LAUNCH_ROWS + 1), span(MIN_LONE_PROMPT_TOKENS)],
            [[MAX_LAUNCH_ROWS + 1], list(range(MAX_LAUNCH_ROWS + 1))],
        ),
    ],
)
def test_who_runs_together(spans: list[Span], expected: list[list[int]]):
    assert split_spans(spans) == expected


def prompt(tokens: int, first: int = 0) -> Span:
    return Span([1] * tokens, first, array("i"), range(tokens - 1, tokens), prompt=True)


@pytest.mark.parametrize("always", [False, True])
def test_equal_bits_prompts_run_together_and_answers_in_launches_of_whole_spans(always: bool):
    split = InvariantSplit(8, always)
    assert split([span(1, 9), prompt(700), prompt(3, 64), span(5, 9)]) == [[1, 2], [0, 3]]
    assert split([span(5, 9), span(4, 9), span(1, 9)]) == [[0], [1, 2]]
    assert split([span(9, 9), span(1, 9)]) == [[0], [1]]
    known = replace(span(1, 9), known=torch.zeros(1, 4))
    assert split([known, span(1, 9), prompt(9)]) == [[0], [2], [1]]


def test_equal_bits_in_large_batches_have_to_be_asked_for():
    many = [span(1, 9)] * 20
    assert InvariantSplit(8, always=False)(many) == [list(range(20))]
    assert InvariantSplit(8, always=True)(many) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


def test_every_span_runs_once_and_parts_are_not_parted_again():
    spans = [
        span(n, first, isolated)
        for n in (1, MAX_DECODE_TOKENS, MAX_DECODE_TOKENS + 1, MIN_LONE_PROMPT_TOKENS)
        for first in (0, 7)
        for isolated in (False, True)
    ]
    parts = split_spans(spans)
    assert sorted(number for part in parts for number in part) == list(range(len(spans)))
    for part in parts:
        assert len(split_spans([spans[number] for number in part])) == 1


def test_rows_come_back_in_the_order_of_the_spans():
    spans = [span(1, 9), span(MIN_LONE_PROMPT_TOKENS, want=2), span(3, 5, want=3), span(MIN_LONE_PROMPT_TOKENS, want=0)]
    parts = split_spans(spans)
    assert parts == [[1], [3], [0, 2]]
    rows = torch.eye(6)
    outputs = [Output(rows[[1, 2]]), Output(rows[:0]), Output(rows[[0, 3, 4, 5]], torch.tensor([0, 3, 4, 5]))]
    joined = join_outputs(spans, parts, outputs)
    assert torch.equal(joined.logits, rows) and joined.greedy is not None and joined.greedy.tolist() == list(range(6))
    plain = join_outputs(spans, parts, [Output(output.logits) for output in outputs])
    assert torch.equal(plain.logits, rows) and plain.greedy is None


def test_what_is_kept_does_not_change_with_the_memory_it_came_from():
    logits, greedy = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    kept = clone_output(Output(logits, greedy))
    logits += 1
    greedy += 1
    assert kept.greedy is not None and not kept.logits.any() and not kept.greedy.any()
    assert clone_output(Output(logits)).greedy is None


class Shared(Runner):
    """Returns all logits in the same memory, as captured graphs do."""

    memory: torch.Tensor | None = None
    ran: list[int] = []

    def forward(self, spans: list[Span], *others: object) -> Output:  # type: ignore[override]
        output = super().forward(spans)
        if len(split_spans(spans)) > 1:
            return output
        self.ran.append(len(spans))
        if self.memory is None:
            self.memory = torch.zeros(MAX_LAUNCH_ROWS, output.logits.shape[1])
        self.memory[: len(output.logits)] = output.logits
        return Output(self.memory[: len(output.logits)])


def test_parts_give_what_one_forward_gives(tiny_folder: Callable[[str], Path]):
    decoder, _ = build_decoder(open_checkpoint(tiny_folder("qwen2")), CPU, "float32", 1024, quiet=True)
    found, caches = [], []
    for apart in (False, True):
        pool = PagePool(decoder.config, 400, SIZE, decoder.dtype, CPU)
        runner = Shared(decoder, pool, 1024)
        assert runner.splits_batches is False and runner.decoding_rows is None  # a CPU
        runner.splits_batches, runner.ran = apart, []
        pages = [array("i", pool.allocate(80)) for _ in range(5)]
        ids = torch.Generator().manual_seed(1)
        spans, shapes = (
            [],
            ((1, 0, 1), (MIN_LONE_PROMPT_TOKENS, 0, 1), (4, 20, 4), (100, 0, 1), (MIN_LONE_PROMPT_TOKENS, 0, 0)),
        )
        for number, (tokens, first, want) in enumerate(shapes):
            text = torch.randint(3, 400, (first + tokens,), generator=ids).tolist()
            if first:
                Runner.forward(runner, [Span(text[:first], 0, pages[number], ())])
            tree = (first + 1, [ROOT, ROOT, 0]) if want == 4 else (0, [])
            spans.append(Span(text[first:], first, pages[number], range(tokens - want, tokens), *tree))
        found.append(runner.forward(spans).logits.clone())
        caches.append(pool.kv)
        assert runner.ran == ([1, 1, 1, 2] if apart else [])
    assert found[0].shape[0] == 7
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    for one, other in zip(*caches, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_is_known_runs_nowhere():
    spans = [
        Span([1] * 70, 0, array("i", range(9)), (69,)),
        Span([5], 8, array("i", [3, 4]), (0,), known=torch.ones(1, 7)),
    ]
    assert split_spans(spans) == [[1], [0]]


def test_long_batches_are_laid_out_as_short_ones_are(tiny_folder: Callable[[str], Path], monkeypatch):
    decoder, _ = build_decoder(open_checkpoint(tiny_folder("qwen2")), CPU, "float32", 1024, quiet=True)
    runner = Runner(decoder, PagePool(decoder.config, 400, SIZE, decoder.dtype, CPU), 1024)
    pages = [array("i", list(range(i * 90 + 89, i * 90 - 1, -1))) for i in range(3)]
    spans = [
        Span(list(range(5, 605)), 3, pages[0], [599]),
        Span([7], 40, pages[1], [0]),
        Span([1, 2, 3, 4], 9, pages[2], range(4), 10, [ROOT, ROOT, 0]),
    ]
    long = runner.batch(spans)
    monkeypatch.setattr("forerun.models.execution.runner.MAX_LISTED_TOKENS", 10_000)
    short = runner.batch(spans)
    for name in ("tokens", "positions", "slot_mapping", "kv_lens"):
        one, other = getattr(long, name), getattr(short, name)
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert long.bits == short.bits and long.cu_seqlens == short.cu_seqlens


def test_wanted_rows_and_padding_of_a_batch(tiny_folder: Callable[[str], Path]):
    """In the last layer of a prompt only rows whose logits are wanted run; rows beyond see and write nothing."""
    decoder, _ = build_decoder(open_checkpoint(tiny_folder("qwen2")), CPU, "float32", 1024, quiet=True)
    runner = Runner(decoder, PagePool(decoder.config, 400, SIZE, decoder.dtype, CPU), 1024)
    pages = [array("i", range(i * 20, i * 20 + 20)) for i in range(3)]
    spans = [Span([1, 2, 3], 0, pages[0], [2]), Span([4, 5], 8, pages[1], ()), Span([6] * 4, 2, pages[2], [1, 3])]
    few = runner.batch(spans).only_wanted()
    assert (
        few.tokens.tolist() == [3, 6, 6] and few.positions.tolist() == [2, 3, 5] and few.kv_lens.tolist() == [3, 4, 6]
    )
    assert few.cu_seqlens == [0, 1, 3] and [p[0] for p in few.pages] == [0, 40] and few.logits_indices == [0, 1, 2]
    padded = few.padded(8)
    assert padded.cu_seqlens == [0, 1, 3, 8] and padded.slot_mapping[3:].tolist() == [-1] * 5
    assert padded.kv_lens[3:].tolist() == [0] * 5 and few.padded(2) is few
    single = runner.batch([Span([i], 3 + i, pages[i], [0]) for i in range(3)]).singles(1, 3)
    assert single.tokens.tolist() == [1, 2] and single.cu_seqlens == [0, 1, 2] and single.seq_lens == [5, 6]
