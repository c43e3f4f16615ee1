"""Measures what few bits cost: the KL divergence of the logits on some prompts when layers are quantised.

One sweep runs any number of variants (bits of each layer and of the head, or float): a layer's weights are read once,
all variants pass it, then they are dropped. So a sweep needs the memory of one layer in float32, of a quantised head
and of the variants' hidden states, not of a model. Each variant is computed by the kernels that will compute it. Knows
token ids, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core import EXTRA_KV_SLOTS, HostBatch
from forerun.core.progress import track
from forerun.models.attention import SdpaAttention
from forerun.models.build import LayerBuilder, planned_precision
from forerun.models.cpu.block_linear import set_threads
from forerun.models.cpu.importance import WeightPlan
from forerun.models.decoder import Decoder, Layer
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.dequant import EmbeddingRows
from forerun.models.linear import Linear, Precision, rms_norm

FLOAT = 0  # in place of bits: the file's own weights in float32
FIRST_COMPARED = 8  # tokens of each prompt whose logits are not compared: they depend on little but themselves
HEAD_ROWS, COMPARED_ROWS = 8192, 64  # of the vocabulary and of positions at a time: bound the temporaries
PAGE_SIZE = 16
FLOAT32 = Precision("float32", Linear, torch.float32)

Variant = tuple[int, ...]  # bits of each layer, then of the head


class Sweep:
    """Prompts through a checkpoint's layers, one layer at a time."""

    def __init__(self, checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]) -> None:
        config, cpu = checkpoint.config, torch.device("cpu")
        set_threads(torch.get_num_threads())
        self.checkpoint, self.config = checkpoint, config
        self._float = LayerBuilder(checkpoint, FLOAT32, cpu, False)
        self.batch = lay_out(prompts).to(cpu)
        slots = int(self.batch.slot_mapping.max()) + 1 + EXTRA_KV_SLOTS
        k, v = (torch.zeros(slots, config.num_kv_heads, config.head_dim) for _ in range(2))
        self._kv = [(k, v)] * config.num_layers  # a layer's K/V is read by nothing after it
        context = max(map(len, prompts)) + 1
        self._decoder = Decoder(
            config=config,
            lookup=EmbeddingRows(*checkpoint.stored("embed")),
            layers=[None] * config.num_layers,  # type: ignore[list-item]
            final_norm=self._float.norm("final_norm"),
            head=None,  # type: ignore[arg-type]
            attention=SdpaAttention(config, cpu, context, same_bits=False),
            dtype=torch.float32,
            device=cpu,
        )

    @torch.inference_mode()
    def kl(self, variants: Sequence[Variant], label: str, quiet: bool = False) -> list[float]:
        """Mean KL(float || variant) in nats over the compared positions, for each variant."""
        decoder, reference = self._decoder, self._decoder.embed(self.batch.tokens)  # [T, hidden]
        decoder.attention.plan(self.batch)
        states = [reference] * len(variants)
        for i in track(range(self.config.num_layers), label, quiet):
            made: dict[int, Layer] = {}
            before, reference = reference, self._run(i, FLOAT, reference, made)
            shared = {FLOAT: reference}  # of variants that were float up to here
            for number, variant in enumerate(variants):
                if states[number] is not before:
                    states[number] = self._run(i, variant[i], states[number], made)
                    continue
                if variant[i] not in shared:
                    shared[variant[i]] = self._run(i, variant[i], before, made)
                states[number] = shared[variant[i]]
            decoder.layers[i] = None  # type: ignore[call-overload]
        return self._compare(reference, states, [variant[-1] for variant in variants], quiet)

    def _run(self, i: int, bits: int, x: Tensor, made: dict[int, Layer]) -> Tensor:
        if bits not in made:
            made[bits] = self._builder(bits).layer(i)
        self._decoder.layers[i] = made[bits]
        return self._decoder.run_layers(x, self.batch, self._kv, range(i, i + 1))

    def _builder(self, bits: int) -> LayerBuilder:
        if bits == FLOAT:
            return self._float
        plan = WeightPlan((bits,) * (self.config.num_layers + 1))
        return LayerBuilder(self.checkpoint, planned_precision(plan), torch.device("cpu"), False, None, plan)

    def _compare(self, reference: Tensor, states: list[Tensor], head_bits: list[int], quiet: bool) -> list[float]:
        """KL = log sum p e^d - sum p d, with p the reference's probabilities and d the differences of the logits."""
        at, totals, head = self.batch.logits_indices, [0.0] * len(states), None
        jobs = [(bits, rows) for bits in sorted(set(head_bits)) for rows in at.split(COMPARED_ROWS)]
        for number, (bits, rows) in enumerate(track(jobs, "comparing logits", quiet)):
            if bits != FLOAT and (head is None or bits != jobs[number - 1][0]):
                head = self._builder(bits).head()[1]
            wanted = self._normed(reference, rows)
            logits = torch.empty(len(rows), self.config.vocab_size)
            for part, product in self._head_parts(None):
                logits[:, part] = product(wanted)
            p = torch.softmax(logits, -1)
            sums = {i: torch.zeros(2, len(rows), dtype=torch.float64) for i, b in enumerate(head_bits) if b == bits}
            for part, product in self._head_parts(head):
                for i, total in sums.items():
                    total += _weighted(product(self._normed(states[i], rows)) - logits[:, part], p[:, part])
            for i, total in sums.items():
                totals[i] += float((total[0].log1p() - total[1]).sum())
        return [total / len(at) for total in totals]

    def _normed(self, x: Tensor, rows: Tensor) -> Tensor:
        return rms_norm(x[rows], self._decoder.final_norm)  # [R, hidden]

    def _head_parts(self, head: Linear | None) -> Iterator[tuple[slice, Callable[[Tensor], Tensor]]]:
        """Parts of the vocabulary and the products that give their logits: of a head as a whole, or None: of the file's
        own rows in float32, some at a time."""
        if head is not None:
            yield slice(None), head
            return
        for ids in torch.arange(self.config.vocab_size).split(HEAD_ROWS):
            yield slice(int(ids[0]), int(ids[-1]) + 1), partial(F.linear, weight=self._head_rows(ids))

    def _head_rows(self, ids: Tensor) -> Tensor:
        return self.checkpoint.rows("embed" if self.config.tie_embeddings else "head", ids)


