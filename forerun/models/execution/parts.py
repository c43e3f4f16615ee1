"""Which spans of a batch run together, on a device where a token's bits and time depend on its company.

A prompt that runs by itself goes through the kernels that it would go through if nobody else were there, and so do few
rows of sequences that decode: one launch for all of them. The weights are read once for each part, so short prompts
stay together. Knows spans and logits; neither models nor devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from forerun.models.cuda.packing import MAX_ROWS
from forerun.models.cuda.prefixes import FEW
from forerun.models.decoder import Output

if TYPE_CHECKING:
    from forerun.models.execution.runner import Span

LONG = 512  # tokens of a prompt that keep a device busy: reading the weights again for others costs little beside it


def joins_decoding(tokens: int) -> bool:
    """Whether a span of so many tokens runs in one launch with those that decode."""
    return tokens <= FEW


def parts_of(spans: Sequence[Span]) -> list[list[int]]:
    """Numbers of the spans that run together, part by part; of decoding rows the last one, if there are any."""
    alone, chunks, rows = list[list[int]](), list[int](), list[int]()
    for number, span in enumerate(spans):
        if span.alone or span.known is not None or (span.first == 0 and len(span.ids) >= LONG):
            alone.append([number])
        else:
            (rows if joins_decoding(len(span.ids)) else chunks).append(number)
    if sum(len(spans[number].ids) for number in rows) > MAX_ROWS:  # no single launch either way
        chunks, rows = sorted(chunks + rows), []
    return [*alone, *(part for part in (chunks, rows) if part)]


def keep(output: Output) -> Output:
    """A copy: the next forward may reuse the memory."""
    return Output(output.logits.clone(), None if output.greedy is None else output.greedy.clone())


def join(spans: Sequence[Span], parts: list[list[int]], outputs: list[Output]) -> Output:
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
