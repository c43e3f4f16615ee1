"""Splits a batch on devices where a token's bits and time depend on what else is in it.

A long prompt runs by itself, through the same kernels as if it were the only one, and so do the few rows of sequences
that decode: one launch for all of them. The weights are read once for each part, so short prompts stay together.
Knows spans and logits; neither models nor devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forerun.models.decoder import Output

if TYPE_CHECKING:
    from forerun.models.execution.runner import Span

# What kernels that decode are made for, on every device that has them.
MAX_DECODE_TOKENS = 64  # new tokens of a sequence up to which it counts as decoding
MAX_LAUNCH_ROWS = 64  # tokens of all sequences that run in one launch
MIN_LONE_PROMPT_TOKENS = 512  # keep a device busy: reading the weights again for others costs little beside it


def joins_decoding(tokens: int) -> bool:
    """Whether a span of so many tokens runs in one launch with those that decode."""
    return tokens <= MAX_DECODE_TOKENS


def split_spans(spans: Sequence[Span]) -> list[list[int]]:
    """Numbers of the spans that run together, part by part; of decoding rows the last one, if there are any."""
    alone, chunks, rows = list[list[int]](), list[int](), list[int]()
    for number, span in enumerate(spans):
        if span.isolated or span.known is not None or (span.first == 0 and len(span.ids) >= MIN_LONE_PROMPT_TOKENS):
            alone.append([number])
        else:
            (rows if joins_decoding(len(span.ids)) else chunks).append(number)
    if sum(len(spans[number].ids) for number in rows) > MAX_LAUNCH_ROWS:  # no single launch either way
        chunks, rows = sorted(chunks + rows), []
    return [*alone, *(part for part in (chunks, rows) if part)]


def clone_output(output: Output) -> Output:
    """A copy: the next forward may reuse the memory."""
    return Output(output.logits.clone(), None if output.greedy is None else output.greedy.clone())


def join_outputs(spans: Sequence[Span], parts: list[list[int]], outputs: list[Output]) -> Output:
    """What one forward of all spans would have returned, from the outputs of its parts."""
    places: dict[int, range] = {}  # rows of each span in the outputs, one after the other
    end = 0
    for number in itertools.chain(*parts):
        places[number] = range(end, end + len(spans[number].logits_indices))
        end = places[number].stop
    order = [row for number in range(len(spans)) for row in places[number]]
    logits, greedy = torch.cat([output.logits for output in outputs]), None
    if any(output.greedy is not None for output in outputs):
        found = [o.logits.argmax(-1).cpu() if o.greedy is None else o.greedy for o in outputs]
        greedy = torch.cat(found)[order]
    return Output(logits if order == list(range(end)) else logits[order], greedy)