def _weighted(difference: Tensor, p: Tensor) -> Tensor:
    """Sums over the vocabulary [2, P] of p (e^d - 1) and p d."""
    return torch.stack(((p * difference.expm1()).sum(-1), (p * difference).sum(-1))).double()


def lay_out(prompts: Sequence[Sequence[int]]) -> HostBatch:
    """All tokens of all prompts, each on pages of its own; logits of those from FIRST_COMPARED on."""
    lengths = [len(ids) for ids in prompts]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    pages, first = [], 0
    for length in lengths:
        pages.append(np.arange(first, first + -(-length // PAGE_SIZE), dtype=np.int32))
        first += len(pages[-1])
    entries = [np.arange(length) for length in lengths]
    slots = [own[0] * PAGE_SIZE + entry for own, entry in zip(pages, entries, strict=True)]
    compared = [int(s) + e for s, n in zip(starts, lengths, strict=False) for e in range(min(FIRST_COMPARED, n - 1), n)]
    return HostBatch(
        tokens=np.concatenate([np.array(ids, dtype=np.int64) for ids in prompts]),
        positions=np.concatenate(entries).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        kv_lens=(np.concatenate(entries) + 1).astype(np.int32),
        cu_seqlens=starts.tolist(),
        seq_lens=lengths,
        pages=pages,
        page_size=PAGE_SIZE,
        logits_indices=compared,
    )
