"""Drafts from another machine: how long a step waits for one, and how deep one is where target and server take turns.

A server with memory of its own drafts beside the target's steps, and waiting can save one step at most. One on the
target's memory bus slows these steps down (`Slowdown`); where that is more than a little, it drafts while the target
waits, as a draft model in the target's own process does, as deep as that pays, and nothing beside the target's steps.
Knows figures, no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.decode.control.acceptance import DOUBT, Acceptance, RequestStats
from forerun.decode.control.cost import CostCurve, Slowdown
from forerun.decode.control.decision import OpenStep
from forerun.decode.control.start import too_early

MAX_TURN_DEPTH = 16  # of a draft that is waited for whole
NAMED_SHARE = 0.02  # of an answer's time, that drafts in turn may lose where the request names their drafter
MIN_TURN_PATH = 0.05  # probability of a path below which no deeper draft is planned for
MAX_RAW_PROB = 0.98  # that a server's own probability has to have: by it alone none is certain
# Of an answer, before a server is given its prompt that is not known to pay for such ones: edits copy from their third
# or fourth token on
FIRST_READ_TOKENS = 4
READ_ELSEWHERE_PRIOR_S = 4e-3  # of a server for a token of a prompt: 3 ms on one core, beside the target's steps more
TURN_PATIENCE = 2.0  # times what a draft is expected to take, until the step goes on without it


class Turn(NamedTuple):
    """A draft that the target waits for: the depth that pays most on average (0: none pays), what a step with it gains
    and takes, and how probable a path must be for the server to go on: single drafts may be deeper, or end before."""

    depth: int = 0
    gained_s: float = 0.0  # over plain steps for as many tokens
    draft_s: float = 0.0  # until it is here
    least: float = 1.0  # probability of a path
    tokens: float = 1.0  # expected of it, with the one that comes anyway
    sure_s: float = 0.0  # what a token of it gains by a lower bound of acceptance


def best_turn(
    probs: Sequence[float], plain_s: float, verify_s: Callable[[int], float], draft_s: Callable[[int], float]
) -> Turn:
    """`probs`: acceptance by depth, each given the one before; `verify_s`: seconds of a step by tokens of a sequence;
    `draft_s`: until a draft is here, by its depth."""
    best, best_rate = Turn(), 1.0 / plain_s
    path = tokens = 1.0
    for depth, prob in enumerate(probs, 1):
        path *= prob
        tokens += path
        waited_s = draft_s(depth)
        seconds = waited_s + verify_s(1 + depth)
        if tokens / seconds > best_rate:
            best_rate = tokens / seconds
            more_s = draft_s(1 + depth) - waited_s + verify_s(2 + depth) - verify_s(1 + depth)
            best = Turn(depth, tokens * plain_s - seconds, waited_s, min(1.0, best_rate * more_s), tokens)
        if path < MIN_TURN_PATH:
            break
    return best


class Waiting:
    """The controller's part for drafters on other machines."""

    target: CostCurve
    drafters: dict[str, CostCurve]
    slowdowns: dict[str, Slowdown]
    acceptance: Acceptance
    _step: OpenStep | None

    @property
    def models(self) -> set[str]:
        """Drafters that run a model, here or elsewhere: what free drafts gain says nothing of theirs."""
        return {*self.drafters, *self.slowdowns}

    def max_wait_s(self, s: RequestStats, drafter: str) -> tuple[float, float]:
        """How long a batch may wait for a sequence's draft from another machine, and the probability of its first
        token. A plain step meanwhile loses nothing of a draft whose first token is right, as the rest is verified in
        the next one: waiting saves a step then, and is lost where that token is wrong."""
        assert self._step is not None
        doubt, block = 0.0 if s.named else DOUBT, self.slowdowns[drafter].rounds.tokens > 1
        (first,) = self.acceptance.records[drafter].by_depth(s.kind, s.own[drafter], 1, doubt, block)[:1]
        return first * self._step.plain_s / len(self._step.stats), first

    def turn(self, s: RequestStats, drafter: str) -> Turn:
        """The best draft of a server that takes turns with the target; none where the two may compute at once. It is
        waited for, so it has to pay by a lower bound of acceptance; where the request names the drafter and its server
        has read the prompt the mean will do, as long as what drafts have lost stays small."""
        assert self._step is not None
        slowdown = self.slowdowns[drafter]
        if not slowdown.takes_turns:
            return Turn()
        low, mean = (self._best_turn(s, drafter, doubt) for doubt in (DOUBT, 0.0))
        if low.depth:
            return mean._replace(sure_s=low.gained_s / low.tokens)
        token_s = self._step.plain_s / len(self._step.stats)
        bearable_s = NAMED_SHARE * (s.plain_s + self.acceptance.expected_remaining(s) * token_s)
        known = s.named and s.own[drafter].runs > 0.0
        return mean if known and s.taken_s - s.plain_s + mean.draft_s <= bearable_s else low

    def turn_pays(self, s: RequestStats, drafter: str, covered: float = 0.0, offered: float = 0.0) -> bool:
        """Whether the target waits for a draft in turn (`turn`), beside what is drafted already: with the probability
        `covered` that has the next token, and `offered` tokens are expected of it. A server that has yet to read the
        prompt does so beside steps that it slows down, which each token left has to win back by its part: against what
        tokens take here without the server, as free drafters may do as well."""
        assert self._step is not None
        turn, plain_s = self.turn(s, drafter), self._step.plain_s
        record, own = self.acceptance.records[drafter], s.own[drafter]
        if not turn.depth:
            return False
        if own.runs:
            share = self.acceptance.gains.ratio(s.kind, s.gain, doubt=True)  # of what free drafts promise, that comes
            return s.named or turn.gained_s >= share * min(covered * (turn.tokens - 1.0), offered) * plain_s
        read_s = (record.read_s or self.slowdowns[drafter].extra_reading * READ_ELSEWHERE_PRIOR_S) * s.prompt_tokens
        if record.has_paid(s.kind) and not s.named:
            token_s = plain_s - turn.gained_s / turn.tokens
            more_s = plain_s - (1.0 + offered) * token_s  # that this step loses without it
            early = too_early(s, record, read_s, token_s, more_s, offered > 0.0)
        else:
            early = s.tokens < FIRST_READ_TOKENS and not s.named
        gained_s = turn.sure_s - (1.0 - s.share_not_free) * plain_s
        return not early and gained_s * max(1, self.acceptance.expected_remaining(s)) >= read_s

    def _best_turn(self, s: RequestStats, drafter: str, doubt: float) -> Turn:
        assert self._step is not None
        slowdown, n, plain_s = self.slowdowns[drafter], len(self._step.stats), self._step.plain_s
        block = slowdown.rounds.tokens > 1
        deepest = min(MAX_TURN_DEPTH, slowdown.rounds.tokens) if block else MAX_TURN_DEPTH
        probs = self.acceptance.records[drafter].by_depth(s.kind, s.own[drafter], deepest, doubt, block)
        rest_s = plain_s - self.target.seconds(n, n)
        return best_turn(probs, plain_s, lambda rows: rest_s + self.target.seconds(n * rows, n), slowdown.draft_s)

    def block_depth(self, s: RequestStats, drafter: str) -> int:
        """How deep to order where one round gives all of a draft, and takes longer the deeper that is."""
        return self._best_turn(s, drafter, 0.0).depth or self.slowdowns[drafter].rounds.tokens

    def turn_limits(self, s: RequestStats, drafter: str, turn: Turn) -> tuple[float, float]:
        """Of a draft in turn: how long to wait for the deepest one, and the least probability of a path by the server
        itself for which another round pays."""
        slowdown, own = self.slowdowns[drafter], s.own[drafter]
        patience_s = TURN_PATIENCE * slowdown.draft_s(MAX_TURN_DEPTH)
        raw = self.acceptance.records[drafter].raw_path_probs([turn.least] * turn.depth, own.factor)[-1]
        return patience_s, min(MAX_RAW_PROB, raw)
