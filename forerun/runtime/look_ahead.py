"""Look ahead for answers that are drawn from the model conditioned on a grammar: before such a request is queued.

A finite language is scored as a whole, each beginning once, in a few forwards over one tree; the engine then decodes
with the corrected distribution, with any drafter and verifier. Of a larger one, answers are drawn here by rejection;
the engine decodes what was drawn. Knows the driver and requests' parameters; not how tokens become text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.core import ROOT, ConditionalReport, SamplingParams
from forerun.decode.rejection_draws import Prefix, RejectionDraws
from forerun.decode.sampling import Context, Row, SeededRng, shape
from forerun.decode.trie import TokenTrie
from forerun.decode.trie_answer import ConditionalAnswer, NodeScores, TrieAnswer, rows_to_score, score_nodes
from forerun.engine.sequence import UNNAMED, Client, ConditionalStart
from forerun.runtime.answer_tree import MAX_FORWARD_NODES, AnswerTree

if TYPE_CHECKING:
    from forerun.runtime.driver import Driver

MAX_SCORED_NODES = 4096  # of a finite language: about 4 s on two cores with the default model
LOOK_AHEAD_STREAM = 3  # random numbers of answers that are drawn ahead


class LookAhead:
    """One request's. `end_ids`: the tokens that end an answer."""

    def __init__(
        self,
        driver: Driver,
        ids: list[int],
        params: SamplingParams,
        client: Client = UNNAMED,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver, self._ids, self._params = driver, ids, params
        self._client, self._check_cancelled = client if params.cache else None, check_cancelled
        self._intake = driver.engine.intake
        self._context = Context(params, ids, len(ids), 0)
        self._vocab = self._intake.model.vocab_size
        self.end_ids = self._intake.end_ids

    def run(self) -> list[ConditionalStart]:
        """One for each of the request's answers."""
        assert self._params.grammar is not None
        trie = self._intake.trie(self._params.grammar)
        start = time.perf_counter()
        with self._driver.lease(self._check_cancelled) as lease:
            tree = AnswerTree(lease, self._ids, self._client)
            if trie is not None and len(trie) <= MAX_SCORED_NODES:
                found = self._score(tree, trie)
            else:
                found = self._draw(tree, trie)
        for _, report in found:
            report.seconds = time.perf_counter() - start
        return found

    def logprobs(self, logits: Tensor, paths: list[list[int]]) -> Tensor:
        """Log-probabilities [N, V] of the next token as the request samples it, without a grammar."""
        shaped = shape(logits, [Row(self._context, path) for path in paths])
        return torch.log_softmax(shaped.float() / (self._params.temperature or 1.0), -1)

    def score(self, tree: AnswerTree, trie: TokenTrie) -> NodeScores:
        return score_nodes(trie, self.end_ids, self._rows(tree, trie), best=self._params.greedy)

    def _rows(self, tree: AnswerTree, trie: TokenTrie) -> Iterator[tuple[int, Tensor]]:
        """The trie's nodes in its own order: node i of the trie is node i - 1 of the tree, as far as all run."""
        wanted, parents = rows_to_score(trie, self.end_ids), trie.parents()
        places = {0: ROOT} | {node: number for number, node in enumerate(wanted[1:])}
        paths: dict[int, list[int]] = {0: []}
        yield 0, self.logprobs(tree.root_logits, [[]])[0]
        for at in range(1, len(wanted), MAX_FORWARD_NODES):
            part = wanted[at : at + MAX_FORWARD_NODES]
            for node in part:
                paths[node] = [*paths[int(parents[node])], int(trie.tokens[node])]
            logits = tree.run([places[int(parents[node])] for node in part], [paths[node][-1] for node in part])
            yield from zip(part, self.logprobs(logits, [paths[node] for node in part]), strict=True)

    def _score(self, tree: AnswerTree, trie: TokenTrie) -> list[ConditionalStart]:
        scores = self.score(tree, trie)
        report = ConditionalReport(exact=True, error=0.0, scored_tokens=len(tree) + 1, answers=trie.num_items)
        answers = (ConditionalAnswer(trie, self._vocab, self.end_ids, scores) for _ in range(self._params.n))
        return [(answer, report) for answer in answers]

    def _draw(self, tree: AnswerTree, trie: TokenTrie | None) -> list[ConditionalStart]:
        """The answers themselves, each a trie of one item."""
        assert self._params.grammar is not None
        if trie is not None:
            allowed = TrieAnswer(trie, self._vocab, self.end_ids).allowed
        else:
            allowed = self._intake.grammars.constraint(self._params.grammar).allowed

        def logprobs(prefixes: list[Prefix]) -> Tensor:
            if prefixes[0].parent is None:
                return self.logprobs(tree.root_logits, [[]])
            parents = [each.parent.number - 1 for each in prefixes if each.parent is not None]
            logits = tree.run(parents, [each.path[-1] for each in prefixes])
            return self.logprobs(logits, [each.path for each in prefixes])

        room = self._driver.engine.max_length - len(self._ids)
        draws = RejectionDraws(allowed, logprobs, self.end_ids, min(self._params.max_tokens, room))
        seed = random.getrandbits(63) if self._params.seed is None else self._params.seed
        made: list[ConditionalStart] = []
        for index in range(self._params.n):
            rows, tries = draws.rows, draws.tries
            if not self._params.greedy:
                tokens = draws.draw(SeededRng(seed + index, len(self._ids), LOOK_AHEAD_STREAM))
            elif index == 0:
                tokens = draws.best()
            error = 0.0 if draws.exact else 1.0 if self._params.greedy else draws.error
            report = ConditionalReport(draws.exact, error, draws.rows - rows, tries=draws.tries - tries)
            one = TokenTrie.build([tokens[:-1]])
            made.append((ConditionalAnswer(one, self._vocab, self.end_ids, NodeScores.certain(one)), report))
        return made
