"""A draft model with the target's tokenizer: grows a tree, surest nodes first, one forward of the draft a round.

Its K/V lies on a plane of the target's own pages, so shared prefixes are shared for both models and nothing is outside
the pool's budget. What free drafters offered is scored in the first round's forward along with the rest: a guess that
the draft model agrees with saves it rounds of its own (a cascade). Knows no verifier and no target.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core import ROOT, Draft
from forerun.decode.drafters.base import Ask, Drafter, register
from forerun.decode.sampling import Row, distribution, shape
from forerun.decode.target import DRAFTING, SeededDice
from forerun.decode.workshop import Workshop
from forerun.errors import BadRequest
from forerun.models.runner import Span

CATCH_UP = 512  # tokens of a prompt that are prefilled in one step at most, so that others do not wait for all of it
LEAST = 0.02  # children less likely than this are not worth naming beside the likeliest
SCORED = 7  # offered tokens that are scored in the first round
SIDE = 0.25  # further nodes run in a round if their path is this likely


@dataclass
class _State:
    """What the draft model has computed for one sequence."""

    pages: array[int]
    valid: int  # entries of the sequence's own tokens that have K/V
    run: list[int] = field(default_factory=list)  # tokens that ran after those, in consecutive entries


@dataclass
class _Growth:
    """One tree in the making. Nodes in `entries` have run; their place there is their entry after the sequence."""

    ask: Ask
    state: _State
    source: str
    draft: Draft = field(default_factory=Draft)
    path: list[float] = field(default_factory=list)  # chance that each node is reached and accepted
    depth: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    def add(self, token: int, parent: int, chance: float) -> int:
        self.path.append(chance if parent == ROOT else self.path[parent] * chance)
        self.depth.append(1 if parent == ROOT else self.depth[parent] + 1)
        return self.draft.add(token, parent, chance, self.source)

    def row(self, node: int) -> Row:
        return Row(self.ask.context, [self.draft.tokens[i] for i in self.draft.path(node)])

    def straight(self) -> list[int]:
        """Tokens that ran in consecutive entries, each the child of the one before: what may come true in place."""
        tokens, last = [], ROOT
        for node in self.entries:
            if self.draft.parents[node] != last:
                break
            tokens.append(self.draft.tokens[node])
            last = node
        return tokens

    def parents(self, nodes: list[int]) -> list[int]:
        """Parents as places among the entries, for nodes that ran or are about to."""
        place = {node: i for i, node in enumerate([*self.entries, *nodes])}
        return [place.get(self.draft.parents[n], ROOT) for n in (*self.entries, *nodes)]


@register
class ModelDrafter(Drafter):
    name = "model"
    free = False
    side_branches = 2  # nodes beside the surest that may run in a round
    children = 3  # likeliest tokens that become children of a node

    def __init__(self, workshop: Workshop) -> None:
        assert workshop.draft_runner is not None
        self._runner, self._pool = workshop.draft_runner, workshop.pool
        self._plane = next(p for p in workshop.pool.planes if p.kv is self._runner.kv)
        self._states: dict[int, _State] = {}

    @classmethod
    def problem(cls, workshop: Workshop) -> BadRequest | None:
        if workshop.draft is None:
            return BadRequest(f"the drafter {cls.name!r} needs a draft model", "open the model with draft=...")
        if not workshop.draft.same_tokens:
            return BadRequest(
                f"the tokens of {workshop.draft.source} are not the target's, so their ids mean different text",
                "use the drafter `cross`, which goes through the text",
            )
        return None

    # -- the contract --------------------------------------------------------------------------------------------------

    def propose(self, asks: list[Ask]) -> list[Draft]:
        grown = [_Growth(ask, self._state(ask), self.name) for ask in asks]
        ready = [g for g in grown if self._catch_up(g)]
        self._first_round(ready)
        while growing := [(g, nodes) for g in ready if (nodes := self._next_nodes(g))]:
            self._round(growing)
        for g in ready:
            g.state.run = g.straight()
        return [g.draft for g in grown]

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        self._states.pop(seq_id, None)

    def time_round(self, tokens: int, context: int) -> float:
        return self._runner.time_forward(tokens, context, repeats=2)

    def behind(self, ask: Ask) -> int:
        """Tokens of a sequence that the draft model has not seen yet."""
        return len(ask.tokens) - self._state(ask).valid

    # -- catching up with the target -----------------------------------------------------------------------------------

    def _state(self, ask: Ask) -> _State:
        """What is computed for the tokens as they are now: drafts that came true stay, whole shared pages count."""
        state = self._states.get(ask.id)
        if state is None or state.pages is not ask.pages:
            state = self._states[ask.id] = _State(ask.pages, self._filled(ask.pages))
        for token in state.run:
            if state.valid >= len(ask.tokens) - 1 or ask.tokens[state.valid] != token:
                break
            state.valid += 1
        state.run = []
        state.valid = min(state.valid, len(ask.tokens) - 1)
        return state

    def _filled(self, pages: array[int]) -> int:
        size, whole = self._pool.page_size, 0
        while whole < len(pages) and self._plane.filled[pages[whole]] == size:
            whole += 1
        return whole * size

    def _catch_up(self, growth: _Growth) -> bool:
        """Run all but the last few missing tokens; False where a long prompt needs another step."""
        state, tokens = growth.state, growth.ask.tokens
        missing = len(tokens) - state.valid
        if missing > SCORED + 1:
            count = min(missing - 1, CATCH_UP)
            self._runner.forward([Span(tokens[state.valid : state.valid + count], state.valid, state.pages, ())])
            self._advance(state, state.valid + count)
        return len(tokens) - state.valid <= SCORED + 1

    def _advance(self, state: _State, valid: int) -> None:
        size = self._pool.page_size
        for page in range(state.valid // size, valid // size):
            self._plane.filled[state.pages[page]] = size
        state.valid = valid

    # -- growing -------------------------------------------------------------------------------------------------------

    def _first_round(self, ready: list[_Growth]) -> None:
        """The tokens the draft has not seen, and what was offered after them."""
        spans = []
        for g in ready:
            tokens, valid = g.ask.tokens, g.state.valid
            offered = [] if g.ask.at_random else self._take_offer(g)
            ids = [*tokens[valid:], *(g.draft.tokens[n] for n in offered)]
            last = len(tokens) - valid - 1
            spans.append(Span(ids, valid, g.state.pages, range(last, len(ids)), len(tokens), g.parents(offered)))
            g.entries += offered
        if not spans:
            return
        logits = self._runner.forward(spans).logits
        at = 0
        for g in ready:
            nodes = [ROOT, *g.entries]
            self._rescore(g, logits[at : at + len(nodes)])
            self._expand(g, nodes, logits[at : at + len(nodes)])
            self._advance(g.state, len(g.ask.tokens))
            at += len(nodes)

    def _take_offer(self, g: _Growth) -> list[int]:
        offer = g.ask.offered
        limit = min(SCORED, g.ask.nodes)
        chosen = range(min(limit, len(offer))) if offer is not None else range(0)
        places: dict[int, int] = {ROOT: ROOT}
        for node in chosen:  # parents come first, so a prefix of the nodes is a tree
            assert offer is not None
            places[node] = g.add(offer.tokens[node], places[offer.parents[node]], 1.0)
        return list(range(len(chosen)))

    def _rescore(self, g: _Growth, logits: Tensor) -> None:
        """Offered nodes get the chance that the draft model itself gives them."""
        if not g.entries:
            return
        probs = self._probs(g, [ROOT, *g.entries], logits)
        for node in g.entries:
            parent = g.draft.parents[node]
            chance = float(probs[parent + 1, g.draft.tokens[node]])
            g.draft.chances[node] = chance
            g.path[node] = chance if parent == ROOT else g.path[parent] * chance

    def _next_nodes(self, g: _Growth) -> list[int]:
        """Nodes whose children are worth another forward: the surest, and others that come along for little."""
        ran = set(g.entries)
        room = g.ask.nodes - len(g.entries)
        open_nodes = [n for n in range(len(g.draft)) if n not in ran and g.depth[n] < g.ask.depth]
        if room <= 0 or not open_nodes:
            return []
        best = sorted(open_nodes, key=lambda n: -g.path[n])[: min(1 + self.side_branches, room)]
        if g.ask.worth is not None and not g.ask.worth(g.path[best[0]], g.depth[best[0]]):
            return []
        return [n for n in best if n == best[0] or g.path[n] > SIDE]

    def _round(self, growing: list[tuple[_Growth, list[int]]]) -> None:
        spans = []
        for g, nodes in growing:
            first = len(g.ask.tokens) + len(g.entries)
            ids = [g.draft.tokens[n] for n in nodes]
            spans.append(Span(ids, first, g.state.pages, range(len(ids)), len(g.ask.tokens), g.parents(nodes)))
        logits = self._runner.forward(spans).logits
        at = 0
        for g, nodes in growing:
            g.entries += nodes
            self._expand(g, nodes, logits[at : at + len(nodes)])
            at += len(nodes)

    def _expand(self, g: _Growth, nodes: list[int], logits: Tensor) -> None:
        """Children of nodes that just ran: the likeliest tokens, or tokens drawn at random."""
        probs = self._probs(g, nodes, logits)  # [nodes, V]
        if g.ask.at_random:
            self._draw_children(g, nodes, probs)
            return
        top = probs.topk(self.children, -1)
        taken = set(zip(g.draft.parents, g.draft.tokens, strict=True))
        for node, tokens, chances in zip(nodes, top.indices.tolist(), top.values.tolist(), strict=True):
            for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
                if (rank == 0 or chance >= LEAST) and (node, token) not in taken:
                    g.add(token, node, chance)

    def _probs(self, g: _Growth, nodes: list[int], logits: Tensor) -> Tensor:
        """The draft's distribution, penalties, grammar and temperature included."""
        params = g.ask.context.params
        shaped = shape(logits, [g.row(node) for node in nodes]) if g.ask.context.shaped else logits
        if g.ask.at_random:
            return distribution(shaped, [params] * len(nodes))
        return torch.softmax(shaped if params.greedy else shaped / params.temperature, -1)

    def _draw_children(self, g: _Growth, nodes: list[int], probs: Tensor) -> None:
        """Children drawn without replacement. How many is settled before the first is drawn: choosing by what came out
        would change their distribution."""
        position = len(g.ask.tokens)
        for node, q in zip(nodes, probs, strict=True):
            depth = 0 if node == ROOT else g.depth[node]
            dice = SeededDice(g.ask.context.seed, position, DRAFTING + ((node + 2) << 40))
            count = min(max(1, self.children - depth), int((q > 0).sum()))
            if len(g.draft) + count > g.ask.nodes:
                break
            rest = q.double()
            for _ in range(count):
                token = dice.pick(rest)
                g.add(token, node, float(q[token]))
                rest = rest.clone()
                rest[token] = 0.0
            g.draft.proposals[node] = q


@register
class ChainDrafter(ModelDrafter):
    """The same model, one path only."""

    name = "model-chain"
    side_branches = 0
    children = 1
