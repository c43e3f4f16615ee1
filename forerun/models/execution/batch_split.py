"""Splits a batch on devices where a token's bits and time depend on what else is in it.

Tokens of prompts and tokens of answers run apart, through kernels of their own. Where bits must not depend on the batch
(`InvariantSplit`), all prompts of a step run together, since their kernels do not depend on the number of rows, and
rows of answers run in launches of at most as many rows as give equal bits. Without that promise (`split_spans`) a long
prompt runs by itself, short ones stay together, and so do the few rows of sequences that decode. Knows spans and
logits; neither models nor devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forerun.models.decoder import Output

if TYPE_CHECKING:
    from forerun.models.execution.runner import Span

# What kernels that decode are made for, on every device that has them.
MAX_DECODE_TOKENS = 64  # new tokens of a sequence up to which it counts as decoding
MAX_LAUNCH_ROWS = 64  # tokens of all sequences that run in one launch
MIN_HEAD_ROWS = 32  # of the head, where bits are promised to prompts: more than kernels for few rows take
MIN_LONE_PROMPT_TOKENS = 512  # keep a device busy: reading the weights again for others costs little beside it


def split_spans(spans: Sequence[Span]) -> list[list[int]]:
    """Numbers of the spans that run together, part by part; of decoding rows the last one, if there are any."""
    alone, chunks, rows = list[list[int]](), list[int](), list[int]()
    for number, span in enumerate(spans):
        if span.isolated or span.known is not None or (span.first == 0 and len(span.ids) >= MIN_LONE_PROMPT_TOKENS):
            alone.append([number])
        else:
            (rows if len(span.ids) <= MAX_DECODE_TOKENS else chunks).append(number)
    if sum(len(spans[number].ids) for number in rows) > MAX_LAUNCH_ROWS:  # no single launch either way
        chunks, rows = sorted(chunks + rows), []
    return [*alone, *(part for part in (chunks, rows) if part)]


@dataclass(frozen=True)
class InvariantSplit:
    """Parts within which a token's bits depend on nothing else.

    `launch_rows`: rows of answers that run the same instructions as one. `always`: also where that takes several
    launches for sequences of one row each, which costs more than it is worth to most; else such batches stay whole.
    """

    launch_rows: int
    always: bool

    def __call__(self, spans: Sequence[Span]) -> list[list[int]]:
        known = [[number] for number, span in enumerate(spans) if span.known is not None]
        rest = [number for number, span in enumerate(spans) if span.known is None]
        prompts = [number for number in rest if spans[number].prompt]
        answers = [number for number in rest if not spans[number].prompt]
        parts = [*known, *([prompts] if prompts else [])]
        if not self.always and len(answers) > self.launch_rows:
            return [*parts, answers]
        launches: list[list[int]] = []
        room = 0
        for number in answers:
            rows = len(spans[number].ids)
            if not launches or rows > room:
                launches.append([])
                room = self.launch_rows
            launches[-1].append(number)
            room -= rows
        return [*parts, *launches]


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
