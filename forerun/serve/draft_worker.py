"""The model side of a draft server: sequences of any number of targets, their K/V, and rounds for all that wait.

One thread runs the draft model. Orders are submitted from another; a later order of a sequence replaces an earlier one,
also while that is drafted: it ends with the round that runs. Targets roll back what they assumed and was not accepted.
Where the pool has no room, sequences that were not drafted for the longest time are read again when they next are.
A model that a drafter was trained for gives all of a tree in one round.
Knows no connection and no bytes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun.cache.pool import DraftKV
from forerun.core import ROOT, Draft
from forerun.decode.control.cost import ServerRounds
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.drafters.base import DraftRequest
from forerun.decode.drafters.best_first import Marginals
from forerun.decode.drafters.model import ModelDrafter
from forerun.decode.drafters.parallel import ParallelDrafter
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.decode.remote.protocol import (
    Distribution,
    DraftOrder,
    Forgot,
    Refused,
    Tree,
    quantised_weights,
)
from forerun.decode.sampling import Context
from forerun.llm import LLM
from forerun.models.formats.adapter import draft_for_any
from forerun.models.formats.checkpoint import Checkpoint
from forerun.params import SamplingParams

log = logging.getLogger("forerun.serve")

MAX_BATCH = 16  # sequences that one round drafts for
SHARED_DEPTH = 4  # of a tree, after which it ends while other sequences wait
ENTROPY_TOKENS = 8  # most probable tokens that an entropy is estimated from
# The least probability that a token is accepted, by the entropy of its distribution: 1 - sqrt(0.2 H) (AdaEDL)
ENTROPY_FACTOR = 0.2

Reply = Callable[[Tree | Forgot | Refused], None]


class DraftingLLM(LLM):
    """A model that is opened as the draft model of a target is, in another process: faster, as its guesses are checked.
    Of a large vocabulary it guesses the frequent tokens and those that its sequences have; where a drafter was trained
    for it, it drafts several tokens in one forward."""

    _is_draft = True

    def __init__(self, model: str | Path | Checkpoint, **options: Any) -> None:
        checkpoint = draft_for_any(model)
        self.parallel, self.markov = (getattr(checkpoint, name, None) for name in ("parallel", "markov"))
        super().__init__(checkpoint, **options)


@dataclass(eq=False)
class ServedSequence:
    """One sequence of one target."""

    seq_id: int
    key: tuple[Hashable, int]  # target, its own number of the sequence
    vocab_size: int
    reply: Reply
    known: list[int] = field(default_factory=list)  # tokens of the latest order
    order: DraftOrder | None = None  # not answered yet
    arrived: float = 0.0
    same: int = 0  # first tokens that are as they were when it was last drafted for
    pages: array[int] = field(default_factory=lambda: array("i"))
    used: float = 0.0  # when it was last drafted for
    distributions: dict[int, Distribution] = field(default_factory=dict)  # of the tree that grows
    entropies: dict[int, float] = field(default_factory=dict)

    def tell(self, node: int, law: list[tuple[int, float]], order: DraftOrder) -> None:
        """What is drawn from after a node: its most probable tokens with their probabilities."""
        if law:
            weights = quantised_weights([p for _, p in law], order.prob_bits)
            self.distributions[node] = Distribution([token for token, _ in law], weights)


class ServedModel(ModelDrafter):
    """A draft model alone with its pages, for sequences of targets elsewhere."""

    name = "served"

    def __init__(self, ctx: DraftContext) -> None:
        super().__init__(ctx)
        self.running: dict[int, tuple[ServedSequence, DraftOrder]] = {}

    def rewind(self, seq_id: int, common: int) -> None:
        """Only the first `common` tokens of a sequence are as they were."""
        state = self._states.get(seq_id)
        if state is not None and common < state.valid:
            state.valid, state.run = common, []

    def drop(self, seq_id: int, pages: array[int]) -> None:
        self._states.pop(seq_id, None)
        self._draft_kv.filled[pages] = 0


class ServedBlock(ServedModel, ParallelDrafter):
    """All of a tree in one forward, of a model that was trained for it."""

    def _grow(self, tree: TreeBuilder, marginals: Marginals) -> None:
        super()._grow(tree, marginals)
        sequence, order = self.running[tree.request.seq_id]
        if not order.top_tokens:
            return
        heat, last = order.temperature or 1.0, tree.request.tokens[-1]
        for node in (ROOT, *range(len(tree.draft))):
            depth, before = (0, last) if node == ROOT else (tree.depth[node], tree.draft.tokens[node])
            if depth < marginals.depth:
                row = marginals.row(depth, before)[: sequence.vocab_size]
                top = torch.softmax(row / heat, -1).topk(min(order.top_tokens, len(row)))
                law = [
                    (token, p) for token, p in zip(top.indices.tolist(), top.values.tolist(), strict=True) if p > 0.0
                ]
                sequence.tell(node, law, order)


class ServedDrafter(ServedModel):
    """A token a round: stops when a target does not wait any more, and by entropy."""

    def __init__(
        self, ctx: DraftContext, should_stop: Callable[[ServedSequence, DraftOrder, float, int], bool]
    ) -> None:
        super().__init__(ctx)
        self._should_stop = should_stop

    def _grow_chains(self, ready: list[TreeBuilder]) -> bool:
        wanted = any(self.running[tree.request.seq_id][1].top_tokens for tree in ready)
        return not wanted and super()._grow_chains(ready)

    def _next_nodes(self, tree: TreeBuilder) -> list[int]:
        sequence, order = self.running[tree.request.seq_id]
        best = max(tree.open_nodes(), key=lambda n: tree.path[n], default=None)
        if best is None:
            return []
        parent = tree.draft.parents[best]
        above, entropy = 1.0 if parent == ROOT else tree.path[parent], sequence.entropies.get(parent, 0.0)
        by_entropy = above * max(0.0, 1.0 - math.sqrt(ENTROPY_FACTOR * entropy))
        if min(tree.path[best], by_entropy) < order.min_prob:
            return []
        if self._should_stop(sequence, order, tree.path[best], tree.depth[best]):
            return []
        return super()._next_nodes(tree)

    def _expand(self, tree: TreeBuilder, nodes: list[int], logits: torch.Tensor) -> None:
        sequence, order = self.running[tree.request.seq_id]
        probs = self._probs(tree, nodes, logits[:, : sequence.vocab_size])
        count = min(probs.shape[-1], max(self.children, ENTROPY_TOKENS, order.top_tokens))
        top = probs.topk(count, -1)
        for node, tokens, values in zip(nodes, top.indices.tolist(), top.values.tolist(), strict=True):
            tree.add_most_probable(node, tokens[: self.children], values[: self.children])
            sequence.entropies[node] = _entropy(values[:ENTROPY_TOKENS])
            law = [(token, p) for token, p in zip(tokens, values, strict=True) if p > 0.0][: order.top_tokens]
            sequence.tell(node, law, order)


def _entropy(values: list[float]) -> float:
    """At least so many nats: tokens that are not among these count as one."""
    parts = [*values, max(0.0, 1.0 - sum(values))]
    return -sum(p * math.log(p) for p in parts if p > 0.0)


class DraftWorker:
    """`max_sequences` may be open at once."""

    def __init__(self, llm: LLM, max_sequences: int) -> None:
        engine = llm.engine
        self.max_sequences, self.max_context = max_sequences, min(engine.max_length, engine.config.max_model_len)
        self._pool = engine.pool
        trained = (getattr(llm, "parallel", None), getattr(llm, "markov", None))
        model = DraftModel(llm.decoder, engine.tokenizer, True, llm.model, *trained)
        ctx = DraftContext(self._pool, engine.runner, engine.tokenizer, self.max_context, model, engine.runner)
        ctx.draft_kv = DraftKV(self._pool.kv, self._pool.num_pages)
        self._drafter: ServedModel = ServedDrafter(ctx, self._should_stop) if trained[0] is None else ServedBlock(ctx)
        engine.clear_cache()  # all pages are for drafts
        self.rounds, curve = ServerRounds(self._drafter.tokens_per_round), engine.speculator.controller.target
        self.round_s = curve.seconds(1)
        if (most := self.rounds.tokens) > 1:
            self.rounds = ServerRounds(most, (curve.seconds(most) / self.round_s - 1.0) / (most - 1))
        self.outcomes = dict(self._drafter.outcomes)
        self._changed = threading.Condition()
        self._sequences: dict[tuple[Hashable, int], ServedSequence] = {}
        self._ended: list[ServedSequence] = []  # whose pages are still theirs
        self._ids = 0
        self._closed = False
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="draft model", daemon=True)
        self.trees = self.num_rounds = 0  # so far

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    # -- from the connections' thread ----------------------------------------------------------------------------------

    def submit(self, target: Hashable, order: DraftOrder, vocab_size: int, reply: Reply) -> None:
        with self._changed:
            key = (target, order.seq)
            sequence = self._sequences.get(key)
            if sequence is None and order.kept:
                return reply(Forgot(order.seq, order.version))
            if sequence is None and len(self._sequences) >= self.max_sequences:
                return reply(Refused(order.seq, order.version, f"{self.max_sequences} sequences are open, the limit"))
            length = order.kept + len(order.tokens)
            if length + max(order.depth, order.nodes) >= self.max_context:
                return reply(Refused(order.seq, order.version, f"{length} tokens, the context is {self.max_context}"))
            if sequence is None:
                self._ids += 1
                sequence = self._sequences[key] = ServedSequence(self._ids, key, vocab_size, reply)
            if order.kept > len(sequence.known):
                return reply(Forgot(order.seq, order.version))
            sequence.known = sequence.known[: order.kept] + order.tokens
            sequence.same = min(sequence.same, order.kept)
            sequence.order, sequence.arrived = order, time.monotonic()
            self._changed.notify()

    def cancel(self, target: Hashable, seq: int, version: int) -> None:
        with self._changed:
            sequence = self._sequences.get((target, seq))
            if sequence is not None and sequence.order is not None and sequence.order.version == version:
                sequence.order = None

    def close(self, target: Hashable, seq: int | None = None) -> None:
        """A sequence ended; None: all of a target's."""
        with self._changed:
            for key in [key for key in self._sequences if key[0] == target and seq in (None, key[1])]:
                ended = self._sequences.pop(key)
                ended.order = None
                self._ended.append(ended)
            self._changed.notify()

    # -- the thread that drafts ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ended or self._waiting())
                if self._closed:
                    return
                ended, self._ended = self._ended, []
                waiting = sorted(self._waiting(), key=lambda s: s.used)[:MAX_BATCH]
                batch = [(s, order, s.known) for s in waiting if (order := s.order) is not None]
                for sequence in waiting:
                    self._drafter.rewind(sequence.seq_id, sequence.same)
                    sequence.same, sequence.used = len(sequence.known), time.monotonic()
            for sequence in ended:
                self._release(sequence)
            if batch:
                try:
                    self._draft(batch)
                except Exception as error:  # of these orders: their targets go on without drafts
                    log.error("drafting failed", exc_info=error)
                    for sequence, order, _ in batch:
                        self._finish(sequence, order, Refused(order.seq, order.version, "drafting failed"))

    def _waiting(self) -> list[ServedSequence]:
        return [sequence for sequence in self._sequences.values() if sequence.order is not None]

    def _should_stop(self, sequence: ServedSequence, order: DraftOrder, prob: float, depth: int) -> bool:
        """Called before every round of a tree."""
        if sequence.order is not order or self._closed:
            return True
        if depth >= SHARED_DEPTH and len(self._waiting_beside()) > 0:
            return True
        return prob < order.paid_prob and time.monotonic() - sequence.arrived > order.free_ms / 1000.0

    def _waiting_beside(self) -> list[ServedSequence]:
        running = {sequence.seq_id for sequence, _ in self._drafter.running.values()}
        with self._changed:
            return [sequence for sequence in self._waiting() if sequence.seq_id not in running]

    def _draft(self, batch: list[tuple[ServedSequence, DraftOrder, list[int]]]) -> None:
        requests, running = [], []
        for sequence, order, tokens in batch:
            if not self._make_room(sequence, len(tokens) + order.nodes + 1, batch):
                self._finish(sequence, order, Refused(order.seq, order.version, "no room for its K/V"))
                continue
            sequence.distributions, sequence.entropies = {}, {}
            context = Context(SamplingParams(order.temperature), tokens, len(tokens), seed=0)
            # Rounds of single tokens end where others wait; one of several is as long as it was begun
            depth = min(order.depth, SHARED_DEPTH) if self.rounds.tokens > 1 and len(batch) > 1 else order.depth
            request = DraftRequest(sequence.seq_id, context, depth, order.nodes, sequence.pages)
            request.min_path_probs = [max(order.min_prob, order.paid_prob)] * depth
            requests.append(request)
            running.append((sequence, order, request))
        self._drafter.running = {sequence.seq_id: (sequence, order) for sequence, order, _ in running}
        drafts = self._drafter.propose(requests)
        self._drafter.running = {}
        for (sequence, order, request), draft in zip(running, drafts, strict=True):
            if len(draft) or self._drafter.catch_up_tokens(request) <= self._drafter.max_unread_tokens:
                self._finish(
                    sequence, order, self._tree(sequence, order, draft, request.max_depth)
                )  # else a long prompt is not read yet

    def _tree(self, sequence: ServedSequence, order: DraftOrder, draft: Draft, depth: int) -> Tree:
        """What is worth sending of a draft: no path that is not worth verifying."""
        rounds = self._drafter.rounds
        if rounds:  # a round of several tokens as one for one token
            each = [r.seconds / self.rounds.seconds(min(depth, self.rounds.tokens), 1.0) for r in rounds]
            self.round_s += 0.1 * (sum(each) / len(each) - self.round_s)
        tree = Tree(order.seq, order.version, 0, round(self.round_s * 1e6), prob_bits=order.prob_bits)
        places, paths = {ROOT: ROOT}, {ROOT: 1.0}
        for node, (token, parent, prob) in enumerate(zip(draft.tokens, draft.parents, draft.probs, strict=True)):
            path = paths.get(parent, 0.0) * prob
            fits = len(tree.tokens) < order.nodes and token < sequence.vocab_size
            if parent in places and fits and (path >= order.min_prob or not tree.tokens):
                places[node], paths[node] = len(tree.tokens), path
                tree.tokens.append(token)
                tree.parents.append(places[parent])
                tree.probs.append(prob)
        tree.distributions = {places[n]: law for n, law in sequence.distributions.items() if n in places}
        tree.server_us = min(round(1e6 * (time.monotonic() - sequence.arrived)), (1 << 32) - 1)
        self.trees, self.num_rounds = self.trees + 1, self.num_rounds + len(rounds)
        return tree

    def _finish(self, sequence: ServedSequence, order: DraftOrder, answer: Tree | Refused) -> None:
        with self._changed:
            if sequence.order is not order:
                return  # it was replaced or cancelled
            sequence.order = None
        sequence.reply(answer)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _make_room(
        self, sequence: ServedSequence, entries: int, batch: list[tuple[ServedSequence, DraftOrder, list[int]]]
    ) -> bool:
        pool, missing = self._pool, self._pool.pages_for(entries) - len(sequence.pages)
        if missing <= 0:
            return True
        busy = {s.seq_id for s, _, _ in batch}
        with self._changed:
            idle = sorted((s for s in self._sequences.values() if s.seq_id not in busy), key=lambda s: s.used)
        while missing > pool.free and idle:
            self._release(idle.pop(0))
        if missing > pool.free:
            return False
        sequence.pages.extend(pool.allocate(missing, sequence.pages[-1] if sequence.pages else None))
        return True

    def _release(self, sequence: ServedSequence) -> None:
        """Its K/V is gone; it is read again where it is drafted for again."""
        self._drafter.drop(sequence.seq_id, sequence.pages)
        self._pool.release(sequence.pages)
        sequence.pages = array("i")
