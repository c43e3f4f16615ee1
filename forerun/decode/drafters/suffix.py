"""Suffix drafting: one suffix automaton over the prompts and answers of all requests of an engine.

Requests are indexed as they run, token by token, so a request finds its own earlier text too. What followed the longest
suffix of a request that occurred anywhere before, and how often, becomes a tree.

Memory is bounded by states: `MAX_STATES` of them, 111 bytes each on real text, where a token makes 1.3 of them and so
takes 145 bytes: 400 000 tokens in 58 MB. Text that is there already makes none. There are two generations; when the
young one has half of the states, the old one is dropped and the young one takes its place.

Called by one thread only. Knows no text and no model.
"""

from __future__ import annotations

from array import array
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from forerun.core import Draft
from forerun.decode.drafters.base import Drafter, DraftRequest, register
from forerun.decode.drafters.lookup import Child, grow_best_first

if TYPE_CHECKING:
    from forerun.decode.draft_context import DraftContext

MAX_STATES = 1 << 19
_MAX_READ_TOKENS = 256  # of all sequences in one step: long prompts must not hold up the others,
_MIN_READ_TOKENS = 32  # of one sequence, so that each can at least keep up with its answer
_MAX_ENDED_ANSWERS = 256  # that are still to be indexed
_MAX_COUNTED_SUFFIXES = 24  # of a token's context, longest first, whose counts are exact
_MAX_SEARCHED_TOKENS = 16  # of the end of a text, where its state is not known
_MAX_TRANSITIONS = 64  # of a state that is expanded: more predict nothing, and take long to sort
_MAX_CHILDREN = 4  # of a node: the most frequent continuations

# The probability of a continuation that followed a state n times of m is n / m * e / (e + doubt), with the evidence
# e = min(m, _MAX_EVIDENCE) and the doubt by length of the context (0 is unused); times _DISPUTED_FACTOR where
# continuations differ, as that is where new text starts. Measured on greedy answers of a 1.5B model.
_MAX_EVIDENCE = 4
_DOUBT = (0.0, 2.2, 1.0, 0.65, 0.5, 0.4, 0.35, 0.25, 0.18, 0.14, 0.13, 0.1, *(0.055,) * 12, 0.012)
_DISPUTED_FACTOR = 0.45
_ROOT = 0

SuffixMatch = tuple[int, int]  # a state, and how many of the last tokens led to it


class Automaton:
    """A suffix automaton of many strings, built online, with the number of occurrences of every state.

    A state is a set of substrings that occur at the same places; `link` leads to the longest suffix that occurs at
    more. Most states have one transition: it lies in two arrays, and only states with more have a dict.
    """

    def __init__(self) -> None:
        self.link = array("i", [-1])
        self.length = array("i", [0])  # of the longest substring of the state
        self.count = array("i", [0])
        self._token = array("i", [-1])  # of the only transition; -1: none
        self._target = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {}  # all transitions of the states that have more than one

    def __len__(self) -> int:
        return len(self.link)

    def step(self, state: int, token: int) -> int:
        """The state after `token`, or -1."""
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return more.get(token, -1) if more else -1

    def after(self, state: int) -> list[tuple[int, int, int]]:
        """(occurrences, token, next state) of what follows a state, most frequent first; [] if too many tokens do."""
        more = self._more.get(state)
        if more is None:
            target = self._target[state]
            return [(self.count[target], self._token[state], target)] if target >= 0 else []
        if len(more) > _MAX_TRANSITIONS:
            return []
        found = [(self.count[target], token, target) for token, target in more.items()]
        found.sort(reverse=True)
        return found

    def extend(self, last: int, token: int) -> int:
        """Append `token` to the string whose whole is in state `last`; the state of the longer whole."""
        state = self.step(last, token)
        if state < 0:
            state = self._append(last, token)
        elif self.length[state] != self.length[last] + 1:
            state = self._clone(last, token, state)
        counted, count, link = state, self.count, self.link
        for _ in range(_MAX_COUNTED_SUFFIXES):
            if counted <= _ROOT:
                break
            count[counted] += 1
            counted = link[counted]
        return state

    def find(self, tokens: list[int]) -> SuffixMatch:
        """The longest suffix of the tokens, up to a limit, that is in the automaton."""
        state, length = _ROOT, 0
        for token in tokens[-_MAX_SEARCHED_TOKENS:]:
            target = self.step(state, token)
            while target < 0 and state != _ROOT:
                state = self.link[state]
                length = self.length[state]
                target = self.step(state, token)
            if target >= 0:
                state, length = target, length + 1
        return state, length

    def followed(self, match: SuffixMatch) -> SuffixMatch:
        """The longest suffix of a match that something follows: the end of a string is a state that nothing does."""
        state, length = match
        while self._token[state] < 0 and state != _ROOT:
            state = self.link[state]
            length = self.length[state]
        return state, length

    def _add(self, length: int, link: int, count: int) -> int:
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self._token.append(-1)
        self._target.append(-1)
        return len(self.link) - 1

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (-1, token):
            self._token[state], self._target[state] = token, target
            if self._token[state] == token and state not in self._more:
                return
        more = self._more.get(state)
        if more is None:
            self._more[state] = {self._token[state]: self._target[state], token: target}
        else:
            more[token] = target

    def _append(self, last: int, token: int) -> int:
        state = self._add(self.length[last] + 1, _ROOT, 0)
        target = -1
        while last >= 0:
            target = self.step(last, token)
            if target >= 0:
                break
            self._set(last, token, state)
            last = self.link[last]
        if last >= 0:
            exact = self.length[target] == self.length[last] + 1
            self.link[state] = target if exact else self._clone(last, token, target)
        return state

    def _clone(self, last: int, token: int, state: int) -> int:
        """Split off the substrings of `state` that are no longer than what `last` and `token` make."""
        clone = self._add(self.length[last] + 1, self.link[state], self.count[state])
        self._token[clone], self._target[clone] = self._token[state], self._target[state]
        if state in self._more:
            self._more[clone] = self._more[state].copy()
        self.link[state] = clone
        while last >= 0 and self.step(last, token) == state:
            self._set(last, token, clone)
            last = self.link[last]
        return clone


