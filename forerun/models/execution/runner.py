"""From tokens of sequences to logits: lays them out as a batch and runs one decoder on one plane of the page pool.

Serves the target and draft models alike. Knows tokens, pages and draft trees; not why they were chosen nor what becomes
of the logits.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pool import PagePool
from forerun.core import KV, ROOT, HostBatch
from forerun.core.batch import send
from forerun.core.drafted import DraftedDevice
from forerun.errors import OutOfPages
from forerun.models.cpu.attention import PagedCpuAttention
from forerun.models.decoder import AllLayersKV, Decoder, Output, RecomputePass, Taps, Watch, make_all_layers_kv
from forerun.models.execution.batch_split import (
    MAX_DECODE_TOKENS,
    MIN_HEAD_ROWS,
    InvariantSplit,
    clone_output,
    join_outputs,
    split_spans,
)
from forerun.models.execution.hidden_features import HiddenFeatures
from forerun.models.execution.timing import median_seconds

MAX_LISTED_TOKENS = 512  # of a batch that is laid out from lists

if TYPE_CHECKING:
    from forerun.models.cuda.graphs import GraphRunner
    from forerun.models.cuda.pending import PendingTokens
    from forerun.models.cuda.stack import Chains


@dataclass
class Span:
    """Tokens of one sequence that run now: its entries `first`, `first + 1`, ..., on its pages.

    Entries from `tree_first` on are nodes of a draft tree with these `parents` (ROOT: the entry before the tree). Nodes
    that ran in an earlier span are listed too, so that later ones can see them.
    """

    ids: list[int]
    first: int
    pages: array[int]
    logits_indices: Seq[int]  # which of the ids need logits
    tree_first: int = 0
    parents: list[int] = field(default_factory=list)
    known: Tensor | None = None  # [1, V] logits of its only token, which has run: nothing is left to do
    isolated: bool = False  # to be computed as if nothing else ran, where that makes a difference
    prompt: bool = False  # tokens of a prompt, not of an answer: other kernels, where bits must not depend on the batch

    @property
    def entries(self) -> range:
        return range(self.first, self.first + len(self.ids))

    @property
    def branches(self) -> bool:
        """Whether a token must not see some entry before it."""
        return any(parent != node - 1 for node, parent in enumerate(self.parents))

    def slot_array(self, page_size: int) -> np.ndarray:
        """`slots` of many tokens."""
        entries = np.arange(self.first, self.entries.stop)
        return np.array(self.pages, dtype=np.int64)[entries // page_size] * page_size + entries % page_size

    def slots(self, page_size: int) -> list[int]:
        """Where the entries lie in the pool."""
        return [self.pages[e // page_size] * page_size + e % page_size for e in self.entries]

    def positions(self) -> list[int]:
        """Depth decides the position of a node: nodes of different branches share one."""
        if not self.branches:
            return list(self.entries)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return [e if e < self.tree_first else self.tree_first + depths[e - self.tree_first] for e in self.entries]

    def ancestors(self) -> list[int]:
        """For each id the nodes it sees, itself included, as a set of bits; 0 before the tree."""
        sets: list[int] = []
        for node, parent in enumerate(self.parents):
            sets.append((0 if parent == ROOT else sets[parent]) | 1 << node)
        return [0 if e < self.tree_first else sets[e - self.tree_first] for e in self.entries]


class Runner:
    """Runs batches on one decoder and its K/V; on CUDA as captured graphs where one fits."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        max_context: int,
        kv: KV | None = None,
        plain: bool = False,
        is_draft: bool = False,
    ) -> None:
        """`kv`: the decoder's plane of the pool, where it is not the pool's own model. `plain`: nothing is captured,
        for layers that are not ours. `is_draft`: prompts are recorded though no bits are promised."""
        self.decoder, self.pool, self.kv = decoder, pool, pool.kv if kv is None else kv
        self.features: HiddenFeatures | None = None  # what a drafter reads of every token that runs
        self.graphs: GraphRunner | None = None
        if decoder.device.type == "cuda" and decoder.dtype == torch.bfloat16 and not plain:
            from forerun.models.cuda.graphs import GraphRunner

            self.graphs = GraphRunner(decoder, self.kv, max_context, pool.page_size)
        self.splits_batches = self.graphs is not None  # whether prompts and decoding rows run apart
        self._split: Callable[[Seq[Span]], list[list[int]]] = split_spans
        promised = self.graphs is not None and self.graphs.batch_invariant is not False
        self.prompts_apart = promised or (is_draft and self.graphs is not None)
        if self.graphs is not None and promised:
            self._split = InvariantSplit(self.graphs.decoding_rows, self.graphs.batch_invariant is True)

    @contextmanager
    def host_threads(self) -> Iterator[None]:
        """Where the C kernels have threads of their own, torch has one: its others would spin on the same cores. Set
        through the extension module: other engines forbid it to themselves under the public name."""
        before = torch.get_num_threads()
        if before == 1 or not isinstance(self.decoder.attention, PagedCpuAttention):
            yield
            return
        torch._C.set_num_threads(1)  # takes a tenth of a microsecond
        try:
            yield
        finally:
            torch._C.set_num_threads(before)

    @cached_property
    def all_layers_kv(self) -> AllLayersKV:
        """K/V of all layers at once."""
        return make_all_layers_kv(self.decoder, self.kv)

    def forward(
        self,
        spans: list[Span],
        taps: Taps | None = None,
        blocks: Seq[int] | None = None,
        watch: Watch | None = None,
        wait: bool = True,
    ) -> Output:
        """Logits [N, V] of the wanted tokens, in their order; `blocks`: of a forward that runs these only. `wait`:
        False where only what follows on the device reads them, not the host."""
        whole = taps is None and blocks is None and watch is None
        if len(spans) == 1 and spans[0].known is not None:
            return Output(spans[0].known)
        apart = whole and len(spans) > 1 and (self.splits_batches or any(span.known is not None for span in spans))
        parts = self._split(spans) if apart else []
        if len(parts) > 1:
            *firsts, last = ([spans[number] for number in part] for part in parts)
            outputs = [clone_output(self.forward(part)) for part in firsts]
            return join_outputs(spans, parts, [*outputs, self.forward(last)])
        batch = self.batch(spans)
        features = self.features if whole else None
        batch.prompt = whole and self.prompts_apart and all(span.prompt for span in spans)
        output = self.graphs.run(batch, wait) if self.graphs is not None and whole else None
        if output is None and batch.prompt:
            output = self._run_prompts(batch, features)
        if output is None:
            taps = taps if features is None else features.taps
            output = self.decoder.forward(batch.to(self.decoder.device), self.kv, taps, blocks, watch)
        if features is not None:
            features.record(batch.slot_mapping, output.hidden)
        return output

    def read_hidden(self, features: HiddenFeatures) -> None:
        """From now on every token that runs leaves its vector; before any has run."""
        self.features = features
        if self.graphs is not None:
            self.graphs.leave_states(features.taps)

    @torch.inference_mode()
    def _run_prompts(self, batch: HostBatch, features: HiddenFeatures | None) -> Output:
        """Prompts that no recording fits, with as many rows as equal bits need. In the last layer tokens whose logits
        are not wanted only leave their K/V, unless its output is read."""
        assert self.graphs is not None
        decoder, kv, min_rows = self.decoder, self.kv, self.graphs.prompts.min_rows
        device, last, wanted = decoder.device, decoder.config.num_layers - 1, batch.logits_indices
        sent = batch.padded(min_rows).to(device)
        decoder.attention.plan(sent)
        output = Output(torch.empty(0, decoder.config.vocab_size, device=device))
        taps = None if features is None else features.taps
        x = decoder.run_layers(decoder.embed(sent.tokens), sent, kv, range(last), taps, output)
        if taps is not None and last + 1 in taps.hidden:
            output.hidden[last + 1] = decoder.hidden(decoder.run_layers(x, sent, kv, range(last, last + 1)))
        else:
            decoder.write_kv(x, last, kv)
        output.hidden = {depth: state[: len(batch.tokens)] for depth, state in output.hidden.items()}
        if not wanted:
            return output
        few = batch.only_wanted().padded(min_rows)
        sent = few.to(device)
        rows = send(np.array([*wanted, *[0] * (len(few.tokens) - len(wanted))], dtype=np.int64), device)
        decoder.attention.plan(sent)
        x = decoder.run_layers(x.index_select(0, rows), sent, kv, range(last, last + 1))
        output.logits = decoder.logits(x[: max(len(wanted), MIN_HEAD_ROWS)])[: len(wanted)]
        return output

    @torch.inference_mode()
    def resume(self, span: Span, x: Tensor, layer: int) -> None:
        """Tokens that ran through the layers below `layer` run through the others: x [tokens, hidden] comes in there.
        Leaves their K/V and nothing else."""
        batch = self.batch([span]).to(self.decoder.device)
        self.decoder.attention.plan(batch)
        self.decoder.run_layers(x, batch, self.kv, range(layer, self.decoder.config.num_layers))

    def launch(
        self,
        tokens: np.ndarray,
        entries: np.ndarray,
        pages: list[np.ndarray],
        choose: Callable[[Tensor, int], Tensor] | None = None,
    ) -> PendingTokens | None:
        """Enqueue one token of each sequence, at its entry [S] in the last of its pages, without waiting for what
        follows: the likeliest ones, or those that `choose` finds on the device from the logits [rows, V] of sequences
        from a given one on. A negative token is what the launch before has chosen for row -1 - token. None where the
        device or the batch does not allow it."""
        if self.graphs is None:
            return None
        size, count = self.pool.page_size, len(tokens)
        slots = np.array([own[-1] for own in pages], dtype=np.int64) * size  # an entry is in the last of its pages
        batch = HostBatch(
            tokens=tokens,
            positions=entries,
            slot_mapping=slots + entries % size,
            kv_lens=(entries + 1).astype(np.int32),
            cu_seqlens=list(range(count + 1)),
            seq_lens=(entries + 1).tolist(),
            pages=pages,
            page_size=size,
            logits_indices=list(range(count)),
        )
        pending = self.graphs.launch(batch, choose)
        if pending is not None and self.features is not None:
            states = {depth: state[:count] for depth, state in self.graphs.states.items()}
            self.features.record(batch.slot_mapping, states)
        return pending

    @property
    def can_launch(self) -> bool:
        """Whether `launch` can be asked."""
        return self.graphs is not None

    @property
    def launches_prompts(self) -> bool:
        """Whether a forward of prompts returns before the device has run it, to `choose_later` from its logits."""
        return self.graphs is not None and self.prompts_apart

    def choose_later(self, logits: Tensor, choose: Callable[[Tensor, int], Tensor] | None = None) -> PendingTokens:
        """The likeliest tokens of logits [N, V], or those that `choose` finds, once the device has come to them."""
        from forerun.models.cuda.pending import choose_later

        return choose_later(logits, choose)

    @property
    def launches(self) -> int:
        """Launches so far that leave what they chose on the device, over what the one before had left."""
        return 0 if self.graphs is None else self.graphs.launches

    def most_rows(self, sequences: int) -> int:
        """Tokens of a forward up to which it runs without compiling or capturing anything new; a CPU has no limit."""
        return 1 << 20 if self.graphs is None else self.graphs.most_rows(sequences)

    @property
    def decoding_rows(self) -> int | None:
        """Rows of a forward up to which each gets the bits that decoding one by one would give it; None: any number,
        and prompts are no exception."""
        return None if self.graphs is None else self.graphs.decoding_rows

    @property
    def equal_bits(self) -> bool:
        """Whether, on CUDA, a token gets the same bits in every batch and as a draft: answers never part at a tie."""
        graphs = self.graphs
        return graphs is not None and graphs.batch_invariant is True and graphs.stack is not None

    def joins_decoding(self, tokens: int, prompt: bool) -> bool:
        """Whether a span of so many tokens counts among `decoding_rows`, as it runs in the launch of those that
        decode."""
        return not prompt if self.prompts_apart else tokens <= MAX_DECODE_TOKENS

    @property
    def can_chain(self) -> bool:
        """Whether greedy continuations can run in one launch."""
        return self.graphs is not None and self.graphs.can_chain

    def chains(self, spans: list[Span], depth: int, least: Seq[float]) -> Chains | None:
        """Greedy continuations of all spans in one launch; None where the device or the decoder cannot."""
        return None if self.graphs is None else self.graphs.chains(self.batch(spans), depth, least)

    def drafted_steps(self, draft: Runner, mask: int, least: float) -> DraftedDevice | None:
        """Steps with drafts of several tokens in one forward of this draft model, without the host between them; None
        where no device does that. `mask`: its token for one to come; `least`: see `DraftedSteps`."""
        if self.graphs is None or draft.graphs is None:
            return None
        from forerun.models.cuda.drafted_steps import DraftedSteps

        if not DraftedSteps.can_run(self.graphs, draft.graphs):
            return None
        return DraftedSteps(self.graphs, draft.graphs, mask, self.decoder.config.vocab_size, least)

    def tail_attention(self, span: Span) -> np.ndarray | None:
        """How much the tokens of a span look at each entry of their sequence up to the last of them, [entries] float32:
        mean over tokens, heads and all layers but the last. Leaves their K/V; None where no device does it at once."""
        return None if self.graphs is None else self.graphs.tail_attention(self.batch([span]))

    @property
    def max_recompute_rows(self) -> int:
        """Rows of one sequence that a device runs through all layers at once with `recompute`; 0: it does not."""
        return 0 if self.graphs is None else self.graphs.recompute_runner.most

    def recompute(self, batch: HostBatch, picks: np.ndarray) -> RecomputePass | None:
        """Rows of one sequence through all layers, which leaves their K/V; what the picks among them met and what
        follows the last one, until the next such pass. None where no device does it at once."""
        return None if self.graphs is None else self.graphs.recompute_runner.run(batch, picks)

    def prepare_recompute(self) -> None:
        """Record the passes of `recompute` now, so that no prompt waits for it."""
        if self.graphs is not None:
            self.graphs.recompute_runner.prepare()

    def warmed_up(self) -> None:
        """From now on `recorded` records nothing new."""
        if self.graphs is not None:
            self.graphs.recorder.open = False

    def recorded(self, key: tuple[Any, ...], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`; a device that can replays what it did when it was warmed up with this key and these
        shapes, and overwrites what it returned then."""
        return function(*inputs) if self.graphs is None else self.graphs.recorder(key, function, inputs)

    def batch(self, spans: list[Span]) -> HostBatch:
        """Lay spans out one after the other."""
        starts = [0, *itertools.accumulate(len(span.ids) for span in spans)]
        if starts[-1] > MAX_LISTED_TOKENS:
            entries = np.concatenate([np.arange(span.first, span.entries.stop) for span in spans])
            positions = [np.array(s.positions()) if s.branches else np.arange(s.first, s.entries.stop) for s in spans]
            slots = [span.slot_array(self.pool.page_size) for span in spans]
            given = np.concatenate(positions), np.concatenate(slots), (entries + 1).astype(np.int32)
        else:  # most spans are one token: plain integers cost less than arrays
            given = (
                np.array([p for span in spans for p in span.positions()], dtype=np.int64),
                np.array([slot for span in spans for slot in span.slots(self.pool.page_size)], dtype=np.int64),
                np.array([e + 1 for span in spans for e in span.entries], dtype=np.int32),
            )
        batch = HostBatch(
            tokens=np.concatenate([np.array(span.ids, dtype=np.int64) for span in spans])
            if starts[-1] > MAX_LISTED_TOKENS
            else np.array([t for span in spans for t in span.ids], dtype=np.int64),
            positions=given[0],
            slot_mapping=given[1],
            kv_lens=given[2],
            cu_seqlens=starts,
            seq_lens=[span.first + len(span.ids) for span in spans],
            pages=[np.array(span.pages, dtype=np.int32) for span in spans],
            page_size=self.pool.page_size,
            logits_indices=[start + w for start, span in zip(starts, spans, strict=False) for w in span.logits_indices],
        )
        if any(span.branches for span in spans):
            self._add_trees(batch, spans)
        return batch

    @staticmethod
    def _add_trees(batch: HostBatch, spans: list[Span]) -> None:
        """Set bits for what the nodes of branching trees see; all other tokens go by `kv_lens` alone."""
        batch.bits = [b for span in spans for b in (span.ancestors() if span.branches else [0] * len(span.ids))]
        batch.tree_start = [span.tree_first if span.branches else 0 for span in spans]
        for start, span in zip(batch.cu_seqlens, spans, strict=False):
            if span.branches:
                own = slice(start, start + len(span.ids))
                batch.kv_lens[own] = np.minimum(batch.kv_lens[own], span.tree_first)

    def warm_up(self) -> None:
        """Compile what a device compiles at the first forward of a kind, so that no request waits for it."""
        if self.graphs is None:
            return
        limit = min(self.pool.free * self.pool.page_size, self.graphs.max_context) - 1
        for tokens, branches in ((20, 0), (20, 8), (40, 0), (40, 20), (64, 0), (64, 30), (72, 0), (80, 0), (512, 0)):
            for context in (0, 100):
                if context + tokens < limit:
                    self.time_forward(tokens, context, 0, branches)
        if self.prompts_apart:
            self.graphs.prepare()
        with self.pool.borrow(1) as pages:
            self.chains([Span([0] * 3, 5, pages, (2,))], 4, ())

    def move(self, pages: array[int], source: list[int], target: list[int]) -> None:
        """Copy K/V of a sequence's entries to other entries of it: an accepted branch becomes its continuation."""
        size = self.pool.page_size
        slots = [[pages[e // size] * size + e % size for e in entries] for entries in (source, target)]
        if self.features is not None:
            self.features.move(*slots)
        if self.graphs is not None:
            self.graphs.move(*slots)
            return
        src, dst = (torch.tensor(s, device=self.decoder.device) for s in slots)
        for layer in self.kv:
            for cache in layer:
                cache[dst] = cache[src]

    def score(self, ids: list[int], chunk: int) -> Tensor:
        """Logits at every position of a text, [len(ids), V] float32, on pages borrowed from the pool."""
        parts = []
        with self.pool.borrow(len(ids)) as pages:
            for lo in range(0, len(ids), chunk):
                part = ids[lo : lo + chunk]
                logits = self.forward([Span(part, lo, pages, range(len(part)), prompt=True)]).logits
                parts.append(logits.clone())  # the next forward may reuse their memory
        return torch.cat(parts)

    def time_forward(
        self,
        tokens: int,
        context: int,
        repeats: int = 5,
        branches: int = 0,
        blocks: Seq[int] | None = None,
        prompt: bool = False,
    ) -> float:
        """Median seconds of one forward of `tokens` new tokens of one sequence after `context` others; the last
        `branches` of them are branches of a tree. `blocks`: of a forward that runs these only. `prompt`: as tokens of a
        prompt, of which the last one's logits are wanted."""
        if self.pool.pages_for(context + tokens) > self.pool.free:
            raise OutOfPages(
                f"timing {tokens} tokens after {context} needs {self.pool.pages_for(context + tokens)} pages, "
                f"{self.pool.free} are free",
                "ask again when fewer requests run, or raise kv_cache_tokens",
            )
        with self.pool.borrow(context + tokens) as pages:
            span = Span([0] * tokens, context, pages, range(tokens), context + tokens - branches, [ROOT] * branches)
            if prompt:
                span = Span([0] * tokens, context, pages, (tokens - 1,), prompt=True)
            # reading one value waits for the device
            return median_seconds(lambda: self.forward([span], blocks=blocks).logits[-1, 0].item(), repeats)
