"""`parallel`: a draft model with low-rank changes to its matrices and an embedding for the mask, which are trained.

The model's own weights stay as they are, or the matrices themselves are trained, in float32. Knows rows and weights;
no loss, no text and no files.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from forerun.models.config import ModelConfig
from forerun.models.formats.checkpoint import Checkpoint
from forerun.prefill.calibration.dense import MASKED_BACKENDS, DenseModel
from forerun.train.layout import RowLayout, draw_layout
from forerun.train.loss import LOSS_IDS, Outcome, Teaching

INITIAL_SPREAD = 0.6  # of the first factors, in standard deviations of a matrix that keeps the size of its input
SCALE = 2.0  # of the changes: the second factors start at zero and learn so much faster
Q5_COLUMNS = 32  # of a block
MARKOV_SPREAD = 0.3  # of the first vectors of a Markov head
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
KEPT_SHARE, MIN_KEPT_SHARE = (
    0.7,
    0.15,
)  # depth j is trained at a share KEPT_SHARE ** j of the positions, at least at this


class DraftNetwork(DenseModel):
    """See `TrainableDrafter`."""

    depths: tuple[int, ...] = ()
    extra_columns = 1  # the mask's, which must never be drafted
    kv_layers: tuple[int, ...] = ()
    learned: Tensor | None = None  # of the Markov head, where there is one: what follows
    previous: Tensor | None = None  # and what was before, [columns, r]

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        mask_token: int,
        rank: int | None,
        seed: int,
        rounds: bool = False,
    ) -> None:
        """`rank`: of the changes; None: all matrices of the layers are trained as they are. `rounds`: changed matrices
        are rounded as the engine rounds those of a quantised draft, so that training makes up for it."""
        super().__init__(config, weights)
        self.rounds, self.frozen = rounds, False
        generator = torch.Generator().manual_seed(seed)
        self.low_rank: dict[str, tuple[Tensor, Tensor]] = {}
        self.whole: dict[str, Tensor] = {}
        for name in (f"layers.{i}.{part}" for i in range(config.num_layers) for part in MATRICES):
            if rank is None:
                self.whole[name] = weights[name].float().clone().requires_grad_()
                continue
            out, width = weights[name].shape
            a = torch.randn(rank, width, generator=generator) * INITIAL_SPREAD * width**-0.5
            pair = tuple(t.to(self.device).requires_grad_() for t in (a, torch.zeros(out, rank)))
            self.low_rank[name] = (pair[0], pair[1])
        self.mask = weights["embed"][mask_token].float().clone().requires_grad_()
        self.ids = torch.arange(min(LOSS_IDS, config.vocab_size), device=self.device)

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        mask_token: int,
        rank: int | None,
        seed: int,
    ) -> DraftNetwork:
        plain = DenseModel.from_checkpoint(checkpoint, device, dtype)
        return cls(checkpoint.config, plain.weights, mask_token, rank, seed, checkpoint.quantised)

    def parameters(self) -> list[Tensor]:
        if self.frozen:
            return self.quick()
        changes = (t for pair in self.low_rank.values() for t in pair)
        return [self.mask, *changes, *self.whole.values(), *self.quick()]

    def matrices(self) -> list[Tensor]:
        """Factors of low rank are Adam's."""
        return list(self.whole.values())

    def add_markov(self, rank: int, seed: int) -> None:
        """A Markov head: the token before a mask's position adds to its logits; the text's own rows read it anyway."""
        columns, draw = len(self.ids), torch.Generator().manual_seed(seed)
        self.previous = (torch.randn(columns, rank, generator=draw) * MARKOV_SPREAD).to(self.device).requires_grad_()
        self.learned = torch.zeros(columns + self.extra_columns, rank, device=self.device, requires_grad=True)

    @torch.no_grad()
    def freeze(self) -> None:
        """Nothing but the Markov head is trained from now on: changed matrices are made once."""
        for name in self.low_rank:
            self.weights[name] = self._changed(name, self.weights[name].dtype)
        self.frozen = True

    def quick(self) -> list[Tensor]:
        """Each of their rows is met in few steps."""
        return [tensor for tensor in (self.previous, self.learned) if tensor is not None]

    def markov(self) -> tuple[Tensor, Tensor] | None:
        if self.previous is None or self.learned is None:
            return None
        return self.previous.detach().cpu(), self.learned.detach().cpu()[: len(self.previous)]

    def go_on_from(
        self,
        changes: dict[str, tuple[Tensor, Tensor]],
        mask: Tensor,
        markov: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Start from changes of at most this rank; what is left of the rank changes nothing yet."""
        self.mask.data.copy_(mask)
        if markov is not None and self.previous is not None and self.learned is not None:
            self.previous.data.copy_(markov[0])
            self.learned.data[: len(markov[1])] = markov[1].to(self.learned.device)
        for name, (a, b) in changes.items():
            own_a, own_b = self.low_rank[name]
            # factors of about the same size: Adam's steps are of one size for all
            sizes = a.norm(dim=1) / own_a[: len(a)].detach().norm(dim=1).cpu()
            own_a.data[: len(a)] = (a / sizes[:, None]).to(own_a.device)
            own_b.data[:, : len(a)] = (b * sizes / SCALE).to(own_b.device)

    def changes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By matrix: a and b, where b @ a is added to it."""
        return {name: (a.detach().cpu(), SCALE * b.detach().cpu()) for name, (a, b) in self.low_rank.items()}

    def linear(self, x: Tensor, i: int, part: str) -> Tensor:
        name = f"layers.{i}.{part}"
        if name in self.whole:
            return F.linear(x, self.whole[name].to(x.dtype), self.weights.get(f"{name}_bias"))
        # One product with the changed matrix: two thin products more would read and write every row twice.
        changed = self.weights[name] if self.frozen else self._changed(name, x.dtype)
        return F.linear(x, changed, self.weights.get(f"{name}_bias"))

    def _changed(self, name: str, dtype: torch.dtype) -> Tensor:
        """A matrix with its changes."""
        a, b = self.low_rank[name]
        changed = self.weights[name] + (SCALE * b).to(dtype) @ a.to(dtype)
        if self.rounds:  # the gradient goes through as if it were not rounded
            changed = changed + (in_five_bits(changed.detach()) - changed.detach())
        return changed

    def layout(self, length: int, tokens: int, generator: torch.Generator) -> RowLayout:
        window = next((w for w in self.config.windows if w is not None), None)
        return draw_layout(length, tokens, KEPT_SHARE, MIN_KEPT_SHARE, generator, window, self.device)

    def head(self) -> Tensor:
        head = self.embed if self.config.tie_embeddings else self.weights["head"]
        return torch.cat((head[: len(self.ids)], self.mask.detach()[None].to(head.dtype)))

    def learn_confidence(self, rows: Tensor, outcome: Outcome) -> None:
        """It has none."""

    def rows(self, tokens: Tensor, teaching: Teaching, layout: RowLayout) -> Tensor:
        """Normed last hidden states [B, rows, hidden] of windows [B, length] and their masks, and what the Markov head
        reads beside them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            x = self._states(tokens, layout)
        return x if self.previous is None else torch.cat((x, self._before(tokens, layout, x.dtype)), -1)

    def _states(self, tokens: Tensor, layout: RowLayout) -> Tensor:
        x, positions = self.embed_tokens(tokens), layout.positions
        masks = (self.mask * self.config.embed_scale).to(x.dtype).expand(len(tokens), len(layout.anchors), -1)
        x = torch.cat((x, masks), 1)
        hidden = layout.hidden.to(x.dtype)
        for i in range(self.config.num_layers):
            q, k, v = self.project(x, i)
            q, k = self.rotate(q, positions, i), self.rotate(k, positions, i)
            x = self.finish_layer(x, self._attend(q, k, v, hidden, layout), i)
        return self._norm(x, "final_norm")

    def _before(self, tokens: Tensor, layout: RowLayout, dtype: torch.dtype) -> Tensor:
        """[B, rows, r] of the token at each row's position; zeros for the text's own rows and for rare tokens."""
        assert self.previous is not None
        stood = tokens[:, layout.positions]
        known = stood < len(self.previous)
        known[:, : layout.length] = False
        return (F.embedding(stood.clamp(max=len(self.previous) - 1), self.previous) * known[..., None]).to(dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, layout: RowLayout) -> Tensor:
        """The text's rows causally, masks by what the layout hides from them; -> [B, rows, Hq * D]."""
        group, scale, length = self.config.num_heads // self.config.num_kv_heads, self.config.scale, layout.length
        v = v.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        text = F.scaled_dot_product_attention(
            q[:, :, :length], k[:, :, :length], v[:, :, :length], is_causal=True, scale=scale
        )
        attended = [text]
        with sdpa_kernel(MASKED_BACKENDS) if q.is_cuda else nullcontext():
            for rows, keys, text_end in layout.pieces:
                masks = slice(length + keys.start, length + keys.stop)
                own_k, own_v = (torch.cat((x[:, :, :text_end], x[:, :, masks]), 2) for x in (k, v))
                scores = torch.cat((hidden[rows, :text_end], hidden[rows, masks]), 1)
                asked = q[:, :, length + rows.start : length + rows.stop]
                attended.append(F.scaled_dot_product_attention(asked, own_k, own_v, attn_mask=scores, scale=scale))
        return torch.cat(attended, 2).transpose(1, 2).flatten(2)


def in_five_bits(weight: Tensor) -> Tensor:
    """A matrix as CHANGED_BITS leave it (Q5_0, `models/cpu/quantise.py`), in its own dtype; others stay as they are."""
    if weight.shape[1] % Q5_COLUMNS:
        return weight
    blocks = weight.float().view(-1, Q5_COLUMNS)
    scales = (blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -16).half().float()
    levels = torch.where(scales != 0, blocks / scales, 0).round_().clamp_(-16, 15)
    return (levels * scales).view_as(weight).to(weight.dtype)