class _Sequence:
    def __init__(self, size: int = 0) -> None:
        self.automaton: Automaton | None = None  # that holds its tokens
        self.size = size  # tokens indexed
        self.last = _ROOT  # state of all of them that are in this automaton


@register
class SuffixDrafter(Drafter):
    name = "suffix"
    cross_request = True

    def __init__(self, ctx: DraftContext, max_states: int = MAX_STATES) -> None:
        self._max_states = max_states // 2  # of each generation
        self._young, self._old = Automaton(), Automaton()
        self._sequences: dict[int, _Sequence] = {}
        self._ended: deque[tuple[_Sequence, list[int]]] = deque(maxlen=_MAX_ENDED_ANSWERS)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts, budget = [], _MAX_READ_TOKENS
        self._read_ended()
        for request in requests:
            seq = self._sequences.get(request.seq_id)
            if seq is None or seq.size > len(request.tokens):
                seq = self._sequences[request.seq_id] = _Sequence()
            budget -= self._read(seq, request.tokens, max(budget, _MIN_READ_TOKENS))
            automaton, match = self._match(seq, request.tokens)
            expand = partial(follow, automaton)
            drafts.append(grow_best_first(match, expand, request, self.name) if match[1] else Draft())
        return drafts

    def finish(self, seq_id: int, tokens: list[int], num_prompt: int) -> None:
        """Answers that ended are indexed by the next `propose`: without one they must not cost time."""
        seq = self._sequences.pop(seq_id, None) or _Sequence(max(0, len(tokens) - _MAX_READ_TOKENS))
        self._ended.append((seq, tokens))

    def forget(self) -> None:
        self._young, self._old = Automaton(), Automaton()
        self._ended.clear()

    def _read_ended(self) -> None:
        budget = _MAX_READ_TOKENS
        while self._ended and budget > 0:
            budget -= self._read(*self._ended.popleft(), budget)

    def _read(self, seq: _Sequence, tokens: list[int], most: int) -> int:
        if len(self._young) >= self._max_states:
            self._young, self._old = Automaton(), self._young
        automaton, start = self._young, seq.size
        if seq.automaton is not automaton:
            seq.automaton, seq.last = automaton, _ROOT
        last, end = seq.last, min(len(tokens), start + most)
        for token in islice(tokens, start, end):
            last = automaton.extend(last, token)
        seq.last, seq.size = last, max(start, end)
        return seq.size - start

    def _match(self, seq: _Sequence, tokens: list[int]) -> tuple[Automaton, SuffixMatch]:
        """The longest suffix of the tokens that something follows, and the automaton it is in."""
        young, old = self._young, self._old
        if seq.size == len(tokens) and seq.automaton is young:
            match = young.followed((seq.last, young.length[seq.last]))
        else:
            match = young.followed(young.find(tokens))
        if len(old) > 1:
            other = old.followed(old.find(tokens))
            if other[1] > match[1]:
                return old, other
        return young, match


def follow(automaton: Automaton, match: SuffixMatch) -> list[Child[SuffixMatch]]:
    """What may follow a match, with probabilities."""
    state, length = match
    after = automaton.after(state)
    if not after:
        return []
    total = sum(count for count, _, _ in after)
    evidence = min(total, _MAX_EVIDENCE)
    factor = evidence / (evidence + _DOUBT[min(length, len(_DOUBT) - 1)]) / total
    if len(after) > 1:
        factor *= _DISPUTED_FACTOR
    return [(token, count * factor, (target, length + 1)) for count, token, target in after[:_MAX_CHILDREN]]
