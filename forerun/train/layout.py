"""Rows of a training pass: the text's own tokens, masks that stand for the tokens after some of its positions, blocks.

Depth j is trained at a share of all positions that falls with j (PARD's conditional drop of tokens): a mask sees the
text up to its position and the masks before it there, and nothing of other positions' masks. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASKED_SCORE = -30_000.0  # added to the score of an entry that a row may not attend to
ALIGNED_ROWS = 8  # the number of masks is a multiple of it: kernels read unaligned scores slowly
MAX_ANCHORS = 512  # positions of a window with masks: longer windows train context, not more masks
PIECE_ROWS = 2048  # masks that attend together: to the text before the last of them, and to each other

BLOCK_SHARE = 0.5  # of a window's positions, each with a whole block of rows
MAX_BLOCK_ANCHORS = 512  # of a window: entries that rows see grow with the square
CUT_SHARE = 0.1  # of steps whose windows have no hidden states up to some position


@dataclass(frozen=True)
class RowLayout:
    """Of all windows of a batch: row r stands at `positions[r]` and predicts the token after it."""

    length: int  # the text's own rows come first; 0 where only masks predict
    anchors: Tensor  # [M] of each mask, the position it follows
    depths: Tensor  # [M] 1 for the first mask after an anchor; 0 where the anchor itself is a row
    hidden: Tensor  # [M, length + M] added to the masks' attention scores
    first_known: int = 0  # of blocks: positions before it have no hidden states, as behind a drafted prompt
    # Of masks in the order of their anchors, some at a time: the masks, those among which their chains lie, and the end
    # of the text before them. All entries outside are hidden from them.
    pieces: tuple[tuple[slice, slice, int], ...] = ()

    @property
    def positions(self) -> Tensor:
        """[length + M]"""
        own = torch.arange(self.length, device=self.anchors.device)
        return torch.cat((own, self.anchors + self.depths))

    @property
    def starts(self) -> Tensor:
        """[length + M] the position whose next token begins the draft that a row belongs to."""
        own = torch.arange(self.length, device=self.anchors.device)
        return torch.cat((own, self.anchors))


def draw_layout(
    length: int,
    tokens: int,
    keep: float,
    floor: float,
    generator: torch.Generator,
    window: int | None = None,
    device: torch.device | None = None,
) -> RowLayout:
    """Masks for drafts of `tokens` tokens: depth j at a share max(keep ** j, floor) of the positions, the deeper ones
    always among the shallower. `window`: of sliding attention."""
    share = min(1.0, MAX_ANCHORS / length)
    rank = torch.randperm(length, generator=generator) / length  # [length]
    counts = sum(((rank < share * max(keep**j, floor)).long() for j in range(1, tokens)), torch.zeros(length).long())
    counts = torch.minimum(counts, length - 1 - torch.arange(length))  # a mask's own next token must be in the window
    anchors = torch.arange(length).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    depths = torch.arange(len(anchors)) - first + 1
    whole = len(anchors) // ALIGNED_ROWS * ALIGNED_ROWS
    anchors, depths = anchors[:whole], depths[:whole]
    pieces, entry = cut_pieces(anchors, length, tokens), torch.arange(length, device=device)
    anchors, depths = anchors.to(device), depths.to(device)
    text = entry <= anchors[:, None]
    if window is not None:
        text &= entry > (anchors + depths)[:, None] - window
    chain = (anchors[:, None] == anchors) & (depths <= depths[:, None])
    seen = torch.cat((text, chain), 1)
    hidden = torch.zeros(seen.shape, device=device).masked_fill_(~seen, MASKED_SCORE)
    return RowLayout(length, anchors, depths, hidden, pieces=pieces)


def cut_pieces(anchors: Tensor, length: int, tokens: int) -> tuple[tuple[slice, slice, int], ...]:
    """See `RowLayout.pieces`; all ends are aligned, so that a piece may have some entries more than it needs."""

    def up(n: int) -> int:
        return -(-n // ALIGNED_ROWS) * ALIGNED_ROWS

    pieces = []
    for start in range(0, len(anchors), PIECE_ROWS):
        end = min(start + PIECE_ROWS, len(anchors))
        text_end = min(length, up(int(anchors[end - 1]) + 1))
        pieces.append((slice(start, end), slice(max(0, start - up(tokens)), end), text_end))
    return tuple(pieces)


def draw_blocks(
    length: int, tokens: int, window: int, generator: torch.Generator, device: torch.device | None = None
) -> RowLayout:
    """Blocks of `tokens` rows, the first of each at its anchor: a row sees the positions before the anchor, within the
    window, and its own block up to itself."""
    possible = length - tokens  # anchors 1 .. length - tokens: a position before, and the last row's target inside
    count = min(round(BLOCK_SHARE * length), MAX_BLOCK_ANCHORS, possible) // ALIGNED_ROWS * ALIGNED_ROWS or possible
    chosen = torch.randperm(possible, generator=generator)[:count].sort().values + 1
    chosen, row = chosen.to(device), torch.arange(tokens, device=device)
    anchors, depths = chosen.repeat_interleave(tokens), row.repeat(len(chosen))
    entry = torch.arange(length, device=device)
    text = (entry < anchors[:, None]) & (entry > (anchors + depths)[:, None] - window)
    own = (anchors[:, None] == anchors) & (depths <= depths[:, None])
    seen = torch.cat((text, own), 1)
    cut = torch.rand(2, generator=generator).tolist()
    first = int(cut[1] * length) if cut[0] < CUT_SHARE else 0
    hidden = torch.zeros(seen.shape, device=device).masked_fill_(~seen, MASKED_SCORE)
    return RowLayout(0, anchors, depths, hidden, first)
