"""Whose prompt tokens run next: fair shares between clients, and between the prompts of one client.

Prompt tokens are given out in portions. The client that has been given least for its weight is next (virtual time, as
in fair queueing); a client that comes back from a pause starts where the others are, so that idling earns nothing. Of
its prompts the one with the fewest tokens left gets the portion, so that a short request does not wait for a long one;
but a quarter of the client's prompt tokens is the oldest prompt's, however many short ones arrive: a prompt that is the
oldest is complete when at most four times its own tokens have run. Knows sequences by their tokens and arrival only: no
pages, no steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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


@dataclass
class _Own:
    """One client's prompts in two orders, as heaps; what has left or changed its place is passed over."""

    client: Client
    keys: dict[Sequence, _Keys] = field(default_factory=dict)  # of those that are in line
    by_age: list[tuple[tuple[float, ...], Sequence]] = field(default_factory=list)
    by_length: list[tuple[tuple[float, ...], Sequence]] = field(default_factory=list)

    @property
    def oldest(self) -> Sequence:
        while self.by_age[0][1] not in self.keys:
            heapq.heappop(self.by_age)
        return self.by_age[0][1]

    @property
    def shortest(self) -> Sequence:
        while (found := self.keys.get(self.by_length[0][1])) is None or found.shortest != self.by_length[0][0]:
            heapq.heappop(self.by_length)
        return self.by_length[0][1]


class PromptLine:
    """The prompts of one step, in line for its portions: a hundred are ordered once, and asked for dozens of times."""

    def __init__(self, shares: FairShares, prompts: Iterable[Sequence]) -> None:
        self._shares, self._own = shares, dict[str, _Own]()
        for seq in prompts:
            client = seq.request.client
            if client.name not in self._own:
                self._own[client.name] = _Own(client)
            self._own[client.name].keys[seq] = _Keys.of(seq)
        for own in self._own.values():
            own.by_age = [(keys.age, seq) for seq, keys in own.keys.items()]
            own.by_length = [(keys.shortest, seq) for seq, keys in own.keys.items()]
            heapq.heapify(own.by_age)
            heapq.heapify(own.by_length)

    def __bool__(self) -> bool:
        return bool(self._own)

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(own.keys for own in self._own.values())

    def next(self) -> Sequence:
        """The sequence whose prompt gets the next portion."""
        client = next(iter(self._own))
        if len(self._own) > 1:
            client = min(self._own, key=self._precedence)
        own = self._own[client]
        return own.oldest if self._shares.account(own.client).owed >= MIN_PORTION_TOKENS else own.shortest

    def give(self, seq: Sequence, tokens: int) -> None:
        """A portion of these prompts' tokens is for this one, which is in line."""
        account = self._shares.account(seq.request.client)
        oldest = self._own[seq.request.client.name].oldest
        owed = account.owed + OLDEST_SHARE * tokens - (tokens if seq is oldest else 0)
        account.owed = max(0.0, min(MAX_OWED_TOKENS, owed))
        self._shares.charge(seq.request.client, tokens)

    def admitted(self, seq: Sequence) -> None:
        """How much of its prompt is cached is known now."""
        own, keys = self._own[seq.request.client.name], _Keys.of(seq)
        if own.keys[seq].shortest != keys.shortest:
            own.keys[seq] = keys
            heapq.heappush(own.by_length, (keys.shortest, seq))

    def leave(self, seq: Sequence) -> None:
        """It gets nothing more in this step."""
        own = self._own[seq.request.client.name]
        del own.keys[seq]
        if not own.keys:
            del self._own[seq.request.client.name]

    def _precedence(self, client: str) -> tuple[float, int]:
        own = self._own[client]
        return self._shares.account(own.client).virtual_time, min(s.prompt_left for s in own.keys)


class FairShares:
    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # by the client's name
        self._now = 0.0  # virtual time: of the active client that has been given least

    def begin_step(self, sequences: Iterable[Sequence]) -> None:
        """`sequences`: all that run or wait."""
        clients = {seq.request.client.name: seq.request.client for seq in sequences}
        if clients:
            self._now = min(self.account(client).virtual_time for client in clients.values())

    def charge(self, client: Client, tokens: int) -> None:
        """Tokens of a client ran, of a prompt or of an answer."""
        self.account(client).virtual_time += tokens / client.weight

    def account(self, client: Client) -> _Account:
        account = self._accounts.setdefault(client.name, _Account(self._now))
        account.virtual_time = max(account.virtual_time, self._now)
        return account
