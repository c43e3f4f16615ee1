"""Forwards without the host in between, for the batches that decoding and verification repeat.

Few rows run as one launch of `Stack` where it fits the decoder. Others run kernel by kernel as captured graphs, and so
do few rows whose sequences share so much that reading it once saves more than the one launch. A graph keeps addresses
and grids, so one is captured per bucket of rows, sequences and tokens per sequence when it is first needed; groups of
sequences are tables in its input, with room for as many as the bucket can have. All graphs share their input, their
output and their memory, since one runs at a time. Batches that fit nothing run as usual. Prompts have recordings of
their own (`prompts`). A second kind of graph leaves queries instead of logits, for the attention weights of the last
tokens (`tail_attention`). Knows no request.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core import KV, HostBatch, TokenBatch
from forerun.models.config import ModelConfig
from forerun.models.cuda import nvrtc
from forerun.models.cuda.attention import PagedAttention
from forerun.models.cuda.lanes import DECODE_SHAPE, batch_shape
from forerun.models.cuda.launch import Recorder, record
from forerun.models.cuda.move import Mover
from forerun.models.cuda.nvrtc import CompileError
from forerun.models.cuda.packing import (
    CONTEXT_BUCKETS,
    DECODE_ROW_BUCKETS,
    MASK_BITS,
    MAX_DECODE_ROWS,
    MAX_STEPS,
    Bucket,
    lay_pages,
    masks_of,
)
from forerun.models.cuda.paged import QueryPlan
from forerun.models.cuda.pending import PendingTokens
from forerun.models.cuda.prompts import PromptRunner
from forerun.models.cuda.recompute import RecomputeRunner
from forerun.models.cuda.shared import (
    MIN_GRAPH_SAVING_BYTES,
    MIN_STACK_SAVING_BYTES,
    TILE_FIELDS,
    Groups,
    SharedPlan,
    most_tiles,
    plan_shared,
)
from forerun.models.cuda.stack import KERNEL_ROWS, ChainRunner, Chains, Stack, can_chain, fits
from forerun.models.cuda.tail_attention import TailAttentionKernel, queries_of
from forerun.models.decoder import Decoder, Output, Taps
from forerun.models.execution.batch_split import MAX_LAUNCH_ROWS

GRAPH_CHOSEN_AT, WAITED_CHOSEN_AT = 2 * MAX_DECODE_ROWS, 3 * MAX_DECODE_ROWS
MAX_PARTS = (MAX_STEPS - 2) // 2  # launches of one step that run ahead: rows of `greedy` for two steps


class _Buffers:
    """Input and output that all graphs of a decoder share, for up to MAX_DECODE_ROWS rows. The host's input is laid out
    in two buffers in turns, since one may still be read when the next batch is laid out."""

    def __init__(
        self, decoder: Decoder, max_pages: int, page_size: int, chosen: Tensor, taps: Taps | None = None
    ) -> None:
        self.taps, states = taps, (MAX_DECODE_ROWS, decoder.config.hidden_size)
        self.invariant = isinstance(decoder.attention, PagedAttention) and decoder.attention.batch_invariant is True
        self.states = {
            depth: torch.zeros(states, dtype=decoder.dtype, device=decoder.device)
            for depth in sorted(taps.hidden if taps else ())
        }
        self.max_pages, self.page_size, self.chosen = max_pages, page_size, chosen
        # masks (two words), tokens ... tree_start, cu_seqlens; then pages
        size = 8 * MAX_DECODE_ROWS + 1 + max_pages * MAX_DECODE_ROWS
        size += _shared_size(decoder.config, MAX_DECODE_ROWS, MAX_DECODE_ROWS)  # before the pages
        self._staging = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(2)]
        self._hosts = [staging.numpy() for staging in self._staging]
        self._turn = 0
        self.inputs = torch.zeros(size, dtype=torch.int32, device=decoder.device)
        self.logits = torch.zeros(MAX_DECODE_ROWS, decoder.config.vocab_size, device=decoder.device)
        self.greedy = torch.zeros(3, MAX_DECODE_ROWS, dtype=torch.int64).pin_memory()
        self.pool = torch.cuda.graph_pool_handle()

    @property
    def host(self) -> np.ndarray:
        return self._hosts[self._turn]

    def next_host(self) -> None:
        """From now on the other buffer is laid out."""
        self._turn ^= 1

    def send(self, used: int) -> None:
        self.inputs[:used].copy_(self._staging[self._turn][:used], non_blocking=True)


def _shared_size(config: ModelConfig, seqs: int, rows: int) -> int:
    return seqs + 2 * rows + TILE_FIELDS * most_tiles(rows, config.num_heads // config.num_kv_heads)


class _Graph:
    """One captured bucket."""

    def __init__(self, decoder: Decoder, kv: KV, bucket: Bucket, buffers: _Buffers) -> None:
        self.bucket, self.buffers = bucket, buffers
        rows, seqs, pages = bucket.rows, bucket.seqs, buffers.max_pages
        inputs, self.head = buffers.inputs, 6 * rows + 2 * seqs + 1
        parts = inputs[2 * rows : 6 * rows].view(4, rows)
        self.masks = inputs[: 2 * rows].view(torch.int64)
        self.tree_start, cu_seqlens = inputs[6 * rows : 6 * rows + seqs], inputs[6 * rows + seqs : self.head]
        self.shared, self.groups_at = None, self.head
        if bucket.shared:
            self.head += _shared_size(decoder.config, seqs, rows)
            self.shared = SharedPlan.of(inputs[self.groups_at : self.head], seqs, rows)
        self.batch = TokenBatch(
            tokens=parts[0],
            positions=parts[1],
            slot_mapping=parts[2],
            kv_lens=parts[3],
            # the pages in use come first
            block_tables=inputs[self.head : self.head + pages * seqs].view(pages, seqs).T,
            cu_seqlens=[0] * seqs + [rows],
            seq_lens=[pages * buffers.page_size] * seqs,
            page_size=buffers.page_size,
            logits_indices=torch.arange(rows, device=decoder.device),
        )
        longest = min(bucket.context, pages * buffers.page_size)
        # Batches too large for one launch have other bits anyway, so that their attention need not have the same.
        large = rows > KERNEL_ROWS[-1] and bucket.few == 1 and not bucket.shared and not buffers.invariant
        shape = batch_shape(seqs, decoder.config, longest) if large else DECODE_SHAPE
        self.plan = QueryPlan(cu_seqlens, cu_seqlens[:-1], rows, bucket.few, 0, longest, shape)
        self._fill_idle()
        buffers.send(len(inputs))
        self.graph, _ = record(lambda: self._forward(decoder, kv), buffers.pool)

    def _fill_idle(self) -> None:
        """Rows without a token keep nothing and see nothing."""
        host, rows = self.buffers.host, self.bucket.rows
        host[: self.head] = 0
        host[4 * rows : 5 * rows] = -1

    def _plan(self, decoder: Decoder) -> None:
        attention = decoder.attention
        assert isinstance(attention, PagedAttention)
        batch, tree_start = self.batch, None
        if self.bucket.tree:
            shifts = torch.arange(MASK_BITS, device=decoder.device)
            batch.tree, tree_start = (self.masks[:, None] >> shifts & 1).to(torch.uint8), self.tree_start
            batch.tree_start = [0] * self.bucket.seqs
        attention.use(batch, self.plan, tree_start, self.shared)

    def _forward(self, decoder: Decoder, kv: KV) -> None:
        self._plan(decoder)
        batch, chosen, rows = self.batch, self.buffers.chosen, self.bucket.rows
        tokens = batch.tokens
        if self.bucket.few == 1:  # negative: what the step before chose for row -1 - token
            tokens = torch.where(tokens < 0, chosen[(-1 - tokens).clamp_min(0)], tokens.long())
        left, taps = Output(tokens), self.buffers.taps
        x = decoder.run_layers(decoder.embed(tokens), batch, kv, range(decoder.config.num_layers), taps, left)
        for depth, state in left.hidden.items():
            self.buffers.states[depth][:rows].copy_(state)
        logits = self.buffers.logits[:rows]
        logits.copy_(decoder.head(x, norm=decoder.final_norm))
        chosen[GRAPH_CHOSEN_AT : GRAPH_CHOSEN_AT + rows].copy_(logits.argmax(-1))

    def replay(
        self, batch: HostBatch, groups: Groups | None = None, out: int = 0, chosen_at: int | None = None
    ) -> None:
        """Enqueue a batch; the tokens chosen go to row `out` of the buffers' `greedy`, and to `chosen` from `chosen_at`
        on."""
        self.buffers.next_host()
        count, rows, seqs, host = len(batch.tokens), self.bucket.rows, self.bucket.seqs, self.buffers.host
        self._fill_idle()
        if batch.bits is not None and batch.tree_start is not None:
            host[: 2 * count] = np.array(batch.bits, dtype=np.uint64).view(np.int32)
            host[6 * rows : 6 * rows + len(batch.tree_start)] = batch.tree_start
        host[2 * rows : 2 * rows + count] = batch.tokens
        host[3 * rows : 3 * rows + count] = batch.positions
        host[4 * rows : 4 * rows + count] = batch.slot_mapping
        host[5 * rows : 5 * rows + count] = batch.kv_lens
        cu_seqlens = host[6 * rows + seqs : self.groups_at]
        cu_seqlens[: len(batch.cu_seqlens)] = batch.cu_seqlens
        cu_seqlens[len(batch.cu_seqlens) :] = batch.cu_seqlens[-1]  # empty sequences
        if groups is not None:
            groups.lay(host[self.groups_at : self.head], seqs, rows)
        used = self.head + lay_pages(batch, host[self.head :], seqs, self.buffers.max_pages) * seqs
        self.buffers.send(used)
        self.graph.replay()
        chosen = self.buffers.chosen[GRAPH_CHOSEN_AT : GRAPH_CHOSEN_AT + count]
        if chosen_at is not None:
            self.buffers.chosen[chosen_at : chosen_at + count].copy_(chosen)
        self.buffers.greedy[out, :count].copy_(chosen, non_blocking=True)


class _QueryGraph(_Graph):
    """A bucket that leaves the queries of all layers but the last, and no logits."""

    queries: Tensor  # [layers - 1, rows, Hq, D], in the graphs' memory: held, so that no later graph gets it

    def _plan(self, decoder: Decoder) -> None:
        """No token is decoded from these rows, so their bits may be those of many tokens: less time."""
        self.plan = replace(self.plan, few=0, many=self.bucket.rows)
        super()._plan(decoder)

    def _forward(self, decoder: Decoder, kv: KV) -> None:
        self._plan(decoder)
        self.queries = queries_of(decoder, self.batch, kv)


class GraphRunner:
    """Chooses how a batch runs. `run` returns None for batches that neither a stack nor a graph fits.

    What it returns is read before the next run: the memory is the same. Not waited for, it is read on the device only.
    """

    def __init__(self, decoder: Decoder, kv: KV, max_context: int, page_size: int) -> None:
        self.decoder, self.kv, self.max_context, self.page_size = decoder, kv, max_context, page_size
        self.taps: Taps | None = None  # what every forward leaves besides
        self.states: dict[int, Tensor] = {}  # of the latest `launch`: depth -> [rows, hidden]
        self.max_pages = -(-max_context // page_size)
        self.stacks: dict[int, Stack | None] = {}  # by rows, made when first needed
        # tokens chosen: by launches ahead in turns, by a graph, and by launches that are waited for
        self._chosen = torch.zeros(4 * MAX_DECODE_ROWS, dtype=torch.int64, device=decoder.device)
        self._drawn = torch.zeros(2, MAX_DECODE_ROWS, dtype=torch.int64).pin_memory()
        self.launches, self._turn = 0, 0
        self._buffers: _Buffers | None = None
        self._graphs: dict[Bucket, _Graph] = {}
        self._query_graph: _QueryGraph | None = None
        self._tail_attention: TailAttentionKernel | None = None
        self._mover = Mover(kv)
        self._chains: ChainRunner | None = None
        self.stack = self._stack(KERNEL_ROWS[0])
        assert isinstance(decoder.attention, PagedAttention)
        self.batch_invariant = decoder.attention.batch_invariant

    def leave_states(self, taps: Taps) -> None:
        """From now on forwards leave these hidden states; before any has run."""
        self.taps, self._buffers = taps, None
        self.stacks.clear()
        self._graphs.clear()
        self.__dict__.pop("prompts", None)
        self.stack = self._stack(KERNEL_ROWS[0])

    def run(self, batch: HostBatch, wait: bool = True) -> Output | None:
        if batch.prompt:
            return self.prompts.run(batch)
        enough, masks = masks_of(batch)
        if not enough or len(batch.tokens) > MAX_DECODE_ROWS:
            return None
        stack = self._stack(len(batch.tokens))
        groups = self._groups(batch, MIN_GRAPH_SAVING_BYTES if stack is None else MIN_STACK_SAVING_BYTES)
        if stack is not None and groups is None:
            stack.run(batch, masks, chosen_at=WAITED_CHOSEN_AT)
            logits, greedy, states = stack.logits, stack.greedy[0], self._stack_states(stack)
            assert logits is not None
        else:
            graph = self._graph(batch, groups is not None)
            if graph is None:
                return None
            graph.replay(batch, groups)
            logits, greedy, states = graph.buffers.logits, graph.buffers.greedy[0], graph.buffers.states
        if wait:
            nvrtc.wait()
        output = self._output(batch.logits_indices, logits, greedy)
        output.hidden = {depth: state[: len(batch.tokens)] for depth, state in states.items()}
        return output

    def _stack_states(self, stack: Stack) -> dict[int, Tensor]:
        """Of the latest launch, by depth."""
        if stack.states is None or self.taps is None:
            return {}
        return {depth: self.decoder.hidden(s) for depth, s in zip(sorted(self.taps.hidden), stack.states, strict=True)}

    def launch(self, batch: HostBatch, choose: Callable[[Tensor, int], Tensor] | None = None) -> PendingTokens | None:
        """Enqueue one token of each sequence and return without waiting; None where neither single launches nor a graph
        fit. A negative token is what the launch before has chosen for row -1 - token. At most two may be on their way,
        and logits are not kept. `choose`: what makes tokens of them on the device, where they are not the likeliest."""
        rows, before = len(batch.tokens), self._turn * MAX_DECODE_ROWS
        stack, at_once = self._stack(rows), rows
        if stack is None and self.batch_invariant is True and self.stack is not None:
            at_once = self.decoding_rows  # several launches, each with equal bits
            stack = self._stack(at_once)
        tapped = self.taps is not None and at_once < rows  # the second launch would overwrite the first one's states
        if rows > MAX_DECODE_ROWS or -(-rows // at_once) > MAX_PARTS or tapped:
            return None
        groups = self._groups(batch, MIN_GRAPH_SAVING_BYTES if stack is None else MIN_STACK_SAVING_BYTES)
        batch.tokens = np.where(batch.tokens < 0, batch.tokens - before, batch.tokens)
        after, greedy = MAX_DECODE_ROWS - before, list[Tensor]()
        if stack is not None and groups is None:
            for part, first in enumerate(range(0, rows, at_once)):
                piece, out = batch.singles(first, first + at_once), 1 + part * 2 + self._turn
                stack.run(piece, None, out=out, chosen_at=after + first)
                self.states = self._stack_states(stack)
                greedy.append(stack.greedy[out, : len(piece.tokens)])
                if choose is not None:
                    assert stack.logits is not None
                    greedy[-1] = self._choose(choose, stack.logits[: len(piece.tokens)], first, after)
        else:
            graph = None if self.batch_invariant is True else self._graph(batch, groups is not None)
            if graph is None:
                return None
            out = 1 + self._turn
            graph.replay(batch, groups, out, after)
            self.states = graph.buffers.states
            greedy.append(graph.buffers.greedy[out, :rows])
            if choose is not None:
                greedy[-1] = self._choose(choose, graph.buffers.logits[:rows], 0, after)
        self._turn ^= 1
        self.launches += 1
        done = torch.cuda.Event()
        done.record()
        return PendingTokens(done, greedy, self.launches)

    @torch.inference_mode()
    def _choose(self, choose: Callable[[Tensor, int], Tensor], logits: Tensor, first: int, after: int) -> Tensor:
        """Where the host will find the tokens; the next launch finds them in `_chosen`."""
        rows = slice(first, first + len(logits))
        tokens = choose(logits, first)
        self._chosen[after:][rows].copy_(tokens)
        found = self._drawn[self._turn][rows]
        found.copy_(tokens, non_blocking=True)
        return found

    def tail_attention(self, batch: HostBatch) -> np.ndarray | None:
        """How much the tokens of one sequence look at each of its entries, [entries] float32: mean over tokens, heads
        and all layers but the last. Leaves their K/V as `run` does; None for batches that the graph does not fit."""
        count, entries = len(batch.tokens), batch.seq_lens[0]
        fits = 0 < count <= MAX_LAUNCH_ROWS and len(batch.pages) == 1 and entries <= self.max_pages * self.page_size
        if not fits or batch.bits is not None or len(self.kv) < 2:
            return None
        if self._tail_attention is None or self._query_graph is None:
            self._tail_attention = TailAttentionKernel.of(self.decoder.config, self.kv, self.page_size)
            # one for any number of tokens: fewer would save less time than another capture takes
            self._query_graph = _QueryGraph(
                self.decoder, self.kv, Bucket(MAX_LAUNCH_ROWS, 1, MAX_LAUNCH_ROWS, False), self._room()
            )
        graph = self._query_graph
        graph.replay(batch)
        weights = self._tail_attention.weights(graph.queries, graph.batch.block_tables[0], entries - count, count)
        return weights.cpu().numpy()  # waits for the device, as the next batch is laid out in the same memory

    @cached_property
    def prompts(self) -> PromptRunner:
        """For prompts whose bits depend on nothing else."""
        where = (self.decoder, self.kv, self.max_context, self.page_size)
        return PromptRunner(*where, self._room().pool, self.taps)

    @cached_property
    def recompute_runner(self) -> RecomputeRunner:
        """For many rows of one sequence that leave their K/V."""
        return RecomputeRunner(self.decoder, self.kv, self.max_context, self.page_size, self._room().pool)

    @cached_property
    def recorder(self) -> Recorder:
        """For functions of what such rows leave."""
        return Recorder(self._room().pool)

    def _groups(self, batch: HostBatch, least: int) -> Groups | None:
        attention = self.decoder.attention
        assert isinstance(attention, PagedAttention)
        return plan_shared(batch, self.decoder.config, least) if attention.share_prefix else None

    @staticmethod
    def _output(want: list[int], logits: Tensor, greedy: Tensor) -> Output:
        rows = slice(want[0], want[0] + len(want)) if want else slice(0)
        if want == list(range(rows.start or 0, rows.stop)):
            return Output(logits=logits[rows], greedy=greedy[rows])
        return Output(logits=logits[want], greedy=greedy[want])

    def prepare(self) -> None:
        """Record prompts, and batches of answers that are too large for one launch, so that no request waits for it."""
        self.prompts.prepare()
        if self.batch_invariant is None:
            for rows in (rows for rows in DECODE_ROW_BUCKETS if self.decoding_rows < rows <= MAX_LAUNCH_ROWS):
                bucket = Bucket(rows, rows, 1, False, False, CONTEXT_BUCKETS[0])
                self._graphs[bucket] = _Graph(self.decoder, self.kv, bucket, self._room())

    def most_rows(self, sequences: int) -> int:
        """Where bits are promised, those that have them. Else one sequence's buckets are few and captured at the start;
        several run as one launch or not so fast."""
        if self.batch_invariant is not False:
            return self.decoding_rows
        return MAX_LAUNCH_ROWS if sequences == 1 or self.stack is None else KERNEL_ROWS[-1]

    @property
    def decoding_rows(self) -> int:
        """Rows that run the same instructions as one: those of one launch, else a tile of `skinny_linear`, also 16."""
        return max((rows for rows in KERNEL_ROWS if self._stack(rows) is not None), default=KERNEL_ROWS[0])

    @property
    def can_chain(self) -> bool:
        return can_chain(self.decoder, self.page_size)

    def chains(self, batch: HostBatch, depth: int, least: Sequence[float]) -> Chains | None:
        """Greedy continuations of every sequence in one launch; None where the decoder or the batch does not fit."""
        if len(batch.tokens) > KERNEL_ROWS[0] or not self.can_chain:
            return None
        if self._chains is None:
            self._chains = ChainRunner(self.decoder, self.kv, self.max_context, self.page_size)
        return self._chains.run(batch, min(depth, MAX_STEPS), least[:MAX_STEPS])

    def move(self, source: list[int], target: list[int]) -> None:
        """Enqueue the copy of K/V between slots, in all layers."""
        self._mover.move(source, target)

    def launch_stack(self, rows: int) -> Stack | None:
        """The one launch of at least so many rows; None where the decoder does not run so."""
        return self._stack(rows)

    @property
    def graph_memory(self) -> Any:
        """The memory pool that graphs share."""
        return self._room().pool

    def _stack(self, count: int) -> Stack | None:
        """The decoder as one launch of so many rows, where it fits and can be compiled."""
        rows = next((rows for rows in KERNEL_ROWS if rows >= count), None)
        if rows is None:
            return None
        if rows not in self.stacks:
            self.stacks[rows] = None
            if fits(self.decoder, self.page_size, rows):
                try:
                    where = (self.decoder, self.kv, self.max_context, self.page_size, rows)
                    depths = sorted(self.taps.hidden) if self.taps else ()
                    made = Stack(*where, chosen=self._chosen, depths=depths)
                    self.stacks[rows] = made
                except CompileError as error:  # a driver older than the compiler refuses it
                    warnings.warn(f"decoding kernel by kernel, slower: {error}", RuntimeWarning, stacklevel=2)
        return self.stacks[rows]

    def _graph(self, batch: HostBatch, shared: bool = False) -> _Graph | None:
        bucket = Bucket.of(batch, shared)
        if bucket is None or (batch.bits is not None and max(batch.bits) >= 1 << MASK_BITS):
            return None
        if bucket not in self._graphs:
            self._graphs[bucket] = _Graph(self.decoder, self.kv, bucket, self._room())
        return self._graphs[bucket]

    def _room(self) -> _Buffers:
        if self._buffers is None:
            self._buffers = _Buffers(self.decoder, self.max_pages, self.page_size, self._chosen, self.taps)
        return self._buffers
