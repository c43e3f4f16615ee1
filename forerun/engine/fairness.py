"""Whose prompt tokens run next: fair shares between clients, and between the prompts of one client.

Prompt tokens are given out in portions. The client that has been given least for its weight is next (virtual time, as
in fair queueing); a client that comes back from a pause starts where the others are, so that idling earns nothing. Of
its prompts the one with the fewest tokens left gets the portion, so that a short request does not wait for a long one;
but a quarter of the client's prompt tokens is the oldest prompt's, however many short ones arrive: a prompt that is the
oldest is complete when at most four times its own tokens have run. Knows sequences by their tokens and arrival only: no
pages, no steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from forerun.engine.sequence import Client, Sequence

OLDEST_SHARE = 0.25  # of a client's prompt tokens
MIN_PORTION_TOKENS = 16  # a smaller portion saves no time
MAX_OWED_TOKENS = 64  # to the oldest prompt: few enough that a short one never waits for long
PORTIONS_PER_STEP = 8  # enough for several clients and prompts to have a part of each step


def portion(budget: int) -> int:
    """Tokens that are given out at once, of so many in this step."""
    return max(MIN_PORTION_TOKENS, -(-budget // PORTIONS_PER_STEP))


@dataclass
class _Account:
    virtual_time: float  # tokens that ran, divided by the weight
    owed: float = 0.0  # tokens of the oldest prompt's share that went to others


class _Keys(NamedTuple):
    """By which prompts are ordered, the smallest first. An answer that was preempted goes on before prompts of new
    ones: its reader waits. A provisional sequence comes before its final one."""

    age: tuple[float, ...]
    shortest: tuple[float, ...]

    @classmethod
    def of(cls, seq: Sequence) -> _Keys:
        new, age = seq.num_generated == 0, (seq.request.arrived, seq.final is None, seq.id)
        return cls((new, *age), (new, seq.prompt_left, *age))


class FairShares:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # by the client's name
        self._now = 0.0  # virtual time: of the active client that has been given least
        self._keys: dict[Sequence, _Keys] = {}  # of this step: a hundred prompts are asked for dozens of times

    def begin_step(self, sequences: Collection[Sequence]) -> None:
        """`sequences`: all that run or wait."""
        self._keys.clear()
        if sequences:
            clients = {seq.request.client for seq in sequences}
            self._now = min(self._account(client).virtual_time for client in clients)

    def charge(self, client: Client, tokens: int) -> None:
        """Tokens of a client ran, of a prompt or of an answer."""
        self._account(client).virtual_time += tokens / client.weight

    def next(self, candidates: Collection[Sequence]) -> Sequence:
        """The sequence whose prompt gets the next portion."""
        by_client: dict[Client, list[Sequence]] = {}
        for seq in candidates:
            by_client.setdefault(seq.request.client, []).append(seq)
        client = next(iter(by_client))
        if len(by_client) > 1:
            client = min(by_client, key=lambda c: (self._account(c).virtual_time, self._fewest(by_client[c])))
        own = by_client[client]
        return min(own, key=self._age if self._account(client).owed >= MIN_PORTION_TOKENS else self._shortest)

    def give(self, seq: Sequence, tokens: int, candidates: Collection[Sequence]) -> None:
        """A portion of these candidates' prompt tokens is for this one."""
        client = seq.request.client
        own = [s for s in candidates if s.request.client == client]
        account, oldest = self._account(client), min(own, key=self._age)
        owed = account.owed + OLDEST_SHARE * tokens - (tokens if seq is oldest else 0)
        account.owed = max(0.0, min(MAX_OWED_TOKENS, owed))
        self.charge(client, tokens)

    def admitted(self, seq: Sequence) -> None:
        """How much of its prompt is cached is known now."""
        self._keys.pop(seq, None)

    def _fewest(self, own: list[Sequence]) -> int:
        return min(s.prompt_left for s in own)

    def _age(self, seq: Sequence) -> tuple[float, ...]:
        return (self._keys.get(seq) or self._key(seq)).age

    def _shortest(self, seq: Sequence) -> tuple[float, ...]:
        return (self._keys.get(seq) or self._key(seq)).shortest

    def _key(self, seq: Sequence) -> _Keys:
        found = self._keys[seq] = _Keys.of(seq)
        return found

    def _account(self, client: Client) -> _Account:
        account = self._accounts.setdefault(client.name, _Account(self._now))
        account.virtual_time = max(account.virtual_time, self._now)
        return account
